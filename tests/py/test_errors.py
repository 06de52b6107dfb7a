"""Each status of the library becomes an exception of its own class."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from amem import errors

import fake_library
import fake_torch
from fake_library import ROOT, result, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lib")
    fake_library.build(folder)
    return folder


def header_statuses() -> dict[str, int]:
    """AMEM_ERROR_NAME -> value, as amem.h has them."""
    text = (ROOT / "golib" / "hook" / "amem.h").read_text()
    return {name: int(value) for name, value in re.findall(r"AMEM_ERROR_(\w+) = (\d+)", text)}


# Where the header's name and the class's differ by more than spelling.
RENAMED = {"TIMEOUT": "DeadlineError"}


def class_name(status_name: str) -> str:
    return RENAMED.get(status_name) or status_name.replace("_", "") + "Error"


def test_every_status_of_the_header_has_the_class_of_its_name() -> None:
    expected = {value: class_name(name).lower() for name, value in header_statuses().items()}
    assert expected == {status: cls.__name__.lower() for status, cls in errors.BY_STATUS.items()}


def test_library_statuses_raise_their_class_with_the_library_message(folder: Path) -> None:
    script = """
from amem.errors import BY_STATUS
amem.enable()
found = {}
for status in [*BY_STATUS, 99]:
    try:
        amem.pause(f"status={status}")
    except amem.AmemError as error:
        found[status] = [type(error).__name__, error.status, str(error)]
print(json.dumps(found))
"""
    found = result(script, folder)
    assert set(found) == {str(status) for status in [*errors.BY_STATUS, 99]}
    for text, (name, status, message) in found.items():
        assert status == int(text)
        assert message.startswith(f"fake: status {text}")
        wanted = errors.BY_STATUS.get(int(text), errors.AmemError)
        assert name == wanted.__name__


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.InvalidArgumentError, ValueError),
        (errors.DeadlineError, TimeoutError),
        (errors.OutOfMemoryError, MemoryError),
        (errors.HostMemoryError, MemoryError),
    ],
)
def test_errors_are_also_the_builtin_that_callers_expect(cls: type[errors.AmemError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="why"):
        raise errors.from_status(cls.status, "why")


@pytest.mark.parametrize("status", [*errors.BY_STATUS, 99])
def test_errors_survive_the_way_from_a_worker_to_the_driver(status: int) -> None:
    error = pickle.loads(pickle.dumps(errors.from_status(status, "what and why")))
    assert type(error) is errors.BY_STATUS.get(status, errors.AmemError)
    assert str(error) == "what and why"
    assert error.status == status


OUT_OF_MEMORY = "resume: GPU 3 has too little memory: free some and call again"
FIGURES = '{"device": 3, "needed_bytes": 65536, "free_bytes": 1024}'
RESUME = """
amem.enable()
amem.pause()
try:
    amem.resume()
except amem.OutOfMemoryError as raised:
    error = raised
"""


def test_out_of_memory_has_its_figures_whatever_its_message_says(folder: Path) -> None:
    script = RESUME + "print(json.dumps([error.needed, error.free, error.device, error.status, amem.state().name]))"
    found = result(script, folder, FAKE_RESUME="9", FAKE_MESSAGE=OUT_OF_MEMORY, FAKE_FIGURES=FIGURES)
    assert found == [65536, 1024, 3, 9, "PAUSED"]


def test_out_of_memory_without_figures_has_none(folder: Path) -> None:
    script = RESUME + "print(json.dumps([error.needed, error.free, error.device, error.figures]))"
    assert result(script, folder, FAKE_RESUME="9") == [None, None, None, {}]


def test_figures_survive_the_way_from_a_worker_to_the_driver() -> None:
    waiting = [{"pid": 7, "group": 100}]
    timeout = pickle.loads(pickle.dumps(errors.from_status(8, "why", {"waiting_for": waiting})))
    assert isinstance(timeout, errors.DeadlineError) and timeout.waiting_for == waiting
    disk = pickle.loads(pickle.dumps(errors.from_status(10, "why", {"needed_bytes": 5, "free_bytes": 2})))
    assert isinstance(disk, errors.HostMemoryError) and (disk.needed, disk.free) == (5, 2)


def test_out_of_memory_is_torchs_too_where_torch_is_imported(folder: Path) -> None:
    script = """
import pickle
amem.enable()
found = []
for torch in (None, fake_torch):
    if torch:
        torch.install()
    amem.pause()
    for _ in range(2):  # again, since nothing is lost
        try:
            amem.resume()
        except amem.OutOfMemoryError as error:
            assert isinstance(error, (amem.AmemError, MemoryError))
            again = pickle.loads(pickle.dumps(error))
            assert type(again) is type(error) and again.needed == 65536 and again.status == 9
            found.append([isinstance(error, fake_torch.OutOfMemoryError), repr(error)])
print(json.dumps(found))
"""
    prelude = fake_torch.PRELUDE.replace("fake_torch.install()", "")
    found = result(prelude + script, folder, FAKE_RESUME="9", FAKE_MESSAGE=OUT_OF_MEMORY, FAKE_FIGURES=FIGURES)
    text = f"OutOfMemoryError({OUT_OF_MEMORY!r})"
    assert found == [[False, text]] * 2 + [[True, text]] * 2


def test_amem_does_not_import_torch_for_an_error(folder: Path) -> None:
    script = RESUME + "print(json.dumps('torch' in sys.modules))"
    assert result(script, folder, FAKE_RESUME="9") is False


def test_a_failure_without_a_message_still_names_the_call(folder: Path) -> None:
    done = run("amem.enable(); amem.pause('status=11')", folder, FAKE_SILENT="1")
    assert "CudaError: amem_pause failed with status 11" in done.stderr


def test_not_enabled_says_how_to_enable(folder: Path) -> None:
    script = """
found = []
def attempt(function):
    try:
        function()
    except amem.NotEnabledError as error:
        found.append(str(error))
attempt(amem.pause)
attempt(amem.resume)
amem.get_group_id()  # loads the library, enables nothing
attempt(amem.pause)
print(json.dumps(found))
"""
    found = result(script, folder)
    assert len(found) == 3
    for message in found:
        assert "amem.enable()" in message
        assert "AMEM_ENABLE=1" in message


def test_statistics_that_fail_are_an_error(folder: Path) -> None:
    done = run("amem.enable(); amem.stats()", folder, FAKE_STATS="15")
    assert "InternalError: fake: status 15" in done.stderr


def test_a_missing_library_says_where_it_was_expected(tmp_path: Path) -> None:
    done = run("amem.enable()", tmp_path)
    assert "CoreError" in done.stderr
    assert str(tmp_path / "libamem_hook.so") in done.stderr


def test_a_library_of_another_release_is_refused(tmp_path: Path) -> None:
    fake_library.build(tmp_path, release="9.9.9")
    done = run("amem.enable()", tmp_path)
    assert "CoreError" in done.stderr
    assert "9.9.9" in done.stderr


def test_a_file_that_is_not_a_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libamem_hook.so").write_text("not a library")
    done = run("amem.enable()", tmp_path)
    assert "CoreError: can't load" in done.stderr
