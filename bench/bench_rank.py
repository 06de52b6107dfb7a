"""One rank of the benchmark: `bench_rank.py memory|speed JSON`, started by nccl_bench.py.

NCCL is called directly, so that any libnccl can be measured; torch only gives
tensors, streams and events. Of NCCL's kernels only float32 sums and send and
receive are used, so that a library with few others will do.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

import nccl
import torch

import launch

BYTES = 64 << 20
SPEED_BYTES = 256 << 20
# What is timed while active: bytes, and how many collectives are in a graph. Launched
# one by one, those of 1 MB and below would measure the host.
SIZES = {1 << 20: 100, 16 << 20: 30, SPEED_BYTES: 5}
JOBS = 3  # of speed: amem, stock NCCL, and stock NCCL once more, which shows what chance does
FEW = 2  # elements, of which 50 all-reduces are in a graph
REPLAYS = 10
COPY_BYTES = 1 << 30
VERIFIED = (64, 4000, 133_332, 1 << 20, 8 << 20, BYTES)
VALUES = 1 << 18  # sums of up to 64 ranks are whole numbers that float32 holds
POISON = -1


class Bench:
    def __init__(self, params: dict[str, Any], size: int) -> None:
        self.params = params
        self.peers = launch.Peers()
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.job = self.peers.index // self.world
        torch.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank)
        self.nccl = nccl.Nccl(params["nccl"] or nccl.loaded_path())
        # torch's type hints leave these constructors out.
        cuda: Any = torch.cuda
        self.stream = cuda.Stream()
        self.new_event = cuda.Event
        torch.cuda.set_stream(self.stream)
        self.source, self.output, self.expected, self.scratch = (
            torch.zeros(size // 4, dtype=torch.float32, device=self.device) for _ in range(4)
        )
        self.bad = torch.zeros((), dtype=torch.int64, device=self.device)
        self.generator = torch.Generator(self.device)
        self.round = 0
        self.seed = self.peers.gather(int.from_bytes(os.urandom(6), "little"))[0]
        self.communicators: list[c_void_p] = []
        self.graphs: list[Any] = []
        self.data(self.source[:1024], 0)
        self.compare(1024)
        self.expected[:1024].add_(self.scratch[:1024])
        self.base = self.used()

    def used(self) -> int:
        """Device memory in use by all processes on this rank's GPU."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    # Communicators and collectives

    def init(self) -> None:
        count = int(self.params["communicators"])
        ids = self.peers.gather([self.nccl.unique_id() for _ in range(count)] if self.rank == 0 else None)
        mine = ids[self.job * self.world]
        self.communicators = [self.nccl.init(self.world, unique_id, self.rank) for unique_id in mine]

    def destroy(self) -> None:
        for communicator in self.communicators:
            self.nccl.destroy(communicator)
        self.communicators = []

    def all_reduce(self, communicator: c_void_p, count: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.nccl.all_reduce(self.source.data_ptr(), self.output.data_ptr(), count, nccl.FLOAT32, communicator, stream)

    def all_to_all(self, communicator: c_void_p, chunk: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.nccl.all_to_all(
            self.source.data_ptr(), self.output.data_ptr(), chunk, self.world, nccl.FLOAT32, communicator, stream
        )

    def collectives(self) -> None:
        """What connects a communicator fully: a large all-reduce and a large all-to-all on each."""
        count = self.source.numel()
        for communicator in self.communicators:
            self.all_reduce(communicator, count)
            self.all_to_all(communicator, count // self.world)
        torch.cuda.synchronize()

    def data(self, out: torch.Tensor, member: int) -> torch.Tensor:
        self.generator.manual_seed(hash((self.seed, self.round, member)) & (2**63 - 1))
        return out.random_(0, VALUES, generator=self.generator)

    def compare(self, count: int) -> None:
        self.bad += (self.output[:count] != self.expected[:count]).sum()

    def wrong_elements(self) -> int:
        """Fresh data through every communicator at several sizes; how many elements came out wrong."""
        self.bad.zero_()
        for size in VERIFIED:
            chunk = max(1, size // 4 // self.world)
            total = chunk * self.world
            for communicator in self.communicators:
                self.round += 1
                self.output[:total].fill_(POISON)
                self.data(self.source[:total], self.rank)
                self.all_reduce(communicator, total)
                self.expected[:total].fill_(0)
                for member in range(self.world):
                    self.expected[:total].add_(self.data(self.scratch[:total], member))
                self.compare(total)
                self.output[:total].fill_(POISON)
                self.all_to_all(communicator, chunk)
                for member in range(self.world):
                    piece = self.data(self.scratch[:total], member)[self.rank * chunk : (self.rank + 1) * chunk]
                    self.expected[member * chunk : (member + 1) * chunk] = piece
                self.compare(total)
        return int(self.bad.item())

    # Memory: the modes

    def release(self) -> None:
        kind = self.params["kind"]
        if kind == "amem":
            import amem

            amem.pause()
        elif kind == "rebuild":
            self.destroy()
        else:
            for communicator in self.communicators:
                self.nccl.suspend(communicator)

    def restore(self) -> None:
        kind = self.params["kind"]
        if kind == "amem":
            import amem

            amem.resume()
        elif kind == "rebuild":
            self.init()
        else:
            for communicator in self.communicators:
                self.nccl.resume(communicator)

    def timed(self, action: Callable[[], None]) -> float:
        self.peers.barrier()
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    def cycle(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        self.peers.barrier()
        active = self.used()
        calls = self.driver_calls()
        pause = self.timed(self.release)
        pause_calls = self.driver_calls() - calls
        self.peers.barrier()
        # The driver frees what was shared when its last user lets go, which may be a little later.
        time.sleep(0.1)
        paused = self.used()
        calls = self.driver_calls()
        resume = self.timed(self.restore)
        resume_calls = self.driver_calls() - calls
        first = self.timed(self.collectives)
        values: dict[str, Any] = {
            "active_bytes": active - self.base,
            "given_bytes": active - paused,
            "pause_s": pause,
            "resume_s": resume,
            "first_collective_s": first,
            "pause_calls": pause_calls,
            "resume_calls": resume_calls,
            "wrong": self.wrong_elements(),
        }
        if self.params["kind"] == "amem":
            import amem

            stats: Any = amem.stats()
            values["last_pause"] = stats.get("last_pause")
            values["last_resume"] = stats.get("last_resume")
        return values

    def driver_calls(self) -> int:
        """The calls of the driver that amem has made in this process, but those for statistics."""
        if self.params["kind"] != "amem":
            return 0
        import amem

        stats: Any = amem.stats()
        return sum(n for name, n in stats["driver_calls"].items() if name not in ("cuMemGetInfo", "cuCtxPushCurrent"))

    def wait_for_host_memory(self) -> None:
        """Until amem has got the host memory ahead, as between two phases of a training step."""
        import amem

        held, since = -1, time.monotonic()
        while time.monotonic() - since < 3:
            stats: Any = amem.stats()
            if stats["host"]["arena_bytes"] != held:
                held, since = stats["host"]["arena_bytes"], time.monotonic()
            time.sleep(0.05)

    def memory(self) -> dict[str, Any]:
        if self.params["kind"] == "suspend" and not self.nccl.can_suspend:
            return {"skipped": f"NCCL {self.nccl.version()} has no ncclCommSuspend"}
        launch.report(stage="connect", nccl_version=self.nccl.version(), nccl_path=self.nccl.path)
        init = self.timed(self.init)
        first = self.timed(self.collectives)
        wrong = self.wrong_elements()
        if os.environ.get("AMEM_HOST_PREALLOC") == "1":
            launch.report(stage="wait for host memory")
            self.wait_for_host_memory()
        cycles: list[dict[str, Any]] = []
        started = time.monotonic()
        while len(cycles) <= int(self.params["cycles"]):
            launch.report(stage=f"cycle {len(cycles)}")
            cycles.append(self.cycle())
            launch.report(cycles=cycles)
            late = time.monotonic() - started > float(self.params["seconds"])
            # One rank's clock decides for all.
            if self.peers.gather(late)[0] and len(cycles) > 2:
                break
        launch.report(stage="destroy")
        values: dict[str, Any] = {"init_s": init, "connect_s": first, "wrong_before": wrong, "cycles": cycles}
        if self.params["kind"] == "amem":
            import amem

            values["stats"] = amem.stats()
        self.peers.barrier()
        before = self.used()
        self.peers.barrier()
        self.destroy()
        self.peers.barrier()
        time.sleep(0.2)
        after = self.used()
        # What destroying the communicators gives back is NCCL's memory; the rest is code and contexts.
        values.update(nccl_bytes=before - after, left_bytes=after - self.base)
        self.peers.barrier()
        return values

    # Speed

    def event_seconds(self, action: Callable[[], object]) -> float:
        begin, end = (self.new_event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def capture(self, action: Callable[[], None], count: int) -> Any:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(count):
                action()
        return graph

    def seconds(self, action: Callable[[], object], count: int) -> list[float]:
        """Of one collective, in each of several actions of `count` collectives, which are launched in a row."""
        action()  # in which ranks that come later than others are waited for
        action()
        events = [self.new_event(enable_timing=True) for _ in range(REPLAYS + 1)]
        for event in events[:-1]:
            event.record()
            action()
        events[-1].record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 / count for begin, end in zip(events, events[1:])]

    def measures(self) -> dict[str, Callable[[], list[float]]]:
        """What is measured while active, as bytes per second or, with _s, seconds, once for each replay."""
        communicator = self.communicators[0]
        others = (self.world - 1) / self.world

        def rates(graph: Any, count: int, moved: float) -> list[float]:
            return [moved / taken for taken in self.seconds(graph.replay, count)]

        def launched() -> None:
            for _ in range(30):
                self.all_reduce(communicator, FEW)

        made: dict[str, Callable[[], list[float]]] = {}
        for size, count in SIZES.items():
            for name, factor, collective, elements in (
                ("all_reduce", 2 * others, self.all_reduce, size // 4),
                ("all_to_all", others, self.all_to_all, size // 4 // self.world),
            ):
                graph = self.capture(functools.partial(collective, communicator, elements), count)
                self.graphs.append(graph)
                made[f"{name}_{size >> 20}"] = functools.partial(rates, graph, count, size * factor)
        graph = self.capture(functools.partial(self.all_reduce, communicator, FEW), 50)
        self.graphs.append(graph)
        made["graph_s"] = functools.partial(self.seconds, graph.replay, 50)
        made["eager_s"] = functools.partial(self.seconds, launched, 30)
        return made

    def copy_rates(self) -> dict[str, float]:
        """All ranks of one job copy between pinned host memory and their GPU at once."""
        rates = {}
        if self.job != JOBS - 1:
            for _ in range(6):
                self.peers.barrier()
            return {}
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        for name, to, source in (("to_host", host, device), ("to_device", device, host)):
            copy = functools.partial(to.copy_, source, non_blocking=True)
            copy()
            torch.cuda.synchronize()
            times = []
            for _ in range(3):
                self.peers.barrier()
                times.append(self.event_seconds(copy))
            rates[f"{name}_bytes_per_s"] = COPY_BYTES / statistics.median(times)
        return rates

    def speed(self) -> dict[str, Any]:
        """amem and stock NCCL in turn on the same GPUs: jobs of which one works at a time."""
        launch.report(stage="connect")
        self.init()
        self.in_turn(self.collectives)
        measures = self.measures()
        rounds: list[dict[str, list[float]]] = []
        for number in range(2 * int(self.params["rounds"])):
            launch.report(stage=f"round {number}")
            if number == int(self.params["rounds"]):
                self.pause_and_resume()
            values: dict[str, list[float]] = {}
            for key, measure in measures.items():
                self.in_turn(functools.partial(self.keep, values, key, measure), number)
            rounds.append(values)
        launch.report(stage="verify")
        wrong: list[int] = []
        self.in_turn(lambda: wrong.append(self.wrong_elements()))
        launch.report(stage="copy")
        rates = self.copy_rates()
        for graph in self.graphs:  # before the communicators, which NCCL holds for them
            graph.reset()
        torch.cuda.synchronize()
        self.destroy()
        return {"rounds": rounds, "wrong": sum(wrong), **rates}

    @staticmethod
    def keep(values: dict[str, list[float]], key: str, measure: Callable[[], list[float]]) -> None:
        values[key] = measure()

    def in_turn(self, action: Callable[[], object], first: int = 0) -> None:
        """One job after the other: kernels of two that wait for their peers share a GPU badly."""
        for turn in range(JOBS):
            self.peers.barrier()
            if self.job == (first + turn) % JOBS:
                action()
            torch.cuda.synchronize()
        self.peers.barrier()

    def pause_and_resume(self) -> None:
        self.peers.barrier()
        if self.job == 0:
            import amem

            amem.pause()
        self.peers.barrier()
        if self.job == 0:
            amem.resume()
        self.peers.barrier()


def main(argv: list[str]) -> int:
    launch.start_child()
    launch.report(stage="start")
    try:
        params = json.loads(argv[2])
        bench = Bench(params, SPEED_BYTES if argv[1] == "speed" else BYTES)
        values = bench.speed() if argv[1] == "speed" else bench.memory()
        launch.report(stage="done", **values)
    except BaseException as error:
        traceback.print_exc()
        launch.report(error=f"{type(error).__name__}: {error}"[:2000])
        sys.stderr.flush()
        # Leaving through NCCL's destructors could wait for ranks that are gone.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
