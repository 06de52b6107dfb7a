"""amem's functions, over a library that does as the test tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fake_library
from fake_library import result, run

# Two tags, as a program in C would make them.
REGIONS = """
import ctypes
from amem import _library
for tag in (b"weights", b"kv"):
    assert _library.load().amem_region(tag, 1, ctypes.byref(_library.RegionFunctions())) == 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lib")
    fake_library.build(folder)
    return folder


def test_import_loads_neither_a_library_nor_torch(folder: Path) -> None:
    script = """
maps = open("/proc/self/maps").read()
print(json.dumps({
    "mapped": [name for name in ("libamem", "libnccl", "libcuda") if name in maps],
    "imported": [name for name in ("torch", "ctypes", "logging", "dataclasses") if name in sys.modules],
    "state": amem.state().name,
    "mapped by state": "libamem" in open("/proc/self/maps").read(),
}))
"""
    found = result(script, folder)
    assert found == {"mapped": [], "imported": [], "state": "OFF", "mapped by state": False}


def test_all_public_names_are_there(folder: Path) -> None:
    missing = result("print(json.dumps([n for n in amem.__all__ if getattr(amem, n, None) is None]))", folder)
    assert missing == []
    assert "AttributeError: module 'amem' has no attribute 'pose'" in run("amem.pose", folder).stderr


def test_pause_and_resume_report_what_they_did(folder: Path) -> None:
    script = """
import dataclasses
amem.enable()
steps = [amem.pause(), amem.pause("nccl"), amem.resume("nccl"), amem.resume()]
print(json.dumps([dataclasses.astuple(step) for step in steps]))
"""
    unchanged = [0.0, 0, 0, False, [], 0, []]
    paused = [0.25, 4096, 512, True, ["nccl"], 1024, [[7, 1, 1024]]]
    assert result(script, folder) == [paused, unchanged, [0.5, 8192, 1024, True, [], 0, []], unchanged]


def test_a_report_that_is_missing_is_an_error(folder: Path) -> None:
    assert "InternalError: amem_pause did not say" in run("amem.enable(); amem.pause()", folder, FAKE_SILENT="1").stderr


def test_each_thread_gets_the_report_of_its_own_call(folder: Path) -> None:
    script = """
import threading
amem.enable()
amem.pause()
reports = []
thread = threading.Thread(target=lambda: reports.append(amem.resume()))
thread.start()
thread.join()
print(json.dumps([reports[0].bytes, amem.resume().changed]))
"""
    assert result(script, folder) == [8192, False]


def test_tags_pause_and_resume_on_their_own(folder: Path) -> None:
    script = (
        REGIONS
        + """
def states():
    return [amem.state(tag).name for tag in (None, "nccl", "weights", "kv", "other")]
amem.enable()
seen = [states()]
for step in (amem.pause, amem.resume):
    for tags in [("weights",), ("kv", "nccl"), ()]:
        step(*tags)
        seen.append(states())
print(json.dumps(seen))
"""
    )
    active, paused = "ACTIVE", "PAUSED"
    assert result(script, folder) == [
        [active, active, active, active, "OFF"],
        [paused, active, paused, active, "OFF"],
        [paused, paused, paused, paused, "OFF"],
        [paused, paused, paused, paused, "OFF"],
        [paused, paused, active, paused, "OFF"],
        [active, active, active, active, "OFF"],
        [active, active, active, active, "OFF"],
    ]


def test_regions_pause_where_nccl_is_not_enabled(folder: Path) -> None:
    script = REGIONS + "amem.pause('kv'); print(json.dumps([amem.state('kv').name, amem.state('nccl').name]))"
    assert result(script, folder) == ["PAUSED", "OFF"]


def test_the_state_of_a_tag_needs_no_library(folder: Path) -> None:
    assert result("print(json.dumps([amem.state('weights').name]))", folder) == ["OFF"]
    assert "InvalidArgumentError" in run("amem.state('a,b')", folder).stderr


def test_paused_takes_the_tags(folder: Path) -> None:
    script = (
        REGIONS
        + """
with amem.paused("kv"):
    inside = [amem.state("kv").name, amem.state("weights").name]
print(json.dumps([inside, amem.state("kv").name]))
"""
    )
    assert result(script, folder) == [["PAUSED", "ACTIVE"], "ACTIVE"]


def test_a_transition_can_not_be_altered(folder: Path) -> None:
    done = run("amem.enable(); amem.pause().bytes = 1", folder)
    assert "FrozenInstanceError" in done.stderr


def test_enable_twice_keeps_the_state(folder: Path) -> None:
    script = """
states = [amem.state().name]
for step in (amem.enable, amem.pause, amem.enable, amem.resume):
    step()
    states.append(amem.state().name)
print(json.dumps(states))
"""
    assert result(script, folder) == ["OFF", "ACTIVE", "PAUSED", "PAUSED", "ACTIVE"]


