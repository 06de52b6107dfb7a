"""Enables amem in a process whose environment has AMEM_ENABLE, or AMEM_COMPAT_TMS.

The wheel's .pth file imports this module while Python starts. So it imports
little, and a failure is one line on stderr: it must never stop a process.
"""

from __future__ import annotations

import sys

from . import _env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def run() -> None:
    if _env.switch("AMEM_ENABLE"):
        _try("not enabled", _enable)
    if _env.switch("AMEM_COMPAT_TMS"):
        _try("not in the place of torch_memory_saver", _install)
    library = sys.modules.get(f"{__package__}._library")
    if getattr(library, "_loaded", None) is None and "libamem_hook.so" not in (_env.text("LD_PRELOAD") or ""):
        _env.warn_of_unknown()


def _enable() -> None:
    from . import _library

    _library.enable()


def _install() -> None:
    from . import compat

    compat.install()


def _try(failure: str, do: Callable[[], None]) -> None:
    try:
        do()
    except Exception as error:
        _env.say(f"{failure}: {error}")


run()
