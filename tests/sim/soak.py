"""Many cycles of pause and resume with random work, random faults and random delays.

    python tests/sim/soak.py --cycles 1000 --starts 60

Ranks make, split and destroy communicators, run collectives whose every element
is checked, allocate, share and free tensors in regions, and pause and resume
while single calls of the driver fail, or come later than the deadline, or a GPU is
busy for longer than that; a rank whose call failed calls it again. Host memory is
got ahead in some ranks, and given back. After a warm-up and at the end, with one
communicator left, each rank's memory, descriptors, threads and mappings are
counted, and must be the same. Ends with status 1 and the seed when not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from harness import MIB, RankError, Ranks, ranks

ENV = {
    "AMEM_TIMEOUT_S": "3",
    "AMEM_ENABLE": "1",  # so that tensors are shared
    "NCCL_STANDIN_TIMEOUT_S": "120",
    "NCCL_STANDIN_CHANNELS": "1",
    "NCCL_STANDIN_BUFFSIZE": "65536",
    "NCCL_STANDIN_METADATA": "8",
}
MOST_COMMUNICATORS = 6
MOST_TENSORS = 24
BACKUPS = {"weights": "cpu", "swapped": "disk", "kv_cache": "none"}
KINDS = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "sendrecv")
# A call of the driver that fails while amem pauses, or resumes, and how.
FAULTS = {
    "pause": [
        ("cuCtxSynchronize", 999),
        ("cuMemHostRegister", 2),
        ("cuMemcpyDtoHAsync", 999),
        ("cuMemUnmap", 999),
        ("cuMemRelease", 999),
    ],
    "resume": [
        ("cuMemCreate", 2),
        ("cuMemCreate", 999),
        ("cuMemMap", 999),
        ("cuMemSetAccess", 999),
        ("cuMemcpyHtoDAsync", 999),
        ("cuMemExportToShareableHandle", 999),
        ("cuMemImportFromShareableHandle", 999),
    ],
}
# A call of the driver that comes later than the deadline, while both sides go on.
LATE = {
    "pause": ["cuCtxSynchronize", "cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync"],
    "resume": [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
    ],
}
LATE_SECONDS = (3.6, 7.2)  # more than one deadline, and than two
LATE_SHARE = 0.01  # of the pauses, and of the resumes
ATTEMPTS = 6
DELAYS = "cuMemCreate=200,cuMemMap=50,cuMemSetAccess=300,cuMemUnmap=100"

# What a process holds, as the kernel and amem count it; memory is without the host arena.
MEASURE = """{
    'memory': (int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0]) << 10)
    - amem.stats()['host']['arena_bytes'] - sum(r['host_bytes'] for r in amem.stats()['regions']),
    'fds': len(os.listdir('/proc/self/fd')),
    'threads': len(os.listdir('/proc/self/task')),
    'maps': sum(1 for _ in open('/proc/self/maps')),
    'arena': amem.stats()['host']['arena_bytes'],
    'backup': sum(r['host_bytes'] for r in amem.stats()['regions'] if r['backup'] == 'cpu'),
    'device': rank.meminfo(),
}"""
# Allocators and thread pools of Python, Go and libc settle late: what may differ without being a leak.
SLACK = {"memory": 12 * MIB, "threads": 4, "maps": 40, "device": 0}
# While a call is late or a GPU is busy, each peer's request waits in a call of the driver of its own, which takes a
# thread, and Go keeps threads.
LATE_THREADS = 8


@dataclass
class Member:
    """A communicator: each member's own number of it."""

    numbers: dict[int, int]


@dataclass
class Tensor:
    """A rank's own, under its number there, and the numbers of those who have opened it."""

    owner: int
    number: int
    tag: str
    size: int
    seed: int
    opened: dict[int, int]

    def everywhere(self) -> list[tuple[int, int]]:
        """The ranks that have it, and its number there."""
        return [(self.owner, self.number), *self.opened.items()]


