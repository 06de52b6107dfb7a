"""python -m amem info: what is here, and what would keep amem from working."""

from __future__ import annotations

import os
import sys

import amem

from . import _env, _library
from ._cuda import Driver, DriverError
from ._nccl import Nccl, find


def main() -> int:
    """Prints the report; 0 if amem would work here."""
    # As this process was started, before anything here loads or enables it.
    why = _env.why_not_enabled()
    reasons: list[str] = [] if why is None else [why]
    lines = [
        ("amem", f"{amem.__version__}, Python {sys.version.split()[0]}"),
        *((name, _library_line(name, reasons)) for name in (_library.HOOK, _library.CORE)),
        ("state", _state_line(reasons)),
        ("driver", _driver_line(reasons)),
        ("NCCL", _nccl_line(reasons)),
    ]
    lines += [(name, value) for name, value in sorted(os.environ.items()) if _matters(name)]
    if _env.text("NCCL_CUMEM_ENABLE") == "0":
        reasons.append("NCCL_CUMEM_ENABLE=0: NCCL allocates with cudaMalloc and nothing can be paused; unset it")
    for reason in dict.fromkeys(reasons):
        print(f"{'would not work':<18} {reason}")
    for name, value in lines:
        print(f"{name:<18} {value}")
    if not reasons:
        print(f"{'would work':<18} yes")
    return 1 if reasons else 0


def _matters(name: str) -> bool:
    return name.startswith("AMEM_") or name in ("GMM_LOG", "NCCL_CUMEM_ENABLE", "CUDA_VISIBLE_DEVICES")


def _library_line(name: str, reasons: list[str]) -> str:
    path = os.path.join(_library.folder(), name)
    if os.path.exists(path):
        return path
    # Of the hook, enable() says so.
    if name == _library.CORE:
        reasons.append(f"{path} does not exist: install amem from a wheel of this platform")
    return f"{path} (missing)"


def _state_line(reasons: list[str]) -> str:
    """Tries to enable amem, after a look at whether the environment already did."""
    try:
        before = amem.state()
        amem.enable()
    except amem.AmemError as error:
        reasons.append(str(error))
        return "can't be enabled"
    return f"{before.name.lower()} at start, {amem.state().name.lower()} once enabled"


def _driver_line(reasons: list[str]) -> str:
    try:
        driver = Driver()
        count = driver.device_count()
    except (OSError, DriverError) as error:
        reasons.append(f"no CUDA driver: {error}")
        return "none"
    if count == 0:
        reasons.append("the CUDA driver has no device; look at CUDA_VISIBLE_DEVICES")
    return f"CUDA {driver.version()}, {count} devices"


def _nccl_line(reasons: list[str]) -> str:
    path = find()
    try:
        return f"{Nccl(path).version()}, {path}"
    except OSError as error:
        reasons.append(f"no NCCL: {error}")
        return "none"
