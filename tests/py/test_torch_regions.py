"""Regions where real PyTorch can't show them: its older releases, errors for what it lacks, and calls without it.

Over a torch and a library that keep account of where memory comes from. All else is in tests/pytorch.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fake_library
import fake_torch

# Up to 2.9, the outer of two pools in use gives the memory.
RELEASES = ["2.8.0", "2.9.1"]

HELPERS = """
import ctypes, os, threading, torch
from amem import _regions

def count(tag, backup=1):
    "Segments of a region: allocated, freed, and bytes on each device."
    library = ctypes.CDLL("libamem_hook.so")
    library.fake_regions.restype = ctypes.c_char_p
    return json.loads(library.fake_regions()).get(f"{tag}/{backup}", [0, 0, [0, 0, 0, 0]])

def bytes_of(tag, backup=1):
    return count(tag, backup)[2][0]

def run(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

def show(value):
    print(json.dumps(value))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lib")
    fake_library.build(folder)
    return folder


def ran(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return fake_library.run(fake_torch.PRELUDE + HELPERS + script, folder, **env)


def result(script: str, folder: Path, **env: str) -> Any:
    return fake_library.result(fake_torch.PRELUDE + HELPERS + script, folder, **env)


# What amem calls of libtorch_cuda.so, which calls back when it would allocate.
LT_WORKSPACE = """
#include <stddef.h>
void (*allocates)(void);
size_t _ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv(void) { return 5000; }
void *_ZN2at4cuda22getCUDABlasLtWorkspaceEv(void) { allocates(); return 0; }
"""


def test_the_workspace_of_cublaslt_is_no_regions(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lt.c").write_text(LT_WORKSPACE)
    library = tmp_path / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "lt.c"], check=True, timeout=60)
    script = f"""
torch.__file__ = {str(tmp_path / "torch" / "__init__.py")!r}
inside, asked = [], []

@ctypes.CFUNCTYPE(None)
def allocates():
    device = fake_torch.devices[0]
    inside.append(device.pool() is not device.default)
    asked.extend(fake_torch.cached)

ctypes.c_void_p.in_dll(ctypes.CDLL({str(library)!r}), "allocates").value = ctypes.cast(allocates, ctypes.c_void_p).value
torch.empty(100)  # CUDA starts
with amem.region("weights"):
    torch.empty(1000)
show([inside, asked])
"""
    # Torch's cache has the memory already, so that nothing can be thrown.
    assert result(script, folder) == [[False], [5000]]


@pytest.mark.parametrize("release", RELEASES)
def test_the_innermost_region_counts_and_the_outer_one_comes_back(folder: Path, release: str) -> None:
    script = """
kept = []
with amem.region("outer"):
    kept.append(torch.empty(1))
    with amem.region("inner"):
        kept.append(torch.empty(10))
        with amem.region("outer"):
            kept.append(torch.empty(100))
        with amem.disable():
            kept.append(torch.empty(1000))
            with amem.region("inner"):
                kept.append(torch.empty(10000))
            kept.append(torch.empty(1000))
        kept.append(torch.empty(100000))
    kept.append(torch.empty(1000000))
kept.append(torch.empty(1000))
show([bytes_of("outer"), bytes_of("inner")])
"""
    assert result(script, folder, FAKE_TORCH=release) == [1000101, 110010]


def test_disable_outside_of_a_region_needs_no_torch(folder: Path) -> None:
    script = "with amem.disable(): pass\nprint(json.dumps('torch' in sys.modules))"
    assert fake_library.result(script, folder) is False


@pytest.mark.parametrize("backup", ["", "gpu", None])
def test_a_wrong_backup_is_refused_at_once(folder: Path, backup: str | None) -> None:
    script = f"""
try:
    amem.region("weights", backup={backup!r})
except amem.InvalidArgumentError as error:
    print(json.dumps(str(error)))
"""
    message = fake_library.result(script, folder)
    assert all(name in message for name in ("'cpu'", "'none'", "'disk'"))


@pytest.mark.parametrize("tag", ["", "a,b", "a\\0", None])
def test_a_wrong_tag_is_refused_at_once(folder: Path, tag: str | None) -> None:
    done = fake_library.run(f"amem.region({tag!r})" if tag is None else f"amem.region('{tag}')", folder)
    assert ("ArgumentTypeError" if tag is None else "InvalidArgumentError") in done.stderr


# CUDA graphs.


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("around", ["contextlib.nullcontext()", "amem.region('weights')", "amem.region('graphs')"])
def test_a_graph_captures_into_memory_of_its_tag(folder: Path, release: str, around: str) -> None:
    script = f"""
import contextlib
graph = torch.cuda.CUDAGraph()
with {around}:
    with amem.cuda_graph(graph, "graphs", backup="none"):
        kept = torch.empty(10)
        seen = amem.current_region()
    inside = torch.empty(100)
show([bytes_of("graphs", 0), bytes_of("graphs"), bytes_of("weights"), seen])
"""
    own = bool("graphs" in around) * 100
    assert result(script, folder, FAKE_TORCH=release) == [10, own, bool("weights" in around) * 100, None]


# The default region.


def test_the_default_region_is_of_all_threads(folder: Path) -> None:
    script = """
amem.default_region("all")
started = torch.cuda.is_initialized()
kept = [torch.empty(1)]
run(lambda: kept.append(torch.empty(10)))
fake_torch.backward(lambda: kept.append(torch.empty(100)))
torch.cuda.set_device(1)
kept.append(torch.empty(7))
torch.cuda.set_device(0)
with amem.region("weights"):
    kept.append(torch.empty(1000))
    with amem.disable():
        kept.append(torch.empty(5000))
        with amem.region("all"):
            kept.append(torch.empty(10000))
        kept.append(torch.empty(5000))
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    kept.append(torch.empty(100000))
with amem.cuda_graph(torch.cuda.CUDAGraph(), "graphs"):
    kept.append(torch.empty(3))
amem.default_region(None)
kept.append(torch.empty(5000))
here = amem.current_region()
show([started, count("all")[2][:2], bytes_of("weights"), bytes_of("graphs"), here])
"""
    for release in RELEASES:
        assert result(script, folder, FAKE_TORCH=release) == [False, [110111, 7], 1000, 3, None], release


EXPANDABLE = "torch.cuda.memory._set_allocator_settings('expandable_segments:True')\n"


def test_a_pause_says_what_the_default_region_does_not_cover(folder: Path) -> None:
    """torch's setting changes after the region was set; the environment never had it."""
    script = f"""
amem.default_region("all")
covered = torch.empty(100)
seen = [amem.pause("all").uncovered_bytes]
amem.resume()
{EXPANDABLE}
kept = [torch.empty(5), torch.empty(7)]
with amem.region("weights"):
    weights = torch.empty(11)
with amem.disable():
    other = torch.empty(13)
for tags in ((), ("weights",), ("all",)):
    seen.append(amem.pause(*tags).uncovered_bytes)
    amem.resume()
amem.default_region(None)
seen.append(amem.pause().uncovered_bytes)
show(seen)
"""
    done = ran(script, folder)
    assert json.loads(done.stdout) == [0, 12, 0, 12, 0]
    assert done.stderr.count("12 bytes of it are not paused now") == 1, done.stderr
    assert "'all'" in done.stderr and "_set_allocator_settings" in done.stderr


def test_a_setting_that_was_switched_off_again_left_segments(folder: Path) -> None:
    script = f"""
amem.default_region("all")
{EXPANDABLE}
kept = torch.empty(5)
{EXPANDABLE.replace("True", "False")}
more = torch.empty(6)
show(amem.pause().uncovered_bytes)
"""
    assert result(script, folder) == 5


def test_a_setting_alone_is_warned_of(folder: Path) -> None:
    script = f"amem.default_region('all')\ncovered = torch.empty(1)\n{EXPANDABLE}show(amem.pause().uncovered_bytes)"
    done = ran(script, folder)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert "0 bytes of it are not paused now" in done.stderr


def test_the_environment_is_not_asked_again(folder: Path) -> None:
    """torch has read it; what it says later, or was overridden with, does not count."""
    script = """
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
amem.default_region("all")
show(1)
"""
    assert result(script, folder) == 1
    script = """
torch.cuda.memory._set_allocator_settings("expandable_segments:False")
amem.default_region("all")
show(1)
"""
    assert result(script, folder, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") == 1


def test_a_region_of_an_old_torch_is_refused_once_segments_expand(folder: Path) -> None:
    script = f"""
with amem.region("weights"):
    pass
{EXPANDABLE}
try:
    with amem.region("weights"):
        pass
except amem.TorchError as error:
    show(str(error))
"""
    assert "_set_allocator_settings" in result(script, folder, FAKE_TORCH="2.9.1")


# Where torch can't do it.


def error_of(script: str, folder: Path, **env: str) -> str:
    script += """
try:
    with amem.region("weights"):
        print(json.dumps("entered"))
except amem.TorchError as error:
    print(json.dumps(str(error)))
"""
    found: str = fake_library.result(script, folder, **env)
    return found


def test_without_torch_the_error_says_how_to_get_it(folder: Path) -> None:
    assert "pip install torch" in error_of("sys.modules['torch'] = None", folder)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FAKE_WITHOUT": "cuda"}, "https://pytorch.org"),
        ({"FAKE_WITHOUT": "device"}, "Found no NVIDIA driver"),
        ({"FAKE_WITHOUT": "pools", "FAKE_TORCH": "2.7.1"}, "pip install 'torch>=2.8'"),
        ({"FAKE_WITHOUT": "native"}, "backend:native"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "unset it"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1, expandable_segments: True", "FAKE_TORCH": "2.9.1"}, "torch>=2.10"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "FAKE_TORCH": "2.8.0"}, "torch>=2.10"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "FAKE_TORCH": "2.9.1"}, "entered"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "FAKE_TORCH": "2.10.0"}, "entered"),
    ],
)
def test_a_torch_that_can_not_hold_regions_is_named(folder: Path, env: dict[str, str], message: str) -> None:
    assert message in error_of(fake_torch.PRELUDE, folder, **env)


def test_without_the_library_the_error_says_where_it_was_expected(tmp_path: Path) -> None:
    done = fake_library.run(fake_torch.PRELUDE + "with amem.region('weights'): pass", tmp_path)
    assert "CoreError" in done.stderr
    assert str(tmp_path / "libamem_hook.so") in done.stderr
