"""CUDA graphs: whose memory they have, and replays after a resume. Captured are copies and fills."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import amem
import pytest
import torch

import blocks
from blocks import LARGE, Block


class Captured:
    """A graph that copies a source through memory of its own to a target."""

    def __init__(self, source: Block, **options: Any) -> None:
        self.source, self.target = source, Block(LARGE)
        self.graph = torch.cuda.CUDAGraph()
        with amem.cuda_graph(self.graph, **options) if options else torch.cuda.graph(self.graph):
            self.between = source.tensor.clone()
            self.target.tensor.copy_(self.between)

    def check(self) -> None:
        """Replays with new contents."""
        self.source.fill()
        self.graph.replay()
        self.target.host = self.source.host
        self.target.check()


@pytest.mark.parametrize("around", [None, "weights", "graphs"])
def test_a_graph_captures_into_memory_of_its_tag(around: str | None) -> None:
    source, graph = Block(), torch.cuda.CUDAGraph()
    target = Block()
    with amem.region(around) if around else contextlib.nullcontext():
        with amem.cuda_graph(graph, "graphs", backup="none"):
            between = source.tensor.clone()
            target.tensor.copy_(between)
            here = amem.current_region()
        after = Block()
    assert here is None
    target.host = source.host
    graph.replay()
    target.check()
    assert blocks.region("graphs", "none")["allocations"] == 1
    assert blocks.given_back("graphs") >= LARGE
    assert blocks.state(between) is amem.State.PAUSED
    for block in (source, target):
        block.check()
    amem.resume()
    after.check()
    for _ in range(2):
        source.fill()
        target.host = source.host
        graph.replay()
        target.check()


def test_a_graph_without_a_tag_has_ordinary_memory_in_a_region_too() -> None:
    with amem.region("weights"):
        weights = Block()
        captured = Captured(weights)
    captured.check()
    assert blocks.state(captured.between) is amem.State.OFF
    blocks.only_paused("weights", [weights, captured.target], [])
    captured.check()


def test_graphs_with_one_pool_share_memory_and_others_do_not() -> None:
    source, handle = Block(), torch.cuda.graph_pool_handle()
    graphs: list[Captured] = []
    steps = []

    def capture(pool: Any = None, tag: str = "graphs") -> None:
        graphs.append(Captured(source, tag=tag, pool=pool))
        graphs[-1].between = None
        steps.append(blocks.region(tag)["allocations"])

    capture()
    capture()
    capture(handle)
    capture(handle)
    capture(graphs[-1].graph.pool())
    capture(graphs[0].graph.pool())
    capture(handle, "others")
    capture(handle, "others")
    assert steps == [1, 2, 3, 3, 3, 3, 1, 1]
    amem.pause()
    amem.resume()
    for captured in graphs:
        captured.check()


def test_a_graphs_memory_goes_with_it() -> None:
    source = Block()
    captured = Captured(source, tag="graphs")
    captured.between = None
    blocks.collect()
    amem.pause()
    amem.resume()
    captured.check()
    assert blocks.region("graphs")["allocated_bytes"] >= LARGE, "replays use it"
    in_use, pool = blocks.used(), captured.graph.pool()
    captured.graph = None
    gc.collect()
    blocks.collect()
    assert in_use - blocks.used() >= LARGE
    assert blocks.region("graphs")["allocated_bytes"] == 0
    with pytest.raises(amem.InvalidStateError, match="pass another pool"):
        Captured(source, tag="graphs", pool=pool)


def test_a_graph_is_captured_on_the_device_of_its_stream() -> None:
    stream = torch.cuda.Stream(1)
    source = Block(device="cuda:1")
    graph = torch.cuda.CUDAGraph()
    before = blocks.used(1)
    with amem.cuda_graph(graph, "graphs", stream=stream):
        kept = torch.empty_like(source.tensor).copy_(source.tensor)
    assert blocks.used(1) - before >= LARGE
    with torch.cuda.device(1):
        graph.replay()
        assert torch.equal(kept.cpu(), source.host)
        assert blocks.given_back("graphs", device=1) >= LARGE
        amem.resume()
        graph.replay()
        assert torch.equal(kept.cpu(), source.host)


def test_a_failed_capture_ends_as_torchs_does() -> None:
    source = Block()
    with amem.region("weights"):
        with pytest.raises(KeyError), amem.cuda_graph(torch.cuda.CUDAGraph(), "graphs"):
            raise KeyError
        weights = Block()
        captured = Captured(source, tag="graphs")
    captured.check()
    blocks.only_paused("weights", [weights], [source])
    captured.check()


def test_a_region_is_not_entered_while_a_graph_is_captured() -> None:
    torch.zeros(1, device="cuda")
    with amem.cuda_graph(torch.cuda.CUDAGraph(), "graphs"):
        kept = torch.zeros(1, device="cuda")
        with pytest.raises(amem.InvalidStateError, match=r"amem\.cuda_graph\(\)"), amem.region("weights"):
            pytest.fail("entered")
    assert blocks.state(kept) is amem.State.ACTIVE
