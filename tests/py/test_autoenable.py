"""AMEM_ENABLE, as the wheel's .pth file hands it on while Python starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from amem import _env

import fake_library
from fake_library import ROOT, result, run

SCRIPT = """
import amem._autoenable
print(json.dumps(amem.state().name))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lib")
    fake_library.build(folder)
    return folder


@pytest.mark.parametrize("value", ["1", "true", "on", "yes", "True", "ON", "Yes"])
def test_on(folder: Path, value: str) -> None:
    assert result(SCRIPT, folder, AMEM_ENABLE=value) == "ACTIVE"


@pytest.mark.parametrize("value", ["0", "", "false", "off", "no", "OFF", "No"])
def test_off_is_silent(folder: Path, value: str) -> None:
    done = run(SCRIPT, folder, AMEM_ENABLE=value)
    assert (done.returncode, done.stdout, done.stderr) == (0, '"OFF"\n', "")


def test_unset_is_off(folder: Path) -> None:
    assert result(SCRIPT, folder) == "OFF"


SPELLINGS = "say 1, on, true, yes for on, 0, off, false, no for off"


@pytest.mark.parametrize("value", ["2", "ture"])
def test_another_value_is_reported_and_enables_nothing(folder: Path, value: str) -> None:
    done = run(SCRIPT, folder, AMEM_ENABLE=value)
    assert done.returncode == 0
    assert done.stdout == '"OFF"\n'
    assert done.stderr == f"amem: AMEM_ENABLE={value} is taken as off: {SPELLINGS}\n"


def test_a_failure_of_the_library_is_one_line_and_no_more(folder: Path) -> None:
    done = run(SCRIPT, folder, AMEM_ENABLE="1", FAKE_ENABLE="2")
    assert done.returncode == 0
    assert done.stdout == '"OFF"\n'
    assert done.stderr == "amem: not enabled: fake: status 2\n"


def test_a_missing_library_is_one_line_and_no_more(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, AMEM_ENABLE="1")
    assert done.returncode == 0
    assert done.stderr.startswith("amem: not enabled: ")
    assert str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_imports_little(folder: Path) -> None:
    script = """
import importlib, os
# What the test itself brings in must not count.
for name in [name for name in sys.modules if name.partition(".")[0] in ("amem", "json", "re", "enum")]:
    del sys.modules[name]
before = set(sys.modules)
importlib.import_module("amem._autoenable")
print(*sorted(set(sys.modules) - before))
"""
    done = run(script, folder, AMEM_ENABLE="1")
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert "amem._library" in imported
    assert {name.partition(".")[0] for name in imported} <= {"amem", "ctypes", "_ctypes", "struct", "_struct"}


ENABEL = "amem: AMEM_ENABEL is set, and amem has no such variable; is AMEM_ENABLE meant?\n"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"AMEM_ENABEL": "1"}, ENABEL),
        ({"AMEM_ENABEL": ""}, ENABEL),
        ({"AMEM_ENABLED": "1", "AMEM_COMPAT_TMS": "1"}, "amem has no such variable; is AMEM_ENABLE meant?\n"),
        ({"AMEM_COMPAT": "1"}, "amem: AMEM_COMPAT is set, and amem has no such variable; is AMEM_COMPAT_TMS meant?\n"),
        ({"AMEM_SIM_MEMORY": "5", "AMEM_TEST_X": "1", "AMEM_TIMEOUT_S": "5"}, ""),
        # The library says these, where it is loaded.
        ({"AMEM_LGO": "debug"}, ""),
        ({"AMEM_COMPAT": "1", "AMEM_ENABLE": "1"}, ""),
        ({"AMEM_ENABEL": "1", "LD_PRELOAD": "FOLDER/libamem_hook.so"}, ""),
    ],
)
def test_unknown_names_that_keep_amem_out_are_warned_of(folder: Path, env: dict[str, str], said: str) -> None:
    env = {name: value.replace("FOLDER", str(folder)) for name, value in env.items()}
    done = run(SCRIPT, folder, **env)
    assert done.returncode == 0
    assert done.stderr.endswith(said) and done.stderr.count("\n") == bool(said), done.stderr


