"""Pause and resume in several processes: memory goes back to the devices, and every byte returns."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import (
    MIB,
    CallLog,
    RankError,
    Ranks,
    failure,
    kinds,
    memory,
    needs_libraries,
    outcome,
    places,
    ranks,
    right,
)

pytestmark = needs_libraries

MODES = {
    "arena": {},
    "direct": {"AMEM_ARENA": "0"},
    "control": {"AMEM_NCCL_OFFLOAD_FREE_TAG": "7"},
    "control-direct": {"AMEM_NCCL_OFFLOAD_FREE_TAG": "7", "AMEM_ARENA": "0"},
}
SMALL = {"NCCL_STANDIN_CHANNELS": "1", "NCCL_STANDIN_BUFFSIZE": "65536"}


def cycle(group: Ranks) -> None:
    assert all(step["changed"] for step in group.all("pause"))
    assert all(step["changed"] for step in group.all("resume"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2, 4])
def test_memory_goes_back_and_contents_return(count: int, mode: str) -> None:
    with ranks(count, MODES[mode]) as group:
        group.init(ncomm=0)
        assert group.all("meminfo") == [0] * count
        group.comm_init()
        group.comm_init()
        kinds(group, comm=0)
        right(group, comm=1)
        used = group.all("meminfo")
        steps = group.all("pause")
        assert group.all("meminfo") == [0] * count
        assert [step["bytes"] for step in steps] == used
        assert group.all("state") == ["PAUSED"] * count
        group.all("resume")
        assert group.all("meminfo") == used
        assert group.all("state") == ["ACTIVE"] * count
        right(group, comm=0)
        kinds(group, comm=1)
        group.all("verify_memory", comm=1)


@pytest.mark.parametrize("count", [8, 16])
def test_many_ranks(count: int) -> None:
    with ranks(count, {**SMALL, "AMEM_SIM_DEVICES": "16", "AMEM_TIMEOUT_S": "20"}) as group:
        group.init(ncomm=1)
        right(group, counts=(5000,))
        used = group.all("meminfo")
        assert min(used) > 2 * (count - 1) * 2 * MIB
        group.all("pause")
        assert group.all("meminfo") == [0] * count
        group.all("resume")
        assert group.all("meminfo") == used
        right(group, counts=(5000,))


def test_several_communicators_some_of_a_part_of_the_ranks() -> None:
    with ranks(4) as group:
        group.init(ncomm=1)
        group.split(comm=0, colors=[0, 1, 0, 1])
        group.comm_init(members=[1, 2])
        pair = [{"comm": 1}, {"comm": 2}, {"comm": 2}, {"comm": 1}]
        right(group, comm=0)
        right(group, comm=1)
        cycle(group)
        for member in (1, 2):
            group[member].start("allreduce", **pair[member])
        assert group.finish(members=[1, 2]) == [0, 0]
        right(group, comm=0)
        right(group, comm=1)
        cycle(group)
        right(group, comm=1)


@pytest.mark.parametrize("mode", MODES)
def test_twenty_cycles(mode: str) -> None:
    with ranks(2, {**MODES[mode], **SMALL, "NCCL_STANDIN_METADATA": "6"}) as group:
        group.init(ncomm=2)
        right(group, comm=0)
        right(group, comm=1)
        used = group.all("meminfo")
        for number in range(20):
            assert group.all("allreduce", comm=number % 2, count=1 + 977 * number) == [0, 0]
            group.all("pause")
            assert group.all("meminfo") == [0, 0]
            group.all("resume")
            assert group.all("sendrecv", comm=(number + 1) % 2, count=1 + 613 * number) == [0, 0]
        assert group.all("meminfo") == used
        right(group, comm=0)
        right(group, comm=1)
        for stats in group.all("stats"):
            assert (stats["pauses"], stats["resumes"]) == (20, 20)


@pytest.mark.parametrize("mode", ["arena", "direct", "control"])
def test_credits_that_a_peers_kernel_posts_late_are_not_lost(mode: str) -> None:
    """A kernel that has sent all may end before its peers post the credits for it.

    Nothing is synchronised between the launches and the pause, and one rank is
    slower than the other, each in turn.
    """
    late = {"NCCL_STANDIN_CREDIT_DELAY_US": "40000"}
    with ranks(3, {**MODES[mode], **SMALL}, rank_env=[{}, late, {}]) as group:
        group.init(ncomm=1)
        right(group, counts=(10,))
        for counts in ([1, 3000, 40_000], [200_000], [7, 7, 7], [60_000, 2]):
            group.all("launch", counts=counts)
            cycle(group)
            assert group.all("collect") == [0, 0, 0]
            assert group.all("allreduce", count=counts[0]) == [0, 0, 0]
        right(group)


def test_pause_waits_for_kernels_that_still_run() -> None:
    """A rank that launched and pauses at once has a kernel that waits for the other rank's launch."""
    with ranks(2) as group:
        group.init(ncomm=1)
        right(group)
        group[0].call("launch", counts=[5000])
        group[0].start("pause")
        group[1].call("launch", counts=[5000])
        group[1].start("pause")
        group.finish()
        group.all("resume")
        assert group.all("collect") == [0, 0]
        right(group)


