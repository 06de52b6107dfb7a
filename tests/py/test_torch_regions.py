"""Regions, over a torch and a library that keep account of where memory comes from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fake_library
import fake_torch

# Up to 2.9, the outer of two pools in use gives the memory.
RELEASES = ["2.8.0", "2.9.1", "2.10.0", "2.11.0"]

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


def test_the_workspace_of_products_is_no_regions(folder: Path) -> None:
    script = """
if BEFORE:
    torch.empty(100)  # CUDA starts
with amem.region("weights"):
    started = torch._C._cuda_hasPrimaryContext(0)
    inside = torch.empty(1000)
    torch.cuda.current_blas_handle()
show([started, bytes_of("weights")])
"""
    assert result(script.replace("BEFORE", "True"), folder) == [True, 1000]
    # Entering starts CUDA on no device, which may not be the one to be used.
    assert result(script.replace("BEFORE", "False"), folder) == [False, 1008]


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


def test_memory_allocated_inside_is_the_regions(folder: Path) -> None:
    script = """
before = torch.empty(100)
with amem.region("weights"):
    inside = torch.empty(1000)
after = torch.empty(100)
show([count("weights"), amem.state("weights").name, amem.state("other").name])
"""
    assert result(script, folder) == [[1, 0, [1000, 0, 0, 0]], "ACTIVE", "OFF"]


def test_each_tag_and_backup_has_functions_of_its_own(folder: Path) -> None:
    script = """
kept = []
for size, (tag, backup) in enumerate([("a", "cpu"), ("a", "none"), ("a", "disk"), ("b", "cpu")], 1):
    with amem.region(tag, backup):
        kept.append(torch.empty(size))
show([bytes_of("a", 1), bytes_of("a", 0), bytes_of("a", 2), bytes_of("b", 1)])
"""
    assert result(script, folder) == [1, 2, 3, 4]


def test_a_region_covers_all_devices_and_starts_cuda_on_none(folder: Path) -> None:
    script = """
import fake_torch
torch.cuda.set_device(1)
with amem.region("weights"):
    started = [device.started for device in fake_torch.devices]
    kept = [torch.empty(10, device="cuda:0"), torch.empty(20), torch.empty(30, device="cuda:2")]
show([started, torch.cuda.current_device(), count("weights")[2]])
"""
    assert result(script, folder, FAKE_DEVICES="3") == [[False, True, False], 1, [10, 20, 30, 0]]


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


def test_current_region_follows(folder: Path) -> None:
    script = """
def current():
    region = amem.current_region()
    seen.append(None if region is None else [region.tag, region.backup])
seen = []
current()
with amem.region("a", "none"):
    current()
    with amem.region("b"):
        current()
    with amem.disable():
        current()
    current()
current()
show(seen)
"""
    a, b = ["a", "none"], ["b", "cpu"]
    assert result(script, folder) == [None, a, b, None, a, None]


def test_disable_outside_of_a_region_needs_no_torch(folder: Path) -> None:
    script = "with amem.disable(): pass\nprint(json.dumps('torch' in sys.modules))"
    assert fake_library.result(script, folder) is False


def test_an_exception_leaves_all_regions(folder: Path) -> None:
    script = """
region, kept = amem.region("weights"), []
for _ in range(3):
    try:
        with amem.region("outer"), region, amem.disable(), region:
            kept.append(torch.empty(10))
            raise KeyError
    except KeyError:
        kept.append(torch.empty(1))
show([bytes_of("weights"), bytes_of("outer"), amem.current_region(), torch._C._is_multithreading_enabled()])
"""
    assert result(script, folder) == [30, 0, None, True]


@pytest.mark.parametrize("tag", ["nccl", "x" * 65])
def test_a_tag_that_the_library_refuses_changes_nothing(folder: Path, tag: str) -> None:
    script = f"""
with amem.region("outer"):
    try:
        with amem.region({tag!r}):
            show("entered")
    except amem.InvalidArgumentError as error:
        kept = torch.empty(10)
        show([str(error), bytes_of("outer"), amem.current_region().tag])
"""
    assert result(script, folder) == ["fake: status 6", 10, "outer"]


def test_a_failure_of_torch_changes_nothing(folder: Path) -> None:
    script = """
real = torch.cuda.use_mem_pool
def failing(pool, device):
    if device == 1:
        torch.cuda.use_mem_pool = real
        raise RuntimeError("torch")
    return real(pool, device)
with amem.region("outer"):
    torch.cuda.use_mem_pool = failing
    try:
        with amem.region("inner"):
            show("entered")
    except RuntimeError:
        kept = [torch.empty(10)]
    with amem.region("inner"):
        kept.append(torch.empty(20))
