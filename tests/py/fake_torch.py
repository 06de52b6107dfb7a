"""A torch with as much of CUDA as regions meet, on the host's memory.

Its pools are torch's in what counts: which of those in use an allocation comes
from, that a pool can be in use once, that pools in use keep the cache from
being emptied, and that destroying one then ends the process. An allocation is a
segment of its own, which its pool gives out again once the tensor is gone.

In the environment: FAKE_TORCH, the release; FAKE_DEVICES, how many there are;
FAKE_WITHOUT, comma-separated: cuda, device, pools or native.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

# What a script starts with. The folder is not on sys.path of the tests' processes.
PRELUDE = f"sys.path.append({os.path.dirname(os.path.abspath(__file__))!r}); import fake_torch; fake_torch.install()\n"

RELEASE = os.environ.get("FAKE_TORCH", "2.11.0")
DEVICES = int(os.environ.get("FAKE_DEVICES", "2"))
WITHOUT = os.environ.get("FAKE_WITHOUT", "").split(",")
INNERMOST_FIRST = tuple(map(int, RELEASE.split(".")[:2])) >= (2, 10)

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_DEALLOCATE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

ITEM_SIZES = {"uint8": 1, "float32": 4}


class OutOfMemoryError(RuntimeError):
    pass


class Allocator:
    def __init__(self, allocate: int, deallocate: int) -> None:
        self.allocate, self.deallocate = _ALLOCATE(allocate), _DEALLOCATE(deallocate)


def library() -> Any:
    """The fake libamem_hook.so, whose cudaMalloc torch calls, or None."""
    try:
        found = ctypes.CDLL("libamem_hook.so", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    found.fake_malloc.restype = ctypes.c_void_p
    found.fake_malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int)
    return found


settings = {"expandable_segments": False}


def set_allocator_settings(text: str) -> None:
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition(":")
        if name == "expandable_segments":
            settings[name] = value == "True"


def memory_snapshot(_: None) -> dict[str, Any]:
    segments = [s for device in devices for pool in (device.default, *device.pools.values()) for s in pool.segments]
    return {
        "segments": [{"address": s.at, "total_size": s.size, "is_expandable": s.expandable} for s in segments],
        "allocator_settings": dict(settings),
    }


class Segment:
    def __init__(self, pool: PrivatePool, size: int) -> None:
        self.pool, self.size, self.used = pool, size, True
        self.own: Any = None
        self.default = False  # of the default region
        self.expandable = settings["expandable_segments"] and pool.allocator is None
        hook = None if self.expandable else library()
        at = hook.fake_malloc(size, pool.device) if hook and pool.allocator is None else None
        if at:
            self.at, self.default = at, True
        elif pool.allocator is None:
            self.own = ctypes.create_string_buffer(size)
            self.at = ctypes.addressof(self.own)
        else:
            self.at = pool.allocator.allocate(size, pool.device, None)
            if not self.at:
                raise OutOfMemoryError("CUDA out of memory.")

    def release(self) -> None:
        if self.default:
            assert library().fake_free(ctypes.c_void_p(self.at))
        elif self.pool.allocator is not None:
            self.pool.allocator.deallocate(self.at, self.size, self.pool.device, None)
        self.pool.segments.remove(self)


class PrivatePool:
    def __init__(self, device: int, allocator: Allocator | None) -> None:
        self.device, self.allocator, self.use_count = device, allocator, 1
        self.segments: list[Segment] = []

    def take(self, size: int) -> Segment:
        for segment in self.segments:
            if not segment.used and segment.size == size:
                segment.used = True
                return segment
        segment = Segment(self, size)
        self.segments.append(segment)
        return segment

    def empty(self) -> None:
        for segment in [s for s in self.segments if not s.used]:
            segment.release()


class Device:
    def __init__(self, number: int) -> None:
        self.default = PrivatePool(number, None)
        self.pools: dict[tuple[int, int], PrivatePool] = {}
        self.in_use: list[tuple[tuple[int, int], Callable[[], bool]]] = []
        self.started = False  # as far as CUDA's context goes

    def pool(self) -> PrivatePool:
        order = reversed(self.in_use) if INNERMOST_FIRST else iter(self.in_use)
        return next((self.pools[name] for name, here in order if here()), self.default)

    def empty(self) -> None:
        if not self.in_use:
            self.default.empty()
        for name, pool in list(self.pools.items()):
            if pool.use_count == 0:
                pool.empty()
                if not pool.segments:
                    del self.pools[name]

    def begin(self, name: tuple[int, int], here: Callable[[], bool], allocator: Allocator | None = None) -> None:
        if name in self.pools:
            assert self.pools[name].use_count > 0
            self.pools[name].use_count += 1
        else:
            self.pools[name] = PrivatePool(self.default.device, allocator)
        if any(other == name for other, _ in self.in_use):
            raise RuntimeError("already recording to mempool_id")
        self.in_use.append((name, here))

    def end(self, name: tuple[int, int]) -> None:
        self.in_use.remove(next(entry for entry in self.in_use if entry[0] == name))


# torch calls a pool's functions with a lock held.
lock = threading.RLock()
devices = [Device(number) for number in range(DEVICES)]
names = itertools.count(1)


class Thread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.multithreading = True
        self.capturing: CUDAGraph | None = None
        self.workspaces: dict[int, Tensor | None] = {}  # of cuBLAS


thread = Thread()


def begin_for_thread(device: int, name: tuple[int, int]) -> None:
    ident = threading.get_ident()
    devices[device].begin(name, lambda: threading.get_ident() == ident)


def release_pool(device: int, name: tuple[int, int]) -> None:
    pool = devices[device].pools[name]
    pool.use_count -= 1
    assert pool.use_count >= 0


class MemPool:
    def __init__(self, allocator: Allocator | None = None) -> None:
        self.id = (0, next(names))
        self.device = thread.device
        devices[self.device].pools[self.id] = PrivatePool(self.device, allocator)

    def use_count(self) -> int:
        if self.id not in devices[self.device].pools:
            raise RuntimeError("INTERNAL ASSERT FAILED")
        return devices[self.device].pools[self.id].use_count

    def __del__(self) -> None:
        if devices[self.device].in_use:
            os.abort()
        release_pool(self.device, self.id)
        devices[self.device].empty()


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: int | None = None) -> Iterator[None]:
    number = thread.device if device is None else device
    begin_for_thread(number, pool.id)
    try:
        yield
    finally:
        devices[number].end(pool.id)
        release_pool(number, pool.id)


class Stream:
    def __init__(self) -> None:
        self.device_index = thread.device


class CUDAGraph:
    def __init__(self) -> None:
        self._pool: tuple[int, int] | None = None

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        self._device = thread.device
        self._pool = pool or (next(names), 0)
        devices[self._device].begin(self._pool, lambda: thread.capturing is self)
        thread.capturing = self

    def capture_end(self) -> None:
        thread.capturing = None
        assert self._pool
        devices[self._device].end(self._pool)

    def pool(self) -> tuple[int, int] | None:
        return self._pool

    def __del__(self) -> None:
        if self._pool:
            release_pool(self._device, self._pool)


class graph:
    default_capture_stream: Stream | None = None

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> None:
        if stream is None and graph.default_capture_stream is None:
            graph.default_capture_stream = Stream()
        self.graph, self.pool, self.mode = cuda_graph, pool, capture_error_mode
        self.stream = stream or graph.default_capture_stream

    def __enter__(self) -> None:
        cuda.empty_cache()
        assert self.stream
        self.before, thread.device = thread.device, self.stream.device_index
        self.graph.capture_begin(self.pool, capture_error_mode=self.mode)

    def __exit__(self, *_: object) -> None:
        self.graph.capture_end()
        thread.device = self.before


class Tensor:
    def __init__(self, storage: Any, at: int, dtype: str, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.storage, self.at, self.dtype, self._size, self._stride = storage, at, dtype, size, stride
        self.offset = 0
        on_gpu = isinstance(storage, Allocation)
        self.device = SimpleNamespace(type="cuda" if on_gpu else "cpu")
        self.layout, self.conjugate = torch.strided, False

    def size(self) -> tuple[int, ...]:
        return self._size

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def storage_offset(self) -> int:
        return self.offset

    def element_size(self) -> int:
        return ITEM_SIZES[self.dtype]

    def numel(self) -> int:
        count = 1
        for n in self._size:
            count *= n
        return count

    def data_ptr(self) -> int:
        return self.at + self.offset * self.element_size()

    def detach(self) -> Tensor:
        return self

    def is_conj(self) -> bool:
        return self.conjugate

    def is_neg(self) -> bool:
        return False

    def as_strided(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None = None) -> Tensor:
        view = Tensor(self.storage, self.at, self.dtype, tuple(size), tuple(stride))
        view.offset = self.offset if offset is None else offset
        return view

    def copy_(self, other: Tensor) -> None:
        assert self._stride == other._stride == (1,) and self._size == other._size
        ctypes.memmove(self.data_ptr(), other.data_ptr(), self.numel() * self.element_size())

    def write(self, values: bytes) -> Tensor:
        """Not torch's: fills the memory from the tensor's first element on."""
        ctypes.memmove(self.data_ptr(), values, len(values))
        return self

    def read(self) -> list[int]:
        """Not torch's: the first byte of each element, in order."""
        places = [0]
        for n, step in zip(self._size, self._stride):
            places = [place + i * step for place in places for i in range(n)]
        step = self.element_size()
        return [ctypes.string_at(self.data_ptr() + place * step, 1)[0] for place in places]


