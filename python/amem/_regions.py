"""Regions of torch memory: which of torch's pools a thread allocates from.

torch gets a pool's memory from two functions, and those of a region make
memory of its tag. So what tag memory has is settled by its pool, whichever
thread uses that.

What torch's pools can't do decides the rest:

- A pool can be in use once at a time. So each `with` of a region has pools of
  its own, one a device.
- Of two pools in use on a thread, torch up to 2.9 takes the outer one. So the
  pools of an outer region are out of use while an inner one is entered.
- torch ends the process if a pool object is destroyed while any pool is in use
  or a graph is captured. So none ever is: close() does what is needed of it.
- While a pool is in use, torch gives no cached memory back when it runs out.
  So nothing is left in use that need not be.

The default region needs no pool: the memory that torch asks CUDA for is of it, on
all threads. There, what must be ordinary memory has pools of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from . import _library
from .errors import ArgumentTypeError, InternalError, InvalidArgumentError, InvalidStateError, TorchError

__all__ = ["Backup", "Region", "cuda_graph", "current_region", "default_region", "disable", "region"]

Backup = Literal["cpu", "none", "disk"]
BACKUPS = {"none": 0, "cpu": 1, "disk": 2}  # amem_backup_t
OFF, PAUSED = 0, 3  # of amem_state_t
EXPANDABLE_OFF = (
    "take it out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, and of what the program gives to "
    "torch.cuda.memory._set_allocator_settings()"
)

# If so much has become unused while a region was entered, its pools are closed
# when it is left, since torch would keep that for the region. Otherwise the next
# entry goes on with them, and many entries waste nothing.
UNUSED_BYTES = 64 << 20


@dataclass(frozen=True)
class Region:
    """Torch memory of one tag. amem.region() makes it, and says how it is used."""

    tag: str
    backup: Backup

    def __post_init__(self) -> None:
        _library.tag_list((self.tag,))
        if not isinstance(self.backup, str):
            raise ArgumentTypeError(f"{self.backup!r} is not a backup: it is one of {', '.join(map(repr, BACKUPS))}")
        if self.backup not in BACKUPS:
            raise InvalidArgumentError(f"{self.backup!r} is not a backup: it is one of {', '.join(map(repr, BACKUPS))}")

    def __enter__(self) -> Region:
        torch = _torch()
        _check_pools(torch)
        if torch.cuda.is_current_stream_capturing():
            raise InvalidStateError(
                f"region {self.tag}: a CUDA graph is being captured, whose memory must be its own: "
                "capture it with amem.cuda_graph()"
            )
        _push(self, self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop(self)


def region(tag: str, backup: Backup = "cpu") -> Region:
    """Torch memory that is allocated inside pauses and resumes with the tag.

        with amem.region("weights"):
            model = Model().cuda()
        amem.pause("weights")
        amem.resume("weights")

    It covers all devices, and what the entering thread allocates, backward()
    included, for which autograd's threads are off inside. Another thread
    enters for itself: with the same object, or with current_region(). In
    nested regions the innermost counts.

    Args:
        tag: 1 to 64 bytes, without commas. "nccl" is taken.
        backup: what a pause does with the contents. "cpu" keeps them in pinned
            host memory, "disk" in a file (set_disk_directory()); "none" loses
            them, and the memory has any contents after resume().

    Raises:
        InvalidArgumentError: of the tag or the backup, here or on entry.
        TorchError: on entry; torch is missing or can't do it.
        CoreError: on entry; the library is missing or of another release.
        InvalidStateError: on entry; a CUDA graph is being captured.
        AmemError: anything else, on entry.
    """
    return Region(tag, backup)


def default_region(tag: str | None, backup: Backup = "cpu") -> None:
    """From now on torch's memory is this region's wherever no other region is entered.

        torch.cuda.set_device(rank)
        amem.default_region("trainer")
        ...
        amem.pause("trainer")
        with amem.disable():
            ...  # ordinary memory
        amem.resume("trainer")

    It covers all threads and devices, autograd's and CUDA graphs included.
    torch's own cache stays in use, and is given back when memory runs out. Call
    it before anything is allocated: what torch has by then stays ordinary, and
    parts of it that are unused may be given out later.

    Between a pause of the tag and its resume, enclose what allocates in
    disable(), or in another region: outside, torch may take it from paused
    memory of which a part is in use.

    Args:
        tag: as of region(). None: ordinary memory again; what was allocated
            before keeps its tag.
        backup: as of region().

    Raises:
        InvalidArgumentError: of the tag or the backup.
        InvalidStateError: the thread is in a region, or in disable(); or torch has a CUDA runtime inside.
        TorchError: torch is missing or can't do it.
        CoreError: the library is missing or of another release.
    """
    set_default(None if tag is None else region(tag, backup))


def set_default(wanted: Region | None, keeps_cache: bool = False) -> None:
    """default_region(). keeps_cache: a pause leaves torch what it has cached."""
    global _default, _keeps_cache
    if _thread.frames:
        raise InvalidStateError("the default region can't be changed inside of a region or of disable()")
    torch = _import_torch()
    if wanted is not None and _expandable_segments(torch):
        raise TorchError(
            "the default region can't be used with expandable_segments:True, with which torch does not allocate by "
            f"cudaMalloc: {EXPANDABLE_OFF}"
        )
    library = _library.load()
    tag, backup = (None, 0) if wanted is None else (wanted.tag.encode(), BACKUPS[wanted.backup])
    _library.check(library, "amem_default_region", library.amem_default_region(tag, backup))
    _default, _keeps_cache = wanted, keeps_cache
    if wanted is not None:
        _cached_tags.add(wanted.tag)
    if torch.cuda.is_initialized():
        torch.cuda.memory.empty_cache()  # what is allocated from now on shall not come from there
        _prepare(None)


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Inside a region: torch allocates ordinary memory again, until this ends.

    With a default region it does so anywhere, and backward() is covered as by region().
    """
    owner = object()
    _push(owner, None)
    try:
        yield
    finally:
        _pop(owner)


