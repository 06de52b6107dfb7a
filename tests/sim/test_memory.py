"""Whose memory goes back to the devices, when, what stays, and that nothing grows."""

from __future__ import annotations

import time
from typing import Any

import pytest

from harness import MIB, SIM, Ranks, failure, kinds, memory, needs_libraries, ranks, resident, right

pytestmark = needs_libraries

SMALL = {"NCCL_STANDIN_CHANNELS": "1", "NCCL_STANDIN_BUFFSIZE": "65536"}
NET = {"NCCL_STANDIN_NET": "1", "LD_LIBRARY_PATH": str(SIM)}
ARENA = pytest.mark.parametrize("arena", ["1", "0"], ids=["arena", "direct"])


def counted(stats: Any) -> None:
    """The figures of the statistics agree with each other."""
    for device in stats["devices"]:
        assert device["device_bytes"] + device["paused_bytes"] == device["slab_bytes"] + device["direct_bytes"]
        assert device["slab_used_bytes"] <= device["slab_bytes"]
    assert stats["device_bytes"] == sum(device["device_bytes"] for device in stats["devices"])
    assert stats["paused_bytes"] == sum(device["paused_bytes"] for device in stats["devices"])


@ARENA
def test_statistics_are_what_the_devices_say(arena: str) -> None:
    with ranks(3, {"AMEM_ARENA": arena}) as group:
        group.init(ncomm=2)
        right(group)
        pointers = [rank.call("mem_alloc", size=3 * MIB) for rank in group.processes]
        used = group.all("meminfo")
        for stats, bytes_used in zip(group.all("stats"), used):
            counted(stats)
            assert stats["device_bytes"] == bytes_used
            assert stats["paused_bytes"] == 0
            assert resident(stats) == {"user": 4 * MIB}
            assert len(stats["peers"]) == 2
            assert (stats["devices"][0]["direct_bytes"] > 4 * MIB) == (arena == "0")
        group.all("pause")
        for stats, bytes_used in zip(group.all("stats"), used):
            counted(stats)
            assert stats["device_bytes"] == 4 * MIB
            assert stats["paused_bytes"] == bytes_used - 4 * MIB == stats["last_pause"]["bytes"]
            assert stats["devices"][0]["imported_bytes"] == 0
            assert stats["devices"][0]["total_bytes"] - stats["devices"][0]["free_bytes"] == 4 * MIB
        group.all("resume")
        assert group.all("meminfo") == used
        for rank, pointer in zip(group.processes, pointers):
            assert rank.call("check", pointer=pointer) == 0


def test_slabs_take_less_than_an_allocation_each() -> None:
    used = {}
    for arena in ("1", "0"):
        with ranks(2, {"AMEM_ARENA": arena}) as group:
            group.init(ncomm=3)
            for comm in range(3):
                right(group, comm=comm, counts=(100,))
            used[arena] = group.all("meminfo")[0]
    assert used["1"] < used["0"] / 3, "metadata of a few KiB takes 2 MiB without slabs"


def poll(observer: Ranks, device: int, wanted: int) -> None:
    deadline = time.monotonic() + 5
    while observer[0].call("used_bytes", device=device) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@ARENA
def test_a_pause_returns_when_the_last_peer_has_let_go(arena: str) -> None:
    """A rank that has let go of nothing yet holds its peers' memory on their devices."""
    # Peers' memory is let go of once all copies have been started.
    slow = {"AMEM_SIM_DELAYS": f"cuMemcpyDtoHAsync_v2={200_000 if arena == '1' else 30_000}"}
    with ranks(2, {**SMALL, "AMEM_ARENA": arena}, rank_env=[{}, slow]) as group:
        group.init(ncomm=1)
        right(group)
        used = group.all("meminfo")
        shared = group[1].call("stats")["devices"][0]["imported_bytes"]
        assert 0 < shared < used[0]
        with ranks(1, sim_dir=str(group.sim_dir)) as observer:
            observer.init(ncomm=0, devices=[7], enable="never")
            group[0].start("pause")
            time.sleep(0.3)
            assert observer[0].call("used_bytes", device=0) == used[0], "rank 1 has not paused: nothing may be released"
            group[1].start("pause")
            # What rank 1 maps of rank 0's memory is still there, the rest is not.
            deadline = time.monotonic() + 10
            while observer[0].call("used_bytes", device=0) != shared:
                assert time.monotonic() < deadline
            released = group[0].finish()
            assert observer[0].call("used_bytes", device=0) == 0
            assert (released["bytes"], released["held_bytes"]) == (used[0], 0)
            group[1].finish()
            assert [observer[0].call("used_bytes", device=device) for device in (0, 1)] == [0, 0]
            group.all("resume")
            assert [observer[0].call("used_bytes", device=device) for device in (0, 1)] == used
        right(group)


