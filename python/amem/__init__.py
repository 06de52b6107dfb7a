"""Give the GPU memory that NCCL and torch hold back to the device, and restore it.

    import amem

    amem.enable()               # before the first NCCL communicator
    with amem.region("weights"):
        ...                     # torch memory that pauses too
    ...
    with amem.paused():         # the memory is free for something else
        ...

Importing this package loads no library and never imports torch. The names
below are looked up on first use, so that a process that only has AMEM_ENABLE
in its environment starts as fast as before.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import compat
    from ._api import (
        Holder,
        State,
        Stats,
        Transition,
        enable,
        free_host_memory,
        get_group_id,
        pause,
        paused,
        resume,
        set_group_id,
        state,
        stats,
    )
    from ._backup import cpu_backup, set_disk_directory
    from ._regions import Region, cuda_graph, current_region, default_region, disable, region
    from .errors import (
        AmemError,
        CoreError,
        CudaError,
        DeadlineError,
        ForkedError,
        HostMemoryError,
        InternalError,
        InvalidArgumentError,
        InvalidStateError,
        NoCuMemError,
        NoDriverError,
        NoNcclError,
        NotEnabledError,
        OutOfMemoryError,
        PeerError,
        TooLateError,
        TorchError,
    )

__version__ = "0.1.0"

__all__ = [
    "AmemError",
    "CoreError",
    "CudaError",
    "DeadlineError",
    "ForkedError",
    "Holder",
    "HostMemoryError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidStateError",
    "NoCuMemError",
    "NoDriverError",
    "NoNcclError",
    "NotEnabledError",
    "OutOfMemoryError",
    "PeerError",
    "Region",
    "State",
    "Stats",
    "TooLateError",
    "TorchError",
    "Transition",
    "__version__",
    "compat",
    "cpu_backup",
    "cuda_graph",
    "current_region",
    "default_region",
    "disable",
    "enable",
    "free_host_memory",
    "get_group_id",
    "pause",
    "paused",
    "region",
    "resume",
    "set_disk_directory",
    "set_group_id",
    "state",
    "stats",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "compat":
        import importlib

        return importlib.import_module(".compat", __name__)
    if name.endswith("Error"):
        from . import errors as module
    elif name in ("Region", "cuda_graph", "current_region", "default_region", "disable", "region"):
        from . import _regions as module  # type: ignore[no-redef]
    elif name in ("cpu_backup", "set_disk_directory"):
        from . import _backup as module  # type: ignore[no-redef]
    else:
        from . import _api as module  # type: ignore[no-redef]
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
