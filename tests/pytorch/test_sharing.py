"""Tensors that torch.multiprocessing shares, between processes that both have amem."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import amem
import pytest
import torch
import torch.multiprocessing

import blocks
from blocks import LARGE, Block

CONTEXT: Any = torch.multiprocessing.get_context("fork")


def digest(tensor: Any) -> str:
    host = tensor.cpu()
    return hashlib.sha256(ctypes.string_at(host.data_ptr(), host.numel())).hexdigest()


def other_process(todo: Any, done: Any) -> None:
    """Does what it is told with the tensors that it gets, until it is told None."""
    amem.enable()  # as AMEM_ENABLE=1 does in a process that starts
    tensors: dict[str, Any] = {}
    while (order := todo.get()) is not None:
        verb, name, *rest = order
        try:
            if verb == "take":
                tensors[name] = rest[0]
                del order, rest
                done.put([digest(tensors[name]), tensors[name].data_ptr()])
            elif verb == "write":
                tensors[name].copy_(rest[0])
                torch.cuda.synchronize()
                done.put(None)
            elif verb == "look":
                done.put([digest(tensors[name]), tensors[name].data_ptr()])
            elif verb == "drop":
                del tensors[name]
                blocks.collect()
                torch.cuda.ipc_collect()
                done.put(None)
        except BaseException as failure:
            done.put(f"{type(failure).__name__}: {failure}")


class Other:
    def __init__(self) -> None:
        self.todo, self.done = CONTEXT.SimpleQueue(), CONTEXT.SimpleQueue()
        self.process = CONTEXT.Process(target=other_process, args=(self.todo, self.done), daemon=True)
        self.process.start()

    def __call__(self, *order: Any) -> Any:
        self.todo.put(order)
        assert self.done._reader.poll(30), f"no answer to {order[:2]}"
        return self.done.get()

    def end(self) -> None:
        self.todo.put(None)
        self.process.join(60)
        assert self.process.exitcode == 0


@pytest.mark.env(AMEM_ENABLE="1")
def test_the_owners_pause_frees_memory_in_both_and_its_resume_brings_it_back_in_both() -> None:
    other = Other()
    with amem.region("weights"):
        block = Block()
    plain = Block()
    seen, at = other("take", "block", block.tensor)
    assert seen == digest(block.host)
    assert other("take", "plain", plain.tensor)[0] == digest(plain.host)
    for _ in range(2):
        in_use = blocks.used()
        assert blocks.given_back("weights") >= LARGE, "also what the other process has mapped"
        assert "paused" in other("look", "block")
        assert other("look", "plain")[0] == digest(plain.host), "ordinary memory is CUDA's to share"
        amem.resume()
        assert blocks.used() == in_use
        block.check()
        assert other("look", "block") == [digest(block.host), at]
        block.fill()
        torch.cuda.synchronize()
        assert other("look", "block")[0] == digest(block.host)
        block.host = blocks.bytes_of(LARGE)
        assert other("write", "block", block.host) is None
        block.check()
    other("drop", "block")
    other("drop", "plain")
    other.end()
    block.check()


@pytest.mark.env(AMEM_ENABLE="1")
def test_memory_of_the_default_region_is_shared_as_well() -> None:
    other = Other()
    amem.default_region("all")
    small, large = Block(blocks.SMALL), Block()
    assert other("take", "small", small.tensor)[0] == digest(small.host)
    assert other("take", "large", large.tensor)[0] == digest(large.host)
    assert blocks.given_back("all") >= LARGE
    amem.resume()
    for name, block in (("small", small), ("large", large)):
        block.check()
        assert other("look", name)[0] == digest(block.host)
    other.end()


@pytest.mark.env(AMEM_ENABLE="1")
def test_a_process_that_ends_holds_nothing() -> None:
    other = Other()
    with amem.region("weights"):
        block = Block()
    other("take", "block", block.tensor)
    other.process.kill()
    other.process.join(60)
    assert blocks.given_back("weights") >= LARGE
    amem.resume()
    block.check()


def test_where_nobody_could_open_it_the_sharing_call_says_so() -> None:
    if "@amem" in Path("/proc/net/unix").read_text():
        pytest.skip("somebody else on this machine uses amem, and could open it")
    with amem.region("weights"):
        block = Block()
    with pytest.raises(RuntimeError, match="AMEM_ENABLE=1"):
        block.tensor.untyped_storage()._share_cuda_()
    block.check()
    with amem.disable():
        plain = block.tensor.clone()
    assert plain.untyped_storage()._share_cuda_()
    blocks.only_paused("weights", [block], [])