@contextlib.contextmanager
def disable_and_give_back() -> Iterator[None]:
    """disable(), with pools of its own: what is freed inside goes back to the device when this ends."""
    torch = _torch()
    owner, pools = object(), _Pools(torch, _ordinary_memory(torch))
    _push(owner, None, pools)
    try:
        yield
    finally:
        _pop(owner)


def current_region() -> Region | None:
    """The region that this thread is in, or None, for a thread that it starts to enter too.

    There, enter `current_region() or contextlib.nullcontext()`, called here.
    """
    frames = _thread.frames
    return frames[-1].region if frames else _default


@contextlib.contextmanager
def cuda_graph(
    graph: Any,
    tag: str,
    backup: Backup = "cpu",
    *,
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """torch.cuda.graph(), with memory that pauses and resumes with the tag.

    Whether a region is entered does not matter. Graphs that are given the same
    pool share memory, as with torch.cuda.graph(); the pool is one that
    torch.cuda.graph_pool_handle() or the pool() of such a graph gave.

    Without it, a graph has ordinary memory, also inside of a region. While
    paused, the graph must not be replayed.

    Raises:
        InvalidStateError: the graphs that used the pool are gone.
        AmemError: as region().
    """
    wanted = region(tag, backup)
    torch = _torch()
    _check_pools(torch)
    _check_graph(torch, graph, pool, stream, capture_error_mode)
    memory = _memory(torch, wanted)
    used = torch.cuda.graph.default_capture_stream if stream is None else stream
    device = torch.cuda.current_device() if used is None else used.device_index
    own = memory.graph_pool(torch, pool, device)
    owner = object()
    _push(owner, _default)  # out of all pools: what torch allocates before it captures is no entered region's
    try:
        with torch.cuda.graph(graph, pool=own.id, stream=stream, capture_error_mode=capture_error_mode):
            yield
    finally:
        _pop(owner)
        if pool is None:
            # Only the graph keeps its memory now, as torch has it.
            torch._C._cuda_releasePool(device, own.id)


def _check_graph(torch: Any, graph: Any, pool: Any, stream: Any, mode: Any) -> None:
    """The arguments of cuda_graph(), which torch would take wrong ones of half-way."""
    if not isinstance(graph, torch.cuda.CUDAGraph):
        raise ArgumentTypeError(f"{graph!r} is not a torch.cuda.CUDAGraph")
    if pool is not None and not (
        isinstance(pool, (tuple, list)) and len(pool) == 2 and all(isinstance(part, int) for part in pool)
    ):
        raise ArgumentTypeError(
            f"{pool!r} is not a pool: torch.cuda.graph_pool_handle(), or a graph's pool(), gives one"
        )
    if stream is not None and not isinstance(getattr(stream, "device_index", None), int):
        raise ArgumentTypeError(f"{stream!r} is not a torch.cuda.Stream")
    modes = ("global", "thread_local", "relaxed")
    if mode not in modes:
        raise InvalidArgumentError(f"capture_error_mode {mode!r} is not one of {', '.join(map(repr, modes))}")


def tags() -> list[str]:
    """The tags of the regions that were entered, of graphs, and of the default region once it has memory."""
    with _lock:
        known = dict.fromkeys(tag for tag, _ in _memories)
    for tag in _cached_tags:
        if _library.load().amem_tag_state(tag.encode()):
            known[tag] = None
    return list(known)


def replace(wanted: Region | None) -> None:
    """Puts this thread into another region, or out of any, until the innermost `with` of one ends."""
    frames = _thread.frames
    if not frames:
        if wanted != _default:
            _push(None, wanted)
        return
    frame = frames[-1]
    if frame.region == wanted:
        return
    old, new = frame.pools, _take(wanted)
    try:
        _switch(old, new)
    except BaseException:
        _give(new)
        raise
    frame.region, frame.pools = wanted, new
    frame.keep_to_thread()
    if frame.owner is None and wanted == _default:
        frames.pop()
    _give(old)


def trim(paused: tuple[str, ...]) -> None:
    """Before a pause of these tags, or of all: gives back what torch holds and does not use.

    It would be copied and kept with the rest. And what is allocated while
    paused must not come from segments that are gone, so this thread's regions
    get new pools. Other threads' do when they are entered again.
    """
    with _lock:
        memories = [memory for (tag, _), memory in _memories.items() if not paused or tag in paused]
        closing = [pools for memory in memories for pools in memory.idle]
        for memory in memories:
            memory.idle.clear()
            for pools in memory.taken:
                pools.outdated = True
            memory.taken.clear()
    frames = _thread.frames
    if frames:
        _switch(frames[-1].pools, None)
        try:
            for frame in frames:
                if frame.pools is not None and frame.pools.outdated:
                    closing.append(frame.pools)
                    frame.pools = _take(frame.region)
            _empty_own_cache(paused)
        finally:
            _switch(None, frames[-1].pools)
    else:
        _empty_own_cache(paused)
    _close(closing)


def uncovered_bytes(paused: tuple[str, ...]) -> int:
    """What torch has in expandable segments at a pause of these tags, or of all, with the default region among them.

    The setting can change at any time, and then torch's memory does not come by
    cudaMalloc, and is not the region's.
    """
    global _warned_of_expandable
    if _default is None or (paused and _default.tag not in paused):
        return 0
    snapshot = _snapshot(_import_torch())
    library = _library.load()
    uncovered = sum(
        int(segment["total_size"])
        for segment in snapshot["segments"]
        if segment.get("is_expandable") and library.amem_memory_state(segment["address"]) == OFF
    )
    if (uncovered or snapshot["allocator_settings"]["expandable_segments"]) and not _warned_of_expandable:
        _warned_of_expandable = True
        import logging  # slow to import, and this is the rare case

        logging.getLogger("amem").warning(
            "pause: torch allocates with expandable_segments:True since the default region %r was set, which then does "
            "not cover what torch allocates: %d bytes of it are not paused now; %s",
            _default.tag,
            uncovered,
            EXPANDABLE_OFF,
        )
    return uncovered


def _empty_own_cache(paused: tuple[str, ...]) -> None:
    """trim() of the default region. This thread uses no pools now; while another does, torch keeps its cache."""
    if _keeps_cache or not _cached_tags or (paused and _cached_tags.isdisjoint(paused)):
        return
    torch = _import_torch()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.memory.empty_cache()


class _Memory:
    """The memory of a tag and a backup, or ordinary memory, and the pools there are of it."""

    def __init__(self, torch: Any, wanted: Region | None) -> None:
        library = _library.load()
        functions = _library.RegionFunctions()
        if wanted is None:
            status = library.amem_ordinary_memory(ctypes.byref(functions))
        else:
            status = library.amem_region(wanted.tag.encode(), BACKUPS[wanted.backup], ctypes.byref(functions))
        _library.check(library, "amem_region", status)
        self.allocator = torch._C._cuda_customAllocator(functions.allocate, functions.deallocate)
        _keep(self.allocator)  # torch up to 2.9 has a mere pointer to it
        self.idle: list[_Pools] = []
        self.taken: set[_Pools] = set()
        self._graphs: dict[tuple[tuple[int, int], int], Any] = {}

    def graph_pool(self, torch: Any, handle: Any, device: int) -> Any:
        """The pool that graphs with this handle share; None: a new one."""
        key = None if handle is None else ((handle[0], handle[1]), device)
        pool = None if key is None else self._graphs.get(key)
        if pool is None:
            pool = _new_pool(torch, self.allocator, device)
            # pool() of a graph that uses it is a handle too.
            self._graphs[(pool.id, device)] = pool
            if key is not None:
                self._graphs[key] = pool
        elif not _is_alive(pool):
            raise InvalidStateError(f"the graphs whose memory pool {handle} was are gone: pass another pool")
        return pool


class _Pools:
    """A pool on each device, for one `with` at a time."""

    def __init__(self, torch: Any, memory: _Memory | None) -> None:
        """memory: None for what torch gets of CUDA, which is ordinary without a default region."""
        allocator = None if memory is None else memory.allocator
        self.memory = memory
        self.pools = [_new_pool(torch, allocator, device) for device in range(torch.cuda.device_count())]
        self.unused_before = 0
        self.outdated = False  # to be closed when it ends
        self._torch = torch
        self._use = contextlib.ExitStack()

    def start(self) -> None:
        """This thread allocates from them from now on."""
        with contextlib.ExitStack() as use:
            for device, pool in enumerate(self.pools):
                use.enter_context(self._torch.cuda.use_mem_pool(pool, device))
            self._use = use.pop_all()

    def stop(self) -> None:
        self._use.close()

    def close(self) -> None:
        """torch may give back what is unused, and later what becomes so. start() must not be called again."""
        for device, pool in enumerate(self.pools):
            self._torch._C._cuda_releasePool(device, pool.id)


@dataclass
class _Frame:
    """A `with` of a region, or of disable(), that this thread is in."""

    owner: object
    region: Region | None
    pools: _Pools | None
    autograd: Any = None  # its __exit__() makes the thread's autograd what it was

    def keep_to_thread(self) -> None:
        """With pools, backward() runs on the thread that calls it: autograd's own threads would not use them."""
        if self.pools is not None and self.autograd is None:
            self.autograd = _torch().autograd.set_multithreading_enabled(False)
        elif self.pools is None and self.autograd is not None:
            self.autograd.__exit__(None, None, None)
            self.autograd = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_thread = _Thread()
# Guards _memories, and which pools are idle or taken. Never held across a call
# of torch that may wait.
_lock = threading.Lock()
_memories: dict[tuple[str, Backup], _Memory] = {}
_ordinary: _Memory | None = None  # made when there is a default region
_default: Region | None = None
_cached_tags: set[str] = set()  # of what torch's own cache may hold
_keeps_cache = False
_warned_of_expandable = False
_empty: _Pools | None = None
_empty_lock = threading.Lock()
_checked: Any = None
_lt_workspace: _LtWorkspace | None = None
_forgotten: list[object] = []  # the owners of the frames that were there at a fork()


def _forget() -> None:
    """In a child of fork(), which has no CUDA: there is nothing to trim, and no lock that another thread holds."""
    global _lock, _empty_lock
    _lock, _empty_lock = threading.Lock(), threading.Lock()
    _memories.clear()
    _forgotten.extend(frame.owner for frame in _thread.frames)
    _thread.frames.clear()


os.register_at_fork(after_in_child=_forget)


def _push(owner: object, wanted: Region | None, pools: _Pools | None = None) -> None:
    """pools: those to use; None: some of the region."""
    frames = _thread.frames
    if not frames and wanted != _default:
        _prepare(wanted)
    if pools is None:
        pools = _take(wanted)
    try:
        _switch(frames[-1].pools if frames else None, pools)
    except BaseException:
        _give(pools)
        raise
    frame = _Frame(owner, wanted, pools)
    frames.append(frame)
    frame.keep_to_thread()


def _prepare(wanted: Region | None) -> None:
    """Before this thread, which is in no region, enters one, or disable() with a default region."""
    if wanted is not None:
        _allocate_workspaces(_torch())
    elif _default is not None and _library.load().amem_tag_state(_default.tag.encode()) != PAUSED:
        # Without them, the first product inside allocates them. While paused, memory is short, and it does.
        with contextlib.suppress(RuntimeError):
            _allocate_workspaces(_torch())


def _allocate_workspaces(torch: Any) -> None:
    """Makes torch allocate the workspaces of cuBLAS and cuBLASLt for the current stream now.

    It does so at a stream's first product, and uses them for all later ones:
    they must not be a region's, or products would use paused memory.
    """
    if not torch._C._cuda_hasPrimaryContext(torch._C._cuda_getDevice()):
        return  # that would start CUDA on this device
    pools = _take(None)
    _switch(None, pools)
    try:
        torch.cuda.current_blas_handle()
        if _lt_workspace is not None:
            # What C++ throws would end the process here. So running out of memory shows in the line before, in
            # Python; the next line takes what that leaves in torch's cache, unless another thread is faster.
            torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(_lt_workspace.size()))
            _lt_workspace.allocate()
    finally:
        _switch(pools, None)
        _give(pools)


