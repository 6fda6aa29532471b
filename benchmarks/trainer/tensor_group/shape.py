"""The tensor group of ``stragglers.py``: ranks, the late one, and what it trains."""

RANKS, LATE = 4, 1

BASE_SLOWDOWN = 16.0
"""Slow-down of all ranks: the two cores that they share must be idle mostly, or the ranks slow each other."""

CONTEXT, BATCH, HEADS = 32, 16, 16