class Allocation:
    """Gives the segment back to its pool when no tensor has it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def __del__(self) -> None:
        self.segment.used = False


def empty(count: int, dtype: str = "uint8", device: str = "cuda") -> Tensor:
    size = count * ITEM_SIZES[dtype]
    if device == "cpu":
        buffer = ctypes.create_string_buffer(max(size, 1))
        return Tensor(buffer, ctypes.addressof(buffer), dtype, (count,), (1,))
    if not cuda.initialized:
        cuda._lazy_init()
    number = int(device.partition(":")[2] or thread.device)
    devices[number].started = True
    with lock:
        segment = devices[number].pool().take(size)
    return Tensor(Allocation(segment), segment.at, dtype, (count,), (1,))


def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: str, device: str) -> Tensor:
    return empty(0, dtype, device).as_strided(size, stride)


def frombuffer(buffer: Any, dtype: str) -> Tensor:
    return Tensor(buffer, ctypes.addressof(buffer), dtype, (len(buffer) // ITEM_SIZES[dtype],), (1,))


def blas_handle() -> None:
    """As a product does, it makes a workspace where there is none yet. Ordinary ones are not accounted for."""
    ordinary = devices[thread.device].pool() is devices[thread.device].default
    if thread.device not in thread.workspaces:
        thread.workspaces[thread.device] = None if ordinary else empty(8)


class set_multithreading_enabled:
    def __init__(self, mode: bool) -> None:
        self.before, thread.multithreading = thread.multithreading, mode

    def __exit__(self, *_: object) -> None:
        thread.multithreading = self.before


def backward(function: Callable[[], None]) -> None:
    """Not torch's: what an autograd node does on the GPU, on the thread where autograd would run it."""
    if not thread.multithreading:
        function()
        return
    worker = threading.Thread(target=function)
    worker.start()
    worker.join()


