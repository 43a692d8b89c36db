"""One node without bytes: DRAM and, behind it, an SSD, each with an eviction policy of its own.

The rules are the live node's, and its calls of a policy in its order. A block is present if one tier has it. What is
found on the SSD is promoted to DRAM and stays on the SSD; it is used once by that. A cleaner writes to the SSD after
each request, in batches, a block behind its ancestors; what the SSD drops for want of room is written again when it is
used again. Leaves leave first: on either tier, a block goes only when no child of it is there. (A node asks more where
a block has no other copy: that it has no child at all. Both tiers are prefix-closed, so that it cannot have one on the
other tier alone.)

Invariants (`check`): each tier holds the parent of every block it holds; it is over its room only within `serve`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvstore.errors import InvalidRequest
from kvstore.node.eviction import make_policy
from kvstore.node.eviction.ghosts import GhostList

ADMISSIONS = ("always", "second_touch")
"""What may be written to the SSD: everything, or what was used twice (or stored again soon after it was lost)."""
BATCH_BLOCKS = 256
"""Blocks that the cleaner writes at a time."""


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block hangs: its parent (None: the head of a prompt) and the tokens before it."""

    parent: bytes | None
    first_tokens: int


Blocks = dict[bytes, Block]


class SimulatedTier:
    """Which blocks one tier holds. None for `room_blocks` = room for everything."""

    def __init__(self, policy: str, room_blocks: int | None, blocks: Blocks) -> None:
        self.room_blocks = room_blocks
        self._policy = make_policy(policy)
        self._blocks = blocks
        self._children: dict[bytes, int] = {}

    def add(self, keys: Sequence[bytes]) -> None:
        """Hold these blocks, one by one; none is held yet, their parents are or come before them."""
        for key in keys:
            self._children[key] = 0
            parent = self._blocks[key].parent
            if parent is not None:
                self._children[parent] += 1
            self._policy.added([key], [self._blocks[key].first_tokens])

    def touch(self, keys: Sequence[bytes]) -> None:
        """One prefix was used."""
        self._policy.touched(keys)

    def order(self, keys: Sequence[bytes]) -> None:
        """One prefix was stored or brought here in part."""
        self._policy.ordered(keys)

    def evict(self, coming: int = 0, held: Container[bytes] = ()) -> list[bytes]:
        """Drop what is over the room with `coming` blocks more, leaves first, in the policy's order, but none that is
        `held`; returns it, children before parents. Less where nothing more may go."""
        gone: list[bytes] = []
        excess = 0 if self.room_blocks is None else len(self) + coming - self.room_blocks
        # A policy may name a parent before its child; the next pass finds it without one.
        while len(gone) < excess:
            dropped = list(self._drop_leaves(excess - len(gone), held))
            self._policy.removed(dropped)
            gone += dropped
            if not dropped:
                break
        return gone

    def _drop_leaves(self, count: int, held: Container[bytes]) -> Iterator[bytes]:
        for key in self._policy.victims():
            if self._children.get(key) == 0 and key not in held:
                del self._children[key]
                parent = self._blocks[key].parent
                if parent is not None:
                    self._children[parent] -= 1
                yield key
                count -= 1
                if not count:
                    return

    def check(self) -> None:
        """The tier is prefix-closed and within its room, and its records agree."""
        assert self.room_blocks is None or len(self) <= self.room_blocks
        assert len(self) == len(self._policy)
        children = dict.fromkeys(self._children, 0)
        for key in self._children:
            parent = self._blocks[key].parent
            if parent is not None:
                children[parent] += 1
        assert children == self._children

    def __contains__(self, key: bytes) -> bool:
        return key in self._children

    def __len__(self) -> int:
        return len(self._children)


@dataclass(frozen=True, slots=True)
class Found:
    """Leading blocks of a prompt that were present, and how many of them were on the SSD only."""

    blocks: int
    ssd_blocks: int


