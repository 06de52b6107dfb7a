"""Measures what pausing NCCL costs, by several methods side by side, and what amem costs while active.

    nccl_bench.py [--gpus N] [--communicators 8] [--modes amem,rebuild,...] [--nccl FILE]
                  [--starts 60] [--quick] [--chart] [--out DIR]

Each mode runs in processes of its own, one a GPU. A table comes last; all that
was measured is in bench.json in the output folder. docs/benchmarks.md says
what each column is.

The mode "suspend" takes ncclCommSuspend, which NCCL has since 2.29.7: with --nccl
and such a library, "amem" and "speed" run on the same one. One that is built for
this alone needs few kernels, from a checkout of NCCL:

    make src.lib CUDA_HOME=... NVCC_GENCODE="-gencode=arch=compute_90,code=sm_90" \\
        ONLY_FUNCS="AllReduce Sum f32 (RING|TREE) *|SendRecv"
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

import launch
import run

HERE = Path(__file__).resolve().parent
LOG_SHARE = 400_000
PAUSE_PARTS = ("quiesce_seconds", "copy_seconds", "release_seconds")
RESUME_PARTS = ("create_seconds", "peers_seconds", "copy_seconds", "ready_seconds")
ENABLED = {"AMEM_ENABLE": "1"}


@dataclass
class Mode:
    name: str
    label: str
    kind: str
    env: dict[str, str] = field(default_factory=dict)


MODES = [
    Mode("amem", "amem, all copied", "amem", ENABLED),
    Mode("prealloc", "amem, host memory ahead", "amem", {**ENABLED, "AMEM_HOST_PREALLOC": "1"}),
    Mode("control", "amem, control regions only", "amem", {**ENABLED, "AMEM_NCCL_OFFLOAD_FREE_TAG": "7"}),
    Mode("direct", "amem, AMEM_ARENA=0", "amem", {**ENABLED, "AMEM_ARENA": "0"}),
    Mode("suspend", "ncclCommSuspend", "suspend"),
    Mode("rebuild", "stock, destroy and rebuild", "rebuild"),
]


def bench_commands(role: str, params: dict[str, Any], gpus: int, jobs: list[dict[str, str]]) -> list[launch.Command]:
    argv = [sys.executable, str(HERE / "bench_rank.py"), role, json.dumps(params)]
    return launch.rank_commands(argv, gpus, {}, jobs)


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def over_ranks(results: list[dict[str, Any]], get: Callable[[dict[str, Any]], Any], choose: Any = max) -> Any:
    values = [v for r in results if (v := get(r)) is not None]
    return choose(values) if values else None


def summarise_mode(mode: Mode, outcome: launch.Outcome) -> dict[str, Any]:
    """The slowest rank of each cycle, then the median of the cycles after the first."""
    results = outcome.results
    row: dict[str, Any] = {
        "mode": mode.name,
        "label": mode.label,
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": outcome.seconds,
        "ranks": results,
    }
    skipped = [str(r["skipped"]) for r in results if "skipped" in r]
    if skipped:
        row.update(status="SKIP", reason=skipped[0])
        return row
    count = min((len(r.get("cycles", [])) for r in results), default=0)

    def slowest(key: str) -> list[float]:
        return [max(r["cycles"][i][key] for r in results) for i in range(count)]

    def inner(part: str, key: str) -> float | None:
        found = [
            [float(r["cycles"][i][part][key]) for r in results if key in (r["cycles"][i].get(part) or {})]
            for i in range(1, count)
        ]
        return median([max(values) for values in found if values])

    if count:
        pauses, resumes, firsts = slowest("pause_s"), slowest("resume_s"), slowest("first_collective_s")
        row.update(
            cycles=count - 1,
            active_bytes=over_ranks(results, lambda r: r["cycles"][0]["active_bytes"]),
            given_bytes=min(min(c["given_bytes"] for c in r["cycles"][:count]) for r in results),
            first_pause_s=pauses[0],
            first_resume_s=resumes[0],
            pause_s=median(pauses[1:]),
            resume_s=median(resumes[1:]),
            first_collective_s=median(firsts[1:]),
            pause_calls=median([float(n) for n in slowest("pause_calls")[1:]]),
            resume_calls=median([float(n) for n in slowest("resume_calls")[1:]]),
            wrong=sum(int(c["wrong"]) for r in results for c in r["cycles"])
            + sum(int(r.get("wrong_before", 0)) for r in results),
            pause_parts={k: inner("last_pause", k) for k in PAUSE_PARTS},
            resume_parts={k: inner("last_resume", k) for k in RESUME_PARTS},
            copied_bytes=inner("last_pause", "copied_bytes"),
        )
        if row["wrong"]:
            row.update(status="FAIL", reason=f"{row['wrong']} elements were wrong")
    row["init_s"] = over_ranks(results, lambda r: r.get("init_s"))
    row["connect_s"] = over_ranks(results, lambda r: r.get("connect_s"))
    row["nccl_bytes"] = over_ranks(results, lambda r: r.get("nccl_bytes"))
    row["left_bytes"] = over_ranks(results, lambda r: r.get("left_bytes"))
    shares = [
        min(c["given_bytes"] for c in r["cycles"][:count]) / r["nccl_bytes"]
        for r in results
        if count and r.get("nccl_bytes")
    ]
    row["given_back"] = min(shares) if shares else None
    stats: dict[str, Any] = next((r["stats"] for r in results if "stats" in r), {})
    row["driver_calls"] = stats.get("driver_calls")
    return row


def summarise_speed(outcome: launch.Outcome, gpus: int, rounds: int) -> dict[str, Any]:
    """The slowest rank of each replay, then the median of all; the jobs took turns with each measure."""
    row: dict[str, Any] = {"status": outcome.status, "reason": outcome.reason, "seconds": outcome.seconds}
    row["ranks"] = outcome.results
    if outcome.status != "PASS":
        return row
    jobs = {name: outcome.results[i * gpus : (i + 1) * gpus] for i, name in enumerate(("amem", "stock", "again"))}
    measures = {key: max if key.endswith("_s") else min for key in outcome.results[0]["rounds"][0]}
    for name, results in jobs.items():
        if sum(int(r["wrong"]) for r in results):
            row.update(status="FAIL", reason=f"{name}: elements were wrong")
        for half, part in (("fresh", slice(0, rounds)), ("resumed", slice(rounds, 2 * rounds))):
            for key, worst in measures.items():
                of_ranks = [[v for measured in r["rounds"][part] for v in measured[key]] for r in results]
                replays = sorted(worst(values) for values in zip(*of_ranks))
                row[f"{name}_{half}_{key}"] = median(replays)
                tenth = len(replays) // 10
                row[f"{name}_{half}_{key}_spread"] = [replays[tenth], replays[-1 - tenth]]
    for half in ("fresh", "resumed"):
        for key in measures:
            row[f"ratio_{half}_{key}"] = row[f"amem_{half}_{key}"] / row[f"stock_{half}_{key}"]
            row[f"chance_{half}_{key}"] = row[f"again_{half}_{key}"] / row[f"stock_{half}_{key}"]
    for key in ("to_host_bytes_per_s", "to_device_bytes_per_s"):
        row[key] = min(r[key] for r in jobs["again"])
    return row


def run_starts(count: int, gpus: int, communicators: int, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Fresh starts of a C program: ranks forked, communicators made, one verified all-reduce on each."""
    times: list[float] = []
    problems: list[str] = []
    hangs = 0
    logs = []
    limit = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="bench-c-") as folder:
        program = run.build_c_program(Path(folder), found["nccl"])
        argv = [str(program), str(gpus), str(communicators), "0", str(1 << 18)]
        env = {**ENABLED, "LD_PRELOAD": f"{found['amem_folder']}/lib/libamem_hook.so"}
        done = 0
        while done < count and time.monotonic() < limit:
            outcome = launch.run([launch.Command(argv, env)], 40.0)
            done += 1
            if outcome.status == "PASS":
                times.append(outcome.seconds)
            else:
                hangs += outcome.status == "TIMEOUT"
                problems.append(f"start {done}: {outcome.status}: {outcome.reason}")
                logs.append(outcome.log[-5000:])
            if done % 10 == 0:
                print(f"starts: {done} done, {hangs} hung, {len(problems) - hangs} failed", flush=True)
    return {
        "starts": done,
        "wanted": count,
        "hangs": hangs,
        "failures": len(problems) - hangs,
        "problems": problems[:20],
        "median_s": median(times),
        "longest_s": max(times, default=None),
        "log": "\n".join(logs),
    }


