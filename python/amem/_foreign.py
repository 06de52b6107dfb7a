"""Binds a C library by a table of its functions, each looked up on first use."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any


class Foreign:
    """A library whose functions return a status, 0 for success."""

    def __init__(self, path: str, functions: Mapping[str, Sequence[Any]]) -> None:
        """functions: name -> argtypes."""
        self.library = ctypes.CDLL(path)
        self._functions = functions
        self._bound: dict[str, Any] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the table and raises if its status is not 0."""
        function = self._bound.get(name)
        if function is None:
            function = getattr(self.library, name)
            function.restype = ctypes.c_int
            function.argtypes = list(self._functions[name])
            self._bound[name] = function
        status = function(*arguments)
        if status != 0:
            raise self.error(name, status)

    def error(self, name: str, status: int) -> Exception:
        return OSError(f"{name} failed with status {status}")
