"""amem in the place of torch_memory_saver, for programs that import that.

    import amem.compat
    amem.compat.install()
    from torch_memory_saver import torch_memory_saver   # amem's

Or AMEM_COMPAT_TMS=1 in the environment, with no change to the program. What
differs is in docs/torch-memory.md.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from .errors import InvalidStateError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["install"]

NAME = "torch_memory_saver"


def install() -> None:
    """From now on `import torch_memory_saver` gives amem's implementation. Calling it again does nothing.

    Raises:
        InvalidStateError: torch_memory_saver itself is imported, or preloaded, already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if NAME in sys.modules:
        raise InvalidStateError(f"{NAME} is imported already: call amem.compat.install() before")
    for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if os.path.basename(path).startswith(NAME) and not _is_ours(path):
            raise InvalidStateError(f"LD_PRELOAD has {path}, which would manage the same memory: take it out")
    sys.meta_path.insert(0, _Finder())


def _is_ours(path: str) -> bool:
    """Whether it is the library that amem brings for programs that look for torch_memory_saver's and preload it."""
    from . import _library

    return os.path.realpath(os.path.dirname(path)) == os.path.realpath(_library.folder())


class _Finder:
    """Python asks it for every import, so it does nothing but compare."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != NAME and not name.startswith(NAME + "."):
            return None
        from importlib.machinery import ModuleSpec

        from . import _tms

        if name not in _tms.MODULES:
            return None
        loader: Any = _Loader()
        package = any(other.startswith(name + ".") for other in _tms.MODULES)
        return ModuleSpec(name, loader, is_package=package)


class _Loader:
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from . import _tms

        _tms.fill(module)
