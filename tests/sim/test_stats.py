"""What the statistics and errors say: the fields that amem's types name, all of them and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from amem import _api

from harness import MIB, RankError, environment, needs_libraries, python, ranks, right

pytestmark = needs_libraries

SMALL = {"NCCL_STANDIN_CHANNELS": "1", "NCCL_STANDIN_BUFFSIZE": "65536"}


def differences(value: Any, wanted: Any, at: str = "stats") -> list[str]:
    """Where a value, as JSON has it, is not what the type says."""
    if hasattr(wanted, "__total__"):  # a TypedDict
        fields = get_type_hints(wanted)
        if not isinstance(value, dict):
            return [f"{at} is {value!r}"]
        found = [f"{at}.{name} is in one only" for name in sorted(fields.keys() ^ value.keys())]
        both = fields.keys() & value.keys()
        return found + [d for name in sorted(both) for d in differences(value[name], fields[name], f"{at}.{name}")]
    if get_origin(wanted) is list:
        if not isinstance(value, list):
            return [f"{at} is {value!r}"]
        return [d for i, item in enumerate(value) for d in differences(item, get_args(wanted)[0], f"{at}[{i}]")]
    if get_origin(wanted) is dict:
        if not isinstance(value, dict):
            return [f"{at} is {value!r}"]
        return [d for key, item in value.items() for d in differences(item, get_args(wanted)[1], f"{at}.{key}")]
    right_type = isinstance(value, (int, float) if wanted is float else wanted)
    return [] if right_type and isinstance(value, bool) == (wanted is bool) else [f"{at} is {value!r}"]


def test_differences_are_found() -> None:
    """The comparison itself."""
    peer = {"pid": 1, "process_id": "a", "group": 0, "imports": 0, "exports": 0, "stopped": False}
    assert differences(peer, _api.PeerStats) == []
    assert differences({**peer, "more": 1}, _api.PeerStats) == ["stats.more is in one only"]
    assert differences({k: v for k, v in peer.items() if k != "pid"}, _api.PeerStats) == ["stats.pid is in one only"]
    assert differences({**peer, "stopped": 0}, _api.PeerStats) == ["stats.stopped is 0"]
    assert differences({**peer, "pid": True}, _api.PeerStats) == ["stats.pid is True"]
    assert differences([None], list[int]) == ["stats[0] is None"]
    assert differences(None, list[int]) == ["stats is None"]
    assert differences({"a": "b"}, dict[str, int]) == ["stats.a is 'b'"]


@pytest.mark.parametrize("enabled", [False, True])
def test_all_fields_are_there_before_nccl_is(tmp_path: Path, enabled: bool) -> None:
    script = f"""
import amem, json, os
if {enabled}:
    amem.enable()
print(json.dumps([os.getpid(), amem.stats()]))
"""
    pid, stats = json.loads(python(script, environment(tmp_path, AMEM_GROUPID="7")))
    assert differences(stats, _api.Stats) == []
    assert (stats["state"], stats["pid"]) == ("waiting" if enabled else "off", pid)
    assert stats["group"] == (7 if enabled else 0), "the environment is read with amem_enable()"


def test_the_types_are_what_the_library_tells() -> None:
    with ranks(2, {**SMALL, "AMEM_ENABLE": "1"}) as group:
        group.init()
        group.comm_init()
        right(group)
        a, b = group[0], group[1]
        tensor = a.call("allocate", tag="weights", size=2 * MIB, seed=1)
        b.call("open", handle=a.call("share", tensor=tensor), size=2 * MIB)
        for verb in ("pause", "resume"):
            for rank, stats in enumerate(group.all("stats")):
                assert differences(stats, _api.Stats) == [], (verb, rank)
                for name in ("devices", "peers", "sharers", "driver_calls"):
                    assert stats[name], f"{name} is empty, and shows nothing"
            assert a.call("stats")["regions"]
            group.all(verb)
        last = a.call("stats")
        assert last["last_pause"]["bytes"] > 0 and last["last_resume"]["bytes"] > 0


def test_a_region_without_nccl_has_lists() -> None:
    with ranks(1) as group:
        group.all("start_without_nccl", device=0)
        group[0].call("allocate", tag="weights", size=2 * MIB, seed=1)
        stats = group[0].call("stats")
        assert differences(stats, _api.Stats) == []
        assert (stats["devices"], stats["peers"]) == ([], [])


def test_a_report_has_room_for_every_tag() -> None:
    with ranks(1) as group:
        group.all("start_without_nccl", device=0)
        tags = [f"{number:064}" for number in range(128)]
        for tag in tags:
            group[0].call("allocate", tag=tag, size=2 * MIB, seed=1)
        for verb in ("pause", "resume"):
            done = group[0].call(verb)
            assert done["changed"] and sorted(done["tags"]) == tags


def test_out_of_memory_has_its_figures() -> None:
    with ranks(1, {"AMEM_SIM_MEMORY": str(256 * MIB)}) as group:
        group.all("start_without_nccl", device=0)
        p = group[0]
        p.call("allocate", tag="weights", size=100 * MIB, seed=1)
        p.call("pause", tags=["weights"])
        held = p.call("hold", size=200 * MIB)
        with pytest.raises(RankError) as caught:
            p.call("resume")
        assert caught.value.error == "OutOfMemoryError"
        assert caught.value.figures == {"device": 0, "needed_bytes": 100 * MIB, "free_bytes": 56 * MIB}
        # Another failure has none of it.
        with pytest.raises(RankError) as caught:
            p.call("pause", tags=["other"])
        assert (caught.value.error, caught.value.figures) == ("InvalidArgumentError", {})
        p.call("free", pointer=held)
        p.call("resume")
        assert p.call("holds", tensor=0, seed=1)


def test_a_deadline_says_as_data_whom_it_waited_for() -> None:
    with ranks(2, {**SMALL, "AMEM_TIMEOUT_S": "0.5", "AMEM_GROUPID": "100"}) as group:
        group.init()
        group.comm_init()
        right(group)
        with pytest.raises(RankError) as caught:
            group[0].call("pause")
        assert caught.value.error == "DeadlineError"
        assert caught.value.figures == {"waiting_for": [{"pid": group[1].pid, "group": 100}]}
        right(group)