class Soak:
    def __init__(self, group: Ranks, seed: int) -> None:
        self.group = group
        self.random = random.Random(seed)
        self.pool = ThreadPoolExecutor(len(group))
        self.world = Member({rank: 0 for rank in range(len(group))})
        self.parts: list[Member] = []
        self.tensors: list[Tensor] = []
        self.seeds = 0
        self.counts: Counter[str] = Counter()
        self.most_used = [0] * len(group)

    # ---- communicators and collectives ----

    def communicate(self) -> None:
        """Makes, splits or destroys communicators, or none of it."""
        choice = self.random.random()
        if choice < 0.35 and self.parts:
            self.destroy(self.parts.pop(self.random.randrange(len(self.parts))))
        elif len(self.parts) < MOST_COMMUNICATORS and choice < 0.6:
            members = self.random.sample(range(len(self.group)), self.random.randint(2, len(self.group)))
            self.parts.append(Member(dict(zip(members, self.group.comm_init(members)))))
            self.counts["made"] += 1
        elif len(self.parts) < MOST_COMMUNICATORS and choice < 0.75:
            self.split()

    def split(self) -> None:
        colors = [self.random.choice([-1, 0, 0, 1, 1]) for _ in range(len(self.group))]
        numbers = self.group.split(comm=0, colors=colors)
        for color in (0, 1):
            part = {rank: numbers[rank] for rank in range(len(self.group)) if colors[rank] == color}
            if part:
                self.parts.append(Member(part))
                self.counts["made"] += 1

    def destroy(self, part: Member) -> None:
        for rank, number in part.numbers.items():
            self.group[rank].start("destroy", comm=number)
        self.group.finish(members=list(part.numbers))
        self.counts["destroyed"] += 1

    def collective(self) -> None:
        """A collective of random kind and size on a random communicator."""
        part = self.random.choice([self.world, *self.parts])
        kind = self.random.choice(KINDS)
        count = int(10 ** self.random.uniform(0, 4.3))
        for rank, number in part.numbers.items():
            self.group[rank].start(kind, comm=number, count=count)
        wrong = self.group.finish(members=list(part.numbers))
        if any(wrong):
            raise AssertionError(f"{kind} of {count} elements: wrong elements in the ranks {part.numbers}: {wrong}")
        self.counts["collectives"] += 1
        self.counts["elements"] += count * len(part.numbers)

    # ---- tensors ----

    def allocate(self) -> None:
        """Allocates, opens in another rank, closes or frees a tensor."""
        choice = self.random.random()
        if choice < 0.35 and len(self.tensors) < MOST_TENSORS:
            owner, tag = self.random.randrange(len(self.group)), self.random.choice(list(BACKUPS))
            self.tensors.append(self.make(owner, tag, self.random.choice([1, 2, 3, 5]) * MIB))
        elif choice < 0.5 and len(self.tensors) < MOST_TENSORS:
            self.allocate_with_holes()
        elif choice < 0.75 and self.tensors:
            tensor = self.random.choice(self.tensors)
            borrower = self.random.randrange(len(self.group))
            if borrower != tensor.owner and borrower not in tensor.opened:
                handle = self.group[tensor.owner].call("share", tensor=tensor.number)
                tensor.opened[borrower] = self.group[borrower].call("open", handle=handle, size=tensor.size)
                self.counts["opened"] += 1
        elif choice < 0.85 and self.tensors:
            self.free(self.tensors.pop(self.random.randrange(len(self.tensors))))

    def make(self, owner: int, tag: str, size: int) -> Tensor:
        self.seeds += 1
        number = self.group[owner].call("allocate", tag=tag, size=size, seed=self.seeds, backup=BACKUPS[tag])
        self.counts["tensors"] += 1
        return Tensor(owner, number, tag, size, self.seeds, {})

    def allocate_with_holes(self) -> None:
        """Tensors side by side in slabs, of which the first and every second are freed again."""
        owner, tag = self.random.randrange(len(self.group)), self.random.choice(list(BACKUPS))
        made = [self.make(owner, tag, 2 * MIB) for _ in range(self.random.randint(3, 9))]
        for tensor in made[::2]:
            self.free(tensor)
        self.tensors += made[1::2]

    def free(self, tensor: Tensor) -> None:
        for borrower, number in tensor.opened.items():
            self.group[borrower].call("close", tensor=number)
        self.group[tensor.owner].call("deallocate", tensor=tensor.number)

    def read(self) -> None:
        """Every tensor is right for its owner and for all who have opened it, and what one writes all see."""
        for tensor in self.tensors:
            if BACKUPS[tensor.tag] != "none":
                self.look_at(tensor, "kept")
            self.seeds += 1
            tensor.seed = self.seeds
            rank, number = self.random.choice(tensor.everywhere())
            self.group[rank].call("write", tensor=number, seed=tensor.seed)
            self.look_at(tensor, f"written by rank {rank}")

    def look_at(self, tensor: Tensor, what: str) -> None:
        for rank, number in tensor.everywhere():
            if not self.group[rank].call("holds", tensor=number, seed=tensor.seed):
                raise AssertionError(f"rank {rank}: the contents {what} of {tensor} are wrong")

    # ---- pause and resume ----

    def change(self, verb: str) -> set[str]:
        """All ranks pause, or resume, at random moments; answers the functions made to fail."""
        orders: list[tuple[int, float, tuple[str, int, int] | None]] = []
        for rank in range(len(self.group)):
            fault = None
            if self.random.random() < 0.08:
                function, result = self.random.choice(FAULTS[verb])
                fault = (function, self.random.randint(1, 6), result)
            orders.append((rank, self.random.choice([0, 0, 0, self.random.random() * 0.02]), fault))
        # Waited for one by one, so that none is left running when one fails.
        late = self.late(verb)
        anywhere = bool(late) or any(fault for _, _, fault in orders)
        running = [self.pool.submit(self.change_one, verb, anywhere, *order) for order in orders]
        failures = [error for error in (future.exception() for future in running) if error]
        if failures:
            drawn = f"{verb}, late: {late}, faults: {[(rank, fault) for rank, _, fault in orders if fault]}"
            raise AssertionError("\n".join([drawn, *map(str, failures)])) from failures[0]
        if late:
            self.group[late[0]].call("delay", function=late[1], number=0)
        return {fault[0] for _, _, fault in orders if fault}

    def late(self, verb: str) -> tuple[int, str] | None:
        """Makes a call of one rank's come later than the deadline, or its GPU busy for longer, now and then."""
        if self.random.random() > LATE_SHARE:
            return None
        rank, seconds = self.random.randrange(len(self.group)), self.random.choice(LATE_SECONDS)
        if verb == "pause" and self.random.random() < 0.3:
            self.group[rank].call("work", seconds=seconds)
            self.counts["busy"] += 1
            return rank, "cuCtxSynchronize"
        function = self.random.choice(LATE[verb])
        self.group[rank].call("delay", function=function, number=self.random.randint(1, 6), seconds=seconds)
        self.counts["late"] += 1
        return rank, function

    def change_one(
        self, verb: str, anywhere: bool, rank: int, delay: float, fault: tuple[str, int, int] | None
    ) -> None:
        process = self.group[rank]
        time.sleep(delay)
        if fault:
            process.call("fault", function=fault[0], number=fault[1], result=fault[2])
        before = "ACTIVE" if verb == "pause" else "PAUSED"
        after = "PAUSED" if verb == "pause" else "ACTIVE"
        for attempt in range(ATTEMPTS):
            try:
                process.call(verb)
                break
            except RankError as error:
                # Who has opened a tensor lets go of it for its owner, and that may fail too.
                # Whose call or GPU is late says so itself, or that the turn is not given up, since an owner's word
                # that its memory is back is being done.
                says = ("pid ", "GPU", "another thread's pause or resume")
                expected = anywhere and any(words in error.message for words in says)
                if attempt == ATTEMPTS - 1 or not (fault or expected):
                    raise
                self.counts[f"{verb} failed"] += 1
                state = process.call("state")
                # A tag's failure keeps no other from being resumed.
                others = ("this process's memory is back", "another thread's pause or resume")
                if state != before and not any(words in error.message for words in others):
                    raise AssertionError(f"rank {rank} is {state} after a {verb} that failed: {error}") from error
        if fault:
            self.counts["faults"] += 1
            process.call("fault", function=fault[0], number=0, result=0)
        state = process.call("state")
        if state != after:
            raise AssertionError(f"rank {rank} is {state} after {verb}")

    def cycle(self) -> None:
        self.communicate()
        for _ in range(self.random.randint(0, 4)):
            self.allocate()
        for _ in range(self.random.randint(1, 3)):
            self.collective()
        late = self.random.random() < 0.2
        if late:
            self.group.all("launch", counts=[self.random.randint(1, 20_000) for _ in range(2)])
        used = self.group.all("meminfo")
        self.most_used = [max(pair) for pair in zip(self.most_used, used)]
        failed = self.change("pause")
        left = self.group.all("meminfo")
        # A peer's memory that can't be let go stays mapped, which keeps it on its owner's device.
        if not late and not failed & {"cuMemUnmap", "cuMemRelease"} and any(left):
            raise AssertionError(f"device memory in use while paused: {left}")
        changed = self.random.random() < 0.15
        if changed:
            self.communicate()
        self.change("resume")
        if self.random.random() < 0.1:
            self.group[self.random.randrange(len(self.group))].call("eval", expression="amem.free_host_memory()")
        self.read()
        if late and any(wrong := self.group.all("collect")):
            raise AssertionError(f"all-reduces launched before the pause: wrong elements: {wrong}")
        if not late and not changed:
            self.no_more_than(used)
        self.collective()
        self.counts["cycles"] += 1

    def no_more_than(self, used: list[int]) -> None:
        """No more device memory is in use; less may be: what was freed waits for the peers."""
        deadline = time.monotonic() + 2
        while True:
            left = self.group.all("meminfo")
            if all(now <= before for now, before in zip(left, used)):
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"device memory {used} before the pause, {left} after the resume")
            time.sleep(0.05)

    # ---- what is left ----

    def settle(self) -> list[dict[str, int]]:
        """What each rank holds with one communicator."""
        while self.parts:
            self.destroy(self.parts.pop())
        while self.tensors:
            self.free(self.tensors.pop())
        self.collective()
        self.change_all_plainly()
        self.group.all("verify_memory", comm=0)
        self.group.all("eval", expression="__import__('gc').collect()")
        time.sleep(0.5)  # what is freed is told to its owner a moment later
        return self.measure()

    def change_all_plainly(self) -> None:
        self.group.all("pause")
        self.group.all("resume")

    def measure(self) -> list[dict[str, int]]:
        return list(self.group.all("eval", expression=" ".join(MEASURE.split())))


