"""The stand-in for NCCL on the simulated driver, without amem.

What is proved here is what the tests of amem rest on: contents are right, all
memory comes back, and bytes that are lost make a later collective stop.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path

import pytest

from standin import (
    SIM,
    SUM,
    TYPES,
    UNHANDLED_CUDA_ERROR,
    Communicator,
    Job,
    NcclError,
    Rank,
    UniqueId,
    block,
    repeated,
    total,
    u64,
)

GRANULARITY = 2 << 20
LIBRARIES = ["libcuda.so.1", "libnccl.so.2"]

pytestmark = pytest.mark.skipif(
    not all((SIM / name).exists() for name in LIBRARIES), reason=f"{' or '.join(LIBRARIES)} is not in {SIM}: run make"
)


def need(*names: str) -> None:
    missing = [name for name in names if not (SIM / name).exists()]
    if missing:
        pytest.skip(f"not in {SIM}: {', '.join(missing)}: run make -C tests/nccl")


@pytest.fixture
def sim_dir() -> Iterator[Path]:
    """Devices of its own for each test, in memory where there is a choice."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="amem-standin-", dir=shm) as folder:
        yield Path(folder)


# ---- scenarios: run in each rank's process ----


def all_collectives(rank: Rank) -> None:
    stream = rank.cuda.stream()
    before = rank.cuda.free_memory()
    comm = rank.communicator()
    assert rank.cuda.free_memory() < before - (20 << 20), "a communicator holds metadata"
    at_init = rank.cuda.free_memory()
    comm.everything(seed=rank.ranks)
    channels = int(os.environ.get("NCCL_STANDIN_CHANNELS", "2"))
    network = 3 if os.environ.get("NCCL_STANDIN_NET") == "1" and rank.ranks > 1 else 0
    buffers = (rank.ranks - 1) * channels * 2 + network
    assert at_init - rank.cuda.free_memory() == buffers * GRANULARITY, "a buffer to send and one to receive, each peer"
    comm.everything((3, 70_000), seed=17)
    comm.verify()
    comm.destroy()
    rank.barrier()
    assert rank.cuda.free_memory() == before
    rank.cuda.sync(stream)


def big_data(rank: Rank) -> None:
    comm = rank.communicator()
    comm.all_reduce(600_001, "f32", 5)
    comm.exchange(100_003, "i64", 6)
    comm.all_gather(300_007, "u8", 7)
    comm.destroy()


def without_vmm(rank: Rank) -> None:
    before = rank.cuda.free_memory()
    comm = rank.communicator()
    comm.everything()
    assert rank.cuda.calls("cuMemCreate") == 0
    assert rank.cuda.calls("cuMemExportToShareableHandle") == 0
    comm.destroy()
    rank.barrier()
    assert rank.cuda.free_memory() == before


def split(rank: Rank) -> None:
    before = rank.cuda.free_memory()
    comm = rank.communicator()
    comm.all_reduce(1000)

    def child(color: int, key: int) -> Communicator | None:
        new = c_void_p()
        rank.nccl("ncclCommSplit", c_void_p(comm.comm), color, key, byref(new), None)
        if new.value is None:
            return None
        place, ranks = c_int(), c_int()
        rank.nccl("ncclCommUserRank", new, byref(place))
        rank.nccl("ncclCommCount", new, byref(ranks))
        return Communicator(rank.cuda, rank.nccl, new.value, place.value, ranks.value)

    # Odd and even ranks, in reverse order.
    half = child(rank.rank % 2, -rank.rank)
    assert half is not None
    assert half.ranks == rank.ranks // 2
    assert half.rank == (rank.ranks - 1 - rank.rank) // 2
    half.everything((9, 5000))
    comm.all_reduce(5000, seed=3)
    # Without rank 0.
    rest = child(-1 if rank.rank == 0 else 7, 0)
    assert (rest is None) == (rank.rank == 0)
    if rest is not None:
        rest.everything((11,), seed=1)
        rest.destroy()
    half.destroy()
    comm.destroy()
    rank.barrier()
    assert rank.cuda.free_memory() == before


