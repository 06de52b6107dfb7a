"""python -m amem demo: ranks pause and resume NCCL's memory, with contents verified."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from typing import Any

from ._cuda import Driver, DriverError
from ._nccl import SONAME, Nccl, find
from ._ranks import RankError, Ranks, RankTimeout

DEFAULT_RANKS = 4
COUNT = 250_000
TIMEOUT_S = 180.0


@dataclass
class Cycle:
    """One pause and resume of all ranks; each list has an entry a rank."""

    held_before: list[int]
    held_paused: list[int]
    held_after: list[int]
    used_before: list[int]
    used_paused: list[int]
    used_after: list[int]
    pauses: list[dict[str, Any]]
    resumes: list[dict[str, Any]]
    mismatches: list[int]

    def failures(self) -> list[str]:
        """What was not as it should be."""
        found = []
        for rank, pause in enumerate(self.pauses):
            if pause["bytes"] == 0 or self.held_paused[rank] >= self.held_before[rank]:
                found.append(f"rank {rank} gave no memory back")
            if self.used_paused[rank] >= self.used_before[rank]:
                found.append(f"GPU {rank} has no more free memory than before")
            if self.held_after[rank] != self.held_before[rank]:
                found.append(f"rank {rank} holds {self.held_after[rank]} bytes, before {self.held_before[rank]}")
            if self.mismatches[rank]:
                found.append(f"rank {rank} got {self.mismatches[rank]} wrong elements")
        return found


def main(ranks: int | None, communicators: int, cycles: int, simulate: bool) -> int:
    """Runs the demo; 0 if all contents were right and memory was given back."""
    gpus = 0
    if not simulate:
        gpus, reason = _gpus()
        if gpus < 2:
            print(f"{reason}: running on the simulator, whose times say nothing about GPUs.")
            simulate = True
    if ranks is None:
        ranks = DEFAULT_RANKS if simulate else min(DEFAULT_RANKS, gpus)
    elif not simulate and ranks > gpus:
        print(f"--ranks {ranks}: there are {gpus} GPUs, and each rank needs one", file=sys.stderr)
        return 2
    if simulate and ranks < 2:
        print("--ranks 1: NCCL shares nothing with itself, so take 2 or more", file=sys.stderr)
        return 2
    # So that the ranks and the simulated devices go when the demo is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    kind = "simulated GPUs" if simulate else "GPUs"
    print(f"{ranks} ranks on {kind}, {communicators} communicators, {cycles} cycles")
    try:
        with Ranks(ranks, simulate=simulate, timeout=TIMEOUT_S) as group:
            return _run(group, communicators, cycles)
    except (RankError, RankTimeout) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


def _gpus() -> tuple[int, str]:
    """The number of GPUs that NCCL can use, and why fewer than two can't do."""
    try:
        count = Driver().device_count()
    except (OSError, DriverError) as error:
        return 0, f"No CUDA driver here ({error})"
    try:
        Nccl()
    except OSError:
        return 0, f"No {SONAME} here ({find()})"
    return count, f"{count} GPU here, and NCCL between processes needs two"


def _run(group: Ranks, communicators: int, cycles: int) -> int:
    group.init(communicators)
    failures = [
        f"rank {rank} got {wrong} wrong elements before the first pause"
        for rank, wrong in enumerate(_verify(group, communicators))
        if wrong
    ]
    verified = 0
    for number in range(1, cycles + 1):
        cycle = _cycle(group, communicators)
        _print_cycle(number, cycle)
        found = cycle.failures()
        failures += [f"cycle {number}: {failure}" for failure in found]
        verified += not found
    for failure in failures:
        print(f"not verified: {failure}", file=sys.stderr)
    print(f"\n{verified} of {cycles} cycles verified: contents right, memory given back and restored.")
    return 1 if failures else 0


def _verify(group: Ranks, communicators: int) -> list[int]:
    """An all-reduce on each communicator; the wrong elements of each rank."""
    totals = [0] * len(group)
    for comm in range(communicators):
        for rank, wrong in enumerate(group.all("allreduce", comm=comm, count=COUNT)):
            totals[rank] += wrong
    return totals


def _cycle(group: Ranks, communicators: int) -> Cycle:
    held_before, used_before = _held(group), group.all("meminfo")
    pauses = group.all("pause")
    held_paused, used_paused = _held(group), group.all("meminfo")
    resumes = group.all("resume")
    held_after, used_after = _held(group), group.all("meminfo")
    return Cycle(
        held_before,
        held_paused,
        held_after,
        used_before,
        used_paused,
        used_after,
        pauses,
        resumes,
        _verify(group, communicators),
    )


def _held(group: Ranks) -> list[int]:
    """NCCL's bytes on each rank's device."""
    return [stats.get("device_bytes", 0) for stats in group.all("stats")]


def _print_cycle(number: int, cycle: Cycle) -> None:
    print(f"\ncycle {number}")
    print("        NCCL's memory, MiB           GPU memory in use, MiB       pause    resume   wrong")
    print("rank    before   paused    after     before   paused    after        ms        ms  elements")
    for rank in range(len(cycle.pauses)):
        sizes = [
            f"{values[rank] / 2**20:9.1f}"
            for values in (
                cycle.held_before,
                cycle.held_paused,
                cycle.held_after,
                cycle.used_before,
                cycle.used_paused,
                cycle.used_after,
            )
        ]
        times = [f"{1000 * last[rank]['seconds']:10.1f}" for last in (cycle.pauses, cycle.resumes)]
        print(f"{rank:4}", *sizes[:3], *sizes[3:], *times, f"{cycle.mismatches[rank]:9}", sep="")