show([bytes_of("outer"), bytes_of("inner"), torch._C._is_multithreading_enabled()])
"""
    assert result(script, folder) == [10, 20, True]


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


def test_other_threads_are_outside_until_they_enter(folder: Path) -> None:
    script = """
kept = []
with amem.region("weights"):
    here = amem.current_region()
    def work():
        seen.append(amem.current_region())
        kept.append(torch.empty(1))
        with here:
            kept.append(torch.empty(10))
        kept.append(torch.empty(1))
    seen = []
    run(work)
    kept.append(torch.empty(100))
show([seen, bytes_of("weights")])
"""
    assert result(script, folder) == [[None], 110]


def test_many_threads_in_one_region_at_once(folder: Path) -> None:
    script = """
region, together, kept = amem.region("weights"), threading.Barrier(8), []
def work():
    for _ in range(20):
        with region:
            together.wait()
            kept.append(torch.empty(10))
            with amem.region("other"), region:
                kept.append(torch.empty(10))
            together.wait()
        kept.append(torch.empty(1))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
show([bytes_of("weights"), bytes_of("other")])
"""
    assert result(script, folder) == [8 * 20 * 20, 0]


def test_a_region_is_left_where_it_was_entered(folder: Path) -> None:
    script = """
region, errors = amem.region("weights"), []
region.__enter__()
def leave():
    try:
        region.__exit__(None, None, None)
    except amem.InvalidStateError as error:
        errors.append(str(error))
run(leave)
kept = torch.empty(10)
region.__exit__(None, None, None)
kept = [kept, torch.empty(10)]
show([errors, bytes_of("weights")])
"""
    errors, inside = result(script, folder)
    assert len(errors) == 1 and "another thread" in errors[0]
    assert inside == 10


def test_backward_allocates_in_the_region_of_its_caller(folder: Path) -> None:
    script = """
from fake_torch import backward
kept = []
def node():
    kept.append(torch.empty(10))
with amem.region("weights"):
    backward(node)
inside = bytes_of("weights")
backward(node)
show([inside, bytes_of("weights"), torch._C._is_multithreading_enabled()])
"""
    assert result(script, folder) == [10, 10, True]


def test_freed_memory_of_a_region_is_used_when_it_is_entered_again(folder: Path) -> None:
    script = """
for _ in range(100):
    with amem.region("weights"):
        torch.empty(10)
show(count("weights"))
"""
    assert result(script, folder) == [1, 0, [10, 0, 0, 0]]


def test_much_unused_memory_is_given_back_when_the_region_is_left(folder: Path) -> None:
    script = """
ordinary = torch.empty(5)
cached = torch.empty(7)
del cached
with amem.region("weights"):
    kept = torch.empty(10)
    temporary = torch.empty(_regions.UNUSED_BYTES + 1)
    del temporary
    inside = count("weights")
outside = count("weights")
with amem.region("weights"):
    more = torch.empty(10)
import fake_torch
cache = [segment.size for segment in fake_torch.devices[0].default.segments]
del kept
torch.cuda.empty_cache()
show([inside[1], outside[1:], count("weights")[1:], cache])
"""
    freed_inside, outside, at_last, cache = result(script, folder)
    assert freed_inside == 0
    assert outside == [1, [10, 0, 0, 0]]
    assert at_last == [2, [10, 0, 0, 0]], "what was in use is given back once it is freed"
    assert cache == [5, 7], "ordinary memory stays cached"


def test_a_pause_gives_unused_memory_back_first(folder: Path) -> None:
    script = """
for tag in ("a", "b"):
    with amem.region(tag):
        torch.empty(10)
        globals()[tag] = torch.empty(20)
cached = torch.empty(7)
del cached
amem.pause("a")
only_a = [count("a")[1], count("b")[1]]
amem.pause()
import fake_torch
show([only_a, count("a")[1:], count("b")[1:], [s.size for s in fake_torch.devices[0].default.segments]])
"""
    left = [1, [20, 0, 0, 0]]
    assert result(script, folder) == [[1, 0], left, left, [7]]


def test_what_is_allocated_while_paused_is_there(folder: Path) -> None:
    """Not from what a paused segment has free, whether the region was entered at the pause or is now."""
    script = """
def fresh(tensor):
    return ctypes.CDLL("libamem_hook.so").amem_memory_state(ctypes.c_void_p(tensor.data_ptr())) == 2
with amem.region("weights") as region:
    freed = torch.empty(10)
    with amem.region("other"), region:
        freed_too = torch.empty(10)
        amem.pause("weights")
        del freed, freed_too
        first = torch.empty(10)
    second = torch.empty(10)
