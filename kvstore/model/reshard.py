"""Read plans: which stored shards, and which of their bytes, fill a wanted rectangle. Pure values, no I/O.

A chunk was cut by its writers (`Geometry`) and is wanted by a reader as any other rectangle, for example the part
of one rank under another TP or PP size. Both are stored in the order [layer][page][head][head page]:

               heads                       source run (one a layer and page) = the common heads
          +------+------+
    layer |  0   |  1   |   stored         wanted = ####
          |   ###|##    |                  part of shard 0 = its common rectangle, likewise of shard 1
          +------+------+
          |  2   |  3   |
          +------+------+

A plan exists in two forms of the same meaning: numpy slices of the shard's and the reader's arrays, for copies in
memory, and byte ranges, for transports. The rectangles of a geometry tile the chunk, so each wanted byte is
written exactly once. A plan is of one geometry; choosing among several is the caller's business, and so is
reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from kvstore.errors import LayoutMismatch
from kvstore.model.layout import Geometry, PageLayout, Rectangle

_PLANS_KEPT = 1024
"""An engine asks for one rectangle a rank of a handful of geometries; more come only with many namespaces."""

_RANGE_LISTS_KEPT = 128
"""Fewer, because one list has up to layers x pages entries."""

Slices = tuple[slice, slice, slice, slice]
"""An index into an array (layers, pages, heads, head_page_bytes)."""


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """`length_bytes` bytes at `source_offset` of a stored shard go to `target_offset` of what is filled."""

    source_offset: int
    target_offset: int
    length_bytes: int

    @property
    def source_stop(self) -> int:
        """First byte of the source behind the range."""
        return self.source_offset + self.length_bytes

    @property
    def target_stop(self) -> int:
        """First byte of the target behind the range."""
        return self.target_offset + self.length_bytes


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The `common` part of a wanted rectangle and of the shard with this number, stored as `stored`."""

    number: int
    stored: Rectangle
    common: Rectangle

    @property
    def is_whole_shard(self) -> bool:
        """True if every byte of the shard is wanted."""
        return self.common == self.stored

    @property
    def stored_slices(self) -> Slices:
        """Index of the common part in the shard's payload, seen as `layout.shape(stored)`."""
        return slices_of(self.stored, self.common)

    def wanted_slices(self, wanted: Rectangle) -> Slices:
        """Index of the common part in the reader's array, seen as `layout.shape(wanted)`."""
        return slices_of(wanted, self.common)

    @property
    def checksum_slices(self) -> tuple[slice, slice]:
        """Index of the covered entries in the shard's checksum table, seen as (layers, heads) of `stored`."""
        layers, _, heads, _ = self.stored_slices
        return layers, heads

    @property
    def checksum_entries(self) -> tuple[int, ...]:
        """Numbers of the covered entries in the flat table [layer][head] of the shard, ascending."""
        layers, heads = self.checksum_slices
        width = self.stored.heads
        return tuple(
            layer * width + head
            for layer in range(layers.start, layers.stop)
            for head in range(heads.start, heads.stop)
        )

    def byte_ranges(self, layout: PageLayout, target: Rectangle) -> tuple[ByteRange, ...]:
        """What to copy of the shard's payload into that of `target`, ascending on both sides, joined where possible."""
        return _byte_ranges(layout, self, target)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The parts that fill `wanted`, in order of their shard numbers. Made by `plan_read`."""

    layout: PageLayout
    geometry: Geometry
    wanted: Rectangle
    parts: tuple[ShardPart, ...]
    shards: tuple[int, ...]
    """Shard ids (u32), parallel to `parts`."""

    def byte_ranges(self, part: ShardPart) -> tuple[ByteRange, ...]:
        """What to copy for one of `parts`, ascending in source and target, joined where both sides allow it."""
        return part.byte_ranges(self.layout, self.wanted)


@lru_cache(maxsize=_PLANS_KEPT)
def plan_read(layout: PageLayout, geometry: Geometry, wanted: Rectangle) -> ReadPlan:
    """How to fill `wanted` from shards of `geometry`.

    LayoutMismatch where the geometry or the wanted rectangle does not fit the layout, LimitExceeded where a shard
    of the geometry is over the limit. Plans are cached and shared: they are values.
    """
    layout.check_rectangle(wanted)
    geometry.check_fits(layout)
    parts = tuple(ShardPart(number, stored, common) for number, stored, common in geometry.overlapping(wanted))
    return ReadPlan(layout, geometry, wanted, parts, tuple(geometry.shard(part.number) for part in parts))


def covers(geometry: Geometry, present: Iterable[int], wanted: Rectangle) -> bool:
    """True if the shards with the numbers `present` hold all of `wanted`.

    A rectangle that reaches beyond the geometry is never covered: that is a miss, not an error.
    """
    needed = _needed(geometry, wanted)
    return needed is not None and needed.issubset(present)


@lru_cache(maxsize=_PLANS_KEPT)
def _needed(geometry: Geometry, wanted: Rectangle) -> frozenset[int] | None:
    """Numbers of the shards that `wanted` touches, None where it reaches beyond the geometry."""
    touched = tuple(geometry.overlapping(wanted))
    if sum(common.area for _, _, common in touched) != wanted.area:
        return None
    return frozenset(number for number, _, _ in touched)


@lru_cache(maxsize=_RANGE_LISTS_KEPT)
def _byte_ranges(layout: PageLayout, part: ShardPart, wanted: Rectangle) -> tuple[ByteRange, ...]:
    stored, common = part.stored, part.common
    head_page, pages = layout.head_page_bytes, layout.pages_per_chunk
    if stored.heads == common.heads == wanted.heads:
        # Rows of full width on both sides: pages and layers follow one another without a gap.
        rows, run_bytes = [0], common.layers * pages * common.heads * head_page
    else:
        rows, run_bytes = list(range(common.layers * pages)), common.heads * head_page
    source = _first_byte(layout, stored, common)
    target = _first_byte(layout, wanted, common)
    return tuple(
        ByteRange(source + row * stored.heads * head_page, target + row * wanted.heads * head_page, run_bytes)
        for row in rows
    )


def _first_byte(layout: PageLayout, outer: Rectangle, inner: Rectangle) -> int:
    """Offset in bytes of the first head page of `inner` in the bytes of `outer`."""
    row = (inner.layer_start - outer.layer_start) * layout.pages_per_chunk
    return (row * outer.heads + inner.head_start - outer.head_start) * layout.head_page_bytes


def slices_of(outer: Rectangle, inner: Rectangle) -> Slices:
    """Index of `inner` in the bytes of `outer`, seen as `layout.shape(outer)`. LayoutMismatch unless it lies in it."""
    if not outer.contains(inner):
        raise LayoutMismatch(f"{inner} does not lie in {outer}")
    layers = slice(inner.layer_start - outer.layer_start, inner.layer_stop - outer.layer_start)
    heads = slice(inner.head_start - outer.head_start, inner.head_stop - outer.head_start)
    return layers, slice(None), heads, slice(None)
