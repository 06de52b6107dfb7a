"""amem in the place of torch_memory_saver: its names, arguments, settings and variables.

What it does with memory is in tests/pytorch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import fake_library
import fake_torch

INSTALL = "amem.compat.install()\n"

HELPERS = """
import ctypes, os, threading, torch
from torch_memory_saver import torch_memory_saver as saver

def cdll():
    return saver._impl._binary_wrapper.cdll

def bytes_of(tag, backup):
    library = ctypes.CDLL("libamem_hook.so")
    library.fake_regions.restype = ctypes.c_char_p
    return json.loads(library.fake_regions()).get(f"{tag}/{backup}", [0, 0, [0]])[2][0]

def states(*tags):
    return [amem.state(tag).name for tag in tags]

def show(value):
    print(json.dumps(value))
"""

# torch_memory_saver 0.0.10: what each function takes.
SIGNATURES = {
    "region": "(tag='default', enable_cpu_backup=False, enable_disk_backup=False, cpu_backup_backend=None)",
    "cuda_graph": "(cuda_graph, pool=None, stream=None, capture_error_mode='global', tag='default',"
    " enable_cpu_backup=False, cpu_backup_backend=None)",
    "disable": "()",
    "pause": "(tag=None)",
    "resume": "(tag=None)",
    "get_cpu_backup": "(x, zero_copy=False)",
    "set_disk_backup_dir": "(path)",
}
PROPERTIES = ["enabled", "hook_mode", "memory_margin_bytes", "retain_cpu_backup"]
FUNCTIONS = [
    "set_memory_margin_bytes",
    "tms_get_cpu_backup_backend",
    "tms_get_cpu_backup_pointer",
    "tms_get_current_tag",
    "tms_get_enable_cpu_backup",
    "tms_get_enable_disk_backup",
    "tms_get_interesting_region",
    "tms_get_retain_cpu_backup",
    "tms_pause",
    "tms_resume",
    "tms_set_cpu_backup_backend",
    "tms_set_current_tag",
    "tms_set_disk_backup_dir",
    "tms_set_enable_cpu_backup",
    "tms_set_enable_disk_backup",
    "tms_set_interesting_region",
    "tms_set_retain_cpu_backup",
]
MODULES = {
    "torch_memory_saver": ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"],
    "torch_memory_saver.binary_wrapper": ["BinaryWrapper"],
    "torch_memory_saver.entrypoint": ["CpuBackupBackend", "TorchMemorySaver"],
    "torch_memory_saver.hooks": [],
    "torch_memory_saver.hooks.base": ["HookMode", "HookUtilBase"],
    "torch_memory_saver.hooks.mode_preload": ["HookUtilModePreload", "configure_subprocess"],
    "torch_memory_saver.hooks.mode_torch": ["HookUtilModeTorch"],
    "torch_memory_saver.testing_utils": ["empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"],
    "torch_memory_saver.utils": ["change_env", "get_binary_path_from_package", "is_xpu"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("lib")
    fake_library.build(folder)
    return folder


def result(script: str, folder: Path, **env: str) -> Any:
    return fake_library.result(INSTALL + fake_torch.PRELUDE + HELPERS + script, folder, **env)


# What is there.


def test_every_name_of_the_original_is_there(folder: Path) -> None:
    script = f"""
import importlib, inspect
missing = []
for module, names in {MODULES!r}.items():
    found = importlib.import_module(module)
    missing += [f"{{module}}.{{name}}" for name in names if not hasattr(found, name)]
    parent, _, last = module.rpartition(".")
    if parent and getattr(importlib.import_module(parent), last) is not found:
        missing.append(module)
missing += [name for name in {PROPERTIES!r} if not isinstance(getattr(type(saver), name, None), property)]
saver._ensure_initialized()
missing += [name for name in {FUNCTIONS!r} if not callable(getattr(cdll(), name, None))]
signatures = {{}}
for name in {list(SIGNATURES)!r}:
    signature = inspect.signature(getattr(saver, name))
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    signatures[name] = str(inspect.Signature(parameters))
show([missing, signatures])
"""
    assert result(script, folder) == [[], SIGNATURES]


def test_importing_it_imports_no_torch(folder: Path) -> None:
    script = (
        INSTALL
        + """
