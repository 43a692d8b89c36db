"""One tier of a node: its slots, which chunks have copies in them, and what goes when room is needed. Pure.

Written once for DRAM and SSD. A tier joins the allocator (which slots are used), the eviction policies (in which order
chunks go, one policy a slot class and quota group) and the owners of the slots. It never touches the catalog or the
index: the pool does, when the tier asks it to let a chunk go (`LetGo`).

Order of eviction: orphans, then chunks that stayed uncovered for 60 s, then the policy's order. What goes is always a
leaf of this tier; a chunk that would lose its only copy of a shard must be a leaf of the whole node, and nobody may
hold it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.model.values import Tier as TierName
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.chunks import Chunk, Copy, Forest
from kvstore.node.eviction import EvictionPolicy, make_policy
from kvstore.node.slots import SlotAllocator
from kvstore.tally import AGE_EDGES_S, Tally

UNCOVERED_GRACE_S = 60.0
_SCAN_LIMIT = 20_000
"""Victims looked at for one request, so that the node's loop is never held for long."""
_EXTENT_TRIES = 8

LetGo = Callable[[Chunk], None]
"""Takes a chunk's copies out of this tier, as the pool does it; ends in `Tier.leave`."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes that a quota group keeps at least, and takes at most (0: no such bound), of one tier."""

    min_bytes: int = 0
    max_bytes: int = 0


