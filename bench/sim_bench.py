"""Measures on the simulator how the cost of amem grows with ranks and with communicators.

    sim_bench.py [--ranks 2,8,32,128] [--communicators 1,4,16,64] [--cycles 3] [--quick] [--out DIR]

Needs no GPU: the driver is the simulator, NCCL is the tests' stand-in. One series
has more and more ranks in one communicator, each connected with each other, so
that peers grow; the other has 4 ranks in more and more communicators. The buffers
between two ranks have the same size in all runs, the smallest that the stand-in
takes. Every run checks all elements of an all-reduce, and all metadata byte by
byte, after connecting and after each cycle; what is wrong fails the benchmark.
Tables come last, and all that was measured is in sim_bench.json.

What is what:

- *Driver calls* and *messages* are counts, and exact: those of one rank's pause or
  resume, the rank with the most. Those for memory must be what the simulator counts.
- *CPU* is what all threads of a rank's process used, in user and kernel mode,
  from before the first rank pauses until after the last one has, so answering
  the peers is in it. So are the simulator's copies, the clearing of its pages and
  Python's part of the call, which a GPU's host does not have.
- *Wall* is what the calling thread waits. With more ranks than cores it is
  mostly the queue for a core, and says nothing of a host with a core for each.
- *Driver ms* is the model of what a real driver would add: calls times COSTS_US,
  measured on H200 with 2 MB allocations and nobody else in the driver: the least
  it can be. It is not spent: the simulator's delays spin, so on fewer cores than
  ranks they would measure the spinning. One run of two ranks has them, to check
  the model.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from agent.rank_agent import Agent
from agent.ranks import RankError, RankTimeout, library_folder, simulator_folder
from amem._rank import serve
from amem._ranks import Ranks

MIB = 1 << 20
VERBS = ("pause", "resume")
SERIES_RANKS = 4  # of the runs with several communicators
MODEL_CYCLES = 50  # of two ranks with and without delays, which differ by less than one cycle from the next
ELEMENTS = 64  # of an all-reduce, for each rank
# The simulator has no more; further ranks share them.
DEVICES = 32
TIMEOUT_S = 300

# Measured on H200 with driver 580, one process, allocations of 2 MB; of an import's 300 to 1100 us,
# seen with four processes at once, the least. Larger allocations cost more: access to 512 MB, 550 to
# 950 us. Calls that are not here were not measured.
COSTS_US = {
    "cuMemCreate": 6,
    "cuMemMap": 0.5,
    "cuMemSetAccess": 22,
    "cuMemExportToShareableHandle": 21,
    "cuMemImportFromShareableHandle": 300,
    "cuMemUnmap": 14,
    "cuMemRelease": 9,
}
# The most of them that one slab, own or a peer's, may need.
CALLS_A_SLAB = {"pause": 2, "resume": 4}
# The simulator takes whole microseconds.
DELAYS = ",".join(f"{name}={max(1, round(us))}" for name, us in COSTS_US.items())

ENV = {
    "AMEM_ENABLE": "1",
    "AMEM_TIMEOUT_S": str(TIMEOUT_S),
    "AMEM_SIM_DEVICES": str(DEVICES),
    "AMEM_SIM_MEMORY": str(1 << 40),
    "NCCL_STANDIN_TIMEOUT_S": str(TIMEOUT_S),
    "NCCL_STANDIN_CHANNELS": "1",
    "NCCL_STANDIN_BUFFSIZE": "65536",
    "NCCL_STANDIN_SHAREABLE": "65536",
    "NCCL_STANDIN_METADATA": "8",
}


class BenchRank(Agent):
    """A rank, in a process of its own, with what the benchmark asks of it."""

    def timed(self, what: str, **arguments: Any) -> dict[str, Any]:
        """A command's answer and how long it took."""
        began = time.monotonic()
        value = getattr(self, what)(**arguments)
        return {"seconds": time.monotonic() - began, "value": value}

    def cpu_seconds(self) -> float:
        """Of all threads of this process until now."""
        return time.process_time()

    def figures(self) -> dict[str, Any]:
        """What amem counts, and how often the simulator saw the functions for memory called."""
        stats = self.stats()
        peers, devices = stats["peers"], stats["devices"]
        return {
            "driver_calls": stats["driver_calls"],
            "simulator_calls": {name: self.simulator_calls(name) for name in COSTS_US},
            "messages": stats.get("messages_sent"),
            "peers": len(peers),
            "imports": sum(peer["imports"] for peer in peers),
            "slabs": sum(device["slabs"] for device in devices),
            "slab_bytes": sum(device["slab_bytes"] for device in devices),
            "direct_bytes": sum(device["direct_bytes"] for device in devices),
        }

    def simulator_calls(self, function: str) -> int:
        count = ctypes.c_ulonglong()
        if self.device.driver.library.cuSimCallCount(function.encode(), ctypes.byref(count)):
            raise ValueError(function)
        return count.value


