"""One rank of a scenario: `ranks.py SCENARIO [JSON parameters]`, started by run.py.

The collectives are torch.distributed's, on the libnccl that PyTorch ships.
Data are fresh random integers each time, so that a sum is exact in float32
too; outputs are poisoned before and compared whole after.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import launch

DEVICE = "cuda"
BACKEND = "nccl"

# From 16 bytes to 256 MB; two are multiples of nothing that NCCL likes.
SIZES = (16, 1 << 10, 20_004, 1 << 17, 1 << 20, 5_000_004, 1 << 24, 1 << 26, 100_000_000, 1 << 28)
GUARD = 64
POISON = -1
VALUES = 1 << 18
# The driver keeps page tables of pinned host memory on the device, 8 bytes for 4 KiB.
MEMORY_SLACK = 32 << 20
GIVEN_BACK = 0.99

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

# How NCCL moves an all-reduce: each pair is forced on a group of its own.
PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Ring", "Tree")


class CheckFailed(Exception):
    pass


class NotPossible(Exception):
    """The scenario needs something that this PyTorch does not have."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailed(message)


@dataclass
class Group:
    handle: Any
    name: str
    rounds: int = 0


class Rank:
    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.peers = launch.Peers()
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.job = self.peers.index // self.world
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.device = torch.device(DEVICE, int(os.environ["LOCAL_RANK"]))
        self.seed = self.peers.gather(int.from_bytes(os.urandom(6), "little"))[self.job * self.world]
        self.generator = torch.Generator(self.device)
        elements = int(params.get("max_bytes", SIZES[-1])) // 4 + GUARD
        self.source, self.output, self.expected, self.scratch = (
            torch.zeros(elements, dtype=torch.int32, device=self.device) for _ in range(4)
        )
        self.cycles = 0
        self.pauses: list[float] = []
        self.resumes: list[float] = []
        self.given: list[float] = []
        self.nccl_bytes = 0
        self.copied_bytes = 0
        self.warm()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(s for s in SIZES if s // 4 + GUARD <= self.source.numel())

    def stage(self, name: str) -> None:
        launch.report(stage=name)

    def warm(self) -> None:
        """Loads the kernels that verify() needs, so that they are not counted as NCCL's memory."""
        for dtype in (torch.int32, torch.float32):
            a, b = self.output.view(dtype)[:1024], self.expected.view(dtype)[:1024]
            a.random_(0, VALUES, generator=self.generator)
            b.fill_(0)
            b.add_(a)
            b.copy_(a)
            check(torch.equal(a, b), "a copy on the device differs")
            self.wrong(a, b)

    # Groups

    def start(self, **options: Any) -> Group:
        dist.init_process_group(BACKEND, init_method="env://", **options)
        return Group(dist.group.WORLD, "world")

    def new_group(self, name: str, ranks: list[int] | None = None) -> Group | None:
        """A group of its own; None for a rank outside it. Every rank must call it."""
        handle = dist.new_group(ranks)
        return Group(handle, name) if ranks is None or self.rank in ranks else None

    def pair_groups(self) -> list[Group]:
        pairs = [[a, a + 1] for a in range(0, self.world - 1, 2)]
        half = self.world // 2
        if half > 1:
            pairs += [[a, a + half] for a in range(half)]
        groups = [self.new_group(f"pair{a}-{b}", [a, b]) for a, b in pairs]
        return [g for g in groups if g is not None]

    @staticmethod
    def destroy(group: Group) -> None:
        dist.destroy_process_group(group.handle)
        group.handle = None
        gc.collect()

    # Collectives

    def data(self, out: torch.Tensor, group: Group, operation: str, member: int) -> torch.Tensor:
        """What a member of the group contributes; any rank can make it again."""
        key = (self.seed, sum(group.name.encode()), group.rounds, COLLECTIVES.index(operation), member)
        self.generator.manual_seed(hash(key) & (2**63 - 1))
        return out.random_(0, VALUES, generator=self.generator)

    @staticmethod
    def wrong(got: torch.Tensor, wanted: torch.Tensor) -> int:
        return int((got != wanted).sum().item())

    def verify(self, group: Group, size: int, operations: tuple[str, ...] = COLLECTIVES) -> None:
        group.rounds += 1
        dtype = (torch.int32, torch.float32)[group.rounds % 2]
        for operation in operations:
            self.verify_one(group, size, operation, dtype)

    def verify_one(self, group: Group, size: int, operation: str, dtype: torch.dtype) -> None:
        handle = group.handle
        me, members = dist.get_rank(handle), dist.get_world_size(handle)
        chunk = max(1, size // 4 // members)
        total = chunk * members
        source, output = self.source.view(dtype), self.output.view(dtype)
        expected, scratch = self.expected.view(dtype)[:total], self.scratch.view(dtype)[:total]
        self.source[:total].fill_(POISON)
        output[: total + GUARD].fill_(POISON)
        mine = slice(me * chunk, (me + 1) * chunk)

        if operation == "all_reduce":
            written = total
            self.data(output[:total], group, operation, me)
            dist.all_reduce(output[:total], group=handle)
            expected.fill_(0)
            for member in range(members):
                expected.add_(self.data(scratch, group, operation, member))
        elif operation == "all_gather":
            written = total
            self.data(source[:chunk], group, operation, me)
            dist.all_gather_into_tensor(output[:total], source[:chunk], group=handle)
            for member in range(members):
                self.data(expected[member * chunk : (member + 1) * chunk], group, operation, member)
        elif operation == "reduce_scatter":
            written = chunk
            self.data(source[:total], group, operation, me)
            dist.reduce_scatter_tensor(output[:chunk], source[:total], group=handle)
            expected.fill_(0)
            for member in range(members):
                expected[:chunk].add_(self.data(scratch, group, operation, member)[mine])
        elif operation == "all_to_all":
            written = total
            self.data(source[:total], group, operation, me)
            dist.all_to_all_single(output[:total], source[:total], group=handle)
            for member in range(members):
                expected[member * chunk : (member + 1) * chunk] = self.data(scratch, group, operation, member)[mine]
        elif operation == "broadcast":
            written = total
            root = group.rounds % members
            if me == root:
                self.data(output[:total], group, operation, root)
            dist.broadcast(output[:total], src=dist.get_global_rank(handle, root), group=handle)
            self.data(expected, group, operation, root)
        elif operation == "send_recv":
            written = total
            left, right = ((me + step) % members for step in (-1, 1))
            self.data(source[:total], group, operation, me)
            requests = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, source[:total], dist.get_global_rank(handle, right), handle),
                    dist.P2POp(dist.irecv, output[:total], dist.get_global_rank(handle, left), handle),
                ]
            )
            for request in requests:
                request.wait()
            self.data(expected, group, operation, left)
        else:
            raise ValueError(operation)

        if not torch.equal(output[:written], expected[:written]):
            count = self.wrong(output[:written], expected[:written])
            poison = self.wrong(output[:written], torch.full_like(output[:written], POISON))
            raise CheckFailed(
                f"{operation} of {size} bytes on {group.name}, cycle {self.cycles}: {count} of {written} "
                f"elements are wrong, {written - poison} were not written"
            )
        check(
            bool((output[written : written + GUARD] == POISON).all().item()),
            f"{operation} of {size} bytes on {group.name} wrote past its output",
        )

    # Memory, pause and resume

    def used(self) -> int:
        """Device memory in use by all processes. What torch only caches is given back first."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def own_bytes(self) -> int:
        """Device memory that amem holds for NCCL in this process and can give back."""
        import amem

        stats: Any = amem.stats()
        return int(stats["device_bytes"]) - sum(int(d["resident_bytes"]) for d in stats["devices"] or [])

    def pause(self, active: bool = True) -> int:
        """Pauses and checks that the device has the memory when that returns. Returns the use before.

        Every process of the step must call it; only the active ones pause.
        """
        import amem

        torch.cuda.synchronize()
        self.peers.barrier()
        before = self.used()
        self.peers.barrier()
        if active:
            nccl = self.own_bytes()
            check(nccl > 0, "amem holds no memory for NCCL: nothing would be tested")
            self.nccl_bytes = max(self.nccl_bytes, nccl)
            started = time.perf_counter()
            transition = amem.pause()
            self.pauses.append(time.perf_counter() - started)
            check(transition.changed, "pause changed nothing")
            check(transition.bytes > 0, "pause released nothing")
            self.copied_bytes = transition.copied_bytes
            # Before any barrier: what has returned here is free, whoever else had mapped it.
            given = before - self.used()
            self.given.append(given / nccl)
            check(transition.held_bytes == 0, f"others hold {transition.held_bytes} bytes: {transition.held_by}")
            check(
                given >= GIVEN_BACK * nccl,
                f"the device got {given} bytes back, NCCL held {nccl} ({100 * given / nccl:.2f} %)",
            )
        self.peers.barrier()
        return before

    def scribble(self) -> None:
        """Uses the memory that NCCL gave back, as the other half of the job would."""
        free, _ = torch.cuda.mem_get_info()
        size = min(free - (1 << 30), 2 * self.nccl_bytes)
        if size > 0:
            block = torch.full((int(size),), 0xA5, dtype=torch.uint8, device=self.device)
            check(int(block[-1].item()) == 0xA5, "the memory given back does not hold data")
            del block
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def resume(self, before: int, active: bool = True) -> None:
        import amem

        self.peers.barrier()
        if active:
            started = time.perf_counter()
            transition = amem.resume()
            self.resumes.append(time.perf_counter() - started)
            check(transition.changed, "resume changed nothing")
            self.cycles += 1
        self.peers.barrier()
        after = self.used()
        check(
            abs(after - before) <= MEMORY_SLACK,
            f"device memory in use was {before} before the pause and is {after} after the resume",
        )
        self.peers.barrier()

    def cycle(self, groups: list[Group]) -> None:
        """Verified collectives, pause, foreign use of the memory, resume, verified collectives."""
        number = self.cycles
        sizes = self.sizes
        self.stage(f"cycle {number}: before")
        for group in groups:
            self.verify(group, sizes[(number + 3) % len(sizes)])
        self.stage(f"cycle {number}: pause")
        before = self.pause()
        self.scribble()
        self.stage(f"cycle {number}: resume")
        self.resume(before)
        self.stage(f"cycle {number}: after")
        for size in (sizes[number % len(sizes)], sizes[(number + 5) % len(sizes)]):
            for group in groups:
                self.verify(group, size)

    def run_cycles(self, groups: list[Group]) -> None:
        self.stage("first collectives")
        for group in groups:
            self.verify(group, 1 << 20)
        for _ in range(int(self.params["cycles"])):
            self.cycle(groups)

    def finish(self, groups: list[Group]) -> None:
        self.stage("destroy")
        for group in groups:
            if group.name != "world":
                self.destroy(group)
        dist.destroy_process_group()

    def summary(self) -> dict[str, Any]:
        values: dict[str, Any] = {"cycles": self.cycles}
        if self.pauses:
            values.update(
                nccl_bytes=self.nccl_bytes,
                copied_bytes=self.copied_bytes,
                given_back=min(self.given),
                first_pause_s=self.pauses[0],
                pause_s=statistics.median(self.pauses[1:] or self.pauses),
                resume_s=statistics.median(self.resumes) if self.resumes else None,
            )
        return values


class Storm:
    """Thousands of collectives on groups of all ranks, every element of each compared, on the device.

    Nothing waits for a result: wrong elements are counted on the device and
    the host looks at the counts in settle(). What a member sends is a part of
    its row of a table that every rank has, at an offset of its own each time.
    """

    KINDS = (*COLLECTIVES[:5],) * 4 + COLLECTIVES[5:]

    def __init__(self, r: Rank, groups: list[Group], max_elements: int) -> None:
        self.rank, self.world, self.groups, self.max_elements = r.rank, r.world, groups, max_elements
        self.random = random.Random(f"{r.seed} {groups[0].name}")
        generator = torch.Generator(r.device)
        self.table = torch.empty((r.world, 2 * max_elements), dtype=torch.int32, device=r.device)
        for member in range(r.world):
            generator.manual_seed((r.seed + member) & (2**63 - 1))
            self.table[member].random_(-(2**31), 2**31 - 1, generator=generator)
        self.sums = torch.zeros_like(self.table[0])
        for row in self.table:
            self.sums += row  # wraps, as NCCL's sums do
        self.output = torch.zeros(max_elements, dtype=torch.int32, device=r.device)
        self.wrong = torch.zeros(len(groups), dtype=torch.int64, device=r.device)
        self.done = 0

    def add(self, group: Group) -> None:
        self.groups.append(group)
        self.wrong = torch.cat([self.wrong, self.wrong.new_zeros(1)])

    def elements(self, limit: int) -> int:
        """From 1 to the limit; as many below its square root as above."""
        return int(limit ** self.random.random())

    def run(self, count: int) -> None:
        for _ in range(count):
            which = self.random.randrange(len(self.groups))
            kind = self.random.choice(self.KINDS)
            self.one(which, kind, self.elements(self.max_elements // self.world))

    def one(self, which: int, kind: str, n: int) -> None:
        """n elements a rank; all ranks draw the same numbers."""
        world, me, handle = self.world, self.rank, self.groups[which].handle
        at = self.random.randrange(2 * self.max_elements - world * n + 1)
        mine = self.table[me, at : at + world * n]
        small, large = self.output[:n], self.output[: world * n]
        if kind == "all_reduce":
            got, wanted = large, self.sums[at : at + world * n]
            got.copy_(mine)
            dist.all_reduce(got, group=handle)
        elif kind == "all_gather":
            got, wanted = large.view(world, n), self.table[:, at : at + n]
            dist.all_gather_into_tensor(large, mine[:n], group=handle)
        elif kind == "reduce_scatter":
            got, wanted = small, self.sums[at + me * n : at + me * n + n]
            dist.reduce_scatter_tensor(small, mine, group=handle)
        elif kind == "all_to_all":
            got, wanted = large.view(world, n), self.table[:, at + me * n : at + me * n + n]
            dist.all_to_all_single(large, mine, group=handle)
        elif kind == "broadcast":
            root = self.random.randrange(world)
            got, wanted = large, self.table[root, at : at + world * n]
            if me == root:
                got.copy_(wanted)
            dist.broadcast(got, src=root, group=handle)
        else:
            left, right = (me - 1) % world, (me + 1) % world
            got, wanted = large, self.table[left, at : at + world * n]
            sent = dist.P2POp(dist.isend, mine, right, handle)
            for request in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, got, left, handle)]):
                request.wait()
        self.wrong[which] += (got != wanted).sum()
        self.done += 1

    def settle(self) -> None:
        counts = self.wrong.tolist()
        bad = ", ".join(f"{n} on {g.name}" for g, n in zip(self.groups, counts) if n)
        check(not bad, f"wrong elements after {self.done} collectives: {bad}")


# Scenarios. Each returns what the table should say besides the rank's summary.


def groups(r: Rank) -> dict[str, Any]:
    """1, 2 or 8 groups of all ranks; with 8, groups of two ranks besides."""
    world = r.start()
    count = int(r.params["groups"])
    made = [world] if count == 1 else [g for i in range(count) if (g := r.new_group(f"group{i}"))]
    if r.params.get("pairs"):
        made += r.pair_groups()
    r.run_cycles(made)
    if r.params.get("control_only"):
        check(r.copied_bytes < r.nccl_bytes / 4, f"{r.copied_bytes} of {r.nccl_bytes} bytes were copied")
    r.finish(made)
    return {}


def split(r: Rank) -> dict[str, Any]:
    """Groups that NCCL splits off a parent, which they may share resources with."""
    world = r.start(device_id=r.device)
    r.verify(world, 1 << 20)
    made = [world]
    halves = [list(range(s, min(s + 2, r.world))) for s in range(0, r.world, 2)]
    for number, ranks in enumerate(([*range(r.world)], halves[0])):
        group = r.new_group(f"bound{number}", ranks)
        if group:
            made.append(group)
    how = "new_group of a bound group"
    if hasattr(dist, "split_group"):
        handle = dist.split_group(split_ranks=halves)
        if handle is not None:
            made.append(Group(handle, "split"))
        how += ", split_group"
    r.run_cycles(made)
    r.finish(made)
    return {"note": how}


def graph(r: Rank) -> dict[str, Any]:
    """A CUDA graph that captured collectives before the first pause is replayed after each."""
    world = r.start()
    made = [world, *(g for i in range(2) if (g := r.new_group(f"group{i}")))]
    elements = 1 << 22
    for group in made:
        r.verify(group, 1 << 20)
        r.verify(group, 4 * elements)
    inputs, sums, gathered, captured = _capture(r, made, elements)

    def replay() -> None:
        for group, source, total, parts in zip(made, inputs, sums, gathered):
            group.rounds += 1
            r.data(source, group, "all_reduce", r.rank)
            total.fill_(POISON)
            parts.fill_(POISON)
        captured.replay()
        for group, total, parts in zip(made, sums, gathered):
            expected = torch.zeros_like(total)
            for member in range(r.world):
                piece = r.data(torch.empty_like(total), group, "all_reduce", member)
                expected += piece
                got = parts[member * elements : (member + 1) * elements]
                check(torch.equal(got, piece), f"replayed all-gather on {group.name} is wrong, cycle {r.cycles}")
            check(torch.equal(total, expected), f"replayed all-reduce on {group.name} is wrong, cycle {r.cycles}")

    replay()
    for _ in range(int(r.params["cycles"])):
        r.stage(f"cycle {r.cycles}")
        before = r.pause()
        r.scribble()
        r.resume(before)
        replay()
        for group in made:
            r.verify(group, r.sizes[r.cycles % len(r.sizes)])
        replay()
    r.stage("destroy")
    # NCCL waits for ever for a graph that holds a communicator: graphs go first.
    captured.reset()
    r.finish(made)
    return {}


def _capture(
    r: Rank, made: list[Group], elements: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], Any]:
    inputs = [torch.zeros(elements, dtype=torch.float32, device=r.device) for _ in made]
    sums = [torch.zeros_like(t) for t in inputs]
    gathered = [torch.zeros(elements * r.world, dtype=torch.float32, device=r.device) for _ in made]
    torch.cuda.synchronize()
    r.peers.barrier()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        for group, source, total, parts in zip(made, inputs, sums, gathered):
            total.copy_(source)
            dist.all_reduce(total, group=group.handle)
            dist.all_gather_into_tensor(parts, source, group=group.handle)
    torch.cuda.synchronize()
    return inputs, sums, gathered, captured


def stress(r: Rank) -> dict[str, Any]:
    """Each protocol and algorithm on a group of its own, in graphs too: thousands of collectives after each resume."""
    descriptor, log = tempfile.mkstemp(prefix="gpu-step-")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="TUNING", NCCL_DEBUG_FILE=log)
    world = r.start()
    storm = Storm(r, [world], r.source.numel() - GUARD)
    made = storm.groups
    for algorithm in ALGORITHMS:
        for protocol in PROTOCOLS:
            r.stage(f"first collectives, {algorithm} {protocol}")
            group = r.new_group(f"{algorithm} {protocol}")
            assert group is not None
            storm.add(group)
            # Read when the communicator is made, which is at its first collective.
            os.environ.update(NCCL_ALGO=f"allreduce:{algorithm}", NCCL_PROTO=protocol)
            for kind in COLLECTIVES:
                storm.one(len(made) - 1, kind, 1 << 10)
                storm.one(len(made) - 1, kind, storm.max_elements // r.world)
    storm.settle()
    if r.rank == 0:  # which logs what a communicator takes
        check(forced(Path(log).read_text()), "NCCL did not take the protocols and algorithms that were asked for")
    os.close(descriptor)
    os.unlink(log)  # NCCL writes on, to nobody

    r.stage("capture")
    storm.run(200)
    torch.cuda.synchronize()
    r.peers.barrier()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        storm.run(20 * len(made))
    torch.cuda.synchronize()

    for _ in range(int(r.params["cycles"])):
        r.stage(f"cycle {r.cycles}")
        before = r.pause()
        r.scribble()
        r.resume(before)
        if r.cycles % 2:  # first a graph, or first what the host launches
            captured.replay()
        storm.run(int(r.params["collectives"]))
        captured.replay()
        storm.settle()
    r.stage("destroy")
    captured.reset()
    r.finish(made)
    replayed = 20 * len(made) * (r.cycles + (r.cycles + 1) // 2)
    return {"note": f"{storm.done} collectives, {replayed} replayed in graphs", "collectives": storm.done + replayed}


def forced(log: str) -> bool:
    """Whether NCCL's log of rank 0 has an all-reduce with each algorithm and protocol."""
    taken = set(re.findall(r"AllReduce: \d+ Bytes -> Algo (\S+) proto (\S+)", log))
    return {(a.upper(), p.upper()) for a, p in taken} >= {(a.upper(), p.upper()) for a in ALGORITHMS for p in PROTOCOLS}


