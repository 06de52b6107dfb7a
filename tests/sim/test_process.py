"""amem beside everything else that a process does: fork, signals, crashes, exits."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import environment, needs_libraries, run

pytestmark = needs_libraries

TIMEOUT_S = 3.0
# Where no deadline is to pass: longer than the tests themselves wait.
PATIENT = "30"

# What a script has at hand: one rank, and lines to and from the test.
PRELUDE = """
import ctypes, faulthandler, multiprocessing, os, signal, subprocess, sys, threading, time
import amem
from amem import _library
from amem._cuda import Device, Driver
from amem._nccl import Communicator, Nccl
from amem._pattern import ITEM, mismatches, pattern

FOLDER = os.environ["AMEM_SIM_LIBRARY_DIR"]

def say(text=""):
    os.write(1, f"{text}\\n".encode())

def hear():
    line = b""
    while not line.endswith(b"\\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(99)
        line += byte
    return line.decode().strip()

class One:
    def __init__(self, rank=0, size=1, device=None):
        amem.enable()
        self.rank, self.size = rank, size
        self.device = Device(Driver(os.path.join(FOLDER, "libcuda.so.1")), rank if device is None else device)
        self.nccl = Nccl(os.path.join(FOLDER, "libnccl.so.2"))
        self.seed = 0

    def connect(self):
        if self.rank == 0:
            identity = self.nccl.unique_id()
            if self.size > 1:
                say(identity)
        else:
            identity = hear()
        self.comm = Communicator.connect(self.nccl, identity, self.rank, self.size)
        return self

    def right(self, count=5000):
        self.seed += 1
        send, want = pattern(count, self.seed, [self.rank]), pattern(count, self.seed, range(self.size))
        source, target = self.device.alloc(len(send)), self.device.alloc(len(want))
        self.device.write(source, send)
        self.comm.all_reduce(source, target, count, self.device.stream)
        self.device.synchronize()
        assert mismatches(self.device.read(target, len(want)), want) == 0
        self.device.free(source)
        self.device.free(target)

    def empty(self):
        '''Memory goes back when the last peer has let go of it.'''
        deadline = time.monotonic() + 5
        while used := self.device.used_bytes():
            assert time.monotonic() < deadline, f"{used} bytes are not given back"
            time.sleep(0.002)

    def cycle(self):
        assert amem.pause().changed
        self.empty()
        assert amem.resume().changed
        self.right()

def refused():
    '''In a child of fork(): each call ends, and says why it fails.'''
    assert amem.state() is amem.State.OFF
    assert amem.stats()["state"] == "off"
    for call in (amem.pause, amem.resume, lambda: amem.set_group_id(3)):
        try:
            call()
        except amem.ForkedError as error:
            assert "spawn" in str(error)
        else:
            raise AssertionError(call)

def well(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def threads(count, work):
    '''Runs work in threads until it is called; it waits for them.'''
    done = threading.Event()
    def loop():
        while not done.is_set():
            work()
    started = [threading.Thread(target=loop) for _ in range(count)]
    for thread in started:
        thread.start()
    def end():
        done.set()
        for thread in started:
            thread.join()
    return end
"""


class Script:
    """A Python program in a process group of its own."""

    def __init__(self, text: str, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + text],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self.process.pid

    def hear(self, timeout: float = 15) -> str:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self.process.stdout], [], [], left)[0], "nothing was said in time"
            byte = os.read(self.process.stdout.fileno(), 1)
            assert byte, f"it has ended\n{self.end()[1]}"
            line += byte
        return line.decode().strip()

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())

    def end(self, timeout: float = 20) -> tuple[int, str]:
        """The exit status and what was written to stderr."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors.decode(errors="replace")

    def well(self) -> None:
        status, errors = self.end()
        assert status == 0, errors

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


class Scripts:
    def __init__(self, folder: Path) -> None:
        self.env = environment(folder / "devices", AMEM_TIMEOUT_S=str(TIMEOUT_S))
        self.started: list[Script] = []

    def start(self, text: str, **env: str) -> Script:
        self.started.append(Script(text, {**self.env, **env}))
        return self.started[-1]

    def run(self, text: str, **env: str) -> None:
        self.start(text, **env).well()

    def pair(self, first: str, second: str) -> tuple[Script, Script]:
        """Two scripts with a connected rank each, named one."""
        begin = "one = One(rank={}, size=2).connect(); one.right()\n"
        a, b = self.start(begin.format(0) + first), self.start(begin.format(1) + second)
        b.say(a.hear())
        return a, b


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    group = Scripts(tmp_path)
    before = left_behind()
    try:
        yield group
    finally:
        for script in group.started:
            script.kill()
    assert left_behind() <= before


def left_behind() -> set[str]:
    """Files of amem's in the folders for temporary ones, but those of tests that run beside this one."""
    names = {os.path.join(folder, name) for folder in ("/tmp", "/dev/shm") for name in os.listdir(folder)}
    return {name for name in names if re.search(r"amem(?!-[a-z]+-)", name)}


def compiled(folder: Path, text: str) -> str:
    """The path of the C library."""
    source, library = folder / "library.c", folder / "library.so"
    source.write_text(text)
    run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], dict(os.environ))
    return str(library)


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A C library with signal handlers such as others install."""
    return compiled(
        tmp_path_factory.mktemp("handlers"),
        r"""
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>
#include <sys/syscall.h>

