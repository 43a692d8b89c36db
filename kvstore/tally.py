"""Durations as plain bucket counts: filled where the work is done, collected later. Pure.

A Prometheus call takes longer than some of what is timed; adding here takes a bisection and two additions, and needs
the same few bytes however much is added.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

LATENCY_EDGES_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)
AGE_EDGES_S: Final = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0, 604_800.0)


class Tally:
    """How many values were at most each edge (the last count: above all of them), and their sum. One owner."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float] = LATENCY_EDGES_S) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def merge(self, other: Tally) -> None:
        """Add what another one with the same edges counted."""
        assert self.edges == other.edges
        self.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    @property
    def count(self) -> int:
        """Values added."""
        return sum(self.counts)

    def drain(self) -> Tally:
        """What was added since the last call; it starts from nothing again."""
        taken = Tally(self.edges)
        taken.counts, self.counts = self.counts, taken.counts
        taken.sum, self.sum = self.sum, 0.0
        return taken
