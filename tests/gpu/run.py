"""Runs the GPU scenarios, each in processes of its own with a deadline, and prints a table.

    run.py [--quick] [--only NAME[,NAME]] [--out DIR] [--ranks N] [--budget SECONDS]

The table comes last; gpu_check.json and gpu_check.log in the output folder
hold everything. The exit status is 0 only if every step passed or was skipped
for a reason that the table gives. A step that is "SEEN" tells what stock NCCL
does, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launch

HERE = Path(__file__).resolve().parent
LOG_SHARE = 400_000
# A destroyed communicator may leave this much more behind with amem than without.
LEFTOVER_SLACK = 32 << 20
ENABLED = {"AMEM_ENABLE": "1"}
FINE = ("PASS", "SKIP", "SEEN")

PROBE = """
import json, re, sys
found = {"python": sys.version.split()[0]}
import torch, torch.distributed
found["torch"] = torch.__version__
found["gpus"] = torch.cuda.device_count()
found["gpu"] = torch.cuda.get_device_name(0) if found["gpus"] else ""
found["nccl"] = next(iter(re.findall(r"\\S*/libnccl\\.so[.0-9]*$", open("/proc/self/maps").read(), re.M)), "")
found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
try:
    import amem
    found["amem"] = amem.__version__
    found["amem_folder"] = amem.__path__[0]
except ImportError as error:
    found["missing"] = str(error)
