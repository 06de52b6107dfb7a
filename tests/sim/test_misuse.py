"""What goes wrong in use: each is an error of its own class that says what to do, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness import LIB, MIB, ROOT, SIM, environment, failure, needs_libraries, python, ranks, right, run

pytestmark = needs_libraries

OFF, ACTIVE = 0, 2

SMALL = {"NCCL_STANDIN_CHANNELS": "1", "NCCL_STANDIN_BUFFSIZE": "65536"}

PRELUDE = """
import ctypes, os, sys
import amem
from amem._cuda import Device, Driver
from amem._nccl import Communicator, Nccl
sim = os.environ["AMEM_SIM_LIBRARY_DIR"]

def raised(action):
    try:
        action()
    except amem.AmemError as error:
        print(type(error).__name__, error, sep=": ")
    else:
        print("no error")

def communicator():
    global device, nccl
    device = Device(Driver(os.path.join(sim, "libcuda.so.1")), 0)
    nccl = Nccl(os.path.join(sim, "libnccl.so.2"))
    return Communicator.connect(nccl, nccl.unique_id(), 0, 1)
"""


def script(sim_dir: Path, body: str, **changes: str) -> list[str]:
    """The lines that a process of one rank prints."""
    return python(PRELUDE + textwrap.dedent(body), environment(sim_dir, **changes)).splitlines()


# ---- enabled too late, or never ----


def test_enabled_after_nccl_has_begun(tmp_path: Path) -> None:
    body = """
    communicator()
    raised(amem.enable)
    raised(amem.pause)
    raised(amem.enable)
    print(amem.state().name, device.used_bytes() > 0)
    """
    *errors, last = script(tmp_path, body)
    for error in errors:
        assert error.startswith("TooLateError: ")
        assert "before the first NCCL communicator" in error
        assert "amem.enable()" in error and "AMEM_ENABLE=1" in error
    assert len(errors) == 3
    assert last == "OFF True"


def test_ranks_that_were_enabled_too_late_go_on_working() -> None:
    with ranks(2, SMALL) as group:
        group.init(ncomm=1, enable="never")
        right(group)
        failure(lambda: group.all("enable"), "TooLateError")
        failure(lambda: group.all("pause"), "TooLateError")
        right(group)
        group.comm_init()
        right(group, comm=1)


def test_not_enabled() -> None:
    with ranks(2, SMALL) as group:
        group.init(ncomm=1, enable="never")
        for verb in ("pause", "resume"):
            message = failure(lambda verb=verb: group.all(verb), "NotEnabledError")  # type: ignore[misc]
            assert "amem.enable()" in message
            assert "AMEM_ENABLE=1" in message
        assert group.all("state") == ["OFF", "OFF"]
        right(group)


@pytest.mark.parametrize("enabled", ["never", "too late"])
def test_regions_where_nccl_is_not_hooked(enabled: str) -> None:
    """A pause of all does not pass NCCL's memory over in silence; one that names the regions works."""
    with ranks(1, SMALL) as group:
        group.init(ncomm=1, enable="never")
        if enabled == "too late":
            failure(lambda: group.all("enable"), "TooLateError")
        p = group[0]
        nccl = p.call("meminfo")
        p.call("allocate", tag="weights", size=20 * MIB, seed=1)
        full = p.call("meminfo")
        assert nccl > 0 and p.call("tag_state", tag="nccl") == OFF
        message = failure(lambda: p.call("pause"), "TooLateError")
        assert "before the first NCCL communicator" in message
        assert p.call("meminfo") == full and p.call("tag_state", tag="weights") == ACTIVE
        for tags in (["weights"], []):
            assert p.call("pause", tags=["weights"])["tags"] == ["weights"]
            assert p.call("meminfo") == nccl
            assert p.call("resume", tags=tags)["tags"] == ["weights"]
            assert p.call("holds", tensor=0, seed=1)
        right(group)


