"""What the tests of several processes on the simulator share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))
sys.path.append(str(ROOT / "tests"))

from agent.ranks import RankError, Ranks, library_folder, simulator_folder
from amem import _library

__all__ = ["LIB", "MIB", "ROOT", "SIM", "CallLog", "RankError", "Ranks", "environment", "failure", "kinds", "memory"]
__all__ += ["needs_libraries", "outcome", "places", "python", "ranks", "resident", "right", "run"]

MIB = 1 << 20


LIB = Path(library_folder())
SIM = Path(simulator_folder())

# A wait that should have ended is an error soon, and of amem before it is one of NCCL's or of the harness.
LIMITS = {"AMEM_TIMEOUT_S": "8", "NCCL_STANDIN_TIMEOUT_S": "20"}

needs_libraries = pytest.mark.skipif(
    not all(path.exists() for path in (LIB / _library.HOOK, LIB / _library.CORE, SIM / "libnccl.so.2")),
    reason=f"no libraries in {LIB} and {SIM}: run make",
)


def ranks(count: int, env: Mapping[str, str] | None = None, **options: Any) -> Ranks:
    """Ranks on simulated devices; env and options as of Ranks."""
    return Ranks(count, simulate=True, env={**LIMITS, **(env or {})}, **{"timeout": 30.0, **options})


def right(group: Ranks, comm: int = 0, counts: tuple[int, ...] = (1, 1000, 50_000)) -> None:
    """Collectives of several kinds and sizes are exact, and so is every byte of the metadata."""
    for count in counts:
        for command in ("allreduce", "alltoall"):
            assert group.all(command, comm=comm, count=count) == [0] * len(group), (command, count)
    group.all("verify_memory", comm=comm)


def kinds(group: Ranks, comm: int = 0, count: int = 3000) -> None:
    """One collective of each kind is exact."""
    for command in ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "sendrecv"):
        assert group.all(command, comm=comm, count=count) == [0] * len(group), command


def failure(action: Callable[[], object], error: str) -> str:
    """The message of the exception of this class that the action raises in a rank."""
    with pytest.raises(RankError) as caught:
        action()
    assert caught.value.error == error, str(caught.value)
    return caught.value.message


def outcome(process: Any) -> Any:
    """A rank's answer, or its RankError."""
    try:
        return process.finish()
    except RankError as error:
        return error


class CallLog:
    """The calls of the driver that a rank makes, as the simulator writes them to AMEM_SIM_LOG.

    amem's own figures lack those whose result it does not ask for.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.read = str(path), 0

    def take(self) -> list[tuple[str, int]]:
        """Name and result of each call since the last time, in order."""
        with open(self.path) as log:
            log.seek(self.read)
            lines = log.readlines()
            self.read = log.tell()
        calls = [line.split()[2:] for line in lines]
        # amem's errors and faults have the names without a version.
        return [(re.sub(r"_v\d+$", "", name), int(result)) for name, result in calls]

    def of(self, action: Callable[..., object], *arguments: object) -> list[str]:
        """The names of the functions called meanwhile, in order."""
        self.take()
        action(*arguments)
        return [name for name, _ in self.take()]


def places(calls: Sequence[str], *, middle: bool = False) -> list[tuple[str, int]]:
    """The first and the last call of each function, and one between them."""
    return [
        (name, number)
        for name, count in sorted(Counter(calls).items())
        for number in sorted({1, (count + 1) // 2 if middle else 1, count})
    ]


def memory(group: Ranks, wanted: list[int], members: Sequence[int] | None = None) -> None:
    """The devices' memory in use is, or soon is: peers are asked whether they use what was freed."""
    deadline = time.monotonic() + 5
    members = range(len(group)) if members is None else members
    while (used := [group[member].call("meminfo") for member in members]) != wanted:
        assert time.monotonic() < deadline, f"{used} bytes in use, not {wanted}"
        time.sleep(0.01)


def resident(stats: Any) -> dict[str, int]:
    """Bytes that a pause does not release, by reason."""
    found: dict[str, int] = stats["resident"]
    return found


def environment(sim_dir: Path, **changes: str) -> dict[str, str]:
    """For a process of a test's own: the environment without amem's variables, on simulated devices."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AMEM_", "LD_", "NCCL_"))}
    return {
        **env,
        **LIMITS,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests" / "sim")]),
        "AMEM_LIBRARY_DIR": str(LIB),
        "AMEM_SIM_LIBRARY_DIR": str(SIM),
        "AMEM_SIM_DIR": str(sim_dir),
        "LD_LIBRARY_PATH": str(SIM),
        **changes,
    }


def run(argv: list[str], env: Mapping[str, str], timeout: float = 30) -> str:
    """What the program prints. It must end with status 0."""
    done = subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{argv}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def python(script: str, env: Mapping[str, str], timeout: float = 30) -> str:
    return run([sys.executable, "-c", script], env, timeout)