def two_devices(rank: Rank) -> None:
    cuda, nccl = rank.cuda, rank.nccl
    before = []
    for dev in range(2):
        cuda.open_device(dev)
        before.append(cuda.free_memory())
    comms = (c_void_p * 2)()
    nccl("ncclCommInitAll", comms, 2, (c_int * 2)(0, 1))
    count = 30_000
    size = count * 4
    streams, sends, recvs = [], [], []
    for dev in range(2):
        cuda.open_device(dev)
        streams.append(cuda.stream())
        sends.append(cuda.alloc(size))
        recvs.append(cuda.alloc(size))
        cuda.write(sends[dev], repeated(block(dev, 4, "f32"), count))
    for turn in range(3):
        with nccl.group():
            for dev in range(2):
                send, recv, comm = c_void_p(sends[dev]), c_void_p(recvs[dev]), c_void_p(comms[dev])
                stream = c_void_p(streams[dev])
                nccl("ncclAllReduce", send, recv, c_size_t(count), TYPES["f32"][0], SUM, comm, stream)
        for dev in range(2):
            cuda.open_device(dev)
            cuda.sync(streams[dev])
            assert cuda.read(recvs[dev], size) == repeated(total(2, 4, "f32"), count), f"device {dev}, turn {turn}"
    # The handle of the one device is mapped again for the other.
    assert cuda.calls("cuMemImportFromShareableHandle") <= 2, "only the host buffers are imported"
    for dev in range(2):
        cuda.open_device(dev)
        nccl("ncclCommDestroy", c_void_p(comms[dev]))
        cuda.free(sends[dev])
        cuda.free(recvs[dev])
    for dev in range(2):
        cuda.open_device(dev)
        assert cuda.free_memory() == before[dev]


def network(rank: Rank) -> None:
    verbs = ctypes.CDLL("libibverbs.so.1")
    all_collectives(rank)
    assert verbs.ibv_standin_registered() == 0
    comm = rank.communicator()
    assert verbs.ibv_standin_registered() == 0
    comm.all_reduce(10)
    assert verbs.ibv_standin_registered() == 3
    comm.verify()
    comm.destroy()
    assert verbs.ibv_standin_registered() == 0
    assert rank.cuda.calls("cuMemGetHandleForAddressRange") >= 1


def multicast(rank: Rank) -> None:
    all_collectives(rank)
    assert rank.cuda.calls("cuMulticastBindMem") == 1
    assert rank.cuda.calls("cuMulticastUnbind") == 1
    assert rank.cuda.calls("cuMulticastCreate") == (1 if rank.rank == 0 else 0)


def registered(rank: Rank) -> None:
    cuda, nccl = rank.cuda, rank.nccl
    before = cuda.free_memory()
    comm = rank.communicator()
    count = 50_000
    size = count * 4
    buffers, handles = [], []
    for _ in range(2):
        ptr, handle = c_void_p(), c_void_p()
        nccl("ncclMemAlloc", byref(ptr), c_size_t(size))
        assert ptr.value is not None
        nccl("ncclCommRegister", c_void_p(comm.comm), ptr, c_size_t(size), byref(handle))
        buffers.append(ptr.value)
        handles.append(handle)
    right, left = (rank.rank + 1) % rank.ranks, (rank.rank - 1) % rank.ranks
    for turn in range(12):
        cuda.write(buffers[0], repeated(block(rank.rank, turn, "f32"), count))
        with nccl.group():
            nccl("ncclSend", c_void_p(buffers[0]), c_size_t(count), TYPES["f32"][0], right, *comm.tail)
            nccl("ncclRecv", c_void_p(buffers[1]), c_size_t(count), TYPES["f32"][0], left, *comm.tail)
        cuda.sync(comm.stream)
        assert cuda.read(buffers[1], size) == repeated(block(left, turn, "f32"), count)
    rank.barrier()
    for handle in handles:
        nccl("ncclCommDeregister", c_void_p(comm.comm), handle)
    rank.barrier()
    comm.exchange(7)
    comm.destroy()
    for ptr_value in buffers:
        nccl("ncclMemFree", c_void_p(ptr_value))
    rank.barrier()
    assert cuda.free_memory() == before