def test_regions_where_nccl_has_no_cumem() -> None:
    with ranks(1, {**SMALL, "NCCL_CUMEM_ENABLE": "0"}) as group:
        group.init(ncomm=1)
        p = group[0]
        nccl = p.call("meminfo")
        p.call("allocate", tag="weights", size=20 * MIB, seed=1)
        message = failure(lambda: p.call("pause"), "NoCuMemError")
        assert "name their tags" in message
        assert p.call("meminfo") > nccl and p.call("tag_state", tag="weights") == ACTIVE
        assert p.call("pause", tags=["weights"])["tags"] == ["weights"]
        assert p.call("meminfo") == nccl
        p.call("resume")
        assert p.call("holds", tensor=0, seed=1)
        right(group)


def test_regions_without_nccl() -> None:
    with ranks(1, SMALL) as group:
        group.all("start_without_nccl", device=0)
        p = group[0]
        p.call("allocate", tag="weights", size=20 * MIB, seed=1)
        assert p.call("tag_state", tag="nccl") == OFF
        assert p.call("pause")["tags"] == ["weights"]
        assert p.call("meminfo") == 0
        assert p.call("resume")["tags"] == ["weights"]
        assert p.call("holds", tensor=0, seed=1)


# ---- what amem needs is not there ----


def test_no_nccl_in_the_process(tmp_path: Path) -> None:
    (error, state) = script(tmp_path, "amem.enable(); raised(amem.pause); print(amem.state().name)")
    assert error.startswith("NoNcclError: ")
    assert "libnccl.so.2" in error
    assert "import torch" in error
    assert state == "WAITING"


def test_pause_before_nccl_is_used_does_nothing(tmp_path: Path) -> None:
    body = """
    amem.enable()
    nccl = Nccl(os.path.join(sim, "libnccl.so.2"))
    print(nccl.version(), amem.pause().changed, amem.resume().changed, amem.state().name)
    raised(lambda: amem.pause("weights"))
    communicator()
    print(amem.pause().changed, amem.state().name, device.used_bytes())
    """
    first, second, third = script(tmp_path, body)
    assert first == "2.28.9 False False WAITING"
    assert second.startswith("InvalidArgumentError: ")
    assert "nccl" in second
    assert third == "True PAUSED 0"


def test_no_driver(tmp_path: Path) -> None:
    only_nccl = tmp_path / "nccl"
    only_nccl.mkdir()
    shutil.copy(SIM / "libnccl.so.2", only_nccl)
    body = """
    amem.enable()
    nccl = Nccl(os.path.join(sim, "libnccl.so.2"))
    try:
        nccl.unique_id()
    except RuntimeError as error:
        print("NCCL:", error)
    raised(amem.pause)
    """
    changes = {"AMEM_SIM_LIBRARY_DIR": str(only_nccl), "LD_LIBRARY_PATH": str(only_nccl)}
    nccl, error = script(tmp_path, body, **changes)
    assert nccl.startswith("NCCL: ")
    assert error.startswith("NoDriverError: ")
    assert "libcuda.so.1" in error


def test_no_device(tmp_path: Path) -> None:
    body = """
    amem.enable()
    ctypes.CDLL(os.path.join(sim, "libcuda.so.1"))
    nccl = Nccl(os.path.join(sim, "libnccl.so.2"))
    try:
        nccl.unique_id()
    except RuntimeError as error:
        print("NCCL:", error)
    raised(amem.pause)
    """
    nccl, error = script(tmp_path, body, AMEM_SIM_DEVICES="0")
    assert nccl.startswith("NCCL: ")
    assert "no device" in nccl
    assert error.startswith("NoDriverError: ")
    assert "CUDA_VISIBLE_DEVICES" in error


@pytest.mark.parametrize("comm", [False, True], ids=["before NCCL is used", "with a communicator"])
def test_cumem_switched_off(tmp_path: Path, comm: bool) -> None:
    body = f"""
    amem.enable()
    if {comm}:
        communicator()
        before = device.used_bytes()
    raised(amem.pause)
    print(amem.state().name, not {comm} or device.used_bytes() == before > 0)
    """
    error, state = script(tmp_path, body, NCCL_CUMEM_ENABLE="0")
    assert error.startswith("NoCuMemError: ")
    assert "NCCL_CUMEM_ENABLE" in error
    assert "unset it, or set it to 1" in error
    assert state.split()[1] == "True"