def test_the_names_that_are_known_are_those_of_the_readme() -> None:
    rows = re.findall(r"^\| `(AMEM_\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows and rows == list(_env.KNOWN)


WHY = """
import amem._autoenable
try:
    amem.pause()
except amem.NotEnabledError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"AMEM_ENABLE": "ture"}, "AMEM_ENABLE=ture is taken as off"),
        ({"AMEM_ENABEL": "1"}, "AMEM_ENABEL is set, and amem has no such variable"),
        ({"AMEM_ENABLE": "1", "FAKE_ENABLE": "2"}, "it could not be enabled: fake: status 2"),
        ({"AMEM_ENABLE": "1", "AMEM_LIBRARY_DIR": "/nowhere"}, "/nowhere/libamem_hook.so does not exist"),
    ],
)
def test_later_errors_say_why_amem_could_not_be_enabled(folder: Path, env: dict[str, str], why: str) -> None:
    message = run(WHY, folder, **env).stdout
    assert "amem.enable()" in message
    assert message.count(why) == 1, message


def test_a_pth_file_that_was_not_read_is_why(folder: Path) -> None:
    done = run(WHY.replace("import amem._autoenable", ""), folder, AMEM_ENABLE="1")
    assert "did not read the .pth file" in done.stdout


def test_amem_that_was_enabled_at_last_has_no_why(folder: Path) -> None:
    script = """
import os
import amem._autoenable
from amem import _env
seen = [_env.why_not_enabled()]
del os.environ["FAKE_ENABLE"]
amem.enable()
print(json.dumps([*seen, _env.why_not_enabled()]))
"""
    before, after = result(script, folder, AMEM_ENABLE="1", FAKE_ENABLE="2")
    assert before == "it could not be enabled: fake: status 2"
    assert after is None


COMPAT = """
import amem._autoenable
try:
    import torch_memory_saver
    print(json.dumps([amem.state().name, type(torch_memory_saver.torch_memory_saver).__module__]))
except ImportError:
    print(json.dumps([amem.state().name, None]))
"""


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"AMEM_COMPAT_TMS": "1"}, ["OFF", "amem._tms"]),
        ({"AMEM_COMPAT_TMS": "on", "AMEM_ENABLE": "1"}, ["ACTIVE", "amem._tms"]),
        ({"AMEM_COMPAT_TMS": "0", "AMEM_ENABLE": "1"}, ["ACTIVE", None]),
        ({}, ["OFF", None]),
    ],
)
def test_compat_is_a_switch_of_its_own(folder: Path, env: dict[str, str], found: list[str]) -> None:
    assert result(COMPAT, folder, **env) == found


def test_another_value_of_compat_is_reported(folder: Path) -> None:
    done = run(COMPAT, folder, AMEM_COMPAT_TMS="ture")
    assert done.stdout == '["OFF", null]\n'
    assert done.stderr == f"amem: AMEM_COMPAT_TMS=ture is taken as off: {SPELLINGS}\n"


def test_a_preloaded_torch_memory_saver_is_one_line_and_no_more(folder: Path) -> None:
    script = "import os\nos.environ['LD_PRELOAD'] = '/x/torch_memory_saver_hook_mode_preload.abi3.so'\n"
    done = run(script + COMPAT, folder, AMEM_COMPAT_TMS="1")
    assert done.stdout == '["OFF", null]\n'
    assert "LD_PRELOAD has /x/torch_memory_saver_hook_mode_preload.abi3.so" in done.stderr
    assert done.stderr.count("\n") == 1


def test_compat_unused_imports_nothing_of_its_implementation(folder: Path) -> None:
    script = """
import amem._autoenable
import colorsys
print(json.dumps([name for name in ("amem._tms", "amem._regions", "ctypes", "torch") if name in sys.modules]))
"""
    assert result(script, folder, AMEM_COMPAT_TMS="1") == []
