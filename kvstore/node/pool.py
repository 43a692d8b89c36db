"""What a node holds: chunks, their copies on its tiers, and what readers and the index see of them. Pure, synchronous.

The pool joins the forest (which chunk has which shards), the tiers (`tier.py`: slots and eviction order), the catalog
(what readers see: one entry a shard, for its fastest copy) and the news for the index, and keeps them equal.
What waits for the SSD is in `backlog.py`. Reservations and sessions are not its business (`reservations.py`), nor are
disk and threads (`tiers/`).

With an SSD tier each tier is leaf-first by itself: the SSD holds a chunk only together with its parent, so that what
a restart of the host finds there is of use. A chunk leaves the node with its last copy; before that it is only moved.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.errors import LimitExceeded
from kvstore.metadata import GEOMETRIES_A_NAMESPACE_LIMIT, EventKind
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from kvstore.model.values import Tier as TierName
from kvstore.node.admission import Admission
from kvstore.node.backlog import Backlog
from kvstore.node.catalog import CatalogWriter, EntryValue, age_of
from kvstore.node.chunks import Chunk, Copy, Forest, KnownNamespace
from kvstore.node.slots import SlotAllocator
from kvstore.node.tier import Tier
from kvstore.tally import Tally

TOKENS_LIMIT = (1 << 16) - 1
"""Most tokens of a chunk: an entry of the catalog has two bytes for them."""
READ_BACK_SHARE = 1 / 16
"""Part of the DRAM that writers leave free for chunks that come back from the SSD."""
_READ_BACK_SLOTS = 4
TIMED_PATHS = ("ssd_read", "ssd_write", "grpc_put", "grpc_get")
"""Ways of bytes that the node's own loop sees end: a shard, a batch of shards, a chunk, a chunk."""

Publish = Callable[[EventKind, Chunk, int, TierName], None]