@dataclass(frozen=True)
class Case:
    """One run."""

    series: str  # "ranks", "communicators", or "model"
    ranks: int
    communicators: int
    delays: bool = False


class WrongResult(Exception):
    """Contents were lost, or counts contradict each other."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Over the ranks."""
    return {"most": max(values), "median": statistics.median(values)}


def spent(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(before, after)]


def calls_between(before: dict[str, Any], after: dict[str, Any], counted_by: str = "driver_calls") -> Counter[str]:
    return Counter(after[counted_by]) - Counter(before[counted_by])


class Run:
    """The ranks of one run, and what is done with them."""

    def __init__(self, case: Case, group: Ranks) -> None:
        self.case = case
        self.group = group

    def measure(self, cycles: int) -> dict[str, Any]:
        group, case = self.group, self.case
        group.init(ncomm=0, devices=[rank % DEVICES for rank in range(case.ranks)])
        cpu = group.all("cpu_seconds")
        init = self.communicators_init()
        init_cpu = spent(cpu, group.all("cpu_seconds"))
        cpu = group.all("cpu_seconds")
        connect = self.check()
        connect_cpu = spent(cpu, group.all("cpu_seconds"))
        figures = group.all("figures")
        # Reading the figures calls the driver too.
        self.reading = [calls_between(a, b) for a, b in zip(figures, group.all("figures"))]
        steps: dict[str, list[dict[str, Any]]] = {verb: [] for verb in VERBS}
        for _ in range(1 + cycles):
            for verb in VERBS:
                steps[verb].append(self.step(verb))
            self.check()
        figures = group.all("figures")
        result: dict[str, Any] = {
            name: max(f[name] for f in figures) for name in ("peers", "imports", "slabs", "slab_bytes", "direct_bytes")
        }
        result["init"] = {"wall_s": spread(init), "cpu_s": spread(init_cpu)}
        result["connect"] = {"wall_s": spread(connect), "cpu_s": spread(connect_cpu)}
        for verb in VERBS:
            result[verb] = summarise(steps[verb])
        return result

    def communicators_init(self) -> list[float]:
        """Seconds of each rank, for all communicators."""
        total = [0.0] * self.case.ranks
        for _ in range(self.case.communicators):
            identity = self.group[0].call("unique_id")
            answers = self.group.all(
                "timed",
                what="comm_init",
                identity=identity,
                size=self.case.ranks,
                per_rank=[{"rank": rank} for rank in range(self.case.ranks)],
            )
            total = [t + a["seconds"] for t, a in zip(total, answers)]
        return total

    def check(self) -> list[float]:
        """All communicators give right results, and their metadata is as it was. Seconds of the all-reduces."""
        total = [0.0] * self.case.ranks
        for number in range(self.case.communicators):
            answers = self.group.all("timed", what="allreduce", comm=number, count=ELEMENTS * self.case.ranks)
            if any(wrong := [a["value"] for a in answers]):
                raise WrongResult(f"communicator {number}: wrong elements in each rank: {wrong}")
            total = [t + a["seconds"] for t, a in zip(total, answers)]
            self.group.all("verify_memory", comm=number)
        return total

    def step(self, verb: str) -> dict[str, Any]:
        """A pause or a resume of all ranks at once."""
        before = self.group.all("figures")
        cpu = self.group.all("cpu_seconds")
        answers = self.group.all("timed", what=verb)
        cpu = spent(cpu, self.group.all("cpu_seconds"))
        after = self.group.all("figures")
        calls = []
        for rank, (a, b) in enumerate(zip(before, after)):
            counted = calls_between(a, b)
            seen = calls_between(a, b, "simulator_calls")
            if any(counted[name] != seen[name] for name in COSTS_US):
                raise WrongResult(f"{verb}, rank {rank}: amem counts {dict(counted)}, the simulator {dict(seen)}")
            calls.append(counted - self.reading[rank])
        messages = [b["messages"] - a["messages"] for a, b in zip(before, after) if b["messages"] is not None]
        return {
            "wall_s": [a["seconds"] for a in answers],
            "cpu_s": cpu,
            "calls": calls,
            "messages": messages or None,
        }


