"""Processes that wait for each other: groups, deadlines, peers that die or that have no amem."""

from __future__ import annotations

import contextlib
import time

import pytest

from harness import MIB, RankError, failure, memory, needs_libraries, ranks, resident, right

pytestmark = needs_libraries

SMALL = {"NCCL_STANDIN_CHANNELS": "1", "NCCL_STANDIN_BUFFSIZE": "65536"}
IMPATIENT = {**SMALL, "AMEM_TIMEOUT_S": "1"}


def test_two_groups_take_turns_on_the_same_devices() -> None:
    """Training and rollout: each job's memory is there only in its turn."""
    env = {**SMALL, "AMEM_SIM_MEMORY": str(64 * MIB)}
    with contextlib.ExitStack() as jobs:
        training = jobs.enter_context(ranks(2, {**env, "AMEM_GROUPID": "100"}))
        rollout = jobs.enter_context(ranks(2, {**env, "AMEM_GROUPID": "200"}, sim_dir=str(training.sim_dir)))
        training.init(ncomm=1)
        right(training)
        alone = training.all("meminfo")
        training.all("pause")
        rollout.init(ncomm=1)
        right(rollout)
        assert [stats["group"] for stats in training.all("stats") + rollout.all("stats")] == [100, 100, 200, 200]
        for stats in training.all("stats") + rollout.all("stats"):
            assert len(stats["peers"]) == 1, "the other job is no peer"
        held = rollout.all("meminfo")
        assert held == alone
        for _ in range(3):
            rollout.all("pause")
            assert rollout.all("meminfo") == [0, 0]
            training.all("resume")
            assert training.all("meminfo") == alone
            right(training)
            training.all("pause")
            rollout.all("resume")
            assert rollout.all("meminfo") == held
            right(rollout)
        training.all("resume")
        right(training)
        right(rollout)
        assert rollout.all("meminfo") == [a + h for a, h in zip(alone, held)]


def test_memory_shared_with_another_group_stays() -> None:
    """A pause waits for its own group only, so nothing of what crosses it may go."""
    with ranks(2, IMPATIENT, rank_env=[{"AMEM_GROUPID": "100"}, {"AMEM_GROUPID": "200"}]) as group:
        group.init(ncomm=1)
        right(group)
        group[0].call("pause")
        stats = group[0].call("stats")
        assert resident(stats)["group"] > 0
        assert stats["paused_bytes"] > 0, "the metadata, which nobody shares"
        assert group[1].call("state") == "ACTIVE"
        group[1].call("pause")
        group[1].call("resume")
        group[0].call("resume")
        right(group)


def test_a_group_id_set_in_the_program() -> None:
    with ranks(2, {"AMEM_GROUPID": "7"}) as group:
        group.init(ncomm=0)
        assert group.all("set_group_id", group=300) == [300, 300]
        group.comm_init()
        right(group)
        assert [stats["group"] for stats in group.all("stats")] == [300, 300]
        message = failure(lambda: group[0].call("set_group_id", group=301), "InvalidStateError")
        assert "300" in message
        assert "before the first communicator" in message
        assert group[0].call("set_group_id", group=300) == 300
        group.all("pause")
        group.all("resume")
        right(group)


def test_a_peer_that_does_not_pause_is_named_in_time() -> None:
    with ranks(3, IMPATIENT) as group:
        group.init(ncomm=1)
        right(group)
        used = group.all("meminfo")
        started = time.monotonic()
        group[0].start("pause")
        time.sleep(0.4)
        group[2].start("pause")
        outcomes = group.collect([group[0], group[2]])
        assert time.monotonic() - started < 4
        for outcome in outcomes:
            assert isinstance(outcome, RankError)
            assert outcome.error == "DeadlineError"
            assert f"pid {group[1].pid} " in outcome.message
            assert "must be called in every process" in outcome.message
        assert f"pid {group[2].pid} " not in str(outcomes[0]), "it had paused when rank 0 gave up"
        assert group.all("state") == ["ACTIVE"] * 3
        assert group.all("meminfo") == used
        right(group)
        group.all("pause")
        assert group.all("meminfo") == [0] * 3
        group.all("resume")
        right(group)


def test_a_peer_that_does_not_resume_is_named_in_time() -> None:
    with ranks(2, IMPATIENT) as group:
        group.init(ncomm=1)
        right(group)
        used = group.all("meminfo")
        group.all("pause")
        started = time.monotonic()
        message = failure(lambda: group[0].call("resume"), "DeadlineError")
        assert time.monotonic() - started < 4
        assert f"waiting for pid {group[1].pid} " in message
        assert "must be called in every process" in message
        assert group[0].call("state") == "PAUSED"
        group.all("resume")
        assert group.all("meminfo") == used
        right(group)


def test_a_pause_given_up_just_as_the_peer_pauses() -> None:
    """Whoever paused relying on the other may resume, and the other need not pause again."""
    with ranks(2, {**SMALL, "AMEM_TIMEOUT_S": "0.3"}) as group:
        group.init(ncomm=1)
        right(group)
        for delay in (0.0, 0.29, 0.3, 0.31, 0.5):
            group[0].start("pause")
            time.sleep(delay)
            group[1].start("pause")
            first, second = group.collect([group[0], group[1]])
            states = group.all("state")
            for outcome, state in zip((first, second), states):
                assert state == ("ACTIVE" if isinstance(outcome, RankError) else "PAUSED")
            group.all("resume")
            right(group, counts=(1000,))
        group.all("pause")
        group.all("resume")
        right(group)