def connecting(r: Rank) -> dict[str, Any]:
    """Communicators made and connected by several threads at once, while collectives are under way on another.

    With stock NCCL too: whether a hang is amem's.
    """
    stock = bool(r.params.get("stock"))
    world = r.start()
    elements = 1 << 18
    busy = Storm(r, [world], elements)
    busy.run(100)
    busy.settle()
    collectives = 0
    # Made once: torch hands out 32 streams in turn, also to groups, and a thread whose
    # stream is another group's as well would wait for a collective that waits for it.
    cuda: Any = torch.cuda  # torch's type hints leave this constructor out
    streams = [cuda.Stream() for _ in range(int(r.params["groups"]))]
    for number in range(int(r.params["rounds"])):
        made = [g for i in range(int(r.params["groups"])) if (g := r.new_group(f"round{number}-{i}"))]
        storms = [Storm(r, [group], elements) for group in made]
        for kind in COLLECTIVES:  # the first makes the communicators, and each connects in its own way
            r.stage(f"round {number}: first {kind}")
            at_once(r, busy, storms, streams, kind)
        if not stock:
            r.stage(f"round {number}: pause")
            before = r.pause()
            r.scribble()
            r.resume(before)
        for kind in COLLECTIVES * int(r.params.get("repeats", 1)):
            r.stage(f"round {number}: {kind} after")
            at_once(r, busy, storms, streams, kind)
        for storm in (busy, *storms):
            storm.settle()
        collectives += sum(s.done for s in storms)
        r.stage(f"round {number}: destroy")
        for group in made:
            r.destroy(group)
        r.peers.barrier()
        launch.report(rounds=number + 1)
    r.finish([world])
    return {"note": f"{collectives} collectives in threads, {busy.done} under way meanwhile"}