before = "torch" in sys.modules or "amem._tms" in sys.modules
import torch_memory_saver
import torch_memory_saver.testing_utils
from torch_memory_saver import configure_subprocess, torch_memory_saver as saver
print(json.dumps([before, "torch" in sys.modules, saver.enabled, saver._impl]))
"""
    )
    assert fake_library.result(script, folder) == [False, False, True, None]


def test_a_module_that_the_original_lacks_is_not_found(folder: Path) -> None:
    done = fake_library.run(INSTALL + "import torch_memory_saver.nothing", folder)
    assert "ModuleNotFoundError: No module named 'torch_memory_saver.nothing'" in done.stderr


def test_install_twice_is_once(folder: Path) -> None:
    script = (
        INSTALL * 2
        + """
import torch_memory_saver
amem.compat.install()
print(json.dumps(sum(type(finder).__module__ == "amem.compat" for finder in sys.meta_path)))
"""
    )
    assert fake_library.result(script, folder) == 1


def test_install_is_refused_where_the_original_is_in_use(folder: Path) -> None:
    imported = "sys.modules['torch_memory_saver'] = json\n"
    assert "InvalidStateError: torch_memory_saver is imported" in fake_library.run(imported + INSTALL, folder).stderr
    path = "/x/torch_memory_saver_hook_mode_preload_cu12.abi3.so"
    preloaded = f"import os\nos.environ['LD_PRELOAD'] = '/other.so:{path}'\n"
    assert f"InvalidStateError: LD_PRELOAD has {path}" in fake_library.run(preloaded + INSTALL, folder).stderr


# What it does.


@pytest.mark.parametrize(
    "arguments",
    [
        "cpu_backup_backend='mmap'",
        "enable_cpu_backup=True, cpu_backup_backend='gpu'",
        "enable_cpu_backup=True, enable_disk_backup=True",
    ],
)
def test_wrong_arguments_are_a_value_error(folder: Path, arguments: str) -> None:
    script = f"""
try:
    with saver.region({arguments}):
        show("entered")
except ValueError as error:
    show(type(error).__name__)
"""
    assert result(script, folder) == "InvalidArgumentError"


def test_get_cpu_backup_is_of_paused_tensors(folder: Path) -> None:
    script = """
with saver.region("weights", enable_cpu_backup=True):
    tensor = torch.empty(4).write(bytes(range(4)))
ordinary = torch.empty(4)
seen = []
def look(*arguments):
    backup = saver.get_cpu_backup(*arguments)
    seen.append(backup and backup.read())
look(tensor)
look(ordinary)
saver.pause()
look(tensor)
look(tensor, True)
look(ordinary)
saver.resume()
look(tensor)
saver.retain_cpu_backup = True
look(tensor)
look(tensor, True)
look(ordinary)
show(seen)
"""
    contents = [0, 1, 2, 3]
    expected = [None, None, contents, contents, None, None, None, None, None]
    assert result(script, folder) == expected
    # Where zero copy is not possible, it is a copy.
    assert result(script, folder, FAKE_SPLIT="1") == expected


def test_backends_that_other_devices_lack(folder: Path) -> None:
    script = """
import torch_memory_saver.entrypoint as entrypoint
seen = []
def attempt(backend):
    try:
        with saver.region(enable_cpu_backup=True, cpu_backup_backend=backend):
            seen.append("entered")
    except ValueError as error:
        seen.append(str(error))
