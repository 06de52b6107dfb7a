"""The exceptions that amem raises: one class for each status of the library, and one for torch.

The message is the library's own. It says what was tried, on what, and what
to do about it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class AmemError(RuntimeError):
    """Any failure of amem. What failed was not done."""

    status: int = 0
    _figures: dict[str, Any] | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """What the failure measured, as amem_last_error_json() of amem.h has it. Sizes are bytes."""
        return dict(self._figures or {})


class NotEnabledError(AmemError):
    """amem is not enabled in this process."""

    status = 1


class TooLateError(AmemError):
    """NCCL had the driver's functions before amem was enabled."""

    status = 2


class NoNcclError(AmemError):
    """No libnccl.so.2 is loaded in this process."""

    status = 3


class NoDriverError(AmemError):
    """There is no CUDA driver, or no device."""

    status = 4


class NoCuMemError(AmemError):
    """NCCL allocates with cudaMalloc (NCCL_CUMEM_ENABLE=0): nothing can be paused."""

    status = 5


class InvalidArgumentError(AmemError, ValueError):
    """An argument is wrong, such as a tag that does not exist."""

    status = 6


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument is of a wrong type."""


class InvalidStateError(AmemError):
    """Not possible in the present state, such as a group ID set too late."""

    status = 7


class DeadlineError(AmemError, TimeoutError):
    """A peer or the device did not answer within AMEM_TIMEOUT_S."""

    status = 8

    @property
    def waiting_for(self) -> list[dict[str, int]]:
        """pid and group of each process that was waited for, up to the first eight."""
        return list(self.figures.get("waiting_for", ()))


class OutOfMemoryError(AmemError, MemoryError):
    """Not enough device memory to resume. Nothing is lost: free some, call again.

    Where torch is imported when it is raised, it is a torch.cuda.OutOfMemoryError too.
    """

    status = 9

    @property
    def needed(self) -> int | None:
        """Bytes that were needed on the device; None if that is not known."""
        return self.figures.get("needed_bytes")

    @property
    def free(self) -> int | None:
        """Bytes that were free on the device."""
        return self.figures.get("free_bytes")

    @property
    def device(self) -> int | None:
        """The device's ordinal."""
        return self.figures.get("device")

    def __reduce__(self) -> tuple[object, ...]:
        # The class is made anew where this is unpickled, with that process's torch.
        return out_of_memory, (str(self), self._figures)


_with_torch: type[OutOfMemoryError] | None = None


def out_of_memory(message: str, figures: dict[str, Any] | None = None) -> OutOfMemoryError:
    """An OutOfMemoryError, which is torch's too where torch is imported."""
    global _with_torch
    of_torch = getattr(getattr(sys.modules.get("torch"), "cuda", None), "OutOfMemoryError", None)
    cls = OutOfMemoryError
    if of_torch is not None:
        if _with_torch is None:
            _with_torch = type("OutOfMemoryError", (OutOfMemoryError, of_torch), {"__doc__": OutOfMemoryError.__doc__})
            _with_torch.__module__ = OutOfMemoryError.__module__
        cls = _with_torch
    error = cls(message)
    error._figures = figures
    return error


class HostMemoryError(AmemError, MemoryError):
    """Not enough host memory, or disk, to pause. The process stays active."""

    status = 10

    @property
    def needed(self) -> int | None:
        """More bytes that were needed; None if that is not known."""
        return self.figures.get("needed_bytes")

    @property
    def free(self) -> int | None:
        """Bytes that were free, where it is a disk."""
        return self.figures.get("free_bytes")


class CudaError(AmemError):
    """A call of the CUDA driver failed."""

    status = 11


class PeerError(AmemError):
    """A peer process failed or is gone."""

    status = 12


class ForkedError(AmemError):
    """This is a child of fork() of a process that had loaded amem."""

    status = 13


class CoreError(AmemError):
    """A library of amem is missing, or of another version."""

    status = 14


class InternalError(AmemError):
    """A fault in amem itself."""

    status = 15


class TorchError(AmemError):
    """torch is missing, or can't hold memory in a region as it is."""


BY_STATUS: dict[int, type[AmemError]] = {
    cls.status: cls
    for cls in (
        NotEnabledError,
        TooLateError,
        NoNcclError,
        NoDriverError,
        NoCuMemError,
        InvalidArgumentError,
        InvalidStateError,
        DeadlineError,
        OutOfMemoryError,
        HostMemoryError,
        CudaError,
        PeerError,
        ForkedError,
        CoreError,
        InternalError,
    )
}


def from_status(status: int, message: str, figures: dict[str, Any] | None = None) -> AmemError:
    """The exception for a status of the library other than AMEM_OK."""
    if status == OutOfMemoryError.status:
        return out_of_memory(message, figures)
    error = BY_STATUS.get(status, AmemError)(message)
    error.status = status
    error._figures = figures
    return error
