"""What amem asks of torch: the allocator's setting, what it holds, and whether it has an NCCL communicator."""

from __future__ import annotations

import logging
import os
import sys

import amem
import pytest
import torch
import torch.distributed as distributed
from amem import _api, _regions

import blocks
from blocks import MB, Block


def set_expandable(on: bool) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")


def test_asking_starts_nothing_and_keeps_count_of_references() -> None:
    before = sys.getrefcount(None)
    for _ in range(1000):
        assert not _regions._expandable_segments(torch)
    assert sys.getrefcount(None) > before - 100
    assert not torch.cuda.is_initialized()
    set_expandable(True)
    assert _regions._expandable_segments(torch)
    with pytest.raises(amem.TorchError, match="_set_allocator_settings"):
        amem.default_region("all")
    assert not torch.cuda.is_initialized()
    set_expandable(False)
    amem.default_region("all")


def test_a_pause_says_what_the_default_region_does_not_cover() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("amem").addHandler(handler)
    amem.default_region("all")
    covered = Block(30 * MB)
    assert amem.pause("all").uncovered_bytes == 0
    amem.resume()
    set_expandable(True)
    left = Block(40 * MB)
    with amem.region("weights"):
        weights = Block(50 * MB)
    with amem.disable():
        ordinary = Block(60 * MB)
    assert said == []
    full = blocks.used()
    for tags in ((), ("all",)):
        done = amem.pause(*tags)
        # A page of an expandable segment has 20 MB.
        assert done.uncovered_bytes == 40 * MB
        assert full - blocks.used() == done.bytes
        left.check()
        ordinary.check()
        amem.resume()
    assert amem.pause("weights").uncovered_bytes == 0
    amem.resume()
    set_expandable(False)
    assert amem.pause().uncovered_bytes == 40 * MB, "the segments are there still"
    amem.resume()
    assert len(said) == 1 and f"{40 * MB} bytes of it are not paused now" in said[0], said
    for block in (covered, left, weights, ordinary):
        block.check()


def test_a_communicator_is_noticed() -> None:
    assert not _api._torch_has_communicator()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert not _api._torch_has_communicator()
    amem.get_group_id()  # the library is loaded, and not enabled
    distributed.new_group(backend="nccl")
    # torch 2.15 makes the communicator with the group.
    group = distributed.new_group(backend="nccl")
    backend = group._get_backend(torch.device("cuda"))
    assert _api._torch_has_communicator() == bool(backend._comm_ptr())
    distributed.all_reduce(torch.empty(4, device="cuda"), group=group)
    assert backend._comm_ptr()
    assert _api._torch_has_communicator()
    with pytest.raises(amem.NotEnabledError, match=r"torch\.distributed uses NCCL.*amem\.enable"):
        amem.pause()


def test_a_pause_of_all_is_refused_where_regions_are_and_nccl_is_not_hooked() -> None:
    with amem.region("weights"):
        block = Block(30 * MB)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    tensor = torch.empty(4, device="cuda")
    distributed.all_reduce(tensor)
    full = blocks.used()
    assert amem.state("nccl") is amem.State.OFF
    with pytest.raises(amem.NotEnabledError, match=r"torch\.distributed uses NCCL.*name the tags"):
        amem.pause()
    assert blocks.used() == full and amem.state("weights") is amem.State.ACTIVE
    with amem.paused("weights") as done:
        assert done.tags == ("weights",)
        assert full - blocks.used() == done.bytes > 0
    block.check()


def test_a_child_of_fork_is_told_so() -> None:
    with amem.region("weights"):
        block = Block(MB)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_reduce(torch.empty(4, device="cuda"))
    child = os.fork()
    if child == 0:
        try:
            amem.pause()
        except amem.ForkedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    block.check()
