"""The functions that users call. amem/__init__.py exposes them."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

from . import _library
from ._library import enable
from .errors import AmemError, ForkedError, InternalError, NoNcclError

NCCL = "nccl"  # the tag of NCCL's memory

__all__ = [
    "Holder",
    "State",
    "Stats",
    "Transition",
    "enable",
    "free_host_memory",
    "get_group_id",
    "pause",
    "paused",
    "resume",
    "set_group_id",
    "state",
    "stats",
]


class State(enum.Enum):
    """Where this process, or a tag, stands. The values are those of amem_state()."""

    OFF = 0
    """not enabled; no such tag"""
    WAITING = 1
    """enabled; NCCL has not asked for the CUDA driver yet"""
    ACTIVE = 2
    PAUSED = 3


class HolderStats(TypedDict):
    """A process that still maps memory which a pause has given back."""

    pid: int
    group: int
    bytes: int


class LastPause(TypedDict):
    """The last pause of NCCL's memory."""

    seconds: float
    quiesce_seconds: float
    copy_seconds: float
    release_seconds: float
    freed_seconds: float
    bytes: int
    detached_bytes: int
    copied_bytes: int
    held_bytes: int
    held_by: list[HolderStats]


class LastResume(TypedDict):
    """The last resume of NCCL's memory."""

    seconds: float
    create_seconds: float
    peers_seconds: float
    copy_seconds: float
    ready_seconds: float
    bytes: int
    copied_bytes: int


class DeviceStats(TypedDict):
    """A device that NCCL has used."""

    ordinal: int
    uuid: str
    slabs: int
    chunks: int
    slab_bytes: int
    slab_used_bytes: int
    direct_bytes: int
    device_bytes: int
    paused_bytes: int
    resident_bytes: int
    imported_bytes: int
    free_bytes: int
    total_bytes: int


class HostStats(TypedDict):
    """Host memory that amem holds."""

    arena_bytes: int


class PeerStats(TypedDict):
    """A process that shares memory with this one."""

    pid: int
    process_id: str
    group: int
    imports: int
    exports: int
    stopped: bool


class RegionStats(TypedDict):
    """torch's memory of one tag and backup."""

    tag: str
    backup: str
    state: str
    allocations: int
    allocated_bytes: int
    device_bytes: int
    paused_bytes: int
    opened_bytes: int
    resident: dict[str, int]
    host_bytes: int
    disk_bytes: int


class Stats(TypedDict):
    """The statistics; docs/statistics.md says what each field is. All are there from the start."""

    version: str
    state: str
    """NCCL's: as State, in lower case"""
    pid: int
    process_id: str
    group: int
    device_bytes: int
    """NCCL's memory of this process that is on the devices now"""
    paused_bytes: int
    """NCCL's memory of this process that is given back now"""
    devices: list[DeviceStats]
    resident: dict[str, int]
    """bytes that a pause does not give back, by reason"""
    host: HostStats
    peers: list[PeerStats]
    regions: list[RegionStats]
    """torch's memory, by tag and backup"""
    sharers: list[PeerStats]
    pauses: int
    resumes: int
    last_pause: LastPause
    last_resume: LastResume
    driver_calls: dict[str, int]
    messages_sent: int


@dataclass(frozen=True)
class Holder:
    """A process that still maps memory which a pause has given back."""

    pid: int
    group: int
    bytes: int


@dataclass(frozen=True)
class Transition:
    """What one pause or resume did in this process."""

    seconds: float
    bytes: int
    """device memory given back, or restored"""
    copied_bytes: int
    """of which this many were copied to, or from, host memory"""
    changed: bool
    """False if the process was in the wanted state already"""
    tags: tuple[str, ...] = ()
    """those that were not in the wanted state already"""
    held_bytes: int = 0
    """of what a pause gave back: not free yet, since other processes have not let go of it"""
    held_by: tuple[Holder, ...] = ()
    """those processes"""
    uncovered_bytes: int = 0
    """torch's memory that a pause left, since the default region does not cover expandable segments"""


