"""Regions through the C interface, as PyTorch's allocator and its IPC use them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from amem._ranks import RankProcess

from harness import (
    LIB,
    MIB,
    SIM,
    RankError,
    Ranks,
    environment,
    failure,
    memory,
    needs_libraries,
    python,
    ranks,
    right,
    run,
)

pytestmark = needs_libraries

OFF, ACTIVE, PAUSED = 0, 2, 3


@contextlib.contextmanager
def programs(count: int, **env: str) -> Iterator[Ranks]:
    """Processes on one device that enable nothing and have no NCCL."""
    with ranks(count, env=env) as group:
        group.all("start_without_nccl", device=0)
        yield group


def test_pause_by_tag() -> None:
    with programs(1) as group:
        p = group[0]
        base = p.call("meminfo")
        sizes = [2 * MIB, 30 * MIB, 6 * MIB, 100 * MIB]
        weights = [p.call("allocate", tag="weights", size=size, seed=i) for i, size in enumerate(sizes)]
        cache = p.call("allocate", tag="kv_cache", size=64 * MIB, seed=9, backup="none")
        full = p.call("meminfo")
        done = p.call("pause", tags=["weights"])
        assert done["changed"] and done["copied_bytes"] == sum(sizes)
        assert p.call("meminfo") == full - done["bytes"]
        assert p.call("holds", tensor=cache, seed=9)
        assert [p.call("tag_state", tag=tag) for tag in ("weights", "kv_cache", "other")] == [PAUSED, ACTIVE, OFF]
        assert p.call("memory_state", tensor=weights[1]) == PAUSED
        assert p.call("memory_state", tensor=cache) == ACTIVE
        assert p.call("state") == "PAUSED"
        assert p.call("pause")["changed"]
        assert p.call("meminfo") == base
        assert not p.call("pause", tags=["weights", "kv_cache"])["changed"]
        assert p.call("resume")["bytes"] == full - base
        assert p.call("meminfo") == full
        assert all(p.call("holds", tensor=number, seed=i) for i, number in enumerate(weights))
        message = failure(lambda: p.call("pause", tags=["kv"]), "InvalidArgumentError")
        assert 'no tag "kv"; the tags there are: nccl, weights, kv_cache' in message
        for tensor in (*weights, cache):
            p.call("deallocate", tensor=tensor)
        assert p.call("meminfo") == base


def test_with_nccl() -> None:
    """NCCL's memory has a tag of its own, and all is paused together."""
    with ranks(2) as group:
        group.init()
        group.comm_init()
        right(group)
        base = group[0].call("meminfo")
        for rank in range(2):
            group[rank].call("allocate", tag="weights", size=20 * MIB, seed=rank)
        full = group[0].call("meminfo")
        group.all("pause")
        memory(group, [0, 0])
        group.all("resume", tags=["weights"])
        assert group[0].call("meminfo") == full - base
        assert [group[rank].call("holds", tensor=0, seed=rank) for rank in range(2)] == [True, True]
        assert group[0].call("tag_state", tag="nccl") == PAUSED
        group.all("resume", tags=["nccl"])
        right(group)
        group.all("pause", tags=["nccl"])
        assert group[0].call("holds", tensor=0, seed=0)
        group.all("resume")
        right(group)


def test_nccl_needs_enabling_regions_do_not() -> None:
    with programs(1) as group:
        p = group[0]
        p.call("allocate", tag="weights", size=2 * MIB, seed=1)
        assert p.call("pause")["bytes"] == 16 * MIB
        assert "amem.enable()" in failure(lambda: p.call("pause", tags=["nccl"]), "NotEnabledError")
        p.call("resume")
        assert p.call("holds", tensor=0, seed=1)


