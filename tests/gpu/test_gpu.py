"""The steps of run.py as pytest tests. GPU_RANKS=2 uses two GPUs; the default is all of them."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import launch
import run

STEPS = run.choose(run.steps(cycles=10, rounds=10), only="", quick=False)


@functools.cache
def _setup() -> run.Setup | str:
    gpus = launch.device_count()
    if gpus < 1:
        return "no GPU found"
    found = run.probe(sys.executable)
    ranks = int(os.environ.get("GPU_RANKS", found.get("gpus", 0)))
    return run.unusable(found, ranks, 1) or run.Setup(ranks, sys.executable, found)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name.replace(" ", "-"))
def test_on_gpus(step: run.Step) -> None:
    setup = _setup()
    if isinstance(setup, str):
        pytest.skip(setup)
    with launch.ended_with_us():
        row = run.run_step(step, setup)
    if row["status"] == "SKIP":
        pytest.skip(row["reason"])
    assert row["status"] == "PASS", f"{row['reason']}\n{row['log'][-4000:]}"
