"""One tier of a node: slots, what is committed in them, and what goes when room is needed. Pure, synchronous.

The pool joins four records and keeps them equal: the allocator (which slots are used), the forest (which chunk
has which shards), the catalog (what readers see) and the eviction policies (in which order chunks go, one
policy a slot class). Reservations and sessions are not its business (`reservations.py`).

Order of eviction: orphans, then chunks that stayed uncovered for 60 s, then the policy's order; always leaves
that nobody holds or writes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvstore.errors import LimitExceeded
from kvstore.metadata import GEOMETRIES_A_NAMESPACE_LIMIT, EventKind
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.values import Tier
from kvstore.node.catalog import CatalogWriter, EntryValue, age_of
from kvstore.node.chunks import Chunk, Copy, Forest, KnownNamespace
from kvstore.node.eviction import EvictionPolicy, make_policy
from kvstore.node.slots import SlotAllocator

UNCOVERED_GRACE_S = 60.0
_SCAN_LIMIT = 20_000
"""Victims looked at for one request, so that the node's loop is never held for long."""
_EXTENT_TRIES = 8
TOKENS_LIMIT = (1 << 16) - 1
"""Most tokens of a chunk: an entry of the catalog has two bytes for them."""
_DRAM = int(Tier.DRAM)

Publish = Callable[[EventKind, Chunk, int], None]


