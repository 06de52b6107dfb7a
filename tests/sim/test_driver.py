"""The simulated driver: what the other tests trust it for.

Functions named run_* run in processes of their own; the tests start them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from sim_driver import (
    FABRIC,
    GRAIN,
    HOST_NUMA,
    LIBRARY,
    MIB,
    POSIX_FD,
    READ,
    U64,
    Driver,
    MulticastProp,
    Peer,
    Pointer,
    Process,
    Prop,
    Size,
    main,
)

Start = Callable[..., Process]
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
INVALID_CONTEXT = 201
ILLEGAL_STATE = 401
NOT_READY = 600
ILLEGAL_ADDRESS = 700
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
UNKNOWN = 999


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that share the devices of one folder, in memory where possible."""
    assert LIBRARY.exists(), f"{LIBRARY} is missing: build the simulated driver first"
    folder = tempfile.mkdtemp(prefix="amem-sim-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    processes: list[Process] = []

    def start_one(function: Callable[[Peer], None], **environment: str) -> Process:
        settings = {"AMEM_SIM_DIR": folder, "AMEM_SIM_DEVICES": "4", "AMEM_SIM_MEMORY": str(64 * MIB), **environment}
        processes.append(Process(__file__, function.__name__, settings))
        return processes[-1]

    yield start_one
    for process in processes:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()
        process.connection.close()
    shutil.rmtree(folder)


# ---- lifetime and capacity over processes ----


def run_owner(peer: Peer) -> None:
    driver = Driver()
    handle = driver.create(8 * MIB)
    base = driver.map(handle, 8 * MIB)
    driver.write(base, b"owner's words")
    fd = driver.export(handle)
    peer.send(driver.used(), fd)
    os.close(fd)
    peer.receive()
    peer.send(driver.read(base + 4 * MIB, 5).decode())
    time.sleep(60)


def run_importer(peer: Peer) -> None:
    driver = Driver()
    _, [fd] = peer.receive()
    result, handle = driver.try_import(fd)
    assert result == 0
    os.close(fd)
    base = driver.map(handle, 8 * MIB)
    driver.release(handle)
    driver.write(base + 4 * MIB, b"reply")
    peer.send(driver.read(base, 13).decode())
    peer.receive()
    peer.send([driver.read(base, 13).decode(), driver.used()])
    peer.receive()
    assert driver.unmap(base, 8 * MIB) == 0
    peer.send(driver.used())


def test_memory_outlives_a_killed_owner_until_the_importer_unmaps_it(start: Start) -> None:
    owner = start(run_owner)
    used, [fd] = owner.receive()
    assert used == 8 * MIB
    importer = start(run_importer)
    importer.send(None, fd)
    os.close(fd)
    assert importer.value() == "owner's words"
    owner.send()
    assert owner.value() == "reply"
    owner.kill()
    importer.send()
    assert importer.value() == ["owner's words", 8 * MIB]
    importer.send()
    assert importer.value() == 0
    importer.finish()


class IPCHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def open_ipc(driver: Driver, handle: IPCHandle, address: U64) -> int:
    # A struct of this size is passed on the stack, as ctypes does it.
    return driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, 1)


def run_ipc_owner(peer: Peer) -> None:
    driver = Driver()
    block = driver.alloc(3 * MIB)
    driver.write(block, b"owner's words")
    handle, again = IPCHandle(), U64()
    driver.do("cuIpcGetMemHandle", ctypes.byref(handle), U64(block + MIB))
    assert open_ipc(driver, handle, again) == INVALID_CONTEXT, "not in the process that made it"
    virtual = driver.map(driver.create())
    assert driver.call("cuIpcGetMemHandle", ctypes.byref(IPCHandle()), U64(virtual)) == INVALID_VALUE
    peer.send(bytes(handle.bytes).hex())
    peer.receive()
    peer.send(driver.read(block + 2 * MIB, 5).decode())
    assert driver.call("cuMemFree_v2", U64(block)) == 0
    peer.send(driver.used())
    peer.receive()
    assert driver.used() == GRAIN
    assert driver.call("cuIpcCloseMemHandle", U64(block)) == INVALID_VALUE


def run_ipc_importer(peer: Peer) -> None:
    driver = Driver()
    handle = IPCHandle.from_buffer_copy(bytes.fromhex(peer.value()))
    opened, again = U64(), U64()
    assert open_ipc(driver, handle, opened) == 0
    assert driver.read(opened.value, 13) == b"owner's words"
    driver.write(opened.value + 2 * MIB, b"reply")
    assert driver.call("cuMemFree_v2", opened) == INVALID_VALUE, "it is not this process's to free"
    peer.send()
    peer.receive()
    assert driver.read(opened.value, 13) == b"owner's words", "it lives as long as it is open"
    assert driver.call("cuIpcCloseMemHandle", opened) == 0
    assert open_ipc(driver, handle, again) == INVALID_VALUE, "the memory is gone"
    peer.send()


def test_cudas_ipc_shares_memory_of_cumemalloc(start: Start) -> None:
    owner, importer = start(run_ipc_owner), start(run_ipc_importer)
    importer.send(owner.value())
    importer.receive()
    owner.send()
    assert owner.value() == "reply"
    assert owner.value() == 3 * MIB + GRAIN
    importer.send()
    importer.receive()
    owner.send()
    owner.finish()
    importer.finish()


def run_export_and_end(peer: Peer) -> None:
    driver = Driver()
    handle = driver.create()
    driver.write(driver.map(handle), b"in flight")
    peer.send(None, driver.export(handle))


def run_watch(peer: Peer) -> None:
    driver = Driver()
    while peer.value():
        peer.send(driver.used())


def test_an_fd_in_flight_holds_the_memory(start: Start) -> None:
    watch = start(run_watch)
    owner = start(run_export_and_end)
    owner.finish()
    watch.send(True)
    assert watch.value() == GRAIN, "the fd still lies in the socket"
    _, [fd] = owner.receive()
    watch.send(True)
    assert watch.value() == GRAIN
    os.close(fd)
    watch.send(True)
    assert watch.value() == 0
    watch.send(False)
    watch.finish()


