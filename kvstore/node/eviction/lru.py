"""Leaf-first LRU.

One recency list. The chunks of a touched prefix are moved to the young end from tail to head, so a parent is
always younger than its children and the old end is a leaf: evicting from there takes tails before heads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class LeafFirstLru:
    """Least recently used prefix tail goes first."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def added(self, keys: Sequence[bytes], first_tokens: Sequence[int]) -> None:
        """Insert at the young end, tail first."""
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key)

    def touched(self, keys: Sequence[bytes]) -> None:
        """Move to the young end, tail first."""
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def ordered(self, keys: Sequence[bytes]) -> None:
        """The same: recency is all that counts here."""
        self.touched(keys)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Forget."""
        for key in keys:
            self._order.pop(key, None)

    def victims(self) -> Iterator[bytes]:
        """Oldest first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