with region:
    third = torch.empty(10)
show([fresh(first), fresh(second), fresh(third), count("weights")[0]])
"""
    assert result(script, folder) == [True, True, True, 5]


def test_a_thread_that_is_in_a_region_during_a_pause_has_new_pools_next_time(folder: Path) -> None:
    script = """
entered, paused, states = threading.Event(), threading.Event(), []
def state(tensor):
    return ctypes.CDLL("libamem_hook.so").amem_memory_state(ctypes.c_void_p(tensor.data_ptr()))
def work():
    with amem.region("weights"):
        tensor = torch.empty(10)
        entered.set()
        paused.wait()
    states.append(state(tensor))
    del tensor
    with amem.region("weights"):
        states.append(state(torch.empty(10)))
thread = threading.Thread(target=work)
thread.start()
entered.wait()
amem.pause()
paused.set()
thread.join()
show(states)
"""
    assert result(script, folder) == [3, 2]


def test_a_child_of_fork_leaves_regions_and_pauses_without_torch(folder: Path) -> None:
    script = """
import signal
entered, forked = threading.Event(), threading.Event()
with amem.region("weights"):
    kept = torch.empty(10)
    _regions._lock.acquire()  # as another thread that enters a region has
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        torch.cuda.memory.empty_cache = torch._C._cuda_releasePool = None
    else:
        _regions._lock.release()
if child == 0:
    amem.pause()
    os._exit(7)
show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert result(script, folder) == 7


def test_running_out_of_memory_in_a_region_is_torchs_error(folder: Path) -> None:
    script = """
try:
    with amem.region("weights"):
        torch.empty(10)
except torch.cuda.OutOfMemoryError:
    show(amem.current_region())
"""
    assert result(script, folder, FAKE_FULL="1") is None


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


@pytest.mark.parametrize("release", RELEASES)
def test_a_plain_graph_in_a_region_has_ordinary_memory(folder: Path, release: str) -> None:
    """And never what the region gives to others afterwards."""
    script = """
graph = torch.cuda.CUDAGraph()
with amem.region("weights"):
    with torch.cuda.graph(graph):
        at = torch.empty(10).data_ptr()
    after = torch.empty(10)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            raise KeyError
    except KeyError:
        more = torch.empty(100)
show([bytes_of("weights"), after.data_ptr() == at])
"""
    assert result(script, folder, FAKE_TORCH=release) == [110, False]


def test_graphs_with_one_pool_share_memory_and_others_do_not(folder: Path) -> None:
    script = """
handle, graphs, steps = torch.cuda.graph_pool_handle(), [], []
def capture(pool=None, tag="graphs"):
    graphs.append(torch.cuda.CUDAGraph())
    with amem.cuda_graph(graphs[-1], tag, pool=pool):
        torch.empty(10)
    steps.append(count(tag)[0])
capture()
capture()
capture(handle)
capture(handle)
capture(graphs[-1].pool())
capture(graphs[0].pool())
capture(handle, "others")
capture(handle, "others")
show(steps)
"""
    assert result(script, folder) == [1, 2, 3, 3, 3, 3, 1, 1]


def test_a_graphs_memory_goes_with_it(folder: Path) -> None:
    script = """
graph = torch.cuda.CUDAGraph()
with amem.cuda_graph(graph, "graphs"):
    torch.empty(10)
torch.cuda.empty_cache()
amem.pause()
amem.resume()
before, pool = count("graphs")[1], graph.pool()
del graph
torch.cuda.empty_cache()
after = count("graphs")[1]
try:
    with amem.cuda_graph(torch.cuda.CUDAGraph(), "graphs", pool=pool):
        show("captured")
except amem.InvalidStateError as error:
    show([before, after, str(error)])
"""
    before, after, error = result(script, folder)
    assert [before, after] == [0, 1], "neither empty_cache() nor a pause takes memory that replays use"
    assert "pass another pool" in error


def test_a_graph_is_captured_on_the_device_of_its_stream(folder: Path) -> None:
    script = """
torch.cuda.set_device(1)
stream = torch.cuda.Stream()
torch.cuda.set_device(0)
first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with amem.cuda_graph(first, "graphs", stream=stream):
    torch.empty(10)
with amem.cuda_graph(second, "graphs"):
    torch.empty(20)
show(count("graphs")[2])
"""
    assert result(script, folder) == [20, 10, 0, 0]


def test_a_failed_capture_ends_as_torchs_does(folder: Path) -> None:
    script = """
with amem.region("weights"):
    try:
        with amem.cuda_graph(torch.cuda.CUDAGraph(), "graphs"):
            raise KeyError
    except KeyError:
        kept = torch.empty(10)
    with amem.cuda_graph(torch.cuda.CUDAGraph(), "graphs"):
        torch.empty(20)
show([bytes_of("weights"), bytes_of("graphs")])
"""
    assert result(script, folder) == [10, 20]