def run_hog(peer: Peer) -> None:
    driver = Driver()
    held: list[U64] = []
    for order in iter(peer.value, None):
        if order == "take":
            result, handle = driver.try_create(16 * MIB)
            if result == 0:
                held.append(handle)
            peer.send([result, driver.used()])
        else:
            driver.release(held.pop())
            peer.send([0, driver.used()])


def test_capacity_is_shared_and_a_crash_gives_it_back(start: Start) -> None:
    a, b = start(run_hog), start(run_hog)

    def order(process: Process, what: str) -> list[int]:
        process.send(what)
        answer: list[int] = process.value()
        return answer

    assert [order(a, "take"), order(a, "take"), order(b, "take"), order(b, "take")] == [
        [0, 16 * MIB],
        [0, 32 * MIB],
        [0, 48 * MIB],
        [0, 64 * MIB],
    ]
    assert order(a, "take") == [OUT_OF_MEMORY, 64 * MIB]
    assert order(b, "give") == [0, 48 * MIB]
    assert order(a, "take") == [0, 64 * MIB]
    a.kill()
    assert [order(b, "take")[0] for _ in range(4)] == [0, 0, 0, OUT_OF_MEMORY]
    b.send()
    b.finish()


def run_accounting(peer: Peer) -> None:
    driver = Driver()
    block = driver.alloc(4 * MIB)
    handle = driver.create(2 * MIB)
    host = driver.create(32 * MIB, location=HOST_NUMA, device=0)
    other = driver.create(8 * MIB, device=1)
    assert driver.used() == 6 * MIB
    assert driver.try_create(60 * MIB)[0] == OUT_OF_MEMORY
    assert driver.call("cuMemAlloc_v2", ctypes.byref(U64()), Size(60 * MIB)) == OUT_OF_MEMORY
    base = driver.map(handle)
    assert driver.release(handle) == 0
    assert driver.used() == 6 * MIB, "the mapping holds the memory"
    assert driver.unmap(base) == 0
    assert driver.used() == 4 * MIB
    driver.do("cuMemFree_v2", U64(block))
    assert driver.used() == 0
    assert driver.call("cuMemFree_v2", U64(block)) == INVALID_VALUE
    driver.release(host)
    driver.use(1)
    assert driver.used() == 8 * MIB
    driver.release(other)
    assert driver.used() == 0
    # Far more in turn than fits at once, without a call that counts exactly.
    for _ in range(40):
        assert driver.release(driver.create(16 * MIB)) == 0
    assert not [name for name in os.listdir(f"{os.environ['AMEM_SIM_DIR']}/dev1") if name != "lock"]


def test_each_kind_of_memory_is_counted_where_it_lies(start: Start) -> None:
    start(run_accounting).finish()


# ---- refusals ----


def run_refusals(peer: Peer) -> None:
    driver = Driver()
    for size in (0, 1, GRAIN + 4096):
        assert driver.try_create(size)[0] == INVALID_VALUE
    assert driver.try_create(GRAIN, device=4)[0] == 101
    assert driver.try_create(GRAIN, FABRIC)[0] == NOT_PERMITTED
    assert driver.call("cuMemAddressReserve", ctypes.byref(U64()), Size(4096), Size(0), U64(0), U64(0)) == INVALID_VALUE
    assert driver.reserve(GRAIN, 64 * MIB) % (64 * MIB) == 0
    base = driver.reserve(8 * GRAIN)
    handle = driver.create(2 * GRAIN)
    assert driver.try_map(base, GRAIN, handle, GRAIN) == NOT_SUPPORTED, "an offset"
    assert driver.try_map(base, GRAIN, handle) == NOT_SUPPORTED, "a part"
    assert driver.try_map(base, 4 * GRAIN, handle) == NOT_SUPPORTED, "too much"
    assert driver.try_map(base + 4096, 2 * GRAIN, handle) == INVALID_VALUE
    assert driver.try_map(base + 7 * GRAIN, 2 * GRAIN, handle) == INVALID_VALUE, "outside of the reservation"
    assert driver.try_map(base, 2 * GRAIN, handle) == 0
    assert driver.try_map(base + GRAIN, 2 * GRAIN, handle) == INVALID_VALUE, "over a mapping"
    assert driver.try_map(base + 2 * GRAIN, 2 * GRAIN, handle) == 0, "the same handle twice"
    assert driver.access(base, GRAIN) == INVALID_VALUE, "a part of a mapping"
    assert driver.access(base, 6 * GRAIN) == INVALID_VALUE, "beyond the mappings"
    assert driver.access(base, 4 * GRAIN) == 0
    driver.write(base, b"one memory")
    assert driver.read(base + 2 * GRAIN, 10) == b"one memory"
    assert driver.call("cuMemAddressFree", U64(base), Size(8 * GRAIN)) == INVALID_VALUE, "still mapped"
    assert driver.unmap(base, GRAIN) == INVALID_VALUE
    assert driver.unmap(base, 8 * GRAIN) == INVALID_VALUE
    assert driver.read(base + 2 * GRAIN, 10) == b"one memory", "a refused unmap changes nothing"
    assert driver.unmap(base, 4 * GRAIN) == 0
    assert driver.unmap(base, 4 * GRAIN) == INVALID_VALUE
    assert driver.call("cuMemAddressFree", U64(base), Size(4 * GRAIN)) == INVALID_VALUE
    assert driver.call("cuMemAddressFree", U64(base), Size(8 * GRAIN)) == 0
    assert driver.release(handle) == 0
    assert driver.release(handle) == INVALID_VALUE
    assert driver.used() == 0


def test_refusals_are_the_real_drivers(start: Start) -> None:
    start(run_refusals).finish()