class SlotState(enum.IntEnum):
    """State of a slot in the shared slot records."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    QUARANTINED = 3


class Pool:
    """The committed contents of one node. `publish` is told of shards that the index may know."""

    def __init__(
        self,
        catalog: CatalogWriter,
        allocator: SlotAllocator,
        *,
        clock: Callable[[], float],
        publish: Publish,
        eviction: str = "lru",
        room_chunks: int = 0,
        ssd_allocator: SlotAllocator | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.catalog = catalog
        self.forest = forest = Forest()
        self.spaces: dict[bytes, KnownNamespace] = {}
        self.counts: Counter[str] = Counter()
        self.seconds = {path: Tally() for path in TIMED_PATHS}
        """How long transfers took, by path, until somebody collects it."""
        self.used_spaces: set[KnownNamespace] = set()
        """Namespaces that were read from, until somebody collects them."""
        self.room_chunks = room_chunks
        self.dram = Tier(
            TierName.DRAM,
            allocator,
            forest,
            self._evict_from_dram,
            clock=clock,
            eviction=eviction,
            room_chunks=room_chunks,
        )
        self.ssd: Tier | None = None
        if ssd_allocator is not None:
            self.ssd = Tier(TierName.SSD, ssd_allocator, forest, self.evict_from_ssd, clock=clock, eviction=eviction)
        self.removed_slots: list[int] = []
        """SSD slots whose chunks somebody removed: in use until their headers are gone from the disk."""
        self.stale_slots: list[int] = []
        """SSD slots that were given up, whose headers may still be on the disk. Free, or in use again already."""
        self._chunk_count = 0
        self._ahead: set[Chunk] = set()
        """In DRAM since they came from the SSD, and not asked for since then."""
        self._admission = admission or Admission()
        self.backlog = Backlog(clock, self._admission)
        """What is not on the SSD; empty without one."""
        self._clock = clock
        self._publish = publish

    @property
    def allocator(self) -> SlotAllocator:
        """The slots of the DRAM."""
        return self.dram.allocator

    @property
    def chunk_count(self) -> int:
        """Chunks with at least one committed shard."""
        return self._chunk_count

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

    # --- slots of the DRAM --------------------------------------------------------------------------------

    def take_slots(self, size: int, count: int, space: KnownNamespace) -> list[int]:
        """Up to `count` slots of class `size` for a writer, evicting what must go. Fewer if nothing more may go."""
        return self.dram.take(size, count, space.group, self.read_back_bytes(size))

    def claim(self, key: bytes, shard: int) -> int | None:
        """An entry of the catalog, also where a chunk that may go has to make room for it. None if none may."""
        entry = self.catalog.claim(key, shard)
        if entry is not None:
            return entry
        others = [found for each in self.catalog.neighbours(key, shard) if (found := self.forest.get(each))]
        for chunk in sorted(others, key=lambda chunk: chunk.used_s):
            if chunk.first_child is None and not chunk.holds and not chunk.pending:
                self.counts["evicted_for_an_entry"] += 1
                self._evicted(chunk)
                return self.catalog.claim(key, shard)
        return None

    def read_back_bytes(self, size: int) -> int:
        """Bytes of the DRAM that writers of class `size` leave free for what comes back from the SSD."""
        if self.ssd is None:
            return 0
        total = self.allocator.arena_bytes
        return max(int(total * READ_BACK_SHARE), min(_READ_BACK_SLOTS * size, total // 4))

    def free_slot(self, slot: int) -> None:
        """Give back a slot that was reserved and is not visible."""
        self.catalog.set_state(slot, SlotState.FREE)
        self.allocator.release(slot)

    # --- contents ----------------------------------------------------------------------------------------

    def commit(self, chunk: Chunk, shard: int, slot: int, entry: int, table_hash: int) -> None:
        """Make a written shard visible. The caller has removed it from `chunk.pending`."""
        generation = self.catalog.generation(slot) & ~1
        self.catalog.set_state(slot, SlotState.COMMITTED)
        copy = Copy(slot, generation, entry, chunk.space.kinds[shard].slot_bytes, table_hash)
        if not chunk.copies:
            chunk.used_s = self._clock()
            chunk.uses += 1
            if self.ssd is not None:
                self._admission.came(chunk)
        self._admit(self.dram, chunk, shard, copy)
        self.catalog.publish(entry, _entry_value(chunk, shard, copy, TierName.DRAM))
        self.counts["commits"] += 1
        if self.ssd is not None and shard not in chunk.ssd:
            self.backlog.add(chunk, copy.size_bytes)
        self._tell(chunk, shard)

    def promote(self, chunk: Chunk, shard: int, slot: int, table_hash: int, *, ahead: bool = False) -> None:
        """A shard on the SSD is in DRAM too, in a slot that the node reserved and filled; readers get it from there.

        `ahead`: nobody has asked for it yet.
        """
        if ahead:
            self._ahead.add(chunk)
        entry = chunk.ssd[shard].entry
        generation = self.catalog.generation(slot) & ~1
        self.catalog.set_state(slot, SlotState.COMMITTED)
        copy = Copy(slot, generation, entry, chunk.space.kinds[shard].slot_bytes, table_hash)
        self._admit(self.dram, chunk, shard, copy)
        self.catalog.publish(entry, _entry_value(chunk, shard, copy, TierName.DRAM))
        self.counts["promotions"] += 1
        if chunk.published:
            self._publish(EventKind.PUBLISH, chunk, shard, TierName.DRAM)

    def walk(self, space: KnownNamespace, keys: Keys) -> Iterator[tuple[Chunk | None, MissReason | None]]:
        """The chunk of each key; None and why where it is not the one that is meant."""
        parent = keys.parent
        prints = None if keys.fingerprints is None else keys.fingerprints.tolist()
        chunks = self.forest.chunks
        for index, key in enumerate(keys):
            chunk = chunks.get(key)
            if chunk is None:
                yield None, MissReason.ABSENT
            elif chunk.differs(space, parent, prints and prints[index + 1], prints and prints[index]):
                self.counts["collisions"] += 1
                yield None, MissReason.COLLISION
            else:
                yield chunk, None
            parent = key

    def came_ahead(self, keys: Keys, staged: range) -> int:
        """Tokens of these chunks, not counting the places `staged`, that came from the SSD before somebody asked for
        them, as somebody does now."""
        tokens = 0
        for index, key in enumerate(keys if self._ahead else ()):
            chunk = self.forest.chunks.get(key)
            if chunk in self._ahead:
                self._ahead.discard(chunk)
                tokens += chunk.token_count if index not in staged else 0
        return tokens

    def save(self, chunk: Chunk, shard: int, slot: int, generation: int, table_hash: int) -> None:
        """A shard in DRAM is on the SSD too, with its header."""
        assert self.ssd is not None
        size = chunk.space.kinds[shard].slot_bytes
        self._admit(self.ssd, chunk, shard, Copy(slot, generation, chunk.copies[shard].entry, size, table_hash))
        self.counts["saves"] += 1
        self.backlog.saved(chunk, size)

    def close_ssd(self) -> None:
        """The SSD tier is out of service, and all its copies were dropped."""
        assert self.ssd is not None and not self.ssd.chunk_count
        self.ssd = None
        self.backlog.clear()
        self.removed_slots.clear()
        self.stale_slots.clear()

    def adopt(self, tier: Tier, chunk: Chunk, shard: int, copy: Copy) -> None:
        """Take up a shard from before a restart. The chunk is in the forest; `settle` comes last."""
        self._admit(tier, chunk, shard, copy, ordered=False)

    def show_on_ssd(self, chunk: Chunk, shard: int) -> None:
        """Readers are told that this shard is on the SSD (and not in DRAM)."""
        copy = chunk.ssd[shard]
        self.catalog.publish(copy.entry, _entry_value(chunk, shard, copy, TierName.SSD))

    def settle(self) -> None:
        """After the last `adopt`: the orders of eviction, by time of commit, and what the index may know."""
        ages: dict[Chunk, int] = {}
        heads = [chunk for chunk in self.forest.chunks.values() if chunk.parent is None]
        for head in heads:
            for chunk in self.forest.subtree(head):
                # A chunk is as young as the youngest below it, as if the whole prefix had been used then.
                own = max(age_of(copy.generation) for copy in chunk.shards.values())
                ages[chunk] = max([own, *(ages[child] for child in chunk.children())])
        # Children stand before their parents in `ages`, and the sort keeps that for equal ages.
        by_age = sorted(ages, key=ages.__getitem__)
        for tier in self.tiers:
            tier.arrange(chunk for chunk in by_age if tier.copies(chunk))
        if self.ssd is not None:
            for chunk in by_age:
                for shard, copy in chunk.copies.items():
                    if shard not in chunk.ssd:
                        self.backlog.add(chunk, copy.size_bytes)
        for head in heads:
            self._tell(head, next(iter(head.shards)))

    @property
    def tiers(self) -> list[Tier]:
        """Fastest first."""
        return [self.dram] if self.ssd is None else [self.dram, self.ssd]

    def _admit(self, tier: Tier, chunk: Chunk, shard: int, copy: Copy, *, ordered: bool = True) -> None:
        self._chunk_count += not chunk.is_committed
        tier.admit(chunk, shard, copy, ordered=ordered)
        if chunk.covered_here:
            self.forest.uncovered.pop(chunk.key, None)
        else:
            self.forest.uncovered.setdefault(chunk.key)

    def trim(self) -> None:
        """Evict down to `room_chunks` and to the bounds of the quota groups, where there are such."""
        for tier in self.tiers:
            tier.trim()

    def touch(self, keys: Sequence[bytes]) -> int:
        """These keys were used as one prefix, head first. Returns the tokens of those that are here."""
        now_s, chunk, tokens = self._clock(), None, 0
        for key in keys:
            found = self.forest.chunks.get(key)
            if found is not None:
                chunk = found
                tokens += chunk.token_count
                chunk.used_s = now_s
                chunk.uses += 1
                if self.ssd is not None:
                    self.backlog.used(chunk, now_s)
        if chunk is not None:
            for tier in self.tiers:
                tier.touch(keys, chunk.space.group)
        return tokens

    def order(self, keys: Sequence[bytes], space: KnownNamespace) -> None:
        """These keys form one prefix, head first, part of which was just stored. Not a use of the rest."""
        for tier in self.tiers:
            tier.order(keys, space.group)

    def order_on_ssd(self, last: Chunk) -> None:
        """Chunks up to this one came onto the SSD one by one: order them, with what is above them, as one prefix."""
        if self.ssd is not None:
            self.ssd.order(last.line(), last.space.group)

    # --- leaving -----------------------------------------------------------------------------------------

    def remove(self, chunk: Chunk, reason: str = "removed") -> None:
        """Take a chunk out of sight at once, because somebody asked. Its DRAM slots are free afterwards; those on the
        SSD when their headers are gone from the disk (`removed_slots`)."""
        committed = chunk.is_committed
        self.removed_slots += [copy.slot for copy in chunk.ssd.values()]
        self._vanish(chunk, free_on_ssd=False)
        self.counts[f"removed_{reason}"] += committed

    def _evict_from_dram(self, chunk: Chunk) -> None:
        if not chunk.ssd:
            if self.ssd is not None:
                self.counts["evicted_unsaved"] += chunk in self.backlog.waiting
                self._admission.left(chunk)
            self._evicted(chunk)
            return
        self._ahead.discard(chunk)
        for shard, copy in chunk.copies.items():
            if shard in chunk.ssd:
                self.catalog.raise_generation(copy.slot)
                self.show_on_ssd(chunk, shard)
                if chunk.published:
                    self._publish(EventKind.PUBLISH, chunk, shard, TierName.SSD)
            else:
                self._hide(chunk, shard, copy, TierName.DRAM)
            self.catalog.set_state(copy.slot, SlotState.FREE)
        self.backlog.leaves(chunk)
        self.dram.leave(chunk)
        self.counts["demotions"] += 1
        self._judge(chunk)

    def drop_from_ssd(self, chunk: Chunk) -> None:
        """The SSD copies are no good, children's before parents': forget them, and their headers (`removed_slots`)."""
        assert self.ssd is not None
        self.removed_slots += [copy.slot for copy in chunk.ssd.values()]
        self.evict_from_ssd(chunk, free=False)

    def evict_from_ssd(self, chunk: Chunk, *, free: bool = True) -> None:
        """Forget the SSD copies; what is not in DRAM leaves the node.

        What had to make room, and is still in DRAM, is saved again only when it is used again: else chunks that do not
        all fit would push each other out for ever.
        """
        assert self.ssd is not None
        if not chunk.copies and not chunk.pending:
            self._evicted(chunk, free_on_ssd=free)
            return
        if free:
            self.stale_slots += [copy.slot for copy in chunk.ssd.values()]
        for shard, copy in chunk.ssd.items():
            if shard in chunk.copies:
                self.backlog.add(chunk, copy.size_bytes, again=not free)
            else:
                self._hide(chunk, shard, copy, TierName.SSD)
        self.ssd.leave(chunk, free=free)
        self.counts["ssd_copies_dropped"] += 1
        self._judge(chunk)

    def _evicted(self, chunk: Chunk, *, free_on_ssd: bool = True) -> None:
        chunk.space.evicted_chunks += 1
        self.counts["removed_evicted"] += 1
        self._vanish(chunk, free_on_ssd=free_on_ssd)

    def _vanish(self, chunk: Chunk, *, free_on_ssd: bool = True) -> None:
        """Out of catalog, tiers, index and forest."""
        self._ahead.discard(chunk)
        self._chunk_count -= chunk.is_committed
        if chunk.ssd and free_on_ssd:
            self.stale_slots += [copy.slot for copy in chunk.ssd.values()]
        for shard, copy in chunk.ssd.items():
            if shard not in chunk.copies:
                self._hide(chunk, shard, copy, TierName.SSD)
        for shard, copy in chunk.copies.items():
            self._hide(chunk, shard, copy, TierName.DRAM)
            self.catalog.set_state(copy.slot, SlotState.FREE)
        self.backlog.leaves(chunk)
        self.dram.leave(chunk)
        if self.ssd is not None and chunk.ssd:
            self.ssd.leave(chunk, free=free_on_ssd)
        chunk.published = False
        if chunk.first_child is not None:
            self._untell_below(chunk)
        self.forest.remove(chunk)

    def _hide(self, chunk: Chunk, shard: int, copy: Copy, tier: TierName) -> None:
        """Readers and index forget a shard, whose fastest copy is this one."""
        if tier is TierName.DRAM:
            self.catalog.withdraw(copy.entry, copy.slot)
        else:
            self.catalog.clear(copy.entry, copy.generation | 1)
            self.catalog.unclaim(copy.entry)
        if chunk.published:
            self._publish(EventKind.WITHDRAW, chunk, shard, tier)

    def _judge(self, chunk: Chunk) -> None:
        """Some shards have left: what remains may not cover the chunk any more."""
        if not chunk.is_committed:  # it is still being written
            self._chunk_count -= 1
            self.forest.uncovered.pop(chunk.key, None)
        elif not chunk.covered_here:
            self.forest.uncovered.setdefault(chunk.key)

    # --- telling the index -------------------------------------------------------------------------------

    def _tell(self, chunk: Chunk, shard: int) -> None:
        """Publish when covered and the parent was published; then what waited for this chunk."""
        if chunk.published:
            self._publish(EventKind.PUBLISH, chunk, shard, _best(chunk, shard))
            return
        stack = [chunk]
        while stack:
            current = stack.pop()
            known_parent = current.is_root or (current.parent is not None and current.parent.published)
            if current.published or not known_parent or not current.covered_here:
                continue
            current.published = True
            for each in current.shards:
                self._publish(EventKind.PUBLISH, current, each, _best(current, each))
            stack.extend(current.children())

    def _untell_below(self, chunk: Chunk) -> None:
        """What hangs on it becomes an orphan (the SSD lost the chunk alone): not told until the chunk is back."""
        for each in self.forest.subtree(chunk):
            if each.published:
                each.published = False
                for shard in each.shards:
                    self._publish(EventKind.WITHDRAW, each, shard, _best(each, shard))

    def check(self) -> None:
        """All records agree. Called by tests after every step."""
        self.forest.check()
        self.catalog.check()
        for tier in self.tiers:
            tier.check()
        assert self._chunk_count == sum(chunk.is_committed for chunk in self.forest.chunks.values())
        if self.ssd is not None:
            self.backlog.check(self.forest.chunks.values())
        for chunk in self.forest.chunks.values():
            for copy in chunk.copies.values():
                assert self.catalog.generation(copy.slot) == copy.generation and copy.generation % 2 == 0
            assert not chunk.published or chunk.is_root or chunk.parent is None or chunk.parent.published
            assert not chunk.ssd or chunk.parent is None or chunk.parent.ssd, "on the SSD without its parent"


def _best(chunk: Chunk, shard: int) -> TierName:
    return TierName.DRAM if shard in chunk.copies else TierName.SSD


def _entry_value(chunk: Chunk, shard: int, copy: Copy, tier: TierName) -> EntryValue:
    space = chunk.space
    return EntryValue(
        key=chunk.key,
        shard=shard,
        namespace_number=space.number,
        tier=int(tier),
        slot=copy.slot,
        length=space.kinds[shard].payload_bytes,
        generation=copy.generation,
        parent_fingerprint=chunk.parent_fingerprint or 0,
        fingerprint=chunk.fingerprint or 0,
        token_count=chunk.token_count,
        table_hash=copy.table_hash,
    )


def _check_room(space: KnownNamespace) -> None:
    if len(space.geometries) >= GEOMETRIES_A_NAMESPACE_LIMIT:
        raise LimitExceeded(
            f"{space.namespace.title} has {GEOMETRIES_A_NAMESPACE_LIMIT} geometries on this node already; "
            "use one of them, or restart the node (with a new SSD file, if it has one) to forget unused ones"
        )
