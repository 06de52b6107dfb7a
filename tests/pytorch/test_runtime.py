"""That the ground is firm: torch's allocator, copies, streams and graphs over the stand-ins, without amem."""

from __future__ import annotations

import pytest
import torch

import blocks
from blocks import MB, Block


def test_memory_is_the_simulated_devices() -> None:
    assert torch.cuda.device_count() == 2
    torch.cuda.init()
    before = blocks.used()
    block = Block(30 * MB)
    assert blocks.used() - before == 30 * MB
    block.check()
    del block
    assert blocks.used() - before == 30 * MB, "torch caches it"
    blocks.collect()
    assert blocks.used() == before
    with pytest.raises(torch.cuda.OutOfMemoryError, match="total capacity of 512.00 MiB"):
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")


def test_a_kernel_is_an_error_that_says_so() -> None:
    block = Block()
    with pytest.raises(RuntimeError, match="no such kernel"):
        block.tensor + 1
    block.check()


def test_torchs_fill_is_there() -> None:
    for dtype in (torch.uint8, torch.int16, torch.float32, torch.int64):
        wanted = torch.full((1001,), 7, dtype=dtype)
        assert torch.equal(torch.full_like(wanted, 7, device="cuda").cpu(), wanted)


def test_streams_run_beside_each_other_and_events_order_them() -> None:
    stream = torch.cuda.Stream()
    block, copy = Block(), torch.empty(blocks.LARGE, dtype=torch.uint8, pin_memory=True)
    assert copy.is_pinned()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        block.tensor.record_stream(stream)
        copy.copy_(block.tensor, non_blocking=True)
        done = stream.record_event()
    done.synchronize()
    assert torch.equal(copy, block.host)


def test_copies_between_devices() -> None:
    block = Block(device="cuda:1")
    assert torch.equal(block.tensor.to("cuda:0").cpu(), block.host)


def test_a_graph_replays_copies_and_fills() -> None:
    source, target = Block(), torch.empty(blocks.LARGE, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = source.tensor.clone()
        target.copy_(between)
        between.fill_(3)
    for _ in range(2):
        source.fill()
        graph.replay()
        assert torch.equal(target.cpu(), source.host)
        assert int(between.cpu().sum(dtype=torch.int64)) == 3 * blocks.LARGE


def test_expandable_segments_use_the_drivers_virtual_memory() -> None:
    old = Block()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    new = Block()
    assert {segment["is_expandable"] for segment in blocks.segments()} == {False, True}
    old.check()
    new.check()