@pytest.mark.parametrize("tag", ["weights", "", "nccl,nccl", "nccl\0"])
def test_a_wrong_tag_is_a_value_error_and_changes_nothing(folder: Path, tag: str) -> None:
    script = f"""
amem.enable()
try:
    amem.pause({tag!r})
except ValueError as error:
    print(json.dumps([type(error).__name__, amem.state().name]))
"""
    assert result(script, folder) == ["InvalidArgumentError", "ACTIVE"]


def test_paused_resumes_after_the_body(folder: Path) -> None:
    script = """
amem.enable()
with amem.paused("nccl") as transition:
    inside = amem.state().name
print(json.dumps([inside, transition.bytes, amem.state().name]))
"""
    assert result(script, folder) == ["PAUSED", 4096, "ACTIVE"]


def test_paused_resumes_when_the_body_raises(folder: Path) -> None:
    script = """
amem.enable()
try:
    with amem.paused():
        raise KeyError("body")
except KeyError as error:
    print(json.dumps([str(error), amem.state().name]))
"""
    assert result(script, folder) == ["'body'", "ACTIVE"]


def test_paused_raises_the_failure_of_resume_over_that_of_the_body(folder: Path) -> None:
    script = """
amem.enable()
try:
    with amem.paused():
        raise KeyError("body")
except amem.OutOfMemoryError as error:
    print(json.dumps([str(error), repr(error.__context__), amem.state().name]))
"""
    found = result(script, folder, FAKE_RESUME="9")
    assert found == ["fake: status 9", "KeyError('body')", "PAUSED"]


def test_paused_resumes_when_interrupted_after_the_pause(folder: Path) -> None:
    script = """
from amem import _api
amem.enable()
transit, states = _api._transit, []
def interrupted(*arguments):
    _api._transit = transit
    transit(*arguments)
    states.append(amem.state().name)
    raise KeyboardInterrupt
_api._transit = interrupted
try:
    with amem.paused():
        states.append("the body ran")
except KeyboardInterrupt:
    states.append(amem.state().name)
print(json.dumps(states))
"""
    assert result(script, folder) == ["PAUSED", "ACTIVE"]


def test_the_body_does_not_run_when_the_pause_fails(folder: Path) -> None:
    script = """
amem.enable()
ran = False
try:
    with amem.paused("status=10"):
        ran = True
except amem.HostMemoryError:
    print(json.dumps([ran, amem.state().name]))
"""
    assert result(script, folder) == [False, "ACTIVE"]


def test_stats_are_parsed_and_their_text_is_freed(folder: Path) -> None:
    script = """
import ctypes
amem.enable()
stats = amem.stats()
frees = ctypes.CDLL("libamem_hook.so").fake_frees()
print(json.dumps([stats["state"], stats["last_pause"]["bytes"], frees]))
"""
    # Found by its soname: the library was loaded by its path.
    assert result(script, folder) == ["active", 4096, 1]


def test_host_memory_is_not_freed_while_paused(folder: Path) -> None:
    script = """
amem.enable()
amem.free_host_memory()
amem.pause()
try:
    amem.free_host_memory()
except amem.InvalidStateError as error:
    print(json.dumps(str(error)))
"""
    assert result(script, folder) == "fake: status 7"


def test_the_group_id_can_be_set_before_enable(folder: Path) -> None:
    script = """
before = amem.get_group_id()
amem.set_group_id(200)
print(json.dumps([before, amem.get_group_id()]))
"""
    assert result(script, folder) == [100, 200]


@pytest.mark.parametrize("group", [-1, 2**31, -(2**40)])
def test_a_wrong_group_id_is_refused(folder: Path, group: int) -> None:
    script = f"""
try:
    amem.set_group_id({group})
except amem.InvalidArgumentError:
    print(json.dumps(amem.get_group_id()))
"""
    assert result(script, folder) == 100


@pytest.mark.parametrize(("value", "warned"), [("0", True), ("1", False)])
def test_enable_warns_of_cumem_switched_off(folder: Path, value: str, warned: bool) -> None:
    done = run("amem.enable(); amem.enable()", folder, NCCL_CUMEM_ENABLE=value)
    assert done.returncode == 0
    assert done.stderr.count("unset NCCL_CUMEM_ENABLE") == warned


def test_a_library_loaded_before_is_used(folder: Path, tmp_path: Path) -> None:
    """LD_PRELOAD and the package must not end up with two hooks."""
    script = """
amem.enable()
import re
print(json.dumps(sorted(set(re.findall(r"/\\S*libamem_hook.so", open("/proc/self/maps").read())))))
"""
    preloaded = fake_library.build(tmp_path)
    assert result(script, folder, LD_PRELOAD=str(preloaded)) == [str(preloaded)]
