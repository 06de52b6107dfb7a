"""Starts ranks as processes, sends them commands, and always gets rid of them.

    with Ranks(4, simulate=True) as ranks:
        ranks.init(ncomm=2)
        assert ranks.all("allreduce", comm=1) == [0, 0, 0, 0]
        ranks.all("pause")

The demo runs _rank.py in them, the tests a rank with more commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Long enough for the traceback of each thread to reach the rank's log.
STACK_DUMP_S = 1.0
EXIT_S = 10.0


class RankError(RuntimeError):
    """A command failed in a rank; error is the name of the exception's class, figures are those of amem's."""

    def __init__(self, rank: int, error: str, message: str, figures: dict[str, Any] | None = None) -> None:
        super().__init__(f"rank {rank}: {error}: {message}")
        self.rank = rank
        self.error = error
        self.figures = figures or {}
        self.message = message


class RankTimeout(RuntimeError):
    """A command was not answered in time. All ranks have been killed."""


class RankProcess:
    """One rank, in a session of its own so that all it started can be killed."""

    def __init__(self, owner: Ranks, number: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.owner = owner
        self.number = number
        self.log = os.path.join(owner.folder, f"rank{number}.log")
        self.killed = False
        self._buffer = b""
        self._outcome: Any = None
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,
                bufsize=0,
            )
        self.pid = self.process.pid

    def start(self, command: str, **arguments: Any) -> None:
        """Sends a command; Ranks.finish() or finish() collects the answer."""
        line = json.dumps({"command": command, "arguments": arguments}) + "\n"
        assert self.process.stdin is not None
        # Of a rank that is gone, the end of its answers tells more.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode())

    def finish(self, timeout: float | None = None) -> Any:
        outcome = self.owner.collect([self], timeout)[0]
        if isinstance(outcome, RankError):
            raise outcome
        return outcome

    def call(self, command: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Runs a command in this rank alone."""
        self.start(command, **arguments)
        return self.finish(timeout)

    def reply_fd(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def receive(self) -> bool:
        """Reads what has come; True once the answer, or the rank's end, is there."""
        chunk = os.read(self.reply_fd(), 1 << 16)
        if not chunk:
            status = self.reap(time.monotonic() + EXIT_S)
            self.kill()
            self._outcome = RankError(self.number, "Died", f"exit status {status}\n{self.last_lines()}")
            return True
        self._buffer += chunk
        if not self._buffer.endswith(b"\n"):
            return False
        answer = json.loads(self._buffer)
        self._buffer = b""
        if "error" in answer:
            self._outcome = RankError(self.number, answer["error"], answer["message"], answer["figures"])
        else:
            self._outcome = answer["value"]
        return True

    def take_outcome(self) -> Any:
        outcome, self._outcome = self._outcome, None
        return outcome

    def last_lines(self, count: int = 40) -> str:
        with open(self.log, errors="replace") as log:
            return "".join(log.readlines()[-count:])

    def kill(self) -> None:
        """Kills the rank and all that it started."""
        self.killed = True
        if self.process.returncode is None:
            self._kill_group()
        self.process.wait()

    def _kill_group(self) -> None:
        # To be called before wait(): until then the number of the group can't be reused.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self, deadline: float) -> int | None:
        """Lets the rank exit by itself; its exit status, or None if it was killed."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        if self.killed:
            return None
        status = self.reap(deadline)
        self.kill()
        return -signal.SIGKILL if status is None else status

    def reap(self, deadline: float) -> int | None:
        """The status of a rank that ends by itself before the deadline, and an end to what it started."""
        if self.process.returncode is not None:
            return self.process.returncode
        while not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        self._kill_group()
        return self.process.wait()


class Ranks:
    """A number of ranks, and with simulate the simulated devices they share."""

    def __init__(
        self,
        count: int,
        *,
        simulate: bool,
        argv: Sequence[str] = (sys.executable, "-m", "amem._rank"),
        env: Mapping[str, str] | None = None,
        rank_env: Sequence[Mapping[str, str]] | None = None,
        sim_dir: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        """env is added to this process's environment, rank_env[i] to that of rank i.

        sim_dir lets several groups of ranks share simulated devices; without
        it the group makes devices of its own.
        """
        self.simulate = simulate
        self.timeout = timeout
        self.folder = tempfile.mkdtemp(prefix="amem-ranks-")
        self.sim_dir = sim_dir
        self._own_sim_dir = simulate and sim_dir is None
        self.processes: list[RankProcess] = []
        try:
            common = dict(os.environ)
            common["PYTHONPATH"] = os.pathsep.join([PACKAGE_PARENT, *filter(None, [common.get("PYTHONPATH")])])
            if simulate:
                if self._own_sim_dir:
                    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
                    self.sim_dir = tempfile.mkdtemp(prefix="amem-sim-", dir=shm)
                common["AMEM_SIM_DIR"] = str(self.sim_dir)
                common.setdefault("AMEM_SIM_DEVICES", str(max(count, 8)))
            common.update(env or {})
            for number in range(count):
                own = rank_env[number] if rank_env else {}
                self.processes.append(RankProcess(self, number, argv, {**common, **own}))
        except BaseException:
            self.kill()
            self._remove_folders()
            raise

    def __len__(self) -> int:
        return len(self.processes)

    def __getitem__(self, number: int) -> RankProcess:
        return self.processes[number]

    def init(
        self, ncomm: int = 1, *, devices: Sequence[int] | None = None, enable: str = "before", nccl: str | None = None
    ) -> None:
        """Gives each rank a device (default: its own number) and connects communicators."""
        self.all(
            "init",
            per_rank=[{"device": device} for device in devices or range(len(self))],
            simulate=self.simulate,
            enable=enable,
            nccl=nccl,
        )
        for _ in range(ncomm):
            self.comm_init()

    def comm_init(self, members: Sequence[int] | None = None) -> list[int]:
        """Connects the members (default: all) and returns each one's number of it."""
        members = list(members if members is not None else range(len(self)))
        identity = self[members[0]].call("unique_id")
        for rank, member in enumerate(members):
            self[member].start("comm_init", identity=identity, rank=rank, size=len(members))
        return self.finish(members=members)

    def all(
        self,
        command: str,
        *,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Runs a command in all ranks at once. Raises the first rank's RankError, if any."""
        self.start(command, per_rank=per_rank, **arguments)
        return self.finish(timeout)

    def outcomes(
        self,
        command: str,
        *,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """As all(), with each failed rank's RankError in its place instead of raised."""
        self.start(command, per_rank=per_rank, **arguments)
        return self.collect(self.processes, timeout)

    def start(self, command: str, *, per_rank: Sequence[Mapping[str, Any]] | None = None, **arguments: Any) -> None:
        """Sends a command to all ranks; per_rank[i] adds to the arguments of rank i."""
        for number, process in enumerate(self.processes):
            process.start(command, **arguments, **(per_rank[number] if per_rank else {}))

    def finish(self, timeout: float | None = None, *, members: Sequence[int] | None = None) -> list[Any]:
        """The answers to what start() sent, in the order of the ranks."""
        numbers = members if members is not None else range(len(self))
        outcomes = self.collect([self[number] for number in numbers], timeout)
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                raise outcome
        return outcomes

    def collect(self, processes: Sequence[RankProcess], timeout: float | None = None) -> list[Any]:
        """An answer or a RankError of each; kills all ranks if one does not answer."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        waiting = {process.reply_fd(): process for process in processes}
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            readable = select.select(list(waiting), [], [], left)[0]
            if not readable:
                self._time_out(list(waiting.values()), limit)
            for fd in readable:
                if waiting[fd].receive():
                    del waiting[fd]
        return [process.take_outcome() for process in processes]

    def _time_out(self, late: Sequence[RankProcess], limit: float) -> None:
        for process in late:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(STACK_DUMP_S)
        self.kill()
        names = ", ".join(str(process.number) for process in late)
        raise RankTimeout(f"no answer within {limit:g} s from rank {names}\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of what each rank wrote to stderr."""
        texts = [(process, process.last_lines()) for process in self.processes]
        return "".join(f"--- rank {p.number} (pid {p.pid})\n{text}" for p, text in texts if text)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> list[int | None]:
        """Ends the ranks and removes what they left; the exit status of each, None if killed."""
        deadline = time.monotonic() + EXIT_S
        try:
            return [process.close(deadline) for process in self.processes]
        finally:
            self.kill()
            self._remove_folders()

    def _remove_folders(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._own_sim_dir and self.sim_dir:
            shutil.rmtree(self.sim_dir, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, RankTimeout):
            with contextlib.suppress(OSError):
                print(self.last_lines(), end="", file=sys.stderr)
            self.kill()
        logs = [process.last_lines() for process in self.processes]
        statuses = self.close()
        if error is None:
            for number, status in enumerate(statuses):
                if status:
                    raise RankError(number, "Exit", f"exit status {status}\n{logs[number]}")