def test_control_regions_alone_are_kept() -> None:
    copied = {}
    for tag in ("0", "7"):
        with ranks(2, {"AMEM_NCCL_OFFLOAD_FREE_TAG": tag}) as group:
            group.init(ncomm=1)
            right(group)
            copied[tag] = group.all("pause")[0]["copied_bytes"]
            group.all("resume")
            right(group)
    # Four shareable buffers of 2 MiB, of which 64 KiB each are kept.
    assert copied["0"] - copied["7"] == 4 * (2 * MIB - (64 << 10))


@pytest.mark.parametrize("mode", ["arena", "direct"])
def test_two_devices_in_one_process(mode: str) -> None:
    with ranks(1, MODES[mode]) as group:
        group.init(ncomm=0)
        rank = group[0]
        # Users' memory is mapped for every device that could reach it, which is no use of these devices.
        user = rank.call("mem_alloc", size=2 * MIB)
        assert [device["ordinal"] for device in rank.call("stats")["devices"]] == [0]
        rank.call("free", pointer=user)
        rank.call("comm_init_all", devices=[0, 1])
        assert [device["ordinal"] for device in rank.call("stats")["devices"]] == [0, 1]
        assert rank.call("allreduce_all", count=50_000) == 0
        used = [rank.call("used_bytes", device=device) for device in (0, 1)]
        assert min(used) > 8 * MIB
        for count in (1, 3000, 70_000):
            rank.call("pause")
            assert [rank.call("used_bytes", device=device) for device in (0, 1)] == [0, 0]
            rank.call("resume")
            assert [rank.call("used_bytes", device=device) for device in (0, 1)] == used
            assert rank.call("allreduce_all", count=count) == 0
        rank.call("destroy_all")
        assert [rank.call("used_bytes", device=device) for device in (0, 1)] == [0, 0]


@pytest.mark.parametrize("mode", ["arena", "direct"])
def test_two_devices_in_each_of_two_processes(mode: str) -> None:
    """A communicator inside each process, and one between them."""
    with ranks(2, MODES[mode]) as group:
        group.init(ncomm=1, devices=[0, 2])
        group.all("comm_init_all", per_rank=[{"devices": [0, 1]}, {"devices": [2, 3]}])
        right(group)
        assert group.all("allreduce_all", count=5000) == [0, 0]
        group.all("pause")
        assert [group[0].call("used_bytes", device=device) for device in range(4)] == [0] * 4
        group.all("resume")
        assert group.all("allreduce_all", count=9000) == [0, 0]
        right(group)


def test_a_collective_while_paused_is_refused_and_says_why() -> None:
    with ranks(2) as group:
        group.init(ncomm=1)
        right(group)
        group.all("pause")
        for outcome in group.outcomes("allreduce", count=1000):
            assert isinstance(outcome, RankError)
            assert outcome.error == "NcclError"
            assert "ncclAllReduce" in outcome.message
            assert "amem.resume()" in outcome.message
        group.all("resume")
        right(group)