def test_backups(tmp_path: Path) -> None:
    with programs(1, AMEM_DISK_DIRECTORY=str(tmp_path)) as group:
        p = group[0]
        cpu = p.call("allocate", tag="w", size=10 * MIB, seed=1, backup="cpu")
        disk = p.call("allocate", tag="w", size=40 * MIB, seed=2, backup="disk")
        none = p.call("allocate", tag="w", size=2 * MIB, seed=3, backup="none")
        assert "is not paused" in failure(lambda: p.call("backup", tensor=cpu, seed=1), "InvalidStateError")
        for _ in range(2):
            p.call("pause", tags=["w"])
            assert p.call("meminfo") == 0
            assert p.call("backup", tensor=cpu, seed=1)
            assert p.call("backup", tensor=cpu, seed=1, offset=12345, by_pointer=True)
            assert p.call("backup", tensor=disk, seed=2, offset=4097)
            assert "copy it instead" in failure(
                lambda: p.call("backup", tensor=disk, seed=2, by_pointer=True), "InvalidStateError"
            )
            assert "no backup" in failure(lambda: p.call("backup", tensor=none, seed=3), "InvalidStateError")
            regions = {region["backup"]: region for region in p.call("stats")["regions"]}
            assert regions["disk"]["disk_bytes"] >= 40 * MIB and regions["cpu"]["host_bytes"] >= 10 * MIB
            assert list(tmp_path.iterdir()) == [], "the file has no name"
            p.call("resume", tags=["w"])
            assert p.call("holds", tensor=cpu, seed=1) and p.call("holds", tensor=disk, seed=2)
        assert "is not a folder" in failure(lambda: p.call("disk_directory", path="/dev/null"), "InvalidArgumentError")
        p.call("disk_directory", path=str(tmp_path))


def test_out_of_memory() -> None:
    with programs(2, AMEM_SIM_MEMORY=str(256 * MIB)) as group:
        p, other = group[0], group[1]
        p.call("allocate", tag="weights", size=100 * MIB, seed=1)
        p.call("pause", tags=["weights"])
        hog = other.call("allocate", tag="kv_cache", size=200 * MIB, seed=2, backup="none")
        message = failure(lambda: p.call("resume"), "OutOfMemoryError")
        assert f"{56 * MIB} bytes free, {100 * MIB} are needed" in message
        assert p.call("tag_state", tag="weights") == PAUSED
        assert "CUDA_ERROR_OUT_OF_MEMORY" in failure(
            lambda: p.call("allocate", tag="weights", size=100 * MIB, seed=3), "MemoryError"
        )
        other.call("deallocate", tensor=hog)
        p.call("resume")
        assert p.call("holds", tensor=0, seed=1)


def test_shared_with_another_process() -> None:
    """CUDA's IPC works on it; the owner's pause releases both sides, its resume restores both."""
    with programs(2, AMEM_ENABLE="1") as group:
        a, b = group[0], group[1]
        sizes = [2 * MIB, 30 * MIB, 70 * MIB]
        own = [a.call("allocate", tag="weights", size=size, seed=i) for i, size in enumerate(sizes)]
        used = a.call("meminfo")
        theirs = [b.call("open", handle=a.call("share", tensor=t), size=size) for t, size in zip(own, sizes)]
        assert [b.call("holds", tensor=t, seed=i) for i, t in enumerate(theirs)] == [True] * 3
        assert b.call("meminfo") == used, "it is the same memory"
        for cycle in range(3):
            a.call("pause", tags=["weights"])
            assert a.call("meminfo") == 0, "both sides have let go of it"
            a.call("resume")
            for i, (mine, other) in enumerate(zip(own, theirs)):
                seed = i + 10 * cycle
                assert a.call("holds", tensor=mine, seed=seed) and b.call("holds", tensor=other, seed=seed)
                b.call("write", tensor=other, seed=seed + 10)
                assert a.call("holds", tensor=mine, seed=seed + 10)
        b.call("pause")  # the borrower's side alone
        assert a.call("holds", tensor=own[0], seed=30)
        a.call("pause")
        assert a.call("meminfo") == 0
        group.all("resume")  # in whatever order
        assert b.call("holds", tensor=theirs[2], seed=32)
        for tensor in theirs:
            b.call("close", tensor=tensor)
        for tensor in own:
            a.call("deallocate", tensor=tensor)
        memory(group, [0, 0])


def test_memory_that_is_not_a_regions_is_shared_as_ever() -> None:
    with programs(1, AMEM_ENABLE="1") as group:
        assert group[0].call("share_plain")
        group[0].call("allocate", tag="weights", size=2 * MIB, seed=1)
        assert group[0].call("share_plain")


