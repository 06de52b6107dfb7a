"""Tensors whose contents are known, and what the simulated device says of memory."""

from __future__ import annotations

import gc
from typing import Any

import torch

import amem
from amem import _library

KB, MB = 1 << 10, 1 << 20
# torch's small segments have 2 MB, and its large ones 20 MB for what is smaller than 10 MB.
SMALL, LARGE = 100 * KB, 24 * MB


class Block:
    """A tensor of bytes on a GPU, in the region in which it is made, and what must be in it."""

    def __init__(self, size: int = LARGE, device: Any = "cuda") -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self.address = self.tensor.data_ptr()
        self.fill()

    def fill(self) -> None:
        self.host = torch.randint(0, 256, self.tensor.shape, dtype=torch.uint8)
        self.tensor.copy_(self.host)

    def check(self) -> None:
        assert self.tensor.data_ptr() == self.address, "the address has changed"
        assert torch.equal(self.tensor.cpu(), self.host), f"contents of {self.tensor.numel()} bytes have changed"


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
    found = [entry for entry in amem.stats().get("regions", []) if (entry["tag"], entry["backup"]) == (tag, backup)]
    return found[0] if found else empty


def segments(device: int = 0) -> list[Any]:
    """torch's own, of this device."""
    return [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == device]


def collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()
