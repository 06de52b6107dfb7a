"""Measures what pausing torch memory costs: amem beside torch_memory_saver, on one GPU.

    torch_bench.py [--gigabytes 20] [--tensors 20] [--bare-gigabytes 60] [--bare-tensors 2000]
                   [--cycles 5] [--rounds 2] [--out DIR]

Two cases: one region with a backup in host memory, and many tensors without
any. Each is run in processes of their own, in turn, --rounds times. A table
comes last; all that was measured is in torch_bench.json in the output folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

from nccl_bench import median, number, write

import launch
import run

HERE = Path(__file__).resolve().parent
LABELS = {
    "amem": "amem",
    "saver": "torch_memory_saver",
    "retained": "torch_memory_saver, host memory retained",
}


def measure(who: str, params: dict[str, Any], deadline: float) -> launch.Outcome:
    argv = [sys.executable, str(HERE / "torch_bench_rank.py"), who, json.dumps(params)]
    env = {"AMEM_ENABLE": "1"} if who == "amem" else {}
    return launch.run(launch.rank_commands(argv, 1, env), deadline)


def summarise(case: str, who: str, outcomes: list[launch.Outcome]) -> dict[str, Any]:
    """Medians over the cycles after each process's first."""
    results = [o.results[0] if o.results else {} for o in outcomes]
    worst = next((o for o in outcomes if o.status != "PASS"), outcomes[0])
    row: dict[str, Any] = {"case": case, "who": who, "label": LABELS[who], "runs": results}
    row.update(status=worst.status, reason=worst.reason)
    skipped = [str(r["skipped"]) for r in results if "skipped" in r]
    if skipped:
        row.update(status="SKIP", reason=skipped[0])
        return row
    cycles = [r.get("cycles", []) for r in results]
    later = [c for run_cycles in cycles for c in run_cycles[1:]]
    everything = [c for run_cycles in cycles for c in run_cycles]
    row["cycles"] = len(later)
    row["first_pause_s"] = median([c[0]["pause_s"] for c in cycles if c])
    for key in ("pause_s", "resume_s", "pause_calls", "resume_calls"):
        row[key] = median([float(c[key]) for c in later if key in c])
    for key in ("bytes", "floor_out_s", "floor_back_s"):
        row[key] = median([float(r[key]) for r in results if key in r])
    row["given_bytes"] = min((c["given_bytes"] for c in everything), default=None)
    row["wrong"] = sum(c["wrong"] for c in everything)
    if row["wrong"]:
        row.update(status="FAIL", reason=f"{row['wrong']} elements were wrong")
    return row


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    head = ["case", "with", "result", "GB", "first pause ms", "pause ms", "floor ms", "resume ms", "floor ms"]
    lines = [[*head, "calls", "given %", "cycles", "note"]]
    for row in rows:
        size, given = row.get("bytes"), row.get("given_bytes")
        calls = [number(row.get(key)) for key in ("pause_calls", "resume_calls")]
        lines.append(
            [
                row["case"],
                row["label"],
                row["status"],
                number(size, 1e-9, 1),
                *(
                    number(row.get(key), 1e3, 1)
                    for key in ("first_pause_s", "pause_s", "floor_out_s", "resume_s", "floor_back_s")
                ),
                "+".join(calls),
                number(given / size if size and given is not None else None, 100, 1),
                number(row.get("cycles")),
                " ".join(str(row["reason"]).split())[:100],
            ]
        )
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what pausing torch memory costs, beside torch_memory_saver")
    parser.add_argument("--gigabytes", type=float, default=20, help="in a region with a backup in host memory")
    parser.add_argument("--tensors", type=int, default=20, help="of which it is made")
    parser.add_argument("--bare-gigabytes", type=float, default=60, help="in a region without a backup")
    parser.add_argument("--bare-tensors", type=int, default=2000, help="of which that is made")
    parser.add_argument("--cycles", type=int, default=5, help="after each process's first")
    parser.add_argument("--rounds", type=int, default=2, help="how often amem and torch_memory_saver take turns")
    parser.add_argument("--deadline", type=float, default=150, help="of one process, in seconds")
    parser.add_argument("--budget", type=float, default=550, help="nothing new starts when this has passed")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    return parser.parse_args()


def main() -> int:
    args = parse()
    started = time.monotonic()
    found = run.probe(sys.executable)
    print(json.dumps(found), flush=True)
    problem = run.unusable(found, min(1, int(found.get("gpus", 0))), 1)
    if problem:
        print(f"the benchmark can't run: {problem}")
        return 2
    contenders = list(LABELS)
    if importlib.util.find_spec("torch_memory_saver") is None:
        print("SKIP torch_memory_saver: it is not installed, so amem is measured alone", flush=True)
        contenders = ["amem"]
    cases = {
        "backup": {"backup": True, "bytes": args.gigabytes * 1e9, "tensors": args.tensors},
        "no backup": {"backup": False, "bytes": args.bare_gigabytes * 1e9, "tensors": args.bare_tensors},
    }
    rows: list[dict[str, Any]] = []
    logs: dict[str, str] = {}
    results: dict[str, Any] = {"found": found, "cases": cases, "cycles": args.cycles, "rows": rows}
    with launch.ended_with_us():
        for case, params in cases.items():
            outcomes: dict[str, list[launch.Outcome]] = {}
            for turn in range(args.rounds):
                for who in contenders:
                    left = args.budget - (time.monotonic() - started)
                    if (who == "retained" and not params["backup"]) or (left < 20 and turn):
                        continue
                    outcome = launch.Outcome("NOT RUN", 0.0, [], "the budget is spent", "")
                    if left >= 20:
                        outcome = measure(who, {**params, "cycles": args.cycles}, min(args.deadline, left))
                    outcomes.setdefault(who, []).append(outcome)
                    logs[f"{case}, {who}, {turn}"] = outcome.log
                    print(f"{case}, {LABELS[who]}: {outcome.status} in {outcome.seconds:.1f} s {outcome.reason[:300]}")
                    if outcome.status in ("FAIL", "TIMEOUT"):
                        print(outcome.log[-2500:], flush=True)
            rows += [summarise(case, who, list_) for who, list_ in outcomes.items()]
            write(args.out, results, logs, "torch_bench")
    print()
    launch.print_table(table(rows))
    print("calls: of the driver, in a pause and in a resume; floor: pinned copies of the same bytes, same process")
    print(f"{time.monotonic() - started:.0f} s in all; everything is in {args.out}/torch_bench.json")
    # What torch_memory_saver does not pass is told, and is no failure of amem's.
    return 1 if any(row["status"] != "PASS" for row in rows if row["who"] == "amem") else 0


if __name__ == "__main__":
    sys.exit(main())