def windows(rank: Rank) -> None:
    cuda, nccl = rank.cuda, rank.nccl
    before = cuda.free_memory()
    comm = rank.communicator()
    comm.all_reduce(10)
    count = 20_000
    size = count * 4
    memory, window = c_void_p(), c_void_p()
    nccl("ncclMemAlloc", byref(memory), c_size_t(size * (rank.ranks + 1)))
    assert memory.value is not None
    nccl(
        "ncclCommWindowRegister",
        c_void_p(comm.comm),
        memory,
        c_size_t(size * (rank.ranks + 1)),
        byref(window),
        c_int(1),
    )
    send, recv = memory.value, memory.value + size
    connected = cuda.calls("cuMemImportFromShareableHandle")
    for turn in range(5):
        cuda.write(send, repeated(block(rank.rank, turn, "f32"), count))
        nccl("ncclAllGather", c_void_p(send), c_void_p(recv), c_size_t(count), TYPES["f32"][0], *comm.tail)
        cuda.sync(comm.stream)
        wanted = b"".join(repeated(block(r, turn, "f32"), count) for r in range(rank.ranks))
        assert cuda.read(recv, len(wanted)) == wanted
    assert cuda.calls("cuMemImportFromShareableHandle") == connected
    rank.barrier()
    nccl("ncclCommWindowDeregister", c_void_p(comm.comm), window)
    nccl("ncclMemFree", memory)
    comm.all_gather(100)
    comm.destroy()
    rank.barrier()
    assert cuda.free_memory() == before


def refused_launch(rank: Rank) -> None:
    comm = rank.communicator()
    comm.all_reduce(5000)
    for function, operation in (("cuLaunchKernelEx", comm.all_reduce), ("cuLaunchKernel", comm.exchange)):
        for _ in range(3):
            rank.cuda.fail_next(function, 400)
            try:
                operation(100)
                raise AssertionError(f"{function} failed, and nobody said so")
            except NcclError as error:
                assert error.result == UNHANDLED_CUDA_ERROR
                assert function in str(error) and "400" in str(error)
        rank.barrier()
        operation(5000, seed=2)
    rank.cuda.fail_next("cuLaunchKernelEx", 400)
    comm.destroy()


def graph(rank: Rank) -> None:
    cuda, nccl = rank.cuda, rank.nccl
    comm = rank.communicator()
    count = 40_000
    size = count * 4
    send, recv = cuda.alloc(size), cuda.alloc(size)
    captured, executable = c_void_p(), c_void_p()
    stream = c_void_p(comm.stream)
    cuda("cuStreamBeginCapture", stream, 2)
    # The first collective: it connects while the stream is captured.
    nccl("ncclAllReduce", c_void_p(send), c_void_p(recv), c_size_t(count), TYPES["f32"][0], SUM, *comm.tail)
    cuda("cuStreamEndCapture", stream, byref(captured))
    cuda("cuGraphInstantiateWithFlags", byref(executable), captured, u64(0))
    for turn in range(4):
        cuda.write(send, repeated(block(rank.rank, turn, "f32"), count))
        cuda("cuGraphLaunch", executable, stream)
        cuda.sync(comm.stream)
        assert cuda.read(recv, size) == repeated(total(rank.ranks, turn, "f32"), count)
        comm.all_reduce(1000, seed=turn)
    cuda("cuGraphExecDestroy", executable)
    cuda("cuGraphDestroy", captured)
    comm.destroy()