torch.version.hip = "6.2.0"
attempt("mmap")
attempt("pinned")
entrypoint.is_xpu = lambda: True
attempt("mmap")
attempt("pinned")
show(seen)
"""
    rocm, entered, *xpu = result(script, folder)
    assert "not supported on ROCm" in rocm and entered == "entered"
    assert len(xpu) == 2 and all("not supported on XPU" in message for message in xpu)


def test_callers_see_whether_it_was_used_in_this_process(folder: Path) -> None:
    """They switch the region off and on around what must be ordinary memory, unless _impl is None."""
    script = """
seen = [saver._impl]
with saver.region("weights"):
    seen.append(saver._impl is not None)
import torch_memory_saver
seen.append(torch_memory_saver.TorchMemorySaver()._impl)
show(seen)
"""
    assert result(script, folder) == [None, True, None]


def test_settings(folder: Path) -> None:
    script = """
saver.hook_mode = "torch"
seen = [saver.hook_mode, saver.retain_cpu_backup]
saver.retain_cpu_backup = True
seen.append(saver.retain_cpu_backup)
try:
    saver.hook_mode = "other"
except ValueError:
    seen.append("refused")
try:
    saver.memory_margin_bytes
except NotImplementedError:
    seen.append("no getter")
show(seen)
"""
    assert result(script, folder) == ["torch", False, True, "refused", "no getter"]


def test_the_margin_is_set(folder: Path) -> None:
    script = """
saver.memory_margin_bytes = 5 << 30
library = ctypes.CDLL("libamem_hook.so")
library.fake_margin.restype = ctypes.c_size_t
seen = [library.fake_margin()]
cdll().set_memory_margin_bytes(7)
show([*seen, library.fake_margin()])
"""
    assert result(script, folder) == [5 << 30, 7]


@pytest.mark.parametrize("by", ["call", "variable"])
def test_the_disk_folder_is_made_and_set(folder: Path, tmp_path: Path, by: str) -> None:
    target = tmp_path / "new" / "folder"
    script = f"saver.set_disk_backup_dir({str(target)!r})" if by == "call" else "saver.pause()"
    script += """
library = ctypes.CDLL("libamem_hook.so")
library.fake_named_directory.restype = ctypes.c_char_p
show(library.fake_named_directory().decode())
"""
    env = {} if by == "call" else {"TMS_DISK_BACKUP_DIR": str(target)}
    assert result(script, folder, **env) == str(target)
    assert target.is_dir()


def test_configure_subprocess_reaches_children_only(folder: Path) -> None:
    script = """
import subprocess
from torch_memory_saver import configure_subprocess
child = [sys.executable, "-S", "-c",
         "import amem._autoenable, torch_memory_saver as t; print(type(t.torch_memory_saver).__module__)"]
def run():
    return subprocess.run(child, capture_output=True, text=True).stdout.strip()
preloads = []
for before in (None, "/other.so"):
    if before:
        os.environ["LD_PRELOAD"] = before
    with configure_subprocess():
        inside = run() if before is None else ""
        preloads.append(os.environ["LD_PRELOAD"])
    preloads.append(os.environ.pop("LD_PRELOAD", None))
    if before is None:
        seen = [inside, run(), os.environ.get("AMEM_COMPAT_TMS")]
show([seen, preloads])
"""
    hook = os.path.join(folder, "libamem_hook.so")
    assert result(script, folder) == [["amem._tms", "", None], [hook, None, f"{hook}:/other.so", "/other.so"]]


def test_configure_subprocess_preloads_what_a_caller_has_put_in_its_place(folder: Path) -> None:
    script = """
import torch_memory_saver.hooks.mode_preload as mode
mode.get_binary_path_from_package = lambda stem: f"/fake/{stem}.so"
with mode.configure_subprocess():
    show(os.environ["LD_PRELOAD"])
"""
    assert result(script, folder) == "/fake/torch_memory_saver_hook_mode_preload.so"


def test_utilities(folder: Path) -> None:
    script = """