def run_retained_handle(peer: Peer) -> None:
    driver = Driver()
    handle = driver.create(2 * GRAIN)
    base = driver.map(handle, 2 * GRAIN)
    again = U64()
    driver.do("cuMemRetainAllocationHandle", ctypes.byref(again), Pointer(base + GRAIN))
    assert again.value == handle.value
    assert [driver.release(handle) for _ in range(3)] == [0, 0, INVALID_VALUE]
    start, size = U64(), Size()
    driver.do("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), U64(base + GRAIN + 5))
    assert (start.value, size.value) == (base, 2 * GRAIN)
    driver.do("cuMemRetainAllocationHandle", ctypes.byref(again), Pointer(base))
    assert again.value == handle.value
    assert driver.unmap(base, 2 * GRAIN) == 0
    assert driver.used() == 2 * GRAIN, "the retained handle holds the memory"
    driver.release(again)
    assert driver.used() == 0
    block = driver.alloc(1000)
    driver.do("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), U64(block + 7))
    assert (start.value, size.value) == (block, 1000)


def test_a_mapping_gives_its_handle_back(start: Start) -> None:
    start(run_retained_handle).finish()


def run_exports(peer: Peer) -> None:
    driver = Driver()
    fd = ctypes.c_int(-1)
    private = driver.create(types=0)
    assert driver.call("cuMemExportToShareableHandle", ctypes.byref(fd), private, POSIX_FD, U64(0)) == INVALID_VALUE
    shared = driver.create(device=1)
    exported = driver.export(shared)
    assert not os.get_inheritable(exported)
    result, imported = driver.try_import(exported)
    assert result == 0 and imported.value != shared.value
    prop = Prop()
    driver.do("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(prop), imported)
    assert (prop.location.type, prop.location.id, prop.handle_types) == (1, 1, 0)
    assert driver.call("cuMemExportToShareableHandle", ctypes.byref(fd), imported, POSIX_FD, U64(0)) == INVALID_VALUE
    ordinary = os.memfd_create("no memory of a device")
    os.ftruncate(ordinary, 65536)
    for foreign in (ordinary, 12345, socket.socket().detach()):
        assert driver.try_import(foreign)[0] == UNKNOWN


def test_only_shareable_memory_is_exported_and_only_that_is_imported(start: Start) -> None:
    start(run_exports).finish()


# ---- access ----


def run_without_access(peer: Peer) -> None:
    driver = Driver()
    base = driver.reserve()
    assert driver.try_map(base, GRAIN, driver.create()) == 0
    peer.send("mapped")
    ctypes.string_at(base, 1)


def run_read_only(peer: Peer) -> None:
    driver = Driver()
    base = driver.map(driver.create())
    assert driver.access(base, GRAIN, READ) == 0
    peer.send(ctypes.string_at(base, 1).decode())
    ctypes.memset(base, 1, 1)


def run_after_unmap(peer: Peer) -> None:
    driver = Driver()
    base = driver.map(driver.create())
    gate = threading.Event()
    kernel = driver.kernel(lambda address: (gate.wait(), ctypes.memset(address, 1, 1)), U64)
    assert kernel(driver.stream(), base) == 0
    assert driver.unmap(base) == 0, "unmapping waits for nothing"
    peer.send("unmapped")
    gate.set()
    driver.call("cuCtxSynchronize")


@pytest.mark.parametrize("function", [run_without_access, run_read_only, run_after_unmap])
def test_illegal_access_is_a_fault(start: Start, function: Callable[[Peer], None]) -> None:
    process = start(function)
    process.receive()
    assert process.wait()[0] == -signal.SIGSEGV


def run_check_access(peer: Peer) -> None:
    driver = Driver()
    base = driver.map(driver.create())
    check = driver.library.cuSimCheckAccess
    check(0, U64(base), Size(GRAIN), 1)
    check(0, U64(driver.pinned(4096)), Size(4096), 1)
    assert driver.access(base, GRAIN, READ, device=1) == 0
    check(1, U64(base), Size(GRAIN), 0)
    peer.send("allowed")
    check(1, U64(base + 16), Size(16), 1)


def test_check_access_tells_devices_apart(start: Start) -> None:
    process = start(run_check_access)
    assert process.value() == "allowed"
    status, errors = process.wait()
    assert status == -signal.SIGABRT
    assert "device 1 may not write 16 bytes" in errors and "no access" in errors


def run_copies_without_access(peer: Peer) -> None:
    driver = Driver()
    base = driver.map(driver.create())
    buffer = driver.pinned(64)
    driver.use(1)
    assert driver.call("cuMemcpyDtoH_v2", Pointer(buffer), U64(base), Size(64)) == INVALID_VALUE
    driver.do("cuCtxSynchronize")
    assert driver.access(base, GRAIN) == 0
    driver.do("cuMemcpyDtoH_v2", Pointer(buffer), U64(base), Size(64))
    # Allowed when it was asked for, but no longer when the stream gets there: the context is lost.
    gate = threading.Event()
    stream = driver.stream()
    assert driver.kernel(gate.wait)(stream) == 0
    driver.do("cuMemcpyDtoHAsync_v2", Pointer(buffer), U64(base), Size(64), stream)
    assert driver.access(base, GRAIN, 0) == 0
    gate.set()
    assert driver.call("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert driver.call("cuMemAlloc_v2", ctypes.byref(U64()), Size(64)) == ILLEGAL_ADDRESS
    driver.use(0)
    assert driver.read(base, 1) == b"\0", "another device's context lives"


def test_copies_respect_each_devices_rights(start: Start) -> None:
    start(run_copies_without_access).finish()


def run_peer_access(peer: Peer) -> None:
    driver = Driver()
    block = driver.alloc(4096)
    owner = Pointer(driver.context.value)
    driver.fill(block, 7, 4096)
    driver.use(1)
    buffer = ctypes.create_string_buffer(4)
    assert driver.call("cuMemcpyDtoH_v2", buffer, U64(block), Size(4)) == INVALID_VALUE
    driver.do("cuCtxEnablePeerAccess", owner, 0)
    assert driver.call("cuCtxEnablePeerAccess", owner, 0) == 704
    assert driver.read(block, 4) == b"\7\7\7\7"
    check = driver.library.cuSimCheckAccess
    check(1, U64(block), Size(4096), 1)
    # Memory that is mapped has its own list of devices, whatever is enabled.
    driver.use(0)
    mapped = driver.map(driver.create())
    driver.use(1)
    assert driver.call("cuMemcpyDtoH_v2", buffer, U64(mapped), Size(4)) == INVALID_VALUE
    assert driver.access(mapped, GRAIN) == 0
    assert driver.read(mapped, 4) == b"\0\0\0\0"
    own = driver.alloc(4096)
    driver.use(0)
    assert driver.call("cuMemcpyDtoH_v2", buffer, U64(own), Size(4)) == INVALID_VALUE, "it is of one direction"
    driver.use(1)
    driver.do("cuCtxDisablePeerAccess", owner)
    assert driver.call("cuCtxDisablePeerAccess", owner) == 705
    assert driver.call("cuMemcpyDtoH_v2", buffer, U64(block), Size(4)) == INVALID_VALUE
    assert driver.read(mapped, 4) == b"\0\0\0\0", "cuMemSetAccess needs no peer access"
    peer.send("disabled")
    check(1, U64(block), Size(4), 0)


def test_peer_access_opens_cuMemAlloc_memory(start: Start) -> None:
    process = start(run_peer_access)
    assert process.value() == "disabled"
    status, errors = process.wait()
    assert status == -signal.SIGABRT and "device 1 may not read 4 bytes" in errors


def run_without_p2p(peer: Peer) -> None:
    driver = Driver()
    owner = Pointer(driver.context.value)
    mapped = driver.map(driver.create())
    can = ctypes.c_int(-1)
    driver.do("cuDeviceCanAccessPeer", ctypes.byref(can), 1, 0)
    assert can.value == 0
    driver.use(1)
    assert driver.call("cuCtxEnablePeerAccess", owner, 0) == 217
    assert driver.access(mapped, GRAIN) == 101


def test_devices_that_cant_reach_each_other(start: Start) -> None:
    start(run_without_p2p, AMEM_SIM_P2P="0").finish()


# ---- contexts, streams, events, graphs ----


def run_before_init(peer: Peer) -> None:
    driver = object.__new__(Driver)
    driver.library, driver.device = ctypes.CDLL(str(LIBRARY)), 0
    assert driver.try_create(GRAIN)[0] == NOT_INITIALIZED
    driver.do("cuInit", ctypes.c_uint(0))
    handle = driver.create()
    base = driver.reserve()
    assert driver.try_map(base, GRAIN, handle) == 0, "virtual memory needs no context"
    assert driver.access(base, GRAIN) == 0
    assert driver.call("cuMemsetD8_v2", U64(base), ctypes.c_ubyte(1), Size(1)) == INVALID_CONTEXT
    assert driver.call("cuStreamCreate", ctypes.byref(Pointer()), 0) == INVALID_CONTEXT
    driver.context = Pointer()
    driver.use(0)
    driver.fill(base, 1, 1)
    driver.do("cuDevicePrimaryCtxRelease_v2", 0)
    assert driver.call("cuCtxSynchronize") == 709


def test_what_needs_initialisation_or_a_context_says_so(start: Start) -> None:
    start(run_before_init).finish()


def run_order(peer: Peer) -> None:
    driver = Driver()
    block = driver.alloc(16)
    buffer = driver.pinned(16)
    gate = threading.Event()
    hold = driver.kernel(gate.wait)
    write = driver.kernel(lambda to, value: ctypes.memset(to, value, 16), U64, ctypes.c_int)
    first, second = driver.stream(), driver.stream()
    event, before = driver.event(), driver.event()
    driver.do("cuEventRecord", before, first)
    assert hold(first) == 0
    assert write(first, block, 5) == 0
    driver.do("cuEventRecord", event, first)
    driver.do("cuStreamWaitEvent", second, event, 0)
    driver.do("cuMemcpyDtoHAsync_v2", Pointer(buffer), U64(block), Size(16), second)
    assert [driver.call("cuStreamQuery", s) for s in (first, second)] == [NOT_READY, NOT_READY]
    assert driver.call("cuEventQuery", event) == NOT_READY
    assert driver.call("cuEventElapsedTime", ctypes.byref(ctypes.c_float()), before, event) == NOT_READY
    assert ctypes.string_at(buffer, 16) == bytes(16)
    time.sleep(0.05)
    gate.set()
    driver.do("cuStreamSynchronize", second)
    assert ctypes.string_at(buffer, 16) == b"\5" * 16
    elapsed = ctypes.c_float()
    driver.do("cuEventElapsedTime", ctypes.byref(elapsed), before, event)
    assert 50 <= elapsed.value < 20_000
    assert driver.call("cuStreamQuery", first) == 0
    assert hold(Pointer(0x1234)) == 400


def test_streams_are_asynchronous_and_events_order_them(start: Start) -> None:
    start(run_order).finish()


def run_legacy_stream(peer: Peer) -> None:
    driver = Driver()
    seen: list[str] = []
    gate = threading.Event()

    def note(what: str) -> Callable[[], None]:
        return lambda: seen.append(what)

    blocking, other, free = driver.stream(0), driver.stream(0), driver.stream(1)

    def first() -> None:
        gate.wait()
        seen.append("first")

    assert driver.kernel(first)(blocking) == 0
    assert driver.kernel(note("legacy"))(None) == 0
    assert driver.kernel(note("second"))(other) == 0
    assert driver.kernel(note("free"))(free) == 0
    driver.do("cuStreamSynchronize", free)
    assert seen == ["free"]
    assert driver.call("cuStreamQuery", None) == NOT_READY
    gate.set()
    driver.do("cuCtxSynchronize")
    assert seen == ["free", "first", "legacy", "second"]


def test_the_legacy_stream_is_ordered_with_blocking_streams(start: Start) -> None:
    start(run_legacy_stream).finish()


def run_destroyed_stream(peer: Peer) -> None:
    driver = Driver()
    block = driver.alloc(64)
    gate = threading.Event()
    write = driver.kernel(lambda to: (gate.wait(), ctypes.memset(to, 3, 64)), U64)
    stream = driver.stream()
    assert write(stream, block) == 0
    driver.do("cuStreamDestroy_v2", stream)
    assert write(stream, block) == 400
    threading.Timer(0.05, gate.set).start()
    driver.do("cuMemFree_v2", U64(block))  # waits, or the kernel faults
    stuck = threading.Event()
    assert driver.kernel(stuck.wait)(driver.stream()) == 0
    peer.send("leaving")
    os._exit(0)


def test_a_destroyed_stream_finishes_and_a_stuck_one_does_not_hold_the_exit(start: Start) -> None:
    process = start(run_destroyed_stream)
    assert process.value() == "leaving"
    process.finish()


def run_graph(peer: Peer) -> None:
    driver = Driver()
    block, buffer = driver.alloc(64), driver.pinned(64)

    def add(to: int, value: int) -> None:
        ctypes.memset(to, ctypes.string_at(to, 1)[0] + value, 64)

    launch = driver.kernel(add, U64, ctypes.c_int)
    stream, graph, executable, status = driver.stream(), Pointer(), Pointer(), ctypes.c_int()
    driver.do("cuStreamBeginCapture_v2", stream, 0)
    driver.do("cuMemsetD8Async", U64(block), ctypes.c_ubyte(1), Size(64), stream)
    assert launch(stream, block, 2) == 0
    assert launch(stream, block, 4) == 0
    driver.do("cuMemcpyDtoHAsync_v2", Pointer(buffer), U64(block), Size(64), stream)
    driver.do("cuStreamIsCapturing", stream, ctypes.byref(status))
    assert status.value == 1
    driver.do("cuStreamEndCapture", stream, ctypes.byref(graph))
    driver.do("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, U64(0))
    driver.do("cuGraphDestroy", graph)
    assert ctypes.string_at(buffer, 64) == bytes(64), "capturing runs nothing"
    for _ in range(2):
        ctypes.memset(buffer, 0, 64)
        driver.do("cuGraphLaunch", executable, stream)
        driver.do("cuStreamSynchronize", stream)
        assert ctypes.string_at(buffer, 64) == b"\7" * 64
    driver.do("cuGraphExecDestroy", executable)
    assert driver.call("cuGraphLaunch", executable, stream) == INVALID_VALUE
    forbidden: list[tuple[str, list[object]]] = [
        ("cuCtxSynchronize", []),
        ("cuMemFree_v2", [U64(block)]),
        ("cuStreamSynchronize", [stream]),
    ]
    for name, arguments in forbidden:
        driver.do("cuStreamBeginCapture_v2", stream, 0)
        assert driver.call(name, *arguments) == CAPTURE_UNSUPPORTED
        assert driver.call("cuStreamEndCapture", stream, ctypes.byref(graph)) == CAPTURE_INVALIDATED
    assert driver.read(block, 64) == b"\7" * 64


def test_graphs_replay_what_was_captured(start: Start) -> None:
    start(run_graph).finish()


def run_capture_info(peer: Peer) -> None:
    driver = Driver()
    stream, block = driver.stream(), driver.alloc(64)
    status, number, count = ctypes.c_int(), U64(), Size(9)
    graph, nodes = Pointer(), Pointer()

    def ask() -> list[int]:
        driver.do(
            "cuStreamGetCaptureInfo_v3",
            stream,
            ctypes.byref(status),
            ctypes.byref(number),
            ctypes.byref(graph),
            ctypes.byref(nodes),
            None,
            ctypes.byref(count),
        )
        return [status.value, int(count.value)]

    assert ask()[0] == 0
    seen = []
    for _ in range(2):
        driver.do("cuStreamBeginCapture_v2", stream, 0)
        assert ask() == [1, 0]
        driver.do("cuMemsetD8Async", U64(block), 1, Size(64), stream)
        driver.do("cuMemsetD8Async", U64(block), 2, Size(64), stream)
        assert ask() == [1, 1], "one after the other"
        seen.append(number.value)
        driver.do("cuStreamEndCapture", stream, ctypes.byref(graph))
        driver.do("cuGraphGetNodes", graph, None, ctypes.byref(count))
        assert count.value == 2
    assert seen[0] != seen[1], "each capture has a number of its own"


def test_a_capture_says_what_it_is(start: Start) -> None:
    start(run_capture_info).finish()


def run_context_state(peer: Peer) -> None:
    driver = Driver()
    flags, active = ctypes.c_uint(9), ctypes.c_int(9)
    seen = []
    for device in (0, 1):
        driver.do("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
        seen.append(active.value)
    assert seen == [1, 0]


def test_a_context_is_active_where_it_was_made(start: Start) -> None:
    start(run_context_state).finish()


def run_pinned(peer: Peer) -> None:
    driver = Driver()
    memory = ctypes.create_string_buffer(1 << 16)
    base = ctypes.addressof(memory)

    def register(at: int, size: int) -> int:
        return driver.call("cuMemHostRegister_v2", Pointer(at), Size(size), 1)

    block = driver.alloc(64)
    gate = threading.Event()
    stream = driver.stream()
    hold = driver.kernel(gate.wait)
    assert register(base, 1 << 16) == 0
    assert register(base + 100, 10) == 712
    # A copy from pinned memory reads it when the stream gets there.
    assert hold(stream) == 0
    driver.do("cuMemcpyHtoDAsync_v2", U64(block), Pointer(base), Size(64), stream)
    ctypes.memset(base, 9, 64)
    gate.set()
    driver.do("cuStreamSynchronize", stream)
    assert driver.read(block, 64) == b"\11" * 64
    assert driver.call("cuMemHostUnregister", Pointer(base)) == 0
    assert driver.call("cuMemHostUnregister", Pointer(base)) == 713
    assert register(0x10000, 4096) == INVALID_VALUE
    # A copy to pageable memory is done when the call returns.
    gate.clear()
    assert hold(stream) == 0
    threading.Timer(0.05, gate.set).start()
    driver.do("cuMemcpyDtoHAsync_v2", Pointer(base + 64), U64(block), Size(64), stream)
    assert memory.raw[64:128] == b"\11" * 64
    host = driver.pinned(100)
    assert driver.call("cuMemFreeHost", Pointer(host + 1)) == INVALID_VALUE
    driver.do("cuMemFreeHost", Pointer(host))
    assert driver.call("cuMemFreeHost", Pointer(host)) == INVALID_VALUE


def test_pinned_memory_is_tracked_and_copied_asynchronously(start: Start) -> None:
    start(run_pinned).finish()


def run_pinned_in_parts(peer: Peer) -> None:
    driver = Driver()
    memory = ctypes.create_string_buffer(3 << 16)
    base = ctypes.addressof(memory)
    block = driver.alloc(3 << 16)
    stream = driver.stream()

    def copy(at: int, size: int) -> int:
        return driver.call("cuMemcpyDtoHAsync_v2", Pointer(base + at), U64(block), Size(size), stream)

    for part in (0, 1 << 16):
        assert driver.call("cuMemHostRegister_v2", Pointer(base + part), Size(1 << 16), 1) == 0
    driver.do("cuMemsetD8_v2", U64(block), ctypes.c_ubyte(5), Size(3 << 16))
    assert copy(0, 1 << 16) == 0 == copy(1 << 16, 1 << 16)
    assert copy(0, 2 << 16) == INVALID_VALUE == copy((2 << 16) - 1, 2)
    driver.do("cuStreamSynchronize", stream)
    assert memory.raw == b"\5" * (2 << 16) + bytes(1 << 16)


def test_a_copy_must_not_span_what_was_pinned_apart(start: Start) -> None:
    start(run_pinned_in_parts).finish()


def run_launches_held_up(peer: Peer) -> None:
    driver = Driver()
    memory = ctypes.create_string_buffer(4 * MIB)
    base = ctypes.addressof(memory)
    gate = threading.Event()
    busy, other = driver.stream(), driver.stream()
    nothing, hold = driver.kernel(lambda: None), driver.kernel(gate.wait)

    def longest(call: Callable[[], int], until: Callable[[], None]) -> float:
        """The longest launch while another thread makes the call."""
        results: list[int] = []

        def run() -> None:
            driver.do("cuCtxSetCurrent", driver.context)
            results.append(call())

        thread = threading.Thread(target=run)
        timer = threading.Timer(0.3, until)
        thread.start()
        timer.start()
        worst = 0.0
        while timer.is_alive() or thread.is_alive():
            started = time.monotonic()
            assert nothing(other) == 0
            worst = max(worst, time.monotonic() - started)
            time.sleep(0.001)
        assert results == [0]
        return worst

    def synchronize() -> int:
        return driver.call("cuCtxSynchronize")

    def register() -> int:
        return driver.call("cuMemHostRegister_v2", Pointer(base), Size(4 * MIB), 1)

    def unregister() -> int:
        return driver.call("cuMemHostUnregister", Pointer(base))

    assert hold(busy) == 0
    assert longest(synchronize, gate.set) < 0.2
    gate.clear()
    assert hold(busy) == 0
    assert longest(register, gate.set) < 0.2
    gate.clear()
    assert hold(busy) == 0
    assert driver.call("cuMemHostUnregister", Pointer(base + 1)) == INVALID_VALUE, "at once"
    assert longest(unregister, gate.set) > 0.2, "it waits for the kernel, and all launches for it"
    driver.do("cuSimSetPinning", ctypes.c_uint(75000))
    assert longest(register, lambda: None) > 0.2


def test_unpinning_waits_for_kernels_and_launches_for_it(start: Start) -> None:
    start(run_launches_held_up).finish()


# ---- faults, delays, log ----


def run_faults(peer: Peer) -> None:
    driver = Driver()
    assert [driver.try_create(GRAIN)[0] for _ in range(4)] == [0, 0, OUT_OF_MEMORY, 0]
    assert driver.used() == 3 * GRAIN
    count = U64()
    driver.do("cuSimCallCount", b"cuMemCreate", ctypes.byref(count))
    assert count.value == 4
    driver.do("cuSimSetFault", b"cuMemAlloc", 1, 2)
    assert driver.call("cuMemAlloc_v2", ctypes.byref(U64()), Size(64)) == OUT_OF_MEMORY
    driver.alloc(64)
    driver.do("cuSimSetFault", b"cuMemRelease", 1, 1)
    driver.do("cuSimSetFault", b"cuMemRelease", 0, 0)
    driver.release(driver.create())
    assert driver.call("cuSimSetFault", b"cuNothing", 1, 2) == 500
    began = time.monotonic()
    driver.reserve()
    assert time.monotonic() - began >= 0.05


def test_faults_delays_and_the_log(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    start(
        run_faults,
        AMEM_SIM_FAULTS="cuMemCreate:3:2",
        AMEM_SIM_DELAYS="cuMemAddressReserve=50000,cuMemMap=5",
        AMEM_SIM_LOG=str(log),
    ).finish()
    creates = [line.split()[3] for line in log.read_text().splitlines() if line.split()[2] == "cuMemCreate"]
    assert creates == ["0", "0", "2", "0", "0"]


def run_delays(peer: Peer) -> None:
    driver = Driver()
    folder = Path(peer.value())

    def took(action: Callable[[], object]) -> float:
        began = time.monotonic()
        action()
        return time.monotonic() - began

    assert took(driver.create) < 0.15, "the first call of two"
    assert took(driver.create) >= 0.2, "AMEM_SIM_DELAYS"
    assert took(driver.create) < 0.15, "once"
    driver.do("cuSimSetDelay", b"cuMemAddressReserve", 2, 200_000, None)
    driver.reserve()
    assert took(driver.reserve) >= 0.2
    driver.do("cuSimSetDelay", b"cuMemAddressReserve", 1, 60_000_000, None)
    driver.do("cuSimSetDelay", b"cuMemAddressReserve", 0, 0, None)
    assert took(driver.reserve) < 10, "it was cleared"
    assert driver.call("cuSimSetDelay", b"cuNothing", 1, 5, None) == 500
    assert driver.call("cuSimSetDelay", b"cuMemMap", 1, 5, b"/both") == INVALID_VALUE
    # Calls on two threads at once: the n-th waits, whichever thread makes it, and the other does not.
    gate, held = folder / "reserve", folder / "reserve.held"
    driver.do("cuSimSetDelay", b"cuMemAddressReserve", 1, 0, str(gate).encode())
    waiting = threading.Thread(target=driver.reserve)
    waiting.start()
    while not held.exists():
        time.sleep(0.001)
    driver.reserve()
    time.sleep(0.1)
    assert waiting.is_alive()
    gate.touch()
    waiting.join(10)
    assert not waiting.is_alive() and not held.exists()
    # A busy GPU.
    gate, held = folder / "work", folder / "work.held"
    stream = driver.stream()
    driver.do("cuSimWork", stream, 0, str(gate).encode())
    assert driver.call("cuStreamQuery", stream) == NOT_READY

    def synchronize() -> None:
        driver.use(0)
        driver.do("cuCtxSynchronize")

    waiting = threading.Thread(target=synchronize)
    waiting.start()
    while not held.exists():
        time.sleep(0.001)
    time.sleep(0.1)
    assert waiting.is_alive()
    gate.touch()
    waiting.join(10)
    assert not waiting.is_alive() and driver.call("cuStreamQuery", stream) == 0
    driver.do("cuSimWork", stream, 200_000, None)
    assert took(lambda: driver.do("cuStreamSynchronize", stream)) >= 0.15
    driver.do("cuStreamBeginCapture_v2", stream, 2)
    assert driver.call("cuSimWork", stream, 5, None) == CAPTURE_UNSUPPORTED


def test_one_call_of_one_process_is_delayed(start: Start, tmp_path: Path) -> None:
    process = start(run_delays, AMEM_SIM_DELAYS="cuMemCreate:2=200000,cuMemMap=5")
    process.send(str(tmp_path))
    process.finish()


def run_held_by_the_environment(peer: Peer) -> None:
    driver = Driver()
    driver.reserve()
    peer.send("done")


def test_a_call_waits_for_a_file(start: Start, tmp_path: Path) -> None:
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    process = start(run_held_by_the_environment, AMEM_SIM_DELAYS=f"cuMemMap=5,cuMemAddressReserve:1={gate}")
    other = start(run_held_by_the_environment)
    assert other.value() == "done", "another process goes on"
    deadline = time.monotonic() + 10
    while not held.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    gate.touch()
    assert process.value() == "done"
    process.finish()
    other.finish()


def run_init_only(peer: Peer) -> None:
    peer.send(ctypes.CDLL(str(LIBRARY)).cuInit(0))


@pytest.mark.parametrize(
    "name, value",
    [
        ("AMEM_SIM_FAULTS", "cuNothing:1:2"),
        ("AMEM_SIM_FAULTS", "cuMemMap:1"),
        ("AMEM_SIM_FAULTS", "cuMemMap:0:2"),
        ("AMEM_SIM_DELAYS", "cuMemMap=fast"),
        ("AMEM_SIM_DELAYS", "cuMemMap=1,"),
        ("AMEM_SIM_DELAYS", "cuMemMap:0=1"),
        ("AMEM_SIM_DELAYS", "cuMemMap:1"),
        ("AMEM_SIM_DELAYS", "cuMemMap=/file"),
        ("AMEM_SIM_MEMORY", "4G"),
        ("AMEM_SIM_GRANULARITY", "5000"),
    ],
)
def test_a_malformed_setting_is_an_error(start: Start, name: str, value: str) -> None:
    process = start(run_init_only, **{name: value})
    assert process.value() == UNKNOWN
    assert f"{name}={value}" in process.wait()[1]


# ---- fabric, multicast ----


def run_fabric_owner(peer: Peer) -> None:
    driver = Driver()
    handle = driver.create(GRAIN, FABRIC)
    base = driver.map(handle)
    driver.write(base, b"fabric")
    name = ctypes.create_string_buffer(64)
    driver.do("cuMemExportToShareableHandle", name, handle, FABRIC, U64(0))
    peer.send(name.raw.hex())
    time.sleep(60)


def run_fabric_importer(peer: Peer) -> None:
    driver = Driver()
    name = bytes.fromhex(peer.value())
    handle = U64()
    driver.do("cuMemImportFromShareableHandle", ctypes.byref(handle), name, FABRIC)
    base = driver.map(handle)
    peer.send(driver.read(base, 6).decode())
    peer.receive()
    assert driver.used() == GRAIN, "the import holds the memory of a killed owner"
    assert driver.read(base, 6) == b"fabric"
    driver.unmap(base)
    driver.release(handle)
    assert driver.used() == 0
    assert driver.call("cuMemImportFromShareableHandle", ctypes.byref(handle), name, FABRIC) == INVALID_VALUE


def test_fabric_handles_name_living_memory(start: Start) -> None:
    owner = start(run_fabric_owner, AMEM_SIM_FABRIC="1")
    importer = start(run_fabric_importer, AMEM_SIM_FABRIC="1")
    importer.send(owner.value())
    assert importer.value() == "fabric"
    owner.kill()
    importer.send()
    importer.finish()


def bind(driver: Driver, group: U64, memory: U64, offset: int = 0) -> int:
    return driver.call("cuMulticastBindMem", group, Size(offset), memory, Size(0), Size(GRAIN), U64(0))


def run_multicast_root(peer: Peer) -> None:
    driver = Driver()
    group = U64()
    prop = MulticastProp(2, 2 * GRAIN, POSIX_FD, 0)
    driver.do("cuMulticastCreate", ctypes.byref(group), ctypes.byref(prop))
    assert driver.used() == 0
    memory = driver.create()
    driver.do("cuMulticastAddDevice", group, 0)
    assert driver.call("cuMulticastAddDevice", group, 0) == INVALID_VALUE
    assert bind(driver, group, memory) == ILLEGAL_STATE, "a device is missing"
    assert driver.try_map(driver.reserve(2 * GRAIN), 2 * GRAIN, group) == ILLEGAL_STATE
    peer.send(None, driver.export(group))
    peer.receive()
    base = driver.reserve(2 * GRAIN)
    assert driver.try_map(base, 2 * GRAIN, group) == 0
    assert driver.access(base, 2 * GRAIN) == ILLEGAL_STATE, "nothing is bound"
    assert bind(driver, group, memory, 4096) == INVALID_VALUE
    assert bind(driver, group, memory) == 0
    assert bind(driver, group, memory) == INVALID_VALUE, "bound already"
    assert driver.access(base, 2 * GRAIN) == 0
    driver.release(memory)
    assert driver.used() == GRAIN, "the object holds what is bound"
    assert driver.call("cuMulticastUnbind", group, 0, Size(0), Size(GRAIN)) == 0
    assert driver.used() == 0
    assert driver.call("cuMulticastUnbind", group, 0, Size(0), Size(GRAIN)) == INVALID_VALUE
    driver.release(group)
    assert driver.unmap(base, 2 * GRAIN) == 0


def run_multicast_member(peer: Peer) -> None:
    driver = Driver(1)
    _, [fd] = peer.receive()
    result, group = driver.try_import(fd)
    assert result == 0
    driver.do("cuMulticastAddDevice", group, 1)
    memory = driver.create()
    base = driver.map(memory)
    assert driver.call("cuMulticastBindAddr", group, Size(GRAIN), U64(base), Size(GRAIN), U64(0)) == 0
    driver.release(memory)
    driver.unmap(base)
    assert driver.used() == GRAIN
    peer.send()
    driver.release(group)
    assert driver.used() == 0, "the process dropped the object"


def test_multicast_objects_keep_the_drivers_order(start: Start) -> None:
    root, member = start(run_multicast_root), start(run_multicast_member)
    _, [fd] = root.receive()
    member.send(None, fd)
    os.close(fd)
    member.receive()
    root.send()
    root.finish()
    member.finish()


# ---- identity, fork ----


def run_identity(peer: Peer) -> None:
    driver = Driver()
    uuid = ctypes.create_string_buffer(16)
    driver.do("cuDeviceGetUuid_v2", uuid, 0)
    bus = ctypes.c_int()
    driver.do("cuDeviceGetAttribute", ctypes.byref(bus), 33, 0)
    handle = driver.create()
    count = ctypes.c_int()
    driver.do("cuDeviceGetCount", ctypes.byref(count))
    peer.send([uuid.raw.hex(), bus.value, count.value, driver.used()])
    peer.receive()
    driver.release(handle)


def test_visible_devices_renumber_but_stay_the_same_devices(start: Start) -> None:
    zero, two = start(run_identity), start(run_identity, CUDA_VISIBLE_DEVICES="2,3")
    a, b = zero.value(), two.value()
    again = start(run_identity, CUDA_VISIBLE_DEVICES="2")
    c = again.value()
    assert a[0] != b[0] and b[:2] == c[:2]
    assert [a[2], b[2], c[2]] == [4, 2, 1]
    assert [a[3], b[3], c[3]] == [GRAIN, GRAIN, 2 * GRAIN]
    for process in (zero, two, again):
        process.send()
        process.finish()


def run_addresses(peer: Peer) -> None:
    driver = Driver()

    def address(name: str) -> int | None:
        return ctypes.cast(getattr(driver.library, name), Pointer).value

    def ask(name: str, version: int) -> tuple[int | None, int]:
        found, status = Pointer(), ctypes.c_int(-1)
        driver.do("cuGetProcAddress_v2", name.encode(), ctypes.byref(found), version, U64(2), ctypes.byref(status))
        return found.value, status.value

    assert ask("cuMemCreate", 12000) == (address("cuMemCreate"), 0)
    assert ask("cuMemGetAddressRange", 12000) == (address("cuMemGetAddressRange_v2"), 0)
    assert ask("cuGetProcAddress", 11030) == (address("cuGetProcAddress"), 0)
    assert ask("cuGetProcAddress", 12000) == (address("cuGetProcAddress_v2"), 0)
    assert ask("cuEventElapsedTime", 12000) == (address("cuEventElapsedTime"), 0)
    assert ask("cuEventElapsedTime", 13000) == (address("cuEventElapsedTime_v2"), 0)
    assert ask("cuSimFunctionCreate", 12000) == (address("cuSimFunctionCreate"), 0)
    assert ask("cuSimCheckAccess", 12000) == (address("cuSimCheckAccess"), 0)
    assert ask("cuMulticastCreate", 12000) == (None, 2)
    assert ask("cuMemAlloc_v2", 12000) == (None, 1)
    old = Pointer()
    assert driver.call("cuGetProcAddress", b"cuNothing", ctypes.byref(old), 12000, U64(0)) == 500


def test_functions_are_found_by_name_and_version(start: Start) -> None:
    start(run_addresses).finish()


def run_fork(peer: Peer) -> None:
    driver = Driver()
    handle = driver.create()
    base = driver.map(handle)
    block = driver.alloc(4096)
    driver.write(base, b"parent")
    started, start = os.pipe()
    stay, left = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(left)
        os.write(start, b"1")
        os.read(stay, 1)  # until the parent has looked at the device
        failed = [
            driver.call("cuInit", ctypes.c_uint(0)),
            driver.try_create(GRAIN)[0],
            driver.release(handle),
            driver.call("cuCtxSynchronize"),
            driver.call("cuCtxGetCurrent", ctypes.byref(Pointer())),
        ]
        os._exit(0 if failed == [NOT_INITIALIZED] * 5 else 1)
    os.close(stay)
    os.read(started, 1)
    assert driver.read(base, 6) == b"parent"
    driver.do("cuMemFree_v2", U64(block))
    driver.unmap(base)
    driver.release(handle)
    assert driver.used() == 0, "the child holds nothing of its parent's"
    os.close(left)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_is_refused_and_holds_nothing(start: Start) -> None:
    start(run_fork).finish()


def run_threads(peer: Peer) -> None:
    driver = Driver()
    errors: list[str] = []

    def work(value: int) -> None:
        try:
            driver.do("cuCtxSetCurrent", driver.context)
            stream = driver.stream()
            for _ in range(60):
                handle = driver.create()
                base = driver.map(handle)
                driver.do("cuMemsetD8Async", U64(base), ctypes.c_ubyte(value), Size(4096), stream)
                driver.do("cuStreamSynchronize", stream)
                assert ctypes.string_at(base, 4096) == bytes([value]) * 4096
                assert driver.unmap(base) == 0
                assert driver.release(handle) == 0
                driver.do("cuMemAddressFree", U64(base), Size(GRAIN))
            driver.do("cuStreamDestroy_v2", stream)
        except AssertionError as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    peer.send(driver.used())


def test_threads_of_several_processes_share_a_device(start: Start) -> None:
    processes = [start(run_threads) for _ in range(3)]
    for process in processes:
        process.receive()
        process.finish()
    last = start(run_watch)
    last.send(True)
    assert last.value() == 0
    last.send(False)


if __name__ == "__main__":
    main(globals())