def captured_registration(rank: Rank) -> None:
    """Peers map the whole memory that a captured collective receives to, and write to it themselves."""
    cuda, nccl = rank.cuda, rank.nccl
    before = cuda.free_memory()
    comm = rank.communicator()
    comm.all_gather(10)
    count = 40_000
    size, at = count * 4, 3 << 20
    memory, captured, executable = c_void_p(), c_void_p(), c_void_p()
    nccl("ncclMemAlloc", byref(memory), c_size_t(at + size * rank.ranks))
    assert memory.value is not None
    send, recv = cuda.alloc(size), memory.value + at
    mapped, copies = cuda.calls("cuMemMap"), cuda.calls("cuMemRetainAllocationHandle")
    rank.barrier()
    stream = c_void_p(comm.stream)
    cuda("cuStreamBeginCapture", stream, 2)
    nccl("ncclAllGather", c_void_p(send), c_void_p(recv), c_size_t(count), TYPES["f32"][0], *comm.tail)
    cuda("cuStreamEndCapture", stream, byref(captured))
    rank.barrier()
    peers = rank.ranks - 1
    registered = os.environ.get("NCCL_GRAPH_REGISTER") != "0"
    multicast = 1 if os.environ.get("NCCL_STANDIN_NVLS") == "1" else 0
    # The peers' memory, their addresses and the multicast object.
    assert cuda.calls("cuMemMap") - mapped == (peers + 1 + multicast if registered else 0)
    assert cuda.calls("cuMemRetainAllocationHandle") - copies == (peers if registered else 0)
    cuda("cuGraphInstantiateWithFlags", byref(executable), captured, u64(0))
    for turn in range(4):
        cuda.write(send, repeated(block(rank.rank, turn, "f32"), count))
        rank.barrier()
        cuda("cuGraphLaunch", executable, stream)
        cuda.sync(comm.stream)
        wanted = b"".join(repeated(block(r, turn, "f32"), count) for r in range(rank.ranks))
        assert cuda.read(recv, len(wanted)) == wanted
        rank.barrier()
        comm.all_gather(1000, seed=turn)
    cuda("cuGraphExecDestroy", executable)
    cuda("cuGraphDestroy", captured)
    comm.destroy()
    nccl("ncclMemFree", memory)
    cuda.free(send)
    rank.barrier()
    assert cuda.free_memory() == before


def captured_multicast(rank: Rank) -> None:
    captured_registration(rank)
    assert rank.cuda.calls("cuMulticastBindAddr") == 1
    assert rank.cuda.calls("cuMulticastUnbind") == 2, "the communicator's own, and the buffer's"


def captured_without_registration(rank: Rank) -> None:
    """cuMemAlloc's memory has no handle: NCCL tries, and copies through its own buffers."""
    cuda, nccl = rank.cuda, rank.nccl
    comm = rank.communicator()
    count = 40_000
    size = count * 4
    send, recv = cuda.alloc(size), cuda.alloc(size * rank.ranks)
    captured, executable = c_void_p(), c_void_p()
    stream = c_void_p(comm.stream)
    right, left = (rank.rank + 1) % rank.ranks, (rank.rank - 1) % rank.ranks
    cuda("cuStreamBeginCapture", stream, 2)
    nccl("ncclAllGather", c_void_p(send), c_void_p(recv), c_size_t(count), TYPES["f32"][0], *comm.tail)
    with nccl.group():
        nccl("ncclSend", c_void_p(send), c_size_t(count), TYPES["f32"][0], right, *comm.tail)
        nccl("ncclRecv", c_void_p(recv), c_size_t(count), TYPES["f32"][0], left, *comm.tail)
    cuda("cuStreamEndCapture", stream, byref(captured))
    cuda("cuGraphInstantiateWithFlags", byref(executable), captured, u64(0))
    for turn in range(2):
        cuda.write(send, repeated(block(rank.rank, turn, "f32"), count))
        cuda("cuGraphLaunch", executable, stream)
        cuda.sync(comm.stream)
        parts = [repeated(block(r, turn, "f32"), count) for r in range(rank.ranks)]
        parts[0] = repeated(block(left, turn, "f32"), count)
        assert cuda.read(recv, size * rank.ranks) == b"".join(parts)
        rank.barrier()
    comm.destroy()


def suspended(rank: Rank) -> None:
    cuda, nccl = rank.cuda, rank.nccl
    before = cuda.free_memory()
    comm = rank.communicator()
    comm.everything((1, 40_000))
    full, held = cuda.free_memory(), ctypes.c_ulonglong()
    nccl("ncclCommMemStats", c_void_p(comm.comm), 0, byref(held))
    assert held.value >= 2 * 2 * (rank.ranks - 1) * GRANULARITY
    for _ in range(2):
        nccl("ncclCommSuspend", c_void_p(comm.comm), 1)
        rank.barrier()
        assert cuda.free_memory() == full + held.value
        rank.barrier()
        try:
            nccl("ncclCommSuspend", c_void_p(comm.comm), 1)
            raise AssertionError("suspended twice")
        except NcclError as error:
            assert error.result == 5
        nccl("ncclCommResume", c_void_p(comm.comm))
        assert cuda.free_memory() == full
        comm.everything((1, 40_000), seed=3)
        comm.verify()
    comm.destroy()
    rank.barrier()
    assert cuda.free_memory() == before