def test_a_region_is_not_entered_while_a_graph_is_captured(folder: Path) -> None:
    script = """
with amem.cuda_graph(torch.cuda.CUDAGraph(), "graphs"):
    try:
        with amem.region("weights"):
            show("entered")
    except amem.InvalidStateError as error:
        show(str(error))
"""
    assert "amem.cuda_graph()" in result(script, folder)


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


def test_disable_is_ordinary_memory_with_a_default_region(folder: Path) -> None:
    script = """
amem.default_region("all", backup="none")
kept = [torch.empty(1)]
def backward():
    fake_torch.backward(lambda: kept.append(torch.empty(5000)))
with amem.disable():
    here = amem.current_region()
    kept.append(torch.empty(5000))
    backward()
    run(lambda: kept.append(torch.empty(10)))
pools = len(fake_torch.devices[0].pools)
for _ in range(5):
    with amem.disable():
        torch.empty(5000)
show([bytes_of("all", 0), here, amem.current_region().tag, torch._C._is_multithreading_enabled(),
      len(fake_torch.devices[0].pools) - pools])
"""
    assert result(script, folder) == [11, None, "all", True, 0]


def test_a_pause_of_the_default_region_empties_the_cache_first(folder: Path) -> None:
    script = """
amem.default_region("all")
kept = torch.empty(4).write(bytes(range(4)))
with amem.region("weights"):
    weights = torch.empty(10)
    torch.empty(50)
    torch.empty(20)
torch.empty(100)
seen = [bytes_of("all")]
amem.pause("weights")
seen += [bytes_of("all"), bytes_of("weights")]
with amem.region("other"):  # this thread's own pools are no hindrance
    amem.pause("all")
seen += [bytes_of("all"), kept.read()]
with amem.disable():
    ordinary = torch.empty(100).write(b"x").read()[0]
amem.resume()
seen += [ordinary, kept.read()]
torch.empty(100)
amem.default_region(None)
torch.empty(100)
amem.pause()
show([*seen, bytes_of("all")])
"""
    contents = [0, 1, 2, 3]
    assert result(script, folder) == [104, 104, 10, 4, [0xDD] * 4, ord("x"), contents, 4]


def test_what_is_ordinary_or_the_regions_is_never_given_out_as_the_other(folder: Path) -> None:
    script = """
before = torch.empty(100)
del before
amem.default_region("all")
kept = [torch.empty(100)]
seen = [bytes_of("all")]
del kept[0]
amem.default_region(None)
kept.append(torch.empty(100))
show([*seen, bytes_of("all")])
"""
    assert result(script, folder) == [100, 0]


def test_workspaces_are_ordinary_with_a_default_region(folder: Path) -> None:
    """Where CUDA has started by then, or disable() is entered before the first product."""
    script = """
if STARTED:
    torch.empty(100)
amem.default_region("all")
if not STARTED:
    torch.empty(100)
    with amem.disable():
        pass
torch.cuda.current_blas_handle()
here = bytes_of("all")
torch.cuda.set_device(1)
torch.empty(3)
with amem.region("weights"):
    torch.cuda.current_blas_handle()
show([here, count("all")[2][1], count("weights")[2]])
"""
    assert result(script.replace("STARTED", "True"), folder) == [0, 3, [0] * 4]
    assert result(script.replace("STARTED", "False"), folder) == [100, 3, [0] * 4]


def test_the_default_region_is_refused(folder: Path) -> None:
    script = """
def refused(*arguments):
    try:
        amem.default_region(*arguments)
    except amem.AmemError as error:
        return type(error).__name__
seen = [refused("nccl"), refused("a,b"), refused("a", "ram")]
with amem.region("weights"):
    seen.append(refused("all"))
torch.cuda.memory._set_allocator_settings("expandable_segments:True")
seen.append(refused("all"))
kept = torch.empty(1)
show([seen, refused(None), amem.current_region()])
"""
    wrong = ["InvalidArgumentError"] * 3
    assert result(script, folder) == [[*wrong, "InvalidStateError", "TorchError"], None, None]


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


def test_a_child_of_fork_has_the_default_region(folder: Path) -> None:
    script = """
amem.default_region("all")
child = os.fork()
if child == 0:
    kept = torch.empty(1)
    with amem.disable():
        torch.empty(10)
    os._exit(bytes_of("all") != 1)
show(os.waitpid(child, 0)[1])
"""
    assert result(script, folder) == 0


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