def test_sharing_where_nobody_else_has_amem() -> None:
    with programs(1) as group:
        if not group[0].call("leave_others"):
            pytest.skip("the kernel lets nobody but root make a network namespace")
        group[0].call("allocate", tag="weights", size=2 * MIB, seed=1)
        message = failure(lambda: group[0].call("share", tensor=0), "RuntimeError")
        assert "set AMEM_ENABLE=1" in message and "amem.disable()" in message


def test_misuse_of_paused_memory() -> None:
    """Copies and handles are refused with an error that says why, and the context lives on."""
    with programs(1, AMEM_ENABLE="1") as group:
        p = group[0]
        paused = p.call("allocate", tag="weights", size=2 * MIB, seed=1)
        active = p.call("allocate", tag="other", size=2 * MIB, seed=2)
        p.call("copy", to=active, source=paused)
        assert p.call("holds", tensor=active, seed=1)
        p.call("pause", tags=["weights"])
        for how in range(3):
            for to, source in ((paused, active), (active, paused)):
                copy = functools.partial(p.call, "copy", to=to, source=source, how=how)
                message = failure(copy, "RuntimeError")
                assert "paused" in message and "resume" in message
        for how in range(2):
            assert "paused" in failure(functools.partial(p.call, "clear", tensor=paused, how=how), "RuntimeError")
        assert 'tag "weights" is paused' in failure(lambda: p.call("share", tensor=paused), "RuntimeError")
        p.call("clear", tensor=active)
        p.call("resume")
        assert p.call("holds", tensor=paused, seed=1)
        p.call("copy", to=active, source=paused, how=1)
        assert p.call("holds", tensor=active, seed=1)


def sees(program: RankProcess, device: int, tensor: int, seed: int) -> bool:
    """Whether the device reads what is there; a device without access gets an error instead."""
    try:
        return bool(program.call("seen_by", device=device, tensor=tensor, seed=seed))
    except RankError as error:
        assert "INVALID_VALUE" in error.message, error
        return False


def test_another_gpu_of_the_process() -> None:
    """Once peer access is enabled, it reaches regions' memory as it does cudaMalloc's: older, newer, over pauses."""
    with programs(1) as group:
        p = group[0]
        sizes = [2 * MIB, 30 * MIB, 100 * MIB]
        old = [p.call("allocate", tag="w", size=size, seed=i) for i, size in enumerate(sizes)]
        paused = p.call("allocate", tag="paused", size=4 * MIB, seed=7, backup="none")
        assert not any(sees(p, 1, tensor, i) for i, tensor in enumerate(old))
        p.call("pause", tags=["paused"])
        p.call("reach", device=1, peer=0)
        p.call("reach", device=1, peer=0)
        assert all(sees(p, 1, tensor, i) for i, tensor in enumerate(old))
        p.call("resume")
        p.call("write", tensor=paused, seed=7)
        assert sees(p, 1, paused, 7)
        new = p.call("allocate", tag="w", size=70 * MIB, seed=8)
        p.call("default_region", tag="all")
        default = p.call("torch_allocate", size=6 * MIB, seed=9)
        assert sees(p, 1, new, 8) and sees(p, 1, default, 9)
        p.call("write_by", device=1, tensor=new, seed=10)
        for _ in range(2):
            p.call("pause")
            assert p.call("meminfo") == 0
            p.call("resume")
            assert all(sees(p, 1, tensor, i) for i, tensor in enumerate(old))
            assert sees(p, 1, new, 10) and p.call("holds", tensor=new, seed=10) and sees(p, 1, default, 9)
        assert not sees(p, 2, new, 10), "it has no peer access"


def test_the_other_direction_is_another_access() -> None:
    with programs(1) as group:
        p = group[0]
        tensor = p.call("allocate", tag="w", size=2 * MIB, seed=1)
        p.call("reach", device=0, peer=1)
        assert not sees(p, 1, tensor, 1)
        p.call("reach", device=2, peer=0)
        p.call("reach", device=1, peer=0)
        other = p.call("allocate", tag="w", size=80 * MIB, seed=2)
        p.call("pause")
        p.call("resume")
        assert all(sees(p, device, t, seed) for device in (1, 2) for t, seed in ((tensor, 1), (other, 2)))