def pause(*tags: str) -> Transition:
    """Gives the memory of the tags (default: all) back to the device.

    NCCL's tag is "nccl", regions name the others. Every rank must call it for
    "nccl", as with a collective. When it returns, the memory is free on the
    device, but for held_bytes of the result: what peers have not let go of in
    time. Until resume() no collective may be started, and no tensor of the tags
    used. Of what is paused already, it gives back what was allocated since.

    Without tags, it raises too if NCCL is in use and amem does not have its
    memory. To pause regions alone there, name them.

    Raises:
        NotEnabledError: amem was not enabled before the first communicator.
        NoNcclError: the NCCL that torch uses is not one that amem has found.
        TooLateError: NCCL was used before amem was enabled; no tags, or "nccl".
        NoCuMemError: NCCL allocates with cudaMalloc; there is nothing to pause.
        InvalidArgumentError: there is no such tag.
        DeadlineError: a peer did not pause in time; the message names it.
        HostMemoryError: too little host memory to keep the contents in.
        AmemError: anything else. The process stays active.
    """
    text, library = _library.tag_list(tags), _loaded()
    if not tags:
        _check_nccl(library)
    uncovered = 0
    regions = sys.modules.get(f"{__package__}._regions")
    if regions is not None:
        regions.trim(tags)
        uncovered = regions.uncovered_bytes(tags)
    transition = replace(_transit(library, "pause", text), uncovered_bytes=uncovered)
    if transition.held_bytes:
        _warn(
            f"pause: {transition.held_bytes} bytes are not free yet, since other processes have not let go of them: "
            + ", ".join(f"pid {who.pid} (group {who.group}) {who.bytes} bytes" for who in transition.held_by)
        )
    return transition


def resume(*tags: str) -> Transition:
    """Restores the memory of the tags (default: all): same addresses, same contents.

    Does nothing for what is not paused.

    Raises:
        NotEnabledError: amem is not enabled in this process.
        OutOfMemoryError: the device has too little free memory. Nothing is
            lost: free some and call again. Where torch is imported, it is a
            torch.cuda.OutOfMemoryError too.
        InvalidArgumentError: there is no such tag.
        AmemError: anything else. Each tag is either restored or still paused.
    """
    text, library = _library.tag_list(tags), _loaded()
    return _transit(library, "resume", text)


def _warn(message: str) -> None:
    import logging  # slow to import, and this is the rare case

    logging.getLogger("amem").warning(message)


def _check_nccl(library: ctypes.CDLL) -> None:
    """Raises if torch has a communicator of an NCCL that amem does not have."""
    stands = State(library.amem_tag_state(NCCL.encode()))
    if stands in (State.ACTIVE, State.PAUSED) or not _torch_has_communicator():
        return
    if stands is State.OFF:
        try:
            _transit(library, "pause", NCCL.encode())  # which fails, since it is off
        except ForkedError:
            raise
        except AmemError:
            pass  # what follows says more
        raise _library.not_enabled(
            "torch.distributed uses NCCL, and amem is not enabled in this process, so a pause would leave NCCL's "
            "memory: name the tags to pause regions alone; otherwise call amem.enable(), or set AMEM_ENABLE=1, before "
            "the first NCCL communicator"
        )
    raise NoNcclError(
        "torch.distributed uses an NCCL that amem has not found, so a pause would leave its memory: name its file in "
        "AMEM_NCCL_LIBRARY, or use a PyTorch that loads libnccl.so.2; name the tags to pause regions alone"
    )


def _torch_has_communicator() -> bool:
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return False
    torch: Any = sys.modules["torch"]
    groups: dict[Any, Any] = distributed._world.pg_map
    for group, (backends, *_) in list(groups.items()):
        if "nccl" not in backends:
            continue
        try:
            backend = group._get_backend(torch.device("cuda"))
            # torch 2.15's ProcessGroupNCCL2 has the latter alone.
            if (getattr(backend, "_is_initialized", None) or backend._comm_ptr)():
                return True
        except (AttributeError, RuntimeError):  # this torch can't say
            return True
    return False


def _loaded() -> ctypes.CDLL:
    library = _library.loaded()
    if library is None:
        raise _library.not_enabled("amem is not enabled in this process")
    return library