from torch_memory_saver.hooks.base import HookUtilBase
from torch_memory_saver.testing_utils import empty_cache, get_and_print_gpu_memory, get_device
from torch_memory_saver.utils import change_env, get_binary_path_from_package, is_xpu
os.environ["SET"] = "before"
with change_env("SET", "x"), change_env("UNSET", "y"):
    inside = [os.environ["SET"], os.environ["UNSET"]]
empty_cache()
show([inside, os.environ["SET"], "UNSET" in os.environ, is_xpu(), get_device(), get_and_print_gpu_memory("now"),
      str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload")),
      HookUtilBase.create("preload").get_path_binary()])
"""
    hook = os.path.join(folder, "libamem_hook.so")
    assert result(script, folder) == [["x", "y"], "before", False, False, "cuda", 3 << 30, hook, hook]


# Its environment.

INIT = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}


def test_init_enable_and_what_is_ordinary(folder: Path) -> None:
    """Of the thread that says so alone, and of its backward()."""
    script = """
from fake_torch import backward
kept = [torch.empty(1)]
def on_a_thread():
    thread = threading.Thread(target=lambda: kept.append(torch.empty(10)))
    thread.start()
    thread.join()
with saver.disable():
    kept.append(torch.empty(5000))
    backward(lambda: kept.append(torch.empty(5000)))
    on_a_thread()
seen = [bytes_of("default", 1)]
cdll().tms_set_interesting_region(False)
kept.append(torch.empty(5000))
on_a_thread()
with saver.region("grads"):
    kept.append(torch.empty(3))
kept.append(torch.empty(5000))
cdll().tms_set_interesting_region(True)
seen += [bytes_of("default", 1), bytes_of("grads", 0), torch._C._is_multithreading_enabled()]
kept.append(torch.empty(100))
backward(lambda: kept.append(torch.empty(100)))
amem.default_region(None)  # the thread is in nothing any more
show([*seen, bytes_of("default", 1)])
"""
    assert result(script, folder, **INIT) == [11, 21, 3, True, 221]


def test_init_enable_starts_no_cuda(folder: Path) -> None:
    script = """
before = torch.cuda.is_initialized()
state = cdll().tms_get_interesting_region()
saver.pause()
seen = [before, state, torch.cuda.is_initialized(), states("default")]
child = os.fork()
kept = torch.empty(1)
if child == 0:
    os._exit(bytes_of("default", 1) != 1)
show([seen, os.waitpid(child, 0)[1], bytes_of("default", 1)])
"""
    assert result(script, folder, **INIT) == [[False, True, False, ["OFF"]], 0, 1]


def test_init_enable_with_mmap_gives_host_memory_back(folder: Path) -> None:
    script = """
kept = torch.empty(1)
saver.pause()
saver.resume()
library = ctypes.CDLL("libamem_hook.so")
library.fake_freed.restype = ctypes.c_char_p
show(library.fake_freed().decode())
"""
    assert result(script, folder, **INIT) == ""
    assert result(script, folder, TMS_INIT_CPU_BACKUP_BACKEND="mmap", **INIT) == "[default]"


@pytest.mark.parametrize("name", ["TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP", "TMS_RETAIN_CPU_BACKUP"])
def test_another_value_of_a_switch_is_warned_of_once_and_off(folder: Path, name: str) -> None:
    script = """
import threading
import torch_memory_saver
thread = threading.Thread(target=torch_memory_saver.torch_memory_saver.region("kv").__enter__)
thread.start()
thread.join()
print(json.dumps(torch_memory_saver.torch_memory_saver.retain_cpu_backup))
"""
    done = fake_library.run(INSTALL + script, folder, **{name: "maybe"})
    assert done.stdout == "false\n", done.stderr
    assert done.stderr.count(f"amem: {name}=maybe is taken as off") == 1


def test_retain_from_the_environment(folder: Path) -> None:
    assert result("show(saver.retain_cpu_backup)", folder, TMS_RETAIN_CPU_BACKUP="1") is True
    assert result("show(saver.retain_cpu_backup)", folder, TMS_RETAIN_CPU_BACKUP="no") is False
