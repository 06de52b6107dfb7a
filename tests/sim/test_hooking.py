"""The ways in which NCCL, amem and programs come together in a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness import LIB, ROOT, SIM, environment, kinds, needs_libraries, python, ranks, right, run

pytestmark = needs_libraries

SMALL = {"NCCL_STANDIN_CHANNELS": "1", "NCCL_STANDIN_BUFFSIZE": "65536"}

needs_dynamic = pytest.mark.skipif(
    not (SIM / "dynamic" / "libnccl.so.2").exists(), reason=f"no dynamic/libnccl.so.2 in {SIM}: run make"
)

PRELUDE = """
import ctypes, os, re, sys
import amem
from amem._cuda import Device, Driver
from amem._nccl import Communicator, Nccl
sim = os.environ["AMEM_SIM_LIBRARY_DIR"]

def device():
    return Device(Driver(os.path.join(sim, "libcuda.so.1")), 0)

def mapped(name):
    return name in open("/proc/self/maps").read()

def check(device, *libraries):
    communicators = [Communicator.connect(nccl, nccl.unique_id(), 0, 1) for nccl in libraries]
    used = device.used_bytes()
    assert used > 0
    assert amem.pause().changed
    assert device.used_bytes() == 0, device.used_bytes()
    amem.resume()
    assert device.used_bytes() == used
    for nccl, communicator in zip(libraries, communicators):
        nccl.library.ncclStandinVerify.argtypes = [ctypes.c_void_p] * 2
        assert nccl.library.ncclStandinVerify(communicator.handle, device.stream) == 0
    device.synchronize()
    for communicator in communicators:
        communicator.destroy()
    assert device.used_bytes() == 0
    print("right")
"""


def script(sim_dir: Path, body: str, **changes: str) -> list[str]:
    return python(PRELUDE + textwrap.dedent(body), environment(sim_dir, **changes)).splitlines()


# ---- the order of loading and enabling ----


@pytest.mark.parametrize("enable", ["before", "after"])
def test_ranks_enabled_before_and_after_nccl_is_loaded(enable: str) -> None:
    with ranks(2, SMALL) as group:
        group.init(ncomm=1, enable=enable)
        kinds(group)
        group.all("pause")
        assert group.all("meminfo") == [0, 0]
        group.all("resume")
        right(group)


def test_enabled_by_the_environment() -> None:
    """As the wheel's .pth file does it, in each Python process of the job."""
    with ranks(2, {**SMALL, "AMEM_ENABLE": "1"}) as group:
        group.all("eval", expression="__import__('amem._autoenable') and None")
        assert group.all("state") == ["WAITING", "WAITING"]
        group.init(ncomm=1, enable="never")
        right(group)
        group.all("pause")
        assert group.all("meminfo") == [0, 0]
        group.all("resume")
        right(group)


@pytest.mark.parametrize("preload", [False, True], ids=["enable", "preload"])
def test_the_core_is_not_loaded_until_nccl_asks_for_the_driver(tmp_path: Path, preload: bool) -> None:
    body = """
    loaded = [mapped("libamem_nccl.so")]
    amem.enable()
    loaded.append(mapped("libamem_nccl.so"))
    d = device()
    nccl = Nccl(os.path.join(sim, "libnccl.so.2"))
    nccl.version()
    loaded.append(mapped("libamem_nccl.so"))
    nccl.unique_id()
    loaded.append(mapped("libamem_nccl.so"))
    print(loaded, len(os.listdir("/proc/self/task")) > 1)
    check(d, nccl)
    """
    changes = {"LD_PRELOAD": str(LIB / "libamem_hook.so")} if preload else {}
    assert script(tmp_path, body, **changes) == ["[False, False, False, True] True", "right"]


def test_importing_and_enabling_start_no_thread_and_hook_nothing_else(tmp_path: Path) -> None:
    body = """
    amem.enable()
    print(len(os.listdir("/proc/self/task")), mapped("libcuda"), mapped("libnccl"))
    """
    assert script(tmp_path, body) == ["1 False False"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ["RTLD_NOW", "RTLD_LAZY"])
