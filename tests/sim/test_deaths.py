"""Ranks that are killed, stopped, slow, or gone while others pause and resume.

Two ranks stay; a third one, a new process each time, comes to harm.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import CallLog, RankError, Ranks, needs_libraries, outcome, places, ranks

pytestmark = needs_libraries

TIMEOUT_S = 1.5
# To learn who has relied on a pause that failed takes as long again at most.
MARGIN_S = TIMEOUT_S + 2.0
SMALL = {
    "NCCL_STANDIN_CHANNELS": "1",
    "NCCL_STANDIN_BUFFSIZE": "65536",
    "NCCL_STANDIN_METADATA": "4",
    "AMEM_TIMEOUT_S": str(TIMEOUT_S),
}


class Trio:
    """The two ranks that stay, and their guest."""

    def __init__(self, group: Ranks, sim_dir: str) -> None:
        self.group, self.sim_dir = group, sim_dir
        self.processes: list[Any] = list(group.processes)

    @property
    def stay(self) -> list[Any]:
        return self.processes[:2]

    @property
    def guest(self) -> Any:
        return self.processes[2]

    def call(self, command: str, **arguments: Any) -> list[Any]:
        """A command in all; each one's value or RankError."""
        for process in self.processes:
            process.start(command, **arguments)
        return [outcome(process) for process in self.processes]

    def both(self, command: str, **arguments: Any) -> list[Any]:
        """A command in the two that stay, which must succeed."""
        for process in self.stay:
            process.start(command, **arguments)
        return [process.finish() for process in self.stay]

    def connect(self) -> None:
        identity = self.processes[0].call("unique_id")
        for rank, process in enumerate(self.processes):
            process.start("comm_init", identity=identity, rank=rank, size=len(self.processes))
        numbers = [process.finish() for process in self.processes]
        for process, number in zip(self.processes, numbers):
            process.comm = number

    def right(self, processes: list[Any] | None = None) -> None:
        processes = self.processes if processes is None else processes
        for command, count in (("allreduce", 3000), ("alltoall", 500)):
            for process in processes:
                process.start(command, comm=process.comm, count=count)
            assert [process.finish() for process in processes] == [0] * len(processes), command

    def cycle(self) -> None:
        for command in ("pause", "resume"):
            assert [step["changed"] for step in self.call(command)] == [True] * len(self.processes)
        self.right()

    def part(self) -> None:
        """The ranks that stay destroy their communicator; no memory is left on any device."""
        for process in self.stay:
            process.call("destroy", comm=process.comm)
        self.empty()

    def empty(self) -> None:
        """What peers held goes back when they have been told, which nobody waits for."""
        deadline = time.monotonic() + TIMEOUT_S
        while (used := [self.stay[0].call("used_bytes", device=device) for device in range(3)]) != [0, 0, 0]:
            assert time.monotonic() < deadline, used
            time.sleep(0.01)


