"""The part of the CUDA driver that the demo, the tests and the benchmarks use.

It runs on the real libcuda.so.1 and on the simulated one.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from ._foreign import Foreign

STREAM_NON_BLOCKING = 1
CAPTURE_MODE_THREAD_LOCAL = 1

FUNCTIONS = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
}


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; status is its CUresult."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Driver(Foreign):
    def __init__(self, path: str = "libcuda.so.1") -> None:
        super().__init__(path, FUNCTIONS)
        self.call("cuInit", 0)

    def error(self, name: str, status: int) -> DriverError:
        text = c_char_p()
        self.library.cuGetErrorName(c_int(status), byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        return DriverError(f"{name}: {reason} ({status})", status)

    def version(self) -> str:
        number = c_int()
        self.call("cuDriverGetVersion", byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def device_count(self) -> int:
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value


class Device:
    """A device's primary context with one stream, on which all of it runs."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        handle, context, stream = c_int(), c_void_p(), c_void_p()
        driver.call("cuDeviceGet", byref(handle), ordinal)
        driver.call("cuDevicePrimaryCtxRetain", byref(context), handle)
        self._context = context
        self.make_current()
        driver.call("cuStreamCreate", byref(stream), STREAM_NON_BLOCKING)
        self.stream = stream

    def make_current(self) -> None:
        """To be called once on every thread that uses the device."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def used_bytes(self) -> int:
        """Device memory in use, by whatever process."""
        free, total = c_size_t(), c_size_t()
        self.driver.call("cuMemGetInfo_v2", byref(free), byref(total))
        return total.value - free.value

    def alloc(self, size: int) -> int:
        pointer = c_uint64()
        self.driver.call("cuMemAlloc_v2", byref(pointer), size)
        return pointer.value

    def free(self, pointer: int) -> None:
        self.driver.call("cuMemFree_v2", pointer)

    def write(self, pointer: int, data: bytes) -> None:
        self.driver.call("cuMemcpyHtoDAsync_v2", pointer, data, len(data), self.stream)
        self.synchronize()

    def read(self, pointer: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.driver.call("cuMemcpyDtoHAsync_v2", buffer, pointer, size, self.stream)
        self.synchronize()
        return buffer.raw

    def fill(self, pointer: int, byte: int, size: int) -> None:
        self.driver.call("cuMemsetD8Async", pointer, byte, size, self.stream)
        self.synchronize()

    def synchronize(self) -> None:
        self.driver.call("cuStreamSynchronize", self.stream)

    def begin_capture(self) -> None:
        self.driver.call("cuStreamBeginCapture_v2", self.stream, CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self) -> Graph:
        graph, executable = c_void_p(), c_void_p()
        self.driver.call("cuStreamEndCapture", self.stream, byref(graph))
        self.driver.call("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        return Graph(self, graph, executable)


class Graph:
    """A captured graph, ready to launch on its device's stream."""

    def __init__(self, device: Device, graph: c_void_p, executable: c_void_p) -> None:
        self.device = device
        self._graph = graph
        self._executable = executable

    def launch(self) -> None:
        self.device.driver.call("cuGraphLaunch", self._executable, self.device.stream)
        self.device.synchronize()

    def destroy(self) -> None:
        self.device.driver.call("cuGraphExecDestroy", self._executable)
        self.device.driver.call("cuGraphDestroy", self._graph)
