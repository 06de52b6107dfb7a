"""The contents of paused tensors, and where they are kept."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from . import _library
from ._api import State
from .errors import ArgumentTypeError, InvalidArgumentError, InvalidStateError

__all__ = ["cpu_backup", "set_disk_directory"]


def cpu_backup(tensor: Any, zero_copy: bool = False) -> Any:
    """A CPU tensor with the contents of a region's tensor, also while that is paused.

    Shape, dtype and strides are the tensor's.

    Args:
        tensor: one on the GPU, whose memory is a region's.
        zero_copy: no copy, but the backup itself, where it is on the host. It
            is valid until the tag is resumed, and keeps the tensor from being
            freed. Read it only.

    Raises:
        InvalidArgumentError: the tensor's memory is not a region's, so that no
            pause of amem's takes it away.
        InvalidStateError: zero_copy, and the tensor is not paused.
        AmemError: it is paused without a backup, or, for zero_copy, the backup
            is not in one piece on the host.
    """
    return _read(tensor, zero_copy, retained=False)


def last_backup(tensor: Any, zero_copy: bool = False) -> Any:
    """cpu_backup(), but of a tensor that is not paused what its last pause kept.

    Raises:
        InvalidStateError: it is not paused, and the resume has not retained that (amem_retain_backups()).
    """
    return _read(tensor, zero_copy, retained=True)


def check_tensor(tensor: Any) -> Any:
    """Answers torch, if it is one of torch's tensors."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"no tensor of torch's: a {type(tensor).__name__}")
    return torch


def _read(tensor: Any, zero_copy: bool, retained: bool) -> Any:
    torch = check_tensor(tensor)
    if tensor.device.type != "cuda" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise InvalidArgumentError(f"no plain tensor on a GPU: {tensor.device}, {tensor.layout}")
    tensor = tensor.detach()
    size, stride = tensor.size(), tensor.stride()
    if tensor.numel() == 0:
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu")
    # Elements from the first to the last in memory; there may be others between.
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride))
    length = extent * tensor.element_size()
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:  # of a subclass
        raise InvalidArgumentError(f"the tensor has no memory of its own: {error}") from error

    library = _library.loaded()
    state = State.OFF if library is None else State(library.amem_memory_state(address))
    if library is None or state is State.OFF:
        raise InvalidArgumentError("the tensor's memory is not a region's, and amem does not pause it: use .cpu()")
    if state is not State.PAUSED and not retained:
        if zero_copy:
            raise InvalidStateError("the tensor is not paused, so that there is no backup of it: use zero_copy=False")
        flat = torch.empty(extent, dtype=tensor.dtype, device="cpu")
        flat.copy_(tensor.as_strided((extent,), (1,)))
    elif zero_copy:
        backup = ctypes.c_void_p()
        status = library.amem_backup_pointer(address, length, ctypes.byref(backup))
        _library.check(library, "amem_backup_pointer", status)
        assert backup.value is not None
        memory: Any = (ctypes.c_char * length).from_address(backup.value)
        memory.tensor = tensor  # freeing it would free the backup
        flat = torch.frombuffer(memory, dtype=tensor.dtype)
    else:
        flat = torch.empty(extent, dtype=tensor.dtype, device="cpu")
        status = library.amem_read_backup(address, length, flat.data_ptr())
        _library.check(library, "amem_read_backup", status)
    return flat.as_strided(size, stride)


def set_disk_directory(path: str | os.PathLike[str]) -> None:
    """Where regions with backup="disk" keep contents. Overrides AMEM_DISK_DIRECTORY.

    Raises:
        CoreError: the library is missing or of another release.
        AmemError: the folder can't be used.
    """
    folder = _library.folder_path(path)
    library = _library.load()
    _library.check(library, "amem_set_disk_directory", library.amem_set_disk_directory(folder))