def at_once(r: Rank, busy: Storm, storms: list[Storm], streams: list[Any], kind: str) -> None:
    """A collective on each storm, in a thread and on a stream of its own, while others are under way.

    What is under way must not need a thread that may be waiting for the
    driver: all ranks have launched it before, and no thread waits for its own.
    """
    failures: list[BaseException] = []
    busy.run(100)
    r.peers.barrier()

    def work(storm: Storm, stream: Any) -> None:
        try:
            torch.cuda.set_device(r.device)
            with torch.cuda.stream(stream):
                storm.one(0, kind, storm.max_elements // r.world)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(storms, streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    torch.cuda.synchronize()
    r.peers.barrier()


def turn_held(r: Rank) -> dict[str, Any]:
    """Groups connect while other threads' calls have the turn of NCCL's memory: the launches wait for the imports.

    A thread resumes what is active and gives host memory back, and with
    AMEM_HOST_PREALLOC=1 amem gets it ahead again, all the time.
    """
    import amem

    world = r.start()
    r.verify(world, 1 << 20)
    ended = threading.Event()
    calls = 0
    failures: list[BaseException] = []

    def hold() -> None:
        nonlocal calls
        try:
            while not ended.is_set():
                check(not amem.resume("nccl").changed, "a resume of active memory changed something")
                amem.free_host_memory("nccl")
                calls += 1
        except BaseException as error:
            failures.append(error)

    holder = threading.Thread(target=hold)
    holder.start()
    connected = 0
    try:
        for number in range(int(r.params["rounds"])):
            r.stage(f"round {number}")
            made = [g for i in range(4) if (g := r.new_group(f"round{number}-{i}"))]
            for group in made:
                r.verify(group, 1 << 20)
            connected += len(made)
            time.sleep(0.3 * (number % 5))  # after a second of rest, host memory is got ahead
            for group in made:
                r.destroy(group)
    finally:
        ended.set()
        holder.join()
    if failures:
        raise failures[0]
    r.cycle([world])
    r.finish([world])
    return {"note": f"{connected} groups connected during {calls} calls"}


def churn(r: Rank) -> dict[str, Any]:
    """Groups created and destroyed, in every second round with a graph; with stock NCCL too, to compare."""
    stock = bool(r.params.get("stock"))
    r.start()
    elements = 1 << 18
    empty: list[int] = []
    held: list[int] = []
    active: list[int] = []
    worst = 1.0
    r.peers.barrier()
    base = r.used()
    for number in range(int(r.params["rounds"])):
        r.stage(f"round {number}")
        made = [g for i in range(int(r.params["groups"])) if (g := r.new_group(f"round{number}-{i}"))]
        for group in made:
            r.verify(group, 1 << 20)
            r.verify(group, 1 << 24)
        kept = _capture(r, made, elements) if number % 2 else None
        if kept:
            kept[3].replay()
        r.peers.barrier()
        active.append(r.used())
        if not stock:
            before = r.pause()
            paused = r.used()
            r.scribble()
            r.resume(before)
            for group in made:
                r.verify(group, 20_004)
        if kept:
            kept[3].replay()
            torch.cuda.synchronize()
            kept[3].reset()
        for group in made:
            r.destroy(group)
        r.peers.barrier()
        time.sleep(0.1)
        plain, kept = kept is None, None
        empty.append(r.used())
        if not stock:
            held.append(r.own_bytes())
            # What destroying the groups gives back is an independent measure of what
            # NCCL held. A graph's own memory would blur it.
            destroyed = active[-1] - empty[-1]
            if plain and number > 1 and destroyed > 0:
                worst = min(worst, (before - paused + MEMORY_SLACK) / destroyed)
        r.peers.barrier()
    r.stage("compare")
    # The first rounds load kernels and fill pools, in stock NCCL as well.
    growth = empty[-1] - empty[min(2, len(empty) - 1)]
    if not stock:
        check(held[-1] <= held[min(2, len(held) - 1)], f"amem's memory after each round grows: {held}")
        check(worst >= GIVEN_BACK, f"a pause gave back {100 * worst:.1f} % of what destroying the groups gives back")
    dist.destroy_process_group()
    return {
        "base": base,
        "leftover": empty[-1] - base,
        "growth": growth,
        "nccl_active": max(active) - empty[-1],
        "empty": empty,
        "held": held,
    }


def colocated(r: Rank) -> dict[str, Any]:
    """Two jobs on the same GPUs, each a group ID of its own: one works while the other is paused."""
    import amem

    world = r.start()
    made = [world, *(g for i in range(2) if (g := r.new_group(f"group{i}")))]
    wanted = int(os.environ["AMEM_GROUPID"])
    check(amem.get_group_id() == wanted, f"group ID is {amem.get_group_id()}, not {wanted}")
    sizes = r.sizes

    def in_turn(turn_sizes: tuple[int, ...]) -> None:
        # Kernels of two jobs that wait for their peers share a GPU's time slices badly.
        for turn in range(2):
            if r.job == turn:
                for size in turn_sizes:
                    for group in made:
                        r.verify(group, size)
            torch.cuda.synchronize()
            r.peers.barrier()

    # Every size once: what NCCL connects later would look like memory lost in a cycle.
    r.stage("first collectives")
    in_turn(sizes)
    for number in range(int(r.params["cycles"])):
        for job in range(2):
            r.stage(f"cycle {number}: job {job} pauses")
            before = r.pause(active=r.job == job)
            r.stage(f"cycle {number}: the other works")
            if r.job != job:
                for size in (sizes[number % len(sizes)], sizes[(number + 5) % len(sizes)]):
                    for group in made:
                        r.verify(group, size)
            r.used()
            r.stage(f"cycle {number}: job {job} resumes")
            r.resume(before, active=r.job == job)
            in_turn((sizes[(number + 2) % len(sizes)],))
    r.stage("both paused")
    with amem.paused():
        r.peers.barrier()
        check(amem.state() is amem.State.PAUSED, "not paused inside amem.paused()")
        r.peers.barrier()
    r.peers.barrier()
    in_turn((1 << 20,))
    r.finish(made)
    return {}


def _own_log_size() -> int:
    return os.stat("/proc/self/fd/2").st_size


def _own_log_since(offset: int) -> str:
    with open(os.readlink("/proc/self/fd/2"), "rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def misuse(r: Rank) -> dict[str, Any]:
    """Calls in the wrong order or state: each answered, and nothing lost by it."""
    import amem

    world = r.start()
    second = r.new_group("second")
    doomed = r.new_group("doomed")
    assert second is not None and doomed is not None
    made = [world, second, doomed]
    for group in made:
        r.verify(group, 1 << 20)

    r.stage("pause twice")
    before = r.pause()
    check(not amem.pause().changed, "a second pause claims to have done something")
    r.peers.barrier()

    r.stage("collective while paused")
    where = []
    for group in (world, second):
        offset = _own_log_size()
        try:
            dist.all_reduce(r.output[:1024], group=group.handle)
            torch.cuda.synchronize()
            raise CheckFailed("a collective while paused raised nothing")
        except RuntimeError as error:
            sys.stderr.flush()
            text = str(error)
            said = "error" if "amem" in text.lower() else "log" if "amem" in _own_log_since(offset).lower() else ""
            check(said != "", f"the error of a collective while paused does not name amem: {text[:300]}")
            where.append(said)
    r.peers.barrier()

    r.stage("destroy while paused")
    r.destroy(doomed)
    r.peers.barrier()

    r.stage("resume twice")
    amem.resume()
    r.peers.barrier()
    check(not amem.resume().changed, "a second resume claims to have done something")
    check(r.used() <= before + MEMORY_SLACK, "more memory is in use than before the pause")
    for _ in range(2):
        for group in (world, second):
            r.verify(group, 1 << 20)
            r.verify(group, 1 << 26)
        r.resume(r.pause())

    r.stage("wrong tag")
    try:
        amem.pause("no-such-tag")
        raise CheckFailed("pausing a tag that does not exist raised nothing")
    except amem.InvalidArgumentError:
        pass
    check(amem.state() is amem.State.ACTIVE, "a refused pause left the process paused")

    r.stage("fork")
    torch.cuda.synchronize()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            amem.pause()
        except amem.ForkedError:
            code = 0
        finally:
            os._exit(code)
    check(_wait_for(pid, 10.0) == 0, "amem.pause() in a forked child did not raise ForkedError")
    for group in (world, second):
        r.verify(group, 1 << 20)
    r.finish([world, second])
    return {"note": f"amem named in the {'/'.join(sorted(set(where)))}"}


def _wait_for(pid: int, seconds: float) -> int:
    """The child's exit code; a child that hangs is killed."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


def lonely(r: Rank) -> dict[str, Any]:
    """One rank pauses without the others: a deadline that names them, and no harm done."""
    import amem

    world = r.start()
    r.verify(world, 1 << 20)
    pids = r.peers.gather(os.getpid())
    note = ""
    for attempt in range(2):
        r.stage(f"lonely pause {attempt}")
        torch.cuda.synchronize()
        before = r.used()
        if r.rank == 0:
            started = time.monotonic()
            try:
                amem.pause()
                raise CheckFailed("a pause that no peer joined raised nothing")
            except amem.DeadlineError as error:
                waited = time.monotonic() - started
                numbers = set(re.findall(r"\d+", str(error)))
                missing = [p for p in pids[1:] if str(p) not in numbers]
                check(not missing, f"the error does not name pid {missing}: {error}")
                check(2.0 <= waited <= 8.0, f"AMEM_TIMEOUT_S=3, but it took {waited:.1f} s")
                note = f"gave up after {waited:.1f} s"
            check(amem.state() is amem.State.ACTIVE, "the process is not active after the deadline")
        r.peers.barrier()
        check(abs(r.used() - before) <= MEMORY_SLACK, "memory in use changed though the pause failed")
        for size in (16, 1 << 20, 1 << 26):
            r.verify(world, size)
    for _ in range(2):
        r.cycle([world])
    r.finish([world])
    return {"note": note}


def out_of_memory(r: Rank) -> dict[str, Any]:
    """Rank 0 finds no memory to resume; it frees some and calls again while the others wait."""
    import amem

    world = r.start()
    r.verify(world, 1 << 26)
    for attempt in range(2):
        r.stage(f"out of memory {attempt}")
        before = r.pause()
        if r.rank == 0:
            free, _ = torch.cuda.mem_get_info()
            hog = torch.empty(free - max(r.nccl_bytes // 2, 2 << 20), dtype=torch.uint8, device=r.device)
            try:
                amem.resume()
                raise CheckFailed("resume without enough memory raised nothing")
            except amem.OutOfMemoryError:
                pass
            check(amem.state() is amem.State.PAUSED, "the process is not paused after the error")
            del hog
            torch.cuda.empty_cache()
        check(amem.resume().changed, "resume changed nothing")
        r.peers.barrier()
        check(abs(r.used() - before) <= MEMORY_SLACK, "memory in use differs after the resume")
        for size in (16, 1 << 20, 1 << 26):
            r.verify(world, size)
        r.peers.barrier()
    r.cycle([world])
    r.finish([world])
    return {}


def too_late(r: Rank) -> dict[str, Any]:
    import amem

    world = r.start()
    r.verify(world, 1 << 20)
    try:
        amem.enable()
        raise CheckFailed("enabling amem after NCCL had begun raised nothing")
    except amem.TooLateError:
        pass
    try:
        amem.pause()
        raise CheckFailed("a pause that releases nothing was reported as success")
    except amem.AmemError:
        pass
    r.verify(world, 1 << 20)
    r.finish([world])
    return {}


def no_cumem(r: Rank) -> dict[str, Any]:
    """NCCL_CUMEM_ENABLE=0: refused at the latest by the pause, and NCCL still works."""
    import amem

    refused = ""
    world = None
    try:
        amem.enable()
        world = r.start()
        r.verify(world, 1 << 20)
        amem.pause()
        raise CheckFailed("a pause with NCCL_CUMEM_ENABLE=0 raised nothing")
    except amem.NoCuMemError:
        refused = "by the pause" if world else "by enable"
    world = world or r.start()
    r.verify(world, 1 << 20)
    r.finish([world])
    return {"note": f"refused {refused}"}


def user_memory(r: Rank) -> dict[str, Any]:
    """Memory from ncclMemAlloc is the user's: it stays, and can be read while NCCL is paused."""
    world = r.start(device_id=r.device)
    r.verify(world, 1 << 20)
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(r.device)
    if not (hasattr(torch.cuda, "MemPool") and hasattr(backend, "mem_allocator")):
        raise NotPossible("this PyTorch has no NCCL memory pool")
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        user = torch.zeros(1 << 24, dtype=torch.int32, device=r.device)
    registered = hasattr(backend, "register_mem_pool") and bool(r.params.get("register", True))
    if registered:
        backend.register_mem_pool(pool)
    address = user.data_ptr()
    for number in range(int(r.params["cycles"])):
        r.stage(f"cycle {number}")
        world.rounds += 1
        r.data(user, world, "all_gather", r.rank)
        copy = user.clone()
        before = r.pause()
        check(torch.equal(user, copy), "user memory changed by the pause")
        user.add_(1)
        copy.add_(1)
        r.scribble()
        r.resume(before)
        check(user.data_ptr() == address and torch.equal(user, copy), "user memory changed by the resume")
        world.rounds += 1
        expected = torch.zeros_like(user)
        for member in range(r.world):
            expected += r.data(torch.empty_like(user), world, "all_reduce", member)
        r.data(user, world, "all_reduce", r.rank)
        dist.all_reduce(user)
        check(torch.equal(user, expected), f"all-reduce in user memory is wrong, cycle {number}")
        r.verify(world, r.sizes[number % len(r.sizes)])
    if registered:
        backend.deregister_mem_pool(pool)
    del user
    r.finish([world])
    return {"note": "registered" if registered else "not registered"}


SCENARIOS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        groups,
        split,
        graph,
        stress,
        connecting,
        turn_held,
        churn,
        colocated,
        misuse,
        lonely,
        out_of_memory,
        too_late,
        no_cumem,
        user_memory,
    )
}


def main(argv: list[str], scenarios: dict[str, Callable[[Rank], dict[str, Any]]] = SCENARIOS) -> int:
    launch.start_child()
    launch.report(stage="start")
    try:
        rank = Rank(json.loads(argv[2]) if len(argv) > 2 else {})
        details = scenarios[argv[1]](rank)
        launch.report(stage="done", **rank.summary(), **details)
    except NotPossible as missing:
        launch.report(skipped=str(missing))
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        launch.report(error=f"{type(error).__name__}: {error}"[:2000])
        sys.stderr.flush()
        # Leaving through NCCL's destructors could wait for ranks that are gone.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
