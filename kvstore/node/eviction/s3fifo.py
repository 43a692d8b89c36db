"""S3-FIFO.

New keys wait in a small FIFO queue. The oldest of it moves on to the main queue if it was used more than once since it
came, else it goes and is remembered in a ghost list; a ghost that comes back enters the main queue at once. The oldest
of the main queue goes round again while it has uses left, one fewer each time. Room is made in the small queue while
that holds over a tenth of all keys, in the main queue otherwise. So what is used once passes by quickly, and no use
ever moves a key.

Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. Its
constants: small queue 10 % of the cache, uses counted up to 3, ghosts as many as the main queue may hold (90 %).

Until the first eviction all keys stand in the small queue, however many they are. (libcachesim's policy of this name
fills the main queue with them from its tenth on, unproven; with room for 30,000 chunks that costs it 6 points of hits
on the published conversation trace.)

Unlike there, a key that was named and may not go (it has children, or somebody holds it) becomes the youngest of its
queue, so that the next pass does not meet it at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore.node.eviction.ghosts import GhostList

SMALL_SHARE = 0.1
"""Part of all keys that the small queue holds when it is full; the ghost list has the size of the rest."""
USES_LIMIT = 3
USES_TO_STAY = 2
"""Uses after the first one with which a key of the small queue moves on to the main queue."""


class S3Fifo:
    """Keys used once go early, from a small queue of their own."""

    name = "s3fifo"

    def __init__(self) -> None:
        # Key -> uses since it entered the queue; the oldest comes first.
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts = GhostList()
        self._named: set[bytes] = set()

    def added(self, keys: Sequence[bytes], first_tokens: Sequence[int]) -> None:
        """Enter the small queue, ghosts the main queue, tail first."""
        for key in reversed(keys):
            queue = self._main if self._ghosts.take(key) else self._small
            queue[key] = 0

    def touched(self, keys: Sequence[bytes]) -> None:
        """Count a use; nothing moves."""
        for queue in (self._small, self._main):
            for key in keys:
                if key in queue:
                    queue[key] = min(queue[key] + 1, USES_LIMIT)

    def ordered(self, keys: Sequence[bytes]) -> None:
        """Tail first at the young end, but only keys that were not used since they came: a use never moves a key."""
        for queue in (self._small, self._main):
            for key in reversed(keys):
                if queue.get(key) == 0:
                    queue.move_to_end(key)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Forget; a key of the small queue that `victims` named just now becomes a ghost."""
        for key in keys:
            if self._small.pop(key, None) is None:
                self._main.pop(key, None)
            elif key in self._named:
                self._ghosts.add(key)

    def victims(self) -> Iterator[bytes]:
        """The small queue down to its share, then the main queue, then what is left of the small one."""
        room = int(len(self) * SMALL_SHARE)
        self._ghosts.resize(len(self) - room)
        self._named = set()
        left = len(self._small)
        while left > room:
            left -= 1
            key, uses = self._small.popitem(last=False)
            if uses >= USES_TO_STAY:
                self._main[key] = 0
            else:
                self._small[key] = uses
                self._named.add(key)
                yield key
        yield from self._main_victims()
        for _ in range(left):
            key, uses = self._small.popitem(last=False)
            self._small[key] = uses
            self._named.add(key)
            yield key

    def _main_victims(self) -> Iterator[bytes]:
        """Every key of the main queue once, in at most USES_LIMIT + 1 laps."""
        left = len(self._main)
        while left:
            key, uses = self._main.popitem(last=False)
            self._main[key] = max(0, uses - 1)
            if uses == 0 and key not in self._named:
                left -= 1
                self._named.add(key)
                yield key

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
