"""A ghost list: keys that were evicted a short while ago, without their bytes.

S3-FIFO and ARC learn from a ghost that comes back that the eviction was wrong; second-touch admission to the SSD takes
one for a second use. A FIFO with a bound: the key that was evicted first is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict


class GhostList:
    """At most `limit` keys. 0 remembers nothing."""

    def __init__(self, limit: int = 0) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._limit = limit

    def add(self, key: bytes) -> None:
        """Remember an evicted key as the newest, and forget the oldest one over the limit."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        self._trim()

    def take(self, key: bytes) -> bool:
        """Forget a key that comes back; True if it was remembered."""
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def resize(self, limit: int) -> None:
        """Another limit (0 or more); what is over it is forgotten now."""
        self._limit = limit
        self._trim()

    def _trim(self) -> None:
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)