def test_memory_of_another_process_on_another_gpu() -> None:
    """What was opened is reached by the GPUs with peer access to the one that opened it, before and after."""
    with programs(2, AMEM_ENABLE="1") as group:
        a, b = group[0], group[1]
        a.call("allocate", tag="w", size=20 * MIB, seed=1)
        early = b.call("open", handle=a.call("share", tensor=0), size=20 * MIB)
        assert not sees(b, 1, early, 1)
        b.call("reach", device=1, peer=0)
        a.call("allocate", tag="w", size=70 * MIB, seed=2)
        late = b.call("open", handle=a.call("share", tensor=1), size=70 * MIB)
        assert sees(b, 1, early, 1) and sees(b, 1, late, 2)
        a.call("pause")
        memory(group, [0, 0])
        a.call("resume")
        assert sees(b, 1, early, 1) and sees(b, 1, late, 2)
        assert not sees(a, 1, 0, 1), "the owner has enabled nothing"


def test_access_that_the_driver_refuses() -> None:
    """PyTorch hears of it, and may ask again."""
    with programs(1) as group:
        p = group[0]
        tensor = p.call("allocate", tag="w", size=2 * MIB, seed=1)
        p.call("fault", function="cuMemSetAccess")
        message = failure(lambda: p.call("reach", device=1, peer=0), "RuntimeError")
        assert 'region "w"' in message and "peer access to GPU 0" in message
        assert p.call("holds", tensor=tensor, seed=1) and not sees(p, 1, tensor, 1)
        p.call("reach", device=1, peer=0)
        assert sees(p, 1, tensor, 1)


def test_misuse_of_recalled_memory() -> None:
    """What its owner has paused is mapped nowhere in who has opened it: copies are refused there too."""
    with programs(2, AMEM_ENABLE="1") as group:
        a, b = group[0], group[1]
        a.call("allocate", tag="weights", size=2 * MIB, seed=1)
        theirs = b.call("open", handle=a.call("share", tensor=0), size=2 * MIB)
        own = b.call("allocate", tag="other", size=2 * MIB, seed=2)
        for _ in range(2):
            a.call("pause", tags=["weights"])
            for how in range(3):
                for to, source in ((theirs, own), (own, theirs)):
                    message = failure(functools.partial(b.call, "copy", to=to, source=source, how=how), "RuntimeError")
                    assert "paused" in message and "resume" in message
            for how in range(2):
                assert "paused" in failure(functools.partial(b.call, "clear", tensor=theirs, how=how), "RuntimeError")
            a.call("resume")
            b.call("copy", to=own, source=theirs)
            assert b.call("holds", tensor=own, seed=1)
            b.call("write", tensor=own, seed=2)
            b.call("copy", to=own, source=own)
        b.call("close", tensor=theirs)


@pytest.mark.parametrize("who", ["owner", "borrower"])
def test_a_sharer_dies(who: str) -> None:
    """The other one goes on."""
    with programs(2, AMEM_ENABLE="1") as group:
        a, b = group[0], group[1]
        a.call("allocate", tag="weights", size=30 * MIB, seed=1)
        theirs = b.call("open", handle=a.call("share", tensor=0), size=30 * MIB)
        if who == "borrower":
            b.kill()
            a.call("pause")
            memory(group, [0], members=[0])
            a.call("resume")
            assert a.call("holds", tensor=0, seed=1)
            return
        a.call("pause")
        a.kill()
        b.call("pause")
        b.call("resume")
        assert b.call("meminfo") == 0, "the memory has gone with its owner"
        b.call("close", tensor=theirs)
        b.call("allocate", tag="weights", size=30 * MIB, seed=3)
        assert b.call("holds", tensor=theirs, seed=3)


