"""Regions through the C interface, as PyTorch's allocator and its IPC use them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import MIB, Ranks, failure, memory, needs_libraries, ranks, right

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
