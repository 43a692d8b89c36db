"""Plain bucket counts."""

from __future__ import annotations

from kvstore.tally import Tally


def test_values_fall_under_the_first_edge_that_they_do_not_pass() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.1, 99.0):
        tally.add(value)
    assert (tally.counts, tally.count, tally.sum) == ([2, 2, 2], 6, 106.1)


def test_drained_values_are_counted_once() -> None:
    tally, total = Tally((1.0,)), Tally((1.0,))
    for value in (0.5, 3.0):
        tally.add(value)
        total.merge(tally.drain())
    assert (tally.count, tally.sum) == (0, 0.0)
    assert (total.counts, total.sum) == ([1, 1], 3.5)
    total.merge(tally.drain())
    assert total.count == 2