def test_no_peer_uses_memory_before_its_contents_are_in() -> None:
    """Rank 1 is quick and launches at once; what it writes to rank 0 must not be overwritten by rank 0's copy."""
    slow = {"AMEM_SIM_DELAYS": "cuMemcpyHtoDAsync_v2=20000,cuMemCreate=50000"}
    with ranks(2, SMALL, rank_env=[slow, {}]) as group:
        group.init(ncomm=1)
        right(group)
        for _ in range(3):
            group.all("pause")
            group.start("resume")
            group[1].finish()
            group[1].start("allreduce", count=2000)
            group[0].finish()
            group[0].start("allreduce", count=2000)
            assert group.finish() == [0, 0]
        right(group)


def test_ranks_resume_at_different_times() -> None:
    with ranks(3, SMALL) as group:
        group.init(ncomm=1)
        right(group)
        for order in ([0, 1, 2], [2, 0, 1]):
            for number in order:
                group[number].start("pause")
                time.sleep(0.1)
            group.finish()
            for number in order:
                group[number].start("resume")
                time.sleep(0.1)
            group.finish()
            right(group)


# ---- what stays ----


def test_memory_for_users_is_not_touched() -> None:
    with ranks(2) as group:
        group.init(ncomm=1)
        right(group)
        small = [rank.call("mem_alloc", size=64 << 10, seed=5) for rank in group.processes]
        large = [rank.call("mem_alloc", size=40 * MIB, seed=6) for rank in group.processes]
        group.all("pause")
        assert group.all("meminfo") == [42 * MIB] * 2
        for stats in group.all("stats"):
            assert resident(stats) == {"user": 42 * MIB}
        for number, rank in enumerate(group.processes):
            assert rank.call("check", pointer=small[number]) == 0
            assert rank.call("check", pointer=large[number]) == 0
            rank.call("free", pointer=small[number])
        assert group.all("meminfo") == [40 * MIB] * 2
        group.all("resume")
        for number, rank in enumerate(group.processes):
            assert rank.call("check", pointer=large[number]) == 0
            rank.call("free", pointer=large[number])
        right(group)
        for stats in group.all("stats"):
            assert resident(stats) == {}


@ARENA
def test_symmetric_windows_stay(arena: str) -> None:
    with ranks(3, {**SMALL, "AMEM_ARENA": arena}) as group:
        group.init(ncomm=1)
        right(group)
        group.all("windows_open", size=4 * MIB)
        assert group.all("windows_allgather", count=20_000) == [0] * 3
        used = group.all("meminfo")
        for _ in range(3):
            group.all("pause")
            for stats, bytes_used in zip(group.all("stats"), group.all("meminfo")):
                assert resident(stats)["user"] == bytes_used >= 8 * MIB
            group.all("resume")
            assert group.all("meminfo") == used
            assert group.all("windows_allgather", count=30_000) == [0] * 3
            right(group)
        group.all("windows_close")
        group.all("destroy", comm=0)
        memory(group, [0] * 3)


def test_windows_closed_while_paused() -> None:
    with ranks(2, SMALL) as group:
        group.init(ncomm=1)
        right(group)
        group.all("windows_open", size=4 * MIB)
        assert group.all("windows_allgather", count=1000) == [0, 0]
        group.all("pause")
        group.all("windows_close")
        group.all("resume")
        right(group)
        group.all("windows_open", size=2 * MIB)
        assert group.all("windows_allgather", count=1000) == [0, 0]
        group.all("windows_close")
        group.all("destroy", comm=0)
        memory(group, [0, 0])