static sigjmp_buf back;
static int status;
static void jump(int sig) { (void)sig; siglongjmp(back, 1); }
static void leave(int sig) { (void)sig; _exit(status); }

static void install(int sig, void (*handler)(int)) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    sigaction(sig, &action, 0);
}

void install_jump(void) { install(SIGSEGV, jump); }
void install_leave(int with) { status = with; install(SIGSEGV, leave); }

/* Whether the address can be read; needs install_jump. */
int readable(const volatile char *address) {
    if (sigsetjmp(back, 1)) return 0;
    (void)*address;
    return 1;
}

/* As much stack as a program's own threads have, and Go's small ones have not. */
static volatile int seen[64], count;
static void note(int sig) {
    volatile char room[128 << 10];
    for (unsigned i = 0; i < sizeof room; i += 512) room[i] = (char)sig;
    int tid = (int)syscall(SYS_gettid);
    __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 64; i++) {
        if (seen[i] == tid) return;
        int none = 0;
        if (__atomic_compare_exchange_n(&seen[i], &none, tid, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
    }
}
void install_note(int sig) { install(sig, note); }
int noted(void) { return count; }
int noted_on(int i) { return seen[i]; }
""",
    )


# ---- fork ----


def test_fork_before_nccl_is_used(scripts: Scripts) -> None:
    """The hook is loaded, the core is not: the child is as good as the parent."""
    scripts.run("""
amem.enable()
child = os.fork()
one = One(device=int(child == 0)).connect()
one.right()
one.cycle()
if child:
    well(child)
    one.cycle()
os._exit(0)
""")


def test_fork_while_another_thread_enables(scripts: Scripts, tmp_path: Path) -> None:
    """The thread is inside amem_enable, and stays there while the child enables amem and works."""
    library = compiled(
        tmp_path,
        r"""
#include <string.h>
#include <unistd.h>

extern char **environ;
static const char *held;
static int inside, go;

/* From now on, who asks for the variable says so to a pipe, and waits for the other. */
void hold(const char *name, int say, int hear) {
    held = name;
    inside = say;
    go = hear;
}

/* In place of libc's. */
char *getenv(const char *name) {
    char byte = 0;
    if (held && !strcmp(name, held) && (write(inside, &byte, 1) != 1 || read(go, &byte, 1) != 1)) _exit(98);
    size_t length = strlen(name);
    for (char **entry = environ; entry && *entry; entry++)
        if (!strncmp(*entry, name, length) && (*entry)[length] == '=') return *entry + length + 1;
    return 0;
}
""",
    )
    scripts.run(
        f"""
library = ctypes.CDLL("{library}")
inside, go = os.pipe(), os.pipe()
name = b"AMEM_GROUPID"
library.hold(name, inside[1], go[0])
thread = threading.Thread(target=amem.enable, daemon=True)
thread.start()
os.read(inside[0], 1)
child = os.fork()
if child == 0:
    signal.alarm(10)
    library.hold(None, -1, -1)
else:
    well(child)
    assert thread.is_alive()
    os.write(go[1], b"0")
    thread.join()
one = One(device=int(child == 0)).connect()
one.right()
one.cycle()
os._exit(0)
""",
        LD_PRELOAD=library,
    )


@pytest.mark.parametrize("state", ["active", "paused"])
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_fork_after(scripts: Scripts, state: str, end: str) -> None:
    scripts.run(f"""
one = One().connect()
one.right()
if {state == "paused"}:
    amem.pause()
for _ in range(3):
    child = os.fork()
    if child == 0:
        refused()
        refused()
        {end}
    well(child)
if {state == "paused"}:
    assert amem.resume().changed
one.right()
one.cycle()
""")


def test_fork_from_a_process_whose_threads_use_amem(scripts: Scripts) -> None:
    """Whatever a thread holds at the time of the fork, the child does not wait for it."""
    scripts.run("""
one = One().connect()
one.right()
def work():
    amem.pause()
    amem.stats()
    amem.resume()
end = threads(2, work)
for _ in range(40):
    child = os.fork()
    if child == 0:
        refused()
        os._exit(0)
    well(child)
end()
amem.resume()
one.right()
one.cycle()
""")


def test_fork_while_another_thread_loads_the_core(scripts: Scripts) -> None:
    """The child gets an answer, of one kind or the other."""
    scripts.run("""
one = One()
thread = threading.Thread(target=lambda: (one.device.make_current(), one.connect()))
thread.start()
while amem.state() is not amem.State.ACTIVE:
    child = os.fork()
    if child == 0:
        try:
            amem.pause()
        except amem.ForkedError:
            pass
        os._exit(0)
    well(child)
thread.join()
one.right()
one.cycle()
""")


def test_fork_of_a_peer_of_others(scripts: Scripts) -> None:
    """A child that lives on keeps no memory, neither the parent's nor the peer's, and its end is not the parent's."""
    a, b = scripts.pair(
        """
child = os.fork()
if child == 0:
    time.sleep(60)
say(child)
for turn in range(2):
    amem.pause()
    one.empty()
    amem.resume()
    one.right()
    say()
    hear()
os.waitpid(child, 0)
""",
        """
for turn in range(2):
    amem.pause()
    one.empty()
    amem.resume()
    one.right()
    say()
    hear()
""",
    )
    child = int(a.hear())
    for turn in range(2):
        a.hear()
        b.hear()
        if turn == 0:
            os.kill(child, signal.SIGKILL)
        a.say()
        b.say()
    a.well()
    b.well()


def test_a_child_that_outlives_its_parent(scripts: Scripts) -> None:
    """The parent's peer learns of its end all the same, and all memory goes back."""
    a, b = scripts.pair(
        """
say(os.fork() or "child")
time.sleep(60)
""",
        """
hear()
started = time.monotonic()
amem.pause()
amem.resume()
assert time.monotonic() - started < float(os.environ["AMEM_TIMEOUT_S"]) / 2
one.comm.destroy()
other = Device(one.device.driver, 0)
one.empty()
assert other.used_bytes() == 0
""",
    )
    assert "child" in (a.hear(), a.hear())
    os.kill(a.pid, signal.SIGKILL)
    a.process.wait()
    b.say()
    b.well()
    os.killpg(a.pid, signal.SIGKILL)  # its child is there still


def test_fork_and_exec(scripts: Scripts) -> None:
    """The new program is a process like any other, and holds nothing of the old one's."""
    scripts.run("""
one = One().connect()
one.right()
inside = "import amem, os; assert amem.state() is amem.State.OFF; amem.enable(); " \\
    "assert amem.state() is amem.State.WAITING; " \\
    "assert not [f for f in os.listdir('/proc/self/fd') if int(f) > 3]; print('well')"
for state in ("active", "paused"):
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", inside])
    well(child)
    for options in ({}, {"close_fds": False}, {"preexec_fn": lambda: None}):
        assert subprocess.check_output([sys.executable, "-c", inside], **options) == b"well\\n"
    assert os.system("true") == 0
    if state == "active":
        amem.pause()
amem.resume()
one.right()
""")


@pytest.mark.parametrize("state", ["active", "paused"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_multiprocessing(scripts: Scripts, tmp_path: Path, method: str, state: str) -> None:
    """As those of a DataLoader: they import amem and may call it. They come and go while the parent pauses."""
    (tmp_path / "worker.py").write_text("""
import amem

def work(number, questions, answers):
    for question in iter(questions.get, None):
        try:
            found = amem.state().name, amem.stats()["state"]
            amem.pause()
            answers.put((number, *found, "no error"))
        except amem.AmemError as error:
            answers.put((number, *found, type(error).__name__))
""")
    kind = "ForkedError" if method == "fork" else "NotEnabledError"
    scripts.env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    scripts.run(f"""
import worker
one = One().connect()
one.right()
if {state == "paused"}:
    amem.pause()
context = multiprocessing.get_context("{method}")
questions, answers = context.Queue(), context.Queue()
workers = [context.Process(target=worker.work, args=(n, questions, answers)) for n in range(2)]
for process in workers:
    process.start()
for _ in range(4):
    questions.put(1)
for _ in range(4):
    assert answers.get(timeout=15)[1:] == ("OFF", "off", "{kind}")
(amem.resume if {state == "paused"} else amem.pause)()
for _ in workers:
    questions.put(None)
for process in workers:
    process.join(15)
    assert process.exitcode == 0, process
amem.resume()
one.right()
one.cycle()
""")


# ---- faults ----


@pytest.mark.parametrize("place", ["the main thread", "another thread", "paused"])
@pytest.mark.parametrize("order", ["before", "after", "never"])
def test_a_real_fault_is_told_and_ends_the_process(scripts: Scripts, order: str, place: str) -> None:
    script = scripts.start(f"""
def fault():
    ctypes.string_at(8)
if "{order}" == "before":
    faulthandler.enable()
one = One().connect()
one.right()
if "{order}" == "after":
    faulthandler.enable()
if "{place}" == "paused":
    amem.pause()
if "{place}" == "another thread":
    thread = threading.Thread(target=fault)
    thread.start()
    thread.join()
else:
    fault()
""")
    status, errors = script.end()
    assert status == -signal.SIGSEGV, errors
    assert "goroutine" not in errors
    if order != "never":
        assert "Fatal Python error: Segmentation fault" in errors
        assert "in fault" in errors


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_that_jumps_out(scripts: Scripts, handlers: str, order: str) -> None:
    scripts.run(f"""
library = ctypes.CDLL("{handlers}")
library.readable.argtypes = [ctypes.c_void_p]
if "{order}" == "before":
    library.install_jump()
one = One().connect()
one.right()
if "{order}" == "after":
    library.install_jump()
here = ctypes.create_string_buffer(1)
for _ in range(3):
    assert [library.readable(8), library.readable(ctypes.addressof(here))] == [0, 1]
    one.cycle()
""")


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_that_exits(scripts: Scripts, handlers: str, order: str) -> None:
    script = scripts.start(f"""
library = ctypes.CDLL("{handlers}")
if "{order}" == "before":
    library.install_leave(42)
one = One().connect()
one.cycle()
if "{order}" == "after":
    library.install_leave(42)
ctypes.string_at(8)
""")
    assert script.end()[0] == 42


# ---- signals ----


def test_a_storm_of_alarms(scripts: Scripts) -> None:
    """Python's handler runs, and no system call that it interrupts fails for it."""
    a, b = (
        """
count = 0
def alarm(number, frame):
    global count
    count += 1
signal.signal(signal.SIGALRM, alarm)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for _ in range(15):
    amem.pause()
    amem.resume()
    one.right()
signal.setitimer(signal.ITIMER_REAL, 0)
assert count > 20, count
"""
        for _ in range(2)
    )
    for script in scripts.pair(a, b):
        script.well()


def test_signals_are_for_the_programs_own_threads(scripts: Scripts, handlers: str) -> None:
    """A handler without a stack of its own would overflow those of Go's threads."""
    scripts.run(f"""
library = ctypes.CDLL("{handlers}")
tids = lambda: set(map(int, os.listdir("/proc/self/task")))
def dispositions():
    lines = dict(line.split(":") for line in open("/proc/self/status").read().splitlines() if line.startswith("Sig"))
    mask = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGURG - 1
    return [int(lines[name], 16) & mask for name in ("SigIgn", "SigCgt")]
one = One()
before, had = tids(), dispositions()
assert amem.state() is amem.State.WAITING
identity = one.nccl.unique_id()
assert amem.state() is amem.State.ACTIVE
core = tids() - before
assert core
assert dispositions() == had, "SIGPIPE or SIGURG was taken"
library.install_note(signal.SIGALRM)
gate = threading.Event()
own = threading.Thread(target=gate.wait)
own.start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
one.comm = Communicator.connect(one.nccl, identity, 0, 1)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
for _ in range(30):
    one.cycle()
signal.setitimer(signal.ITIMER_REAL, 0)
gate.set()
own.join()
assert library.noted() > 20
hit = {{library.noted_on(i) for i in range(64)}} & core
assert not hit, hit
""")


def test_a_log_that_nobody_reads(scripts: Scripts) -> None:
    """The core writes to a stderr whose other end is closed, and the process lives on."""
    scripts.run(
        """
one = One().connect()
kept = os.dup(2)
ends = os.pipe()
os.dup2(ends[1], 2)
os.close(ends[0])
os.close(ends[1])
one.cycle()
os.dup2(kept, 2)
""",
        AMEM_LOG="debug",
    )


WAITING = """
def until_it_waits():
    '''Until the peer has stopped and waits for this process.'''
    while not [peer for peer in amem.stats()["peers"] if peer["stopped"]]:
        time.sleep(0.002)
"""


@pytest.mark.parametrize("outcome", ["paused", "active"])
def test_an_interrupt_while_a_pause_waits_for_a_peer(scripts: Scripts, outcome: str) -> None:
    """It is raised when the pause has ended, well or by a fault. No deadline passes, however busy the machine is."""
    scripts.env["AMEM_TIMEOUT_S"] = PATIENT
    a, b = scripts.pair(
        f"""
if "{outcome}" == "active":
    assert one.device.driver.library.cuSimSetFault(b"cuMemcpyDtoHAsync", 1, 999) == 0
try:
    amem.pause()
except KeyboardInterrupt:
    say("interrupted")
say(amem.state().name)
say(amem.stats()["paused_bytes"] > 0)
hear()
amem.pause()
one.empty()
say("empty")
amem.resume()
one.right()
""",
        WAITING
        + """
until_it_waits()
say("it waits")
hear()
amem.pause()
hear()
amem.resume()
one.right()
""",
    )
    assert b.hear() == "it waits"
    os.kill(a.pid, signal.SIGINT)
    b.say()
    assert a.hear() == "interrupted"
    assert a.hear() == outcome.upper()
    assert a.hear() == str(outcome == "paused")
    a.say()
    assert a.hear() == "empty"
    b.say()
    a.well()
    b.well()


# ---- threads, and the end ----


def test_threads_that_end_while_another_is_inside_a_call(scripts: Scripts) -> None:
    scripts.env["AMEM_TIMEOUT_S"] = PATIENT
    a, b = scripts.pair(
        """
waiting = threading.Thread(target=amem.pause)
waiting.start()
say("begun")
hear()
for _ in range(50):
    thread = threading.Thread(target=amem.stats)
    thread.start()
    thread.join()
assert waiting.is_alive()
say("done")
waiting.join()
assert amem.state() is amem.State.PAUSED
amem.resume()
one.right()
""",
        WAITING
        + """
until_it_waits()
say("it waits")
hear()
thread = threading.Thread(target=amem.pause)
thread.start()
thread.join()
amem.resume()
one.right()
""",
    )
    assert a.hear() == "begun"
    assert b.hear() == "it waits"
    a.say()
    assert a.hear() == "done"
    b.say()
    a.well()
    b.well()


ENDS = {
    "returns": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "raises": ("raise KeyError(5)", 1),
    "SIGTERM": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    "sys.exit in a thread": ("t = threading.Thread(target=sys.exit, args=(6,)); t.start(); t.join()", 0),
    "os._exit in a thread": ("t = threading.Thread(target=os._exit, args=(7,)); t.start(); t.join()", 7),
    # It waits for its peer in vain, and goes at its deadline.
    "in atexit": ("import atexit; atexit.register(lambda: amem.resume() and None)", 0),
}


@pytest.mark.parametrize("way", ENDS)
def test_the_end_while_paused(scripts: Scripts, way: str) -> None:
    """The exit status is the program's own, all memory goes back, and the peer lives on."""
    statement, wanted = ENDS[way]
    a, b = scripts.pair(
        f"amem.pause()\nsay('paused')\nhear()\n{statement}\n",
        """
amem.pause()
say("paused")
hear()
amem.resume()
assert amem.state() is amem.State.ACTIVE
one.comm.destroy()
driver = one.device.driver
assert [Device(driver, ordinal).used_bytes() for ordinal in range(2)] == [0, 0]
one.size, one.rank = 1, 0
one.connect().right()
one.device.make_current()
amem.pause()
amem.resume()
one.right()
""",
    )
    assert [a.hear(), b.hear()] == ["paused", "paused"]
    a.say()
    status, errors = a.end()
    assert status == wanted, errors
    assert "goroutine" not in errors
    assert "panic" not in errors
    b.say()
    b.well()


@pytest.mark.parametrize("daemon", [True, False])
def test_the_end_during_another_threads_pause(scripts: Scripts, daemon: bool) -> None:
    """Python waits for a thread that is no daemon, which takes no longer than the pause's deadline."""
    a, b = scripts.pair(
        f"""
def wait():
    try:
        amem.pause()
    except amem.DeadlineError:
        pass
threading.Thread(target=wait, daemon={daemon}).start()
hear()
""",
        WAITING
        + """
until_it_waits()
say("it waits")
hear()
amem.pause()
amem.resume()
one.comm.destroy()
""",
    )
    assert b.hear() == "it waits"
    a.say()
    started = time.monotonic()
    a.well()
    assert time.monotonic() - started < (1 if daemon else TIMEOUT_S + 2)
    b.say()
    b.well()
