"""What a page, a chunk and a shard are, in bytes. Pure values, no I/O.

A *page* is the KV of `page_tokens` tokens for one layer, head outermost. A *chunk* is `pages_per_chunk`
consecutive pages of all layers:

    chunk = [layer][page][kv_head][head page]          (C order, no padding)

A *shard* is a rectangle (layer range x KV-head range) of a chunk, itself stored in the same order. A head
page is opaque: K and V of one head for the page's tokens in the named interior, followed by the declared
side components of that head (scales, index vectors) in the order in which they are declared.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from kvstore.errors import LayoutMismatch, LimitExceeded

CHUNK_BYTES_LIMIT = 256 << 20
"""Largest shard payload the pool stores, in bytes (a slot class above it would waste whole extents)."""

GEOMETRY_RECTANGLES_LIMIT = 256
"""A shard id has 8 bits for the rectangle's number."""


class Dtype(enum.StrEnum):
    """Element types of stored KV. The name is part of the namespace: equal sizes never match by accident."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return {"fp32": 4, "bf16": 2, "fp16": 2}.get(self.value, 1)


class Attention(enum.StrEnum):
    """How K and V are held: two vectors a head (MHA, GQA) or one shared latent vector (MLA)."""

    MHA = "mha"
    GQA = "gqa"
    MLA = "mla"


@dataclass(frozen=True, slots=True)
class SideComponent:
    """Bytes stored with every head page besides K and V: quantisation scales, index vectors.

    `bytes_per_page` is the size for one (layer, KV head, page).
    """

    name: str
    bytes_per_page: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise LayoutMismatch("a side component needs a non-empty name")
        if type(self.bytes_per_page) is not int or self.bytes_per_page <= 0:
            raise LayoutMismatch(f"bytes_per_page of {self.name} is {self.bytes_per_page}; it must be an integer > 0")


@dataclass(frozen=True, slots=True, order=True)
class Rectangle:
    """Layers [layer_start, layer_stop) x KV heads [head_start, head_stop) of a chunk."""

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int

    def __post_init__(self) -> None:
        if not (0 <= self.layer_start < self.layer_stop and 0 <= self.head_start < self.head_stop):
            raise LayoutMismatch(f"empty or negative rectangle {self}")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.layer_stop - self.layer_start

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return self.head_stop - self.head_start

    def intersection(self, other: Rectangle) -> Rectangle | None:
        """The common part, or None where there is none."""
        layers = max(self.layer_start, other.layer_start), min(self.layer_stop, other.layer_stop)
        heads = max(self.head_start, other.head_start), min(self.head_stop, other.head_stop)
        if layers[0] >= layers[1] or heads[0] >= heads[1]:
            return None
        return Rectangle(layers[0], layers[1], heads[0], heads[1])

    def contains(self, other: Rectangle) -> bool:
        """True if `other` lies inside this rectangle."""
        return self.intersection(other) == other

    @property
    def area(self) -> int:
        """Layers times heads."""
        return self.layers * self.heads


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout that all bytes of a namespace share.

    `head_dim` is the width of K (and of V) in elements; for MLA the width of the latent vector, with
    `kv_heads` 1. `interior` names the order inside a head page: `kv_per_token` = [token][K||V],
    `k_then_v` = [K,V][token][head_dim], anything else is an engine's private packing.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Dtype
    page_tokens: int
    pages_per_chunk: int
    attention: Attention = Attention.GQA
    interior: str = "kv_per_token"
    side_components: tuple[SideComponent, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_tokens", "pages_per_chunk"):
            value = getattr(self, name)
            # Exactly int: True, 8.0 and numpy's 8 would give the same bytes under another namespace id, or none.
            if type(value) is not int or not 1 <= value < 1 << 16:
                raise LayoutMismatch(f"{name} is {value!r}; it must be an integer in 1..65535")
        if self.attention is Attention.MLA and self.kv_heads != 1:
            raise LayoutMismatch(f"MLA keeps one latent head, but kv_heads is {self.kv_heads}")
        if not isinstance(self.interior, str) or not self.interior or not self.interior.isascii():
            raise LayoutMismatch("interior must be a non-empty ASCII name")
        if self.chunk_bytes > CHUNK_BYTES_LIMIT * GEOMETRY_RECTANGLES_LIMIT:
            raise LimitExceeded(
                f"a chunk of {self.chunk_bytes} bytes cannot be cut into {GEOMETRY_RECTANGLES_LIMIT} shards of at most "
                f"{CHUNK_BYTES_LIMIT} bytes; use fewer pages a chunk"
            )

    @property
    def head_page_bytes(self) -> int:
        """Bytes of one head page: K and V (or the latent), then the side components."""
        vectors = 1 if self.attention is Attention.MLA else 2
        elements = self.page_tokens * vectors * self.head_dim
        return elements * self.dtype.itemsize_bytes + sum(c.bytes_per_page for c in self.side_components)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk."""
        return self.page_tokens * self.pages_per_chunk

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk, all layers and heads."""
        return self.payload_bytes(self.whole)

    @property
    def whole(self) -> Rectangle:
        """The rectangle of all layers and heads."""
        return Rectangle(0, self.layers, 0, self.kv_heads)

    def shape(self, rectangle: Rectangle) -> tuple[int, int, int, int]:
        """(layers, pages, heads, head_page_bytes) of a rectangle, as uint8."""
        return rectangle.layers, self.pages_per_chunk, rectangle.heads, self.head_page_bytes

    def payload_bytes(self, rectangle: Rectangle) -> int:
        """Payload bytes of one shard with this rectangle."""
        return rectangle.area * self.pages_per_chunk * self.head_page_bytes

    def check_rectangle(self, rectangle: Rectangle) -> None:
        """Raise LayoutMismatch unless the rectangle lies inside the chunk."""
        if rectangle.layer_stop > self.layers or rectangle.head_stop > self.kv_heads:
            raise LayoutMismatch(f"{rectangle} does not lie in {self.layers} layers x {self.kv_heads} KV heads")


@dataclass(frozen=True, slots=True)
class Geometry:
    """How writers cut a chunk: rectangles that tile layers x heads exactly, in canonical (sorted) order.

    `digest` (24 bits of BLAKE2b over the canonical text) and a rectangle's number make a shard id that is the
    same on every machine without coordination. Two geometries with one digest are refused where they meet.
    """

    rectangles: tuple[Rectangle, ...]
    digest: int = field(init=False, repr=False, compare=False)
    """24 bits, never 0; kept, because every look-up asks for shard ids."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.rectangles) <= GEOMETRY_RECTANGLES_LIMIT:
            raise LimitExceeded(f"a geometry has 1..{GEOMETRY_RECTANGLES_LIMIT} rectangles, not {len(self.rectangles)}")
        if tuple(sorted(self.rectangles)) != self.rectangles:
            raise LayoutMismatch("the rectangles of a geometry must be sorted")
        for index, one in enumerate(self.rectangles):
            for other in self.rectangles[index + 1 :]:
                if one.intersection(other) is not None:
                    raise LayoutMismatch(f"rectangles {one} and {other} overlap")
        layers = max(r.layer_stop for r in self.rectangles)
        heads = max(r.head_stop for r in self.rectangles)
        if sum(r.area for r in self.rectangles) != layers * heads:
            raise LayoutMismatch("the rectangles of a geometry leave a gap")
        digest = blake2b(self.canonical, digest_size=3, person=b"kvstore-geometry").digest()
        object.__setattr__(self, "digest", int.from_bytes(digest, "little") or 1)

    @classmethod
    def whole(cls, layout: PageLayout) -> Geometry:
        """One shard a chunk."""
        return cls((layout.whole,))

    @classmethod
    def parallel(cls, layout: PageLayout, *, tp: int = 1, pp: int = 1) -> Geometry:
        """Even cut over `tp` tensor-parallel and `pp` pipeline-parallel ranks; rank r of the writers owns
        rectangle `pp_rank * min(tp, kv_heads) + head_group` in sorted order.

        KV heads fewer than `tp` are replicated by the engine; then `kv_heads` rectangles a stage are enough.
        """
        groups = min(tp, layout.kv_heads)
        if tp < 1 or layout.kv_heads % groups or tp % groups:
            raise LayoutMismatch(f"{layout.kv_heads} KV heads cannot be cut evenly over tp={tp}")
        if pp < 1 or layout.layers % pp:
            raise LayoutMismatch(f"{layout.layers} layers cannot be cut evenly over pp={pp}")
        depth, width = layout.layers // pp, layout.kv_heads // groups
        return cls(
            tuple(
                Rectangle(p * depth, (p + 1) * depth, t * width, (t + 1) * width)
                for p in range(pp)
                for t in range(groups)
            )
        )

    @property
    def canonical(self) -> bytes:
        """The text that is hashed: `l0-l1xh0-h1` a rectangle, joined by commas."""
        return ",".join(
            f"{r.layer_start}-{r.layer_stop}x{r.head_start}-{r.head_stop}" for r in self.rectangles
        ).encode()

    def check_fits(self, layout: PageLayout) -> None:
        """LayoutMismatch unless the rectangles tile this layout's chunk, LimitExceeded where a shard is too big."""
        whole = Rectangle(0, max(r.layer_stop for r in self.rectangles), 0, max(r.head_stop for r in self.rectangles))
        if whole != layout.whole:
            raise LayoutMismatch(
                f"a geometry of {whole.layers} layers x {whole.heads} KV heads does not fit a layout of "
                f"{layout.layers} layers x {layout.kv_heads} KV heads"
            )
        largest = max(layout.payload_bytes(r) for r in self.rectangles)
        if largest > CHUNK_BYTES_LIMIT:
            raise LimitExceeded(
                f"a shard of {largest} bytes is over the limit of {CHUNK_BYTES_LIMIT} bytes; use fewer pages a chunk"
            )

    def shard(self, number: int) -> int:
        """Shard id (u32) of rectangle `number`: digest in the high 24 bits, number in the low 8."""
        if not 0 <= number < len(self.rectangles):
            raise LayoutMismatch(f"rectangle {number} of a geometry with {len(self.rectangles)}")
        return self.digest << 8 | number

    def overlapping(self, rectangle: Rectangle) -> Iterator[tuple[int, Rectangle, Rectangle]]:
        """(number, stored rectangle, common part) of every rectangle that `rectangle` touches."""
        for number, stored in enumerate(self.rectangles):
            common = stored.intersection(rectangle)
            if common is not None:
                yield number, stored, common