@pytest.fixture(scope="module")
def stay() -> Iterator[Ranks]:
    with ranks(2, SMALL) as group:
        group.init(ncomm=0)
        yield group


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No file outside the folders that tests make, and remove."""
    before = files()
    yield
    assert files() <= before


def files() -> set[str]:
    found = {os.path.join(folder, name) for folder in ("/tmp", "/dev/shm") for name in os.listdir(folder)}
    return {path for path in found if re.search(r"amem(?!-[a-z]+-)", path)}


@contextlib.contextmanager
def guest(stay: Ranks, works: bool = True, **env: str) -> Iterator[Trio]:
    """The two ranks, connected with a new third one. It may end badly."""
    one = ranks(1, {**SMALL, **env}, sim_dir=str(stay.sim_dir))
    try:
        one.init(ncomm=0, devices=[2])
        trio = Trio(stay, str(stay.sim_dir))
        trio.processes.append(one[0])
        trio.connect()
        if works:
            trio.right()
        yield trio
    finally:
        one.kill()
        one.close()


def healthy(stay: Ranks) -> None:
    """The ranks that stay work with one another, without loss."""
    trio = Trio(stay, str(stay.sim_dir))
    trio.connect()
    trio.right()
    trio.cycle()
    trio.part()
    assert [len(stats["peers"]) for stats in trio.call("stats")] == [0, 0]


def ended_well(process: Any, started: float, pid: int) -> Any:
    """The outcome, which comes in time, and if it is an error says whom it waited for."""
    result = outcome(process)
    assert time.monotonic() - started < TIMEOUT_S + MARGIN_S
    if isinstance(result, RankError):
        assert result.error in ("DeadlineError", "PeerError"), str(result)
        assert f"pid {pid}" in result.message
    return result


Calls = dict[str, list[str]]


@pytest.fixture(scope="module")
def calls(stay: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """The functions of the driver that a process's first pause and first resume call, in order."""
    log = CallLog(tmp_path_factory.mktemp("calls") / "calls")
    made: Calls = {}
    with guest(stay, AMEM_SIM_LOG=log.path) as trio:
        for command, state in (("pause", "PAUSED"), ("resume", "ACTIVE")):
            made[command] = log.of(trio.call, command)
            assert trio.call("state") == [state] * 3
        for process in trio.processes:
            process.call("destroy", comm=process.comm)
    assert {"cuMemcpyDtoHAsync", "cuMemUnmap", "cuMemRelease"} <= set(made["pause"])
    assert {"cuMemCreate", "cuMemMap", "cuMemcpyHtoDAsync", "cuMemImportFromShareableHandle"} <= set(made["resume"])
    return made


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_rank_killed_at_each_step(stay: Ranks, calls: Calls, command: str) -> None:
    """In the first call of each function, and in the last one."""
    for function, number in places(calls[command]):
        print(f"{command}: killed in call {number} of {function}")
        with guest(stay) as trio:
            if command == "resume":
                trio.call("pause")
            trio.guest.call("fault", function=function, number=number, result=-signal.SIGKILL)
            started = time.monotonic()
            for process in trio.processes:
                process.start(command)
            results = [ended_well(process, started, trio.guest.pid) for process in trio.stay]
            died = outcome(trio.guest)
            assert isinstance(died, RankError), "the call was not made"
            assert died.error == "Died"
            assert "status -9" in died.message
            wanted, before = ("PAUSED", "ACTIVE") if command == "pause" else ("ACTIVE", "PAUSED")
            for process, result in zip(trio.stay, results):
                failed = isinstance(result, RankError)
                assert process.call("state") == (before if failed else wanted)
            trio.both(command)  # what failed succeeds now: nobody waits for the dead
            assert trio.both("state") == [wanted] * 2
            trio.part()
            trio.both("resume")
        healthy(stay)


def test_a_rank_killed_while_all_are_paused(stay: Ranks) -> None:
    with guest(stay) as trio:
        trio.call("pause")
        trio.guest.start("kill")
        assert outcome(trio.guest).error == "Died"
        started = time.monotonic()
        trio.both("resume")
        assert time.monotonic() - started < TIMEOUT_S
        assert trio.both("state") == ["ACTIVE"] * 2
        trio.part()
        for process in trio.stay:
            assert re.search(f"WARN.*memory is gone.*pid {trio.guest.pid}", process.last_lines())
    healthy(stay)


def test_a_rank_killed_while_all_are_active(stay: Ranks) -> None:
    with guest(stay) as trio:
        trio.guest.start("kill")
        assert outcome(trio.guest).error == "Died"
        for command in ("pause", "resume", "pause"):
            started = time.monotonic()
            trio.both(command)
            assert time.monotonic() - started < TIMEOUT_S
        trio.part()
        trio.both("resume")
    healthy(stay)


@pytest.mark.parametrize("moment", ["active", "paused"])
def test_a_rank_that_exits_normally(stay: Ranks, moment: str) -> None:
    """Its communicator is not destroyed. The others keep what can be kept, and go on."""
    with guest(stay) as trio:
        if moment == "paused":
            trio.call("pause")
        trio.guest.start("eval", expression="sys.exit(7)")
        died = outcome(trio.guest)
        assert "exit status 7" in died.message, died
        for command in ("resume",) if moment == "paused" else ("pause", "resume"):
            trio.both(command)
        trio.part()
    healthy(stay)


def test_a_rank_that_destroys_and_exits_while_others_are_paused(stay: Ranks) -> None:
    with guest(stay) as trio:
        trio.call("pause")
        trio.guest.call("destroy", comm=trio.guest.comm)
        trio.guest.process.stdin.close()
        assert trio.guest.reap(time.monotonic() + 10) == 0
        trio.both("resume")
        trio.part()
    healthy(stay)


