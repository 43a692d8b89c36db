"""Prefix hits of a trace without a pool: one cache of so many blocks, the live nodes' own eviction policies.

Counted as the published figures are: contiguous hits from the head of each prompt over all blocks; a request's
blocks are touched from tail to head; room is made after each request. Only leaves leave, as on a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.analytics.trace import Request
from kvstore.errors import InvalidRequest
from kvstore.node.eviction import EvictionPolicy, make_policy


@dataclass(slots=True)
class HitCounts:
    """What a replay counts, live or simulated. Tokens are prompt tokens; the last block may be partial."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0

    def add(self, request: Request, hit_blocks: int) -> None:
        """Count one request of which the first `hit_blocks` blocks were found."""
        self.requests += 1
        self.blocks += len(request.hash_ids)
        self.hit_blocks += hit_blocks
        self.tokens += request.input_length
        self.hit_tokens += request.tokens_of_first(hit_blocks)

    @property
    def block_ratio(self) -> float:
        """Hit blocks over all blocks; 0 for an empty trace."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_ratio(self) -> float:
        """Hit tokens over all prompt tokens; 0 for an empty trace."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def simulate(requests: Iterable[Request], *, capacity_blocks: int | None = None, policy: str = "lru") -> HitCounts:
    """Run a trace through one cache of `capacity_blocks` blocks (None: room for everything)."""
    cache = _BlockCache(make_policy(policy), capacity_blocks)
    counts = HitCounts()
    for request in requests:
        counts.add(request, cache.serve([block_id.to_bytes(8, "little") for block_id in request.hash_ids]))
        counts.evictions = cache.evictions
    return counts


class _BlockCache:
    """Resident blocks as a forest; invariant: the parent of a resident block is resident."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int | None) -> None:
        if capacity_blocks is not None and capacity_blocks < 0:
            raise InvalidRequest("capacity_blocks must be >= 0")
        self._policy = policy
        self._capacity_blocks = capacity_blocks
        self._parents: dict[bytes, bytes | None] = {}
        self._child_counts: dict[bytes, int] = {}
        self.evictions = 0

    def serve(self, keys: list[bytes]) -> int:
        """Look up a prompt, store what it lacked, make room. Returns its leading hits in blocks."""
        run = 0
        while run < len(keys) and keys[run] in self._parents:
            run += 1
        self._policy.touched(keys[:run])
        self._store(keys, run)
        self._policy.ordered(keys)
        if self._capacity_blocks is not None:
            self._evict(len(self._parents) - self._capacity_blocks)
        return run

    def _store(self, keys: list[bytes], run: int) -> None:
        missing = []
        for index in range(run, len(keys)):
            if keys[index] in self._parents:
                continue  # a trace may give one id two parents; the first one counts
            parent = keys[index - 1] if index else None
            self._parents[keys[index]] = parent
            if parent is not None:
                self._child_counts[parent] = self._child_counts.get(parent, 0) + 1
            missing.append(keys[index])
        self._policy.added(missing, [0] * len(missing))

    def _evict(self, count: int) -> None:
        """Take `count` leaves, oldest first; a parent becomes a leaf within the same pass when its last child
        goes, and passes repeat because a policy may order a parent before its child."""
        while count > 0:
            victims: list[bytes] = []
            for key in self._policy.victims():
                if len(victims) == count:
                    break
                if self._child_counts.get(key, 0):
                    continue
                parent = self._parents.pop(key)
                if parent is not None:
                    self._child_counts[parent] -= 1
                self._child_counts.pop(key, None)
                victims.append(key)
            self._policy.removed(victims)
            self.evictions += len(victims)
            count -= len(victims)