def test_host_memory_is_not_counted_and_keeps_its_contents() -> None:
    figures = {}
    for host in ("0", "1"):
        with ranks(2, {"NCCL_STANDIN_HOST_NUMA": host}) as group:
            group.init(ncomm=1)
            right(group)
            group.all("pause")
            stats = group.all("stats")[0]
            figures[host] = (stats["paused_bytes"], stats["device_bytes"], resident(stats))
            group.all("resume")
            right(group)
    assert figures["0"] == figures["1"]


def test_fabric_memory_stays() -> None:
    with ranks(2, {"AMEM_SIM_FABRIC": "1"}) as group:
        group.init(ncomm=1)
        right(group)
        pointer = group[0].call("mem_alloc", size=6 * MIB)
        group.all("pause")
        assert group.all("meminfo") == [6 * MIB, 0]
        assert group[0].call("check", pointer=pointer) == 0
        group.all("resume")
        assert group[0].call("check", pointer=pointer) == 0
        right(group)


@ARENA
def test_multicast_memory_stays(arena: str) -> None:
    with ranks(4, {**SMALL, "NCCL_STANDIN_NVLS": "1", "AMEM_ARENA": arena}) as group:
        group.init(ncomm=1)
        kinds(group)
        used = group.all("meminfo")
        for _ in range(2):
            group.all("pause")
            for stats, bytes_used in zip(group.all("stats"), group.all("meminfo")):
                assert resident(stats) == {"multicast": 4 * MIB}
                assert bytes_used == 4 * MIB
            group.all("resume")
            assert group.all("meminfo") == used
            right(group)
        group.all("destroy", comm=0)
        memory(group, [0] * 4)


@ARENA
def test_what_a_nic_has_registered_stays(arena: str) -> None:
    with ranks(2, {**NET, "AMEM_ARENA": arena}) as group:
        group.init(ncomm=1)
        right(group)
        used = group.all("meminfo")
        for _ in range(2):
            group.all("pause")
            for stats, bytes_used in zip(group.all("stats"), group.all("meminfo")):
                counted(stats)
                assert list(resident(stats)) == ["nic"]
                assert resident(stats)["nic"] == bytes_used >= 3 * MIB
                assert stats["paused_bytes"] > 0
            group.all("resume")
            assert group.all("meminfo") == used
            right(group)
        group.all("destroy", comm=0)
        memory(group, [0, 0])


def test_what_a_nic_has_registered_keeps_little_else() -> None:
    """Only the slabs stay in which it is, and no longer than the registration does."""
    with ranks(2, NET) as group:
        group.init(ncomm=1)
        right(group)
        one = [resident(stats)["nic"] for stats in group.all("stats")]
        for number in (1, 2):
            group.comm_init()
            right(group, comm=number)
        group.all("pause")
        for alone, stats in zip(one, group.all("stats")):
            counted(stats)
            assert resident(stats)["nic"] <= 3 * alone
        group.all("resume")
        for number in range(3):
            right(group, comm=number)
        for number in (0, 2):
            group.all("destroy", comm=number)
        left = [resident(stats)["nic"] for stats in group.all("stats")]
        # The slabs of the one that is left: its buffers may begin in the slab before their own.
        assert all(now <= 2 * alone for now, alone in zip(left, one))
        right(group, comm=1)
        group.all("pause")
        memory(group, left)
        group.all("resume")
        right(group, comm=1)


# ---- nothing grows ----


HOLDINGS = """{
    "fds": len(os.listdir("/proc/self/fd")),
    "maps": sum("amem-sim" in line for line in open("/proc/self/maps")),
    "threads": len(os.listdir("/proc/self/task")),
    "stats": {k: amem.stats()["devices"][0][k] for k in ("slabs", "chunks", "device_bytes", "imported_bytes")},
}""".replace("\n", " ")


def settled(group: Ranks, wanted: list[int]) -> None:
    """Waits for what is told to peers in the background."""
    deadline = time.monotonic() + 5
    while [stats["peers"] and len(stats["peers"]) or 0 for stats in group.all("stats")] != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@ARENA