def test_nccl_loaded_now_or_lazily(tmp_path: Path, mode: str, when: str) -> None:
    """ctypes itself always adds RTLD_NOW, so dlopen is called."""
    body = f"""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    d = device()
    if {when == "before"}:
        amem.enable()
    assert dlopen(os.path.join(sim, "libnccl.so.2").encode(), os.{mode})
    if {when == "after"}:
        amem.enable()
    check(d, Nccl(os.path.join(sim, "libnccl.so.2")))
    """
    assert script(tmp_path, body) == ["right"]


def test_nccl_loaded_as_a_dependency(tmp_path: Path) -> None:
    """As torch's libraries load it: the loader, not a call of dlopen by its name."""
    (tmp_path / "user.c").write_text("int ncclGetVersion(int *);\nint user(int *v) { return ncclGetVersion(v); }\n")
    user = tmp_path / "libuser.so"
    build = ["gcc", "-shared", "-fPIC", "-o", user, tmp_path / "user.c", SIM / "libnccl.so.2"]
    run([str(word) for word in build], os.environ)
    body = f"""
    amem.enable()
    d = device()
    ctypes.CDLL({str(user)!r})
    check(d, Nccl("libnccl.so.2"))
    """
    assert script(tmp_path, body) == ["right"]


def test_two_copies_of_nccl(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(SIM / "libnccl.so.2", copy / "libnccl.so.2.28.9")
    body = f"""
    amem.enable()
    d = device()
    check(d, Nccl(os.path.join(sim, "libnccl.so.2")), Nccl({str(copy / "libnccl.so.2.28.9")!r}))
    """
    assert script(tmp_path, body) == ["right"]


def test_nccl_of_another_name(tmp_path: Path) -> None:
    """Some programs carry NCCL under another name: AMEM_NCCL_LIBRARY tells it."""
    other = tmp_path / "libsome_collectives.so"
    shutil.copy(SIM / "libnccl.so.2", other)
    body = f"""
    amem.enable()
    check(device(), Nccl({str(other)!r}))
    """
    assert script(tmp_path, body, AMEM_NCCL_LIBRARY=str(other)) == ["right"]
    assert script(tmp_path, body, AMEM_NCCL_LIBRARY=other.name) == ["right"]


# ---- the CUDA runtime as a library of its own ----


@needs_dynamic
@pytest.mark.parametrize("way", ["versioned", "unversioned"])
@pytest.mark.parametrize("enable", ["before", "after"])
def test_a_dynamic_runtime(enable: str, way: str) -> None:
    # The simulated libraries are found by their names, as real ones are: simulate=False takes no folder.
    env = {**SMALL, "NCCL_STANDIN_ENTRY_POINT": way, "LD_LIBRARY_PATH": f"{SIM / 'dynamic'}:{SIM}"}
    with ranks(2, env) as group:
        per_rank = [{"device": 0}, {"device": 1}]
        group.all("init", per_rank=per_rank, simulate=False, enable=enable, nccl="libnccl.so.2")
        group.comm_init()
        assert group.all("eval", expression="'/dynamic/libnccl.so.2' in open('/proc/self/maps').read()") == [True] * 2
        kinds(group)
        group.all("pause")
        assert group.all("meminfo") == [0, 0]
        group.all("resume")
        right(group)


# ---- programs in C ----

PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "nccl_standin.h"

#define NEED(what) do { if (!(what)) { fprintf(stderr, "failed: %s\n", #what); exit(1); } } while (0)

enum { N = 20000 };
static int data[N];

#ifdef BY_DLOPEN
static void *library;
#define NCCL(name) ((__typeof__(&name))dlsym(library, #name))
#else
#define NCCL(name) name
#endif

static CUresult (*memory_info)(size_t *, size_t *);
static CUresult (*set_context)(CUcontext);
static CUcontext contexts[2];
static ncclComm_t comms[2];

static size_t used(int device) {
    size_t available, total;
    NEED(set_context(contexts[device]) == 0 && memory_info(&available, &total) == 0);
    return total - available;
}

#define DRIVER(name) (*(void **)&name = dlsym(driver, #name))

int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    NEED(driver);
    CUresult (*cuInit)(unsigned), (*cuDevicePrimaryCtxRetain)(CUcontext *, CUdevice);
    CUresult (*cuMemAlloc_v2)(CUdeviceptr *, size_t), (*cuStreamCreate)(CUstream *, unsigned);
    CUresult (*cuMemcpyHtoD_v2)(CUdeviceptr, const void *, size_t), (*cuMemcpyDtoH_v2)(void *, CUdeviceptr, size_t);
    CUresult (*cuStreamSynchronize)(CUstream);
    DRIVER(cuInit), DRIVER(cuDevicePrimaryCtxRetain), DRIVER(cuMemAlloc_v2), DRIVER(cuStreamCreate);
    DRIVER(cuMemcpyHtoD_v2), DRIVER(cuMemcpyDtoH_v2), DRIVER(cuStreamSynchronize);
    *(void **)&memory_info = dlsym(driver, "cuMemGetInfo_v2");
    *(void **)&set_context = dlsym(driver, "cuCtxSetCurrent");
    NEED(cuInit(0) == 0);
    CUdeviceptr buffers[2];
    CUstream streams[2];
    for (int d = 0; d < 2; d++) {
        NEED(cuDevicePrimaryCtxRetain(&contexts[d], d) == 0 && set_context(contexts[d]) == 0);
        NEED(cuMemAlloc_v2(&buffers[d], sizeof data) == 0 && cuStreamCreate(&streams[d], 1) == 0);
    }
    size_t before = used(0);
#ifdef BY_DLOPEN
    library = dlopen("libnccl.so.2", RTLD_LAZY);
    NEED(library);
#endif
    int (*ncclPause)(void *), (*ncclResume)(void *);
    *(void **)&ncclPause = dlsym(RTLD_DEFAULT, "ncclPause");
    *(void **)&ncclResume = dlsym(RTLD_DEFAULT, "ncclResume");
    NEED(ncclPause && ncclResume);
    /* What a program sees in the next object of its scope is not the hook's business. */
    NEED(dlsym(RTLD_NEXT, "main") == NULL);
    NEED(dlsym(RTLD_NEXT, "strtol") == (void *)strtol);
    NEED(NCCL(ncclCommInitAll)(comms, 2, NULL) == ncclSuccess);
    for (int round = 1; round <= 5; round++) {
        for (int d = 0; d < 2; d++) {
            for (int i = 0; i < N; i++) data[i] = i * round + d;
            NEED(set_context(contexts[d]) == 0 && cuMemcpyHtoD_v2(buffers[d], data, sizeof data) == 0);
        }
        NEED(NCCL(ncclGroupStart)() == ncclSuccess);
        for (int d = 0; d < 2; d++) {
            void *at = (void *)(uintptr_t)buffers[d];
            NEED(NCCL(ncclAllReduce)(at, at, N, ncclInt32, ncclSum, comms[d], streams[d]) == ncclSuccess);
        }
        NEED(NCCL(ncclGroupEnd)() == ncclSuccess);
        for (int d = 0; d < 2; d++) {
            NEED(set_context(contexts[d]) == 0 && cuStreamSynchronize(streams[d]) == 0);
            NEED(cuMemcpyDtoH_v2(data, buffers[d], sizeof data) == 0);
            for (int i = 0; i < N; i++) NEED(data[i] == 2 * i * round + 1);
        }
        size_t active = used(0);
        NEED(active > before);
        NEED(ncclPause(NULL) == 0);
        NEED(used(0) == before && used(1) == before);
        NEED(ncclResume(NULL) == 0);
        NEED(used(0) == active);
    }
    for (int d = 0; d < 2; d++) NEED(NCCL(ncclCommDestroy)(comms[d]) == ncclSuccess);
    NEED(used(0) == before);
    puts("right");
    return 0;
}
"""


def program(folder: Path, *flags: str) -> str:
    source, output = folder / "program.c", folder / "program"
    source.write_text(PROGRAM)
    include = f"-I{ROOT / 'tests' / 'nccl'}"
    libraries = [] if "-DBY_DLOPEN" in flags else [str(SIM / "libnccl.so.2")]
    run(["gcc", "-std=gnu11", "-O1", include, *flags, str(source), "-o", str(output), *libraries, "-ldl"], os.environ)
    return str(output)


@pytest.mark.parametrize(
    "flags",
    [("-Wl,-z,lazy",), ("-Wl,-z,now",), ("-DBY_DLOPEN",), ("-DBY_DLOPEN", "-Wl,-z,now"), ("-DBY_DLOPEN", "-no-pie")],
    ids=["linked lazily", "linked now", "dlopen", "dlopen now", "dlopen no-pie"],
)
def test_a_program_in_c(tmp_path: Path, flags: tuple[str, ...]) -> None:
    env = environment(tmp_path, LD_PRELOAD=str(LIB / "libamem_hook.so"))
    assert run([program(tmp_path, *flags)], env) == "right\n"


def test_a_program_in_c_with_all_symbols_bound_at_the_start(tmp_path: Path) -> None:
    env = environment(tmp_path, LD_PRELOAD=str(LIB / "libamem_hook.so"), LD_BIND_NOW="1")
    assert run([program(tmp_path, "-Wl,-z,lazy")], env) == "right\n"


def test_a_program_in_c_that_links_amem(tmp_path: Path) -> None:
    """Linked and not preloaded: AMEM_ENABLE or a call of amem_enable turns it on."""
    output = program(tmp_path, "-Wl,--no-as-needed", str(LIB / "libamem_hook.so"), f"-Wl,-rpath,{LIB}")
    env = environment(tmp_path)
    done = subprocess.run([output], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "amem_enable" in done.stderr or "amem.enable()" in done.stderr
    assert "ncclPause(NULL) == 0" in done.stderr


def test_preloaded_and_switched_off(tmp_path: Path) -> None:
    env = environment(tmp_path, LD_PRELOAD=str(LIB / "libamem_hook.so"), AMEM_ENABLE="0")
    done = subprocess.run([program(tmp_path)], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "not enabled" in done.stderr


def test_a_program_without_nccl_is_left_alone_by_the_preload(tmp_path: Path) -> None:
    env = environment(tmp_path, LD_PRELOAD=str(LIB / "libamem_hook.so"))
    done = subprocess.run(["/bin/sh", "-c", "echo $((6 * 7))"], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


# ---- dlopen and dlsym of the objects that are watched ----


def shared(folder: Path, name: str, source: str, *flags: str) -> Path:
    folder.mkdir(exist_ok=True)
    code, output = folder / f"{name}.c", folder / f"lib{name}.so"
    code.write_text(source)
    run(["gcc", "-shared", "-fPIC", "-o", str(output), str(code), *flags], os.environ)
    return output


def test_a_library_still_finds_its_sibling_by_its_own_runpath(tmp_path: Path) -> None:
    """dlopen looks for RUNPATH in the library that calls it, which the hook must not stand in for."""
    folder = tmp_path / "pair"
    shared(folder, "sibling", "int sibling(void) { return 41; }")
    opener = shared(
        folder,
        "opener",
        """
        #include <dlfcn.h>
        int opener(void) {
            void *library = dlopen("libsibling.so", RTLD_NOW);
            int (*sibling)(void) = library ? dlsym(library, "sibling") : 0;
            return sibling ? sibling() + 1 : -1;
        }
        """,
        "-Wl,-rpath,$ORIGIN",
        "-Wl,--enable-new-dtags",
    )
    body = f"""
    amem.enable()
    print(ctypes.CDLL({str(opener)!r}).opener())
    try:
        ctypes.CDLL("libsibling-that-is-nowhere.so")
    except OSError as error:
        print("nowhere" in str(error))
    """
    assert script(tmp_path, body) == ["42", "True"]


def test_a_program_still_finds_its_libraries_by_its_own_runpath(tmp_path: Path) -> None:
    """The program's own slot of dlopen is replaced, so the call must still come from the program."""
    folder = tmp_path / "lib"
    shared(folder, "plugin", "int plugin(void) { return 42; }")
    source = tmp_path / "main.c"
    source.write_text(r"""
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdio.h>
    long strtol(const char *s, char **e, int b) { (void)s, (void)e, (void)b; return -7; }
    int main(void) {
        void *library = dlopen("libplugin.so", RTLD_NOW);
        if (!library) { puts(dlerror()); return 1; }
        int (*plugin)(void) = dlsym(library, "plugin");
        long (*next)(const char *, char **, int) = dlsym(RTLD_NEXT, "strtol");
        long (*own)(const char *, char **, int) = dlsym(RTLD_DEFAULT, "strtol");
        printf("%d %ld %ld %d ", plugin(), next("5", NULL, 10), own("5", NULL, 10),
               dlopen("libplugin.so", RTLD_NOW | RTLD_NOLOAD) == library);
        puts(dlsym(library, "nothing") ? "?" : dlerror());
        return 0;
    }
    """)
    output = str(tmp_path / "main")
    flags = ["-O1", "-fno-builtin", "-rdynamic", f"-Wl,-rpath,{folder}", "-Wl,--enable-new-dtags"]
    run(["gcc", *flags, str(source), "-o", output, "-ldl"], os.environ)
    plain = run([output], environment(tmp_path))
    assert plain.startswith("42 5 -7 1 ")
    assert run([output], environment(tmp_path, LD_PRELOAD=str(LIB / "libamem_hook.so"))) == plain


