"""The simulated driver and the stand-in for NCCL, for a process that is one or several ranks.

A rank of a test is a process of its own: `Job(4, scenario).run()` starts four,
each of which calls `scenario(rank)` with a `Rank`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import signal
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIM = Path(os.environ.get("AMEM_BUILD", ROOT / "build")).resolve() / "sim"

# ncclDataType_t, the type code of `array`.
TYPES = {"u8": (1, "B"), "i32": (2, "i"), "i64": (4, "q"), "f32": (7, "f"), "f64": (8, "d")}
SUM = 0
GRACE_S = 3.0
UNHANDLED_CUDA_ERROR = 1

u64 = ctypes.c_uint64
size_t = ctypes.c_size_t
pointer = ctypes.c_void_p


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]

    def __bytes__(self) -> bytes:
        return ctypes.string_at(ctypes.addressof(self), 128)


class NcclError(Exception):
    def __init__(self, function: str, result: int, text: str) -> None:
        super().__init__(f"{function}: {result}: {text}")
        self.result = result


class CudaError(Exception):
    def __init__(self, function: str, result: int) -> None:
        super().__init__(f"{function}: CUDA error {result}")
        self.result = result


class Cuda:
    """The driver's functions that the tests call."""

    _versioned = {
        "cuMemAlloc",
        "cuMemFree",
        "cuMemcpyHtoD",
        "cuMemcpyDtoH",
        "cuMemGetInfo",
        "cuStreamDestroy",
        "cuStreamBeginCapture",
    }

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *args: object) -> None:
        symbol = f"{name}_v2" if name in self._versioned else name
        result = getattr(self.library, symbol)(*args)
        if result != 0:
            raise CudaError(name, result)

    def open_device(self, dev: int) -> None:
        context = pointer()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), dev)
        self("cuCtxSetCurrent", context)

    def free_memory(self) -> int:
        free, total = size_t(), size_t()
        self("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def alloc(self, size: int) -> int:
        ptr = u64()
        self("cuMemAlloc", ctypes.byref(ptr), size_t(max(size, 1)))
        return ptr.value

    def free(self, ptr: int) -> None:
        self("cuMemFree", u64(ptr))

    def write(self, ptr: int, data: bytes) -> None:
        if data:
            self("cuMemcpyHtoD", u64(ptr), data, size_t(len(data)))

    def read(self, ptr: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(max(size, 1))
        if size:
            self("cuMemcpyDtoH", buffer, u64(ptr), size_t(size))
        return buffer.raw[:size]

    def stream(self) -> int:
        stream = pointer()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value is not None
        return stream.value

    def sync(self, stream: int) -> None:
        self("cuStreamSynchronize", pointer(stream))

    def calls(self, name: str) -> int:
        count = ctypes.c_ulonglong()
        self("cuSimCallCount", name.encode(), ctypes.byref(count))
        return count.value

    def fail_next(self, name: str, result: int) -> None:
        self("cuSimSetFault", name.encode(), 1, result)


class Nccl:
    """libnccl.so.2; a result other than success is an NcclError."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnccl.so.2")
        self.library.ncclGetLastError.restype = ctypes.c_char_p

    def __call__(self, name: str, *args: object) -> None:
        result = getattr(self.library, name)(*args)
        if result != 0:
            raise NcclError(name, result, self.library.ncclGetLastError(None).decode())

    def unique_id(self) -> bytes:
        unique = UniqueId()
        self("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def init_rank(self, ranks: int, unique: bytes, rank: int) -> int:
        comm = pointer()
        self("ncclCommInitRank", ctypes.byref(comm), ranks, UniqueId.from_buffer_copy(unique), rank)
        assert comm.value is not None
        return comm.value

    @contextmanager
    def group(self) -> Iterator[None]:
        self("ncclGroupStart")
        yield
        self("ncclGroupEnd")


def block(rank: int, seed: int, type_name: str) -> array[float]:
    """A rank's random data, to be repeated: whole numbers, so that sums are exact in any order."""
    most = 9 if type_name == "u8" else 1000
    rng = random.Random(f"{rank} {seed}")
    return array(TYPES[type_name][1], [rng.randrange(most) for _ in range(251)])


def repeated(data: array[float], count: int) -> bytes:
    whole = data.tobytes() * (count // len(data) + 1)
    return whole[: count * data.itemsize]


def total(ranks: int, seed: int, type_name: str) -> array[float]:
    blocks = [block(r, seed, type_name) for r in range(ranks)]
    return array(TYPES[type_name][1], [sum(column) for column in zip(*blocks)])


class Communicator:
    """One rank of a communicator, with a stream, and its collectives with checked results."""

    def __init__(self, cuda: Cuda, nccl: Nccl, comm: int, rank: int, ranks: int) -> None:
        self.cuda, self.nccl = cuda, nccl
        self.comm, self.rank, self.ranks = comm, rank, ranks
        self.stream = cuda.stream()

    @property
    def tail(self) -> tuple[pointer, pointer]:
        return pointer(self.comm), pointer(self.stream)

    def destroy(self) -> None:
        self.cuda.sync(self.stream)
        self.nccl("ncclCommDestroy", pointer(self.comm))
        self.cuda("cuStreamDestroy", pointer(self.stream))

    def verify(self) -> None:
        self.nccl("ncclStandinVerify", *self.tail)
        self.cuda.sync(self.stream)

    def _checked(self, launch: Callable[[int, int], None], sent: bytes, wanted: bytes | None, size: int) -> None:
        send, recv = self.cuda.alloc(len(sent)), self.cuda.alloc(size)
        self.cuda.write(send, sent)
        self.cuda.write(recv, b"\xa5" * size)
        launch(send, recv)
        self.cuda.sync(self.stream)
        got = self.cuda.read(recv, size)
        if wanted is not None and got != wanted:
            wrong = next(i for i in range(size) if got[i] != wanted[i])
            raise AssertionError(f"rank {self.rank}: wrong from byte {wrong} of {size}")
        assert self.cuda.read(send, len(sent)) == sent, "the data sent has changed"
        self.cuda.free(send)
        self.cuda.free(recv)

    def all_reduce(self, count: int, type_name: str = "f32", seed: int = 0) -> None:
        code, _ = TYPES[type_name]
        wanted = repeated(total(self.ranks, seed, type_name), count)

        def launch(send: int, recv: int) -> None:
            self.nccl("ncclAllReduce", pointer(send), pointer(recv), size_t(count), code, SUM, *self.tail)

        self._checked(launch, repeated(block(self.rank, seed, type_name), count), wanted, len(wanted))

    def all_reduce_in_place(self, count: int, type_name: str = "f32", seed: int = 0) -> None:
        code, _ = TYPES[type_name]
        wanted = repeated(total(self.ranks, seed, type_name), count)
        ptr = self.cuda.alloc(len(wanted))
        self.cuda.write(ptr, repeated(block(self.rank, seed, type_name), count))
        self.nccl("ncclAllReduce", pointer(ptr), pointer(ptr), size_t(count), code, SUM, *self.tail)
        self.cuda.sync(self.stream)
        assert self.cuda.read(ptr, len(wanted)) == wanted
        self.cuda.free(ptr)

    def broadcast(self, count: int, root: int, type_name: str = "f32", seed: int = 0) -> None:
        code, _ = TYPES[type_name]
        wanted = repeated(block(root, seed, type_name), count)

        def launch(send: int, recv: int) -> None:
            self.nccl("ncclBroadcast", pointer(send), pointer(recv), size_t(count), code, root, *self.tail)

        self._checked(launch, repeated(block(self.rank, seed, type_name), count), wanted, len(wanted))

    def reduce(self, count: int, root: int, type_name: str = "f32", seed: int = 0) -> None:
        code, _ = TYPES[type_name]
        wanted = repeated(total(self.ranks, seed, type_name), count)
        untouched = b"\xa5" * len(wanted)

        def launch(send: int, recv: int) -> None:
            self.nccl("ncclReduce", pointer(send), pointer(recv), size_t(count), code, SUM, root, *self.tail)

        sent = repeated(block(self.rank, seed, type_name), count)
        self._checked(launch, sent, wanted if self.rank == root else untouched, len(wanted))

    def all_gather(self, count: int, type_name: str = "f32", seed: int = 0) -> None:
        code, _ = TYPES[type_name]
        wanted = b"".join(repeated(block(r, seed, type_name), count) for r in range(self.ranks))

        def launch(send: int, recv: int) -> None:
            self.nccl("ncclAllGather", pointer(send), pointer(recv), size_t(count), code, *self.tail)

        self._checked(launch, repeated(block(self.rank, seed, type_name), count), wanted, len(wanted))

    def reduce_scatter(self, count: int, type_name: str = "f32", seed: int = 0) -> None:
        code, _ = TYPES[type_name]
        whole = repeated(total(self.ranks, seed, type_name), count * self.ranks)
        size = len(whole) // self.ranks

        def launch(send: int, recv: int) -> None:
            self.nccl("ncclReduceScatter", pointer(send), pointer(recv), size_t(count), code, SUM, *self.tail)

        sent = repeated(block(self.rank, seed, type_name), count * self.ranks)
        self._checked(launch, sent, whole[self.rank * size : (self.rank + 1) * size], size)

    def exchange(self, count: int, type_name: str = "f32", seed: int = 0) -> None:
        """Everyone sends to everyone, the own rank included, in one group."""
        code, _ = TYPES[type_name]
        sent = repeated(block(self.rank, seed, type_name), count)
        wanted = b"".join(repeated(block(r, seed, type_name), count) for r in range(self.ranks))

        def launch(send: int, recv: int) -> None:
            with self.nccl.group():
                for peer in range(self.ranks):
                    self.nccl("ncclSend", pointer(send), size_t(count), code, peer, *self.tail)
                    at = pointer(recv + peer * len(sent))
                    self.nccl("ncclRecv", at, size_t(count), code, peer, *self.tail)

        self._checked(launch, sent, wanted, len(wanted))

    def everything(self, counts: tuple[int, ...] = (1, 1000, 40_000), seed: int = 0) -> None:
        for number, count in enumerate(counts):
            root = (number + seed) % self.ranks
            name = ("f32", "i32", "i64", "f64", "u8")[(number + seed) % 5]
            self.all_reduce(count, name, seed)
            self.all_reduce_in_place(count, name, seed + 1)
            self.broadcast(count, root, name, seed + 2)
            self.reduce(count, root, name, seed + 3)
            self.all_gather(count, name, seed + 4)
            self.reduce_scatter(count, name, seed + 5)
            self.exchange(count, name, seed + 6)


class Rank:
    """What a scenario gets: its place in the job, and the libraries, loaded in its own process."""

    def __init__(self, rank: int, ranks: int, folder: str, wait: Callable[[], object]) -> None:
        self.rank, self.ranks = rank, ranks
        self.folder = Path(folder)
        self.barrier = wait
        self.cuda = Cuda()
        self.cuda.open_device(rank)
        self._unique_ids = 0
        self._nccl: Nccl | None = None

    @property
    def nccl(self) -> Nccl:
        if self._nccl is None:
            self._nccl = Nccl()
        return self._nccl

    def unique_id(self) -> bytes:
        """The same new id in all ranks."""
        self._unique_ids += 1
        path = self.folder / f"unique-id-{self._unique_ids}"
        if self.rank == 0:
            path.with_suffix(".new").write_bytes(self.nccl.unique_id())
            path.with_suffix(".new").rename(path)
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline, "rank 0 has made no unique id"
            time.sleep(0.005)
        return path.read_bytes()

    def communicator(self) -> Communicator:
        unique = self.unique_id()
        comm = self.nccl.init_rank(self.ranks, unique, self.rank)
        return Communicator(self.cuda, self.nccl, comm, self.rank, self.ranks)

    def simulated_memory(self) -> list[tuple[int, int]]:
        """(address, size) of all writable mappings of simulated memory in this process."""
        sim_dir = os.environ["AMEM_SIM_DIR"]
        found = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if match and sim_dir in line:
                start, end = (int(x, 16) for x in match.groups())
                found.append((start, end - start))
        return found


def _main(
    scenario: Callable[[Rank], None], rank: int, ranks: int, env: Mapping[str, str], folder: str, wait: object
) -> None:
    os.environ.update(env)
    try:
        assert callable(wait)
        scenario(Rank(rank, ranks, folder, wait))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Not through the interpreter's end: a kernel may still be running.
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


class Job:
    """Ranks that share the devices and the unique ids in a folder."""

    def __init__(
        self,
        ranks: int,
        scenario: Callable[[Rank], None],
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        variant: str = "",
    ) -> None:
        self.ranks, self.scenario, self.folder = ranks, scenario, folder
        self.env = {"NCCL_STANDIN_TIMEOUT_S": "60", "NCCL_DEBUG": "WARN", "AMEM_SIM_DEVICES": "16", **(env or {})}
        self.env["AMEM_SIM_DIR"] = str(folder / "devices")
        self.path = f"{SIM / variant}:{SIM}" if variant else str(SIM)

    def results(self, timeout: float = 120) -> list[int]:
        """The ranks' exit codes; a negative one is the signal that ended the rank."""
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(self.ranks)
        # The loader reads its variable when the process starts.
        before = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = self.path
        try:
            processes = [
                context.Process(
                    target=_main, args=(self.scenario, r, self.ranks, self.env, str(self.folder), barrier.wait)
                )
                for r in range(self.ranks)
            ]
            for process in processes:
                process.start()
        finally:
            if before is None:
                del os.environ["LD_LIBRARY_PATH"]
            else:
                os.environ["LD_LIBRARY_PATH"] = before
        deadline = time.monotonic() + timeout
        try:
            while any(p.exitcode is None for p in processes):
                assert time.monotonic() < deadline, f"ranks still run after {timeout} s"
                if any(p.exitcode for p in processes):
                    # The others may wait for the rank that is gone.
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    for process in processes:
                        process.join(max(0.0, deadline - time.monotonic()))
                    break
                multiprocessing.connection.wait([p.sentinel for p in processes if p.exitcode is None], 0.2)
        finally:
            for process in processes:
                if process.exitcode is None:
                    process.kill()
                    process.join()
        return [p.exitcode if p.exitcode is not None else -signal.SIGKILL for p in processes]

    def run(self, timeout: float = 120) -> None:
        codes = self.results(timeout)
        assert codes == [0] * self.ranks, f"exit codes of the ranks: {codes}"
