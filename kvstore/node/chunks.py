"""The chunks of one node as a forest: who is whose parent, what is covered, what may go. Pure.

Laws kept here: a leaf has no child on this node; a chunk whose parent has left is an orphan; coverage is judged
by one geometry at a time; a chunk is told to the index only when it is covered and its parent was told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvstore.model.layout import Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import TOKEN_FINGERPRINT_MASK
from kvstore.node.slots import slot_bytes

_COVERS_KEPT = 1024
"""Rectangles that readers ask for; a handful a namespace in practice."""


@dataclass(frozen=True, slots=True)
class ShardKind:
    """What all shards with one id share: rectangle, slot class and payload in bytes."""

    rectangle: Rectangle
    slot_bytes: int
    payload_bytes: int


class KnownNamespace:
    """A namespace on this node: its catalog number, its geometries, which rectangles are written here.

    What is derived from the geometries is kept ready, because every chunk of every call asks for it.
    """

    def __init__(self, namespace: Namespace, number: int) -> None:
        self.namespace = namespace
        self.id = namespace.id
        self.number = number
        self.chunk_tokens = namespace.layout.chunk_tokens
        self.geometries: dict[int, Geometry] = {}
        self.kinds: dict[int, ShardKind] = {}
        """Shard id -> what it is."""
        self.sets_here: list[tuple[int, ...]] = []
        """For each geometry, the shards that make a chunk covered on this node."""
        self.group = 0
        """Its quota group: 0 shares the rest of the tiers with all others of 0."""
        self.evicted_chunks = self.dram_hit_tokens = self.ssd_hit_tokens = self.touched_tokens = 0
        self.written_here: dict[int, set[int]] = {}
        """Geometry digest -> numbers of its rectangles that writers store on this node."""
        self._covers: dict[Rectangle, list[tuple[int, ...]]] = {}

    @property
    def layout(self) -> PageLayout:
        """The layout of all its chunks."""
        return self.namespace.layout

    def add_geometry(self, geometry: Geometry, written_here: Iterable[int]) -> None:
        """Know one more way in which writers cut chunks. Idempotent. Raises LimitExceeded for too large shards."""
        digest, layout = geometry.digest, self.layout
        self.geometries[digest] = geometry
        for number, rectangle in enumerate(geometry.rectangles):
            kind = ShardKind(rectangle, slot_bytes(layout, rectangle), layout.payload_bytes(rectangle))
            self.kinds[digest << 8 | number] = kind
        self.written_here.setdefault(digest, set()).update(written_here)
        self.sets_here = [
            tuple(each << 8 | number for number in sorted(numbers))
            for each, numbers in self.written_here.items()
            if numbers
        ]
        self._covers.clear()

    def rectangle(self, shard: int) -> Rectangle | None:
        """The rectangle of a shard id, None if its geometry was never registered here."""
        kind = self.kinds.get(shard)
        return None if kind is None else kind.rectangle

    def covers(self, rectangle: Rectangle) -> list[tuple[int, ...]]:
        """Sets of shards, each of one geometry, that cover the rectangle."""
        known = self._covers.get(rectangle)
        if known is None:
            known = []
            for digest, geometry in self.geometries.items():
                parts = list(geometry.overlapping(rectangle))
                if sum(common.area for _, _, common in parts) == rectangle.area:
                    known.append(tuple(digest << 8 | number for number, _, _ in parts))
            if len(self._covers) >= _COVERS_KEPT:
                self._covers.clear()
            self._covers[rectangle] = known
        return known


@dataclass(slots=True)
class Copy:
    """One committed shard on one tier: its slot, generation, catalog entry and checksum-table hash.

    The copies of a shard on several tiers share one entry, which tells of the fastest.
    """

    slot: int
    generation: int
    entry: int
    size_bytes: int
    table_hash: int


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk with at least one committed or reserved shard.

    `copies` are its committed shards in DRAM, `ssd` those on the SSD. `pending` maps shard -> attempt. `first_child`,
    `next_sibling` and `previous_sibling` link the children of one parent (a set a chunk would cost more than the
    chunk). `holds` counts leases and pins. `fingerprint` and `parent_fingerprint` are None when the writer sent none;
    of the former only 48 bits outlive a restart. `depth` counts the chunks before it, `used_s` is the time of its last
    use, `uses` counts them. `parent_promised`: its writer leaves the chunk before it to another writer.
    """

    key: bytes
    parent_key: bytes
    space: KnownNamespace
    token_count: int
    fingerprint: int | None
    parent_fingerprint: int | None
    first_seen_s: float
    parent: Chunk | None = None
    copies: dict[int, Copy] = field(default_factory=dict)
    ssd: dict[int, Copy] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    first_child: Chunk | None = None
    next_sibling: Chunk | None = None
    previous_sibling: Chunk | None = None
    holds: int = 0
    published: bool = False
    depth: int = 0
    parent_promised: bool = False
    used_s: float = 0.0
    uses: int = 0

    @property
    def is_root(self) -> bool:
        """True for the first chunk of a prompt."""
        return self.parent_key == self.space.id

    @property
    def is_orphan(self) -> bool:
        """True if its parent is not on this node."""
        return self.parent is None and not self.is_root

    def differs(self, space: KnownNamespace, parent_key: bytes, own: int | None, parent: int | None) -> bool:
        """True if this chunk was made of other tokens or hangs on another parent than the caller's key says.

        `own` and `parent` are the caller's fingerprints of the key and of its parent, None where it knows none.
        """
        if self.space is not space or self.parent_key != parent_key:
            return True
        if own is None or self.fingerprint is None:
            return False
        return bool((own ^ self.fingerprint) & TOKEN_FINGERPRINT_MASK) or parent != self.parent_fingerprint

    def covering(self, rectangle: Rectangle) -> tuple[int, ...] | None:
        """Shards of one geometry, all in DRAM, that cover the rectangle; None if there are none."""
        copies = self.copies
        for shards in self.space.covers(rectangle):
            for shard in shards:
                if shard not in copies:
                    break
            else:
                return shards
        return None

    def covering_anywhere(self, rectangle: Rectangle) -> tuple[int, ...] | None:
        """Shards of one geometry that cover the rectangle, on whatever tier; None if there are none."""
        for shards in self.space.covers(rectangle):
            for shard in shards:
                if shard not in self.copies and shard not in self.ssd:
                    break
            else:
                return shards
        return None

    @property
    def shards(self) -> dict[int, Copy]:
        """All committed shards, each by its fastest copy."""
        return {**self.ssd, **self.copies} if self.ssd else self.copies

    @property
    def is_committed(self) -> bool:
        """True if some shard is committed on some tier."""
        return bool(self.copies or self.ssd)

    @property
    def is_saved(self) -> bool:
        """True if all its shards in DRAM are on the SSD too."""
        return all(shard in self.ssd for shard in self.copies)

    @property
    def first_token(self) -> int:
        """Tokens of its prompt before it."""
        return self.depth * self.space.chunk_tokens

    @property
    def covered_here(self) -> bool:
        """True if all rectangles that this node is to hold of one geometry are committed."""
        copies, ssd = self.copies, self.ssd
        for shards in self.space.sets_here:
            for shard in shards:
                if shard not in copies and shard not in ssd:
                    break
            else:
                return True
        return False

    def line(self) -> list[bytes]:
        """Keys of this chunk and of all above it on this node, head first."""
        keys: list[bytes] = []
        chunk: Chunk | None = self
        while chunk is not None:
            keys.append(chunk.key)
            chunk = chunk.parent
        return keys[::-1]

    def children(self) -> Iterator[Chunk]:
        """Chunks of this node whose parent this is. Do not link or unlink while iterating."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling

    def adopt(self, child: Chunk) -> None:
        """Make `child` a child of this chunk."""
        child.parent = self
        child.depth = self.depth + 1
        child.next_sibling = self.first_child
        if self.first_child is not None:
            self.first_child.previous_sibling = child
        self.first_child = child

    def leave_parent(self) -> None:
        """Undo `adopt`."""
        if self.previous_sibling is not None:
            self.previous_sibling.next_sibling = self.next_sibling
        elif self.parent is not None:
            self.parent.first_child = self.next_sibling
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self.previous_sibling
        self.parent = self.previous_sibling = self.next_sibling = None


class Forest:
    """All chunks of a node, linked to their parents."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, Chunk] = {}
        self.orphans: dict[bytes, set[bytes]] = {}
        """Missing parent's key -> keys of its orphans."""
        self.uncovered: dict[bytes, None] = {}
        """Chunks with a committed shard that are not covered, in the order of their first commit."""

    def __len__(self) -> int:
        return len(self.chunks)

    def get(self, key: bytes) -> Chunk | None:
        """The chunk of a key."""
        return self.chunks.get(key)

    def add(self, chunk: Chunk) -> None:
        """Link a new chunk to its parent, and its orphans to it."""
        self.chunks[chunk.key] = chunk
        parent = self.chunks.get(chunk.parent_key)
        if parent is not None:
            parent.adopt(chunk)
        elif not chunk.is_root:
            self.orphans.setdefault(chunk.parent_key, set()).add(chunk.key)
        for key in self.orphans.pop(chunk.key, ()):
            chunk.adopt(self.chunks[key])

    def remove(self, chunk: Chunk) -> None:
        """Unlink; children become orphans."""
        del self.chunks[chunk.key]
        self.uncovered.pop(chunk.key, None)
        if chunk.parent is not None:
            chunk.leave_parent()
        elif not chunk.is_root:
            siblings = self.orphans[chunk.parent_key]
            siblings.remove(chunk.key)
            if not siblings:
                del self.orphans[chunk.parent_key]
        for child in list(chunk.children()):
            child.leave_parent()
            self.orphans.setdefault(chunk.key, set()).add(child.key)

    def judge_again(self, space: KnownNamespace) -> None:
        """What covers a chunk of this namespace has changed: note those that are not covered any more."""
        for chunk in self.chunks.values():
            if chunk.space is space and chunk.is_committed and not chunk.covered_here:
                self.uncovered.setdefault(chunk.key)

    def subtree(self, chunk: Chunk, but: Collection[Chunk] = ()) -> list[Chunk]:
        """The chunk and everything below it, children before parents; without `but` and what is below those."""
        order, stack = [], [chunk]
        while stack:
            current = stack.pop()
            order.append(current)
            stack.extend(child for child in current.children() if child not in but)
        return order[::-1]

    def orphan_heads(self) -> Iterator[Chunk]:
        """Chunks whose parent has left. What hangs below one is as useless as itself."""
        for keys in list(self.orphans.values()):
            for key in list(keys):
                yield self.chunks[key]

    def check(self) -> None:
        """Links, counts and orphans agree with each other."""
        for chunk in self.chunks.values():
            assert chunk.parent is self.chunks.get(chunk.parent_key), "parent link"
            assert chunk.is_committed or chunk.pending, "a chunk without a shard"
            assert chunk.holds >= 0, "negative holds"
            assert all(child.parent is chunk for child in chunk.children()), "child link"
            assert chunk.parent is None or any(c is chunk for c in chunk.parent.children()), "sibling link"
            assert chunk.is_orphan == (chunk.key in self.orphans.get(chunk.parent_key, ())), "orphan list"
        for keys in self.orphans.values():
            assert keys and all(key in self.chunks for key in keys)
        expected = {c.key for c in self.chunks.values() if c.is_committed and not c.covered_here}
        assert set(self.uncovered) == expected, "uncovered list"
