"""A rank's socket and its imports against processes that do not keep to the protocol.

After each attempt the ranks pause, resume and compute as before, with as many
descriptors and threads as before.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import MIB, Ranks, failure, needs_libraries, ranks, right

pytestmark = needs_libraries

PROTOCOL = 2
MAX_MESSAGE = 64 << 10
NOBODY = 65534
# Go's runtime adds a thread now and then; none is added for a connection.
THREADS_SLACK = 5
# Two requests at once take two connections, and as many are kept for the next ones.
FILES_SLACK = 1


def address(process_id: str) -> str:
    return f"\0amem-{process_id}"


def hello(**changes: Any) -> dict[str, Any]:
    identity = {"ID": os.urandom(16).hex(), "PID": os.getpid(), "Group": 0}
    return {"Kind": "hello", "Version": PROTOCOL, "From": identity, **changes}


class Intruder:
    """A connection to a rank's socket."""

    def __init__(self, process_id: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(15)
        while True:
            try:
                return self.socket.connect(address(process_id))
            except BlockingIOError:  # the rank has not accepted those before yet
                time.sleep(0.01)

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def send(self, message: bytes | dict[str, Any], fds: list[int] | None = None) -> None:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([body], rights)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors; None when the rank has closed the connection."""
        try:
            body, control, _, _ = self.socket.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(200 * 4))
        except ConnectionResetError:
            return None
        fds = array.array("i")
        for _, _, data in control:
            fds.frombytes(data)
        return (json.loads(body), list(fds)) if body else None

    def ask(self, message: bytes | dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        """The answer, whose descriptors are closed."""
        self.send(message, fds)
        answer = self.receive()
        assert answer is not None, "the rank has closed the connection"
        for fd in answer[1]:
            os.close(fd)
        return answer[0]

    def refused(self) -> bool:
        """Whether the rank closes the connection and says nothing but why, if anything."""
        answer = self.receive()
        if answer is not None:
            assert answer[0]["Kind"] == "error", answer
            answer = self.receive()
        return answer is None


class Victim:
    def __init__(self, group: Ranks) -> None:
        self.group = group
        self.process_id: str = group[0].call("stats")["process_id"]
        self.before = self.held()

    def held(self) -> list[tuple[int, int]]:
        """Descriptors and threads of each rank."""
        return [
            (len(os.listdir(f"/proc/{rank.pid}/fd")), len(os.listdir(f"/proc/{rank.pid}/task")))
            for rank in self.group.processes
        ]

    def connect(self) -> Intruder:
        return Intruder(self.process_id)

    def calm(self) -> bool:
        return all(
            fds <= fds_before + FILES_SLACK and threads <= threads_before + THREADS_SLACK
            for (fds, threads), (fds_before, threads_before) in zip(self.held(), self.before)
        )

    def unharmed(self) -> None:
        used = self.group.all("meminfo")
        for step in self.group.all("pause"):
            assert step["changed"]
        assert self.group.all("meminfo") == [0] * len(self.group)
        self.group.all("resume")
        assert self.group.all("meminfo") == used
        right(self.group, counts=(1000,))
        deadline = time.monotonic() + 5
        while not self.calm():
            assert time.monotonic() < deadline, f"descriptors and threads: {self.before} before, {self.held()} now"
            time.sleep(0.05)

    def attempt(self, descriptor: dict[str, Any] | str, **arguments: Any) -> int:
        """The CUresult of importing this descriptor in rank 0."""
        body = descriptor if isinstance(descriptor, str) else json.dumps(descriptor)
        probe = (
            f"(sys.path.append({str(Path(__file__).parent)!r}), __import__('import_probe'))[1]"
            f".attempt(rank, {body!r}, **{arguments!r})"
        )
        return int(self.group[0].call("eval", expression=probe))

    def log(self) -> str:
        return self.group[0].last_lines(10)


@contextlib.contextmanager
def attacked(**env: str) -> Iterator[Victim]:
    """Two connected ranks, which must be unharmed at the end."""
    with ranks(2, {"NCCL_STANDIN_BUFFSIZE": "65536", **env}) as group:
        group.init(ncomm=1)
        right(group, counts=(1000,))
        for verb in ("pause", "resume", "pause", "resume"):
            group.all(verb)
        victim = Victim(group)
        yield victim
        victim.unharmed()


# ---- the socket ----


def test_another_users_connection_is_closed_unread() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with attacked() as victim:
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                with victim.connect() as intruder:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        intruder.send(hello(Watch=True))
                    status = 0 if intruder.receive() is None else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert "another user" in victim.log()


@pytest.mark.parametrize(
    "first",
    [
        hello(Version=0),
        hello(Version=PROTOCOL + 1),
        hello(Version=1 << 62),
        {"Kind": "hello", "From": hello()["From"]},
        {"Kind": "fetch", "Blocks": [1]},
        {"Kind": "stopped", "Pause": 1},
        {},
    ],
    ids=["version 0", "a later version", "a huge version", "no version", "fetch", "stopped", "nothing"],
)
def test_what_is_no_hello_is_refused_with_the_reason(first: dict[str, Any]) -> None:
    with attacked() as victim, victim.connect() as intruder:
        answer = intruder.ask(first)
        assert answer["Kind"] == "error"
        assert f"protocol {PROTOCOL} expected" in answer["Error"]
        assert intruder.receive() is None


def test_messages_that_are_truncated_or_of_wrong_types() -> None:
    whole = json.dumps(hello()).encode()
    cut = [whole[:length] for length in range(0, len(whole), 7)]
    wrong = [
        hello(Version="1"),
        hello(Version=1 << 70),
        hello(From=7),
        hello(From={"ID": "00", "PID": 1}),
        hello(From={"ID": "zz" * 16, "PID": 1}),
        hello(Watch="yes"),
        hello(Pause=-1),
        hello(Blocks={}),
        {"Kind": ["hello"]},
    ]
    bodies = [*cut, *(json.dumps(message).encode() for message in wrong), b"[" * 60_000, b"null", b"\xff\xfe", b"1e999"]
    with attacked() as victim:
        for body in bodies:
            with victim.connect() as intruder:
                intruder.send(body)
                assert intruder.refused(), body[:80]


@pytest.mark.parametrize("size", [MAX_MESSAGE + 1, 2 * MAX_MESSAGE, 200_000])
@pytest.mark.parametrize("greeted", [False, True])
def test_oversized_messages_end_the_connection(size: int, greeted: bool) -> None:
    with attacked() as victim, victim.connect() as intruder:
        if greeted:
            assert intruder.ask(hello())["Kind"] == "hello"
        body = json.dumps(hello()).encode()
        intruder.send(body + b" " * (size - len(body)))
        assert intruder.refused()


def test_the_largest_message_is_read() -> None:
    with attacked() as victim, victim.connect() as intruder:
        body = json.dumps(hello()).encode()
        assert intruder.ask(body + b" " * (MAX_MESSAGE - len(body)))["Kind"] == "hello"


def test_random_messages() -> None:
    rng = random.Random(7)
    kinds = ["hello", "fetch", "drop", "stopped", "retract", "ready", "error", "", "pause"]
    numbers = [0, 1, 2, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -1, 1.5, None, "1", [1]]
    with attacked() as victim:
        for _ in range(300):
            with victim.connect() as intruder, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if rng.random() < 0.7:
                    intruder.send(hello(Group=rng.choice([0, 1]), Watch=rng.random() < 0.3))
                for _ in range(rng.randint(1, 5)):
                    message = {
                        "Kind": rng.choice(kinds),
                        # Blocks that exist would make this a process that shares memory.
                        "Blocks": [rng.randrange(1 << 20, 1 << 63) for _ in range(rng.choice([0, 1, 5, 201, 2500]))],
                        "Pause": rng.choice(numbers),
                        "Ready": rng.choice(numbers),
                        "Generation": rng.choice(numbers),
                        "Relied": rng.choice([True, None, 3]),
                    }
                    body = bytearray(json.dumps(message).encode())
                    if rng.random() < 0.5:
                        for _ in range(rng.randint(1, 8)):
                            body[rng.randrange(len(body))] = rng.randrange(256)
                    intruder.send(bytes(rng.choice([body, rng.randbytes(rng.randint(1, 3000))])))


def test_requests_of_a_stranger_change_nothing() -> None:
    with attacked() as victim, victim.connect() as intruder:
        assert intruder.ask(hello(Watch=True, Pause=1 << 63))["Kind"] == "hello"
        for blocks in ([0], [1 << 40], [(1 << 64) - 1], [1 << 40] * 200):
            answer = intruder.ask({"Kind": "fetch", "Blocks": blocks})
            assert answer == {"Kind": "fetch"}, "no generation, no descriptors"
        assert "at most 200" in intruder.ask({"Kind": "fetch", "Blocks": [1] * 201})["Error"]
        for kind in ("drop", "stopped", "retract", "ready"):
            most = (1 << 64) - 1
            answer = intruder.ask({"Kind": kind, "Pause": most, "Generation": most, "Blocks": [1, 2, most]})
            assert answer["Kind"] == kind
        for kind in ("hello", "error", "", "pause", "fetch " * 1000):
            assert "unknown message" in intruder.ask({"Kind": kind})["Error"]
        assert {peer["pid"] for peer in victim.group[0].call("stats")["peers"]} == {victim.group[1].pid}
        victim.before = victim.held()  # with this connection
        victim.unharmed()


@pytest.mark.parametrize("count", [1, 200, 253])
def test_descriptors_that_nobody_asked_for_are_closed(count: int) -> None:
    with attacked() as victim, victim.connect() as intruder:
        fd = os.open("/dev/null", os.O_RDONLY)
        try:
            first = victim.held()[0][0]
            intruder.send(hello(), [fd] * count)
            if count <= 200:
                assert intruder.receive() is not None
                for kind in ("stopped", "ready", "error"):
                    intruder.ask({"Kind": kind, "Pause": 0}, [fd] * count)
                assert victim.held()[0][0] <= first + 1, "this connection alone"
            else:
                assert intruder.refused()
        finally:
            os.close(fd)


def fetch_a_block(intruder: Intruder) -> list[int]:
    """Descriptors of the first block of the rank's that is shared."""
    assert intruder.ask(hello())["Kind"] == "hello"
    for block in range(1, 100):
        intruder.send({"Kind": "fetch", "Blocks": [block]})
        answer = intruder.receive()
        assert answer is not None
        if answer[1]:
            return answer[1]
    raise AssertionError("no block is shared")


def test_a_process_that_fetched_memory_and_ended_is_not_waited_for() -> None:
    with attacked() as victim, victim.connect() as intruder:
        for fd in fetch_a_block(intruder):
            os.close(fd)
        assert len(victim.group[0].call("stats")["peers"]) == 2


def test_a_process_that_holds_memory_and_does_not_stop_is_named() -> None:
    with attacked(AMEM_TIMEOUT_S="2") as victim:
        with victim.connect() as intruder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            identity = hello()["From"]
            listener.bind(address(identity["ID"]))
            listener.listen()
            assert intruder.ask(hello(From=identity))["Kind"] == "hello"
            for block in range(1, 100):
                intruder.ask({"Kind": "fetch", "Blocks": [block]})
            used = victim.group.all("meminfo")
            message = failure(lambda: victim.group[0].call("pause"), "DeadlineError")
            assert f"pid {os.getpid()} (group 0)" in message
            assert victim.group.all("meminfo") == used
            assert victim.group[0].call("state") == "ACTIVE"
        # Its name is free again: the process has ended.
        right(victim.group, counts=(1000,))


def test_ten_thousand_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    batch = min(10_000, hard - 200)
    made = 0
    try:
        with attacked() as victim:
            while made < 10_000:
                held: list[Intruder] = []
                try:
                    for _ in range(min(batch, 10_000 - made)):
                        held.append(victim.connect())
                        if len(held) % 4 == 0:
                            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                                held[-1].send(hello())
                    if made == 0:
                        victim.group.all("pause")
                        victim.group.all("resume")
                        right(victim.group, counts=(1000,))
                finally:
                    made += len(held)
                    for intruder in held:
                        intruder.socket.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_never_say_who_they_are_end() -> None:
    with attacked() as victim:
        silent = [victim.connect() for _ in range(50)]
        try:
            victim.group.all("pause")
            victim.group.all("resume")
            right(victim.group, counts=(1000,))
            for intruder in silent:
                assert intruder.receive() is None
        finally:
            for intruder in silent:
                intruder.socket.close()


# ---- descriptors ----


def descriptor(victim: Victim, number: int, **changes: Any) -> dict[str, Any]:
    """Of the whole of a rank's first shared block, as far as this process can tell."""
    rank = victim.group[number]
    identity = {"ID": rank.call("stats")["process_id"], "PID": rank.pid, "Group": 0}
    body = {
        "Magic": "amem memory 1",
        "Owner": identity,
        "Block": 1,
        "BlockSize": 2 * MIB,
        "Offset": 0,
        "Size": 2 * MIB,
        "Prop": {"Type": 1, "HandleTypes": 1, "LocationType": 1, "Location": number},
    }
    return {**body, **changes}


def test_descriptors_that_are_not_what_they_claim() -> None:
    with attacked() as victim:
        other = victim.group[1].call("stats")["process_id"]
        nobody = {"ID": os.urandom(16).hex(), "PID": 1, "Group": 0}
        whole = json.dumps(descriptor(victim, 1))
        bad: list[dict[str, Any] | str] = [
            "",
            "{}",
            "x" * 5000,
            *(whole[:length] for length in range(10, len(whole), 40)),
            descriptor(victim, 1, Magic="amem memory 2"),
            descriptor(victim, 1, Owner={"ID": other[:-2], "PID": 1}),
            descriptor(victim, 1, Owner=nobody),
            descriptor(victim, 1, Block=1 << 50),
            descriptor(victim, 1, BlockSize=1 << 46, Size=1 << 46),
            descriptor(victim, 1, BlockSize=1 << 60, Size=1 << 60),
            descriptor(victim, 1, BlockSize=(1 << 64) - 1, Size=1 << 20),
            descriptor(victim, 1, BlockSize=1 << 46),
            descriptor(victim, 1, Offset=(1 << 64) - (64 << 10), Size=128 << 10),
            descriptor(victim, 1, Offset=2 * MIB, Size=64 << 10),
            descriptor(victim, 1, Offset=3),
            descriptor(victim, 1, Size=0),
            descriptor(victim, 1, Size=-1),
            descriptor(victim, 1, BlockSize=0, Size=0),
            descriptor(victim, 1, Size=2 * MIB - 1),
            descriptor(victim, 0, Block=1 << 50),
            descriptor(victim, 0, Offset=1 * MIB, Size=1 * MIB, Block=0),
        ]
        for body in bad:
            assert victim.attempt(body) != 0, body
        for body in (whole, whole[:-1] + " " * 5000):
            assert victim.attempt(body, seals=0) != 0, "not sealed"
        victim.unharmed()


def test_a_descriptor_of_another_group() -> None:
    """The block's owner decides by who asks, not by what a descriptor says."""
    with attacked() as victim:
        owner = {"ID": victim.group[1].call("stats")["process_id"], "PID": victim.group[1].pid, "Group": 77}
        for block in range(1, 20):
            victim.attempt(descriptor(victim, 1, Owner=owner, Block=block))


# What somebody who has bound the name of a rank that ended does with a connection.
SQUATTERS = ["does not accept", "is silent", "closes", "talks rubbish", "is another", "has no memory"]


@pytest.mark.parametrize("squatter", SQUATTERS)
def test_a_name_that_somebody_else_has_bound(squatter: str) -> None:
    with ranks(2) as group:
        group.init(ncomm=1)
        ended = group[0].call("stats")["process_id"]
    with attacked(AMEM_TIMEOUT_S="2") as victim, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address(ended))
        listener.listen(8)
        listener.settimeout(10)
        wanted = descriptor(victim, 1, Owner={"ID": ended, "PID": 1, "Group": 0})
        probe = (
            f"(sys.path.append({str(Path(__file__).parent)!r}), __import__('import_probe'))[1]"
            f".attempt(rank, {json.dumps(wanted)!r})"
        )
        started = time.monotonic()
        victim.group[0].start("eval", expression=probe)
        with contextlib.ExitStack() as stack:
            if squatter != "does not accept":
                # A watch comes first, and then one for the request.
                for _ in range(2 if squatter == "has no memory" else 1):
                    connection, _ = listener.accept()
                    stack.enter_context(connection)
                    connection.recv(MAX_MESSAGE)
                    if squatter == "closes":
                        connection.close()
                    elif squatter == "talks rubbish":
                        connection.send(b"\0" * 1000)
                    elif squatter == "is another":
                        connection.send(json.dumps(hello()).encode())
                    elif squatter == "has no memory":
                        connection.send(json.dumps(hello(From={"ID": ended, "PID": 1, "Group": 0})).encode())
                if squatter == "has no memory":
                    connection.recv(MAX_MESSAGE)
                    connection.send(json.dumps({"Kind": "fetch"}).encode())
            assert victim.group[0].finish() != 0
        assert time.monotonic() - started < 2 + 3
        assert "import memory of pid 1 (group 0)" in victim.log()
