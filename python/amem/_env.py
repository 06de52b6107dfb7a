"""Reads the environment: the variables that amem's Python reads, all of them here.

The library reads the others, with the same spellings. Python imports this while
it starts, so it imports little.
"""

from __future__ import annotations

import os
import sys

ON = ("1", "on", "true", "yes")
OFF = ("0", "off", "false", "no")

PREFIX = "AMEM_"
KNOWN = (
    "AMEM_ENABLE",
    "AMEM_GROUPID",
    "AMEM_NCCL_OFFLOAD_FREE_TAG",
    "AMEM_HOST_PREALLOC",
    "AMEM_DISK_DIRECTORY",
    "AMEM_COMPAT_TMS",
    "AMEM_TIMEOUT_S",
    "AMEM_ARENA",
    "AMEM_LOG",
    "AMEM_NCCL_LIBRARY",
    "AMEM_LIBRARY_DIR",
    "AMEM_SIM_LIBRARY_DIR",
)
LOADING = ("AMEM_ENABLE", "AMEM_COMPAT_TMS")
# Of the simulator, of tests, and of the wheel's build.
KNOWN_BEGINNINGS = ("AMEM_SIM_", "AMEM_TEST_", "AMEM_WHEEL_", "AMEM_NATIVE_")

_warnings: dict[str, str] = {}  # by the variable's name, as said
_failure: str | None = None


def text(name: str) -> str | None:
    """The variable's value; None where it is unset or empty."""
    return os.environ.get(name) or None


def switch(name: str) -> bool:
    """Whether the variable says on. Another value than ON and OFF, in any case of letters, is warned of, and off."""
    value = text(name)
    if value is None or value.lower() in OFF:
        return False
    if value.lower() in ON:
        return True
    _warn(name, f"{name}={value} is taken as off: say {', '.join(ON)} for on, {', '.join(OFF)} for off")
    return False


def warn_of_unknown() -> None:
    """Of names that amem does not have, and for which it is not loaded: the library, once it is, tells of all."""
    for name in sorted(os.environ):
        if not name.startswith(PREFIX) or name in KNOWN or name.startswith(KNOWN_BEGINNINGS):
            continue
        nearest = _nearest(name)
        if nearest in LOADING:
            _warn(name, f"{name} is set, and amem has no such variable; is {nearest} meant?")


def _nearest(name: str) -> str | None:
    import difflib  # slow to import, and this is the rare case

    ends = [known[len(PREFIX) :] for known in KNOWN]
    return next((PREFIX + end for end in difflib.get_close_matches(name[len(PREFIX) :], ends, n=1)), None)


def _warn(name: str, message: str) -> None:
    if name not in _warnings:
        _warnings[name] = message
        say(message)


def say(message: str) -> None:
    """One line to stderr, where logging is not imported yet."""
    if sys.stderr is not None:
        print("amem:", " ".join(message.split()), file=sys.stderr)


def set_failure(reason: str | None) -> None:
    """Why amem could not be enabled when that was tried last; None: it could."""
    global _failure
    _failure = reason and " ".join(reason.split())


def why_not_enabled(said: str = "") -> str | None:
    """Why amem is not enabled although somebody seems to have wished it, if that is known and not said."""
    if _failure:
        return None if _failure in said else f"it could not be enabled: {_failure}"
    if "AMEM_ENABLE" in _warnings:
        return _warnings["AMEM_ENABLE"]
    for name, message in _warnings.items():
        if name not in KNOWN and _nearest(name) == "AMEM_ENABLE":
            return message
    if switch("AMEM_ENABLE") and f"{__package__}._autoenable" not in sys.modules:
        return (
            "AMEM_ENABLE is set but did nothing: Python did not read the .pth file of the wheel "
            "(-S, -I with a user install, or a folder on PYTHONPATH); call amem.enable() instead"
        )
    return None
