"""ARC, the adaptive replacement cache.

Two LRU lists: keys used once and keys used again, each with a ghost list of what was evicted from it. Eviction takes
the oldest key used once while there are more than `target` of those, else the oldest key used again. A ghost that comes
back moves the target: one of the once list raises it (that list was too short), one of the again list lowers it. Either
way the key enters the again list.

Source: Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure 4. No constants: a step
of the target is 1, or the quotient of the two ghost lists' lengths where that is more. With c = room in keys, the once
list and its ghosts are c keys at most, all four lists 2 c.

Unlike there, evictions come in batches after the keys were added, so the rule for a tie (once list exactly at its
target and a ghost of the again list asked for) has no place here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore.node.eviction.ghosts import GhostList


class Arc:
    """Balances keys used once against keys used again by what was missed of either."""

    name = "arc"

    def __init__(self) -> None:
        # The oldest comes first.
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._once_ghosts = GhostList()
        self._again_ghosts = GhostList()
        self._named: set[bytes] = set()
        self._room = 0
        self.target = 0.0
        """How many keys used once are to stay."""

    def added(self, keys: Sequence[bytes], first_tokens: Sequence[int]) -> None:
        """Enter the once list, ghosts the again list, tail first; ghosts move the target."""
        for key in reversed(keys):
            once, again = len(self._once_ghosts), len(self._again_ghosts)
            if self._once_ghosts.take(key):
                self.target = min(self.target + max(1.0, again / once), float(self._room))
            elif self._again_ghosts.take(key):
                self.target = max(self.target - max(1.0, once / again), 0.0)
            else:
                self._once[key] = None
                continue
            self._again[key] = None

    def touched(self, keys: Sequence[bytes]) -> None:
        """Move to the young end of the again list, tail first."""
        for key in reversed(keys):
            if key in self._once:
                del self._once[key]
                self._again[key] = None
            elif key in self._again:
                self._again.move_to_end(key)

    def ordered(self, keys: Sequence[bytes]) -> None:
        """Move to the young end of the list in which they are, tail first."""
        for part in (self._once, self._again):
            for key in reversed(keys):
                if key in part:
                    part.move_to_end(key)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Forget; a key that `victims` named just now becomes a ghost of its list."""
        once, again = _taken(self._once, keys), _taken(self._again, keys)
        self._once_ghosts.resize(max(0, self._room - len(self._once)))
        self._remember(self._once_ghosts, once)
        self._again_ghosts.resize(max(0, 2 * self._room - len(self) - len(self._once_ghosts)))
        self._remember(self._again_ghosts, again)

    def _remember(self, ghosts: GhostList, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._named:
                ghosts.add(key)

    def victims(self) -> Iterator[bytes]:
        """The oldest key of the list that is over its part, one after the other; then of the other one."""
        self._room = len(self)
        self._named = set()
        once, again = iter(self._once), iter(self._again)
        once_left, again_left = len(self._once), len(self._again)
        while once_left or again_left:
            if once_left and (once_left > self.target or not again_left):
                once_left -= 1
                key = next(once)
            else:
                again_left -= 1
                key = next(again)
            self._named.add(key)
            yield key

    def __len__(self) -> int:
        return len(self._once) + len(self._again)


def _taken(part: OrderedDict[bytes, None], keys: Sequence[bytes]) -> list[bytes]:
    """Take those of the keys that it holds out of a list."""
    found = []
    for key in keys:
        if key in part:
            del part[key]
            found.append(key)
    return found
