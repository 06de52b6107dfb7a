"""amem in the place of torch_memory_saver."""

from __future__ import annotations

import os
import subprocess
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


def test_regions_have_their_tag_and_backup(folder: Path) -> None:
    script = """
kept = []
with saver.region():
    kept.append(torch.empty(1))
    with saver.region(tag="weights", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        kept.append(torch.empty(10))
        with saver.disable():
            kept.append(torch.empty(5))
        kept.append(torch.empty(10))
    with saver.region("weights", enable_disk_backup=True):
        kept.append(torch.empty(100))
    kept.append(torch.empty(1))
@saver.region(tag="decorated")
def work():
    kept.append(torch.empty(1000))
work()
work()
show([bytes_of("default", 0), bytes_of("weights", 1), bytes_of("weights", 2), bytes_of("decorated", 0)])
"""
    assert result(script, folder) == [2, 20, 100, 2000]


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


def test_pause_and_resume_by_tag_and_all(folder: Path) -> None:
    script = """
amem.enable()
seen = []
def step(function, *tag):
    assert function(*tag) is None
    seen.append(states("nccl", "a", "b"))
step(saver.pause)  # nothing there yet
with saver.region("a"), saver.region("b"):
    pass
for tag in [("a",), ("a",), ("unknown",), ("nccl",), (None,)]:
    step(saver.pause, *tag)
for tag in [("unknown",), ("b",), ("nccl",), (), ()]:
    step(saver.resume, *tag)
show(seen)
"""
    active, paused = "ACTIVE", "PAUSED"
    assert result(script, folder) == [
        [active, "OFF", "OFF"],
        *[[active, paused, active]] * 4,
        *[[active, paused, paused]] * 2,
        *[[active, paused, active]] * 2,
        *[[active, active, active]] * 2,
    ]


def test_a_failed_resume_is_an_exception_and_can_be_repeated(folder: Path) -> None:
    script = """
with saver.region("weights"):
    kept = torch.empty(10)
saver.pause()
libc = ctypes.CDLL(None)
libc.setenv(b"FAKE_RESUME", b"9", 1)
try:
    saver.resume()
except torch.cuda.OutOfMemoryError as error:
    libc.unsetenv(b"FAKE_RESUME")
    saver.resume()
    show([isinstance(error, amem.OutOfMemoryError), states("weights")])
"""
    assert result(script, folder) == [True, ["ACTIVE"]]


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


def test_a_backup_is_retained_until_the_next_pause(folder: Path) -> None:
    script = """
with saver.region("weights", enable_cpu_backup=True):
    tensor = torch.empty(4).write(bytes(range(4)))
seen, places = [], set()
def look():
    for zero_copy in (False, True):
        backup = saver.get_cpu_backup(tensor, zero_copy)
        seen.append(backup and backup.read())
        if backup and zero_copy:
            places.add(backup.data_ptr())
            pointer = cdll().tms_get_cpu_backup_pointer(tensor.data_ptr(), 4)
            places.add(ctypes.cast(pointer, ctypes.c_void_p).value)
saver.retain_cpu_backup = True
for value in (1, 2):
    tensor.write(bytes([value] * 4))
    saver.pause()
    saver.resume()
    tensor.write(bytes([value + 10] * 4))
    look()
seen.append(tensor.read())
saver.retain_cpu_backup = False
look()
saver.pause()
saver.resume()
look()
show([seen, len(places), bool(cdll().tms_get_cpu_backup_pointer(tensor.data_ptr(), 4))])
"""
    one, two, twelve = [1] * 4, [2] * 4, [12] * 4
    assert result(script, folder) == [[one, one, two, two, twelve, two, two, None, None], 1, False]


def test_what_is_freed_of_a_pool_that_is_popped_goes_back(folder: Path) -> None:
    """Its tests do so, by the names of its internals."""
    script = """
def run():
    with saver.region("weights", enable_cpu_backup=True):
        tensor = torch.empty(10)
    pool = saver._impl._mem_pools.pop(("weights", True, False, "pinned", 0))
    with saver._impl._with_region_config(tag="weights", enable_cpu_backup=True, cpu_backup_backend="pinned"):
        seen = [cdll().tms_get_current_tag().decode(), cdll().tms_get_enable_cpu_backup()]
        del tensor, pool
        torch.cuda.empty_cache()
    return seen
seen = run()
show([*seen, bytes_of("weights", 1), cdll().tms_get_interesting_region()])
"""
    assert result(script, folder) == ["weights", True, 0, False]


