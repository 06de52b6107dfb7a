"""The functions that users call. amem/__init__.py exposes them."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from . import _library
from ._library import enable
from .errors import InternalError, InvalidArgumentError

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


class LastTransition(TypedDict):
    """The last pause, or the last resume."""

    seconds: float
    bytes: int
    copied_bytes: int


class Stats(TypedDict, total=False):
    """The main fields of the statistics; docs/statistics.md lists them all.

    Until NCCL or a region is in use there are only version, state and group.
    """

    version: str
    state: str
    """NCCL's: as State, in lower case"""
    group: int
    pid: int
    device_bytes: int
    """NCCL's memory of this process that is on the devices now"""
    paused_bytes: int
    """NCCL's memory of this process that is given back now"""
    resident: dict[str, int]
    """bytes that a pause does not give back, by reason"""
    devices: list[dict[str, Any]]
    host: dict[str, int]
    peers: list[dict[str, Any]]
    regions: list[dict[str, Any]]
    """torch's memory, by tag and backup"""
    pauses: int
    resumes: int
    last_pause: LastTransition
    last_resume: LastTransition


@dataclass(frozen=True)
class Holder:
    """A process that maps memory which this process has given back."""

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
    """those that were active and are paused now, or the other way round"""
    held_bytes: int = 0
    """how much of bytes is not free yet, since peers had not let go of it when a pause's deadline had passed"""
    held_by: tuple[Holder, ...] = ()
    """these peers"""


def pause(*tags: str) -> Transition:
    """Gives the memory of the tags (default: all) back to the device.

    NCCL's tag is "nccl", regions name the others. Every rank must call it for
    "nccl", as with a collective. When it returns, the memory is free on the
    device, but for held_bytes of the result: what peers have not let go of in
    time. Until resume() no collective may be started, and no tensor of the tags
    used. Of what is paused already, it gives back what was allocated since.

    Raises:
        NotEnabledError: amem was not enabled before the first communicator.
        TooLateError: NCCL was used before amem was enabled; no tags, or "nccl".
        NoCuMemError: NCCL allocates with cudaMalloc; there is nothing to pause.
        InvalidArgumentError: there is no such tag.
        DeadlineError: a peer did not pause in time; the message names it.
        HostMemoryError: too little host memory to keep the contents in.
        AmemError: anything else. The process stays active.
    """
    library, text = _loaded(), _library.tag_list(tags)
    regions = sys.modules.get(f"{__package__}._regions")
    if regions is not None:
        regions.trim(tags)
    return _transit(library, "pause", text)


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
    return _transit(_loaded(), "resume", _library.tag_list(tags))


def _loaded() -> ctypes.CDLL:
    library = _library.loaded()
    if library is None:
        raise _library.not_enabled("amem is not enabled in this process")
    return library


def _transit(library: ctypes.CDLL, verb: str, text: bytes | None) -> Transition:
    _library.check(library, f"amem_{verb}", getattr(library, f"amem_{verb}")(text))
    report = library.amem_last_report()
    if not report:
        raise InternalError(f"amem_{verb} did not say what it did")
    did = json.loads(report)
    return Transition(
        seconds=float(did["seconds"]),
        bytes=int(did["bytes"]),
        copied_bytes=int(did["copied_bytes"]),
        changed=bool(did["changed"]),
        tags=tuple(did.get("tags") or ()),
        held_bytes=int(did.get("held_bytes", 0)),
        held_by=tuple(Holder(**who) for who in did.get("held_by") or ()),
    )


@contextlib.contextmanager
def paused(*tags: str) -> Iterator[Transition]:
    """Pauses on entry and resumes on exit, also when the body raised.

    If the body raised and the resume fails too, the resume's error is raised,
    with the body's as its __context__.
    """
    try:
        transition = pause(*tags)
    except Exception:
        raise
    except BaseException:  # Ctrl-C, which may have come when the library had paused already
        if state() is State.PAUSED:
            resume(*tags)
        raise
    try:
        yield transition
    finally:
        resume(*tags)


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

    Args:
        tags: which; none means all.

    Raises:
        InvalidArgumentError: there is no such tag.
        NotEnabledError: amem is not enabled in this process.
        InvalidStateError: a tag is paused, and the memory holds its contents.
        AmemError: anything else. The memory is kept.
    """
    library = _loaded()
    _library.check(library, "amem_free_host_memory", library.amem_free_host_memory(_library.tag_list(tags)))


def set_group_id(group: int) -> None:
    """Keeps this job apart from others on the same GPUs. Overrides AMEM_GROUPID.

    Raises:
        InvalidArgumentError: the number is out of range.
        InvalidStateError: the first communicator exists already.
    """
    if not -(2**31) <= group < 2**31:
        raise InvalidArgumentError(f"group ID {group} does not fit in 32 bits")
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
    finally:
        library.amem_free(text)
    return parsed
