"""python -m amem demo and info."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from amem import _library
from amem._ranks import PACKAGE_PARENT
from amem.demo import Cycle

import fake_library

ROOT = Path(__file__).resolve().parents[2]
GOOD = Cycle(
    held_before=[100, 100],
    held_paused=[0, 0],
    held_after=[100, 100],
    used_before=[300, 300],
    used_paused=[200, 200],
    used_after=[300, 300],
    pauses=[{"bytes": 100}, {"bytes": 100}],
    resumes=[{"bytes": 100}, {"bytes": 100}],
    mismatches=[0, 0],
)


def test_a_good_cycle_has_no_failures() -> None:
    assert GOOD.failures() == []


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"mismatches": [0, 7]}, "rank 1 got 7 wrong elements"),
        ({"held_paused": [100, 0]}, "rank 0 gave no memory back"),
        ({"pauses": [{"bytes": 0}, {"bytes": 100}]}, "rank 0 gave no memory back"),
        ({"used_paused": [200, 300]}, "GPU 1 has no more free memory than before"),
        ({"held_after": [90, 100]}, "rank 0 holds 90 bytes, before 100"),
    ],
)
def test_the_demo_notices(change: dict[str, list[object]], failure: str) -> None:
    assert dataclasses.replace(GOOD, **change).failures() == [failure]  # type: ignore[arg-type]


def amem(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "amem", *arguments],
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT, **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
    )


def built(folder: str, name: str) -> str:
    found = folder if os.path.isdir(folder) else str(ROOT / "build" / name)
    if not os.path.isdir(found):
        pytest.skip(f"{found} is missing: run make")
    return found


def leftovers() -> set[str]:
    folders = (tempfile.gettempdir(), "/dev/shm")
    return {name for folder in folders for name in os.listdir(folder) if name.startswith(("amem-sim-", "amem-ranks-"))}


@pytest.mark.parametrize("good", [True, False])
def test_the_demo_runs_on_the_simulator_and_leaves_nothing(good: bool) -> None:
    lib, sim = built(_library.folder(), "lib"), built(_library.simulator_folder(), "sim")
    before = leftovers()
    env = {} if good else {"NCCL_CUMEM_ENABLE": "0"}
    done = amem(
        *("demo", "--simulate", "--ranks", "2", "--communicators", "2", "--cycles", "2"),
        AMEM_LIBRARY_DIR=lib,
        AMEM_SIM_LIBRARY_DIR=sim,
        **env,
    )
    assert leftovers() <= before
    if good:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 of 2 cycles verified" in done.stdout
    else:
        assert done.returncode == 1
        assert "NCCL_CUMEM_ENABLE" in done.stderr


def test_the_demo_refuses_what_it_can_not_do() -> None:
    assert amem("demo", "--simulate", "--ranks", "1").returncode == 2
    assert amem("demo", "--cycles", "0").returncode == 2


def test_info_says_what_is_missing(tmp_path: Path) -> None:
    fake_library.build(tmp_path)
    done = amem("info", AMEM_LIBRARY_DIR=str(tmp_path), NCCL_CUMEM_ENABLE="0")
    assert done.returncode == 1
    assert f"{tmp_path}/libamem_nccl.so does not exist" in done.stdout
    assert "NCCL_CUMEM_ENABLE=0: " in done.stdout
    assert "off at start, active once enabled" in done.stdout


def test_info_notices_an_ignored_amem_enable(tmp_path: Path) -> None:
    fake_library.build(tmp_path)
    # Without site, no .pth file is read.
    script = "import sys, amem.info; sys.exit(amem.info.main())"
    done = fake_library.run(script, tmp_path, AMEM_ENABLE="1")
    assert done.returncode == 1
    assert re.match(r"would not work +AMEM_ENABLE is set but did nothing", done.stdout), "said first"


def test_info_says_first_why_amem_is_not_enabled(tmp_path: Path) -> None:
    fake_library.build(tmp_path)
    script = "import amem._autoenable, amem.info; sys.exit(amem.info.main())"
    done = fake_library.run(script, tmp_path, AMEM_ENABEL="1")
    assert done.returncode == 1
    assert re.match(r"would not work +AMEM_ENABEL is set", done.stdout), done.stdout
