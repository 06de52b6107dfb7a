"""Tensors whose contents are known, and what the simulated device says of memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import amem
import torch
from amem import _library

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
# While a thread allocates from a pool, torch 2.11 gives nothing of its own cache back; 2.15 does.
KEEPS_CACHE = RELEASE < (2, 15)

KB, MB = 1 << 10, 1 << 20
# torch's small segments have 2 MB. What has 10 MB or more has a segment of its own, as large.
SMALL, LARGE = 100 * KB, 12 * MB

_seed = 0


def bytes_of(size: int) -> Any:
    """Contents on the host, others at each call."""
    global _seed
    _seed += 0x9E3779B1
    return (
        torch.arange(_seed, _seed + size // 8 + 1, dtype=torch.int64).mul_(0x9E3779B97F4A7C1).view(torch.uint8)[:size]
    )


class Block:
    """A tensor of bytes on a GPU, in the region in which it is made, and what must be in it."""

    def __init__(self, size: int = LARGE, device: Any = "cuda") -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self.address = self.tensor.data_ptr()
        self.fill()

    def fill(self) -> None:
        self.host = bytes_of(self.tensor.numel())
        self.tensor.copy_(self.host)

    def check(self) -> None:
        assert self.tensor.data_ptr() == self.address, "the address has changed"
        assert torch.equal(self.tensor.cpu(), self.host), f"contents of {self.tensor.numel()} bytes have changed"


class Copy(torch.autograd.Function):  # type: ignore[misc]
    """Something whose backward allocates, with copies alone."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Any) -> Any:
        backward_threads.append(threading.get_ident())
        return torch.empty_like(grad).copy_(grad)


backward_threads: list[int] = []


def gradient() -> Block:
    """What a backward() has allocated."""
    block = Block.__new__(Block)
    leaf = torch.empty(LARGE // 4, device="cuda", requires_grad=True)
    wanted = torch.rand(LARGE // 4)
    Copy.apply(leaf).backward(wanted.to("cuda"))
    block.tensor, block.host = leaf.grad.view(torch.uint8), wanted.view(torch.uint8)
    block.address = block.tensor.data_ptr()
    return block


def run(work: Callable[[], Any]) -> None:
    """On another thread, which ends before this returns; what it raises is raised here."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def state(tensor: Any) -> amem.State:
    """Of the tensor's memory: OFF is ordinary."""
    return amem.State(_library.load().amem_memory_state(tensor.data_ptr()))


def ordinary(*blocks: Block) -> bool:
    return all(state(block.tensor) is amem.State.OFF for block in blocks)


def used(device: int = 0) -> int:
    """Bytes of the device that somebody holds, as the driver says."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def given_back(*tags: str, device: int = 0) -> int:
    """Pauses the tags; the bytes that the device has got back by it."""
    before = used(device)
    amem.pause(*tags)
    return before - used(device)


def only_paused(tag: str, of: list[Block], others: list[Block]) -> None:
    """Pauses and resumes a tag: the blocks of it are gone meanwhile, the device has their memory, all others are there.

    The backup must keep contents.
    """
    assert given_back(tag) >= sum(block.tensor.numel() for block in of if block.tensor.device.index == 0)
    assert all(state(block.tensor) is amem.State.PAUSED for block in of)
    for block in others:
        assert state(block.tensor) is not amem.State.PAUSED
        block.check()
    for block in of:
        assert torch.equal(amem.cpu_backup(block.tensor), block.host)
    amem.resume(tag)
    for block in [*of, *others]:
        block.check()


def region(tag: str, backup: str = "cpu") -> dict[str, Any]:
    """The statistics of a region."""
    empty = {"allocations": 0, "allocated_bytes": 0, "device_bytes": 0, "host_bytes": 0}
    found = [entry for entry in amem.stats()["regions"] if (entry["tag"], entry["backup"]) == (tag, backup)]
    return dict(found[0]) if found else empty


def segments(device: int = 0) -> list[Any]:
    """torch's own, of this device."""
    return [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == device]


def segment_of(block: Block) -> Any:
    """torch's segment that the block is in."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= block.address < segment["address"] + segment["total_size"]:
            return segment
    raise AssertionError("torch knows no segment of the block")


def collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()
