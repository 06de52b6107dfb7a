"""Finds, loads and binds libamem_hook.so, whose interface is amem.h."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p

from . import __version__, _env
from .errors import AmemError, ArgumentTypeError, CoreError, InvalidArgumentError, NotEnabledError, from_status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HOOK = "libamem_hook.so"
CORE = "libamem_nccl.so"


class RegionFunctions(ctypes.Structure):
    """amem_region_t, as addresses: Python calls neither."""

    _fields_ = (("allocate", c_void_p), ("deallocate", c_void_p))


# name, restype, argtypes
FUNCTIONS = (
    ("amem_enable", c_int, ()),
    ("amem_pause", c_int, (c_char_p,)),
    ("amem_resume", c_int, (c_char_p,)),
    ("amem_last_report", c_char_p, ()),
    ("amem_state", c_int, ()),
    ("amem_tag_state", c_int, (c_char_p,)),
    ("amem_region", c_int, (c_char_p, c_int, POINTER(RegionFunctions))),
    ("amem_default_region", c_int, (c_char_p, c_int)),
    ("amem_ordinary_memory", c_int, (POINTER(RegionFunctions),)),
    ("amem_set_memory_margin", None, (c_size_t,)),
    ("amem_memory_state", c_int, (c_void_p,)),
    ("amem_read_backup", c_int, (c_void_p, c_size_t, c_void_p)),
    ("amem_backup_pointer", c_int, (c_void_p, c_size_t, POINTER(c_void_p))),
    ("amem_set_disk_directory", c_int, (c_char_p,)),
    ("amem_set_named_disk_directory", c_int, (c_char_p,)),
    ("amem_retain_backups", None, (c_int,)),
    # Not c_char_p: ctypes would make a copy and lose the pointer to free.
    ("amem_stats_json", c_void_p, ()),
    ("amem_free", None, (c_void_p,)),
    ("amem_free_host_memory", c_int, (c_char_p,)),
    ("amem_set_group_id", c_int, (c_int,)),
    ("amem_get_group_id", c_int, (POINTER(c_int),)),
    ("amem_last_error", c_char_p, ()),
    ("amem_last_error_json", c_char_p, ()),
    ("amem_version", c_char_p, ()),
)

_loaded: ctypes.CDLL | None = None


def folder() -> str:
    """The folder that holds amem's libraries."""
    return _env.text("AMEM_LIBRARY_DIR") or os.path.join(os.path.dirname(__file__), "lib")


def simulator_folder() -> str:
    """The folder that holds the simulated libcuda.so.1 and libnccl.so.2."""
    return _env.text("AMEM_SIM_LIBRARY_DIR") or os.path.join(os.path.dirname(__file__), "sim")


def loaded() -> ctypes.CDLL | None:
    """The library if this process has it already (LD_PRELOAD counts), else None."""
    global _loaded
    if _loaded is None:
        try:
            _loaded = _bind(ctypes.CDLL(HOOK, mode=os.RTLD_NOLOAD))
        except OSError:
            return None
    return _loaded


def load() -> ctypes.CDLL:
    """The library, loaded if it was not.

    Raises:
        CoreError: it is missing, can't be loaded, or is of another release.
    """
    global _loaded
    library = loaded()
    if library is None:
        path = os.path.join(folder(), HOOK)
        if not os.path.exists(path):
            raise CoreError(
                f"{path} does not exist: install amem from a wheel of this platform, "
                "or set AMEM_LIBRARY_DIR to the folder of its libraries"
            )
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise CoreError(f"can't load {path}: {error}") from error
        _loaded = library = _bind(library)
    return library


def _bind(library: ctypes.CDLL) -> ctypes.CDLL:
    path = library._name
    for name, restype, argtypes in FUNCTIONS:
        try:
            function = getattr(library, name)
        except AttributeError:
            raise CoreError(f"{path} has no function {name}: it is not a library of amem {__version__}") from None
        function.restype = restype
        function.argtypes = argtypes
    version = (library.amem_version() or b"").decode()
    if version != __version__:
        raise CoreError(
            f"{path} is of amem {version}, the Python package of amem {__version__}: "
            "install both from one wheel, and look at LD_PRELOAD and AMEM_LIBRARY_DIR"
        )
    return library


def check(library: ctypes.CDLL, what: str, status: int) -> None:
    """Raises the exception for a status, on the thread whose call returned it."""
    if status == 0:
        return
    message = (library.amem_last_error() or b"").decode(errors="replace")
    message = message or f"{what} failed with status {status}"
    if status == NotEnabledError.status:
        raise not_enabled(message)
    raise from_status(status, message, _figures(library))


def _figures(library: ctypes.CDLL) -> dict[str, Any] | None:
    text = library.amem_last_error_json()
    if not text:
        return None
    import json  # slow to import, and this module is imported while Python starts

    figures: dict[str, Any] = json.loads(text)
    return figures


def tag_list(tags: tuple[str, ...]) -> bytes | None:
    """Tags as the library wants them; None for all, which is what no tags mean."""
    for tag in tags:
        if not isinstance(tag, str):
            raise ArgumentTypeError(f"{tag!r} is not a tag, which is a text: pass each as an argument of its own")
        # The library separates tags by commas and ends at a zero byte.
        if not tag or "," in tag or "\0" in tag:
            raise InvalidArgumentError(f"{tag!r} is not a tag: pass each tag as an argument of its own")
    try:
        return ",".join(tags).encode() if tags else None
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a tag is not a text that UTF-8 can hold: {error}") from None


def whole(name: str, value: object, least: int, most: int) -> int:
    """The value, if it is a whole number from least to most."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise ArgumentTypeError(f"{name} {value!r} is not a whole number")
    number: int = type(value).__index__(value)  # type: ignore[attr-defined]
    if not least <= number <= most:
        raise InvalidArgumentError(f"{name} {number} is not from {least} to {most}")
    return number


def folder_path(path: object) -> bytes:
    """A path as the library wants it."""
    try:
        encoded = os.fsencode(path)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"{path!r} is not a path") from None
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{path!r} can't be a path: {error}") from None
    if not encoded or b"\0" in encoded:
        raise InvalidArgumentError(f"{path!r} can't be a path")
    return encoded


def not_enabled(message: str) -> NotEnabledError:
    """With what to do, and why amem is not enabled, where that is known."""
    if "amem.enable()" not in message:
        message += ": call amem.enable(), or set AMEM_ENABLE=1, before the first NCCL communicator"
    why = _env.why_not_enabled(message)
    return NotEnabledError(f"{message}; {why}" if why else message)


def enable() -> None:
    """Hooks NCCL in this process, so that its memory can be paused.

    Call it before the first NCCL communicator; whether libnccl.so.2 is loaded
    by then does not matter. Calling it again does nothing.

    Raises:
        TooLateError: NCCL has started already.
        CoreError: the library is missing or of another release.
        AmemError: anything else; the message says what to do.
    """
    try:
        library = load()
        first = library.amem_state() == 0
        check(library, "amem_enable", library.amem_enable())
    except AmemError as error:
        _env.set_failure(str(error))
        raise
    _env.set_failure(None)
    if first and _env.text("NCCL_CUMEM_ENABLE") == "0":
        # Imported here: logging is slow to import and this is the rare case.
        import logging

        logging.getLogger("amem").warning(
            "NCCL_CUMEM_ENABLE=0 is set, so NCCL allocates with cudaMalloc and amem has nothing to pause: "
            "unset NCCL_CUMEM_ENABLE, or set it to 1, where this process's environment is made"
        )
