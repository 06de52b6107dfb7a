"""amem preloaded under torch_memory_saver's name, by programs that look for its library and preload that."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import LIB, ROOT, environment, needs_libraries, python, run

pytestmark = needs_libraries

NAME = "torch_memory_saver_hook_mode_preload.abi3.so"

# How slime finds the file, and how others do.
FIND = f"""
import amem.compat, os
amem.compat.install()
import torch_memory_saver
from torch_memory_saver.utils import get_binary_path_from_package
print(os.path.join(os.path.dirname(os.path.dirname(torch_memory_saver.__file__)), {NAME!r}))
print(get_binary_path_from_package({NAME.partition(".")[0]!r}))
"""

# A training process, as the wheel's .pth file starts it: torch is a stand-in, and its memory the simulated device's.
TRAINER = f"""
import ctypes, os, sys
if os.environ.get("AMEM_COMPAT_TMS"):
    import amem._autoenable
sys.path.append({str(ROOT / "tests" / "py")!r})
import fake_torch
fake_torch.install()
from torch_memory_saver import torch_memory_saver as saver
assert type(saver).__module__ == "amem._tms", type(saver)
from amem._cuda import Device, Driver
sim = os.environ["AMEM_SIM_LIBRARY_DIR"]
device = Device(Driver(os.path.join(sim, "libcuda.so.1")), 0)
cuda, torch = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(os.path.join(sim, "libc10_cuda.so"))
before, size = device.used_bytes(), 70 << 20
pointer = ctypes.c_void_p()
assert torch.c10_allocate(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
assert device.used_bytes() >= before + size
contents, read = bytes(range(256)) * 16, ctypes.create_string_buffer(4096)
at = ctypes.c_uint64(pointer.value + size - 4096)
assert cuda.cuMemcpyHtoD_v2(at, contents, ctypes.c_size_t(4096)) == 0

def holds():
    assert cuda.cuMemcpyDtoH_v2(read, at, ctypes.c_size_t(4096)) == 0
    return read.raw == contents

saver.pause()
assert device.used_bytes() == before
saver.resume()
assert holds()
# Callers in C find the functions in the process.
process = ctypes.CDLL(None)
assert process.tms_pause(None) == 0 and device.used_bytes() == before
assert process.tms_resume(b"default") == 0 and holds()
print("right")
"""


def trainer(tmp_path: Path, preload: str, **env: str) -> subprocess.CompletedProcess[str]:
    init = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "LD_PRELOAD": preload}
    return subprocess.run(
        [sys.executable, "-c", TRAINER],
        env=environment(tmp_path, **init, **env),
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_a_program_finds_the_file_and_preloads_it(tmp_path: Path) -> None:
    """Preloading it is the wish: the process that is started need not have AMEM_COMPAT_TMS."""
    by_folder, by_function = python(FIND, environment(tmp_path)).splitlines()
    assert by_folder == by_function == str(LIB / NAME)
    assert b"TMS_INIT_ENABLE_DISK_BACKUP" in Path(by_folder).read_bytes()
    for env in ({}, {"AMEM_COMPAT_TMS": "1"}):
        done = trainer(tmp_path, by_folder, **env)
        assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


def test_the_file_leaves_nccl_and_other_programs_alone(tmp_path: Path) -> None:
    env = environment(tmp_path, LD_PRELOAD=str(LIB / NAME))
    assert python("import amem; print(amem.state().name)", env) == "OFF\n"
    assert run(["/bin/sh", "-c", "echo $((6 * 7))"], env) == "42\n"


def test_the_file_and_an_explicit_no(tmp_path: Path) -> None:
    done = trainer(tmp_path, str(LIB / NAME), AMEM_COMPAT_TMS="0")
    assert done.returncode != 0
    assert "No module named 'torch_memory_saver'" in done.stderr


@pytest.mark.parametrize("other", [True, False])
def test_torch_memory_savers_own_library_is_still_refused(tmp_path: Path, other: bool) -> None:
    """A file of the name that is not in amem's folder; a link to amem's is amem's."""
    elsewhere = tmp_path / "elsewhere"
    if other:
        elsewhere.mkdir()
        shutil.copy(LIB / NAME, elsewhere)
    else:
        elsewhere.symlink_to(LIB)
    script = f"import os\nos.environ['LD_PRELOAD'] = {str(elsewhere / NAME)!r}\nimport amem.compat\n"
    script += "try:\n    amem.compat.install()\nexcept amem.InvalidStateError as error:\n    print(error)\n"
    said = python(script, environment(tmp_path))
    assert said.startswith("LD_PRELOAD has") if other else said == ""
