"""SIEVE.

One FIFO queue and a hand. A use sets a key's mark and moves nothing. The hand goes from old to young and, at the young
end, back to the old one: it takes the mark off a marked key and leaves it where it is; an unmarked key goes. Kept keys
thus gather behind the hand, and what comes new is looked at soon after.

Source: Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for
web caches", NSDI 2024, algorithm 1. No constants.

The queue is kept as two, cut at the hand: a step of the hand takes the oldest key before it to the end of those behind
it; when none is left before it, the two change places. A key that may not go is passed like a marked one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class Sieve:
    """A hand passes over the keys and takes those not used since it came by last."""

    name = "sieve"

    def __init__(self) -> None:
        # Key -> mark; the oldest comes first.
        self._ahead: OrderedDict[bytes, bool] = OrderedDict()
        self._behind: OrderedDict[bytes, bool] = OrderedDict()

    def added(self, keys: Sequence[bytes], first_tokens: Sequence[int]) -> None:
        """Enter at the young end, tail first, without a mark."""
        self._turn_at_the_end()
        for key in reversed(keys):
            self._ahead[key] = False

    def touched(self, keys: Sequence[bytes]) -> None:
        """Mark; nothing moves."""
        for part in (self._ahead, self._behind):
            for key in keys:
                if key in part:
                    part[key] = True

    def ordered(self, keys: Sequence[bytes]) -> None:
        """Tail first at the young end, but only keys without a mark that the hand has not passed: the new ones."""
        for key in reversed(keys):
            if self._ahead.get(key) is False:
                self._ahead.move_to_end(key)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Forget."""
        for key in keys:
            if self._ahead.pop(key, None) is None:
                self._behind.pop(key, None)

    def victims(self) -> Iterator[bytes]:
        """Two laps of the hand: after the first no key has a mark, so the second names all that are left."""
        for _ in range(2 * len(self)):
            self._turn_at_the_end()
            key, marked = self._ahead.popitem(last=False)
            self._behind[key] = False
            if not marked:
                yield key

    def _turn_at_the_end(self) -> None:
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead

    def __len__(self) -> int:
        return len(self._ahead) + len(self._behind)