def test_a_communicator_made_while_paused() -> None:
    with ranks(2) as group:
        group.init(ncomm=1)
        right(group)
        group.all("pause")
        group.comm_init()
        assert min(group.all("meminfo")) > 0, "a new communicator's memory is live"
        assert all(isinstance(outcome, RankError) for outcome in group.outcomes("allreduce", comm=1))
        group.all("resume")
        right(group, comm=1)
        right(group, comm=0)
        cycle(group)
        right(group, comm=1)
        for comm in (0, 1):
            group.all("destroy", comm=comm)
        memory(group, [0, 0])


def test_a_communicator_destroyed_while_paused() -> None:
    with ranks(2) as group:
        group.init(ncomm=2)
        right(group, comm=0)
        right(group, comm=1)
        group.all("pause")
        group.all("destroy", comm=0)
        memory(group, [0, 0])
        for stats in group.all("stats"):
            assert stats["paused_bytes"] > 0, "the other communicator's"
        group.all("resume")
        right(group, comm=1)
        group.all("pause")
        group.all("destroy", comm=1)
        deadline = time.monotonic() + 5
        while any(stats["paused_bytes"] for stats in group.all("stats")):
            assert time.monotonic() < deadline
        for stats in group.all("stats"):
            assert stats["paused_bytes"] == stats["device_bytes"] == 0
            assert not stats["peers"]
        group.all("resume")
        assert group.all("meminfo") == [0, 0]
        group.comm_init()
        right(group, comm=0)


def test_memory_for_users_made_and_freed_while_paused() -> None:
    with ranks(2) as group:
        group.init(ncomm=1)
        right(group)
        before = [rank.call("mem_alloc", size=3 * MIB) for rank in group.processes]
        group.all("pause")
        made = [rank.call("mem_alloc", size=5 * MIB, seed=9) for rank in group.processes]
        for rank, old, new in zip(group.processes, before, made):
            assert rank.call("check", pointer=new) == 0
            rank.call("free", pointer=old)
        assert group.all("meminfo") == [6 * MIB] * 2
        group.all("resume")
        for rank, new in zip(group.processes, made):
            assert rank.call("check", pointer=new) == 0
            rank.call("free", pointer=new)
        right(group)


@pytest.mark.parametrize("mode", ["arena", "direct"])
def test_graphs_captured_before_are_replayed_after(mode: str) -> None:
    left: list[int] = []
    for enable in ("never", "before"):
        with ranks(2, {**MODES[mode], **SMALL}) as group:
            group.init(ncomm=2, enable=enable)
            right(group, comm=0)
            right(group, comm=1)
            group.all("capture")
            assert group.all("replay") == [0, 0]
            if enable == "before":
                for _ in range(3):
                    cycle(group)
                    assert group.all("replay") == [0, 0]
                right(group)
            group.all("graph_destroy")
            for comm in (0, 1):
                group.all("destroy", comm=comm)
            left = left or group.all("meminfo")
            memory(group, left)


def test_communicators_made_by_two_threads_at_once() -> None:
    with ranks(2) as group:
        group.init(ncomm=0)
        for _ in range(3):
            identities = [group[0].call("unique_id") for _ in range(2)]
            for number, rank in enumerate(group.processes):
                commands = [("comm_init", {"identity": i, "rank": number, "size": 2}) for i in identities]
                rank.start("threads", commands=commands)
            numbers = [[answer["value"] for answer in answers] for answers in group.finish()]
            for first, second in zip(*numbers):
                per_rank = [{"comm": first}, {"comm": second}]
                assert group.all("allreduce", count=4000, per_rank=per_rank) == [0, 0]
            cycle(group)
            for first, second in zip(*numbers):
                per_rank = [{"comm": first}, {"comm": second}]
                assert group.all("allreduce", count=4000, per_rank=per_rank) == [0, 0]


