"""The contents of paused tensors, and where they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import amem
import pytest
import torch

import blocks
from blocks import Block


def views(numbers: Any, floats: Any) -> list[Any]:
    return [
        numbers,
        floats,
        floats[3:7],
        numbers.as_strided((3, 4), (8, 2), 1),
        numbers.as_strided((4, 3), (2, 8), 1),
        numbers.as_strided((3, 2), (0, 1), 5),
        numbers.as_strided((), (), 23),
        numbers.as_strided((0, 3), (3, 1)),
        numbers[8:16].view(torch.int64),
        numbers.view(4, 6).t(),
    ]


@pytest.mark.parametrize("paused", [False, True])
def test_any_view_keeps_its_shape_strides_and_type(paused: bool) -> None:
    host = torch.arange(24, dtype=torch.uint8), torch.arange(10, dtype=torch.float32)
    with amem.region("weights"):
        device = [tensor.to("cuda") for tensor in host]
    if paused:
        amem.pause()
    for view, wanted in zip(views(*device), views(*host)):
        backup = amem.cpu_backup(view)
        assert (backup.device.type, backup.dtype) == ("cpu", wanted.dtype)
        assert (backup.size(), backup.stride()) == (wanted.size(), wanted.stride())
        assert torch.equal(backup, wanted)


def test_a_copy_outlives_the_pause_and_the_tensor() -> None:
    with amem.region("weights"):
        block = Block()
    amem.pause()
    backup = amem.cpu_backup(block.tensor)
    amem.resume()
    wanted = block.host
    block.fill()
    del block
    blocks.collect()
    assert torch.equal(backup, wanted)


def test_zero_copy_is_the_backup_itself_and_keeps_its_memory() -> None:
    with amem.region("weights"):
        block = Block()
    wanted = block.host
    amem.pause()
    backups = [amem.cpu_backup(block.tensor, zero_copy=True) for _ in range(2)]
    assert backups[0].data_ptr() == backups[1].data_ptr()
    del block
    backups.pop()
    blocks.collect()
    assert torch.equal(backups[0], wanted)
    assert blocks.region("weights")["allocations"] == 1, "the tensor is not freed under it"
    del backups
    blocks.collect()
    assert blocks.region("weights")["allocations"] == 0


def test_a_tensor_that_is_not_paused_is_copied() -> None:
    with amem.region("weights"):
        block = Block()
    with amem.region("cache"):
        other = Block()
    amem.pause("cache")
    backup, wanted = amem.cpu_backup(block.tensor), block.host
    block.fill()
    assert torch.equal(backup, wanted)
    with pytest.raises(amem.InvalidStateError, match="zero_copy=False"):
        amem.cpu_backup(block.tensor, zero_copy=True)
    assert torch.equal(amem.cpu_backup(other.tensor), other.host)


@pytest.mark.parametrize("paused", [False, True])
def test_what_has_no_backup_is_an_error(paused: bool) -> None:
    with amem.region("weights"):
        weights = Block(8)
    plain = Block(8)
    if paused:
        amem.pause()
    with pytest.raises(amem.InvalidArgumentError, match=r"\.cpu\(\)"):
        amem.cpu_backup(plain.tensor)
    for tensor in (
        torch.empty(3),
        torch.sparse_coo_tensor(size=(2, 2), device="cuda"),
        weights.tensor.view(torch.complex64).conj(),
    ):
        with pytest.raises(amem.InvalidArgumentError, match="no plain tensor on a GPU"):
            amem.cpu_backup(tensor)


def test_without_amem_no_memory_is_a_regions() -> None:
    with pytest.raises(amem.InvalidArgumentError, match=r"\.cpu\(\)"):
        amem.cpu_backup(Block().tensor)


def test_contents_on_disk_are_in_the_folder_and_leave_it(tmp_path: Path) -> None:
    amem.set_disk_directory(tmp_path)
    with amem.region("logs", backup="disk"):
        block = Block()
    amem.pause()
    assert blocks.region("logs", "disk")["disk_bytes"] >= blocks.LARGE
    assert torch.equal(amem.cpu_backup(block.tensor), block.host)
    with pytest.raises(amem.InvalidStateError):
        amem.cpu_backup(block.tensor, zero_copy=True)
    amem.resume()
    block.check()
    assert list(tmp_path.iterdir()) == []
