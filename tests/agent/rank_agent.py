"""The rank that the tests drive: amem's own, with more commands."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import amem
from amem import _library
from amem._cuda import Device, Driver, Graph
from amem._nccl import Communicator
from amem._pattern import ITEM, mismatches, pattern
from amem._rank import Rank, serve


@dataclass
class Allocation:
    size: int
    content: bytes
    nccl: bool


def random_bytes(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass
class Captured:
    """One communicator's all-reduce in a graph."""

    communicator: Communicator
    source: int
    target: int


@dataclass
class Launched:
    """An all-reduce that was launched and not waited for."""

    source: int
    target: int
    want: bytes


@dataclass
class Window:
    pointer: int
    handle: ctypes.c_void_p


ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
DEALLOCATE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


@dataclass
class Tensor:
    """Memory of a region, this process's own or another's."""

    pointer: int
    size: int
    functions: _library.RegionFunctions | None


CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
BACKUPS = {"none": 0, "cpu": 1, "disk": 2}


class Agent(Rank):
    def __init__(self) -> None:
        super().__init__()
        self.allocations: dict[int, Allocation] = {}
        self.graph: Graph | None = None
        self.captured: list[Captured] = []
        self.count = 0
        self.replays = 0
        self.launched: list[Launched] = []
        self.local: list[tuple[Communicator, Device]] = []
        self.windows: list[Window] = []
        self.adding = threading.Lock()
        self.tensors: dict[int, Tensor] = {}

    def add(self, communicator: Communicator) -> int:
        with self.adding:
            return super().add(communicator)

    def library(self) -> ctypes.CDLL:
        return _library.load()

    def torch(self) -> ctypes.CDLL:
        """The stand-in for PyTorch's library."""
        library = ctypes.CDLL(os.path.join(_library.simulator_folder(), "libc10_cuda.so"))
        library.c10_error.restype = ctypes.c_char_p
        return library

    def refused(self, status: int) -> None:
        """Raises what PyTorch would raise for this cudaError_t."""
        if status:
            raise RuntimeError(f"{status}: {self.torch().c10_error(status).decode()}")

    def functions(self, tag: str, backup: str) -> _library.RegionFunctions:
        found = _library.RegionFunctions()
        library = self.library()
        _library.check(library, "amem_region", library.amem_region(tag.encode(), BACKUPS[backup], ctypes.byref(found)))
        return found

    def allocate(self, tag: str, size: int, seed: int, backup: str = "cpu") -> int:
        """Allocates in a region as PyTorch's allocator would, and answers the tensor's number."""
        functions = self.functions(tag, backup)
        pointer = ALLOCATE(functions.allocate)(size, self.device.ordinal, None)
        if pointer is None:
            raise MemoryError(self.library().amem_last_error().decode())
        return self.add_tensor(Tensor(pointer, size, functions), seed)

    def add_tensor(self, tensor: Tensor, seed: int | None = None) -> int:
        with self.adding:
            number = max(self.tensors, default=-1) + 1
            self.tensors[number] = tensor
        if seed is not None:
            self.write(number, seed)
        return number

    def write(self, tensor: int, seed: int) -> None:
        at = self.tensors[tensor]
        self.device.write(at.pointer, random_bytes(seed, at.size))

    def holds(self, tensor: int, seed: int) -> bool:
        at = self.tensors[tensor]
        return self.device.read(at.pointer, at.size) == random_bytes(seed, at.size)

    def reach(self, device: int, peer: int) -> None:
        """PyTorch enables a device's access to a peer's memory, as before its first copy between the two."""
        self.refused(self.torch().c10_reach(device, peer))
        self.device.make_current()

    def seen_by(self, device: int, tensor: int, seed: int) -> bool:
        """Whether another device of this process, which has the memory read by itself, sees what holds() does."""
        at = self.tensors[tensor]
        try:
            return Device(self.device.driver, device).read(at.pointer, at.size) == random_bytes(seed, at.size)
        finally:
            self.device.make_current()

    def write_by(self, device: int, tensor: int, seed: int) -> None:
        at = self.tensors[tensor]
        try:
            Device(self.device.driver, device).write(at.pointer, random_bytes(seed, at.size))
        finally:
            self.device.make_current()

    def deallocate(self, tensor: int) -> None:
        gone = self.tensors.pop(tensor)
        assert gone.functions is not None
        DEALLOCATE(gone.functions.deallocate)(gone.pointer, gone.size, self.device.ordinal, None)

    def default_region(self, tag: str | None, backup: str = "cpu") -> None:
        library = self.library()
        status = library.amem_default_region(None if tag is None else tag.encode(), BACKUPS[backup])
        _library.check(library, "amem_default_region", status)

    def margin(self, size: int) -> None:
        self.library().amem_set_memory_margin(size)

    def torch_allocate(self, size: int, seed: int) -> int:
        """Allocates with PyTorch's own allocator, and answers the tensor's number."""
        pointer = ctypes.c_void_p()
        self.refused(self.torch().c10_allocate(ctypes.byref(pointer), ctypes.c_size_t(size)))
        assert pointer.value
        return self.add_tensor(Tensor(pointer.value, size, None), seed)

    def torch_deallocate(self, tensor: int) -> None:
        """PyTorch's allocator keeps the memory."""
        self.refused(self.torch().c10_deallocate(ctypes.c_void_p(self.tensors.pop(tensor).pointer)))

    def empty_cache(self) -> None:
        self.refused(self.torch().c10_empty_cache())

    def torch_allocate_on_threads(self, count: int, size: int, seed: int) -> list[int]:
        """One tensor on each of several threads at once."""
        tensors: list[int] = []

        def work(number: int) -> None:
            self.device.make_current()
            tensor = self.torch_allocate(size, seed + number)
            with self.adding:
                tensors.append(tensor)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(tensors)

    def ordinary(self, size: int, seed: int) -> int:
        """Allocates with the functions for ordinary memory."""
        library, functions = self.library(), _library.RegionFunctions()
        status = library.amem_ordinary_memory(ctypes.byref(functions))
        _library.check(library, "amem_ordinary_memory", status)
        pointer = ALLOCATE(functions.allocate)(size, self.device.ordinal, None)
        return self.add_tensor(Tensor(pointer, size, functions), seed)

    def tms(self, verb: str, tag: str | None) -> int:
        """A function that torch_memory_saver's library exports."""
        return int(getattr(self.library(), f"tms_{verb}")(None if tag is None else tag.encode()))

    def pointer(self, tensor: int) -> int:
        return self.tensors[tensor].pointer

    def share(self, tensor: int) -> str:
        """A handle of the tensor, for another process."""
        handle = ctypes.create_string_buffer(64)
        self.refused(self.torch().c10_share(handle, ctypes.c_void_p(self.tensors[tensor].pointer)))
        return handle.raw.hex()

    def open(self, handle: str, size: int) -> int:
        pointer = ctypes.c_void_p()
        self.refused(self.torch().c10_open(ctypes.byref(pointer), bytes.fromhex(handle)))
        assert pointer.value
        return self.add_tensor(Tensor(pointer.value, size, None))

    def close(self, tensor: int) -> None:
        self.refused(self.torch().c10_close(ctypes.c_void_p(self.tensors.pop(tensor).pointer)))

    def share_plain(self) -> bool:
        """Whether memory that is not a region's is shared as ever."""
        pointer, handle, opened = self.device.alloc(4096), ctypes.create_string_buffer(64), ctypes.c_void_p()
        self.refused(self.torch().c10_share(handle, ctypes.c_void_p(pointer)))
        self.refused(self.torch().c10_open(ctypes.byref(opened), handle))
        self.refused(self.torch().c10_close(opened))
        self.device.free(pointer)
        return opened.value == pointer

    def copy(self, to: int, source: int, how: int = 0) -> None:
        """Copies a tensor to another, by each of the runtime's functions."""
        a, b = self.tensors[to], self.tensors[source]
        pointers = ctypes.c_void_p(a.pointer), ctypes.c_void_p(b.pointer)
        self.refused(self.torch().c10_copy(*pointers, ctypes.c_size_t(b.size), how))

    def clear(self, tensor: int, how: int = 0) -> None:
        a = self.tensors[tensor]
        self.refused(self.torch().c10_clear(ctypes.c_void_p(a.pointer), ctypes.c_size_t(a.size), how))

    def backup(self, tensor: int, seed: int, offset: int = 0, by_pointer: bool = False) -> bool:
        """Whether the backup of a paused tensor, from an offset on, is right."""
        at, library = self.tensors[tensor], self.library()
        pointer, size = ctypes.c_void_p(at.pointer + offset), ctypes.c_size_t(at.size - offset)
        if by_pointer:
            found = ctypes.c_void_p()
            status = library.amem_backup_pointer(pointer, size, ctypes.byref(found))
            _library.check(library, "amem_backup_pointer", status)
            assert found.value
            content = ctypes.string_at(found.value, size.value)
        else:
            buffer = ctypes.create_string_buffer(size.value)
            status = library.amem_read_backup(pointer, size, buffer)
            _library.check(library, "amem_read_backup", status)
            content = buffer.raw
        return content == random_bytes(seed, at.size)[offset:]

    def disk_directory(self, path: str) -> None:
        library = self.library()
        _library.check(library, "amem_set_disk_directory", library.amem_set_disk_directory(path.encode()))

    def tag_state(self, tag: str) -> int:
        return int(self.library().amem_tag_state(tag.encode()))

    def memory_state(self, tensor: int) -> int:
        return int(self.library().amem_memory_state(ctypes.c_void_p(self.tensors[tensor].pointer)))

    def leave_others(self) -> bool:
        """Whether this process is in a network namespace of its own now, where it sees no other's sockets."""
        libc = ctypes.CDLL(None)
        return any(libc.unshare(flags) == 0 for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET))

    def start_without_nccl(self, device: int) -> int:
        """Takes the device, enables nothing and loads no NCCL."""
        self.device = Device(Driver(os.path.join(_library.simulator_folder(), "libcuda.so.1")), device)
        return os.getpid()

    def split(self, comm: int, color: int, rank: int, size: int) -> int | None:
        """The number of the new communicator; color -1 takes part and gets none."""
        part = self.communicators[comm].split(color, rank, size)
        return self.add(part) if color >= 0 else None

    def destroy(self, comm: int) -> None:
        # NCCL waits for ever for a graph that holds the communicator.
        self.graph_destroy()
        self.communicators.pop(comm).destroy()

    def broadcast(self, comm: int = 0, count: int = 100_000, root: int = 0) -> int:
        communicator, seed = self.next_call(comm)
        return self.verify(
            pattern(count, seed, [communicator.rank]),
            pattern(count, seed, [root]),
            lambda source, target: communicator.broadcast(source, target, count, root, self.device.stream),
        )

    def allgather(self, comm: int = 0, count: int = 100_000) -> int:
        communicator, seed = self.next_call(comm)
        return self.verify(
            pattern(count, seed, [communicator.rank]),
            b"".join(pattern(count, seed, [rank]) for rank in range(communicator.size)),
            lambda source, target: communicator.all_gather(source, target, count, self.device.stream),
        )

    def reducescatter(self, comm: int = 0, count: int = 100_000) -> int:
        communicator, seed = self.next_call(comm)
        ranks = range(communicator.size)
        return self.verify(
            pattern(count * communicator.size, seed, [communicator.rank]),
            pattern(count, seed, ranks, offset=count * communicator.rank),
            lambda source, target: communicator.reduce_scatter(source, target, count, self.device.stream),
        )

    def alltoall(self, comm: int = 0, count: int = 100_000) -> int:
        communicator, seed = self.next_call(comm)
        size, me = communicator.size, communicator.rank

        def run(source: int, target: int) -> None:
            communicator.exchange(
                [(source + peer * count * ITEM, peer) for peer in range(size)],
                [(target + peer * count * ITEM, peer) for peer in range(size)],
                count,
                self.device.stream,
            )

        return self.verify(
            b"".join(pattern(count, seed, [me * size + peer]) for peer in range(size)),
            b"".join(pattern(count, seed, [peer * size + me]) for peer in range(size)),
            run,
        )

    def sendrecv(self, comm: int = 0, count: int = 100_000, shift: int = 1) -> int:
        """Each rank sends to the one that is shift further on."""
        communicator, seed = self.next_call(comm)
        size, me = communicator.size, communicator.rank
        to, source_rank = (me + shift) % size, (me - shift) % size
        return self.verify(
            pattern(count, seed, [me]),
            pattern(count, seed, [source_rank]),
            lambda source, target: communicator.exchange(
                [(source, to)], [(target, source_rank)], count, self.device.stream
            ),
        )

    def launch(self, counts: Sequence[int], comm: int = 0) -> None:
        """Launches all-reduces one after another and waits for none; collect() does."""
        parts = []
        for count in counts:
            communicator, seed = self.next_call(comm)
            part = Launched(
                self.device.alloc(count * ITEM),
                self.device.alloc(count * ITEM),
                pattern(count, seed, range(communicator.size)),
            )
            self.device.write(part.source, pattern(count, seed, [communicator.rank]))
            parts.append(part)
        # Writing waits for the stream, so all launches come after all writes.
        for part in parts:
            count = len(part.want) // ITEM
            self.communicators[comm].all_reduce(part.source, part.target, count, self.device.stream)
            self.launched.append(part)

    def collect(self) -> int:
        self.device.synchronize()
        wrong = 0
        while self.launched:
            part = self.launched.pop()
            wrong += mismatches(self.device.read(part.target, len(part.want)), part.want)
            self.device.free(part.source)
            self.device.free(part.target)
        return wrong

    def comm_init_all(self, devices: list[int]) -> None:
        """One communicator with a rank on each device, all of them in this process."""
        handles = (ctypes.c_void_p * len(devices))()
        self.nccl.library.ncclCommInitAll.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        status = self.nccl.library.ncclCommInitAll(handles, len(devices), (ctypes.c_int * len(devices))(*devices))
        if status:
            raise self.nccl.error("ncclCommInitAll", status)
        for rank, ordinal in enumerate(devices):
            communicator = Communicator(self.nccl, ctypes.c_void_p(handles[rank]), rank, len(devices))
            self.local.append((communicator, Device(self.device.driver, ordinal)))
        self.device.make_current()

    def allreduce_all(self, count: int = 100_000) -> int:
        """One all-reduce over the communicators of comm_init_all."""
        self.replays += 1
        buffers = []
        for communicator, device in self.local:
            device.make_current()
            source, target = (device.alloc(count * ITEM) for _ in range(2))
            device.write(source, pattern(count, self.replays, [communicator.rank]))
            buffers.append((source, target))
        self.nccl.call("ncclGroupStart")
        try:
            for (communicator, device), (source, target) in zip(self.local, buffers):
                communicator.all_reduce(source, target, count, device.stream)
        finally:
            self.nccl.call("ncclGroupEnd")
        wrong = 0
        for (communicator, device), (source, target) in zip(self.local, buffers):
            device.make_current()
            device.synchronize()
            want = pattern(count, self.replays, range(communicator.size))
            wrong += mismatches(device.read(target, len(want)), want)
            device.free(source)
            device.free(target)
        self.device.make_current()
        return wrong

    def destroy_all(self) -> None:
        while self.local:
            self.local.pop()[0].destroy()

    def used_bytes(self, device: int) -> int:
        """As meminfo(), of any device."""
        try:
            return Device(self.device.driver, device).used_bytes()
        finally:
            self.device.make_current()

    def windows_open(self, size: int, comm: int = 0) -> None:
        """Two symmetric windows over memory of ncclMemAlloc. All ranks must call it."""
        register = self.nccl.library.ncclCommWindowRegister
        register.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]
        for _ in range(2):
            window = Window(self.nccl.mem_alloc(size), ctypes.c_void_p())
            status = register(self.communicators[comm].handle, window.pointer, size, ctypes.byref(window.handle), 1)
            if status:
                raise self.nccl.error("ncclCommWindowRegister", status)
            self.windows.append(window)

    def windows_allgather(self, count: int, comm: int = 0) -> int:
        """An all-gather from one window to the other: kernels reach the peers' windows directly."""
        communicator, seed = self.next_call(comm)
        source, target = (window.pointer for window in self.windows)
        self.device.write(source, pattern(count, seed, [communicator.rank]))
        communicator.all_gather(source, target, count, self.device.stream)
        self.device.synchronize()
        want = b"".join(pattern(count, seed, [rank]) for rank in range(communicator.size))
        return mismatches(self.device.read(target, len(want)), want)

    def windows_close(self, comm: int = 0) -> None:
        deregister = self.nccl.library.ncclCommWindowDeregister
        deregister.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        while self.windows:
            window = self.windows.pop()
            status = deregister(self.communicators[comm].handle, window.handle)
            if status:
                raise self.nccl.error("ncclCommWindowDeregister", status)
            self.nccl.mem_free(window.pointer)

    def verify_memory(self, comm: int = 0) -> None:
        """Ends this process when a byte of the communicator's metadata is wrong. Simulator only."""
        verify = self.nccl.library.ncclStandinVerify
        verify.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        status = verify(self.communicators[comm].handle, self.device.stream)
        if status:
            raise self.nccl.error("ncclStandinVerify", status)
        self.device.synchronize()

    def fault(self, function: str, number: int = 1, result: int = 999) -> None:
        """The driver's function fails at its number-th call from now. Simulator only."""
        if self.device.driver.library.cuSimSetFault(function.encode(), number, result):
            raise ValueError(function)

    def delay(self, function: str, number: int = 1, seconds: float = 0, file: str | None = None) -> None:
        """The driver's function waits in its number-th call from now, for a time or for a file. Simulator only."""
        wait = self.device.driver.library.cuSimSetDelay
        if wait(function.encode(), number, int(seconds * 1e6), None if file is None else file.encode()):
            raise ValueError(function)

    def work(self, seconds: float = 0, file: str | None = None) -> None:
        """The stream is busy for a time, or until a file appears. Simulator only."""
        begin = self.device.driver.library.cuSimWork
        if begin(self.device.stream, int(seconds * 1e6), None if file is None else file.encode()):
            raise ValueError("cuSimWork")

    def forked(self, verb: str) -> Any:
        """A command's answer in a child of fork()."""
        answers, child_answers = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(child_answers, json.dumps(self.perform(verb, {})).encode())
            os._exit(0)
        os.close(child_answers)
        with os.fdopen(answers) as stream:
            answer = stream.read()
        os.waitpid(child, 0)
        return json.loads(answer)

    def capture(self, count: int = 10_000) -> None:
        """Captures one graph with an all-reduce on each communicator."""
        self.count = count
        for communicator in self.communicators.values():
            source, target = (self.device.alloc(count * ITEM) for _ in range(2))
            self.captured.append(Captured(communicator, source, target))
        self.device.begin_capture()
        for part in self.captured:
            part.communicator.all_reduce(part.source, part.target, count, self.device.stream)
        self.graph = self.device.end_capture()

    def replay(self) -> int:
        """Launches the captured graph on fresh data."""
        if self.graph is None:
            raise RuntimeError("nothing was captured")
        self.replays += 1
        for part in self.captured:
            self.device.write(part.source, pattern(self.count, self.replays, [part.communicator.rank]))
        self.graph.launch()
        return sum(
            mismatches(
                self.device.read(part.target, self.count * ITEM),
                pattern(self.count, self.replays, range(part.communicator.size)),
            )
            for part in self.captured
        )

    def capture_gather(self, tensor: int, count: int = 10_000, comm: int = 0) -> None:
        """Captures one graph with an all-gather to the beginning of a tensor, which NCCL registers."""
        source = self.device.alloc(count * ITEM)
        self.count = count
        self.captured.append(Captured(self.communicators[comm], source, self.tensors[tensor].pointer))
        self.device.begin_capture()
        self.communicators[comm].all_gather(source, self.tensors[tensor].pointer, count, self.device.stream)
        self.graph = self.device.end_capture()

    def replay_gather(self) -> int:
        """Launches it on fresh data, which peers may write to the tensor themselves."""
        assert self.graph is not None
        self.replays += 1
        part = self.captured[0]
        self.device.write(part.source, pattern(self.count, self.replays, [part.communicator.rank]))
        self.graph.launch()
        self.device.synchronize()
        want = b"".join(pattern(self.count, self.replays, [rank]) for rank in range(part.communicator.size))
        return mismatches(self.device.read(part.target, len(want)), want)

    def suspend(self, comm: int = 0) -> None:
        """NCCL's own ncclCommSuspend; resume_nccl() ends it."""
        status = self.nccl.library.ncclCommSuspend(self.communicators[comm].handle, 1)
        if status:
            raise self.nccl.error("ncclCommSuspend", status)

    def resume_nccl(self, comm: int = 0) -> None:
        status = self.nccl.library.ncclCommResume(self.communicators[comm].handle)
        if status:
            raise self.nccl.error("ncclCommResume", status)

    def graph_destroy(self) -> None:
        if self.graph is not None:
            self.graph.destroy()
            self.graph = None
        while self.captured:
            part = self.captured.pop()
            self.device.free(part.source)
            self.device.free(part.target)

    def mem_alloc(self, size: int, seed: int = 1) -> int:
        """Memory of ncclMemAlloc, filled; returns its address."""
        pointer = self.nccl.mem_alloc(size)
        content = pattern(size // ITEM, seed, [0])
        self.device.write(pointer, content)
        self.allocations[pointer] = Allocation(size, content, nccl=True)
        return pointer

    def hold(self, size: int) -> int:
        """Device memory that is not NCCL's; returns its address."""
        pointer = self.device.alloc(size)
        self.allocations[pointer] = Allocation(size, b"", nccl=False)
        return pointer

    def check(self, pointer: int) -> int:
        content = self.allocations[pointer].content
        return mismatches(self.device.read(pointer, len(content)), content)

    def free(self, pointer: int) -> None:
        if self.allocations.pop(pointer).nccl:
            self.nccl.mem_free(pointer)
        else:
            self.device.free(pointer)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def enable(self) -> None:
        amem.enable()

    def set_group_id(self, group: int) -> int:
        amem.set_group_id(group)
        return amem.get_group_id()

    def eval(self, expression: str) -> Any:
        """A Python expression; rank, amem, os and sys are at hand."""
        return eval(expression, {"rank": self, "amem": amem, "os": os, "sys": sys})

    def threads(self, commands: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Runs commands at the same time, one a thread; the answer of each."""
        answers: list[dict[str, Any]] = [{} for _ in commands]
        gate = threading.Barrier(len(commands))

        def run(number: int, command: str, arguments: dict[str, Any]) -> None:
            self.device.make_current()
            gate.wait()
            answers[number] = self.perform(command, arguments)

        workers = [
            threading.Thread(target=run, args=(number, command, arguments), daemon=True)
            for number, (command, arguments) in enumerate(commands)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return answers


if __name__ == "__main__":
    serve(Agent())