def test_a_rank_that_dies_and_is_restarted(stay: Ranks) -> None:
    """The others, paused, resume, part and connect with the new one, which may get the old one's pid."""
    for _ in range(3):
        with guest(stay) as trio:
            trio.call("pause")
            trio.call("resume")
            trio.right()
            trio.call("pause")
            trio.guest.kill()
            for process in trio.stay:
                process.call("destroy", comm=process.comm)
            trio.empty()
        with guest(stay, works=False) as trio:  # the two that stay are paused still
            assert trio.call("state") == ["PAUSED", "PAUSED", "ACTIVE"]
            trio.both("resume")
            trio.right()
            trio.cycle()
            trio.guest.call("destroy", comm=trio.guest.comm)
            trio.part()


# ---- stopped, and slow ----


def stopped(pid: int) -> None:
    """Returns once the process has been stopped by a signal."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "the process was not stopped"
        time.sleep(0.005)


def together_again(trio: Trio) -> None:
    """Whatever failed, a resume in all of them brings everything back."""
    assert not [step for step in trio.call("resume") if isinstance(step, RankError)]
    assert trio.call("state") == ["ACTIVE"] * 3
    trio.right()
    trio.cycle()
    trio.guest.call("destroy", comm=trio.guest.comm)
    trio.part()


@pytest.mark.parametrize("command", ["pause", "resume"])
@pytest.mark.parametrize("place", ["before", "first", "last"])
def test_a_rank_that_is_stopped_and_goes_on(stay: Ranks, calls: Calls, command: str, place: str) -> None:
    """It stops before it is asked, in the first call that it makes, or in the last one."""
    with guest(stay) as trio:
        if command == "resume":
            trio.call("pause")
        started = time.monotonic()
        if place == "before":
            os.kill(trio.guest.pid, signal.SIGSTOP)
            stopped(trio.guest.pid)
        else:
            made = calls[command]
            function, number = (made[0], 1) if place == "first" else (made[-1], made.count(made[-1]))
            trio.guest.call("fault", function=function, number=number, result=-signal.SIGSTOP)
            trio.guest.start(command)
        for process in trio.stay:
            process.start(command)
        stopped(trio.guest.pid)
        results = [ended_well(process, started, trio.guest.pid) for process in trio.stay]
        if (command, place) != ("pause", "last"):  # by then it has stopped work, which is all that the others wait for
            assert all(isinstance(result, RankError) for result in results)
            assert trio.both("state") == ["ACTIVE" if command == "pause" else "PAUSED"] * 2
        os.kill(trio.guest.pid, signal.SIGCONT)
        if place != "before":
            outcome(trio.guest)  # its own deadline has passed, or not
        together_again(trio)
    healthy(stay)


def test_a_slow_ranks_memory_is_not_kept_by_one_that_resumes_already(stay: Ranks) -> None:
    """It asks for the memory while the slow one still has what it is about to release."""
    with guest(stay, AMEM_SIM_DELAYS=f"cuMemcpyDtoHAsync={int(TIMEOUT_S * 1e6 / 10)}") as trio:
        trio.guest.start("pause")
        trio.both("pause")
        for process in trio.stay:
            process.start("resume")
        trio.guest.finish()
        deadline = time.monotonic() + TIMEOUT_S / 2
        while trio.guest.call("used_bytes", device=2):
            assert time.monotonic() < deadline, "memory is not given back"
        trio.guest.call("resume")
        for process in trio.stay:
            process.finish()
        together_again(trio)


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_rank_that_is_slow_is_waited_for(stay: Ranks, command: str) -> None:
    """Each of its calls takes a while, all of them less than the deadline."""
    function = {"pause": "cuMemUnmap", "resume": "cuMemMap"}[command]
    with guest(stay, AMEM_SIM_DELAYS=f"{function}={int(TIMEOUT_S * 1e6 / 10)}") as trio:
        for step in ("pause", "resume"):
            started = time.monotonic()
            assert [done["changed"] for done in trio.call(step)] == [True] * 3
            if step == command:
                assert time.monotonic() - started > TIMEOUT_S / 10
        trio.right()
        trio.guest.call("destroy", comm=trio.guest.comm)
        trio.part()
    healthy(stay)
