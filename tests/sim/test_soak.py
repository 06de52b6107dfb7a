"""The soak test in short; soak.py by itself runs longer."""

from __future__ import annotations

from harness import needs_libraries
from soak import soak, starts

pytestmark = needs_libraries


def test_forty_cycles_leave_nothing() -> None:
    assert not soak(40, seed=4, count=6, every=20)


def test_starts_do_not_hang() -> None:
    starts(3, count=4, communicators=8)
