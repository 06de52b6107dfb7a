"""One process of torch_bench.py: `torch_bench_rank.py amem|saver|retained JSON`."""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

import torch

import launch

PIECE = 256 << 20
Region = AbstractContextManager[object]
# What statistics themselves call.
UNCOUNTED = ("cuMemGetInfo", "cuCtxPushCurrent")


class NotPossible(Exception):
    """This torch_memory_saver lacks what is to be measured."""


class Amem:
    def __init__(self, backup: bool) -> None:
        import amem

        self.amem: Any = amem
        self.backup = "cpu" if backup else "none"
        self.pause: Callable[[], object] = amem.pause
        self.resume: Callable[[], object] = amem.resume

    def region(self) -> Region:
        return self.amem.region("bench", backup=self.backup)  # type: ignore[no-any-return]

    def calls(self) -> int | None:
        counts: dict[str, int] = self.amem.stats()["driver_calls"]
        return sum(n for name, n in counts.items() if name not in UNCOUNTED)


class Saver:
    """torch_memory_saver; retained: with host memory that is kept from one pause to the next, as amem's is."""

    def __init__(self, backup: bool, retained: bool) -> None:
        import torch_memory_saver  # type: ignore[import-not-found,unused-ignore]

        self.saver: Any = torch_memory_saver.torch_memory_saver
        self.backup = backup
        self.saver.hook_mode = "torch"
        if retained:
            if not hasattr(type(self.saver), "retain_cpu_backup"):
                raise NotPossible("this torch_memory_saver has no retain_cpu_backup")
            self.saver.retain_cpu_backup = True
        self.pause: Callable[[], object] = self.saver.pause
        self.resume: Callable[[], object] = self.saver.resume

    def region(self) -> Region:
        return self.saver.region(tag="bench", enable_cpu_backup=self.backup)  # type: ignore[no-any-return]

    def calls(self) -> int | None:
        return None


class Bench:
    def __init__(self, who: str, params: dict[str, Any]) -> None:
        self.params = params
        self.backup = bool(params["backup"])
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.scratch = torch.zeros(PIECE // 8, dtype=torch.int64, device=self.device)
        self.bad = torch.zeros((), dtype=torch.int64, device=self.device)
        self.bad += (self.scratch != self.scratch).sum()  # loads the kernels
        self.saver = Amem(self.backup) if who == "amem" else Saver(self.backup, who == "retained")
        count = int(params["tensors"])
        # Whole units of the driver's, so that what is given back can be compared with what was asked for.
        self.size = max(1, int(params["bytes"]) // count >> 21) << 21
        with self.saver.region():
            self.tensors: list[Any] = [  # torch's type hints leave split() out
                torch.empty(self.size // 8, dtype=torch.int64, device=self.device) for _ in range(count)
            ]
        self.addresses = [t.data_ptr() for t in self.tensors]
        self.round = 0

    def used(self) -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def random(self, number: int) -> torch.Generator:
        generator = torch.Generator(self.device)
        generator.manual_seed(self.round << 32 | number)
        return generator

    def fill(self) -> None:
        self.round += 1
        for number, tensor in enumerate(self.tensors):
            generator = self.random(number)
            for piece in tensor.split(PIECE // 8):
                piece.random_(generator=generator)

    def wrong(self) -> int:
        """Elements that are not what fill() wrote, and tensors that have moved."""
        self.bad.zero_()
        for number, tensor in enumerate(self.tensors):
            generator = self.random(number)
            for piece in tensor.split(PIECE // 8):
                wanted = self.scratch[: piece.numel()].random_(generator=generator)
                self.bad += (piece != wanted).sum()
        moved = [t for t, address in zip(self.tensors, self.addresses) if t.data_ptr() != address]
        return int(self.bad) + len(moved)

    def floor(self) -> dict[str, float]:
        """What copying the same bytes takes, to pinned host memory and back. Spoils the contents."""
        host = torch.empty(min(self.size, PIECE) // 8, dtype=torch.int64, pin_memory=True)

        def copy(out: bool) -> None:
            for tensor in self.tensors:
                for piece in tensor.split(host.numel()):
                    there = host[: piece.numel()]
                    to, source = (there, piece) if out else (piece, there)
                    to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        copy(True)
        values = {}
        for name, out in (("floor_out_s", True), ("floor_back_s", False)):
            values[name] = statistics.median(self.timed(functools.partial(copy, out)) for _ in range(3))
        return values

    def timed(self, action: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def cycle(self) -> dict[str, Any]:
        self.fill()
        before, calls = self.used(), self.saver.calls()
        values: dict[str, Any] = {"pause_s": self.timed(self.saver.pause)}
        between = self.saver.calls()
        paused = self.used()
        values["resume_s"] = self.timed(self.saver.resume)
        after = self.saver.calls()
        if calls is not None and between is not None and after is not None:
            values.update(pause_calls=between - calls, resume_calls=after - between)
        values.update(given_bytes=before - paused, taken_bytes=self.used() - paused)
        if not self.backup:
            self.fill()  # whether each tensor has memory of its own again
        values["wrong"] = self.wrong()
        return values

    def run(self) -> dict[str, Any]:
        values: dict[str, Any] = {"bytes": self.size * len(self.tensors)}
        if self.backup:
            launch.report(stage="floor")
            values.update(self.floor())
        cycles: list[dict[str, Any]] = []
        for number in range(int(self.params["cycles"]) + 1):
            launch.report(stage=f"cycle {number}")
            cycles.append(self.cycle())
            launch.report(cycles=cycles)
        return values


def main(argv: list[str]) -> int:
    launch.start_child()
    launch.report(stage="start")
    code = 0
    try:
        launch.report(**Bench(argv[1], json.loads(argv[2])).run(), stage="done")
    except NotPossible as missing:
        launch.report(skipped=str(missing))
    except BaseException as error:
        traceback.print_exc()
        launch.report(error=f"{type(error).__name__}: {error}"[:2000])
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # torch_memory_saver ends the process with an error where its memory is freed outside of a region.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv)
