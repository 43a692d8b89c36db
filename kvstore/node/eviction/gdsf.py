"""GDSF (greedy dual size frequency) by the cost of computing a chunk again.

    priority = clock + uses * cost / size          the least goes first; the clock becomes the priority of what went

A key keeps the clock of its last use, so that what is not used any more is overtaken in the end. All keys of a policy
have one size, which drops out. Cost: computing a token takes the model's matrices, the same for every token, and
attention over all tokens before it. In units of the first part, a chunk that begins after `t` tokens costs

    cost = 1 + t / ATTENTION_EQUAL_TOKENS

Sources: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy", HP Labs
HPL-98-69R1, 1998; cost: Kaplan et al., "Scaling laws for neural language models", arXiv:2001.08361, table 1: a token
takes 2 * 12 * layers * hidden^2 operations in the matrices and 4 * layers * hidden for each token before it, which are
equal at 6 * hidden tokens.

A deep chunk costs more than its parent, but losing the parent loses the chunk as well: so a key is worth at least what
the key after it in a batch is worth, and goes after it where the two are equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ATTENTION_EQUAL_TOKENS = 6 * 4096
"""Tokens before a token with which attention takes as long as all the rest, for a hidden size of 4,096 (a model of
about 8 billion parameters)."""
_SPARE_ENTRIES = 1024
"""Outdated heap entries that are kept beyond one a key before the heap is built anew."""


def recompute_cost(first_tokens: int) -> float:
    """Cost of computing a chunk again that begins after so many tokens, in that of the first chunk of a prompt."""
    return 1 + first_tokens / ATTENTION_EQUAL_TOKENS


@dataclass(slots=True)
class _Worth:
    """What a key is worth. `ticket` names the one heap entry that counts, the newest."""

    cost: float
    uses: int = 1
    priority: float = 0.0
    ticket: int = 0


class Gdsf:
    """Keys that are seldom used and cheap to compute again go first."""

    name = "gdsf"

    def __init__(self) -> None:
        self._keys: dict[bytes, _Worth] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._named: dict[bytes, tuple[float, int, bytes]] = {}
        self._tickets = 0
        self._clock = 0.0

    def added(self, keys: Sequence[bytes], first_tokens: Sequence[int]) -> None:
        """Worth one use each."""
        for key, tokens in zip(keys, first_tokens, strict=True):
            self._keys[key] = _Worth(recompute_cost(tokens))
        self._revalue(keys)

    def touched(self, keys: Sequence[bytes]) -> None:
        """Worth one use more, as of now."""
        for key in keys:
            if key in self._keys:
                self._keys[key].uses += 1
        self._revalue(keys)

    def ordered(self, keys: Sequence[bytes]) -> None:
        """Each is worth at least what the next one is; the tail goes first where they are equal."""
        floor = 0.0
        for key in reversed(keys):
            worth = self._keys.get(key)
            if worth is not None:
                floor = worth.priority = max(floor, worth.priority)
                worth.ticket = self._tickets = self._tickets + 1
                heapq.heappush(self._heap, (floor, worth.ticket, key))
        if len(self._heap) > 2 * len(self._keys) + _SPARE_ENTRIES:
            self._named.clear()
            self._heap = [(worth.priority, worth.ticket, key) for key, worth in self._keys.items()]
            heapq.heapify(self._heap)

    def _revalue(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            worth = self._keys.get(key)
            if worth is not None:
                worth.priority = max(worth.priority, self._clock + worth.uses * worth.cost)
        self.ordered(keys)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Forget; the clock follows what `victims` named just now."""
        for key in keys:
            worth = self._keys.pop(key, None)
            if worth is not None and key in self._named:
                self._clock = max(self._clock, worth.priority)

    def victims(self) -> Iterator[bytes]:
        """Least priority first. Those that stayed last time are given back to the heap before."""
        for entry in self._named.values():
            if self._counts(entry):
                heapq.heappush(self._heap, entry)
        self._named = {}
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                self._named[entry[2]] = entry
                yield entry[2]

    def _counts(self, entry: tuple[float, int, bytes]) -> bool:
        worth = self._keys.get(entry[2])
        return worth is not None and worth.ticket == entry[1]

    def __len__(self) -> int:
        return len(self._keys)
