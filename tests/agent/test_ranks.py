"""The harness itself: ranks that fail, hang or die are reported and leave nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .ranks import RankError, Ranks, RankTimeout


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A child that init has not collected yet is dead too.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_answers_come_in_the_order_of_the_ranks() -> None:
    with Ranks(3, simulate=True, rank_env=[{"WHO": name} for name in "abc"]) as ranks:
        assert ranks.all("eval", expression="os.environ['WHO']") == ["a", "b", "c"]
        assert ranks[1].call("eval", expression="os.getpid()") == ranks[1].pid


def test_ranks_work_at_the_same_time() -> None:
    with Ranks(3, simulate=True) as ranks:
        ranks.all("sleep", seconds=0)
        start = time.monotonic()
        ranks.start("sleep", seconds=0.5)
        ranks.finish()
        assert time.monotonic() - start < 1.2


def test_a_failed_command_is_an_error_of_that_rank_and_the_rank_goes_on() -> None:
    with Ranks(2, simulate=True) as ranks:
        with pytest.raises(RankError, match="division by zero") as caught:
            ranks.all("eval", per_rank=[{"expression": "1"}, {"expression": "1 / 0"}])
        assert (caught.value.rank, caught.value.error) == (1, "ZeroDivisionError")
        outcomes = ranks.outcomes("eval", per_rank=[{"expression": "1 / 0"}, {"expression": "2"}])
        assert isinstance(outcomes[0], RankError)
        assert outcomes[1] == 2


def test_a_hanging_rank_times_out_with_its_stack_and_all_are_killed() -> None:
    with Ranks(2, simulate=True) as ranks:
        pids = [rank.pid for rank in ranks.processes]
        with pytest.raises(RankTimeout, match="from rank 1") as caught:
            ranks.all("sleep", per_rank=[{"seconds": 0}, {"seconds": 60}], timeout=1)
        assert "in sleep" in str(caught.value)
        assert all(gone(pid) for pid in pids)


def test_a_dead_rank_is_reported_and_the_others_answer() -> None:
    with Ranks(2, simulate=True) as ranks:
        ranks[0].start("kill")
        ranks[1].start("eval", expression="1")
        died, other = ranks.collect(ranks.processes)
        assert (died.error, other) == ("Died", 1)
        with pytest.raises(RankError, match="exit status -9"):
            ranks[0].call("eval", expression="1")


def test_a_bad_exit_is_an_error() -> None:
    expression = "__import__('atexit').register(os._exit, 3) and None"
    with pytest.raises(RankError, match="exit status 3"), Ranks(1, simulate=True) as ranks:
        ranks.all("eval", expression=expression)


def test_nothing_is_left_behind() -> None:
    with pytest.raises(KeyError), Ranks(2, simulate=True) as ranks:
        grandchild = ranks[0].call("eval", expression="__import__('subprocess').Popen(['sleep', '60']).pid")
        folders = [ranks.folder, str(ranks.sim_dir)]
        pids = [grandchild, *(rank.pid for rank in ranks.processes)]
        assert all(os.path.isdir(folder) for folder in folders)
        raise KeyError
    assert not any(os.path.exists(folder) for folder in folders)
    wait_until(lambda: all(gone(pid) for pid in pids))


def test_threads_run_at_the_same_time() -> None:
    with Ranks(1, simulate=True) as ranks:
        ranks.all("eval", expression="setattr(rank, 'device', type('D', (), {'make_current': lambda s: None})())")
        commands = [("sleep", {"seconds": 0.5}), ("sleep", {"seconds": 0.5}), ("eval", {"expression": "1 / 0"})]
        start = time.monotonic()
        answers = ranks[0].call("threads", commands=commands)
        assert time.monotonic() - start < 0.95
        assert answers[:2] == [{"value": None}, {"value": None}]
        assert answers[2]["error"] == "ZeroDivisionError"