def what_torch_calls(rank: Rank) -> None:
    cuda, nccl = rank.cuda, rank.nccl
    unique = (UniqueId * 1)(UniqueId.from_buffer_copy(rank.unique_id()))
    handle, code = c_void_p(), TYPES["f32"][0]
    nccl("ncclCommInitRankScalable", byref(handle), rank.ranks, rank.rank, 1, unique, None)
    assert handle.value is not None
    comm = Communicator(cuda, nccl, handle.value, rank.rank, rank.ranks)
    comm.all_reduce(1000)
    count = 3000
    size = count * 4
    send, recv = cuda.alloc(size * rank.ranks), cuda.alloc(size * rank.ranks)
    for peer in range(rank.ranks):
        cuda.write(send + peer * size, repeated(block(rank.rank * 100 + peer, 1, "f32"), count))
    nccl("ncclAlltoAll", c_void_p(send), c_void_p(recv), c_size_t(count), code, *comm.tail)
    cuda.sync(comm.stream)
    wanted = b"".join(repeated(block(peer * 100 + rank.rank, 1, "f32"), count) for peer in range(rank.ranks))
    assert cuda.read(recv, len(wanted)) == wanted
    nccl("ncclGather", c_void_p(send), c_void_p(recv), c_size_t(count), code, 1, *comm.tail)
    nccl("ncclBcast", c_void_p(send), c_size_t(count), code, 1, *comm.tail)
    cuda.sync(comm.stream)
    if rank.rank == 1:
        wanted = b"".join(repeated(block(peer * 100, 1, "f32"), count) for peer in range(rank.ranks))
    assert cuda.read(recv, len(wanted)) == wanted, "only the root receives"
    assert cuda.read(send, size) == repeated(block(100, 1, "f32"), count)
    launches = cuda.calls("cuLaunchKernelEx")
    nccl("ncclGroupStart")
    nccl("ncclBcast", c_void_p(send), c_size_t(count), code, 1, *comm.tail)
    nccl("ncclGroupSimulateEnd", None)
    assert cuda.calls("cuLaunchKernelEx") == launches
    for name in ("ncclRedOpCreatePreMulSum", "ncclRedOpDestroy", "ncclDevCommCreate", "ncclDevCommDestroy"):
        try:
            nccl(name, None, None, None, None, None)
            raise AssertionError(name)
        except NcclError as error:
            assert error.result == 5 and name in str(error)
    rank.barrier()
    if rank.rank != 0:
        smaller = c_void_p()
        nccl("ncclCommShrink", c_void_p(comm.comm), (c_int * 1)(0), 1, byref(smaller), None, 0)
        assert smaller.value is not None
        rest = Communicator(cuda, nccl, smaller.value, rank.rank - 1, rank.ranks - 1)
        rest.everything((11,))
        rest.destroy()
    comm.destroy()


def other_streams(rank: Rank) -> None:
    comm = rank.communicator()
    streams = [rank.cuda.stream() for _ in range(3)]
    count = 20_000
    size = count * 4
    send = rank.cuda.alloc(size)
    rank.cuda.write(send, repeated(block(rank.rank, 0, "f32"), count))
    recvs = [rank.cuda.alloc(size) for _ in range(9)]
    for number, recv in enumerate(recvs):
        stream = c_void_p(streams[number % 3])
        code = TYPES["f32"][0]
        rank.nccl(
            "ncclAllReduce", c_void_p(send), c_void_p(recv), c_size_t(count), code, SUM, c_void_p(comm.comm), stream
        )
    for stream_value in streams:
        rank.cuda.sync(stream_value)
    for recv in recvs:
        assert rank.cuda.read(recv, size) == repeated(total(rank.ranks, 0, "f32"), count)
    comm.destroy()