def summarise(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Times: the median of the cycles after the first. Counts: the most of any rank in any of them."""

    def times(key: str) -> dict[str, Any]:
        spreads = [spread(step[key]) for step in steps]
        later = {name: statistics.median(s[name] for s in spreads[1:]) for name in ("most", "median")}
        return {"first": spreads[0], **later}

    later = [calls for step in steps[1:] for calls in step["calls"]]
    every = [calls for step in steps for calls in step["calls"]]
    most = max(later, key=total)
    messages = [max(step["messages"]) for step in steps[1:] if step["messages"]]
    return {
        "wall_s": times("wall_s"),
        "cpu_s": times("cpu_s"),
        "calls": total(most),
        "calls_by_function": dict(sorted(most.items())),
        "memory_calls_most": max(memory_calls(calls) for calls in every),
        "model_s": sum(most[name] * us for name, us in COSTS_US.items()) * 1e-6,
        "messages": max(messages) if messages else None,
    }


def total(calls: Counter[str]) -> int:
    return sum(calls.values())


def memory_calls(calls: Counter[str]) -> int:
    return sum(calls[name] for name in COSTS_US)


def available_bytes() -> int:
    with open("/proc/meminfo") as info:
        return next(int(line.split()[1]) << 10 for line in info if line.startswith("MemAvailable:"))


def lacking(case: Case, smaller: dict[str, Any] | None) -> str:
    """Why the host's memory is too small, judged by a smaller run of the series; "" if it is not."""
    if not smaller:
        return ""
    # A device's memory and the host's copy of it, and the process itself.
    each = 2 * smaller["slab_bytes"] / (smaller["peers"] * smaller["communicators"])
    needed = case.ranks * (32 * MIB + each * (case.ranks - 1) * case.communicators)
    room = available_bytes()
    if needed < room:
        return ""
    return f"needs about {needed / 2**30:.0f} GiB of host memory, {room / 2**30:.0f} are there"


def run_case(case: Case, cycles: int, smaller: dict[str, Any] | None) -> dict[str, Any]:
    """What was measured; status is PASS, FAIL, or SKIP where this machine or the stand-in can't."""
    began = time.monotonic()
    row: dict[str, Any] = {**asdict(case), "status": "SKIP", "reason": lacking(case, smaller)}
    if row["reason"]:
        return row
    folders = {"AMEM_LIBRARY_DIR": library_folder(), "AMEM_SIM_LIBRARY_DIR": simulator_folder()}
    env = {**folders, **ENV, "AMEM_SIM_DELAYS": DELAYS if case.delays else ""}
    argv = (sys.executable, str(Path(__file__).resolve()), "rank")
    try:
        with Ranks(case.ranks, simulate=True, argv=argv, env=env, timeout=TIMEOUT_S + 60) as group:
            row.update(Run(case, group).measure(cycles))
        row["status"] = "PASS"
        beyond_bound(row)
    except (RankError, RankTimeout, WrongResult) as error:
        refused = isinstance(error, RankError) and "(at most " in error.message
        row.update(status="SKIP" if refused else "FAIL", reason=str(error))
    row["seconds"] = time.monotonic() - began
    return row


def beyond_bound(row: dict[str, Any]) -> None:
    """A pause and a resume may make so many calls for each slab, own or mapped from a peer, and no more."""
    if row["direct_bytes"]:
        raise WrongResult(f"{row['direct_bytes']} bytes are not in slabs")
    for verb in VERBS:
        bound = CALLS_A_SLAB[verb] * row["slabs"] * (row["peers"] + 1)
        if row[verb]["memory_calls_most"] > bound:
            raise WrongResult(f"{verb}: {row[verb]['memory_calls_most']} calls for memory, at most {bound} expected")


# ---- what is told of it ----


def growth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """From the smallest run of more than 2 ranks to the largest: by which factor each figure grew."""
    rows = [row for row in rows if row["status"] == "PASS" and row["ranks"] > 2]
    if len(rows) < 2:
        return {}
    first, last = rows[0], rows[-1]
    factors = {"peers": last["peers"] / first["peers"]}
    for verb in VERBS:
        for name, get in FIGURES.items():
            a, b = get(first[verb]), get(last[verb])
            if a and b:
                factors[f"{verb}: {name}"] = b / a
    # CPU is not exact, and is judged by the reader. Of counts, a message more or less is no growth.
    counts = {name for name in factors if name.endswith(("calls", "messages"))}
    return {
        "from": first["ranks"],
        "to": last["ranks"],
        "factors": factors,
        "out_of_proportion": sorted(name for name in counts if factors[name] > 1.05 * factors["peers"]),
    }


FIGURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "driver calls": lambda verb: verb["calls"],
    "driver ms": lambda verb: verb["model_s"],
    "messages": lambda verb: verb["messages"],
    "CPU": lambda verb: verb["cpu_s"]["median"],
}