class Tier:
    """The committed contents of one tier. `room_chunks` caps their number, 0: no cap."""

    def __init__(
        self,
        name: TierName,
        allocator: SlotAllocator,
        forest: Forest,
        let_go: LetGo,
        *,
        clock: Callable[[], float],
        eviction: str = "lru",
        room_chunks: int = 0,
    ) -> None:
        self.name = name
        self.allocator = allocator
        self.eviction = eviction
        self.chunk_count = 0
        self.group_bytes: Counter[int] = Counter()
        """Bytes of committed slots, by quota group."""
        self.reserved_bytes: Counter[int] = Counter()
        """Bytes of slots that writers of a quota group fill just now."""
        self.coming_bytes: Counter[int] = Counter()
        """Bytes of slots that the node itself fills just now, by quota group."""
        self.bounds: dict[int, Bounds] = {}
        self.kept: set[Chunk] = set()
        """Chunks that may not leave this tier just now (the parents of what is being written to it)."""
        self.evicted_count = 0
        self.ages = Tally(AGE_EDGES_S)
        """Seconds since the last use of each chunk that was evicted, until somebody collects them."""
        self._is_dram = name is TierName.DRAM
        self._forest = forest
        self._let_go = let_go
        self._clock = clock
        self._room_chunks = room_chunks
        make_policy(eviction)  # an unknown name is refused at the start, not at the first commit
        self._policies: dict[tuple[int, int], EvictionPolicy] = {}
        self._owners: dict[int, Chunk] = {}

    @property
    def slot_count(self) -> int:
        """Slots of committed shards."""
        return len(self._owners)

    def copies(self, chunk: Chunk) -> dict[int, Copy]:
        """The chunk's shards on this tier."""
        return chunk.copies if self._is_dram else chunk.ssd

    # --- contents ----------------------------------------------------------------------------------------

    def admit(self, chunk: Chunk, shard: int, copy: Copy, *, ordered: bool = True) -> None:
        """A shard is committed here. `ordered` False: `arrange` tells the policies of the chunk later."""
        here = self.copies(chunk)
        if not here:
            self.chunk_count += 1
            if ordered:
                self._policy(copy.size_bytes, chunk.space.group).added([chunk.key], [chunk.first_token])
        here[shard] = copy
        self._owners[copy.slot] = chunk
        self.group_bytes[chunk.space.group] += copy.size_bytes

    def arrange(self, chunks: Iterable[Chunk]) -> None:
        """After admissions without order: these chunks, first to go first, children before parents."""
        by_policy: dict[tuple[int, int], list[Chunk]] = {}
        for chunk in chunks:
            by_policy.setdefault(self._place(chunk), []).append(chunk)
        for (size, group), several in by_policy.items():
            several.reverse()
            tokens = [chunk.first_token for chunk in several]
            self._policy(size, group).added([chunk.key for chunk in several], tokens)

    def leave(self, chunk: Chunk, *, free: bool = True) -> None:
        """Forget the chunk's copies. `free` False: their slots stay in use until `allocator.release`."""
        here = self.copies(chunk)
        if not here:
            return
        self._policies[self._place(chunk)].removed([chunk.key])
        for copy in here.values():
            del self._owners[copy.slot]
            self.group_bytes[chunk.space.group] -= copy.size_bytes
            if free:
                self.allocator.release(copy.slot)
        self.chunk_count -= 1
        here.clear()

    def touch(self, keys: Sequence[bytes], group: int) -> None:
        """These keys were used as one prefix, head first."""
        for place, policy in self._policies.items():
            if place[1] == group:
                policy.touched(keys)

    def order(self, keys: Sequence[bytes], group: int) -> None:
        """These keys form one prefix, head first, part of which was just stored. Not a use of the rest."""
        for place, policy in self._policies.items():
            if place[1] == group:
                policy.ordered(keys)

    # --- room --------------------------------------------------------------------------------------------

    def take(self, size: int, count: int, group: int = 0, floor_bytes: int = 0) -> list[int]:
        """Up to `count` slots of class `size`, evicting what must go. Fewer if nothing more may go.

        `floor_bytes` of the tier are left to others. A group never gets more than its bound.
        """
        count = self._within_bound(size, count, group)
        slots = self._allocate(size, count, floor_bytes)
        while len(slots) < count:
            too_much = self.allocator.used_bytes + floor_bytes - self.allocator.arena_bytes
            wanted = count - len(slots) + max(0, too_much // size)
            if not self._evict(size, wanted, group) and not self._clear_extent(size):
                break
            slots += self._allocate(size, count - len(slots), floor_bytes)
        return slots

    def _allocate(self, size: int, count: int, floor_bytes: int) -> list[int]:
        if floor_bytes:
            room = self.allocator.arena_bytes - floor_bytes - self.allocator.used_bytes
            count = min(count, max(0, room // size))
        return self.allocator.allocate(size, count)

    def _within_bound(self, size: int, count: int, group: int) -> int:
        """How many more slots the group may have, after it made room among its own."""
        limit = self.bounds[group].max_bytes if group in self.bounds else 0
        if not limit:
            return count
        over = self._taken_bytes(group) + count * size - limit
        if over > 0:
            self._evict_own(group, over)
        return max(0, min(count, (limit - self._taken_bytes(group)) // size))

    def _taken_bytes(self, group: int) -> int:
        return self.group_bytes[group] + self.reserved_bytes[group] + self.coming_bytes[group]

    def is_at_bound(self, group: int, size: int, taken: int = 0) -> bool:
        """True if one more slot of class `size`, after `taken` new ones, would take the group over its bound."""
        limit = self.bounds[group].max_bytes if group in self.bounds else 0
        return bool(limit) and self._taken_bytes(group) + (taken + 1) * size > limit

    def trim(self) -> None:
        """Evict down to `room_chunks` and to the bounds of the groups."""
        while self._room_chunks and self.chunk_count > self._room_chunks:
            excess = self.chunk_count - self._room_chunks
            if not any(self._evict(size, excess, group) for size, group in list(self._policies)):
                break
        for group, bounds in self.bounds.items():
            if bounds.max_bytes and self.group_bytes[group] > bounds.max_bytes:
                self._evict_own(group, self.group_bytes[group] - bounds.max_bytes)

    # --- eviction ----------------------------------------------------------------------------------------

    def _evict(self, size: int, count: int, group: int) -> bool:
        """Evict up to `count` chunks that free slots of class `size`. False if nothing could go."""
        victims = self._useless(size, count)
        for other in self._groups(size, group):
            if len(victims) >= count:
                break
            self._choose(size, other, self._spare_bytes(other, own=other == group), victims, count)
        self._drop(victims)
        return bool(victims)

    def _evict_own(self, group: int, excess_bytes: int) -> None:
        victims: dict[Chunk, None] = {}
        for size, each in list(self._policies):
            if each == group and excess_bytes > 0:
                before = len(victims)
                wanted = -(-excess_bytes // size)
                self._choose(size, group, self.group_bytes[group], victims, before + wanted)
                excess_bytes -= (len(victims) - before) * size
        self._drop(victims)

    def _groups(self, size: int, group: int) -> list[int]:
        """Quota groups with chunks of this class: those furthest above what they keep first, the asking one last."""
        if not self.bounds:
            return [0]
        found = [each for cut, each in self._policies if cut == size]
        return sorted(found, key=lambda each: (each == group, self._kept_bytes(each) - self.group_bytes[each]))

    def _kept_bytes(self, group: int) -> int:
        return self.bounds[group].min_bytes if group in self.bounds else 0

    def _spare_bytes(self, group: int, *, own: bool) -> int:
        """How much of a group may go for another one: it keeps its minimum. For itself all of it."""
        return self.group_bytes[group] - (0 if own else self._kept_bytes(group))

    def _drop(self, victims: dict[Chunk, None]) -> None:
        now_s = self._clock()
        for chunk in victims:
            if self.copies(chunk):  # it may have gone with an earlier one
                self.evicted_count += 1
                self.ages.add(now_s - chunk.used_s)
                self._let_go(chunk)

    def _useless(self, size: int, count: int) -> dict[Chunk, None]:
        """Orphans with all that hangs below them, and chunks that stayed uncovered, children before parents."""
        chosen: dict[Chunk, None] = {}
        forest = self._forest
        if not forest.orphans and not forest.uncovered:
            return chosen
        late = self._clock() - UNCOVERED_GRACE_S
        stale = (
            chunk for key in islice(forest.uncovered, _SCAN_LIMIT) if (chunk := forest.chunks[key]).first_seen_s <= late
        )
        # What waits for a parent that another writer stores is given as long as what waits for a shard.
        heads = (
            head
            for head in islice(forest.orphan_heads(), _SCAN_LIMIT)
            if not head.parent_promised or head.first_seen_s <= late
        )
        for head in [*islice(heads, count), *stale]:
            for chunk in forest.subtree(head):
                if self._has_class(chunk, size) and self._may_go(chunk, chosen):
                    chosen[chunk] = None
                if len(chosen) >= count:
                    return chosen
        return chosen

    def _choose(self, size: int, group: int, spare_bytes: int, chosen: dict[Chunk, None], count: int) -> None:
        """Add chunks of one policy to `chosen`, until there are `count` or the next one has more than is to spare."""
        policy = self._policies.get((size, group))
        if policy is None or spare_bytes <= 0:
            return
        chunks = self._forest.chunks
        for key in islice(policy.victims(), _SCAN_LIMIT):
            chunk = chunks[key]
            if chunk not in chosen and self._may_go(chunk, chosen):
                spare_bytes -= self._bytes_of(chunk)  # of all its shards
                if spare_bytes < 0:
                    return
                chosen[chunk] = None
                if len(chosen) >= count:
                    return

    def _may_go(self, chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
        """Nobody holds it here, and all children that need it here go as well."""
        is_dram = self._is_dram
        # On the SSD it is enough that one shard is nowhere else: the ranks of a reader come one by one.
        is_last = not chunk.ssd if is_dram else any(shard not in chunk.copies for shard in chunk.ssd)
        if (chunk.holds and (is_dram or is_last)) or (chunk.pending and is_dram) or chunk in self.kept:
            return False
        for child in chunk.children():
            if child not in chosen and (is_last or (child.copies or child.pending if is_dram else child.ssd)):
                return False
        return True

    def _clear_extent(self, size: int) -> bool:
        """Empty one extent of another class, so that class `size` can have it: the one with the oldest victims."""
        tried = set()
        for (other, _), policy in self._policies.items():
            if other == size:
                continue
            for key in islice(policy.victims(), _SCAN_LIMIT):
                copy = next(iter(self.copies(self._forest.chunks[key]).values()))
                extent = self.allocator.extent_of(copy.slot)
                if extent.start in tried:
                    continue
                tried.add(extent.start)
                chosen = self._all_of(extent.used)
                if chosen:
                    self._drop(chosen)
                    return True
                if len(tried) >= _EXTENT_TRIES:
                    return False
        return False

    def _all_of(self, offsets: set[int]) -> dict[Chunk, None]:
        """Every chunk that has a slot at these offsets, with what must go before it; empty if one may not go, or a
        group would be left with less than its minimum."""
        owners = []
        for offset in offsets:
            owner = self._owners.get(offset // UNIT_BYTES)
            if owner is None:
                return {}
            owners.append(owner)
        below: dict[Chunk, None] = {}  # children before parents, each looked at once
        for owner in owners:
            if owner not in below:
                below |= dict.fromkeys(self._forest.subtree(owner, below))
        chosen: dict[Chunk, None] = {}
        for chunk in below:
            if not chunk.pending and not self.copies(chunk):
                continue  # it has no part in this tier
            if not self._may_go(chunk, chosen):
                return {}
            chosen[chunk] = None
        left = self.group_bytes.copy()
        for chunk in chosen:
            left[chunk.space.group] -= self._bytes_of(chunk)
        return {} if any(left[each.space.group] < self._kept_bytes(each.space.group) for each in chosen) else chosen

    def _bytes_of(self, chunk: Chunk) -> int:
        return sum(copy.size_bytes for copy in self.copies(chunk).values())

    def _has_class(self, chunk: Chunk, size: int) -> bool:
        return any(copy.size_bytes == size for copy in self.copies(chunk).values())

    def _place(self, chunk: Chunk) -> tuple[int, int]:
        first = next(iter(self.copies(chunk).values()))
        return first.size_bytes, chunk.space.group

    def _policy(self, size: int, group: int) -> EvictionPolicy:
        policy = self._policies.get((size, group))
        if policy is None:
            policy = self._policies[size, group] = make_policy(self.eviction)
        return policy

    def check(self) -> None:
        """Owners, policies, counts and generations agree with the forest. Called by tests after every step."""
        self.allocator.check()
        chunks = [chunk for chunk in self._forest.chunks.values() if self.copies(chunk)]
        owned = {copy.slot: chunk for chunk in chunks for copy in self.copies(chunk).values()}
        assert owned == self._owners, "slot owners"
        assert self.chunk_count == len(chunks) == sum(len(policy) for policy in self._policies.values())
        used: Counter[int] = Counter()
        for chunk in chunks:
            used[chunk.space.group] += self._bytes_of(chunk)
        assert used == +self.group_bytes, "bytes of the quota groups"
        assert owned.keys() <= self.allocator.used_slots(), "a committed slot that is free"