def test_the_cuda_runtime_is_found_through_its_library(folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "cudart.c", tmp_path / "runtime.so"
    source.write_text("int cudaHostGetFlags(void) { return 42; }")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", "-o", str(target), str(source)],
        check=True,
        timeout=60,
    )
    script = f"""
saver._ensure_initialized()
seen = [hasattr(cdll(), "tms_nothing")]
runtime = ctypes.CDLL({str(target)!r})
cdll().cudaHostGetFlags.argtypes = []
show([*seen, cdll().cudaHostGetFlags(), hasattr(cdll(), "cudaNothing")])
"""
    assert result(script, folder) == [False, 42, False]


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


def test_a_resume_gives_the_host_memory_of_mmap_back(folder: Path) -> None:
    script = """
for tag, arguments in [
    ("pinned", {"enable_cpu_backup": True, "cpu_backup_backend": "pinned"}),
    ("plain", {"enable_cpu_backup": True}),
    ("mapped", {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"}),
    ("cache", {}),
]:
    with saver.region(tag, **arguments):
        torch.empty(4)
with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="graph", enable_cpu_backup=True, cpu_backup_backend="mmap"):
    pass
for retain in (True, False):
    saver.retain_cpu_backup = retain
    saver.pause()
    saver.resume("plain")
    saver.resume()
library = ctypes.CDLL("libamem_hook.so")
library.fake_freed.restype = ctypes.c_char_p
show(library.fake_freed().decode())
"""
    assert result(script, folder) == "[graph,mapped]"
    everywhere = "[graph,mapped,plain]"
    assert result(script, folder, TMS_INIT_CPU_BACKUP_BACKEND="mmap") == "[plain]" + everywhere


def test_disable_gives_back_what_was_freed_inside(folder: Path) -> None:
    script = """
def ordinary():
    return torch.cuda.memory_stats(0)["reserved_bytes.all.current"]
with saver.region("weights"):
    before = ordinary()
    with saver.disable():
        kept, freed = torch.empty(10), torch.empty(1000)
        seen = [ordinary() - before, bytes_of("weights", 0)]
        del freed
    seen += [ordinary() - before, kept.write(b"1234567890").read()[-1]]
    torch.empty(100)
    seen.append(bytes_of("weights", 0))
with saver.disable():
    pass
show(seen)
"""
    assert result(script, folder) == [1010, 0, 10, ord("0"), 100]


def test_get_cpu_backup_of_what_has_none_is_an_exception(folder: Path) -> None:
    script = """
with saver.region("cache"):
    tensor = torch.empty(4)
saver.pause()
try:
    show(saver.get_cpu_backup(tensor, zero_copy=True))
except amem.AmemError as error:
    show(str(error))
"""
    assert result(script, folder) == "fake: status 7"


def test_cuda_graph_with_the_arguments_of_its_callers(folder: Path) -> None:
    script = """
pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
for graph in graphs:
    with saver.cuda_graph(cuda_graph=graph, pool=pool, stream=stream, capture_error_mode="relaxed"):
        torch.empty(10)
with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="graph", enable_cpu_backup=True, cpu_backup_backend="pinned"):
    torch.empty(7)
show([bytes_of("default", 0), bytes_of("graph", 1)])
"""
    assert result(script, folder) == [10, 7]


