"""Pause and resume in several processes: memory goes back to the devices, and every byte returns."""

from __future__ import annotations

import os
import re
import time

import pytest

from harness import MIB, RankError, Ranks, failure, kinds, memory, needs_libraries, ranks, right

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
        nothing = {"seconds": 0.0, "bytes": 0, "copied_bytes": 0, "changed": False}
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


# Which call of the function fails. A pause registers memory and synchronises once.
ON_PAUSE = [
    *((function, number) for function in ("cuMemcpyDtoHAsync", "cuMemUnmap", "cuMemRelease") for number in (1, 2)),
    ("cuMemHostRegister", 1),
    ("cuCtxSynchronize", 1),
]
RESUMES = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync", "cuMemImportFromShareableHandle"]
# In the arena there is one block of a peer's to import, and three places to map.
ON_RESUME = [
    *((function, 1, mode) for function in RESUMES for mode in ("arena", "direct")),
    *((function, 2, "arena") for function in RESUMES[:4]),
    ("cuMemMap", 3, "arena"),
    ("cuMemSetAccess", 3, "arena"),
    ("cuMemImportFromShareableHandle", 3, "direct"),
]


def connected(group: Ranks) -> list[int]:
    group.init(ncomm=1)
    right(group)
    return list(group.all("meminfo"))


@pytest.mark.parametrize("next_step", ["resume", "pause"])
@pytest.mark.parametrize(("function", "number"), ON_PAUSE)
def test_a_call_that_fails_on_pause_leaves_the_process_active(function: str, number: int, next_step: str) -> None:
    with ranks(2, {"AMEM_TIMEOUT_S": "2"}) as group:
        used = connected(group)
        group[0].call("fault", function=function, number=number)
        first, second = group.outcomes("pause")
        assert isinstance(first, RankError), f"{function} was not called"
        assert first.error == ("HostMemoryError" if function == "cuMemHostRegister" else "CudaError")
        assert function in first.message
        assert group[0].call("state") == "ACTIVE"
        assert group[0].call("stats")["device_bytes"] == used[0]
        if isinstance(second, RankError):
            assert second.error == "DeadlineError"
        if next_step == "resume":
            group.all("resume")
            assert group.all("state") == ["ACTIVE"] * 2
            assert group.all("meminfo") == used
            right(group)
        group.all("pause")
        assert group.all("meminfo") == [0, 0]
        group.all("resume")
        assert group.all("meminfo") == used
        right(group)


@pytest.mark.parametrize(("function", "number", "mode"), ON_RESUME)
def test_a_call_that_fails_on_resume_leaves_the_process_paused(function: str, number: int, mode: str) -> None:
    with ranks(2, MODES[mode]) as group:
        used = connected(group)
        group.all("pause")
        group[0].call("fault", function=function, number=number)
        group[1].start("resume")
        message = failure(lambda: group[0].call("resume"), "CudaError")
        assert function in message
        assert group[0].call("state") == "PAUSED"
        assert group[0].call("stats")["device_bytes"] == 0
        group[0].call("resume")
        group[1].finish()
        assert group.all("meminfo") == used
        right(group)
        cycle(group)
        right(group)


def test_failures_leave_no_file_descriptors_behind() -> None:
    with ranks(2) as group:
        connected(group)
        cycle(group)
        expression = "len(os.listdir('/proc/self/fd'))"
        before = group.all("eval", expression=expression)
        for function in RESUMES:
            group.all("pause")
            group[0].call("fault", function=function)
            group[1].start("resume")
            failure(lambda: group[0].call("resume"), "CudaError")
            group[0].call("resume")
            group[1].finish()
        assert group.all("eval", expression=expression) == before
        right(group)
        assert os.path.isdir(str(group.sim_dir))