def test_python_extensions_import_as_before(tmp_path: Path) -> None:
    body = """
    amem.enable()
    import _ssl, _sqlite3, array, zlib
    import json
    print(zlib.crc32(b"amem") == __import__("binascii").crc32(b"amem"))
    check(device(), Nccl(os.path.join(sim, "libnccl.so.2")))
    """
    assert script(tmp_path, body) == ["True", "right"]


def test_many_libraries_loaded_while_nccl_comes(tmp_path: Path) -> None:
    """Threads that load libraries at the same time as the one that loads NCCL."""
    for number in range(12):
        shared(tmp_path / "many", f"many{number}", f"int many{number}(void) {{ return {number}; }}")
    body = f"""
    import threading
    amem.enable()
    d = device()
    libraries = {[str(tmp_path / "many" / f"libmany{n}.so") for n in range(12)]!r}
    found = []
    def load(number):
        found.append(getattr(ctypes.CDLL(libraries[number]), f"many{{number}}")() == number)
    threads = [threading.Thread(target=load, args=(n,)) for n in range(12)]
    for thread in threads: thread.start()
    nccl = Nccl(os.path.join(sim, "libnccl.so.2"))
    for thread in threads: thread.join()
    assert found == [True] * 12
    check(d, nccl)
    """
    assert script(tmp_path, body) == ["right"]


def test_the_hook_stays_when_it_is_closed(tmp_path: Path) -> None:
    """NCCL keeps pointers into it."""
    body = f"""
    path = {str(LIB / "libamem_hook.so")!r}
    library = ctypes.CDLL(path)
    assert library.amem_enable() == 0
    d = device()
    nccl = Nccl(os.path.join(sim, "libnccl.so.2"))
    dlclose = ctypes.CDLL(None).dlclose
    dlclose.argtypes = [ctypes.c_void_p]
    for _ in range(3):
        dlclose(library._handle)
    assert mapped("libamem_hook.so")
    check(d, nccl)
    sys.stdout.flush()
    os._exit(0)
    """
    assert script(tmp_path, body) == ["right"]


def test_the_python_that_runs_the_tests_has_no_amem_library() -> None:
    assert "libamem" not in Path("/proc/self/maps").read_text(), sys.executable
