"""torch_memory_saver's modules, made of amem. amem.compat puts them in place.

Callers rely on some semantics of the original that amem's own functions don't
have: an unknown tag is no error, "all" means torch's memory and not NCCL's, and
get_cpu_backup() of what is not paused is None, or what the last pause kept. Where
the original ends the process, these raise amem's exceptions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from . import _api, _backup, _env, _library, _regions
from .errors import AmemError, CoreError, InvalidArgumentError, InvalidStateError

CpuBackupBackend = Literal["mmap", "pinned"]
HookMode = Literal["preload", "torch"]

DEFAULT_TAG = "default"


class _Config(threading.local):
    """What a thread allocates: torch_memory_saver has it in parts, which callers set one by one."""

    def __init__(self) -> None:
        self.tag = DEFAULT_TAG
        self.interesting = _env.switch("TMS_INIT_ENABLE")
        self.cpu_backup = _env.switch("TMS_INIT_ENABLE_CPU_BACKUP")
        self.disk_backup = _env.switch("TMS_INIT_ENABLE_DISK_BACKUP")
        self.backend = _env.text("TMS_INIT_CPU_BACKUP_BACKEND") or "pinned"

    def region(self) -> _regions.Region:
        if self.cpu_backup and self.backend == "mmap":
            _given_back.add(self.tag)
        return _regions.region(self.tag, _backup_of(self.cpu_backup, self.disk_backup))

    def apply(self) -> None:
        _regions.replace(self.region() if self.interesting else None)

    @contextlib.contextmanager
    def changed(self, **parts: Any) -> Iterator[None]:
        """With these parts, in which the thread is already."""
        before = dict(vars(self))
        vars(self).update(parts)
        try:
            yield
        finally:
            vars(self).update(before)


_config = _Config()
# The tags whose host memory a resume gives back: those of the backend "mmap", whose callers count on that.
_given_back: set[str] = set()


def _backup_of(cpu: bool, disk: bool) -> _regions.Backup:
    return "cpu" if cpu else "disk" if disk else "none"


class TorchMemorySaver:
    def __init__(self) -> None:
        # Callers take None for "not used in this process".
        self._impl: _Impl | None = None
        self._hook_mode: HookMode = "preload"

    @contextlib.contextmanager
    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """amem.region(). Both backends of a CPU backup are amem's pinned memory; that of "mmap" goes with a resume."""
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        if enable_cpu_backup and enable_disk_backup:
            raise InvalidArgumentError("enable_cpu_backup and enable_disk_backup exclude each other")
        with self._ensure_initialized().region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """amem.cuda_graph()."""
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        impl = self._ensure_initialized()
        with impl.cuda_graph(cuda_graph, pool, stream, capture_error_mode, tag, enable_cpu_backup, cpu_backup_backend):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """amem.disable(), of which what is freed inside goes back to the device when it ends.

        Outside of a region, if there is no default region, it does nothing.
        """
        with self._ensure_initialized().disable():
            yield

    def pause(self, tag: str | None = None) -> None:
        """amem.pause() of one tag, or of all but NCCL's. An unknown tag does nothing."""
        self._ensure_initialized().pause(tag)

    def resume(self, tag: str | None = None) -> None:
        """amem.resume() of one tag, or of all but NCCL's. An unknown tag does nothing."""
        self._ensure_initialized().resume(tag)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """amem.cpu_backup() of a paused tensor; of another what its last pause kept, or None.

        The resume has kept that where retain_cpu_backup was set then.
        """
        return self._ensure_initialized().get_cpu_backup(x, zero_copy)

    def set_disk_backup_dir(self, path: str) -> None:
        os.makedirs(_library.folder_path(path), exist_ok=True)
        self._ensure_initialized()
        _set_disk_directory(path)

    @property
    def enabled(self) -> bool:
        return True

    @property
    def hook_mode(self) -> HookMode:
        """Accepted, and without effect: there is one way."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in ("preload", "torch"):
            raise InvalidArgumentError(f"hook_mode {hook_mode!r} is neither 'preload' nor 'torch'")
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        raise NotImplementedError("memory_margin_bytes can be set only")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._ensure_initialized()._binary_wrapper.cdll.set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether a resume leaves the contents of the pause to get_cpu_backup(), at the same address."""
        return self._ensure_initialized()._binary_wrapper.cdll.tms_get_retain_cpu_backup()

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ensure_initialized()._binary_wrapper.cdll.tms_set_retain_cpu_backup(value)

    def _ensure_initialized(self) -> _Impl:
        if self._impl is None:
            self._impl = _Impl()
        return self._impl