def test_a_sharer_that_is_stopped() -> None:
    """The owner's pause ends in time, names it, and leaves the owner active."""
    with programs(2, AMEM_ENABLE="1", AMEM_TIMEOUT_S="2") as group:
        a, b = group[0], group[1]
        pid = b.call("start_without_nccl", device=0)
        a.call("allocate", tag="weights", size=30 * MIB, seed=1)
        b.call("open", handle=a.call("share", tensor=0), size=30 * MIB)
        os.kill(pid, signal.SIGSTOP)
        try:
            message = failure(lambda: a.call("pause", tags=["weights"]), "DeadlineError")
            assert f"pid {pid}" in message and "let go" in message
            assert a.call("tag_state", tag="weights") == ACTIVE
            assert a.call("holds", tensor=0, seed=1)
        finally:
            os.kill(pid, signal.SIGCONT)
        a.call("resume", tags=["weights"])  # it may have let go since
        a.call("pause", tags=["weights"])
        memory(group, [0, 0])
        a.call("resume")
        assert a.call("holds", tensor=0, seed=1) and b.call("holds", tensor=0, seed=1)


# The default region: PyTorch's own allocator calls cudaMalloc and cudaFree.


def test_default_region() -> None:
    with programs(1) as group:
        p = group[0]
        p.call("default_region", tag="all")
        assert p.call("tag_state", tag="all") == OFF, "the core is loaded by the first allocation"
        sizes = [2 * MIB, 30 * MIB, 100 * MIB]
        tensors = [p.call("torch_allocate", size=size, seed=i) for i, size in enumerate(sizes)]
        cached = p.call("torch_allocate", size=70 * MIB, seed=5)
        p.call("torch_deallocate", tensor=cached)
        full = p.call("meminfo")
        assert full >= sum(sizes) + 70 * MIB
        assert p.call("pause", tags=["all"])["bytes"] == full
        assert p.call("meminfo") == 0
        ordinary = p.call("ordinary", size=8 * MIB, seed=7)
        assert p.call("holds", tensor=ordinary, seed=7) and p.call("meminfo") == 8 * MIB
        p.call("deallocate", tensor=ordinary)
        p.call("resume")
        assert p.call("meminfo") == full
        p.call("pause")
        p.call("empty_cache")  # of paused memory
        p.call("resume")
        assert p.call("meminfo") == full - 70 * MIB
        assert [p.call("holds", tensor=t, seed=i) for i, t in enumerate(tensors)] == [True] * 3
        for tensor in tensors:
            p.call("torch_deallocate", tensor=tensor)
        p.call("empty_cache")
        assert p.call("meminfo") == 0


def test_default_region_and_others() -> None:
    """Each memory goes back to where it is from, whatever the default region is by then."""
    with programs(1) as group:
        p = group[0]
        before = p.call("torch_allocate", size=4 * MIB, seed=1)
        assert p.call("memory_state", tensor=before) == OFF and p.call("meminfo") == 4 * MIB
        p.call("default_region", tag="a", backup="cpu")
        a = p.call("torch_allocate", size=70 * MIB, seed=2)
        p.call("default_region", tag="b", backup="none")
        b = p.call("torch_allocate", size=80 * MIB, seed=3)
        pool = p.call("allocate", tag="a", size=90 * MIB, seed=4)
        p.call("default_region", tag=None)
        after = p.call("torch_allocate", size=6 * MIB, seed=5)
        assert p.call("memory_state", tensor=after) == OFF
        assert p.call("pause", tags=["a"])["bytes"] == 160 * MIB
        assert [p.call("memory_state", tensor=t) for t in (before, a, b, pool, after)] == [
            OFF,
            PAUSED,
            ACTIVE,
            PAUSED,
            OFF,
        ]
        assert p.call("holds", tensor=before, seed=1) and p.call("holds", tensor=b, seed=3)
        p.call("torch_deallocate", tensor=b)
        p.call("empty_cache")
        assert p.call("meminfo") == 10 * MIB
        p.call("resume")
        assert p.call("holds", tensor=a, seed=2) and p.call("holds", tensor=pool, seed=4)
        for tensor in (before, a, after):
            p.call("torch_deallocate", tensor=tensor)
        p.call("empty_cache")
        assert p.call("meminfo") == 90 * MIB
        p.call("deallocate", tensor=pool)
        assert p.call("meminfo") == 0


