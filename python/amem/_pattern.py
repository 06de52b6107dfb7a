"""Contents that tell each rank, each call and each element apart."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

# Prime, so that data moved by any whole number of pages, chunks or steps does
# not match what belongs there.
PERIOD = 1021

ITEM = 4


def pattern(count: int, seed: int, sources: Iterable[int], offset: int = 0) -> bytes:
    """count int32 elements: the sum over the sources, from element offset on."""
    base = step = 0
    for source in sources:
        base += (seed * 7919 + source * 104729) % 65521
        step += (seed * 31 + source * 17) % 251 + 1
    block = array("i", (base + step * ((offset + i) % PERIOD) for i in range(PERIOD))).tobytes()
    return (block * (count // PERIOD + 1))[: count * ITEM]


def mismatches(got: bytes, want: bytes) -> int:
    """How many elements differ."""
    if got == want:
        return 0
    if len(got) != len(want):
        return max(len(got), len(want)) // ITEM
    pairs = zip(memoryview(got).cast("i"), memoryview(want).cast("i"))
    return sum(a != b for a, b in pairs)