def test_ranks_without_cumem_go_on_working() -> None:
    with ranks(2, {**SMALL, "NCCL_CUMEM_ENABLE": "0"}) as group:
        group.init(ncomm=1)
        assert group.all("allreduce") == [0, 0]
        failure(lambda: group.all("pause"), "NoCuMemError")
        assert group.all("allreduce") == [0, 0]


# ---- the environment ----

WRONG = {
    "AMEM_GROUPID": ("-1", "ten", "2147483648", "1.5", "100 "),
    "AMEM_NCCL_OFFLOAD_FREE_TAG": ("1", "8", "all"),
    "AMEM_TIMEOUT_S": ("0", "-1", "soon", "nan", "inf", "1e9", "5s"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_in_the_environment(name: str, value: str, tmp_path: Path) -> None:
    (error,) = script(tmp_path, "raised(amem.enable)", **{name: value})
    assert error.startswith("InvalidArgumentError: ")
    assert f'{name}="{value}"' in error
    assert "it must be" in error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AMEM_GROUPID", "2147483647"),
        ("AMEM_NCCL_OFFLOAD_FREE_TAG", "0"),
        ("AMEM_TIMEOUT_S", "0.5"),
        ("AMEM_LOG", "off"),
        ("AMEM_LOG", "5"),
        ("GMM_LOG", "0"),
        ("AMEM_GROUPID", ""),
        ("AMEM_TIMEOUT_S", ""),
    ],
)
def test_a_value_at_the_edge_of_what_is_allowed(name: str, value: str, tmp_path: Path) -> None:
    assert script(tmp_path, "raised(amem.enable)", **{name: value}) == ["no error"]


def test_a_wrong_environment_leaves_nccl_alone(tmp_path: Path) -> None:
    body = """
    raised(amem.enable)
    communicator()
    raised(amem.pause)
    print(amem.state().name, device.used_bytes() > 0)
    """
    enable, pause, state = script(tmp_path, body, AMEM_TIMEOUT_S="soon")
    assert enable.startswith("InvalidArgumentError: ")
    assert pause.startswith("NotEnabledError: ")
    assert state == "OFF True"


def test_every_later_error_says_why_amem_could_not_be_enabled(tmp_path: Path) -> None:
    body = """
    raised(amem.enable)
    communicator()
    for call in (amem.pause, lambda: amem.pause("nccl"), lambda: amem.resume("weights"), amem.free_host_memory):
        raised(call)
    raised(lambda: amem.set_group_id(3))
    library = amem._library.loaded()
    library.amem_failure.restype = ctypes.c_char_p
    print(library.amem_failure().decode())
    """
    *errors, last = script(tmp_path, body, AMEM_TIMEOUT_S="soon")
    assert [error.partition(":")[0] for error in errors] == [
        "InvalidArgumentError",
        *["NotEnabledError"] * 4,
        "InvalidArgumentError",
    ]
    for said in (*errors, last):
        assert 'AMEM_TIMEOUT_S="soon" in the environment: it must be a number of seconds' in said
    body = """
    communicator()
    raised(amem.enable)
    library = amem._library.loaded()
    library.amem_failure.restype = ctypes.c_char_p
    print(library.amem_failure().decode())
    """
    error, last = script(tmp_path, body)
    assert error == f"TooLateError: {last}"
    body = "amem.enable(); library = amem._library.loaded(); library.amem_failure.restype = ctypes.c_char_p; "
    assert script(tmp_path, body + "print(library.amem_failure())") == ["b''"]


def test_a_switch_has_eight_spellings_in_any_case(tmp_path: Path) -> None:
    """The state of a process that is preloaded: 0 off, 1 enabled."""
    preload = str(LIB / "libamem_hook.so")
    body = "print(_library.loaded().amem_state())"
    program = "from amem import _library; " + body
    spellings = {True: "1 on true yes On TRUE yEs", False: "0 off false no OFF No"}
    for on, values in spellings.items():
        for value in values.split():
            for name, state in (("AMEM_ENABLE", on), ("AMEM_COMPAT_TMS", not on)):
                env = environment(tmp_path, LD_PRELOAD=preload, **{name: value})
                assert python(program, env) == f"{int(state)}\n", (name, value)
    for name in ("AMEM_ENABLE", "AMEM_COMPAT_TMS"):
        assert python(program, environment(tmp_path, LD_PRELOAD=preload, **{name: ""})) == "1\n"


