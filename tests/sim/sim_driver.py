"""The simulated driver by ctypes, and processes that use it side by side.

A process reads the simulator's settings once, so the tests never load the
driver themselves: each runs functions of a test file in processes of its own.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

BUILD = Path(os.environ.get("AMEM_BUILD", Path(__file__).resolve().parents[2] / "build"))
LIBRARY = BUILD / "sim" / "libcuda.so.1"
TIMEOUT_S = 30.0
MIB = 1 << 20
GRAIN = 2 * MIB

POSIX_FD = 1
FABRIC = 8
DEVICE = 1
HOST_NUMA = 3
READ = 1
READ_WRITE = 3

U64 = ctypes.c_ulonglong
Size = ctypes.c_size_t
Pointer = ctypes.c_void_p
Kernel = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p))
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class MulticastProp(ctypes.Structure):
    _fields_ = [("devices", ctypes.c_uint), ("size", Size), ("handle_types", U64), ("flags", U64)]


class Driver:
    """One process's driver, with a current context on a device."""

    def __init__(self, device: int = 0) -> None:
        self.library = ctypes.CDLL(str(LIBRARY))
        self.kept: list[Any] = []
        self.device = device
        self.context = Pointer()
        self.do("cuInit", ctypes.c_uint(0))
        self.use(device)

    def use(self, device: int) -> None:
        self.device = device
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.do("cuCtxSetCurrent", self.context)

    def call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.library, name)(*arguments))

    def do(self, name: str, *arguments: Any) -> None:
        result = self.call(name, *arguments)
        assert result == 0, f"{name} failed with {result}"

    def try_create(
        self, size: int, types: int = POSIX_FD, location: int = DEVICE, device: int | None = None
    ) -> tuple[int, U64]:
        handle = U64()
        where = Location(location, self.device if device is None else device)
        prop = Prop(1, types, where, None)
        return self.call("cuMemCreate", ctypes.byref(handle), Size(size), ctypes.byref(prop), U64(0)), handle

    def create(
        self, size: int = GRAIN, types: int = POSIX_FD, location: int = DEVICE, device: int | None = None
    ) -> U64:
        result, handle = self.try_create(size, types, location, device)
        assert result == 0, f"cuMemCreate failed with {result}"
        return handle

    def reserve(self, size: int = GRAIN, alignment: int = 0) -> int:
        base = U64()
        self.do("cuMemAddressReserve", ctypes.byref(base), Size(size), Size(alignment), U64(0), U64(0))
        return base.value

    def try_map(self, base: int, size: int, handle: U64, offset: int = 0) -> int:
        return self.call("cuMemMap", U64(base), Size(size), Size(offset), handle, U64(0))

    def access(
        self, base: int, size: int, flags: int = READ_WRITE, device: int | None = None, location: int = DEVICE
    ) -> int:
        where = Location(location, self.device if device is None else device)
        return self.call("cuMemSetAccess", U64(base), Size(size), ctypes.byref(Access(where, flags)), Size(1))

    def map(self, handle: U64, size: int = GRAIN) -> int:
        base = self.reserve(size)
        assert self.try_map(base, size, handle) == 0
        assert self.access(base, size) == 0
        return base

    def unmap(self, base: int, size: int = GRAIN) -> int:
        return self.call("cuMemUnmap", U64(base), Size(size))

    def release(self, handle: U64) -> int:
        return self.call("cuMemRelease", handle)

    def alloc(self, size: int) -> int:
        base = U64()
        self.do("cuMemAlloc_v2", ctypes.byref(base), Size(size))
        return base.value

    def pinned(self, size: int) -> int:
        memory = Pointer()
        self.do("cuMemHostAlloc", ctypes.byref(memory), Size(size), 1)
        assert memory.value
        return memory.value

    def used(self) -> int:
        available, total = Size(), Size()
        self.do("cuMemGetInfo_v2", ctypes.byref(available), ctypes.byref(total))
        return total.value - available.value

    def export(self, handle: U64) -> int:
        fd = ctypes.c_int(-1)
        self.do("cuMemExportToShareableHandle", ctypes.byref(fd), handle, POSIX_FD, U64(0))
        return fd.value

    def try_import(self, fd: int) -> tuple[int, U64]:
        handle = U64()
        return self.call("cuMemImportFromShareableHandle", ctypes.byref(handle), Pointer(fd), POSIX_FD), handle

    def fill(self, base: int, value: int, size: int) -> None:
        self.do("cuMemsetD8_v2", U64(base), ctypes.c_ubyte(value), Size(size))

    def write(self, base: int, data: bytes) -> None:
        self.do("cuMemcpyHtoD_v2", U64(base), data, Size(len(data)))

    def read(self, base: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.do("cuMemcpyDtoH_v2", data, U64(base), Size(size))
        return data.raw

    def stream(self, flags: int = 1) -> Pointer:
        stream = Pointer()
        self.do("cuStreamCreate", ctypes.byref(stream), flags)
        return stream

    def event(self, flags: int = 0) -> Pointer:
        event = Pointer()
        self.do("cuEventCreate", ctypes.byref(event), flags)
        return event

    def kernel(self, body: Callable[..., object], *types: Any) -> Callable[..., int]:
        """A function (stream, values...) that launches the body with the values."""

        def run(params: Any) -> None:
            body(*(ctypes.cast(params[i], ctypes.POINTER(kind))[0] for i, kind in enumerate(types)))

        code = Kernel(run)
        sizes = (Size * max(1, len(types)))(*(ctypes.sizeof(kind) for kind in types))
        function = Pointer()
        self.do("cuSimFunctionCreate", ctypes.byref(function), code, len(types), sizes)
        self.kept.append(code)

        def launch(stream: Pointer | None, *values: Any) -> int:
            held = [kind(value) for kind, value in zip(types, values)]
            params = (Pointer * (len(held) + 1))(*(ctypes.addressof(value) for value in held))
            return self.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, params, None)

        return launch


class Peer:
    """One end of a conversation between a test and a process that it started."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(TIMEOUT_S)

    def send(self, value: Any = None, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.connection.sendmsg([json.dumps(value).encode()], rights)

    def receive(self) -> tuple[Any, list[int]]:
        fds = array.array("i")
        data, ancillary, _, _ = self.connection.recvmsg(65536, socket.CMSG_SPACE(16))
        for _, kind, rights in ancillary:
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(rights)
        assert data, "the other process ended"
        return json.loads(data), list(fds)

    def value(self) -> Any:
        return self.receive()[0]


class Process(Peer):
    """A process that runs one function of a test file with a Peer."""

    def __init__(self, file: str, function: str, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, file, function, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                stderr=subprocess.PIPE,
                text=True,
            )

    def wait(self) -> tuple[int, str]:
        """The exit status and what the process wrote to stderr."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, errors

    def finish(self) -> None:
        status, errors = self.wait()
        assert status == 0, f"ended with {status}: {errors}"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)
        self.connection.close()


def main(functions: dict[str, Any]) -> None:
    """Runs the function that Process asked for."""
    functions[sys.argv[1]](Peer(socket.socket(fileno=int(sys.argv[2]))))
