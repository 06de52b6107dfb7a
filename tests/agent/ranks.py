"""Starts and drives the tests' ranks.

    with Ranks(4) as ranks:
        ranks.init(ncomm=2)
        assert ranks.all("allreduce", comm=0, count=1000) == [0] * 4
        ranks.start("pause")
        ...
        ranks.finish()
        ranks[2].call("kill")

A collective's answer is the number of wrong elements. rank_agent.py lists the
commands. An installed amem is taken with its libraries; without one, that of
this checkout with those in build/. AMEM_LIBRARY_DIR and AMEM_SIM_LIBRARY_DIR
override both.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

from amem import _library, _ranks
from amem._ranks import RankError, RankTimeout

__all__ = ["RankError", "RankTimeout", "Ranks", "simulated"]


def simulated() -> bool:
    """Whether ranks run on the simulator by default: there is no real driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return not os.path.exists("/dev/nvidiactl")


def library_folder() -> str:
    """The installed libraries, which are what users get, or else this checkout's."""
    folder = _library.folder()
    return folder if os.path.isdir(folder) else str(ROOT / "build" / "lib")


def simulator_folder() -> str:
    """This checkout's simulator, or else the installed one, which has no variants for tests."""
    folder = str(ROOT / "build" / "sim")
    chosen = os.environ.get("AMEM_SIM_LIBRARY_DIR")
    return chosen or (folder if os.path.isdir(folder) else _library.simulator_folder())


class Ranks(_ranks.Ranks):
    def __init__(
        self,
        count: int,
        *,
        simulate: bool | None = None,
        env: Mapping[str, str] | None = None,
        rank_env: Sequence[Mapping[str, str]] | None = None,
        sim_dir: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        folders = {
            "AMEM_LIBRARY_DIR": library_folder(),
            "AMEM_SIM_LIBRARY_DIR": simulator_folder(),
        }
        super().__init__(
            count,
            simulate=simulated() if simulate is None else simulate,
            argv=(sys.executable, str(Path(__file__).with_name("rank_agent.py"))),
            env={**folders, **(env or {})},
            rank_env=rank_env,
            sim_dir=sim_dir,
            timeout=timeout,
        )

    def __enter__(self) -> Ranks:
        super().__enter__()
        return self

    def split(self, comm: int, colors: Sequence[int]) -> list[Any]:
        """Splits a communicator of all ranks; each one's number of its part."""
        per_rank = [
            {"color": color, "rank": colors[:number].count(color), "size": colors.count(color)}
            for number, color in enumerate(colors)
        ]
        return self.all("split", comm=comm, per_rank=per_rank)