def label(row: dict[str, Any]) -> str:
    several = "s" if row["communicators"] > 1 else ""
    delays = ", with the driver's costs as delays" if row["delays"] else ""
    return f"{row['ranks']} ranks, {row['communicators']} communicator{several}{delays}"


def number(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def unit(row: dict[str, Any]) -> tuple[str, int]:
    """What grows in the run's series, and how many of it the run has."""
    return ("peer", row["peers"]) if row["series"] == "ranks" else ("comm", row["communicators"])


def for_each(value: float | None, row: dict[str, Any]) -> float | None:
    return None if value is None else value / unit(row)[1]


def count_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    each = f"a {unit(rows[0])[0]}"
    head = ["ranks", "comms", "peers", "slabs", "imports", "slabs x peers"]
    for verb in VERBS:
        head += [f"{verb}: calls", each, "driver ms", "messages", each]
    lines = [head]
    for row in rows:
        line = [str(row[name]) for name in ("ranks", "communicators", "peers", "slabs", "imports")]
        line.append(str(row["slabs"] * row["peers"]))
        for verb in VERBS:
            v = row[verb]
            line += [str(v["calls"]), number(for_each(v["calls"], row), 1, 1), number(v["model_s"], 1e3, 2)]
            line += [number(v["messages"]), number(for_each(v["messages"], row), 1, 1)]
        lines.append(line)
    return lines


def cpu_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    each = f"a {unit(rows[0])[0]}"
    head = ["ranks", "comms"]
    for verb in VERBS:
        head += [f"{verb}: CPU ms", "most", each, "ratio"]
    lines = [[*head, "connect: CPU ms", each, "ratio"]]
    for row in rows:
        line = [str(row["ranks"]), str(row["communicators"])]
        for what in (*VERBS, "connect"):
            cpu, first = row[what]["cpu_s"], rows[0][what]["cpu_s"]
            line.append(number(cpu["median"], 1e3, 1))
            if what != "connect":
                line.append(number(cpu["most"], 1e3, 1))
            part, least = cpu["median"] / unit(row)[1], first["median"] / unit(rows[0])[1]
            line += [number(part, 1e3, 2), number(part / least, 1, 2)]
        lines.append(line)
    return lines


def wall_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["ranks", "comms", "init s", "connect s", "first pause s", "pause s", "median", "resume s", "median"]]
    for row in rows:
        line = [str(row["ranks"]), str(row["communicators"])]
        line += [number(row[what]["wall_s"]["most"], 1, 3) for what in ("init", "connect")]
        line.append(number(row["pause"]["wall_s"]["first"]["most"], 1, 3))
        for verb in VERBS:
            line += [number(row[verb]["wall_s"][name], 1, 3) for name in ("most", "median")]
        lines.append(line)
    return lines


def print_table(title: str, rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"\n{title}\n")
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


