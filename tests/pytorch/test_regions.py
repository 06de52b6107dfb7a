"""Regions: which memory is of which tag, and that a pause takes that and nothing else."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path
from typing import Any

import amem
import pytest
import torch
from amem import _regions

import blocks
from blocks import LARGE, MB, SMALL, Block, gradient, run


@pytest.mark.parametrize("backup", ["cpu", "disk"])
def test_a_pause_gives_memory_back_and_a_resume_brings_contents(backup: Any, tmp_path: Path) -> None:
    amem.set_disk_directory(tmp_path)
    before = Block()
    with amem.region("weights", backup=backup):
        weights = [Block(size) for size in (1, SMALL, 3 * MB, LARGE, 40 * MB)]
    after = Block()
    for _ in range(3):
        in_use = blocks.used()
        assert blocks.given_back() >= sum(block.tensor.numel() for block in weights)
        for block in weights:
            assert torch.equal(amem.cpu_backup(block.tensor), block.host)
        # Somebody else has the memory meanwhile, and leaves other contents in it.
        others = Block(400 * MB)
        before.fill()
        del others
        blocks.collect()
        assert amem.resume().changed
        assert blocks.used() == in_use
        for block in (before, *weights, after):
            block.check()
            block.fill()


def test_without_a_backup_nothing_is_copied_and_addresses_stay() -> None:
    with amem.region("cache", backup="none"):
        cache = [Block(), Block(40 * MB)]
    assert blocks.region("cache", "none")["host_bytes"] == 0
    before = blocks.used()
    did = amem.pause("cache")
    assert did.copied_bytes == 0
    assert before - blocks.used() == did.bytes >= LARGE + 40 * MB
    with pytest.raises(amem.InvalidStateError):
        amem.cpu_backup(cache[0].tensor)
    amem.resume()
    for block in cache:
        block.fill()
        block.check()


def test_each_tag_and_backup_is_on_its_own() -> None:
    made = []
    for tag, backup in (("a", "cpu"), ("a", "none"), ("a", "disk"), ("b", "cpu")):
        with amem.region(tag, backup):  # type: ignore[arg-type]
            made.append(Block())
    a, lost, disk, b = made
    amem.pause("a")
    assert [blocks.state(block.tensor).name for block in made] == ["PAUSED"] * 3 + ["ACTIVE"]
    b.check()
    amem.resume()
    for block in (a, disk, b):
        block.check()
    lost.fill()
    lost.check()


def test_a_region_covers_all_devices_and_starts_cuda_on_none() -> None:
    torch.cuda.set_device(1)
    with amem.region("weights"):
        assert [torch._C._cuda_hasPrimaryContext(device) for device in (0, 1)] == [False, True]
        kept = [Block(device="cuda:0"), Block(device="cuda:1")]
    assert torch.cuda.current_device() == 1
    before = [blocks.used(device) for device in (0, 1)]
    amem.pause()
    assert all(held - blocks.used(device) >= LARGE for device, held in enumerate(before))
    amem.resume()
    for block in kept:
        block.check()


def test_the_workspaces_of_products_are_ordinary() -> None:
    torch.zeros(1, device="cuda")  # CUDA starts
    stream = torch.cuda.Stream()
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
    with amem.region("weights"):
        weights = Block()
        inside = torch.cuda.memory_allocated()
        # What a product does first, and one with a bias.
        torch.cuda.current_blas_handle()
        library._ZN2at4cuda22getCUDABlasLtWorkspaceEv()
        assert torch.cuda.memory_allocated() == inside, "they were there before the region was entered"
    assert blocks.region("weights")["allocations"] == 1
    with torch.cuda.stream(stream), amem.region("weights"):
        inside = torch.cuda.memory_allocated()
        torch.cuda.current_blas_handle()
        assert torch.cuda.memory_allocated() == inside, "each stream has its own"
    blocks.only_paused("weights", [weights], [])


def test_entering_a_region_starts_no_cuda() -> None:
    with amem.region("weights"):
        assert not torch._C._cuda_hasPrimaryContext(0)


def test_the_innermost_region_counts_and_the_outer_one_comes_back() -> None:
    outer, inner, plain = [], [], []
    with amem.region("outer"):
        outer.append(Block())
        with amem.region("inner"):
            inner.append(Block())
            with amem.region("outer"):
                outer.append(Block())
            with amem.disable():
                plain.append(Block())
                with amem.region("inner"):
                    inner.append(Block(SMALL))
                plain.append(Block(SMALL))
            inner.append(Block())
        outer.append(Block(SMALL))
    plain.append(Block())
    assert blocks.ordinary(*plain)
    blocks.only_paused("outer", outer, [*inner, *plain])
    blocks.only_paused("inner", inner, [*outer, *plain])


def test_current_region_follows() -> None:
    def here() -> tuple[str, str] | None:
        region = amem.current_region()
        return None if region is None else (region.tag, region.backup)

    seen = [here()]
    with amem.region("a", "none"):
        seen.append(here())
        with amem.region("b"):
            seen.append(here())
        with amem.disable():
            seen.append(here())
        seen.append(here())
    assert [*seen, here()] == [None, ("a", "none"), ("b", "cpu"), None, ("a", "none"), None]


@pytest.mark.parametrize("tag", ["nccl", "x" * 65])
def test_a_tag_that_the_library_refuses_changes_nothing(tag: str) -> None:
    with amem.region("outer"):
        with pytest.raises(amem.InvalidArgumentError), amem.region(tag):
            pytest.fail("entered")
        here = amem.current_region()
        outer = Block()
    assert here is not None and here.tag == "outer"
    blocks.only_paused("outer", [outer], [])


def test_an_exception_leaves_all_regions() -> None:
    region, kept, plain = amem.region("weights"), [], []
    for _ in range(3):
        with pytest.raises(KeyError), amem.region("outer"), region, amem.disable(), region:
            kept.append(Block())
            raise KeyError
        plain.append(Block())
    assert amem.current_region() is None and torch._C._is_multithreading_enabled()
    blocks.only_paused("weights", kept, plain)


def test_a_failure_of_torch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.cuda.use_mem_pool

    def failing(pool: Any, device: Any = None) -> Any:
        if device == 1:
            monkeypatch.setattr(torch.cuda, "use_mem_pool", real)
            raise RuntimeError("torch")
        return real(pool, device)

    with amem.region("outer"):
        monkeypatch.setattr(torch.cuda, "use_mem_pool", failing)
        with pytest.raises(RuntimeError, match="torch"), amem.region("inner"):
            pytest.fail("entered")
        outer = Block()
        with amem.region("inner"):
            inner = Block()
    assert torch._C._is_multithreading_enabled()
    blocks.only_paused("outer", [outer], [inner])


def test_other_threads_are_outside_until_they_enter() -> None:
    weights, plain, seen = [], [], []
    with amem.region("weights"):
        here = amem.current_region()
        assert here is not None

        def work() -> None:
            seen.append(amem.current_region())
            plain.append(Block())
            with here:
                weights.append(Block())
            plain.append(Block(SMALL))

        run(work)
        weights.append(Block())
    assert seen == [None] and blocks.ordinary(*plain)
    blocks.only_paused("weights", weights, plain)


def test_many_threads_in_one_region_at_once() -> None:
    region, together = amem.region("weights"), threading.Barrier(4, timeout=60)
    weights: list[Block] = []
    plain: list[Block] = []

    def work() -> None:
        for _ in range(4):
            with region:
                together.wait()
                weights.append(Block(SMALL))
                with amem.region("other"), region:
                    weights.append(Block(3 * MB))
                together.wait()
            plain.append(Block(SMALL))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(weights), len(plain)) == (32, 16)
    assert blocks.ordinary(*plain)
    blocks.only_paused("weights", weights, plain)


def test_a_region_is_left_where_it_was_entered() -> None:
    region = amem.region("weights")
    region.__enter__()

    def leave() -> None:
        with pytest.raises(amem.InvalidStateError, match="another thread"):
            region.__exit__(None, None, None)

    run(leave)
    inside = Block()
    region.__exit__(None, None, None)
    outside = Block()
    blocks.only_paused("weights", [inside], [outside])


def test_backward_allocates_in_the_region_of_its_caller() -> None:
    with amem.region("weights"):
        inside = gradient()
    outside = gradient()
    here = threading.get_ident()
    assert blocks.backward_threads[0] == here != blocks.backward_threads[1], "outside, autograd has a thread of its own"
    assert blocks.ordinary(outside)
    blocks.only_paused("weights", [inside], [outside])


def test_freed_memory_is_used_when_the_region_is_entered_again() -> None:
    addresses = set()
    for _ in range(20):
        with amem.region("weights"):
            block = Block()
        addresses.add(block.address)
        block.check()
        del block
    plain = Block()
    assert len(addresses) == 1 and plain.address not in addresses
    assert blocks.region("weights")["allocations"] == 1


def test_freed_memory_is_no_other_tags() -> None:
    for first, second in (("a", "b"), ("b", "a")):
        with amem.region(first):
            freed = Block()
        address = freed.address
        del freed
        blocks.collect()
        with amem.region(second):
            mine = Block()
        assert mine.address != address
        blocks.only_paused(second, [mine], [])
        del mine


def test_much_unused_memory_is_given_back_when_the_region_is_left() -> None:
    size = _regions.UNUSED_BYTES + MB
    cached = Block(LARGE)
    cached_at = cached.address
    del cached
    with amem.region("weights"):
        kept = Block()
        temporary = Block(size)
        del temporary
        inside = blocks.used()
    assert inside - blocks.used() >= size
    kept.check()
    if blocks.KEEPS_CACHE:
        unused = {segment["address"] for segment in blocks.segments() if not segment["allocated_size"]}
        assert cached_at in unused, "ordinary memory stays cached"
    held = blocks.used()
    del kept
    blocks.collect()
    assert held - blocks.used() >= LARGE, "what was in use goes back once it is freed"


def test_a_pause_gives_unused_memory_back_first() -> None:
    kept = {}
    for tag in ("a", "b"):
        with amem.region(tag):
            freed, kept[tag] = Block(30 * MB), Block()
            del freed
    ordinary = Block(40 * MB)
    del ordinary
    in_use = blocks.used()
    did = amem.pause("a")
    assert did.bytes == did.copied_bytes == LARGE, "what is not used is not copied"
    assert in_use - blocks.used() >= 30 * MB + LARGE
    amem.resume()
    assert in_use - blocks.used() >= 30 * MB, "nor does it come back"
    assert blocks.region("b")["allocated_bytes"] >= 30 * MB + LARGE
    for block in kept.values():
        block.check()


def test_what_is_allocated_while_paused_is_there() -> None:
    """Not from what a paused segment has free, whether the region was entered at the pause or is now."""
    with amem.region("weights") as region:
        kept, freed = Block(SMALL), Block(SMALL)
        with amem.region("other"), region:
            freed_too = Block(SMALL)
            amem.pause("weights")
            del freed, freed_too
            first = Block(SMALL)
        second = Block(SMALL)
    with region:
        third = Block(SMALL)
    for block in (first, second, third):
        assert blocks.state(block.tensor) is amem.State.ACTIVE
        block.check()
    amem.resume()
    for block in (kept, first, second, third):
        block.check()
    blocks.only_paused("weights", [kept, first, second, third], [])


def test_a_thread_that_is_in_a_region_during_a_pause_has_new_pools_next_time() -> None:
    entered, paused = threading.Event(), threading.Event()

    def work() -> None:
        with amem.region("weights"):
            block = Block(SMALL)
            entered.set()
            assert paused.wait(60)
        assert blocks.state(block.tensor) is amem.State.PAUSED
        del block
        with amem.region("weights"):
            Block(SMALL).check()

    thread = threading.Thread(target=run, args=(work,))
    thread.start()
    assert entered.wait(60)
    amem.pause()
    paused.set()
    run(thread.join)
    assert blocks.region("weights")["allocations"] == 2


def test_freeing_while_paused() -> None:
    with amem.region("weights"):
        kept, freed = [Block() for _ in range(3)], [Block() for _ in range(3)]
    in_use = blocks.used()
    amem.pause()
    freed.clear()
    blocks.collect()
    amem.resume()
    for block in kept:
        block.check()
    amem.pause()
    amem.resume()
    blocks.collect()
    assert in_use - blocks.used() >= 3 * LARGE
    for block in kept:
        block.check()


def test_copies_of_paused_memory_are_refused_and_cost_nothing_else() -> None:
    plain = Block()
    with amem.region("weights"):
        weights = Block()
    amem.pause()
    host = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
    for copy in (
        weights.tensor.cpu,
        lambda: plain.tensor.copy_(weights.tensor),
        lambda: weights.tensor.copy_(plain.tensor),
        lambda: host.copy_(weights.tensor, non_blocking=True),
        weights.tensor.clone,
    ):
        with pytest.raises(RuntimeError, match="memory that is paused was refused: resume its tag first"):
            copy()
    plain.check()
    amem.resume()
    plain.check()
    weights.check()


def test_a_pause_waits_for_the_work_of_all_streams() -> None:
    with amem.region("weights"):
        weights = Block(50 * MB)
    weights.host = blocks.bytes_of(50 * MB).pin_memory()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            weights.tensor.copy_(weights.host, non_blocking=True)
    amem.pause()
    amem.resume()
    weights.check()


def test_running_out_of_memory_in_a_region_is_torchs_error() -> None:
    with amem.region("weights"):
        kept = Block(300 * MB)
    with pytest.raises(torch.cuda.OutOfMemoryError), amem.region("weights"):
        Block(300 * MB)
    assert amem.current_region() is None
    kept.check()
    amem.pause()
    other = Block(300 * MB)
    other.check()
    with pytest.raises(torch.cuda.OutOfMemoryError) as failure:
        amem.resume()
    assert isinstance(failure.value, amem.OutOfMemoryError)
    assert (failure.value.needed or 0) >= 300 * MB > (failure.value.free or 0) > 0
    del other
    blocks.collect()
    amem.resume()
    kept.check()


def test_outside_of_regions_torch_gives_its_cache_back_when_memory_runs_out() -> None:
    with amem.region("weights"):
        weights = Block(150 * MB)
    freed = Block(250 * MB)
    del freed
    Block(300 * MB).check()
    weights.check()


def test_inside_of_a_region_torch_2_11_keeps_its_cache_when_memory_runs_out() -> None:
    torch.zeros(1, device="cuda")
    with amem.region("weights"):
        pass  # workspaces would otherwise take a part of the block
    freed = Block(250 * MB)
    del freed
    if blocks.KEEPS_CACHE:
        with pytest.raises(torch.cuda.OutOfMemoryError), amem.region("weights"):
            Block(300 * MB)
        torch.cuda.empty_cache()
    with amem.region("weights"):
        weights = Block(300 * MB)
    blocks.only_paused("weights", [weights], [])


def test_a_child_of_fork_leaves_regions_and_is_refused() -> None:
    with amem.region("weights"):
        kept = Block()
        with _regions._lock:  # as another thread that enters a region has
            child = os.fork()
        if child == 0:
            signal.alarm(20)
    if child == 0:
        try:
            amem.pause()
        except amem.AmemError as refusal:
            os._exit(7 if "fork" in str(refusal) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    blocks.only_paused("weights", [kept], [])


def test_settings_that_rule_regions_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(amem.TorchError, match="PYTORCH_NO_CUDA_MEMORY_CACHING is set"), amem.region("weights"):
        pytest.fail("entered")


# The switch at run time.


def test_regions_stay_themselves_when_expandable_segments_are_switched_on() -> None:
    with amem.region("weights"):
        before = Block()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with amem.region("weights"):
        after = Block()
    plain = Block()
    assert blocks.segment_of(plain)["is_expandable"]
    blocks.only_paused("weights", [before, after], [plain])
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    with amem.region("weights"):
        last = Block()
    blocks.only_paused("weights", [before, after, last], [plain])


# torch's own pools.


def test_a_pool_of_the_programs_own_is_ordinary() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        plain = Block()
        with amem.region("weights"):
            weights = Block()
        more = Block()
    with amem.region("weights"), torch.cuda.use_mem_pool(pool):
        inside = Block()
    assert blocks.ordinary(plain, more, inside)
    blocks.only_paused("weights", [weights], [plain, more, inside])
