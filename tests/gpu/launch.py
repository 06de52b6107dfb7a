"""Starts the processes of one step, lets them meet, and ends them in time.

A rank that hangs in NCCL holds its GPU, so nothing here waits without a
deadline. A step that runs out of time is asked for its stacks (SIGUSR1), then
its whole process groups are killed, and the next step finds the GPUs free.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_MESSAGE = 1 << 22
DUMP_SECONDS = 2.0
LOG_LIMIT = 200_000


@dataclass
class Command:
    """One process of a step."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a step ended, and what its processes reported."""

    status: str
    seconds: float
    results: list[dict[str, Any]]
    reason: str
    log: str


class Meeting:
    """A barrier that carries values: the server side, a thread of the launcher.

    Every process sends one JSON line a round, and gets the list of all of
    them. When one is gone the others get an error instead of a wait.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.path = str(folder / "meet")
        self._count = count
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self.path)
        self._server.listen(count)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(5)
        self._server.close()

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._server, selectors.EVENT_READ)
        buffers: dict[socket.socket, bytes] = {}
        values: dict[int, tuple[socket.socket, Any]] = {}
        gone = False
        while not self._stopped.is_set():
            for key, _ in selector.select(0.2):
                if key.fileobj is self._server:
                    connection, _ = self._server.accept()
                    connection.settimeout(5)
                    buffers[connection] = b""
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                try:
                    data = connection.recv(65536)
                except OSError:
                    data = b""
                buffers[connection] += data
                if not data or len(buffers[connection]) > MAX_MESSAGE:
                    selector.unregister(connection)
                    connection.close()
                    gone = True
                    continue
                while b"\n" in buffers[connection]:
                    line, _, rest = buffers[connection].partition(b"\n")
                    buffers[connection] = rest
                    index, value = json.loads(line)
                    values[index] = (connection, value)
            answer: Any = None
            if len(values) == self._count:
                answer = {"values": [values[i][1] for i in range(self._count)]}
            elif gone and values:
                answer = {"error": "a process of this step is gone"}
            if answer is not None:
                text = json.dumps(answer).encode() + b"\n"
                for connection, _ in values.values():
                    with contextlib.suppress(OSError):
                        connection.sendall(text)
                values = {}
        for connection in buffers:
            connection.close()
        selector.close()


class Peers:
    """The processes of a step, seen from one of them."""

    def __init__(self) -> None:
        self.index = int(os.environ["GPU_STEP_INDEX"])
        self.count = int(os.environ["GPU_STEP_COUNT"])
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(os.environ["GPU_STEP_MEETING"])
        self._reader = self._socket.makefile("rb")

    def gather(self, value: Any = None) -> list[Any]:
        """The value of every process, in order. All of them must call it."""
        self._socket.sendall(json.dumps([self.index, value]).encode() + b"\n")
        line = self._reader.readline()
        if not line:
            raise ConnectionError("the launcher is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise ConnectionError(answer["error"])
        values: list[Any] = answer["values"]
        return values

    def barrier(self) -> None:
        self.gather()


def start_child() -> None:
    """Called first by a process of a step: stacks on SIGUSR1, and no life after the launcher."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ["GPU_STEP_LAUNCHER"]):
        os._exit(9)


