"""For a rank: imports a descriptor as NCCL would, through amem's wrapper of the driver's function."""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import Any

POSIX_FD = 1
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def _wrapper(rank: Any, name: str) -> Any:
    hook = ctypes.CDLL("libamem_hook.so")
    hook.amem_hook_driver_table.restype = ctypes.c_void_p
    hook.amem_hook_driver_table.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    real = ctypes.cast(getattr(rank.device.driver.library, name), ctypes.c_void_p)
    return hook.amem_hook_driver_table(name.encode(), real)


def attempt(rank: Any, body: str, seals: int = SEALS) -> int:
    """The CUresult of importing a memfd with this text. What was imported is released again."""
    fd = os.memfd_create("probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, body.encode())
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        import_handle = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_int)(
            _wrapper(rank, "cuMemImportFromShareableHandle")
        )
        handle = ctypes.c_uint64()
        result = int(import_handle(ctypes.byref(handle), fd, POSIX_FD))
        if result == 0:
            release = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(_wrapper(rank, "cuMemRelease"))
            if status := release(handle):
                raise RuntimeError(f"the imported handle can't be released: {status}")
        return result
    finally:
        os.close(fd)