def compare(first: list[dict[str, int]], last: list[dict[str, int]], most_used: list[int], late: int) -> list[str]:
    """What has grown, in words, after so many late calls and busy GPUs."""
    grown = []
    # One connection more to, and one from, each peer is kept for the next requests. For
    # tensors there may be all three each way that were not there before, and a file.
    allowed = {**SLACK, "fds": 8 * (len(first) - 1) + 1, "threads": SLACK["threads"] + LATE_THREADS * late}
    for rank, (before, after) in enumerate(zip(first, last)):
        grown += [
            f"rank {rank}: {name}: {before[name]} after the warm-up, {after[name]} at the end"
            for name, slack in allowed.items()
            if after[name] > before[name] + slack
        ]
        for name in ("arena", "backup"):
            if after[name] > most_used[rank] + 2 * MIB:
                grown.append(f"rank {rank}: {name} of {after[name]} bytes for at most {most_used[rank]} of memory")
    return grown


HEADER = (
    "  cycles  seconds  made  destroyed  collectives    elements  tensors  opened  faults  late  busy  failed"
    "  mem MiB  fds  threads  maps  arena MiB"
)


def line(soak: Soak, seconds: float) -> str:
    c = soak.counts
    failed = c["pause failed"] + c["resume failed"]
    most = {name: max(rank[name] for rank in held) for held in [soak.measure()] for name in held[0]}
    return (
        f"{c['cycles']:8d} {seconds:8.1f} {c['made']:5d} {c['destroyed']:10d} {c['collectives']:12d}"
        f" {c['elements']:11d} {c['tensors']:8d} {c['opened']:7d} {c['faults']:7d} {c['late']:5d} {c['busy']:5d}"
        f" {failed:7d}"
        f" {most['memory'] / MIB:8.1f} {most['fds']:4d}"
        f" {most['threads']:8d} {most['maps']:5d} {most['arena'] / MIB:10.1f}"
    )