def test_the_functions_of_its_library_switch_the_region(folder: Path) -> None:
    script = """
kept, seen = [], []
def here():
    return [cdll().tms_get_interesting_region(), cdll().tms_get_current_tag().decode(),
            cdll().tms_get_enable_cpu_backup(), cdll().tms_get_enable_disk_backup()]
with saver.region("weights", enable_cpu_backup=True):
    seen.append(here())
    before = cdll().tms_get_interesting_region()
    cdll().tms_set_interesting_region(False)
    seen.append(here())
    kept.append(torch.empty(1))
    cdll().tms_set_interesting_region(before)
    kept.append(torch.empty(10))
    cdll().tms_set_current_tag(b"chunk")
    kept.append(torch.empty(100))
    cdll().tms_set_enable_cpu_backup(False)
    kept.append(torch.empty(1000))
    seen.append(here())
seen.append(here())
kept.append(torch.empty(1))
saver._impl._binary_wrapper.set_config(
    tag="base", interesting_region=True, enable_cpu_backup=False, enable_disk_backup=True)
kept.append(torch.empty(10000))
with saver.region("inner"):
    kept.append(torch.empty(100000))
kept.append(torch.empty(10000))
cdll().tms_set_interesting_region(False)
kept.append(torch.empty(1))
show([seen, bytes_of("weights", 1), bytes_of("chunk", 1), bytes_of("chunk", 0), bytes_of("base", 2),
      bytes_of("inner", 0)])
"""
    seen = [
        [True, "weights", True, False],
        [False, "weights", True, False],
        [True, "chunk", False, False],
        [False, "default", False, False],
    ]
    assert result(script, folder) == [seen, 10, 100, 1000, 20000, 100000]


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


def test_the_pause_functions_of_its_library(folder: Path) -> None:
    script = """
with saver.region("weights", enable_cpu_backup=True):
    tensor = torch.empty(4).write(bytes(range(4)))
def pointer(tensor):
    return cdll().tms_get_cpu_backup_pointer(ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8)), 4)
seen = [bool(pointer(tensor)), cdll().tms_pause(b"weights"), states("weights"), pointer(tensor)[:4],
        bool(pointer(torch.empty(4))), cdll().tms_resume(None), states("weights")]
show(seen)
"""
    assert result(script, folder) == [False, 0, ["PAUSED"], [0, 1, 2, 3], False, 0, ["ACTIVE"]]


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


def test_init_enable_is_a_region_of_all_threads(folder: Path) -> None:
    script = """
from fake_torch import backward
kept, seen = [torch.empty(1)], []
def work(size):
    seen.append(cdll().tms_get_interesting_region())
    kept.append(torch.empty(size))
thread = threading.Thread(target=work, args=(10,))
thread.start()
thread.join()
backward(lambda: work(100))
with saver.region("grads"):
    kept.append(torch.empty(1000))
kept.append(torch.empty(10000))
show([seen, bytes_of("default", 1), bytes_of("grads", 0), cdll().tms_get_current_tag().decode()])
"""
    assert result(script, folder, **INIT) == [[True, True], 10111, 1000, "default"]


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


def test_init_enable_where_cuda_has_started(folder: Path) -> None:
    script = (
        "import torch\nordinary, cached = torch.empty(10), torch.empty(20)\ndel cached\n"
        + HELPERS
        + """
kept = torch.empty(20)
with saver.disable():
    torch.cuda.current_blas_handle()
show([bytes_of("default", 1)])
"""
    )
    assert fake_library.result(INSTALL + fake_torch.PRELUDE + script, folder, **INIT) == [20]


def test_init_enable_pauses_all_of_it(folder: Path) -> None:
    """What torch has cached too, and it is there again after a resume."""
    script = """
kept = torch.empty(4).write(bytes(range(4)))
torch.empty(1000)
saver.pause()
paused = [kept.read(), saver.get_cpu_backup(kept).read(), bytes_of("default", 1)]
before = torch.cuda.memory_stats(0)["reserved_bytes.all.current"]
with saver.disable():
    buffer = torch.empty(4).write(bytes(4))
    torch.cuda.current_blas_handle()
    ordinary = buffer.read()
    del buffer
after = torch.cuda.memory_stats(0)["reserved_bytes.all.current"]
saver.resume()
show([paused, ordinary, after - before, kept.read(), states("default"), bytes_of("default", 1)])
"""
    contents = [0, 1, 2, 3]
    # A workspace that is not there before is ordinary memory, and stays.
    assert result(script, folder, **INIT) == [
        [[0xDD] * 4, contents, 1004], [0] * 4, 8, contents, ["ACTIVE"], 1004
    ]  # fmt: skip


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