def maybe_exchange_device(number: int) -> int:
    before, thread.device = thread.device, number
    return before


def set_device(number: int) -> None:
    maybe_exchange_device(number)
    devices[number].started = True


def lazy_init() -> None:
    if "device" in WITHOUT:
        raise RuntimeError("Found no NVIDIA driver on your system.")
    cuda.initialized = True


def memory_stats(number: int) -> dict[str, int]:
    device = devices[number]
    segments = [s for pool in (device.default, *device.pools.values()) for s in pool.segments]
    return {
        "reserved_bytes.all.current": sum(s.size for s in segments),
        "active_bytes.all.current": sum(s.size for s in segments if s.used),
    }


def empty_cache() -> None:
    with lock:
        for device in devices:
            device.empty()


cached: list[int] = []  # the sizes that were asked for

torch = ModuleType("torch")
cuda: Any = ModuleType("torch.cuda")


def install() -> None:
    """Makes `import torch` give this."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # torch reads them once
        set_allocator_settings(os.environ.get(name, ""))
    torch_c = SimpleNamespace(
        _cuda_customAllocator=Allocator,
        _cuda_memorySnapshot=memory_snapshot,
        _cuda_releasePool=release_pool,
        _cuda_getDevice=lambda: thread.device,
        _cuda_hasPrimaryContext=lambda number: devices[number].started,
        _is_multithreading_enabled=lambda: thread.multithreading,
    )
    if "pools" not in WITHOUT:
        torch_c._cuda_beginAllocateCurrentThreadToPool = begin_for_thread
    vars(cuda).update(
        initialized=False,
        _lazy_init=lazy_init,
        init=lambda: cuda._lazy_init(),
        is_initialized=lambda: cuda.initialized,
        OutOfMemoryError=OutOfMemoryError,
        MemPool=MemPool,
        Stream=Stream,
        CUDAGraph=CUDAGraph,
        graph=graph,
        graph_pool_handle=lambda: (0, next(names)),
        use_mem_pool=use_mem_pool,
        device_count=lambda: DEVICES,
        current_device=lambda: thread.device,
        set_device=set_device,
        _maybe_exchange_device=maybe_exchange_device,
        current_blas_handle=blas_handle,
        caching_allocator_alloc=cached.append,
        caching_allocator_delete=lambda _: None,
        is_current_stream_capturing=lambda: thread.capturing is not None,
        get_allocator_backend=lambda: "cudaMallocAsync" if "native" in WITHOUT else "native",
        memory_stats=memory_stats,
        device_memory_used=lambda number: 3 << 30,
        empty_cache=empty_cache,
        memory=SimpleNamespace(empty_cache=empty_cache, _set_allocator_settings=set_allocator_settings),
    )
    vars(torch).update(
        __version__=RELEASE + "+fake",
        version=SimpleNamespace(cuda=None if "cuda" in WITHOUT else "13.0"),
        _C=torch_c,
        cuda=cuda,
        autograd=SimpleNamespace(set_multithreading_enabled=set_multithreading_enabled),
        Tensor=Tensor,
        strided="strided",
        uint8="uint8",
        float32="float32",
        empty=empty,
        empty_strided=empty_strided,
        frombuffer=frombuffer,
    )
    sys.modules.update({"torch": torch, "torch.cuda": cuda})