def test_default_region_on_many_threads() -> None:
    with programs(1) as group:
        p = group[0]
        p.call("default_region", tag="all")
        tensors = p.call("torch_allocate_on_threads", count=12, size=3 * MIB, seed=20)
        assert len(tensors) == 12
        assert [p.call("memory_state", tensor=t) for t in tensors] == [ACTIVE] * 12
        used = p.call("meminfo")
        contents = {t: seed for t in tensors for seed in range(20, 32) if p.call("holds", tensor=t, seed=seed)}
        assert sorted(contents.values()) == list(range(20, 32))
        assert p.call("pause", tags=["all"])["bytes"] == used
        assert p.call("meminfo") == 0
        p.call("resume")
        assert all(p.call("holds", tensor=t, seed=seed) for t, seed in contents.items())


def test_default_region_out_of_memory() -> None:
    """PyTorch's allocator is told so as by the runtime: it gives its cache back and tries again."""
    with programs(1, AMEM_SIM_MEMORY=str(256 * MIB)) as group:
        p = group[0]
        p.call("default_region", tag="all")
        kept = p.call("torch_allocate", size=70 * MIB, seed=1)
        cached = p.call("torch_allocate", size=100 * MIB, seed=2)
        p.call("torch_deallocate", tensor=cached)
        large = p.call("torch_allocate", size=150 * MIB, seed=3)
        assert p.call("holds", tensor=large, seed=3) and p.call("meminfo") == 220 * MIB
        message = failure(lambda: p.call("torch_allocate", size=100 * MIB, seed=4), "RuntimeError")
        assert message == "2: the runtime's own text", "cudaErrorMemoryAllocation"
        p.call("pause", tags=["all"])
        p.call("resume")
        assert p.call("holds", tensor=kept, seed=1) and p.call("holds", tensor=large, seed=3)


def test_a_wrong_default_region() -> None:
    with programs(1) as group:
        p = group[0]
        for tag in ("", "nccl", "a,b", "x" * 65):
            failure(functools.partial(p.call, "default_region", tag=tag), "InvalidArgumentError")
        tensor = p.call("torch_allocate", size=2 * MIB, seed=1)
        assert p.call("memory_state", tensor=tensor) == OFF


def test_default_region_is_shared() -> None:
    with programs(2, AMEM_ENABLE="1") as group:
        a, b = group[0], group[1]
        a.call("default_region", tag="all")
        own = a.call("torch_allocate", size=70 * MIB, seed=1)
        theirs = b.call("open", handle=a.call("share", tensor=own), size=70 * MIB)
        a.call("pause", tags=["all"])
        assert a.call("meminfo") == 0
        a.call("resume")
        assert b.call("holds", tensor=theirs, seed=1)


def test_memory_margin() -> None:
    with programs(1, AMEM_SIM_MEMORY=str(256 * MIB)) as group:
        p = group[0]
        p.call("default_region", tag="all")
        first = p.call("torch_allocate", size=70 * MIB, seed=1)
        p.call("margin", size=120 * MIB)
        assert "2: " in failure(lambda: p.call("torch_allocate", size=70 * MIB, seed=2), "RuntimeError")
        message = failure(lambda: p.call("allocate", tag="other", size=70 * MIB, seed=2), "MemoryError")
        assert f"{186 * MIB} bytes are free, of which a margin of {120 * MIB} stays" in message
        second = p.call("torch_allocate", size=66 * MIB, seed=2)
        ordinary = p.call("ordinary", size=80 * MIB, seed=3)
        p.call("pause", tags=["all"])
        p.call("resume")  # it may use the margin
        assert p.call("holds", tensor=first, seed=1) and p.call("holds", tensor=second, seed=2)
        p.call("deallocate", tensor=ordinary)
        p.call("margin", size=118 * MIB)
        small = p.call("torch_allocate", size=2 * MIB, seed=5)  # it has no slab with room for more
        assert p.call("meminfo") == 138 * MIB and p.call("holds", tensor=small, seed=5)
        p.call("margin", size=0)
        third = p.call("torch_allocate", size=100 * MIB, seed=4)
        assert p.call("holds", tensor=third, seed=4)


