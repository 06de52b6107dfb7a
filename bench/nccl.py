"""The few functions of NCCL that the benchmark needs, on a libnccl of one's choice."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from ctypes import c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

FLOAT32 = 7
SUM = 0
SUSPEND_MEMORY = 1


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * 128),)


FUNCTIONS: dict[str, Sequence[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(c_void_p), c_int, UniqueId, c_int],
    "ncclCommDestroy": [c_void_p],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}
# Since 2.29.7.
SUSPENSION: dict[str, Sequence[Any]] = {"ncclCommSuspend": [c_void_p, c_int], "ncclCommResume": [c_void_p]}


class NcclError(RuntimeError):
    """A call of NCCL failed; the message has NCCL's own text."""


def loaded_path() -> str:
    """The libnccl that is mapped in this process, such as the one that torch brought."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = re.search(r"\S*/libnccl\.so[.0-9]*$", maps, re.M)
    if not found:
        raise NcclError("no libnccl is loaded in this process")
    return found.group()


class Nccl:
    def __init__(self, path: str) -> None:
        # Deep binding: the calls inside one libnccl must not reach another that is loaded.
        self._library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        self.path = path
        for name, arguments in FUNCTIONS.items():
            self._declare(name, arguments)
        self._library.ncclGetErrorString.restype = c_char_p
        self._library.ncclGetLastError.restype = c_char_p
        self.can_suspend = all(hasattr(self._library, name) for name in SUSPENSION)
        if self.can_suspend:
            for name, arguments in SUSPENSION.items():
                self._declare(name, arguments)

    def _declare(self, name: str, arguments: Sequence[Any]) -> None:
        function = getattr(self._library, name)
        function.argtypes = list(arguments)
        function.restype = c_int

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = self._library.ncclGetErrorString(result) or b""
            last = self._library.ncclGetLastError(None) or b""
            raise NcclError(f"{name}: {text.decode()}: {last.decode(errors='replace').strip()}")

    def version(self) -> str:
        number = c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> str:
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made).hex()

    def init(self, ranks: int, unique_id: str, rank: int) -> c_void_p:
        communicator = c_void_p()
        wanted = UniqueId.from_buffer_copy(bytes.fromhex(unique_id))
        self.call("ncclCommInitRank", ctypes.byref(communicator), ranks, wanted, rank)
        return communicator

    def destroy(self, communicator: c_void_p) -> None:
        self.call("ncclCommDestroy", communicator)

    def suspend(self, communicator: c_void_p) -> None:
        self.call("ncclCommSuspend", communicator, SUSPEND_MEMORY)

    def resume(self, communicator: c_void_p) -> None:
        self.call("ncclCommResume", communicator)

    def all_reduce(self, source: int, output: int, count: int, kind: int, communicator: c_void_p, stream: int) -> None:
        self.call("ncclAllReduce", source, output, count, kind, SUM, communicator, stream)

    def all_to_all(
        self, source: int, output: int, chunk: int, ranks: int, kind: int, communicator: c_void_p, stream: int
    ) -> None:
        """A chunk of 4-byte elements from every rank to every rank."""
        self.call("ncclGroupStart")
        for peer in range(ranks):
            offset = 4 * chunk * peer
            self.call("ncclSend", source + offset, chunk, kind, peer, communicator, stream)
            self.call("ncclRecv", output + offset, chunk, kind, peer, communicator, stream)
        self.call("ncclGroupEnd")