def _transit(library: ctypes.CDLL, verb: str, text: bytes | None) -> Transition:
    _library.check(library, f"amem_{verb}", getattr(library, f"amem_{verb}")(text))
    report = library.amem_last_report()
    try:
        did = json.loads(report)
        return Transition(
            seconds=float(did["seconds"]),
            bytes=int(did["bytes"]),
            copied_bytes=int(did["copied_bytes"]),
            changed=bool(did["changed"]),
            tags=tuple(did.get("tags") or ()),
            held_bytes=int(did.get("held_bytes", 0)),
            held_by=tuple(Holder(who["pid"], who["group"], who["bytes"]) for who in did.get("held_by") or ()),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InternalError(f"amem_{verb} did not say what it did: {report!r}") from error


def _paused_tags(tags: tuple[str, ...]) -> set[str]:
    """Which of the tags, or of all, are paused, if only with one of their backups."""
    if not tags:
        library = _library.loaded()
        if library is None:
            return set()
        tags = (NCCL, *(region["tag"] for region in _read_stats(library)["regions"]))
    return {tag for tag in tags if state(tag) is State.PAUSED}


@contextlib.contextmanager
def paused(*tags: str) -> Iterator[Transition]:
    """Pauses on entry, and resumes what that has paused on exit, also when the body raised.

    A tag that was paused before stays so. If the body raised and the resume
    fails too, the resume's error is raised, with the body's as its __context__.
    """
    _library.tag_list(tags)
    before = _paused_tags(tags)
    try:
        transition = pause(*tags)
        changed = set(transition.tags) or (_paused_tags(tags) if transition.changed else set())
    except Exception:
        raise
    except BaseException:  # Ctrl-C, which may have come when the library had paused already
        _resume_again(_paused_tags(tags) - before)
        raise
    try:
        yield transition
    finally:
        _resume_again(changed - before)


def _resume_again(tags: set[str]) -> None:
    if tags:
        resume(*sorted(tags))


def state(tag: str | None = None) -> State:
    """Where a tag stands, or this process, which is PAUSED if any of its tags is.

    It is OFF for a process without amem, and for a tag that does not exist.

    Raises:
        InvalidArgumentError: the tag can't be one.
    """
    text = None if tag is None else _library.tag_list((tag,))
    library = _library.loaded()
    if library is None:
        return State.OFF
    return State(library.amem_state() if text is None else library.amem_tag_state(text))


def stats() -> Stats:
    """What amem holds and did in this process. Sizes are bytes, times are seconds.

    Raises:
        CoreError: the library is missing or of another release.
        InternalError: the library gave no statistics.
    """
    return cast(Stats, _read_stats(_library.load()))


def free_host_memory(*tags: str) -> None:
    """Gives back the pinned host memory that pauses of the tags have kept contents in, and that is kept for the next.

    Waits until no work is left on the GPUs. Other threads may launch kernels meanwhile, which are waited for too.
    None may capture a CUDA graph meanwhile: the driver refuses to wait then, and the capture is lost.

    Args:
        tags: which; none means all.

    Raises:
        InvalidArgumentError: there is no such tag.
        NotEnabledError: amem is not enabled in this process.
        InvalidStateError: a tag is paused, and the memory holds its contents.
        DeadlineError: there was work on the GPUs all the time. What memory is left is kept.
        CudaError: another thread captured a CUDA graph. What memory is left is kept.
        AmemError: anything else. What memory is left is kept.
    """
    text, library = _library.tag_list(tags), _loaded()
    _library.check(library, "amem_free_host_memory", library.amem_free_host_memory(text))


def set_group_id(group: int) -> None:
    """Keeps this job apart from others on the same GPUs. Overrides AMEM_GROUPID.

    Raises:
        InvalidArgumentError: the number is out of range.
        InvalidStateError: the first communicator exists already.
    """
    group = _library.whole("group ID", group, 0, 2**31 - 1)
    library = _library.load()
    _library.check(library, "amem_set_group_id", library.amem_set_group_id(group))


def get_group_id() -> int:
    """The group of this process."""
    library = _library.load()
    group = ctypes.c_int()
    _library.check(library, "amem_get_group_id", library.amem_get_group_id(ctypes.byref(group)))
    return group.value


def _read_stats(library: ctypes.CDLL) -> dict[str, Any]:
    text = library.amem_stats_json()
    if not text:
        message = (library.amem_last_error() or b"").decode(errors="replace")
        message = message or "amem_stats_json gave no statistics"
        raise InternalError(message)
    try:
        parsed: dict[str, Any] = json.loads(ctypes.string_at(text))
    except ValueError as error:
        raise InternalError(f"amem_stats_json gave no statistics: {error}") from error
    finally:
        library.amem_free(text)
    return parsed
