"""What other libraries do with memory that amem manages: NCCL's own suspension, registration with a NIC, GDRCopy."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from harness import LIB, SIM, environment, needs_libraries, python, run

pytestmark = needs_libraries


def shared(folder: Path, name: str, source: str, *flags: str) -> Path:
    folder.mkdir(exist_ok=True)
    code, output = folder / f"{name}.c", folder / name
    code.write_text(source)
    run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(output), str(code), f"-Wl,-soname,{name}", *flags], os.environ)
    return output


def script(sim_dir: Path, body: str, **changes: str) -> list[str]:
    return python(PRELUDE + textwrap.dedent(body), environment(sim_dir, **changes)).splitlines()


PRELUDE = """
import ctypes, os, sys
import amem
from amem import _library
from amem._cuda import Device, Driver
from amem._nccl import Communicator, Nccl
sim = os.environ["AMEM_SIM_LIBRARY_DIR"]

def text(function, *arguments):
    function.restype = ctypes.c_char_p
    return function(*arguments).decode()
"""

# ---- NCCL's own suspension ----

# What of an NCCL of 2.29.7 or later is looked up by others; each call that comes here counts.
NCCL = """
#define _GNU_SOURCE
#include <dlfcn.h>
#define API(result, name, ...) \
    __attribute__((alias(#name))) result p##name(__VA_ARGS__); __attribute__((weak)) result name(__VA_ARGS__)
int came;
void *asks(const char *name) { return dlsym(RTLD_DEFAULT, name); } /* as all reach the driver */
API(int, ncclCommSuspend, void *comm, int flags) { return came += 1, 0; }
API(int, ncclCommResume, void *comm) { return came += 100, 0; }
API(const char *, ncclGetLastError, void *comm) { return "NCCL's own"; }
"""

# As libtorch_cuda is linked with NCCL; and a library that looks the functions up by itself, as bindings do.
CALLER = """
#define _GNU_SOURCE
#include <dlfcn.h>
int ncclCommSuspend(void *, int), ncclCommResume(void *);
const char *ncclGetLastError(void *);
struct { int (*suspend)(void *, int); int (*resume)(void *); } table = {ncclCommSuspend, ncclCommResume};
int linked_suspend(void) { return ncclCommSuspend(0, 1); }
int linked_resume(void) { return ncclCommResume(0); }
int table_suspend(void) { return table.suspend(0, 1); }
int table_resume(void) { return table.resume(0); }
const char *linked_error(void) { return ncclGetLastError(0); }
static void *find(const char *name) { return dlsym(dlopen("libnccl.so.9", RTLD_LAZY | RTLD_NOLOAD), name); }
int found_suspend(void) { return ((int (*)(void *, int))find("pncclCommSuspend"))(0, 1); }
int found_resume(void) { return ((int (*)(void *))find("pncclCommResume"))(0); }
"""

ROADS = """
def roads(nccl, caller):
    answers = []
    for road in ("linked", "table", "found"):
        answers += [getattr(caller, road + "_suspend")(), getattr(caller, road + "_resume")()]
    for prefix in ("nccl", "pnccl"):
        answers += [getattr(nccl, prefix + "CommSuspend")(None, 1), getattr(nccl, prefix + "CommResume")(None)]
    return sorted(set(answers)), ctypes.c_int.in_dll(nccl, "came").value
"""


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nccl")
    library = shared(folder, "libnccl.so.9", NCCL, "-Wl,-z,lazy", "-ldl")
    for binding in ("now", "lazy"):
        shared(folder, f"libcaller_{binding}.so", CALLER, f"-Wl,-z,{binding},-z,relro", str(library), "-ldl")
    return folder


def loads(nccl: Path, binding: str) -> str:
    libraries = [str(nccl / "libnccl.so.9"), str(nccl / f"libcaller_{binding}.so")]
    return f"nccl, caller = map(ctypes.CDLL, {libraries!r})\n"


@pytest.mark.parametrize("binding", ["now", "lazy"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_suspension_is_refused_whoever_calls(tmp_path: Path, nccl: Path, binding: str, when: str) -> None:
    """And nothing of it reaches NCCL: what amem holds is paused and resumed as ever, contents and all."""
    load = loads(nccl, binding)
    body = f"""
    {load if when == "before" else ""}
    amem.enable()
    device = Device(Driver(os.path.join(sim, "libcuda.so.1")), 0)
    real = Nccl(os.path.join(sim, "libnccl.so.2"))
    communicator = Communicator.connect(real, real.unique_id(), 0, 1)
    used = device.used_bytes()
    {load if when == "after" else ""}
    print(*roads(nccl, caller))
    caller.linked_suspend()
    print(text(_library.loaded().amem_last_error))
    print(text(caller.linked_error), text(caller.linked_error), sep="; ")
    nccl.ncclCommResume(None)
    print(text(nccl.ncclGetLastError, None))
    assert amem.pause().changed and device.used_bytes() == 0
    amem.resume()
    assert device.used_bytes() == used
    real.library.ncclStandinVerify.argtypes = [ctypes.c_void_p] * 2
    assert real.library.ncclStandinVerify(communicator.handle, device.stream) == 0
    device.synchronize()
    communicator.destroy()
    """
    paths = {"LD_LIBRARY_PATH": f"{SIM}:{nccl}"}
    answers, last, errors, resume = script(tmp_path, ROADS + textwrap.dedent(body), **paths)
    assert answers == "[5] 0"  # ncclInvalidUsage, and no call came
    assert last.startswith("amem refused ncclCommSuspend") and 'call amem.pause("nccl")' in last.lower()
    assert errors == f"{last}; NCCL's own"
    assert resume.startswith("amem refused ncclCommResume") and 'call amem.resume("nccl")' in resume.lower()


@pytest.mark.parametrize("body", ["", "amem.enable()"], ids=["not enabled", "NCCL not used"])
def test_suspension_is_nccls_own_where_amem_has_no_memory(tmp_path: Path, nccl: Path, body: str) -> None:
    lines = script(tmp_path, f"{ROADS}\n{body}\n{loads(nccl, 'now')}print(*roads(nccl, caller))")
    assert lines == ["[0] 505"]


def test_two_copies_of_nccl_keep_their_own_functions(tmp_path: Path, nccl: Path) -> None:
    copy = shared(tmp_path / "copy", "libnccl.so.8", NCCL.replace("came += 1", "came += 7"), "-ldl")
    body = f"""
    amem.enable()
    libraries = [ctypes.CDLL({str(nccl / "libnccl.so.9")!r}), ctypes.CDLL({str(copy)!r})]
    for library in libraries:
        library.ncclCommSuspend(None, 1)
    print([ctypes.c_int.in_dll(library, "came").value for library in libraries])
    """
    assert script(tmp_path, body) == ["[1, 7]"]


def test_suspension_is_told_once_in_the_log(tmp_path: Path, nccl: Path) -> None:
    body = f"""
    amem.enable()
    device = Device(Driver(os.path.join(sim, "libcuda.so.1")), 0)
    real = Nccl(os.path.join(sim, "libnccl.so.2"))
    communicator = Communicator.connect(real, real.unique_id(), 0, 1)
    {loads(nccl, "now")}
    for _ in range(20):
        nccl.ncclCommSuspend(None, 1)
    communicator.destroy()
    """
    program = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        ["python3", "-c", program], env=environment(tmp_path), capture_output=True, text=True, timeout=30, check=True
    )
    (line,) = [line for line in done.stderr.splitlines() if "ncclCommSuspend" in line]
    assert "error" in line


# ---- registration ----

# As a network plug-in is linked with libibverbs, and with GDRCopy.
PLUGIN = """
#include <stddef.h>
#include <stdint.h>
void *ibv_reg_mr(void *, void *, size_t, int), *ibv_reg_mr_iova2(void *, void *, size_t, uint64_t, unsigned);
void *ibv_reg_dmabuf_mr(void *, uint64_t, size_t, uint64_t, int, int);
int ibv_dereg_mr(void *);
typedef struct { unsigned long h; } handle;
int gdr_pin_buffer(void *, unsigned long, size_t, uint64_t, uint32_t, handle *);
int gdr_pin_buffer_v2(void *, unsigned long, size_t, uint32_t, handle *);
int gdr_unpin_buffer(void *, handle);
static void *mr;
static handle pinned;
int reg_mr(void *at, size_t size) { return (mr = ibv_reg_mr(0, at, size, 0)) != 0; }
int reg_mr_iova2(void *at, size_t size) { return (mr = ibv_reg_mr_iova2(0, at, size, 0, 0)) != 0; }
int reg_dmabuf_mr(void *at, size_t size) { return (mr = ibv_reg_dmabuf_mr(0, 0, size, (uintptr_t)at, 0, 0)) != 0; }
int pin_buffer(void *at, size_t size) { return !gdr_pin_buffer(0, (uintptr_t)at, size, 3, 4, &pinned); }
int pin_buffer_v2(void *at, size_t size) { return !gdr_pin_buffer_v2(0, (uintptr_t)at, size, 5, &pinned); }
int end(void) { return mr ? ibv_dereg_mr(mr) : gdr_unpin_buffer(0, pinned); }
"""
# Arguments that come through changed are an error.
GDRCOPY = """
#include <stddef.h>
#include <stdint.h>
typedef struct { unsigned long h; } handle;
int gdr_pin_buffer(void *g, unsigned long at, size_t size, uint64_t token, uint32_t space, handle *h) {
    return h->h = 77, token != 3 || space != 4;
}
int gdr_pin_buffer_v2(void *g, unsigned long at, size_t size, uint32_t flags, handle *h) {
    return h->h = 78, flags != 5;
}
int gdr_unpin_buffer(void *g, handle h) { return h.h != 77 && h.h != 78; }
"""
# Regions of the program's own.
REGION = """
class Functions(ctypes.Structure):
    _fields_ = [("allocate", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)),
                ("deallocate", ctypes.c_void_p)]
device = Device(Driver(os.path.join(sim, "libcuda.so.1")), 0)
cuda, library, functions = ctypes.CDLL("libcuda.so.1"), _library.load(), Functions()
library.amem_region.argtypes = None
MIB = 1 << 20
def region(tag):
    assert library.amem_region(tag, 1, ctypes.byref(functions)) == 0
    return functions.allocate(40 * MIB, 0, None)
"""
FUNCTIONS = ["reg_mr", "reg_mr_iova2", "reg_dmabuf_mr", "pin_buffer", "pin_buffer_v2"]

needs_verbs = pytest.mark.skipif(
    not (SIM / "libibverbs.so.1").exists(), reason=f"no libibverbs.so.1 in {SIM}: run make"
)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    gdrcopy = shared(folder, "libgdrapi.so.2", GDRCOPY)
    shared(folder, "libnccl-net.so", PLUGIN, str(SIM / "libibverbs.so.1"), str(gdrcopy), f"-Wl,-rpath,{SIM}:{folder}")
    return folder


@needs_verbs
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_plug_in_registers_stays_until_that_ends(tmp_path: Path, plugin: Path, function: str, when: str) -> None:
    load = f"plugin = ctypes.CDLL({str(plugin / 'libnccl-net.so')!r})\n    "
    body = f"""
    {load if when == "before" else ""}
    registered, other = region(b"registered"), region(b"other")
    {load if when == "after" else ""}
    assert plugin.{function}(ctypes.c_void_p(registered), ctypes.c_size_t(40 * MIB)) == 1
    byte, at = ctypes.c_ubyte(7), ctypes.c_uint64(registered + 20 * MIB)
    assert cuda.cuMemcpyHtoD_v2(at, ctypes.byref(byte), ctypes.c_size_t(1)) == 0
    assert library.amem_pause(None) == 0
    byte = ctypes.c_ubyte()
    assert cuda.cuMemcpyDtoH_v2(ctypes.byref(byte), at, ctypes.c_size_t(1)) == 0
    print(byte.value, device.used_bytes() >= 40 * MIB, device.used_bytes() < 80 * MIB)
    resident = {{r["tag"]: sum(r["resident"].values()) for r in amem.stats()["regions"]}}
    print(resident["registered"] >= 40 * MIB, resident["other"])
    assert library.amem_resume(None) == 0
    assert plugin.end() == 0
    assert library.amem_pause(None) == 0
    print(device.used_bytes())
    assert plugin.{function}(ctypes.c_void_p(id(plugin)), ctypes.c_size_t(8)) == 1  # the host's is nobody's business
    assert plugin.end() == 0
    """
    lines = script(tmp_path, REGION + textwrap.dedent(body))
    assert lines == ["7 True True", "True 0", "0"], "it stays while it is registered, and no longer"


@needs_verbs
def test_what_a_library_registers_that_looks_the_function_up(tmp_path: Path) -> None:
    body = """
    registered = region(b"registered")
    verbs = ctypes.CDLL(os.path.join(sim, "libibverbs.so.1"))
    verbs.ibv_reg_mr.restype = ctypes.c_void_p
    assert verbs.ibv_reg_mr(None, ctypes.c_void_p(registered), ctypes.c_size_t(40 * MIB), 0)
    assert library.amem_pause(None) == 0
    print(device.used_bytes() >= 40 * MIB, verbs.ibv_standin_registered())
    """
    assert script(tmp_path, REGION + textwrap.dedent(body)) == ["True 1"]


# rdma-core's ibv_reg_mr calls its own ibv_reg_mr_iova2, and where the library is bound lazily, as in some wheels, that
# call is looked up too. Both answer the same registration.
NESTED = """
#include <stddef.h>
#include <stdint.h>
static int mr;
void *ibv_reg_mr_iova2(void *pd, void *at, size_t size, uint64_t iova, unsigned access) { return &mr; }
void *ibv_reg_mr(void *pd, void *at, size_t size, int access) { return ibv_reg_mr_iova2(pd, at, size, 0, access); }
int ibv_dereg_mr(void *m) { return m != &mr; }
"""


@pytest.mark.parametrize("binding", ["now", "lazy"])
def test_a_registration_that_is_made_of_another_ends_with_it(tmp_path: Path, binding: str) -> None:
    verbs = shared(tmp_path / "verbs", "libibverbs.so.1", NESTED, f"-Wl,-z,{binding}")
    body = f"""
    registered = region(b"registered")
    assert ctypes.CDLL(None).dlopen({str(verbs)!r}.encode(), os.RTLD_LAZY)  # CDLL of the path binds at once
    verbs = ctypes.CDLL({str(verbs)!r})
    verbs.ibv_reg_mr.restype = ctypes.c_void_p
    mr = verbs.ibv_reg_mr(None, ctypes.c_void_p(registered), ctypes.c_size_t(40 * MIB), 0)
    assert library.amem_pause(None) == 0
    print(device.used_bytes() >= 40 * MIB)
    assert library.amem_resume(None) == 0
    assert verbs.ibv_dereg_mr(ctypes.c_void_p(mr)) == 0
    assert library.amem_pause(None) == 0
    print(device.used_bytes())
    """
    assert script(tmp_path, REGION + textwrap.dedent(body)) == ["True", "0"]


# NCCL opens its plug-in itself, which brings the NIC's library with it, and looks the plug-in up.
OPENS = """
#define _GNU_SOURCE
#include <dlfcn.h>
void *open_plugin(const char *path) {
    void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return plugin ? dlsym(plugin, "reg_mr") : 0;
}
"""


@needs_verbs
def test_a_plug_in_that_nccl_opens(tmp_path: Path, plugin: Path) -> None:
    opens = shared(tmp_path / "opens", "libnccl.so.9", OPENS, "-ldl")
    body = f"""
    amem.enable()
    nccl = ctypes.CDLL({str(opens)!r})
    registered = region(b"registered")
    nccl.open_plugin.restype = ctypes.c_void_p
    reg_mr = nccl.open_plugin({str(plugin / "libnccl-net.so")!r}.encode())
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(reg_mr)(registered, 40 * MIB) == 1
    assert library.amem_pause(None) == 0
    print(device.used_bytes() >= 40 * MIB)
    """
    assert script(tmp_path, REGION + textwrap.dedent(body)) == ["True"]


# ---- the dynamic linker's lock ----

# A library's constructor runs under the dynamic linker's lock, and comes to the hook, while another thread
# has seen the libnccl that was loaded with it, and hooks that.
LOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static volatile int constructing;
static void come(void) {
#ifdef ENABLE
    int (*enable)(void);
    *(void **)&enable = dlsym(RTLD_DEFAULT, "amem_enable");
    if (enable()) exit(1);
#else
    dlopen("libm.so.6", RTLD_LAZY);
#endif
}
void in_constructor(void) { constructing = 1, usleep(300000), come(); }
static void *other(void *arg) {
    while (!constructing) usleep(1000);
    come();
    return arg;
}
int main(int argc, char **argv) {
    pthread_t thread;
    alarm(20);
    pthread_create(&thread, NULL, other, NULL);
    if (!dlopen(argv[argc - 1], RTLD_NOW)) return puts(dlerror());
    pthread_join(thread, NULL);
    puts("right");
}
"""


@pytest.mark.parametrize("flags", [(), ("-DENABLE",)], ids=["dlopen", "enable"])
def test_a_constructor_that_comes_to_the_hook(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = tmp_path / "program"
    (tmp_path / "program.c").write_text(LOCK)
    run(["gcc", "-rdynamic", "-pthread", *flags, f"{program}.c", "-o", str(program), "-ldl"], os.environ)
    slow = shared(
        tmp_path,
        "libslow.so",
        "void in_constructor(void); __attribute__((constructor)) static void slow(void) { in_constructor(); }",
        "-Wl,--no-as-needed",
        str(SIM / "libnccl.so.2"),
    )
    enable = {"AMEM_ENABLE": "off"} if flags else {}
    env = environment(tmp_path, LD_PRELOAD=str(LIB / "libamem_hook.so"), **enable)
    assert run([str(program), str(slow)], env) == "right\n"


# Libraries that another thread takes away while the hook looks through all that are loaded: the heavy one, which
# comes before them, makes the look long. The hook does not see who calls dlopen and dlclose here.
UNLOAD = """
#include <dlfcn.h>
#include <pthread.h>
static volatile int over;
static pthread_t thread;
static char **paths;
static void *unload(void *arg) {
    void *libraries[20];
    long times = 0;
    for (; !over; times++) {
        for (int i = 0; i < 20; i++) libraries[i] = dlopen(paths[i], RTLD_NOW);
        for (int i = 0; i < 20; i++) dlclose(libraries[i]);
    }
    return (void *)times;
}
void begin_unloading(char **list) { paths = list, pthread_create(&thread, 0, unload, 0); }
long end_unloading(void) {
    void *times;
    over = 1, pthread_join(thread, &times);
    return (long)times;
}
"""
LOOK = """
#include <dlfcn.h>
#include <stdio.h>
void begin_unloading(char **list);
long end_unloading(void);
int main(int argc, char **argv) {
    if (!dlopen(argv[1], RTLD_NOW)) return puts(dlerror());
    begin_unloading(argv + 2);
    for (int i = 22; i < argc; i++)
        if (!dlopen(argv[i], RTLD_NOW)) return puts(dlerror());
    dlsym(RTLD_DEFAULT, "puts");
    puts(end_unloading() ? "right" : "nothing was unloaded");
}
"""


def test_libraries_that_are_unloaded_meanwhile(tmp_path: Path) -> None:
    program = tmp_path / "program"
    (tmp_path / "program.c").write_text(LOOK)
    unload = shared(tmp_path, "libunload.so", UNLOAD)
    run(["gcc", f"{program}.c", str(unload), f"-Wl,-rpath,{tmp_path}", "-o", str(program), "-ldl"], os.environ)
    table = 'void f(void) {{}} asm(".data\\n.balign 8\\n.rept {}\\n.quad f\\n.endr\\n.text");'
    libraries = [shared(tmp_path, "libheavy.so", table.format(500_000))]
    libraries += [shared(tmp_path, f"libgone{i}.so", table.format(8)) for i in range(20)]
    libraries += [shared(tmp_path, f"libgdrapi.so.{i}", GDRCOPY) for i in range(4)]
    env = environment(tmp_path, LD_PRELOAD=str(LIB / "libamem_hook.so"))
    for _ in range(5):
        assert run([str(program), *map(str, libraries)], env) == "right\n"