def test_the_functions_of_torch_memory_saver() -> None:
    with ranks(1) as group:
        group.init()
        group.comm_init()
        p = group[0]
        assert p.call("tms", verb="pause", tag=None) == 0, "there is nothing of the program's own"
        p.call("default_region", tag="all")
        tensor = p.call("torch_allocate", size=70 * MIB, seed=1)
        p.call("allocate", tag="kv_cache", size=80 * MIB, seed=2, backup="none")
        nccl = p.call("meminfo") - 150 * MIB
        for tag in ("unknown", "nccl", "kv"):
            assert p.call("tms", verb="pause", tag=tag) == 0
        assert p.call("meminfo") == nccl + 150 * MIB
        assert p.call("tms", verb="pause", tag="kv_cache") == 0
        assert p.call("meminfo") == nccl + 70 * MIB
        assert p.call("tms", verb="pause", tag=None) == 0
        assert p.call("meminfo") == nccl and p.call("tag_state", tag="nccl") == ACTIVE
        assert p.call("tms", verb="resume", tag=None) == 0
        assert p.call("meminfo") == nccl + 150 * MIB and p.call("holds", tensor=tensor, seed=1)
        right(group)


# A process that has amem and PyTorch's allocator, and allocates by hand.
PROCESS = """
import ctypes, os, sys
from amem import _library
torch = ctypes.CDLL(os.path.join(os.environ["AMEM_SIM_LIBRARY_DIR"], "libc10_cuda.so"))

def allocate(size=70 << 20):
    pointer = ctypes.c_void_p()
    return torch.c10_allocate(ctypes.byref(pointer), ctypes.c_size_t(size)), pointer

def is_regions(pointer):
    return library.amem_memory_state(pointer) == 2

def well(child):
    assert os.waitpid(child, 0)[1] == 0
"""


def test_fork_before_the_first_allocation(tmp_path: Path) -> None:
    """Neither the hook nor the default region starts CUDA: the child is as good as the parent."""
    script = """
library = _library.load()
assert library.amem_default_region(b"all", 1) == 0
child = os.fork()
status, pointer = allocate()
assert status == 0 and is_regions(pointer) and library.amem_pause(b"all") == 0 and library.amem_resume(b"all") == 0
if child:
    well(child)
os._exit(0)
"""
    python(PROCESS + script, environment(tmp_path))


def test_fork_after_the_first_allocation(tmp_path: Path) -> None:
    """The child goes to the runtime, which refuses it."""
    script = """
library = _library.load()
assert library.amem_default_region(b"all", 1) == 0
status, pointer = allocate()
assert status == 0
assert library.amem_default_region(b"another", 1) == 0
child = os.fork()
if child == 0:
    assert allocate()[0] == 3 and torch.c10_free(pointer) == 3  # not initialised
    os._exit(0)
well(child)
assert is_regions(pointer) and torch.c10_free(pointer) == 0 and not is_regions(pointer)
"""
    python(PROCESS + script, environment(tmp_path))


def test_allocator_out_of_reach(tmp_path: Path) -> None:
    """A PyTorch with the CUDA runtime inside: its memory would be ordinary, without a word."""
    script = """
import ctypes, os
from amem import _library
torch = ctypes.CDLL(os.path.join(os.environ["AMEM_SIM_LIBRARY_DIR"], "static", "libc10_cuda.so"))
library = _library.load()
assert library.amem_default_region(b"all", 1) == 7
assert b"libcudart" in library.amem_last_error()
assert library.amem_default_region(None, 0) == 0
"""
    python(script, environment(tmp_path))