def number(value: Any, scale: float = 1.0, digits: int = 0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def mode_table(rows: list[dict[str, Any]], speed: dict[str, Any]) -> list[list[str]]:
    head = ["mode", "result", "MB in use", "init s", "connect s", "first pause ms", "pause ms", "floor ms"]
    head += ["resume ms", "floor ms", "next coll ms", "calls", "given MB", "given %", "cycles", "note"]
    lines = [head]
    for row in rows:
        copied = row.get("copied_bytes")
        out, back = (speed.get(f"to_{where}_bytes_per_s") for where in ("host", "device"))
        calls = [number(row.get(key)) for key in ("pause_calls", "resume_calls")]
        lines.append(
            [
                row["label"],
                row["status"],
                number(row.get("active_bytes"), 2**-20),
                number(row.get("init_s"), 1, 2),
                number(row.get("connect_s"), 1, 2),
                number(row.get("first_pause_s"), 1e3),
                number(row.get("pause_s"), 1e3, 1),
                number(copied / out if copied and out else None, 1e3, 1),
                number(row.get("resume_s"), 1e3, 1),
                number(copied / back if copied and back else None, 1e3, 1),
                number(row.get("first_collective_s"), 1e3, 1),
                "+".join(calls),
                number(row.get("given_bytes"), 2**-20),
                number(row.get("given_back"), 100, 1),
                number(row.get("cycles")),
                " ".join(str(row["reason"]).split())[:100],
            ]
        )
    return lines


def speed_table(speed: dict[str, Any]) -> list[list[str]]:
    lines = [["in use, in a CUDA graph", "amem", "spread", "stock", "spread", "ratio", "stock again", "unit"]]
    measures = [
        (f"{operation}_{size}", f"{operation.replace('_', '-')} of {size} MB, bus bandwidth", 1e-9, "GB/s")
        for operation in ("all_reduce", "all_to_all")
        for size in (1, 16, 256)
    ]
    measures.append(("graph_s", "all-reduce of 8 B", 1e6, "us"))
    measures.append(("eager_s", "all-reduce of 8 B, launched one by one", 1e6, "us"))
    for half, when in (("fresh", ""), ("resumed", ", after a pause and resume")):
        for key, label, scale, unit in measures:
            cells = []
            for who in ("amem", "stock"):
                low, high = speed[f"{who}_{half}_{key}_spread"]
                cells += [number(speed[f"{who}_{half}_{key}"], scale, 2)]
                cells += [f"{number(low, scale, 2)}-{number(high, scale, 2)}"]
            cells += [number(speed[f"{what}_{half}_{key}"], 1, 3) for what in ("ratio", "chance")]
            lines.append([label + when, *cells, unit])
    return lines


def write(out: Path, results: dict[str, Any], logs: dict[str, str], name: str = "bench") -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    text = "".join(f"=== {of}\n{log[-LOG_SHARE:]}\n" for of, log in logs.items())
    (out / f"{name}.log").write_text(text, encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what pausing NCCL costs, by several methods")
    parser.add_argument("--gpus", type=int, default=0, help="default: all")
    parser.add_argument("--communicators", type=int, default=0, help="default 8; with --quick 2")
    parser.add_argument("--cycles", type=int, default=5, help="cycles after the first, whose median is reported")
    parser.add_argument("--mode-seconds", type=float, default=45, help="a mode stops cycling after this, from 2 on")
    names = ",".join(m.name for m in MODES)
    parser.add_argument("--modes", default=f"{names},speed", help=f"of {names},speed; or none")
    parser.add_argument("--nccl", default="", help="a libnccl to measure; default: the one that PyTorch loads")
    parser.add_argument("--starts", type=int, default=0, help="count hangs in this many fresh starts")
    parser.add_argument("--budget", type=float, default=350, help="nothing new starts when this has passed")
    parser.add_argument("--quick", action="store_true", help="amem and rebuild only, two communicators, two cycles")
    parser.add_argument("--chart", action="store_true", help="draw bench.png too; needs matplotlib")
    parser.add_argument("--debugger", action="store_true", help="attach gdb or cuda-gdb to ranks that hang")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    args = parser.parse_args()
    if args.quick:
        args.cycles = min(args.cycles, 2)
        if args.modes == parser.get_default("modes"):
            args.modes = "amem,control,rebuild,speed"
    args.communicators = args.communicators or (2 if args.quick else 8)
    return args


def main() -> int:
    args = parse()
    started = time.monotonic()
    found = run.probe(sys.executable)
    gpus = args.gpus or int(found.get("gpus", 0))
    print(json.dumps({**found, "ranks": gpus, "communicators": args.communicators}), flush=True)
    problem = run.unusable(found, gpus)
    if problem:
        print(f"the benchmark can't run: {problem}")
        return 2
    if args.nccl:
        found["nccl"] = str(Path(args.nccl).resolve())
    params = {
        "nccl": found["nccl"] if args.nccl else "",
        "communicators": args.communicators,
        "cycles": args.cycles,
        "seconds": args.mode_seconds,
        "rounds": 2 if args.quick else 4,
    }
    wanted = set(args.modes.split(","))
    results: dict[str, Any] = {"found": found, "gpus": gpus, "params": params, "modes": []}
    logs: dict[str, str] = {}

    def left() -> float:
        return float(args.budget - (time.monotonic() - started))

    with launch.ended_with_us():
        if "speed" in wanted and left() > 20:
            outcome = launch.run(
                bench_commands("speed", {**params, "communicators": 1}, gpus, [ENABLED, {}, {}]),
                min(120.0, left()),
                debugger=args.debugger,
            )
            results["speed"] = summarise_speed(outcome, gpus, params["rounds"])
            logs["speed"] = outcome.log
            print(f"speed: {outcome.status} in {outcome.seconds:.1f} s {outcome.reason[:300]}", flush=True)
            write(args.out, results, logs)
        for mode in MODES:
            if mode.name not in wanted:
                continue
            if left() < 20:
                outcome = launch.Outcome("NOT RUN", 0.0, [], "the budget is spent", "")
            else:
                # Connecting, a first cycle that allocates host memory, and one cycle that overruns.
                deadline = min(args.mode_seconds * 2 + 60, left())
                commands = bench_commands("memory", {**params, "kind": mode.kind}, gpus, [mode.env])
                outcome = launch.run(commands, deadline, debugger=args.debugger)
            row = summarise_mode(mode, outcome)
            found["nccl_version"] = (
                over_ranks(outcome.results, lambda r: r.get("nccl_version")) or found["nccl_version"]
            )
            results["modes"].append(row)
            logs[mode.name] = outcome.log
            print(f"{mode.label}: {row['status']} in {outcome.seconds:.1f} s {row['reason'][:300]}", flush=True)
            if row["status"] in ("FAIL", "TIMEOUT"):
                print(outcome.log[-2500:], flush=True)
            write(args.out, results, logs)
        if args.starts and left() > 20:
            starts = run_starts(args.starts, gpus, args.communicators, found, left() - 5)
            logs["starts"] = starts.pop("log")
            results["starts"] = starts
            write(args.out, results, logs)
    print_results(results)
    if args.chart:
        import chart

        chart.draw(results, args.out / "bench.png")
    print(f"{time.monotonic() - started:.0f} s in all; everything is in {args.out}/bench.json")
    statuses = [row["status"] for row in results["modes"]] + [results.get("speed", {}).get("status", "PASS")]
    starts = results.get("starts", {})
    failed = [s for s in statuses if s not in ("PASS", "SKIP")]
    return 1 if failed or starts.get("hangs") or starts.get("failures") else 0


def print_results(results: dict[str, Any]) -> None:
    speed = results.get("speed", {})
    if speed.get("status") == "PASS":
        print()
        launch.print_table(speed_table(speed))
        print("median of all replays of each graph; spread: from their 10th to their 90th percentile")
        print("stock again: the ratio of a second job of stock NCCL to the first, which is what chance does")
        rates = [speed[k] * 1e-9 for k in ("to_host_bytes_per_s", "to_device_bytes_per_s")]
        print(f"pinned copies, all GPUs at once: {rates[0]:.1f} GB/s to the host, {rates[1]:.1f} GB/s to the device")
    if results["modes"]:
        print()
        launch.print_table(mode_table(results["modes"], speed))
        for row in results["modes"]:
            if row.get("driver_calls"):
                print(f"driver calls of {row['label']}: {json.dumps(row['driver_calls'])}")
            for verb in ("pause", "resume"):
                parts = {k: round(v, 4) for k, v in row.get(f"{verb}_parts", {}).items() if v is not None}
                if parts:
                    print(f"  {verb}: {json.dumps(parts)}")
    starts = results.get("starts")
    if starts:
        print(
            f"\n{starts['starts']} of {starts['wanted']} fresh starts: {starts['hangs']} hung, {starts['failures']} "
            f"failed, median {number(starts['median_s'], 1, 2)} s, longest {number(starts['longest_s'], 1, 2)} s"
        )
        print("\n".join(starts["problems"][:5]))


if __name__ == "__main__":
    sys.exit(main())