class _LtWorkspace:
    """at::cuda::getCUDABlasLtWorkspace(), which Python has no name for, and its size in bytes.

    AttributeError: this torch has no such function. 2.11 has.
    """

    def __init__(self, torch: Any) -> None:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
        self.allocate = library._ZN2at4cuda22getCUDABlasLtWorkspaceEv
        self.size = library._ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv
        self.allocate.restype, self.size.restype = ctypes.c_void_p, ctypes.c_size_t


def _pop(owner: object) -> None:
    frames = _thread.frames
    for index in reversed(range(len(frames))):
        if frames[index].owner is owner:
            break
    else:
        if any(forgotten is owner for forgotten in _forgotten):
            return
        raise InvalidStateError("a region was left on another thread than it was entered on, which is in it still")
    frame = frames.pop(index)
    if frame.autograd is not None:
        frame.autograd.__exit__(None, None, None)
    if index == len(frames):
        _switch(frame.pools, frames[-1].pools if frames else None)
    _give(frame.pools)


def _switch(old: _Pools | None, new: _Pools | None) -> None:
    """On failure, old is in use as before."""
    if old is not None:
        old.stop()
    if new is not None:
        try:
            new.start()
        except BaseException:
            if old is not None:
                old.start()
            raise


def _take(wanted: Region | None) -> _Pools | None:
    """Pools for a `with` of this thread, None for torch's own cache; _give() is its counterpart."""
    if wanted == _default:
        return None
    torch = _torch()
    memory = _ordinary_memory(torch) if wanted is None else _memory(torch, wanted)
    if memory is None:
        return None
    with _lock:
        pools = memory.idle.pop() if memory.idle else None
        if pools is not None:
            memory.taken.add(pools)
    if pools is None:
        pools = _Pools(torch, memory)
        with _lock:
            memory.taken.add(pools)
    pools.unused_before = _unused_bytes(torch)
    return pools