def abort_alone(rank: Rank) -> None:
    before = rank.cuda.free_memory()
    comm = rank.communicator()
    comm.all_reduce(10)
    if rank.rank == 0:
        # Nobody else takes part: the kernel waits until it is told to stop.
        ptr = rank.cuda.alloc(4000)
        code = TYPES["f32"][0]
        rank.nccl("ncclAllReduce", c_void_p(ptr), c_void_p(ptr), c_size_t(1000), code, SUM, *comm.tail)
        rank.nccl("ncclCommAbort", c_void_p(comm.comm))
        rank.cuda.free(ptr)
    else:
        comm.destroy()
    rank.barrier()
    assert rank.cuda.free_memory() == before


def alone_in_a_collective(rank: Rank) -> None:
    comm = rank.communicator()
    comm.all_reduce(10)
    if rank.rank == 0:
        comm.all_reduce(1000)
    rank.barrier()


def overwritten(rank: Rank, write: str) -> None:
    comm = rank.communicator()
    comm.all_reduce(100)
    comm.all_reduce(40_000)
    rank.barrier()
    old = [(ptr, ctypes.string_at(ptr, size)) for ptr, size in rank.simulated_memory()]
    assert old
    if write == "stale":
        comm.all_reduce(40_000)
        comm.all_reduce(100)
        rank.barrier()
    if rank.rank == 0:
        for ptr, data in old:
            ctypes.memmove(ptr, data if write == "stale" else bytes(len(data)), len(data))
    rank.barrier()
    comm.all_reduce(100)
    comm.all_reduce(40_000)


def zeroed_memory(rank: Rank) -> None:
    overwritten(rank, "zeros")


def stale_memory(rank: Rank) -> None:
    overwritten(rank, "stale")


def stale_credit(rank: Rank) -> None:
    """Only the words that differ by a last credit: those that a sender's copy would lack."""
    comm = rank.communicator()
    comm.broadcast(100, 0)
    rank.barrier()
    if rank.rank == 0:
        heads = [ptr for ptr, size in rank.simulated_memory() if size == 2 << 20]
        before = {ptr: ctypes.c_uint64.from_address(ptr).value for ptr in heads}
    rank.barrier()
    comm.broadcast(100, 0)
    rank.barrier()
    if rank.rank == 0:
        changed = [ptr for ptr in heads if ctypes.c_uint64.from_address(ptr).value == before[ptr] + 1]
        assert changed, "no credit has come"
        for ptr in changed:
            ctypes.c_uint64.from_address(ptr).value = before[ptr]
    rank.barrier()
    comm.broadcast(100, 0)


# ---- tests ----


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_are_right_and_destroy_returns_all_memory(ranks: int, sim_dir: Path) -> None:
    Job(ranks, all_collectives, sim_dir).run()


def test_one_rank(sim_dir: Path) -> None:
    Job(1, all_collectives, sim_dir, {"NCCL_STANDIN_HOST_NUMA": "0"}).run()


@pytest.mark.parametrize("channels", ["1", "4"])
def test_data_longer_than_the_fifo(channels: str, sim_dir: Path) -> None:
    Job(3, big_data, sim_dir, {"NCCL_STANDIN_CHANNELS": channels}).run()


def test_late_credits(sim_dir: Path) -> None:
    Job(3, big_data, sim_dir, {"NCCL_STANDIN_CREDIT_DELAY_US": "20000"}).run()


def test_split(sim_dir: Path) -> None:
    Job(4, split, sim_dir).run()


def test_one_process_with_two_devices(sim_dir: Path) -> None:
    Job(1, two_devices, sim_dir).run()


def test_one_process_with_two_devices_without_vmm(sim_dir: Path) -> None:
    Job(1, two_devices, sim_dir, {"NCCL_CUMEM_ENABLE": "0"}).run()


def test_without_vmm(sim_dir: Path) -> None:
    Job(3, without_vmm, sim_dir, {"NCCL_CUMEM_ENABLE": "0"}).run()


def test_multicast(sim_dir: Path) -> None:
    Job(3, multicast, sim_dir, {"NCCL_STANDIN_NVLS": "1"}).run()


def test_network_buffers(sim_dir: Path) -> None:
    need("libibverbs.so.1")
    Job(2, network, sim_dir, {"NCCL_STANDIN_NET": "1"}).run()