def report(**values: Any) -> None:
    """Adds a line to this process's result file. The last value of each key counts."""
    with open(os.environ["GPU_STEP_RESULT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def free_port() -> int:
    """A port below those that the kernel hands out, which NCCL's own sockets may take before rank 0 listens."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def rank_commands(
    argv: list[str], ranks: int, env: dict[str, str], job_envs: list[dict[str, str]] | None = None
) -> list[Command]:
    """The ranks of one job, or of several jobs that share the GPUs (one environment each)."""
    commands = []
    for job in job_envs or [{}]:
        port = str(free_port())
        for rank in range(ranks):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            commands.append(Command(argv, {**place, **env, **job}))
    return commands


def base_environment() -> dict[str, str]:
    """The caller's environment without amem's variables: each step sets its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("AMEM_")}
    if "AMEM_LOG" in os.environ:
        env["AMEM_LOG"] = os.environ["AMEM_LOG"]
    # NVLink multicast can leave a shared host's GPUs unusable when a test is killed.
    env.setdefault("NCCL_NVLS_ENABLE", "0")
    env.setdefault("NCCL_DEBUG", "WARN")
    env.setdefault("OMP_NUM_THREADS", "4")
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    return env


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """Turns SIGTERM and SIGINT into an exception, so that run() kills what it started."""

    def stop(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    previous = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run(commands: list[Command], deadline: float, grace: float = 5.0, debugger: bool = False) -> Outcome:
    """Runs the processes of a step to their end, or kills them.

    After one has failed the others get `grace` seconds: they may wait in a
    collective for the one that is gone.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpu-step-"))
    meeting = Meeting(folder, len(commands))
    started = time.monotonic()
    limit = started + deadline
    processes: list[subprocess.Popen[bytes]] = []
    reason = ""
    timed_out = False
    dumped: list[str] = []
    try:
        for index, command in enumerate(commands):
            env = {
                **base_environment(),
                **command.env,
                "GPU_STEP_INDEX": str(index),
                "GPU_STEP_COUNT": str(len(commands)),
                "GPU_STEP_MEETING": meeting.path,
                "GPU_STEP_RESULT": str(folder / f"result{index}"),
                "GPU_STEP_LAUNCHER": str(os.getpid()),
            }
            with open(folder / f"log{index}", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command.argv,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        while any(p.poll() is None for p in processes):
            failed = next((i for i, p in enumerate(processes) if p.poll() not in (None, 0)), None)
            if failed is not None and not reason:
                reason = f"process {failed} ended with {processes[failed].returncode}"
                limit = min(limit, time.monotonic() + grace)
            if time.monotonic() > limit:
                timed_out = not reason
                dumped = _dump(processes, debugger)
                break
            time.sleep(0.02)
        seconds = time.monotonic() - started
    finally:
        _kill(processes)
        meeting.close()
    codes = [p.returncode for p in processes]
    results = [_read_result(folder / f"result{i}") for i in range(len(processes))]
    logs = [f"--- process {i} ended with {codes[i]}\n{_read_tail(folder / f'log{i}')}" for i in range(len(processes))]
    shutil.rmtree(folder, ignore_errors=True)
    if timed_out:
        status = "TIMEOUT"
        stages = ", ".join(f"{i}: {r.get('stage', '?')}" for i, r in enumerate(results))
        reason = f"not done after {deadline:.0f} s; stages {stages}"
    elif any(codes):
        status = "FAIL"
        errors = [f"{r['error']} (stage: {r.get('stage', '?')})" for r in results if "error" in r]
        # A rank that only noticed that another had gone says nothing about the cause.
        causes = [e for e in errors if "ConnectionError" not in e] or errors
        reason = causes[0] if causes else reason or f"exit codes {codes}"
    else:
        status = "PASS"
    return Outcome(status, seconds, results, reason, "\n".join(logs + dumped))


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        # The group may outlive its leader: a C program's ranks are its children.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def _dump(processes: list[subprocess.Popen[bytes]], debugger: bool) -> list[str]:
    """Where the threads of the processes stand, as far as it can be seen from outside."""
    alive = [p for p in processes if p.poll() is None]
    for process in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGUSR1)
    parts = [_threads(p.pid) for p in alive]
    program = (shutil.which("gdb") or shutil.which("cuda-gdb")) if debugger else None
    if program:
        for process in alive[:2]:
            argv = [program, "-p", str(process.pid), "-batch", "-ex", "thread apply all bt 25"]
            # Its own deadline: a debugger that hangs must not cost more than the hang it explains.
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                done = subprocess.run(
                    argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=25, start_new_session=True
                )
                parts.append(f"--- stacks of {process.pid}\n" + done.stdout.decode(errors="replace")[-60000:])
    time.sleep(DUMP_SECONDS)
    return parts


def _threads(pid: int) -> str:
    lines = [f"--- threads of {pid}"]
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        words = [task.name]
        for name in ("comm", "wchan", "syscall"):
            with contextlib.suppress(OSError):
                words.append((task / name).read_text().strip()[:60])
        lines.append("  " + " | ".join(words))
    return "\n".join(lines)


def _read_result(path: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            # A killed process may leave half a line.
            with contextlib.suppress(ValueError):
                merged.update(json.loads(line))
    return merged


def _read_tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(max(0, size - LOG_LIMIT))
        return file.read().decode(errors="replace")


def device_count() -> int:
    """How many GPUs the driver offers; 0 without a driver. Creates no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def print_table(rows: list[list[str]], out: Any = None) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row[:-1], widths))]
        print("  ".join([*cells, row[-1]]).rstrip(), file=out or sys.stdout, flush=True)
        if number == 0:
            print("  ".join("-" * w for w in widths[:-1]) + "  " + "-" * len(rows[0][-1]), file=out or sys.stdout)
