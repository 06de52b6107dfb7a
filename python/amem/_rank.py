"""One rank as a process of its own, driven by JSON lines on its stdin.

The parent's side is _ranks.py. The demo runs this module as it is; the tests
run a rank with more commands.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import amem

from . import _library
from ._cuda import Device, Driver
from ._nccl import SONAME, Communicator, Nccl
from ._pattern import ITEM, mismatches, pattern

PR_SET_PDEATHSIG = 1


class Rank:
    """The commands: every public method, called with a command's arguments."""

    def __init__(self) -> None:
        self.communicators: dict[int, Communicator] = {}

    def init(self, device: int, simulate: bool, enable: str = "before", nccl: str | None = None) -> int:
        """Takes the device and loads NCCL. enable: before or after NCCL is loaded, or never."""
        if enable == "before":
            amem.enable()
        simulator = _library.simulator_folder()
        driver = Driver(os.path.join(simulator, "libcuda.so.1") if simulate else "libcuda.so.1")
        self.device = Device(driver, device)
        self.nccl = Nccl(os.path.join(simulator, SONAME) if simulate else nccl)
        if enable == "after":
            amem.enable()
        return os.getpid()

    def unique_id(self) -> str:
        return self.nccl.unique_id()

    def comm_init(self, identity: str, rank: int, size: int) -> int:
        """Connects a communicator and returns its number."""
        return self.add(Communicator.connect(self.nccl, identity, rank, size))

    def add(self, communicator: Communicator) -> int:
        number = max(self.communicators, default=-1) + 1
        self.communicators[number] = communicator
        return number

    def allreduce(self, comm: int = 0, count: int = 100_000) -> int:
        """The number of wrong elements, as with all collectives here."""
        communicator, seed = self.next_call(comm)
        send = pattern(count, seed, [communicator.rank])
        want = pattern(count, seed, range(communicator.size))
        return self.verify(
            send, want, lambda source, target: communicator.all_reduce(source, target, count, self.device.stream)
        )

    def next_call(self, comm: int) -> tuple[Communicator, int]:
        """The communicator and a seed that all its ranks share, new for each call."""
        communicator = self.communicators[comm]
        communicator.calls += 1
        return communicator, communicator.calls

    def verify(self, send: bytes, want: bytes, run: Any) -> int:
        """Runs a collective on fresh buffers and counts the wrong elements."""
        source = self.device.alloc(max(len(send), ITEM))
        target = self.device.alloc(max(len(want), ITEM))
        try:
            self.device.write(source, send)
            run(source, target)
            self.device.synchronize()
            return mismatches(self.device.read(target, len(want)), want)
        finally:
            self.device.free(source)
            self.device.free(target)

    def pause(self, tags: Sequence[str] = ()) -> dict[str, Any]:
        return dataclasses.asdict(amem.pause(*tags))

    def resume(self, tags: Sequence[str] = ()) -> dict[str, Any]:
        return dataclasses.asdict(amem.resume(*tags))

    def state(self) -> str:
        return amem.state().name

    def stats(self) -> Any:
        return amem.stats()

    def meminfo(self) -> int:
        """Device memory in use, by whatever process."""
        return self.device.used_bytes()

    def perform(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Runs one command; its failure is an answer like any other."""
        try:
            return {"value": getattr(self, command)(**arguments)}
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error), "figures": getattr(error, "figures", {})}


def serve(rank: Rank) -> None:
    """Answers commands until stdin ends. Called on the main thread."""
    # A rank that hangs in a driver call must not outlive its parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Libraries write to stdout; keep the answers apart from that.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = rank.perform(request["command"], request["arguments"])
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve(Rank())