class SlotState(enum.IntEnum):
    """State of a slot in the shared slot records."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    QUARANTINED = 3


class Pool:
    """The committed contents of one tier. `publish` is told of shards that the index may know."""

    def __init__(
        self,
        catalog: CatalogWriter,
        allocator: SlotAllocator,
        *,
        clock: Callable[[], float],
        publish: Publish,
        eviction: str = "lru",
        room_chunks: int = 0,
    ) -> None:
        self.catalog = catalog
        self.allocator = allocator
        self.forest = Forest()
        self.spaces: dict[bytes, KnownNamespace] = {}
        self.counts: Counter[str] = Counter()
        self.committed_chunks = 0
        self.eviction = eviction
        self._clock = clock
        self._publish = publish
        self._room_chunks = room_chunks
        self._policies: dict[int, EvictionPolicy] = {}
        self._owners: dict[int, Chunk] = {}

    # --- namespaces --------------------------------------------------------------------------------------

    def register(self, namespace: Namespace, geometry: Geometry | None, written_here: Iterable[int]) -> KnownNamespace:
        """Know a namespace and, for writers, a geometry and which of its rectangles come to this node.

        Raises LimitExceeded over 64 geometries: the index takes no more, and would refuse all news of this node.
        """
        if namespace.layout.chunk_tokens > TOKENS_LIMIT:
            raise LimitExceeded(f"a chunk has at most {TOKENS_LIMIT} tokens, not {namespace.layout.chunk_tokens}")
        space = self.spaces.get(namespace.id)
        if space is not None and geometry is not None and geometry.digest not in space.geometries:
            _check_room(space)
        if space is None:
            space = KnownNamespace(namespace, self.catalog.add_namespace(namespace))
            self.spaces[namespace.id] = space
        if geometry is not None:
            geometry.check_fits(namespace.layout)
            written_here = tuple(written_here)
            self.catalog.add_geometry(space.number, geometry)
            self.catalog.set_written_here(space.number, geometry, written_here)
            before = space.sets_here
            space.add_geometry(geometry, written_here)
            # A rank that joins late adds rectangles: chunks that were covered without them are not any more.
            if space.sets_here[: len(before)] != before:
                self.forest.judge_again(space)
        return space

    # --- slots -------------------------------------------------------------------------------------------

    def take_slots(self, size: int, count: int) -> list[int]:
        """Up to `count` slots of class `size`, evicting what must go. Fewer if nothing more may go."""
        slots = self.allocator.allocate(size, count)
        while len(slots) < count:
            if not self._evict(size, count - len(slots)) and not self._clear_extent(size):
                break
            more = self.allocator.allocate(size, count - len(slots))
            if not more:
                break
            slots += more
        return slots

    def free_slot(self, slot: int) -> None:
        """Give back a slot that was reserved and is not visible."""
        self.catalog.set_state(slot, SlotState.FREE)
        self.allocator.release(slot)

    # --- contents ----------------------------------------------------------------------------------------

    def commit(self, chunk: Chunk, shard: int, slot: int, entry: int, table_hash: int) -> None:
        """Make a written shard visible. The caller has removed it from `chunk.pending`."""
        space, kind = chunk.space, chunk.space.kinds[shard]
        generation = self.catalog.generation(slot) & ~1
        self.catalog.set_state(slot, SlotState.COMMITTED)
        if not chunk.copies:
            self._policy(kind.slot_bytes).added([chunk.key], [0])
        self._admit(chunk, shard, Copy(slot, generation, entry, kind.slot_bytes, table_hash))
        self.catalog.publish(
            entry,
            EntryValue(
                key=chunk.key,
                shard=shard,
                namespace_number=space.number,
                tier=_DRAM,
                slot=slot,
                length=kind.payload_bytes,
                generation=generation,
                parent_fingerprint=chunk.parent_fingerprint or 0,
                fingerprint=chunk.fingerprint or 0,
                token_count=chunk.token_count,
                table_hash=table_hash,
            ),
        )
        self.counts["commits"] += 1
        self._tell(chunk, shard)

    def adopt(self, chunk: Chunk, shard: int, copy: Copy) -> None:
        """Take up a shard that an earlier worker made visible. The chunk is in the forest; `settle` comes last."""
        self._admit(chunk, shard, copy)

    def settle(self) -> None:
        """After the last `adopt`: the order of eviction, by time of commit, and what the index may know."""
        ages: dict[Chunk, int] = {}
        heads = [chunk for chunk in self.forest.chunks.values() if chunk.parent is None]
        for head in heads:
            for chunk in self.forest.subtree(head):
                # A chunk is as young as the youngest below it, as if the whole prefix had been used then.
                own = max(age_of(copy.generation) for copy in chunk.copies.values())
                ages[chunk] = max([own, *(ages[child] for child in chunk.children())])
        # Children stand before their parents in `ages`, and the sort keeps that for equal ages.
        by_class: dict[int, list[bytes]] = {}
        for chunk in sorted(ages, key=ages.__getitem__):
            by_class.setdefault(chunk.class_bytes, []).append(chunk.key)
        for size, keys in by_class.items():
            self._policy(size).added(keys[::-1], [0] * len(keys))
        for head in heads:
            self._tell(head, next(iter(head.copies)))

    def _admit(self, chunk: Chunk, shard: int, copy: Copy) -> None:
        if not chunk.copies:
            self.committed_chunks += 1
            chunk.class_bytes = copy.size_bytes
        chunk.copies[shard] = copy
        self._owners[copy.slot] = chunk
        if chunk.covered_here:
            self.forest.uncovered.pop(chunk.key, None)
        else:
            self.forest.uncovered.setdefault(chunk.key)

    def trim(self) -> None:
        """Evict down to `room_chunks`, where that cap is set."""
        while self._room_chunks and self.committed_chunks > self._room_chunks:
            excess = self.committed_chunks - self._room_chunks
            if not any(self._evict(size, excess) for size in list(self._policies)):
                return

    def touch(self, keys: Sequence[bytes]) -> None:
        """These keys were used as one prefix, head first."""
        for policy in self._policies.values():
            policy.touched(keys)

    def order(self, keys: Sequence[bytes]) -> None:
        """These keys form one prefix, head first, part of which was just stored. Not a use of the rest."""
        for policy in self._policies.values():
            policy.ordered(keys)

    def remove(self, chunk: Chunk, reason: str) -> None:
        """Take a chunk out of sight at once, with all its committed shards. Its slots are free afterwards."""
        for shard, copy in chunk.copies.items():
            self.catalog.withdraw(copy.entry, copy.slot)
            self.catalog.set_state(copy.slot, SlotState.FREE)
            self.allocator.release(copy.slot)
            del self._owners[copy.slot]
            if chunk.published:
                self._publish(EventKind.WITHDRAW, chunk, shard)
        if chunk.copies:
            self.committed_chunks -= 1
            self._policy(chunk.class_bytes).removed([chunk.key])
            self.counts[f"removed_{reason}"] += 1
            chunk.space.evicted_chunks += reason == "evicted"
        chunk.copies.clear()
        chunk.published = False
        self.forest.remove(chunk)

    # --- eviction ----------------------------------------------------------------------------------------

    def _evict(self, size: int, count: int) -> bool:
        """Evict up to `count` chunks that free slots of class `size`. False if nothing could go."""
        victims = self._useless(size, count)
        if len(victims) < count:
            self._choose(size, count, victims)
        for chunk in victims:
            self.remove(chunk, "evicted")
        return bool(victims)

    def _useless(self, size: int, count: int) -> dict[Chunk, None]:
        """Orphans with all that hangs below them, and chunks that stayed uncovered, children before parents."""
        chosen: dict[Chunk, None] = {}
        if not self.forest.orphans and not self.forest.uncovered:
            return chosen
        late = self._clock() - UNCOVERED_GRACE_S
        stale = (
            chunk
            for key in islice(self.forest.uncovered, _SCAN_LIMIT)
            if (chunk := self.forest.chunks[key]).first_seen_s <= late
        )
        for head in [*islice(self.forest.orphan_heads(), count), *stale]:
            for chunk in self.forest.subtree(head):
                if chunk.class_bytes == size and self._may_go(chunk, chosen):
                    chosen[chunk] = None
                if len(chosen) >= count:
                    return chosen
        return chosen

    def _choose(self, size: int, count: int, chosen: dict[Chunk, None]) -> None:
        chunks = self.forest.chunks
        for key in islice(self._policy(size).victims(), _SCAN_LIMIT):
            chunk = chunks[key]
            if chunk not in chosen and self._may_go(chunk, chosen):
                chosen[chunk] = None
                if len(chosen) >= count:
                    return

    @staticmethod
    def _may_go(chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
        """Nobody holds or writes it, and all its children go as well."""
        return not chunk.holds and not chunk.pending and all(child in chosen for child in chunk.children())

    def _clear_extent(self, size: int) -> bool:
        """Empty one extent of another class, so that class `size` can have it: the one with the oldest victims."""
        tried = set()
        for other, policy in self._policies.items():
            if other == size:
                continue
            for key in islice(policy.victims(), _SCAN_LIMIT):
                copy = next(iter(self.forest.chunks[key].copies.values()))
                extent = self.allocator.extent_of(copy.slot)
                if extent.start in tried:
                    continue
                tried.add(extent.start)
                if self._remove_all(extent.used):
                    return True
                if len(tried) >= _EXTENT_TRIES:
                    return False
        return False

    def _remove_all(self, offsets: set[int]) -> bool:
        """Evict every chunk that has a slot at these offsets, with what hangs below; False if one may not go."""
        chosen: dict[Chunk, None] = {}
        for offset in offsets:
            owner = self._owners.get(offset // 4096)
            if owner is None:
                return False
            for chunk in self.forest.subtree(owner):
                if chunk.holds or chunk.pending:
                    return False
                chosen[chunk] = None
        depth_first = sorted(chosen, key=_depth, reverse=True)
        for chunk in depth_first:
            self.remove(chunk, "evicted")
        return True

    def _policy(self, size: int) -> EvictionPolicy:
        policy = self._policies.get(size)
        if policy is None:
            policy = self._policies[size] = make_policy(self.eviction)
        return policy

    # --- telling the index -------------------------------------------------------------------------------

    def _tell(self, chunk: Chunk, shard: int) -> None:
        """Publish when covered and the parent was published; then what waited for this chunk."""
        if chunk.published:
            self._publish(EventKind.PUBLISH, chunk, shard)
            return
        stack = [chunk]
        while stack:
            current = stack.pop()
            known_parent = current.is_root or (current.parent is not None and current.parent.published)
            if current.published or not known_parent or not current.covered_here:
                continue
            current.published = True
            for each in current.copies:
                self._publish(EventKind.PUBLISH, current, each)
            stack.extend(current.children())

    def check(self) -> None:
        """All records agree. Called by tests after every step."""
        self.allocator.check()
        self.forest.check()
        self.catalog.check()
        owned = {copy.slot: chunk for chunk in self.forest.chunks.values() for copy in chunk.copies.values()}
        assert owned == self._owners, "slot owners"
        committed = [chunk for chunk in self.forest.chunks.values() if chunk.copies]
        assert self.committed_chunks == len(committed) == sum(len(p) for p in self._policies.values())
        for chunk in committed:
            for copy in chunk.copies.values():
                assert self.catalog.generation(copy.slot) == copy.generation and copy.generation % 2 == 0
            assert not chunk.published or chunk.is_root or chunk.parent is None or chunk.parent.published


def _check_room(space: KnownNamespace) -> None:
    if len(space.geometries) >= GEOMETRIES_A_NAMESPACE_LIMIT:
        raise LimitExceeded(
            f"{space.namespace.title} has {GEOMETRIES_A_NAMESPACE_LIMIT} geometries on this node already; "
            "use one of them, or restart the node to forget unused ones"
        )


def _depth(chunk: Chunk) -> int:
    depth = 0
    while chunk.parent is not None:
        chunk, depth = chunk.parent, depth + 1
    return depth
