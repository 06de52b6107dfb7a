"""The default region: what torch gets of cudaMalloc."""

from __future__ import annotations

import os
from typing import Any

import amem
import pytest
import torch

import blocks
from blocks import LARGE, MB, Block, gradient, run


def test_it_is_of_all_threads_and_devices_and_of_graphs() -> None:
    amem.default_region("all")
    assert not torch.cuda.is_initialized()
    kept, weights, plain = [Block()], [], []
    run(lambda: kept.append(Block()))
    kept += [gradient(), Block(device="cuda:1")]
    with amem.region("weights"):
        weights.append(Block())
        with amem.disable():
            plain.append(Block())
            with amem.region("all"):
                kept.append(Block())
            plain.append(Block(blocks.SMALL))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = kept[0].tensor.clone()
    graph.replay()
    assert blocks.state(between) is amem.State.ACTIVE
    amem.default_region(None)
    plain.append(Block())
    assert amem.current_region() is None and blocks.ordinary(*plain)
    blocks.only_paused("weights", weights, [*kept, *plain])
    blocks.only_paused("all", kept, [*weights, *plain])
    graph.replay()
    assert torch.equal(between.cpu(), kept[0].host)


def test_disable_is_ordinary_memory() -> None:
    amem.default_region("all")
    kept, plain = [Block()], []
    with amem.disable():
        assert amem.current_region() is None
        plain += [Block(), gradient()]
        run(lambda: kept.append(Block()))
    here = amem.current_region()
    assert here is not None and here.tag == "all" and torch._C._is_multithreading_enabled()
    assert blocks.ordinary(*plain)
    blocks.only_paused("all", kept, plain)
    in_use = blocks.used()
    for _ in range(3):
        with amem.disable():
            Block().check()
    assert blocks.used() <= in_use + LARGE, "entering again takes nothing more"


def test_a_pause_empties_the_cache_first() -> None:
    amem.default_region("all")
    kept = Block()
    with amem.region("weights"):
        weights, freed = Block(), Block(40 * MB)
        del freed
    freed = Block(40 * MB)
    del freed
    in_use = blocks.used()
    assert amem.pause("weights").copied_bytes == LARGE
    if blocks.KEEPS_CACHE:
        assert blocks.region("all")["allocated_bytes"] >= 40 * MB + LARGE, "of another tag"
    with amem.region("other"):  # this thread's own pools are no hindrance
        assert amem.pause("all").copied_bytes < 40 * MB
    assert in_use - blocks.used() >= 80 * MB + 2 * LARGE
    with amem.disable():
        ordinary = Block(100 * MB)
        ordinary.check()
    amem.resume()
    for block in (kept, weights, ordinary):
        block.check()


def test_what_is_ordinary_or_the_regions_is_never_given_out_as_the_other() -> None:
    block = Block()
    at_first = block.address
    del block
    amem.default_region("all")
    mine = Block()
    assert blocks.state(mine.tensor) is amem.State.ACTIVE and mine.address != at_first
    blocks.only_paused("all", [mine], [])
    address = mine.address
    del mine
    amem.default_region(None)
    plain = Block()
    assert blocks.ordinary(plain) and plain.address != address


def test_torch_gives_its_cache_back_when_memory_runs_out() -> None:
    amem.default_region("all")
    freed = Block(300 * MB)
    del freed
    kept = Block(350 * MB)
    assert 350 * MB <= blocks.region("all")["allocated_bytes"] < 400 * MB
    blocks.only_paused("all", [kept], [])
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate 300.00 MiB"):
        Block(300 * MB)
    kept.check()


@pytest.mark.parametrize("started", [True, False])
def test_workspaces_are_ordinary(started: bool) -> None:
    """Where CUDA has started by then, or disable() is entered before the first product."""
    if started:
        torch.zeros(1, device="cuda")
    amem.default_region("all")
    if not started:
        torch.zeros(1, device="cuda")
        with amem.disable():
            pass
    kept = Block()
    inside = blocks.region("all")["allocated_bytes"]
    torch.cuda.current_blas_handle()
    with amem.region("weights"):
        torch.cuda.current_blas_handle()
    assert blocks.region("all")["allocated_bytes"] == inside
    assert blocks.region("weights")["allocated_bytes"] == 0
    blocks.only_paused("all", [kept], [])


def refusal(*arguments: Any) -> str:
    with pytest.raises(amem.AmemError) as refused:
        amem.default_region(*arguments)
    return type(refused.value).__name__


def test_what_is_refused() -> None:
    for tag in ("nccl", "a,b", ""):
        assert refusal(tag) == "InvalidArgumentError"
    assert refusal("a", "ram") == "InvalidArgumentError"
    with amem.region("weights"):
        assert refusal("all") == "InvalidStateError"
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    assert refusal("all") == "TorchError"
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert blocks.ordinary(Block())
    amem.default_region(None)
    assert amem.current_region() is None


def test_a_child_of_fork_has_it() -> None:
    amem.default_region("all")
    child = os.fork()
    if child == 0:
        try:
            block = Block()
            with amem.disable():
                plain = Block()
            blocks.only_paused("all", [block], [plain])
        except BaseException as failure:
            print(failure, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    blocks.only_paused("all", [Block()], [])