def _check_backend(enable_cpu_backup: bool, backend: str | None) -> None:
    if backend is None:
        return
    if not enable_cpu_backup:
        raise InvalidArgumentError("cpu_backup_backend requires enable_cpu_backup=True")
    if sys.modules["torch_memory_saver.entrypoint"].is_xpu():  # which callers may have replaced
        raise InvalidArgumentError("cpu_backup_backend is not supported on XPU")
    import torch

    if backend == "mmap" and getattr(torch.version, "hip", None):
        raise InvalidArgumentError("cpu_backup_backend='mmap' is not supported on ROCm")
    _checked_backend(backend)


def _checked_backend(backend: str) -> str:
    if backend not in ("mmap", "pinned"):
        raise InvalidArgumentError(f"cpu_backup_backend {backend!r} is neither 'mmap' nor 'pinned'")
    return backend


def _set_disk_directory(path: str) -> None:
    """Callers look for files with names in it."""
    folder = _library.folder_path(path)
    library = _library.load()
    status = library.amem_set_named_disk_directory(folder)
    _library.check(library, "amem_set_named_disk_directory", status)


class _MemPools:
    def pop(self, key: tuple[str, bool, bool, str, int], *default: Any) -> None:
        """What is freed of the tag's memory goes back to the device with the next empty_cache()."""
        _regions.trim((key[0],))