def soak(
    cycles: int,
    *,
    seed: int,
    count: int = 8,
    every: int = 100,
    env: Mapping[str, str] | None = None,
    tell: Callable[[str], Any] = print,
) -> list[str]:
    """Runs the cycles; answers what has grown."""
    started = time.monotonic()
    with ExitStack() as stack:
        slow = [{"AMEM_SIM_DELAYS": DELAYS} if rank % 3 == 1 else {} for rank in range(count)]
        for rank in range(0, count, 2):
            slow[rank]["AMEM_HOST_PREALLOC"] = "1"
        group = stack.enter_context(ranks(count, {**ENV, **(env or {})}, rank_env=slow, timeout=120.0))
        group.init(ncomm=1)
        work = Soak(group, seed)
        stack.callback(work.pool.shutdown)
        tell(HEADER)
        warm_up = max(cycles // 10, min(cycles // 2, 20))
        first: list[dict[str, int]] = []
        for number in range(1, cycles + 1):
            try:
                work.cycle()
            except BaseException as error:
                error.args = (f"cycle {number} of seed {seed}: {error}", *error.args[1:])
                raise
            if number == warm_up:
                first = work.settle()
            if number % every == 0:
                tell(line(work, time.monotonic() - started))
        last = work.settle()
        names = list(last[0])
        for label, held in (("after the warm-up", first), ("at the end", last)):
            for rank, values in enumerate(held):
                tell(f"{label}, rank {rank}: " + ", ".join(f"{name} {values[name]}" for name in names))
        return compare(first, last, work.most_used, work.counts["late"] + work.counts["busy"])


def starts(number: int, *, count: int = 8, communicators: int = 8, tell: Callable[[str], Any] = print) -> None:
    """Starts the ranks again and again, connects, pauses and resumes: nothing may hang."""
    started = time.monotonic()
    slowest = 0.0
    for done in range(1, number + 1):
        begun = time.monotonic()
        with ranks(count, ENV, timeout=60.0) as group:
            group.init(ncomm=communicators)
            for comm in (0, communicators - 1):
                if any(wrong := group.all("allreduce", comm=comm, count=1000)):
                    raise AssertionError(f"start {done}: wrong elements: {wrong}")
            group.all("pause")
            if any(left := group.all("meminfo")):
                raise AssertionError(f"start {done}: device memory in use while paused: {left}")
            group.all("resume")
            if any(wrong := group.all("alltoall", comm=done % communicators, count=1000)):
                raise AssertionError(f"start {done}: wrong elements: {wrong}")
        slowest = max(slowest, time.monotonic() - begun)
    tell(
        f"{number} starts of {count} ranks with {communicators} communicators in "
        f"{time.monotonic() - started:.1f} s, the slowest {slowest:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)

    def tell(text: str) -> None:
        print(text, flush=True)

    if options.starts:
        starts(options.starts, count=options.ranks, tell=tell)
    grown = soak(options.cycles, seed=options.seed, count=options.ranks, tell=tell) if options.cycles else []
    for text in grown:
        tell(text)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
