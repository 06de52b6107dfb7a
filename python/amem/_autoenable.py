"""Enables amem in a process whose environment has AMEM_ENABLE, or AMEM_COMPAT_TMS.

The wheel's .pth file imports this module while Python starts. So it imports
little, and a failure is one line on stderr: it must never stop a process.
"""

from __future__ import annotations

import os
import sys

from . import _env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def run() -> None:
    _obey("AMEM_ENABLE", "not enabled", _enable)
    _obey("AMEM_COMPAT_TMS", "not in the place of torch_memory_saver", _install)


def _enable() -> None:
    from . import _library

    _library.enable()


def _install() -> None:
    from . import compat

    compat.install()


def _obey(variable: str, failure: str, do: Callable[[], None]) -> None:
    value = os.environ.get(variable, "")
    if value.lower() in _env.OFF:
        return
    try:
        if value.lower() in _env.ON:
            do()
            return
        reason = f"{variable}={value} is neither 1 nor 0"
    except Exception as error:
        reason = str(error)
    if sys.stderr is not None:
        print(f"amem: {failure}:", " ".join(reason.split()), file=sys.stderr)


run()
