"""The part of NCCL that the demo, the tests and the benchmarks use.

It runs on the real libnccl.so.2 and on the simulated one. NCCL finds the
driver by its soname, so for the simulated one load that first, by its path.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint64, c_void_p

from . import _env
from ._foreign import Foreign

INT32 = 2
SUM = 0

SONAME = "libnccl.so.2"


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


_COLLECTIVE = (c_uint64, c_uint64, c_size_t, c_int)
FUNCTIONS = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommSplit": (c_void_p, c_int, c_int, POINTER(c_void_p), c_void_p),
    "ncclCommDestroy": (c_void_p,),
    "ncclAllReduce": (*_COLLECTIVE, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (*_COLLECTIVE, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (*_COLLECTIVE, c_int, c_void_p, c_void_p),
    "ncclAllGather": (*_COLLECTIVE, c_void_p, c_void_p),
    "ncclSend": (c_uint64, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_uint64, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),
    "ncclMemFree": (c_void_p,),
}


class NcclError(RuntimeError):
    """A call of NCCL failed; status is its ncclResult_t."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def find() -> str:
    """The library of AMEM_NCCL_LIBRARY, else the one that torch would load, else the system's."""
    chosen = _env.text("AMEM_NCCL_LIBRARY")
    if chosen:
        return chosen
    for folder in sys.path:
        path = os.path.join(folder or ".", "nvidia", "nccl", "lib", SONAME)
        if os.path.exists(path):
            return path
    return SONAME


class Nccl(Foreign):
    def __init__(self, path: str | None = None) -> None:
        super().__init__(path or find(), FUNCTIONS)

    def error(self, name: str, status: int) -> NcclError:
        self.library.ncclGetErrorString.restype = c_char_p
        self.library.ncclGetLastError.restype = c_char_p
        texts = (self.library.ncclGetErrorString(c_int(status)), self.library.ncclGetLastError(c_void_p()))
        reason = ": ".join(text.decode(errors="replace") for text in texts if text)
        return NcclError(f"{name}: {reason} ({status})", status)

    def version(self) -> str:
        number = c_int()
        self.call("ncclGetVersion", byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> str:
        """A unique ID, as hexadecimal text that can be sent to the other ranks."""
        identity = UniqueId()
        self.call("ncclGetUniqueId", byref(identity))
        return bytes(identity).hex()

    def mem_alloc(self, size: int) -> int:
        pointer = c_void_p()
        self.call("ncclMemAlloc", byref(pointer), size)
        return pointer.value or 0

    def mem_free(self, pointer: int) -> None:
        self.call("ncclMemFree", pointer)


class Communicator:
    """One rank's communicator. Collectives are of int32 and run on a stream."""

    def __init__(self, nccl: Nccl, handle: c_void_p, rank: int, size: int) -> None:
        self.nccl = nccl
        self.handle = handle
        self.rank = rank
        self.size = size
        self.calls = 0

    @classmethod
    def connect(cls, nccl: Nccl, identity: str, rank: int, size: int) -> Communicator:
        handle = c_void_p()
        unique = UniqueId.from_buffer_copy(bytes.fromhex(identity))
        nccl.call("ncclCommInitRank", byref(handle), size, unique, rank)
        return cls(nccl, handle, rank, size)

    def split(self, color: int, rank: int, size: int) -> Communicator:
        """The communicator of the ranks that gave the same color."""
        handle = c_void_p()
        self.nccl.call("ncclCommSplit", self.handle, color, rank, byref(handle), None)
        return Communicator(self.nccl, handle, rank, size)

    def destroy(self) -> None:
        self.nccl.call("ncclCommDestroy", self.handle)

    def all_reduce(self, send: int, receive: int, count: int, stream: c_void_p) -> None:
        self.nccl.call("ncclAllReduce", send, receive, count, INT32, SUM, self.handle, stream)

    def reduce_scatter(self, send: int, receive: int, count: int, stream: c_void_p) -> None:
        self.nccl.call("ncclReduceScatter", send, receive, count, INT32, SUM, self.handle, stream)

    def all_gather(self, send: int, receive: int, count: int, stream: c_void_p) -> None:
        self.nccl.call("ncclAllGather", send, receive, count, INT32, self.handle, stream)

    def broadcast(self, send: int, receive: int, count: int, root: int, stream: c_void_p) -> None:
        self.nccl.call("ncclBroadcast", send, receive, count, INT32, root, self.handle, stream)

    def exchange(
        self, sends: list[tuple[int, int]], receives: list[tuple[int, int]], count: int, stream: c_void_p
    ) -> None:
        """One group of sends and receives, given as pairs of a pointer and a peer."""
        self.nccl.call("ncclGroupStart")
        for pointer, peer in sends:
            self.nccl.call("ncclSend", pointer, count, INT32, peer, self.handle, stream)
        for pointer, peer in receives:
            self.nccl.call("ncclRecv", pointer, count, INT32, peer, self.handle, stream)
        self.nccl.call("ncclGroupEnd")