def test_communicators_made_and_destroyed_again_and_again(arena: str) -> None:
    with ranks(2, {**SMALL, "AMEM_ARENA": arena}) as group:
        group.init(ncomm=0)
        holdings = []
        for number in range(20):
            group.comm_init()
            assert group.all("allreduce", count=3000) == [0, 0]
            if number % 2:
                group.all("pause")
                group.all("resume")
            assert group.all("allreduce", count=3000) == [0, 0]
            group.all("destroy", comm=0)
            memory(group, [0, 0])
            settled(group, [0, 0])
            holdings.append(group.all("eval", expression=HOLDINGS))
        for rank in (0, 1):
            assert holdings[3][rank]["stats"] == dict.fromkeys(holdings[3][rank]["stats"], 0)
            for late in holdings[-2:]:
                assert late[rank]["stats"] == holdings[3][rank]["stats"]
                assert late[rank]["maps"] <= holdings[3][rank]["maps"]
                assert late[rank]["fds"] <= holdings[3][rank]["fds"] + 2, "at most a connection more"
                assert late[rank]["threads"] <= holdings[3][rank]["threads"] + 4


def test_cycles_hold_nothing_more() -> None:
    with ranks(2) as group:
        group.init(ncomm=2)
        right(group, comm=0)
        right(group, comm=1)
        arenas, holdings = [], []
        for _ in range(15):
            group.all("pause")
            group.all("resume")
            arenas.append([stats["host"]["arena_bytes"] for stats in group.all("stats")])
            holdings.append(group.all("eval", expression=HOLDINGS))
        assert arenas[0] == arenas[-1]
        for rank in (0, 1):
            for key in ("maps", "stats"):
                assert holdings[-1][rank][key] == holdings[2][rank][key]
            assert holdings[-1][rank]["fds"] <= holdings[2][rank]["fds"] + 1
        right(group, comm=0)


@pytest.mark.parametrize("cycles", [0, 1])
def test_memory_that_is_used_again_is_zero_as_the_drivers_is(cycles: int) -> None:
    """The first communicator keeps the slab in which the next ones get what their predecessors had.

    NCCL does not clear its shareable buffers: old step counters in them would be taken for a peer's.
    """
    with ranks(2) as group:
        group.init(ncomm=1)
        right(group)
        for number in range(4):
            group.comm_init()
            assert group.all("allreduce", comm=1, count=1000 * (number + 1)) == [0, 0]
            for _ in range(cycles):
                group.all("pause")
                group.all("resume")
            right(group, comm=1)
            group.all("destroy", comm=1)
        right(group)


def test_a_split_that_is_destroyed_gives_its_memory_back() -> None:
    with ranks(4, SMALL) as group:
        group.init(ncomm=1)
        right(group)
        used = group.all("meminfo")
        for _ in range(3):
            group.split(comm=0, colors=[0, 0, 1, 1])
            assert group.all("allreduce", comm=1, count=1000) == [0] * 4
            group.all("pause")
            group.all("destroy", comm=1)
            group.all("resume")
            memory(group, used)
        right(group)


# Of the process, in bytes; the first line of statm is in pages of 4 KiB.
FREE = "amem.free_host_memory()"
RESIDENT = "4096 * int(open('/proc/self/statm').read().split()[1])"


def test_host_memory_is_got_ahead_and_given_back_on_request() -> None:
    with ranks(2, {**SMALL, "AMEM_HOST_PREALLOC": "1"}) as group:
        group.init(ncomm=1)
        right(group)
        arena = "amem.stats()['host']['arena_bytes']"
        pins = "amem.stats()['driver_calls'].get('cuMemHostRegister', 0)"
        deadline = time.monotonic() + 20
        while not all(group.all("eval", expression=arena)) and time.monotonic() < deadline:
            time.sleep(0.1)
        before = group.all("eval", expression=pins)
        assert min(before) > 0
        group.all("pause")
        assert group.all("eval", expression=pins) == before, "the first pause pins nothing"
        assert "resume it first" in failure(lambda: group.all("eval", expression=FREE), "InvalidStateError")
        group.all("resume")
        held = group.all("eval", expression=RESIDENT)
        group.all("eval", expression=FREE)
        assert group.all("eval", expression=arena) == [0, 0]
        assert all(now < then - MIB for now, then in zip(group.all("eval", expression=RESIDENT), held))
        group.all("pause")
        group.all("resume")
        right(group)