class _Impl:
    """Callers reach through it for _binary_wrapper.cdll, and its tests for _mem_pools and _with_region_config."""

    def __init__(self) -> None:
        self._binary_wrapper = BinaryWrapper()
        self._mem_pools = _MemPools()
        directory = _env.text("TMS_DISK_BACKUP_DIR")
        if directory:
            os.makedirs(directory, exist_ok=True)
            _set_disk_directory(directory)

    @contextlib.contextmanager
    def region(
        self,
        tag: str,
        enable_cpu_backup: bool,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        parts = {"tag": tag, "interesting": True, "cpu_backup": enable_cpu_backup, "disk_backup": enable_disk_backup}
        if cpu_backup_backend is not None:
            parts["backend"] = cpu_backup_backend
        with _config.changed(**parts), _config.region():
            yield

    def _with_region_config(
        self,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None,
        enable_disk_backup: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        return self.region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any,
        stream: Any,
        capture_error_mode: str,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        parts = {"backend": cpu_backup_backend} if cpu_backup_backend is not None else {}
        with _config.changed(tag=tag, cpu_backup=enable_cpu_backup, disk_backup=False, **parts):
            wanted = _config.region()
        with _regions.cuda_graph(
            cuda_graph, wanted.tag, wanted.backup, pool=pool, stream=stream, capture_error_mode=capture_error_mode
        ):
            yield

    @contextlib.contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Iterator[None]:
        if _regions.current_region() is None:
            yield
            return
        with _regions.disable_and_give_back(), _config.changed(interesting=False):
            yield

    def pause(self, tag: str | None) -> None:
        tags = _known(tag)
        if tags:
            _api.pause(*tags)

    def resume(self, tag: str | None) -> None:
        tags = _known(tag)
        if not tags:
            return
        retain = _functions.tms_get_retain_cpu_backup()
        _library.load().amem_retain_backups(int(retain))
        _api.resume(*tags)
        done = _given_back.intersection(tags)
        if done and not retain:
            _api.free_host_memory(*sorted(done))

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        _backup.check_tensor(x)
        library = _library.loaded()
        state = _api.State.OFF if library is None else _api.State(library.amem_memory_state(x.data_ptr()))
        if state is _api.State.OFF:
            return None
        if zero_copy:
            with contextlib.suppress(AmemError):
                return _backup.last_backup(x, zero_copy=True)
        try:
            return _backup.last_backup(x)
        except InvalidStateError:
            if state is _api.State.PAUSED:
                raise
            return None


def _known(tag: str | None) -> list[str]:
    known = _regions.tags()
    return [one for one in known if one == tag] if tag else known


@functools.cache
def _cuda_runtime() -> ctypes.CDLL:
    """The one that torch has loaded."""
    import torch

    major = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD)


class _Functions:
    """The functions of torch_memory_saver's library that callers use through ctypes."""

    def __init__(self) -> None:
        self._retain = _env.switch("TMS_RETAIN_CPU_BACKUP")

    def __getattr__(self, name: str) -> Any:
        """The original's library is linked with the CUDA runtime, whose functions are found through it."""
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return getattr(_cuda_runtime(), name)

    def tms_set_interesting_region(self, value: bool) -> None:
        _config.interesting = bool(value)
        _config.apply()

    def tms_get_interesting_region(self) -> bool:
        return _config.interesting

    def tms_set_current_tag(self, tag: bytes) -> None:
        _config.tag = tag.decode()
        _config.apply()

    def tms_get_current_tag(self) -> bytes:
        return _config.tag.encode()

    def tms_set_enable_cpu_backup(self, value: bool) -> None:
        _config.cpu_backup = bool(value)
        _config.apply()

    def tms_get_enable_cpu_backup(self) -> bool:
        return _config.cpu_backup

    def tms_set_enable_disk_backup(self, value: bool) -> None:
        _config.disk_backup = bool(value)
        _config.apply()

    def tms_get_enable_disk_backup(self) -> bool:
        return _config.disk_backup

    def tms_set_cpu_backup_backend(self, backend: bytes) -> None:
        _config.backend = _checked_backend(backend.decode())

    def tms_get_cpu_backup_backend(self) -> bytes:
        return _config.backend.encode()

    def tms_set_disk_backup_dir(self, path: bytes) -> None:
        _set_disk_directory(os.fsdecode(path))

    def tms_pause(self, tag: bytes | None) -> int:
        torch_memory_saver.pause(tag.decode() if tag else None)
        return 0

    def tms_resume(self, tag: bytes | None) -> int:
        torch_memory_saver.resume(tag.decode() if tag else None)
        return 0

    def tms_get_cpu_backup_pointer(self, ptr: Any, size: int) -> Any:
        """A null pointer for memory that is not paused, and whose backup was not retained."""
        address = ctypes.cast(ptr, ctypes.c_void_p)
        library = _library.loaded()
        backup = ctypes.c_void_p()
        state = _api.State.OFF if library is None else _api.State(library.amem_memory_state(address))
        if library is not None and state is not _api.State.OFF:
            status = library.amem_backup_pointer(address, size, ctypes.byref(backup))
            if state is _api.State.PAUSED:
                _library.check(library, "amem_backup_pointer", status)
        return ctypes.cast(backup, ctypes.POINTER(ctypes.c_uint8))

    def tms_set_retain_cpu_backup(self, value: bool) -> None:
        self._retain = bool(value)

    def tms_get_retain_cpu_backup(self) -> bool:
        return self._retain

    def set_memory_margin_bytes(self, value: int) -> None:
        _library.load().amem_set_memory_margin(_library.whole("memory margin", value, 0, 2**64 - 1))


_functions = _Functions()


class BinaryWrapper:
    def __init__(self, path_binary: str = "") -> None:
        self.cdll = _functions

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        if cpu_backup_backend is not None:
            _config.backend = _checked_backend(cpu_backup_backend)
        _config.tag, _config.interesting = tag, interesting_region
        _config.cpu_backup, _config.disk_backup = enable_cpu_backup, enable_disk_backup
        _config.apply()


torch_memory_saver = TorchMemorySaver()


def get_binary_path_from_package(stem: str) -> Path:
    """What callers put into LD_PRELOAD: amem's library of torch_memory_saver's name, else its own."""
    folder = Path(_library.folder())
    path = folder / f"{stem}.abi3.so"
    if not path.exists():
        path = folder / _library.HOOK
    if not path.exists():
        raise CoreError(f"{path} does not exist: install amem from a wheel of this platform")
    return path


@contextlib.contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes that are started inside get amem in the place of torch_memory_saver too.

    Preloaded, amem's library has torch_memory_saver's functions for those who look them up in the process.
    """
    import importlib

    module = importlib.import_module("torch_memory_saver.hooks.mode_preload")  # where callers replace the function
    path = str(module.get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    others = _env.text("LD_PRELOAD")
    with change_env("AMEM_COMPAT_TMS", "1"), change_env("LD_PRELOAD", f"{path}:{others}" if others else path):
        yield


def is_xpu() -> bool:
    return False


class HookUtilBase:
    @staticmethod
    def create(hook_mode: HookMode) -> HookUtilBase:
        return {"preload": HookUtilModePreload, "torch": HookUtilModeTorch}[hook_mode]()

    def get_path_binary(self) -> str:
        return str(get_binary_path_from_package(""))

    def get_allocator(self) -> Any:
        return None


class HookUtilModePreload(HookUtilBase):
    pass


class HookUtilModeTorch(HookUtilBase):
    pass


def get_device() -> str:
    return "cuda"


def empty_cache() -> None:
    import torch

    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    import torch

    used = int(torch.cuda.device_memory_used(gpu_id))
    print(f"GPU {gpu_id} memory: {used / 1024**3:.2f} GB ({message})")
    return used


# What is in which module.
MODULES: dict[str, tuple[object, ...]] = {
    "torch_memory_saver": (TorchMemorySaver, configure_subprocess),
    "torch_memory_saver.binary_wrapper": (BinaryWrapper,),
    "torch_memory_saver.entrypoint": (TorchMemorySaver, BinaryWrapper, HookUtilBase, is_xpu),
    "torch_memory_saver.hooks": (),
    "torch_memory_saver.hooks.base": (HookUtilBase,),
    "torch_memory_saver.hooks.mode_preload": (
        HookUtilBase,
        HookUtilModePreload,
        change_env,
        configure_subprocess,
        get_binary_path_from_package,
    ),
    "torch_memory_saver.hooks.mode_torch": (HookUtilBase, HookUtilModeTorch, get_binary_path_from_package, is_xpu),
    "torch_memory_saver.testing_utils": (get_device, empty_cache, get_and_print_gpu_memory, is_xpu),
    "torch_memory_saver.utils": (change_env, get_binary_path_from_package, is_xpu),
}
# Those without a name of their own.
VALUES: dict[str, dict[str, object]] = {
    "torch_memory_saver": {"torch_memory_saver": torch_memory_saver},
    "torch_memory_saver.entrypoint": {"CpuBackupBackend": CpuBackupBackend, "HookMode": HookMode},
    "torch_memory_saver.hooks.base": {"HookMode": HookMode},
}


def fill(module: ModuleType) -> None:
    """Runs a module of the table, as the body of its file would."""
    name = module.__name__
    for thing in MODULES[name]:
        setattr(module, thing.__name__, thing)  # type: ignore[attr-defined]
    for key, value in VALUES.get(name, {}).items():
        setattr(module, key, value)
    module.__doc__ = __doc__
    if name == "torch_memory_saver":
        import importlib

        # The folder above it is where callers look for a library to preload.
        module.__file__ = os.path.join(_library.folder(), name, "__init__.py")
        for other in MODULES:
            if other not in (name, f"{name}.testing_utils"):
                importlib.import_module(other)
        if _env.switch("TMS_INIT_ENABLE"):
            # As with the original, what torch has cached is paused with the rest, and there again after a resume.
            _regions.set_default(_config.region(), keeps_cache=True)
            torch_memory_saver._ensure_initialized()
