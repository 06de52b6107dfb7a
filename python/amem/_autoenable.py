"""Enables amem in a process whose environment has AMEM_ENABLE.

The wheel's .pth file imports this module while Python starts. So it imports
little, and a failure is one line on stderr: it must never stop a process.
"""

from __future__ import annotations

import os
import sys


def run() -> None:
    value = os.environ.get("AMEM_ENABLE", "")
    if value.lower() in ("", "0", "false", "off"):
        return
    try:
        from . import _library

        if value.lower() in _library.ENABLE_VALUES:
            _library.enable()
        else:
            _say(f"AMEM_ENABLE={value} is neither 1 nor 0")
    except Exception as error:
        _say(str(error))


def _say(reason: str) -> None:
    if sys.stderr is not None:
        print("amem: not enabled:", " ".join(reason.split()), file=sys.stderr)


run()