class SimulatedNode:
    """DRAM of `dram_blocks` and, unless `ssd_blocks` is None, an SSD. Counters only grow.

    `evictions`: blocks that left the node. `lost_blocks`: those of them that went from DRAM and had no copy on the SSD.
    `ssd_blocks_written`: blocks that the cleaner wrote, each time.
    """

    def __init__(
        self,
        policy: str,
        dram_blocks: int | None,
        ssd_blocks: int | None = None,
        admission: str = "always",
    ) -> None:
        if (dram_blocks or 0) < 0 or (ssd_blocks or 0) < 0:
            raise InvalidRequest("capacity_blocks and ssd_blocks must be >= 0")
        if admission not in ADMISSIONS:
            raise InvalidRequest(f"unknown admission {admission!r}; known: {', '.join(ADMISSIONS)}")
        self._blocks: Blocks = {}
        self._dram = SimulatedTier(policy, dram_blocks, self._blocks)
        self._ssd = SimulatedTier(policy, ssd_blocks or 0, self._blocks)
        self._admits_all = admission == "always"
        # A block lost longer ago than the SSD reaches back would have left the SSD as well.
        self._lost = GhostList(ssd_blocks or 0)
        self._to_clean: OrderedDict[bytes, None] = OrderedDict()
        self.evictions = 0
        self.lost_blocks = 0
        self.ssd_blocks_written = 0

    def serve(self, keys: Sequence[bytes], block_tokens: int) -> Found:
        """Look up a prompt, store what it lacked, make room, write ahead."""
        run = 0
        while run < len(keys) and keys[run] in self._blocks:
            run += 1
        promoted = self._use(keys[:run])
        if run < len(keys):
            self._order(keys[:run])
            self._store(keys, run, block_tokens)
            self._order(keys)
            self._make_room()
        self._clean()
        return Found(run, promoted)

    def _use(self, keys: Sequence[bytes]) -> int:
        """Promote what of a prefix is on the SSD only, use the rest; returns how much was promoted."""
        in_dram = [key for key in keys if key in self._dram]
        promoted = [key for key in keys if key not in self._dram]
        for key in promoted:
            self._ssd.touch([key])
        self._dram.add(promoted)
        if promoted:
            self._order(keys)
            self._make_room(held=set(keys))
        self._dram.touch(in_dram)
        self._ssd.touch(in_dram)
        for key in in_dram:
            if key not in self._ssd:
                self._to_clean[key] = None
                self._to_clean.move_to_end(key)
        return len(promoted)

    def _order(self, keys: Sequence[bytes]) -> None:
        self._dram.order(keys)
        self._ssd.order(keys)

    def _store(self, keys: Sequence[bytes], run: int, block_tokens: int) -> None:
        missing = []
        for index in range(run, len(keys)):
            if keys[index] not in self._blocks:  # a trace may give one id two parents; the first one counts
                self._blocks[keys[index]] = Block(keys[index - 1] if index else None, index * block_tokens)
                missing.append(keys[index])
        self._dram.add(missing)
        for key in missing:
            if self._lost.take(key) or self._admits_all:
                self._to_clean[key] = None

    def _make_room(self, held: Container[bytes] = ()) -> None:
        for key in self._dram.evict(held=held):
            if key not in self._ssd:
                self._to_clean.pop(key, None)
                self._lost.add(key)
                self.lost_blocks += 1
                self._forget(key)

    def _clean(self) -> None:
        """Write what waits for it, first come first, as far as there is room."""
        if self._dram.room_blocks is None or not self._ssd.room_blocks:
            return
        left = len(self._to_clean) + 1
        while 0 < len(self._to_clean) < left:
            left = len(self._to_clean)
            self._write_batch(self._next_batch())

    def _next_batch(self) -> list[bytes]:
        """The blocks that wait longest, each behind its ancestors; the rest of a long prompt comes with the next."""
        batch: dict[bytes, None] = {}
        for key in self._to_clean:
            line: list[bytes] = []
            at: bytes | None = key
            while at is not None and at not in self._ssd and at not in batch:
                line.append(at)
                at = self._blocks[at].parent
            for each in reversed(line):
                if len(batch) >= BATCH_BLOCKS:
                    return list(batch)
                batch[each] = None
        return list(batch)

    def _write_batch(self, batch: Sequence[bytes]) -> None:
        """Make room for as much as goes, then add it. What found no room waits for another use."""
        kept: set[bytes] = set()
        coming: dict[bytes, None] = {}
        wanted = set(batch)
        for key in batch:
            parent = self._blocks[key].parent
            if parent is not None and parent not in self._ssd and parent not in coming:
                if parent in wanted:
                    self._to_clean.pop(key, None)
                continue  # else an earlier one has just pushed it out: the next batch brings both
            added = ({key} if parent is None else {key, parent}) - kept
            for gone in self._ssd.evict(len(coming) + 1, kept | added):
                if gone not in self._dram:  # what still is there is written again when it is used again
                    self._forget(gone)
            if self._ssd.room_blocks is not None and len(self._ssd) + len(coming) >= self._ssd.room_blocks:
                self._to_clean.pop(key, None)
                continue
            kept |= added
            coming[key] = None
        arrived = list(coming)
        self._ssd.add(arrived)
        for key, after in zip_longest(arrived, arrived[1:]):
            self._to_clean.pop(key, None)
            if after is None or self._blocks[after].parent != key:  # the end of a run
                self._ssd.order(self._chain(key))
        self.ssd_blocks_written += len(arrived)

    def _chain(self, key: bytes) -> list[bytes]:
        """A block and all above it, head first."""
        chain: list[bytes] = []
        at: bytes | None = key
        while at is not None:
            chain.append(at)
            at = self._blocks[at].parent
        return chain[::-1]

    def _forget(self, key: bytes) -> None:
        del self._blocks[key]
        self.evictions += 1

    def check(self) -> None:
        """All records agree. Called by tests after every step."""
        self._dram.check()
        self._ssd.check()
        assert all(key in self._dram or key in self._ssd for key in self._blocks)
        dirty = {key for key in self._blocks if key not in self._ssd}
        assert self._to_clean.keys() <= dirty
