"""amem under callers that do what NCCL's sources say: the wild stand-in."""

from __future__ import annotations

import functools

import pytest

from harness import MIB, SIM, RankError, Ranks, memory, needs_libraries, ranks, resident, right

pytestmark = needs_libraries

NET = {"NCCL_STANDIN_NET": "1", "LD_LIBRARY_PATH": str(SIM)}
SLAB = 16 * MIB
COUNT = 200_000


def gathers(group: Ranks) -> None:
    """A replay of the captured all-gather is exact."""
    group.all("replay_gather")
    assert group.all("replay_gather") == [0] * len(group)


def tensor_behind_a_hole(group: Ranks) -> tuple[int, list[int]]:
    """A tensor in a slab whose first chunk is free, in each rank; and what the devices hold without it."""
    base = group.all("meminfo")
    first = group[0].call("allocate", tag="weights", size=4 * MIB, seed=1)
    tensor = group[0].call("allocate", tag="weights", size=8 * MIB, seed=2)
    for rank in range(1, len(group)):
        assert group[rank].call("allocate", tag="weights", size=4 * MIB, seed=1) == first
        assert group[rank].call("allocate", tag="weights", size=8 * MIB, seed=2) == tensor
    group.all("deallocate", tensor=first)
    return tensor, base


@pytest.mark.parametrize("hole", [False, True])
def test_a_captured_collective_on_a_regions_memory(hole: bool) -> None:
    """NCCL registers the base of the tensor's memory, is refused, and does without: nothing is held over a pause."""
    with ranks(2) as group:
        group.init()
        group.comm_init()
        right(group)
        if hole:
            tensor, base = tensor_behind_a_hole(group)
        else:
            base = group.all("meminfo")
            tensor = group.all("allocate", tag="weights", size=8 * MIB, seed=2)[0]
        group.all("capture_gather", tensor=tensor, count=COUNT)
        extra = group[0].call("meminfo") - base[0]  # the region's slab, and the buffer that is sent
        gathers(group)
        for _ in range(2):
            released = [report["bytes"] for report in group.all("pause", tags=["weights"])]
            assert released == [SLAB, SLAB]
            memory(group, [base[0] + extra - SLAB] * 2)
            group.all("resume", tags=["weights"])
            gathers(group)
        group.all("pause")
        memory(group, [extra - SLAB] * 2)
        group.all("resume")
        gathers(group)
        right(group)


@pytest.mark.parametrize("by", ["nic", "multicast"])
def test_a_regions_memory_that_hardware_keeps(by: str) -> None:
    """A NIC, or a multicast object, keeps the pages, so they stay: whatever part of the slab is named first."""
    with ranks(2, env=NET if by == "nic" else {"NCCL_STANDIN_NVLS": "1"}) as group:
        group.init()
        group.comm_init()
        right(group)
        tensor, base = tensor_behind_a_hole(group)
        group.all("capture_gather", tensor=tensor, count=COUNT)
        gathers(group)
        held = group.all("meminfo")
        group.all("pause", tags=["weights"])
        memory(group, held)
        group.all("resume", tags=["weights"])
        gathers(group)


def test_the_network_takes_no_peers_memory_along() -> None:
    """Three buffers a communicator are registered; the same function allocates peers' buffers of that size later."""
    with ranks(4, env={**NET, "NCCL_STANDIN_CHANNELS": "4"}) as group:
        group.init(ncomm=3)
        for comm in range(3):
            right(group, comm)
        registered, most = 3 * 3 * 2 * MIB, 3 * 2 * SLAB  # three side by side stand in two slabs at most
        held = group[0].call("meminfo")
        assert held > 150 * MIB
        kept = resident(group[0].call("stats"))["nic"]
        assert registered <= kept <= most
        group.all("pause")
        memory(group, [kept] * 4)
        group.all("resume")
        for comm in range(3):
            right(group, comm)
        # What was registered once is ordinary memory afterwards.
        for _ in range(2):
            group.all("destroy", comm=2)
            group.all("destroy", comm=1)
            for comm in (1, 2):
                group.comm_init()
                right(group, comm)
        assert registered <= resident(group[0].call("stats"))["nic"] <= most
        group.all("pause")
        memory(group, [resident(group[0].call("stats"))["nic"]] * 4)
        group.all("resume")
        for comm in range(3):
            right(group, comm)


def test_nccls_own_suspension() -> None:
    """It is refused with a word on amem.pause, or it works: never two mechanisms on one memory."""
    with ranks(2) as group:
        group.init()
        group.comm_init()
        right(group)
        full = group.all("meminfo")
        group.start("suspend")
        try:
            group.finish()
        except RankError as error:
            assert "amem.pause" in error.message, error
        else:
            assert group[0].call("meminfo") < full[0]
            group.all("resume_nccl")
        assert group.all("meminfo") == full
        right(group)
        group.all("pause")
        memory(group, [0, 0])
        group.all("resume")
        right(group)


def test_fabric_is_asked_for_first() -> None:
    """ncclMemAlloc's refusal is no error, and not told as one."""
    with ranks(2, env={"AMEM_SIM_FABRIC": "2", "AMEM_LOG": "warn"}) as group:
        group.init()
        group.comm_init()
        right(group)
        pointers = group.all("mem_alloc", size=4 * MIB)
        group.all("pause")
        group.all("resume")
        right(group)
        assert [group[rank].call("check", pointer=pointer) for rank, pointer in enumerate(pointers)] == [0, 0]
        assert "ERROR" not in group.last_lines()


def test_nccl_between_gpus_of_one_process_enables_peer_access() -> None:
    """From then on a region's memory is the other GPU's to read, as cudaMalloc's is."""
    with ranks(1) as group:
        group.init()
        p = group[0]
        older = p.call("allocate", tag="weights", size=8 * MIB, seed=1)
        reads = functools.partial(p.call, "seen_by", device=1)
        with pytest.raises(RankError):
            reads(tensor=older, seed=1)
        p.call("comm_init_all", devices=[0, 1])
        assert p.call("allreduce_all") == 0
        newer = p.call("allocate", tag="weights", size=80 * MIB, seed=2)
        for _ in range(2):
            assert reads(tensor=older, seed=1) and reads(tensor=newer, seed=2)
            p.call("pause")
            p.call("resume")
        assert p.call("allreduce_all") == 0
        p.call("destroy_all")
