"""Ranks as processes, for tests and benchmarks: see ranks.py."""

from .ranks import RankError, Ranks, RankTimeout, simulated

__all__ = ["RankError", "RankTimeout", "Ranks", "simulated"]