def log_of(tmp_path: Path, body: str, **env: str) -> list[str]:
    """What a process says on stderr. It must print "right"."""
    program = PRELUDE + textwrap.dedent(body)
    env = environment(tmp_path, **env)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("name", "value", "allowed", "taken"),
    [
        ("AMEM_ARENA", "2", "1, on, true or yes", "on"),
        ("AMEM_HOST_PREALLOC", "maybe", "1, on, true or yes", "off"),
        ("AMEM_LOG", "loud", "off, error, warn, info, debug or trace", "warn"),
        ("AMEM_LOG", "6", "off, error, warn, info, debug or trace", "warn"),
        ("GMM_LOG", "info", "a level from 0 to 5", "2"),
    ],
)
def test_a_wrong_switch_or_log_level_costs_a_warning(
    tmp_path: Path, name: str, value: str, allowed: str, taken: str
) -> None:
    """And the feature is there, as where the variable is unset."""
    body = """
    amem.enable(), amem.enable()
    communicator()
    assert amem.pause().changed and device.used_bytes() == 0
    amem.resume()
    print("right")
    """
    (line,) = log_of(tmp_path, body, **{name: value})
    assert f'warn: {name}="{value}" in the environment is taken as {taken}: it must be {allowed}' in line


@pytest.mark.parametrize(("value", "direct"), [("No", True), ("off", True), ("YES", False), ("true", False)])
def test_the_arena_is_switched_by_any_spelling(tmp_path: Path, value: str, direct: bool) -> None:
    """Without it, each allocation of NCCL's is one of the driver's."""
    body = "c = communicator(); print(len(open(os.environ['AMEM_SIM_LOG']).read().split('cuMemCreate')) > 4)"
    log = str(tmp_path / "calls")
    assert script(tmp_path, body, AMEM_SIM_LOG=log) == ["True"]
    assert script(tmp_path, "amem.enable(); " + body, AMEM_SIM_LOG=log + "2", AMEM_ARENA=value) == [str(direct)]


def test_unknown_variables_are_told_once_with_the_nearest_name(tmp_path: Path) -> None:
    body = """
    amem.enable(), amem.enable()
    communicator()
    amem.pause(), amem.resume()
    print("right")
    """
    env = {"AMEM_TIMOUT_S": "5", "AMEM_GROUP_ID": "1", "AMEM_SIM_WHATEVER": "1", "AMEMX": "1", "AMEM_" + "X" * 100: ""}
    lines = log_of(tmp_path, body, **env)
    assert len(lines) == 3
    for name, nearest in (("AMEM_TIMOUT_S", "AMEM_TIMEOUT_S"), ("AMEM_GROUP_ID", "AMEM_GROUPID")):
        said = f"{name} is set, and amem has no such variable; is {nearest} meant?"
        assert any(said in line for line in lines)
    assert log_of(tmp_path, body, AMEM_LOG="error", **env) == []


def test_enabled_by_the_environment_with_a_wrong_value(tmp_path: Path) -> None:
    for value, complaint in (("maybe", "AMEM_ENABLE=maybe is taken as off"), ("1", 'AMEM_GROUPID="x"')):
        env = environment(tmp_path, AMEM_ENABLE=value, AMEM_GROUPID="x")
        done = subprocess.run(
            [sys.executable, "-c", "import amem._autoenable; print(amem.state().name)"],
            env=env,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0
        assert done.stdout == "OFF\n"
        assert complaint in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("variable", "value"), [("AMEM_LOG", "off"), ("GMM_LOG", "0")])