print(json.dumps(found))
"""


@dataclass
class Step:
    name: str
    scenario: str
    params: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=lambda: dict(ENABLED))
    jobs: list[dict[str, str]] | None = None
    deadline: float = 60.0
    quick: bool = False
    program: str = "ranks.py"
    gpus: int = 0  # as many ranks, one a GPU; 0: all, two at least
    default: bool = True  # False: only where --only has its whole name
    may_hang: bool = False  # it shows what stock NCCL does


def steps(cycles: int, rounds: int) -> list[Step]:
    """In the order in which a failure tells most."""
    few = max(2, cycles // 3)
    small = {"max_bytes": 1 << 26}
    result = [
        Step("one group", "groups", {"groups": 1, "cycles": cycles}, quick=True),
        Step("C program", "c_program", {"cycles": cycles}, quick=True),
        Step("control regions only", "groups", {"groups": 2, "cycles": cycles, "control_only": True}, quick=True),
        Step("two groups", "groups", {"groups": 2, "cycles": cycles}),
        Step("eight groups and pairs", "groups", {"groups": 8, "cycles": cycles, "pairs": True}, deadline=90),
        Step("split groups", "split", {"cycles": cycles}),
        Step("graph", "graph", {"cycles": cycles}, quick=True),
        Step("direct handles", "groups", {"groups": 2, "cycles": cycles}),
    ]
    result[2].env["AMEM_NCCL_OFFLOAD_FREE_TAG"] = "7"
    result[-1].env["AMEM_ARENA"] = "0"
    for protocol in ("LL", "LL128", "Simple"):
        step = Step(f"protocol {protocol}", "groups", {"groups": 1, "cycles": cycles, **small})
        step.env["NCCL_PROTO"] = protocol
        result.append(step)
    control = Step("protocol LL128, control only", "groups", {"groups": 1, "cycles": cycles, **small})
    control.env.update({"NCCL_PROTO": "LL128", "AMEM_NCCL_OFFLOAD_FREE_TAG": "7"})
    result.append(control)
    rates = {"cycles": cycles, "collectives": 2000, **small}
    storm = Step("stress", "stress", rates, deadline=90)
    controls = Step("stress, control regions only", "stress", rates, deadline=90)
    controls.env["AMEM_NCCL_OFFLOAD_FREE_TAG"] = "7"
    jobs = [{"AMEM_GROUPID": "100"}, {"AMEM_GROUPID": "200"}]
    lonely = Step("one rank pauses alone", "lonely", small)
    lonely.env["AMEM_TIMEOUT_S"] = "3"
    return [
        *result,
        storm,
        controls,
        *connecting_steps({"groups": 6, "rounds": min(rounds, 4), "repeats": 4, **small}),
        turn_held_step(rounds, small),
        Step("two jobs on the same GPUs", "colocated", {"cycles": cycles, **small}, jobs=jobs),
        Step("groups come and go", "churn", {"groups": 2, "rounds": rounds, **small}, deadline=90),
        Step("misuse", "misuse", small, quick=True),
        lonely,
        Step("out of memory", "out_of_memory", small),
        Step("enabled too late", "too_late", small, env={}, quick=True),
        Step("NCCL_CUMEM_ENABLE=0", "no_cumem", small, env={"NCCL_CUMEM_ENABLE": "0"}),
        Step("memory of ncclMemAlloc", "user_memory", {"cycles": few, **small}),
        *torch_steps(few),
    ]


def connecting_steps(params: dict[str, Any]) -> list[Step]:
    """Communicators used by several threads, in another order on each rank.

    NCCL asks for one order on all ranks (its user guide, "Using multiple NCCL
    communicators concurrently"): kernels wait for their peers', so ranks that
    start two of them in different orders wait for ever unless both can run at
    once. What that takes:
    """
    together = {
        # The blocks of a collective, and of send and receive too, whose channels come from the same number
        # (ncclTopoComputeP2pChannels). At NCCL's own choice those of 7 communicators fill more than a GPU.
        "NCCL_MAX_CTAS": "4",
        # Hardware queues, 8 by default. There are more streams, and of two in one queue the second may wait
        # for the first. 32 is the most that CUDA has.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # Loading a kernel at its first launch may wait for those that run (CUDA's guide, "Lazy Loading").
        "CUDA_MODULE_LOADING": "EAGER",
    }
    name = "connecting in several threads"
    stock = {**params, "stock": True}
    return [
        Step(name, "connecting", params, {**ENABLED, **together}, deadline=120),
        Step(f"{name}, stock", "connecting", stock, together, deadline=120, default=False),
        Step(f"{name}, stock, default queues", "connecting", stock, {}, default=False, may_hang=True),
    ]


def turn_held_step(rounds: int, params: dict[str, Any]) -> Step:
    step = Step("connecting while the turn is held", "turn_held", {"rounds": rounds, **params}, deadline=90)
    step.env["AMEM_HOST_PREALLOC"] = "1"
    return step


@dataclass
class Setup:
    ranks: int
    python: str
    found: dict[str, Any]
    debugger: bool = False


def probe(python: str) -> dict[str, Any]:
    """What is installed. Imports torch in another process, which also warms the file cache."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE],
            capture_output=True,
            check=False,
            timeout=180,
            text=True,
            env=launch.base_environment(),
        )
    except subprocess.TimeoutExpired:
        return {"missing": "importing torch took over 180 s"}
    if done.returncode != 0:
        return {"missing": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "python failed"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def unusable(found: dict[str, Any], ranks: int, least: int = 2) -> str:
    """Why the scenarios can't run here; empty if they can."""
    if "missing" in found:
        return str(found["missing"])
    if ranks < least:
        return f"{least} GPUs are needed, {found.get('gpus', 0)} found"
    if found["gpus"] < ranks:
        return f"{ranks} ranks need as many GPUs, {found['gpus']} found"
    return ""


def torch_steps(cycles: int) -> list[Step]:
    """Torch memory in regions: on one GPU, and together with NCCL."""
    params = {"cycles": cycles, "max_bytes": 1 << 26}
    one: dict[str, Any] = {"program": "torch_ranks.py", "gpus": 1}
    several: dict[str, Any] = {"program": "torch_ranks.py"}
    steps = {**params, "steps": 3 * cycles}
    training = Step("torch training", "training", steps, deadline=90, **several)
    whole = Step("torch training, the whole program", "training", {**steps, "whole": True}, deadline=90, **several)
    for step in (training, whole):
        # Without it, cuBLAS may sum in another order from run to run.
        step.env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    expandable = Step("torch regions: expandable segments", "regions", params, deadline=90, **one)
    expandable.env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return [
        Step("torch regions", "regions", params, deadline=90, **one),
        Step("torch regions: nesting and threads", "region_rules", params, **one),
        Step("torch regions: graph", "region_graph", params, **one),
        Step("torch regions: the default region", "default_region", params, deadline=90, **one),
        Step("torch regions: freed after a resume", "returned", params, **one),
        Step("torch regions: host memory beside a kernel", "host_memory", {**params, "cycles": 2}, **one),
        Step("torch regions: left paused", "left_paused", params, **one),
        expandable,
        Step("torch regions: shared with a process", "shared", params, deadline=90, **one),
        Step("torch regions: out of memory", "region_memory", params, jobs=[{}, {}], **one),
        Step("torch_memory_saver's interface", "saver", params, **one),
        Step("torch tags and NCCL", "tags_and_nccl", params, deadline=90, **several),
        Step("torch regions in NCCL's graph", "nccl_graph", params, **several),
        Step("torch regions with holes in NCCL's graph", "nccl_graph", {**params, "holes": True}, **several),
        Step("torch regions read by the other GPU", "other_gpus", params, **one),
        training,
        whole,
    ]


def build_c_program(folder: Path, nccl: str, compiler: str = "gcc") -> Path:
    program = folder / "allreduce"
    argv = [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-o", str(program), str(HERE / "allreduce.c"), nccl]
    argv += [f"-Wl,-rpath,{Path(nccl).parent}", "-Wl,--allow-shlib-undefined", "-pthread", "-ldl"]
    done = subprocess.run(argv, capture_output=True, check=False, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{compiler} failed: {done.stderr[-500:]}")
    return program


def run_step(step: Step, setup: Setup) -> dict[str, Any]:
    """One line of the table, with all that was measured."""
    short = unusable(setup.found, setup.ranks, step.gpus or 2)
    if short:
        return _row(step, launch.Outcome("SKIP", 0.0, [], short, ""))
    if step.scenario == "c_program":
        outcome = _run_c_program(step, setup)
    elif step.scenario in ("churn", "training"):
        return _run_beside_stock(step, setup)
    else:
        outcome = _run_ranks(step, setup, step.params, step.env)
    row = _row(step, outcome)
    if step.may_hang and row["status"] in ("PASS", "TIMEOUT"):
        rounds = min((r.get("rounds", 0) for r in outcome.results), default=0)
        hung = f"hung after {rounds} rounds: {row['reason']}" if row["status"] == "TIMEOUT" else ""
        row.update(status="SEEN", reason=hung or f"passed {rounds} rounds")
    return row


def _run_ranks(step: Step, setup: Setup, params: dict[str, Any], env: dict[str, str]) -> launch.Outcome:
    argv = [setup.python, str(HERE / step.program), step.scenario, json.dumps(params)]
    commands = launch.rank_commands(argv, step.gpus or setup.ranks, env, step.jobs)
    return launch.run(commands, step.deadline, debugger=setup.debugger)


def _run_c_program(step: Step, setup: Setup) -> launch.Outcome:
    with tempfile.TemporaryDirectory(prefix="gpu-c-") as folder:
        try:
            program = build_c_program(Path(folder), setup.found["nccl"])
        except (RuntimeError, OSError) as error:
            return launch.Outcome("FAIL", 0.0, [{}], str(error), "")
        argv = [str(program), str(setup.ranks), "4", str(step.params["cycles"]), str(1 << 20)]
        env = {**step.env, "LD_PRELOAD": f"{setup.found['amem_folder']}/lib/libamem_hook.so"}
        return launch.run([launch.Command(argv, env)], step.deadline, debugger=setup.debugger)


def _run_beside_stock(step: Step, setup: Setup) -> dict[str, Any]:
    """The same work with stock NCCL first, then with amem."""
    plain = {k: v for k, v in step.env.items() if not k.startswith("AMEM_")}
    stock = _run_ranks(step, setup, {**step.params, "stock": True}, plain)
    if stock.status != "PASS":
        row = _row(step, stock)
        row["reason"] = "stock: " + row["reason"]
        return row
    ours = _run_ranks(step, setup, step.params, step.env)
    row = _row(step, ours)
    row["seconds"] += stock.seconds
    row["stock_results"] = stock.results
    if row["status"] == "PASS":
        compare = compare_leftovers if step.scenario == "churn" else compare_training
        compare(row, ours.results, stock.results)
    return row


def compare_leftovers(row: dict[str, Any], ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    for kind in ("leftover", "growth"):
        more = max(o[kind] - s[kind] for o, s in zip(ours, stock))
        row[f"{kind}_beyond_stock"] = more
        if more > LEFTOVER_SLACK:
            row["status"] = "FAIL"
            row["reason"] = f"{kind} after the last group is {more >> 20} MB above stock NCCL's"
    row["note"] = f"left behind {row['leftover_beyond_stock'] / 2**20:+.0f} MB against stock"


def compare_training(row: dict[str, Any], ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    for rank, (o, s) in enumerate(zip(ours, stock)):
        differ = [i for i, (a, b) in enumerate(zip(o["losses"], s["losses"])) if a != b]
        if differ or o["weights"] != s["weights"]:
            what = f"loss of step {differ[0]} differs" if differ else "weights after the last step differ"
            row.update(status="FAIL", reason=f"rank {rank}: the {what} from that without amem")
    row["note"] = f"{len(ours[0]['losses'])} steps, losses and weights as without amem"


def _row(step: Step, outcome: launch.Outcome) -> dict[str, Any]:
    results = outcome.results

    def worst(key: str, choose: Any = max) -> Any:
        values = [r[key] for r in results if r.get(key) is not None]
        return choose(values) if values else None

    status, reason = outcome.status, outcome.reason
    skipped = [str(r["skipped"]) for r in results if "skipped" in r]
    if status == "PASS" and skipped:
        status, reason = "SKIP", skipped[0]
    return {
        "step": step.name,
        "scenario": step.scenario,
        "params": step.params,
        "env": step.env,
        "status": status,
        "reason": reason,
        "seconds": outcome.seconds,
        "cycles": worst("cycles", min),
        "nccl_bytes": worst("nccl_bytes"),
        "given_back": worst("given_back", min),
        "first_pause_s": worst("first_pause_s"),
        "pause_s": worst("pause_s"),
        "resume_s": worst("resume_s"),
        "note": next((str(r["note"]) for r in results if r.get("note")), ""),
        "results": results,
        "log": outcome.log,
    }


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    def number(value: Any, scale: float, digits: int) -> str:
        return "-" if value is None else f"{value * scale:.{digits}f}"

    lines = [["step", "result", "s", "cycles", "held MB", "given %", "pause ms", "resume ms", "note"]]
    for row in rows:
        note = row["note"] if row["status"] == "PASS" else row["reason"]
        lines.append(
            [
                row["step"],
                row["status"],
                number(row["seconds"], 1, 1),
                number(row.get("cycles"), 1, 0),
                number(row.get("nccl_bytes"), 2**-20, 0),
                number(row.get("given_back"), 100, 1),
                number(row.get("pause_s"), 1e3, 1),
                number(row.get("resume_s"), 1e3, 1),
                " ".join(note.split())[:160],
            ]
        )
    return lines


def write_results(out: Path, found: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    plain = [{k: v for k, v in row.items() if k != "log"} for row in rows]
    (out / "gpu_check.json").write_text(json.dumps({"found": found, "steps": plain}, indent=1), encoding="utf-8")
    with open(out / "gpu_check.log", "w", encoding="utf-8") as file:
        for row in rows:
            file.write(f"=== {row['step']}: {row['status']} {row['reason']}\n{row.get('log', '')[-LOG_SHARE:]}\n")


def choose(all_steps: list[Step], only: str, quick: bool) -> list[Step]:
    if not only:
        return [s for s in all_steps if s.default and (s.quick or not quick)]
    text = only.strip().lower()
    words = [w.strip() for w in text.split(",") if w.strip()]
    chosen = [s for s in all_steps if s.name.lower() == text and "," in text] or [
        s
        for s in all_steps
        if (any(w in s.name.lower() or w == s.scenario for w in words) if s.default else s.name.lower() in text)
    ]
    if not chosen:
        raise SystemExit(f"no step matches {only}; there are: " + "; ".join(s.name for s in all_steps))
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description="amem on real GPUs")
    parser.add_argument("--quick", action="store_true", help="the most telling steps only, fewer cycles")
    parser.add_argument("--only", default="", help="steps whose name contains one of these words, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--ranks", type=int, default=0, help="default: one for each GPU")
    parser.add_argument("--cycles", type=int, default=0, help="pause and resume cycles a step (default 10, quick 3)")
    parser.add_argument("--budget", type=float, default=290.0, help="no step starts when its share would pass this")
    parser.add_argument("--stop", action="store_true", help="stop at the first step that fails")
    parser.add_argument("--debugger", action="store_true", help="attach gdb or cuda-gdb to ranks that hang")
    parser.add_argument("--list", action="store_true", help="print the steps and exit")
    args = parser.parse_args()

    started = time.monotonic()
    every = steps(args.cycles or (3 if args.quick else 10), 4 if args.quick else 10)
    chosen = every if args.list and not (args.only or args.quick) else choose(every, args.only, args.quick)
    if args.list:
        print("\n".join(f"{s.name} ({s.scenario}{'' if s.default else ', only by its name'})" for s in chosen))
        return 0
    found = probe(sys.executable)
    ranks = args.ranks or int(found.get("gpus", 0))
    problem = unusable(found, ranks, 1)
    print(json.dumps({**found, "ranks": ranks}), flush=True)
    if problem:
        print(f"gpu_check can't run: {problem}")
        return 2
    setup = Setup(ranks, sys.executable, found, args.debugger)
    rows: list[dict[str, Any]] = []
    with launch.ended_with_us():
        for step in chosen:
            left = args.budget - (time.monotonic() - started)
            if left < 15 or (args.stop and any(r["status"] not in FINE for r in rows)):
                reason = "the budget is spent" if left < 15 else "an earlier step failed"
                rows.append(_row(step, launch.Outcome("NOT RUN", 0.0, [], reason, "")))
                continue
            step.deadline = min(step.deadline + step.params.get("cycles", 0), left)
            row = run_step(step, setup)
            rows.append(row)
            print(f"{row['step']}: {row['status']} in {row['seconds']:.1f} s {row['reason'][:400]}", flush=True)
            if row["status"] in ("FAIL", "TIMEOUT"):
                print(row["log"][-3000:], flush=True)
            write_results(args.out, found, rows)
    write_results(args.out, found, rows)
    print()
    launch.print_table(table(rows))
    passed, skipped, seen = (sum(r["status"] == status for r in rows) for status in FINE)
    failed = len(rows) - passed - skipped - seen
    print(
        f"{passed} passed, {failed} failed, {skipped} skipped{f', {seen} seen' if seen else ''} "
        f"in {time.monotonic() - started:.0f} s on {ranks} GPUs"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