def test_preloaded_in_the_place_of_torch_memory_saver(tmp_path: Path) -> None:
    """The symbols are the process's, NCCL is left alone, and programs without CUDA are as they were."""
    env = environment(tmp_path, LD_PRELOAD=str(LIB / "libamem_hook.so"), AMEM_COMPAT_TMS="1")
    script = """
library = _library.load()
assert ctypes.CDLL(None).tms_pause(None) == 0 and library.amem_state() == 0
assert library.amem_default_region(b"all", 1) == 0
status, pointer = allocate()
assert ctypes.CDLL(None).tms_pause(None) == 0 and library.amem_tag_state(b"all") == 3
assert ctypes.CDLL(None).tms_resume(b"all") == 0 and is_regions(pointer)
"""
    python(PROCESS + script, env)
    assert run(["ls", str(SIM)], env) == run(["ls", str(SIM)], environment(tmp_path))
    maps = run(["cat", "/proc/self/maps"], env)
    assert "libamem_hook.so" in maps and "libamem_nccl.so" not in maps
    wished = {**env, "AMEM_ENABLE": "1"}
    python(PROCESS + "assert _library.load().amem_state() == 1", wished)


# 80 MB are pinned in three parts, and the driver refuses a copy that is of two.
COPY_OF_A_BACKUP = """
import ctypes, os
from amem import _library
from amem._cuda import Device, Driver
sim = os.environ["AMEM_SIM_LIBRARY_DIR"]
device = Device(Driver(os.path.join(sim, "libcuda.so.1")), 0)
cuda, torch = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(os.path.join(sim, "libc10_cuda.so"))
library, size = _library.load(), 80 << 20
weights, other = _library.RegionFunctions(), ctypes.c_void_p()
assert library.amem_region(b"weights", 1, ctypes.byref(weights)) == 0
allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(weights.allocate)
tensor = allocate(size, 0, None)
assert torch.c10_malloc(ctypes.byref(other), ctypes.c_size_t(size)) == 0
content = bytes(range(1, 252)) * (size // 251 + 1)
content = content[:size]
assert cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(tensor), content, ctypes.c_size_t(size)) == 0
assert library.amem_pause(b"weights") == 0
for how in (0, 1):
    for offset in (0, 5 << 20):
        length, backup, found = ctypes.c_size_t(size - offset), ctypes.c_void_p(), ctypes.create_string_buffer(size)
        assert library.amem_backup_pointer(ctypes.c_void_p(tensor + offset), length, ctypes.byref(backup)) == 0
        assert torch.c10_clear(other, ctypes.c_size_t(size), 0) == 0
        copied = torch.c10_copy(other, backup, length, how)
        assert cuda.cuCtxSynchronize() == 0
        assert cuda.cuMemcpyDtoH_v2(found, ctypes.c_uint64(other.value), ctypes.c_size_t(size)) == 0
        print(copied, found.raw[: length.value] == content[offset:], found.raw[length.value :] == bytes(offset))
"""


def test_a_backup_in_place_is_copied_to_a_gpu(tmp_path: Path) -> None:
    """As the weights' are by programs that update others with them, in whole tensors."""
    assert python(COPY_OF_A_BACKUP, environment(tmp_path)).splitlines() == ["0 True True"] * 4


# The driver lets nobody wait for a device while any stream captures, and ends the capture.
CAPTURE = """
import ctypes, os
import amem
from amem import _library
from amem._cuda import Device, Driver
device = Device(Driver(os.path.join(os.environ["AMEM_SIM_LIBRARY_DIR"], "libcuda.so.1")), 0)
cuda, library, weights = ctypes.CDLL("libcuda.so.1"), _library.load(), _library.RegionFunctions()
assert library.amem_region(b"weights", 1, ctypes.byref(weights)) == 0
allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(weights.allocate)
tensor = allocate(80 << 20, 0, None)
amem.pause("weights")
amem.resume("weights")
host = lambda: amem.stats()["regions"][0]["host_bytes"]
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
assert cuda.cuStreamBeginCapture_v2(stream, 2) == 0
kept = host()
try:
    amem.free_host_memory("weights")
except amem.CudaError as error:
    print("CudaError", host() == kept >= 80 << 20)
print(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
amem.free_host_memory("weights")
print(host())
"""


def test_host_memory_is_not_given_back_while_a_graph_is_captured(tmp_path: Path) -> None:
    lines = python(CAPTURE, environment(tmp_path)).splitlines()
    assert lines == ["CudaError True", "901", "0"]  # the capture was invalidated