def _give(pools: _Pools | None) -> None:
    if pools is None:
        return
    wasteful = _unused_bytes(_torch()) - pools.unused_before > UNUSED_BYTES
    memory = pools.memory
    with _lock:
        kept = memory is not None and pools in memory.taken and not wasteful
        if memory is not None:
            memory.taken.discard(pools)
            if kept:
                memory.idle.append(pools)
    if not kept:
        _close([pools])


def _unused_bytes(torch: Any) -> int:
    """What torch holds of the current device and does not use.

    A pool's own figure is in its snapshot() alone, which, up to 2.11 at least,
    takes references away from its arguments and so in the end breaks Python.
    """
    stats = torch.cuda.memory_stats(torch.cuda.current_device())
    return int(stats.get("reserved_bytes.all.current", 0) - stats.get("active_bytes.all.current", 0))


def _close(closing: list[_Pools]) -> None:
    """Closes pools that are not in use, and gives their unused memory back."""
    global _empty
    if not closing:
        return
    torch = _torch()
    for pools in closing:
        pools.close()
    with _empty_lock:
        if _empty is None:
            _empty = _Pools(torch, None)
        # While any pool is in use, torch (to 2.11) empties the closed ones
        # only, and keeps its own cache.
        _empty.start()
        try:
            # Where torch can't do it now, the memory is paused with the rest.
            with contextlib.suppress(RuntimeError):
                torch.cuda.memory.empty_cache()
        finally:
            _empty.stop()


