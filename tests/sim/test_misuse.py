"""What goes wrong in use: each is an error of its own class that says what to do, and nothing is lost."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness import LIB, MIB, SIM, environment, failure, needs_libraries, python, ranks, right

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
        assert p.call("pause", tags=["weights"])["tags"] == ["weights"]
        assert p.call("meminfo") == nccl
        p.call("resume", tags=["weights"])
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
    "AMEM_ARENA": ("2", "yes", "-1"),
    "AMEM_NCCL_OFFLOAD_FREE_TAG": ("1", "8", "all"),
    "AMEM_TIMEOUT_S": ("0", "-1", "soon", "nan", "inf", "1e9", "5s"),
    "AMEM_LOG": ("loud", "6", "-1"),
    "GMM_LOG": ("6", "info", "-1"),
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
        ("AMEM_ARENA", "0"),
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


def test_enabled_by_the_environment_with_a_wrong_value(tmp_path: Path) -> None:
    for value, complaint in (("maybe", "AMEM_ENABLE=maybe is neither 1 nor 0"), ("1", 'AMEM_ARENA="7"')):
        env = environment(tmp_path, AMEM_ENABLE=value, AMEM_ARENA="7")
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