def test_registered_buffers(sim_dir: Path) -> None:
    Job(3, registered, sim_dir).run()


def test_symmetric_windows(sim_dir: Path) -> None:
    Job(3, windows, sim_dir).run()


def test_a_refused_launch_leaves_the_communicator_usable(sim_dir: Path) -> None:
    Job(2, refused_launch, sim_dir).run()


def test_captured_collectives_replay(sim_dir: Path) -> None:
    Job(2, graph, sim_dir).run()


@pytest.mark.parametrize("register", ["1", "0"])
def test_captured_collectives_register_their_buffers(register: str, sim_dir: Path) -> None:
    Job(3, captured_registration, sim_dir, {"NCCL_GRAPH_REGISTER": register}).run()


def test_captured_collectives_bind_their_buffers(sim_dir: Path) -> None:
    Job(3, captured_multicast, sim_dir, {"NCCL_STANDIN_NVLS": "1"}).run()


def test_captured_collectives_on_memory_without_a_handle(sim_dir: Path) -> None:
    Job(3, captured_without_registration, sim_dir).run()


def test_suspend_and_resume(sim_dir: Path) -> None:
    Job(3, suspended, sim_dir).run()


def test_what_torch_links_with(sim_dir: Path) -> None:
    Job(3, what_torch_calls, sim_dir).run()


def test_several_streams(sim_dir: Path) -> None:
    Job(2, other_streams, sim_dir).run()


def test_abort_ends_a_waiting_kernel(sim_dir: Path) -> None:
    Job(2, abort_alone, sim_dir).run()


@pytest.mark.parametrize("way", ["versioned", "unversioned"])
def test_dynamic_runtime(way: str, sim_dir: Path) -> None:
    need("dynamic/libnccl.so.2", "libcudart.so.13")
    Job(2, all_collectives, sim_dir, {"NCCL_STANDIN_ENTRY_POINT": way}, variant="dynamic").run()


def test_a_wait_without_end_is_reported(sim_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    codes = Job(2, alone_in_a_collective, sim_dir, {"NCCL_STANDIN_TIMEOUT_S": "2"}).results(timeout=30)
    assert codes[0] == -signal.SIGABRT
    assert re.search(r"rank 0 of 2: waited 2 s for rank 1 on channel \d", capfd.readouterr().err)


@pytest.mark.parametrize("scenario", [zeroed_memory, stale_memory, stale_credit], ids=lambda s: s.__name__)
def test_lost_bytes_stop_a_later_collective(scenario: object, sim_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert callable(scenario)
    codes = Job(2, scenario, sim_dir, {"NCCL_STANDIN_TIMEOUT_S": "2"}).results(timeout=40)
    assert -signal.SIGABRT in codes
    assert "nccl stand-in: " in capfd.readouterr().err


def test_version_touches_no_driver() -> None:
    """In a process without a driver."""
    code = (
        "import ctypes; v = ctypes.c_int(); n = ctypes.CDLL('libnccl.so.2'); "
        "assert n.ncclGetVersion(ctypes.byref(v)) == 0; "
        "print(v.value, 'libcuda' in open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        ["python3", "-c", code], env={**os.environ, "LD_LIBRARY_PATH": str(SIM)}, capture_output=True, timeout=60
    )
    assert done.stdout.split() == [b"22809", b"False"], done.stderr


def relocations(library: Path) -> str:
    return subprocess.run(["readelf", "-rW", str(library)], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not there")
def test_slots_that_a_hook_replaces() -> None:
    slots = relocations(SIM / "libnccl.so.2")
    assert re.search(r"JUMP_SLO\w*\s+\S+\s+dlsym@", slots)
    assert re.search(r"JUMP_SLO\w*\s+\S+\s+dlvsym@", slots)
    need("dynamic/libnccl.so.2")
    slots = relocations(SIM / "dynamic/libnccl.so.2")
    assert re.search(r"JUMP_SLO\w*\s+\S+\s+cudaGetDriverEntryPointByVersion", slots)
    assert re.search(r"JUMP_SLO\w*\s+\S+\s+cudaGetDriverEntryPoint\s", slots)
    assert not re.search(r"\sdlsym@", slots)