def _ordinary_memory(torch: Any) -> _Memory | None:
    """None where torch's own cache is of ordinary memory."""
    global _ordinary
    if _default is None:
        return None
    with _lock:
        if _ordinary is None:
            _ordinary = _Memory(torch, None)
    return _ordinary


def _memory(torch: Any, wanted: Region) -> _Memory:
    key = (wanted.tag, wanted.backup)
    with _lock:
        memory = _memories.get(key)
        if memory is None:
            memory = _memories[key] = _Memory(torch, wanted)
    return memory


def _new_pool(torch: Any, allocator: Any, device: int) -> Any:
    """Made in a thread of its own, whose current device it can change.

    torch makes a pool for the current device. The caller's could not be set
    back without CUDA starting on it, which takes hundreds of megabytes.
    """
    made: list[Any] = []

    def make() -> None:
        try:
            torch.cuda._maybe_exchange_device(device)
            current = torch._C._cuda_getDevice()
            if current != device:
                raise InternalError(f"torch took GPU {current} for GPU {device}")
            made.append(torch.cuda.MemPool(allocator))
            _keep(made[0])
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=make, name="amem-pool")
    thread.start()
    thread.join()
    if isinstance(made[-1], BaseException):
        raise made[-1]
    return made[0]


def _is_alive(pool: Any) -> bool:
    try:
        return bool(pool.use_count() > 0)
    except RuntimeError:  # torch has forgotten it
        return False