def test_a_log_that_is_off_is_silent(tmp_path: Path, variable: str, value: str) -> None:
    body = PRELUDE + textwrap.dedent("""
    amem.enable()
    communicator()
    amem.pause()
    try:
        Communicator.connect(nccl, nccl.unique_id(), 0, 1)
        raise SystemExit(0)
    finally:
        amem.resume()
    """)
    env = environment(tmp_path, **{variable: value})
    done = subprocess.run([sys.executable, "-c", body], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_log_tells_pause_and_resume(tmp_path: Path) -> None:
    body = PRELUDE + "amem.enable(); communicator(); amem.pause(); amem.resume()"
    env = environment(tmp_path, AMEM_LOG="info")
    done = subprocess.run([sys.executable, "-c", body], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert "hooked" in done.stderr
    assert "msg=paused" in done.stderr and "released_bytes=" in done.stderr
    assert "msg=resumed" in done.stderr


# ---- group ID ----


def test_a_group_id_after_the_first_allocation(tmp_path: Path) -> None:
    body = """
    amem.enable()
    amem.set_group_id(5)
    communicator()
    raised(lambda: amem.set_group_id(6))
    raised(lambda: amem.set_group_id(-3))
    print(amem.get_group_id(), amem.stats()["group"])
    """
    late, negative, group = script(tmp_path, body)
    assert late.startswith("InvalidStateError: ")
    assert "before the first communicator" in late
    assert negative.startswith("InvalidArgumentError: ")
    assert group == "5 5"


# ---- libraries that do not fit ----

ANOTHER_CORE = r"""
struct core { unsigned abi; const char *version; };
int amem_core_init(const void *host, struct core *core, char *text) {
    (void)host, (void)text;
    core->abi = ABI;
    core->version = VERSION;
    return 0;
}
"""


def libraries(folder: Path, core: str | None) -> Path:
    """A folder with the hook, and with a core made of this source, if any."""
    folder.mkdir()
    shutil.copy(LIB / "libamem_hook.so", folder)
    if core is not None:
        (folder / "core.c").write_text(core)
        output = str(folder / "libamem_nccl.so")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", output, str(folder / "core.c")], check=True, timeout=30)
    return folder


def expect_core_error(tmp_path: Path, folder: Path) -> str:
    body = """
    amem.enable()
    comm = communicator()
    raised(amem.pause)
    raised(amem.resume)
    print(device.used_bytes() > 0)
    comm.destroy()
    print(device.used_bytes())
    """
    pause, resume, used, left = script(tmp_path, body, AMEM_LIBRARY_DIR=str(folder))
    assert pause == resume
    assert pause.startswith("CoreError: ")
    assert "install amem again" in pause
    assert (used, left) == ("True", "0"), "NCCL works on without amem"
    return pause


def test_the_core_is_missing(tmp_path: Path) -> None:
    folder = libraries(tmp_path / "lib", core=None)
    assert str(folder / "libamem_nccl.so") in expect_core_error(tmp_path, folder)


def test_the_core_is_not_a_library(tmp_path: Path) -> None:
    folder = libraries(tmp_path / "lib", core=None)
    (folder / "libamem_nccl.so").write_text("not a library")
    assert "libamem_nccl.so" in expect_core_error(tmp_path, folder)


def test_the_core_is_some_other_library(tmp_path: Path) -> None:
    folder = libraries(tmp_path / "lib", core="int something;")
    assert "is not amem's core" in expect_core_error(tmp_path, folder)


@pytest.mark.parametrize(("abi", "version"), [("1", "9.9.9"), ("77", "0.1.0")])
def test_the_core_is_of_another_release(tmp_path: Path, abi: str, version: str) -> None:
    source = ANOTHER_CORE.replace("ABI", abi).replace("VERSION", f'"{version}"')
    error = expect_core_error(tmp_path, libraries(tmp_path / "lib", core=source))
    assert f"is of release {version}" in error


# A core that stops: a panic of the real one calls broken(), and answers an internal error.
BROKEN_CORE = r"""
#include <string.h>
#include "core.h"
static void (*broken)(const char *);
static int calls;
static int pause_(const char *tags, char *text) {
    (void)tags;
    if (++calls == 1) return 0;
    broken("index out of range");
    strcpy(text, "internal error: index out of range");
    return 15;
}
static int state(const char *tag) { return (void)tag, 2; }
static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                       unsigned long long flags, int own) {
    (void)size, (void)prop, (void)flags, (void)own;
    *handle = AMEM_HANDLE_TAG | 1;
    return 0;
}
int amem_core_init(const struct amem_host *host, struct amem_core *core, char *text) {
    (void)text;
    broken = host->broken;
    core->abi = AMEM_CORE_ABI, core->version = host->version;
    core->pause = pause_, core->resume = pause_, core->state = state, core->create = create;
    return 0;
}
"""


def test_a_core_that_has_stopped_is_not_called_again(tmp_path: Path) -> None:
    """Else the next call may wait for a lock for ever. The driver never sees a virtual handle."""
    folder = tmp_path / "lib"
    folder.mkdir()
    shutil.copy(LIB / "libamem_hook.so", folder)
    (folder / "core.c").write_text(BROKEN_CORE)
    run(
        ["gcc", "-shared", "-fPIC", f"-I{ROOT}/golib/hook", "-o", f"{folder}/libamem_nccl.so", f"{folder}/core.c"],
        os.environ,
    )
    body = """
    from amem import _library
    library = _library.load()
    library.amem_hook_driver_table.restype = ctypes.c_void_p
    cuda = ctypes.CDLL("libcuda.so.1")
    seen = []

    def real(name, *arguments):
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
        function = kind(lambda *given: seen.append(name) or 0)
        seen.append(function)  # it must live
        address = ctypes.cast(function, ctypes.c_void_p)
        return kind(library.amem_hook_driver_table(name.encode(), address))

    handle, size = ctypes.c_uint64(), ctypes.c_size_t(4096)
    create = real("cuMemCreate", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64)
    release = real("cuMemRelease", ctypes.c_uint64)
    export = real("cuMemExportToShareableHandle", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64)
    ends = [real(name, ctypes.c_uint64, ctypes.c_size_t) for name in ("cuMemUnmap", "cuMemAddressFree")]
    ends += [real("cuMemRetainAllocationHandle", ctypes.c_void_p, ctypes.c_void_p)]
    property = (ctypes.c_int * 8)(1, 0, 1)  # pinned, of a device
    assert create(ctypes.addressof(handle), 4096, ctypes.addressof(property), 0) == 0 and handle.value >> 48 == 0xA3E0
    amem.enable()
    for _ in range(3):
        raised(lambda: library.amem_pause(None) and amem._library.check(library, "pause", library.amem_pause(None)))
    print(amem.state().name)
    print(release(handle), export(None, handle, 1, 0), [name for name in seen if isinstance(name, str)])
    print([end(1 << 40, 4096) for end in ends], [name for name in seen if isinstance(name, str)])
    raised(amem.stats)
    """
    first, second, third, state, handles, slabs, stats = script(tmp_path, body, AMEM_LIBRARY_DIR=str(folder))
    assert first == "no error"
    for error in (second, third):
        assert error.startswith("InternalError: amem has stopped after an internal error (index out of range)")
        assert "end this process" in error
    assert state == "OFF"
    assert handles == "1 1 []"  # CUDA_ERROR_INVALID_VALUE
    assert slabs == "[401, 401, 401] []", "a slab is not the driver's to take, whosever memory begins there"
    assert stats.startswith("InternalError: amem has stopped after an internal error"), "and not all zeros"


# ---- fork ----


def test_a_forked_child_is_told_so_and_the_parent_goes_on() -> None:
    with ranks(2, SMALL) as group:
        group.init(ncomm=1)
        right(group)
        for verb in ("pause", "resume"):
            for answer in group.all("forked", verb=verb):
                assert answer["error"] == "ForkedError"
                assert "spawn" in answer["message"]
        assert [answer["value"] for answer in group.all("forked", verb="state")] == ["OFF", "OFF"]
        group.all("pause")
        assert [answer["error"] for answer in group.all("forked", verb="resume")] == ["ForkedError"] * 2
        group.all("resume")
        right(group)


def test_a_child_forked_before_nccl_is_used_has_an_amem_of_its_own(tmp_path: Path) -> None:
    body = """
    amem.enable()
    child = os.fork()
    communicator()
    amem.pause()
    assert device.used_bytes() in (0, 2 << 20)
    amem.resume()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        print(amem.state().name)
    """
    assert "ACTIVE" in script(tmp_path, body)


def test_memory_that_a_child_of_fork_leaves_is_the_parents(tmp_path: Path) -> None:
    body = f"""
    amem.enable()
    comm = communicator()
    used = device.used_bytes()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    amem.pause()
    print(device.used_bytes(), used >= 2 * {MIB})
    amem.resume()
    comm.destroy()
    print(device.used_bytes())
    """
    assert script(tmp_path, body) == ["0 True", "0"]
