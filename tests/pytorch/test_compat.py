"""torch_memory_saver's place, taken by amem."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import amem
import amem.compat
import pytest
import torch

import blocks
from blocks import LARGE, MB, SMALL, Block, gradient, run

INIT = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}


def install() -> Any:
    amem.compat.install()
    return importlib.import_module("torch_memory_saver").torch_memory_saver


def functions(saver: Any) -> Any:
    """Of its library."""
    saver._ensure_initialized()
    return saver._impl._binary_wrapper.cdll


def test_regions_have_their_tag_and_backup() -> None:
    saver = install()
    with saver.region():
        lost = Block()
        with saver.region(tag="weights", enable_cpu_backup=True, cpu_backup_backend="mmap"):
            weights = [Block()]
            with saver.disable():
                plain = Block()
            weights.append(Block(SMALL))
        with saver.region("weights", enable_disk_backup=True):
            disk = Block()

    work = saver.region(tag="decorated", enable_cpu_backup=True)(Block)
    decorated = [work(), work()]
    assert blocks.ordinary(plain)
    assert blocks.region("default", "none")["allocated_bytes"] >= LARGE
    blocks.only_paused("weights", [*weights, disk], [plain, *decorated])
    blocks.only_paused("decorated", decorated, [plain, *weights, disk])
    saver.pause()
    assert blocks.state(lost.tensor) is amem.State.PAUSED
    saver.resume()
    for block in (plain, *decorated, *weights, disk):
        block.check()


def test_pause_and_resume_by_tag_and_all() -> None:
    saver = install()
    made = {}
    for tag in ("a", "b"):
        with saver.region(tag, enable_cpu_backup=True):
            made[tag] = Block()

    def paused() -> str:
        return "".join(tag for tag in made if amem.state(tag) is amem.State.PAUSED)

    seen = []
    for wanted in ("a", "a", "unknown", "nccl", None):
        assert saver.pause(wanted) is None
        seen.append(paused())
    for wanted in ("unknown", "b", "nccl", None, None):
        assert saver.resume(wanted) is None
        seen.append(paused())
    assert seen == ["a", "a", "a", "a", "ab", "ab", "a", "a", "", ""]
    for block in made.values():
        block.check()


def test_a_failed_resume_is_an_exception_and_can_be_repeated() -> None:
    saver = install()
    with saver.region("weights", enable_cpu_backup=True):
        kept = Block(300 * MB)
    saver.pause()
    other = Block(300 * MB)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        saver.resume()
    other.check()
    del other
    blocks.collect()
    saver.resume()
    kept.check()


def test_get_cpu_backup_is_of_paused_tensors() -> None:
    saver = install()
    with saver.region("weights", enable_cpu_backup=True):
        weights = Block()
    with saver.region("cache"):
        cache = Block()
    plain = Block()
    for block in (weights, plain):
        assert saver.get_cpu_backup(block.tensor) is None
    saver.pause()
    for zero_copy in (False, True):
        assert torch.equal(saver.get_cpu_backup(weights.tensor, zero_copy), weights.host)
        with pytest.raises(amem.AmemError):
            saver.get_cpu_backup(cache.tensor, zero_copy)
    assert saver.get_cpu_backup(plain.tensor) is None
    saver.resume()
    assert saver.get_cpu_backup(weights.tensor) is None


def test_a_backup_is_retained_until_the_next_pause() -> None:
    saver = install()
    with saver.region("weights", enable_cpu_backup=True):
        block = Block()
    saver.retain_cpu_backup = True
    for _ in range(2):
        block.fill()
        kept = block.host
        saver.pause()
        saver.resume()
        block.fill()
        for zero_copy in (False, True):
            assert torch.equal(saver.get_cpu_backup(block.tensor, zero_copy), kept)
        pointer = functions(saver).tms_get_cpu_backup_pointer(block.address, LARGE)
        assert ctypes.string_at(pointer, 100) == bytes(kept[:100].tolist())
        block.check()
    saver.retain_cpu_backup = False
    saver.pause()
    saver.resume()
    assert saver.get_cpu_backup(block.tensor) is None
    block.check()


def test_a_resume_gives_the_host_memory_of_mmap_back() -> None:
    saver = install()
    kept = []
    for tag, backend in (("pinned", "pinned"), ("mapped", "mmap")):
        with saver.region(tag, enable_cpu_backup=True, cpu_backup_backend=backend):
            kept.append(Block())
    saver.pause()
    assert blocks.region("mapped")["host_bytes"] >= LARGE
    saver.resume()
    assert blocks.region("pinned")["host_bytes"] >= LARGE > blocks.region("mapped")["host_bytes"]
    for block in kept:
        block.check()


def test_what_is_freed_of_a_pool_that_is_popped_goes_back() -> None:
    """Its tests do so, by the names of its internals."""
    saver = install()
    with saver.region("weights", enable_cpu_backup=True):
        block = Block()
    assert blocks.region("weights")["allocated_bytes"] >= LARGE
    pool = saver._impl._mem_pools.pop(("weights", True, False, "pinned", 0))
    with saver._impl._with_region_config(tag="weights", enable_cpu_backup=True, cpu_backup_backend="pinned"):
        del block, pool
        torch.cuda.empty_cache()
    assert blocks.region("weights")["allocated_bytes"] == 0


def test_disable_gives_back_what_was_freed_inside() -> None:
    saver = install()
    torch.zeros(1, device="cuda")
    with saver.region("weights", enable_cpu_backup=True):
        weights = Block()
        in_use = blocks.used()
        with saver.disable():
            plain, freed = Block(), Block(40 * MB)
            del freed
        assert blocks.used() - in_use < 40 * MB
    plain.check()
    assert blocks.ordinary(plain)
    blocks.only_paused("weights", [weights], [plain])


def test_cuda_graph_with_the_arguments_of_its_callers() -> None:
    saver = install()
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    source = Block()
    graph, kept = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with saver.cuda_graph(cuda_graph=graph, pool=pool, stream=stream, capture_error_mode="relaxed"):
        first = source.tensor.clone()
    with saver.cuda_graph(kept, tag="graph", enable_cpu_backup=True, cpu_backup_backend="pinned"):
        second = source.tensor.clone()
    assert blocks.region("default", "none")["allocations"] == blocks.region("graph")["allocations"] == 1
    kept.replay()
    torch.cuda.synchronize()
    saver.pause()
    assert [blocks.state(tensor) for tensor in (first, second)] == [amem.State.PAUSED] * 2
    saver.resume()
    assert torch.equal(second.cpu(), source.host)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first.cpu(), source.host)


def test_the_functions_of_its_library_switch_the_region() -> None:
    saver = install()
    library = functions(saver)
    with saver.region("weights", enable_cpu_backup=True):
        library.tms_set_interesting_region(False)
        plain = Block()
        library.tms_set_interesting_region(True)
        weights = Block()
        library.tms_set_current_tag(b"chunk")
        chunk = Block()
    outside = Block()
    assert blocks.ordinary(plain, outside)
    blocks.only_paused("weights", [weights], [plain, chunk, outside])
    blocks.only_paused("chunk", [chunk], [plain, weights, outside])
    assert library.tms_pause(b"weights") == 0
    assert amem.state("weights") is amem.State.PAUSED
    assert library.tms_resume(None) == 0
    weights.check()


def test_the_cuda_runtime_is_found_through_its_library() -> None:
    library = functions(install())
    count = ctypes.c_int()
    assert library.cudaGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 2
    assert not hasattr(library, "tms_nothing") and not hasattr(library, "cudaNothing")


@pytest.mark.env(**INIT)
def test_init_enable_is_a_region_of_all_threads() -> None:
    saver = install()
    assert not torch.cuda.is_initialized()
    kept = [Block()]
    run(lambda: kept.append(Block()))
    kept.append(gradient())
    with saver.region("grads", enable_cpu_backup=True):
        grads = [Block()]
    kept.append(Block())
    with saver.disable():
        plain = [Block(), gradient()]
        run(lambda: kept.append(Block()))
    functions(saver).tms_set_interesting_region(False)
    plain.append(Block())
    run(lambda: kept.append(Block()))
    functions(saver).tms_set_interesting_region(True)
    kept.append(Block())
    assert blocks.ordinary(*plain)
    blocks.only_paused("default", kept, [*grads, *plain])
    blocks.only_paused("grads", grads, [*kept, *plain])


@pytest.mark.env(**INIT)
def test_init_enable_where_cuda_has_started() -> None:
    plain, freed = Block(), Block()
    at = freed.address
    del freed
    saver = install()
    saver.pause()
    saver.resume()
    kept = Block()
    assert kept.address != at and blocks.ordinary(plain)
    blocks.only_paused("default", [kept], [plain])


@pytest.mark.env(**INIT)
def test_init_enable_pauses_what_torch_has_cached_too() -> None:
    saver = install()
    kept, freed = Block(), Block(40 * MB)
    del freed
    in_use = blocks.used()
    saver.pause()
    assert in_use - blocks.used() >= LARGE + 40 * MB
    assert torch.equal(saver.get_cpu_backup(kept.tensor), kept.host)
    with saver.disable():
        plain = Block()
        plain.check()
        del plain
    saver.resume()
    if blocks.KEEPS_CACHE:
        assert blocks.used() >= in_use, "it is there again"
    kept.check()