@pytest.mark.parametrize("arena", ["1", "0"], ids=["arena", "direct"])
def test_a_peer_that_died_while_active(arena: str) -> None:
    with ranks(3, {**IMPATIENT, "AMEM_ARENA": arena, "NCCL_STANDIN_TIMEOUT_S": "5"}) as group:
        group.init(ncomm=1)
        right(group)
        group[1].start("kill")
        group.collect([group[1]])
        for verb in ("pause", "resume"):
            for survivor in (0, 2):
                group[survivor].start(verb)
            for outcome in group.collect([group[0], group[2]]):
                if isinstance(outcome, RankError):
                    assert outcome.error in ("PeerError", "DeadlineError"), outcome
        for survivor in (0, 2):
            group[survivor].start("destroy", comm=0)
        assert group.collect([group[0], group[2]]) == [None, None]
        memory(group, [0, 0], members=[0, 2])
        group.comm_init(members=[0, 2])
        for survivor in (0, 2):
            group[survivor].start("allreduce", comm=0, count=1000)
        assert group.finish(members=[0, 2]) == [0, 0]


def test_a_peer_that_died_while_paused() -> None:
    with ranks(3, IMPATIENT) as group:
        group.init(ncomm=1)
        right(group)
        group.all("pause")
        group[1].start("kill")
        group.collect([group[1]])
        for survivor in (0, 2):
            group[survivor].start("resume")
        for outcome in group.collect([group[0], group[2]]):
            if isinstance(outcome, RankError):
                assert outcome.error in ("PeerError", "DeadlineError"), outcome
        for survivor in (0, 2):
            group[survivor].start("destroy", comm=0)
        assert group.collect([group[0], group[2]]) == [None, None]
        memory(group, [0, 0], members=(0, 2))


def test_a_peer_that_is_stopped_does_not_hold_others_longer_than_the_deadline() -> None:
    with ranks(2, IMPATIENT) as group:
        group.init(ncomm=1)
        right(group)
        group[0].call("eval", expression=f"os.kill({group[1].pid}, 19)")
        started = time.monotonic()
        try:
            message = failure(lambda: group[0].call("pause"), "DeadlineError")
        finally:
            group[0].call("eval", expression=f"os.kill({group[1].pid}, 18)")
        assert time.monotonic() - started < 5
        assert f"pid {group[1].pid} " in message
        group.all("pause")
        group.all("resume")
        right(group)


@pytest.mark.parametrize("enabled", [0, 1])
def test_a_peer_without_amem_is_an_error_that_says_so(enabled: int) -> None:
    """It can't map what the others share, and says so at once; nobody hangs."""
    with ranks(2, {**IMPATIENT, "NCCL_STANDIN_TIMEOUT_S": "5"}) as group:
        per_rank = [{"device": rank, "enable": "before" if rank == enabled else "never"} for rank in (0, 1)]
        group.all("init", per_rank=per_rank, simulate=True)
        group.comm_init()
        started = time.monotonic()
        outcomes = group.outcomes("allreduce", count=100, timeout=20)
        assert time.monotonic() - started < 5
        assert all(isinstance(outcome, RankError) for outcome in outcomes)
        assert "amem is not enabled in the process of a peer" in str(outcomes[enabled])
        assert "AMEM_ENABLE=1 in every rank" in str(outcomes[enabled])
        group.all("destroy", comm=0)
        memory(group, [0, 0])


def test_a_communicator_connected_while_a_peer_is_slow_to_pause() -> None:
    """The goroutine that serves peers must not wait for a pause in progress."""
    slow = {"AMEM_SIM_DELAYS": "cuMemUnmap=150000"}
    with ranks(3, SMALL, rank_env=[slow, {}, {}]) as group:
        group.init(ncomm=1)
        right(group)
        for _ in range(2):
            group.all("pause")
            group.all("resume")
        group.comm_init(members=[1, 2])
        for member in (1, 2):
            group[member].start("allreduce", comm=1, count=500)
        assert group.finish(members=[1, 2]) == [0, 0]
        right(group)


def test_a_late_write_to_freed_memory_harms_nobody() -> None:
    """One rank destroys a communicator, and makes another in its place, before its peer has posted its last credit."""
    slow = {"NCCL_STANDIN_CREDIT_DELAY_US": "300000"}
    with ranks(2, rank_env=[{}, slow]) as group:
        group.init(ncomm=2)
        right(group, comm=0, counts=(1000,))
        right(group, comm=1, counts=(1000,))
        group.all("launch", comm=1, counts=[50_000])
        group[0].call("collect")
        group[0].call("destroy", comm=1)
        group[0].call("eval", expression="rank.communicators.__setitem__(1, None)")  # so that the numbers agree
        group.comm_init()
        group.all("launch", comm=2, counts=[2000])
        assert group.all("collect") == [0, 0]
