"""amem's functions, over a library that does as the test tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fake_library
from fake_library import result, run


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
    unchanged = [0.0, 0, 0, False]
    assert result(script, folder) == [[0.25, 4096, 512, True], unchanged, [0.5, 8192, 1024, True], unchanged]


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
read, states = _api._read_stats, []
def interrupted(library):
    _api._read_stats = read
    states.append(amem.state().name)
    raise KeyboardInterrupt
_api._read_stats = interrupted
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


def test_a_child_forked_during_a_pause_does_not_hang(folder: Path) -> None:
    script = """
import os, signal, threading
from amem import _api
amem.enable()
_api._transition.acquire()  # as another thread in the middle of a pause has
child = os.fork()
if child == 0:
    signal.alarm(10)
    amem.pause()
    os._exit(7)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    assert result(script, folder) == 7