def print_results(results: dict[str, Any]) -> None:
    for series in ("ranks", "communicators"):
        rows = [row for row in results["runs"] if row["series"] == series and row["status"] == "PASS"]
        if not rows:
            continue
        what = "one communicator of all ranks" if series == "ranks" else f"{SERIES_RANKS} ranks in each communicator"
        print_table(f"{what}: counts of the rank with the most", count_table(rows))
        print_table(f"{what}: CPU of the median rank; ratio: one's part, against the first line", cpu_table(rows))
        print_table(f"{what}: wall of the slowest rank, {results['cores']} cores for all", wall_table(rows))
        print()
        for verb in VERBS:
            print(f"driver calls of a {verb}, {label(rows[-1])}: {json.dumps(rows[-1][verb]['calls_by_function'])}")
    grown = results["growth"]
    if grown:
        factors = ", ".join(f"{name} {factor:.1f}" for name, factor in grown["factors"].items())
        print(f"\nfrom {grown['from']} to {grown['to']} ranks, times: {factors}")
        for name in grown["out_of_proportion"]:
            print(f"FAIL: {name} grew by more than the number of peers")
    print_model(results["runs"])
    for row in results["runs"]:
        if row["status"] != "PASS":
            print(f"{row['status']}: {label(row)}: {row['reason']}")


def print_model(runs: list[dict[str, Any]]) -> None:
    """Whether delays make two ranks as much slower as the model says."""
    passed = [row for row in runs if row["status"] == "PASS"]
    delayed = [row for row in passed if row["delays"]]
    plain = [row for row in passed if not row["delays"] and row["ranks"] == 2]
    if not delayed or not plain:
        return
    for verb in VERBS:
        more = delayed[0][verb]["wall_s"]["median"] - plain[0][verb]["wall_s"]["median"]
        model = delayed[0][verb]["model_s"]
        print(f"2 ranks with delays, {verb}: {more * 1e3:.2f} ms slower, the model says {model * 1e3:.2f}")


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return sorted(int(part) for part in text.split(",") if part)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[2, 8, 32, 128], help="runs of so many, one communicator")
    parser.add_argument("--communicators", type=numbers, default=[1, 4, 16, 64], help="runs of so many, 4 ranks")
    parser.add_argument("--cycles", type=int, default=3, help="cycles after the first, whose median is reported")
    parser.add_argument("--quick", action="store_true", help="up to 32 ranks and 16 communicators")
    parser.add_argument("--out", type=Path, default=Path("build/sim-results"))
    args = parser.parse_args()
    if args.quick:
        args.ranks = [n for n in args.ranks if n <= 32]
        args.communicators = [n for n in args.communicators if n <= 16]
    if args.cycles < 1 or min([*args.ranks, 2]) < 2 or min([*args.communicators, 1]) < 1:
        parser.error("at least 1 cycle, 2 ranks and 1 communicator")
    return args


def main() -> int:
    args = parse()
    began = time.monotonic()
    cases = [Case("model", 2, 1, delays=True)]
    cases += [Case("communicators", SERIES_RANKS, n) for n in args.communicators]
    cases += [Case("ranks", n, 1) for n in args.ranks]
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores; a call of the driver is taken to cost, in us: {json.dumps(COSTS_US)}", flush=True)
    results: dict[str, Any] = {"cores": cores, "costs_us": COSTS_US, "env": ENV, "cycles": args.cycles, "runs": []}
    for case in cases:
        done = [row for row in results["runs"] if row["series"] == case.series and row["status"] == "PASS"]
        cycles = max(args.cycles, MODEL_CYCLES) if case.ranks == 2 else args.cycles
        row = run_case(case, cycles, done[-1] if done else None)
        results["runs"].append(row)
        print(f"{label(row)}: {row['status']} in {row.get('seconds', 0):.1f} s {row['reason'][:300]}", flush=True)
    results["growth"] = growth([row for row in results["runs"] if row["series"] == "ranks"])
    print_results(results)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sim_bench.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"\n{time.monotonic() - began:.0f} s in all; everything is in {args.out}/sim_bench.json")
    failed = any(row["status"] == "FAIL" for row in results["runs"])
    return 1 if failed or results["growth"].get("out_of_proportion") else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        serve(BenchRank())
    else:
        sys.exit(main())
