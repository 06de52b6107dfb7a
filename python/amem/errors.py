"""The exceptions that amem raises: one class for each status of the library.

The message is the library's own. It says what was tried, on what, and what
to do about it.
"""

from __future__ import annotations


class AmemError(RuntimeError):
    """Any failure of amem. On failure the process is as it was before."""

    status: int = 0


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


class InvalidStateError(AmemError):
    """Not possible in the present state, such as a group ID set too late."""

    status = 7


class DeadlineError(AmemError, TimeoutError):
    """A peer or the device did not answer within AMEM_TIMEOUT_S."""

    status = 8


class OutOfMemoryError(AmemError, MemoryError):
    """Not enough device memory to resume. The process stays paused: free some, call again."""

    status = 9


class HostMemoryError(AmemError, MemoryError):
    """Not enough host memory to pause. The process stays active."""

    status = 10


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


def from_status(status: int, message: str) -> AmemError:
    """The exception for a status of the library other than AMEM_OK."""
    error = BY_STATUS.get(status, AmemError)(message)
    error.status = status
    return error