@pytest.mark.parametrize("library", ["python", "C"])
def test_pause_called_by_several_threads_at_once(library: str) -> None:
    """One does it, the others find it done. From C nothing but the library keeps them apart."""
    with ranks(2) as group:
        group.init(ncomm=1)
        right(group)
        for verb in ("pause", "resume"):
            commands: list[object] = [(verb, {})] * 3
            if library == "C":
                name = f"nccl{verb.capitalize()}"
                hook = "__import__('ctypes').CDLL('libamem_hook.so')"
                commands = [("eval", {"expression": f"{hook}.{name}(None)"})] * 3
            for answers in group.all("threads", commands=commands):
                values = [answer["value"] for answer in answers]
                if library == "C":
                    assert values == [0] * 3
                else:
                    assert sorted(value["changed"] for value in values) == [False, False, True]
        assert [stats["pauses"] for stats in group.all("stats")] == [1, 1]
        right(group)


def test_again_is_no_change() -> None:
    with ranks(2) as group:
        group.init(ncomm=1)
        right(group)
        nothing: dict[str, object] = {"seconds": 0.0, "bytes": 0, "copied_bytes": 0, "changed": False}
        nothing.update({"tags": [], "held_bytes": 0, "held_by": []})
        assert group.all("resume") == [nothing] * 2
        group.all("pause")
        assert group.all("pause") == [nothing] * 2
        assert group[1].call("pause") == nothing
        group.all("resume")
        assert group.all("resume") == [nothing] * 2
        assert group[0].call("resume") == nothing
        right(group)


# ---- too little memory, and calls that fail ----


def test_out_of_memory_on_resume_loses_nothing() -> None:
    with ranks(2, {"AMEM_SIM_MEMORY": str(256 * MIB)}) as group:
        group.init(ncomm=1)
        right(group)
        used = group.all("meminfo")
        group.all("pause")
        held = group[0].call("hold", size=250 * MIB)
        group[1].start("resume")
        for _ in range(2):
            message = failure(lambda: group[0].call("resume"), "OutOfMemoryError")
            found = re.search(r"GPU 0 has (\d+) bytes free, (\d+) are needed", message)
            assert found, message
            assert int(found[1]) == 6 * MIB
            assert int(found[2]) == used[0]
            assert group[0].call("meminfo") == 250 * MIB
            assert group[0].call("state") == "PAUSED"
        group[0].call("free", pointer=held)
        group[0].call("resume")
        group[1].finish()
        assert group.all("meminfo") == used
        right(group)


