"""Where the tests find what the build made."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def wheel() -> Path:
    """The one wheel in dist/, or the one that AMEM_WHEEL names."""
    given = os.environ.get("AMEM_WHEEL")
    wheels = [Path(given)] if given else sorted((ROOT / "dist").glob("amem-*.whl"))
    if not wheels:
        pytest.skip("no wheel in dist/: run make wheel")
    assert len(wheels) == 1, f"more than one wheel: {wheels}"
    return wheels[0]


def unpacked(target: Path) -> Path:
    with zipfile.ZipFile(wheel()) as archive:
        archive.extractall(target)
    return target


def run(*command: "str | Path", env: "dict[str, str] | None" = None) -> str:
    """What the command prints; its standard error too when it fails."""
    done = subprocess.run([str(c) for c in command], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def clean_env(**changes: str) -> "dict[str, str]":
    """The environment without amem's, Python's and the linker's variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AMEM_", "PYTHON", "LD_"))}
    env.update(changes)
    return env


def tool(name: str) -> "list[str]":
    """A tool of the environment that runs the tests."""
    return [sys.executable, "-m", name]