def _keep(thing: Any) -> None:
    """Keeps Python from destroying it, even at its end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _torch() -> Any:
    """torch, with CUDA started as far as regions need it."""
    global _checked, _lt_workspace
    if _checked is None:
        torch = _import_torch()
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:
            raise TorchError(f"a region needs a CUDA device, and torch has none: {error}") from error
        if _release(torch) < (2, 11):
            _separate_graphs(torch)
        with contextlib.suppress(OSError, AttributeError):
            _lt_workspace = _LtWorkspace(torch)
        _checked = torch
    return _checked


def _import_torch() -> Any:
    """torch, if regions can be had of it. CUDA is not started."""
    try:
        import torch
    except ImportError as error:
        raise TorchError(f"a region needs PyTorch, which can't be imported ({error}): pip install torch") from error
    _check(torch)
    return torch


def _release(torch: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _separate_graphs(torch: Any) -> None:
    """Puts a thread's regions out of use while it captures a CUDA graph.

    Up to torch 2.9, and in some builds that call themselves 2.10, a region's
    pool comes before the graph's: the graph would get memory that the region
    gives to others afterwards.
    """
    graph_class = torch.cuda.CUDAGraph
    begin, end = graph_class.capture_begin, graph_class.capture_end

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        _push(graph, _default)
        try:
            begin(graph, *args, **kwargs)
        except BaseException:
            _pop(graph)
            raise

    def capture_end(graph: Any) -> None:
        try:
            end(graph)
        finally:
            if any(frame.owner is graph for frame in _thread.frames):
                _pop(graph)

    graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end


def _check(torch: Any) -> None:
    here = f"this is PyTorch {torch.__version__}"
    if not torch.version.cuda:
        raise TorchError(f"{here}, without CUDA: install one for CUDA, see https://pytorch.org")
    # Before 2.8, a pool in use caught other threads' memory too.
    if not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):
        raise TorchError(f"{here}: regions need 2.8 or later; pip install 'torch>=2.8'")
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        raise TorchError("PYTORCH_NO_CUDA_MEMORY_CACHING is set, which keeps torch from using pools: unset it")
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise TorchError(f"torch allocates with {backend}: regions need backend:native in PYTORCH_CUDA_ALLOC_CONF")


def _check_pools(torch: Any) -> None:
    """Each time: the setting can change."""
    if _release(torch) < (2, 10) and _expandable_segments(torch):
        raise TorchError(
            f"this is PyTorch {torch.__version__}, whose pools can't be used with expandable_segments:True: "
            f"{EXPANDABLE_OFF}, or pip install 'torch>=2.10'"
        )


def _expandable_segments(torch: Any) -> bool:
    """Whether torch allocates so from now on: the environment gives the setting's first value only."""
    return bool(_snapshot(torch)["allocator_settings"]["expandable_segments"])


def _snapshot(torch: Any) -> Any:
    """What torch's allocator holds, and its settings. Starts nothing of CUDA.

    With other arguments than None, torch up to 2.11 takes references away from them.
    """
    return torch._C._cuda_memorySnapshot(None)