# The driver's CUDA_ERROR_UNKNOWN, which no call answers by itself.
FAULT = 999
# These put a thread back as it was when amem's work on it is done. What they answer helps nobody.
UNHEEDED = {"cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}
# So that no mistake in how calls are found leaves the tests without any.
SURELY = {
    "pause": {"cuCtxSynchronize", "cuMemcpyDtoHAsync", "cuMemUnmap", "cuMemRelease"},
    "resume": {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync", "cuMemImportFromShareableHandle"},
}


class Pair:
    """Two connected ranks. Calls of the driver fail in the first one."""

    def __init__(self, group: Ranks, log: CallLog) -> None:
        self.group, self.log = group, log
        self.rank, self.peer = group.processes
        group.init(ncomm=1)
        right(group)
        self.used = group.all("meminfo")

    def calls(self, command: str) -> list[str]:
        """What the first rank calls in a pause or a resume in which nothing fails."""
        made = {step: self.log.of(self.group.all, step) for step in ("pause", "resume")}
        assert SURELY[command] <= set(made[command])
        return made[command]

    def descriptors(self) -> list[int]:
        return list(self.group.all("eval", expression="len(os.listdir('/proc/self/fd'))"))

    def as_before(self, descriptors: list[int]) -> None:
        assert self.group.all("state") == ["ACTIVE"] * 2
        assert self.group.all("meminfo") == self.used
        right(self.group, counts=(3000,))
        deadline = time.monotonic() + 5
        while (now := self.descriptors()) != descriptors:
            assert time.monotonic() < deadline, f"{now} descriptors, not {descriptors}"
            time.sleep(0.01)

    def arm(self, function: str, number: int) -> None:
        self.rank.call("fault", function=function, number=number)
        self.log.take()
        self.told = os.path.getsize(self.rank.log)

    def failed(self, result: object, function: str) -> bool:
        """Whether the command failed for the fault. If it did not, then the rank's log warns of the fault."""
        assert (function, FAULT) in self.log.take(), "the call was not made"
        if isinstance(result, RankError):
            assert result.error == ("HostMemoryError" if function == "cuMemHostRegister" else "CudaError")
            assert function in result.message
            return True
        assert self.warned(function) or function in UNHEEDED, "nothing tells of the failure"
        return False

    def warned(self, function: str) -> bool:
        with open(self.rank.log) as log:
            log.seek(self.told)
            return re.search(f"WARN.*{function}", log.read()) is not None

    def waits(self) -> bool:
        """True once the first rank's pause waits for its peer, False if it has failed before."""
        while not select.select([self.rank.reply_fd()], [], [], 0)[0]:
            if any(peer["stopped"] for peer in self.peer.call("stats")["peers"]):
                return True
        return False

    def fail_in_pause(self, function: str, number: int, attempt: str) -> None:
        """The second attempt is a pause at once, or comes after a resume in both."""
        self.arm(function, number)
        self.rank.start("pause")
        told = attempt == "pause" or self.waits()
        if told:
            self.peer.start("pause")
        result = outcome(self.rank)
        failed = self.failed(result, function)
        if failed:
            assert self.rank.call("state") == "ACTIVE"
            assert self.rank.call("stats")["device_bytes"] == self.used[0]
        if failed and attempt == "pause":
            assert self.rank.call("pause")["changed"]
        if told:
            self.peer.finish()
        if failed and attempt == "resume":
            self.group.all("resume")
            assert self.group.all("state") == ["ACTIVE"] * 2
            assert self.group.all("meminfo") == self.used
            right(self.group, counts=(3000,))
            self.group.all("pause")
        assert self.group.all("state") == ["PAUSED"] * 2
        own, peers = self.group.all("meminfo")
        assert own == 0
        # A peer's memory that could not be let go is no harm, and the next resume replaces it.
        assert peers == 0 or (not failed and self.warned(function))
        self.group.all("resume")

    def fail_in_resume(self, function: str, number: int) -> None:
        self.group.all("pause")
        assert self.group.all("meminfo") == [0, 0]
        self.arm(function, number)
        self.group.start("resume")
        if self.failed(outcome(self.rank), function):
            assert self.rank.call("state") == "PAUSED"
            assert self.rank.call("stats")["device_bytes"] == 0
            assert self.rank.call("resume")["changed"]
        self.peer.finish()


@contextlib.contextmanager
def pair(folder: Path, mode: str) -> Iterator[Pair]:
    log = CallLog(folder / "calls")
    with ranks(2, MODES[mode], rank_env=[{"AMEM_SIM_LOG": log.path}, {}]) as group:
        yield Pair(group, log)


@pytest.mark.parametrize("mode", ["arena", "direct", "control"])
@pytest.mark.parametrize(("command", "attempt"), [("pause", "pause"), ("pause", "resume"), ("resume", "resume")])
def test_whichever_call_of_the_driver_fails(tmp_path: Path, command: str, attempt: str, mode: str) -> None:
    """The process stays as it was, and the next attempt succeeds. It does so for each function that is called."""

    def fail(two: Pair, function: str, number: int) -> None:
        print(f"{command}: call {number} of {function} fails")
        if command == "pause":
            two.fail_in_pause(function, number, attempt)
        else:
            two.fail_in_resume(function, number)
        two.as_before(descriptors)

    with pair(tmp_path, mode) as two:
        first = two.calls(command)
        descriptors = two.descriptors()
        again = two.calls(command)
        for function, number in places(again, middle=True):
            fail(two, function, number)
        right(two.group)
    # What a process's first one alone calls needs a new process for each fault.
    for function, number in places([f for f in first if first.count(f) != again.count(f)], middle=True):
        with pair(tmp_path, mode) as two:
            fail(two, function, number)


def test_figures_are_told_whatever_fails(tmp_path: Path) -> None:
    with pair(tmp_path, "arena") as two:
        for function, number in places(two.log.of(two.rank.call, "stats"), middle=True):
            two.arm(function, number)
            assert two.rank.call("stats")["device_bytes"] == two.used[0]
            assert (function, FAULT) in two.log.take(), "the call was not made"
        cycle(two.group)
        right(two.group)
