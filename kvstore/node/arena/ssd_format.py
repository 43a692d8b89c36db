"""What the bytes of an SSD file mean. Pure, no I/O; the byte layout is written down in `docs/ssd-file.md`.

    superblock A | superblock B | extent | extent | …                      (all at multiples of 4096)
    extent       = header block (128 bytes a slot, rounded up to 4096) | slot | slot | …

A superblock says which node's file this is, how it is cut into extents and which namespaces its slots belong to; the
two copies are written in turn. A slot header says what one slot holds. Both carry a checksum; what does not match it
was never there. Headers are checked with the file's own random id as seed, so that no payload can pass for one.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import xxhash

from kvstore.errors import InvalidRequest, LayoutMismatch, LimitExceeded
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.prefix import KEY_BYTES
from kvstore.node.memory import UNIT_BYTES

FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 128
"""One slot header."""
REGION_LEAST_BYTES: Final = 64 << 10
REGION_MOST_BYTES: Final = 16 << 20
"""Bounds of the room of one superblock copy."""
FILE_LIMIT_BYTES: Final = (1 << 32) * UNIT_BYTES
"""Slots are named by 32 bits: 16 TiB."""

SUPERBLOCK_MAGIC: Final = b"KVSTSSD1"
_HEADER_MAGIC: Final = b"KVSLOTH1"
_FRAME: Final = struct.Struct("<8sIIIIQQ")  # magic, version, region, body length, zero, file id, sequence
_CHECKSUM: Final = struct.Struct("<Q")
_BODY_START: Final = _FRAME.size + _CHECKSUM.size
_BODY_LIMIT_BYTES: Final = 256 << 20
_HEADER: Final = struct.Struct("<8s16s16sIIIIQQQQQ24xQ")
_CHECKED_BYTES: Final = HEADER_BYTES - 8
_LOW_48: Final = (1 << 48) - 1


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What one slot holds, as the disk remembers it.

    `namespace_number` is the place in the superblock's list plus 1; `slot` the header's own slot (offset in the file
    / 4096); `fingerprint` has 48 bits. `generation` decides between two slots with the same (key, shard).
    """

    key: bytes
    parent_key: bytes
    namespace_number: int
    shard: int
    slot: int
    payload_bytes: int
    token_count: int
    fingerprint: int
    parent_fingerprint: int
    table_hash: int
    generation: int
    epoch: int

    def pack(self, file_id: int) -> bytes:
        """128 bytes for the file with this id."""
        assert len(self.key) == len(self.parent_key) == KEY_BYTES and 0 < self.token_count < 1 << 16
        head = _HEADER.pack(
            _HEADER_MAGIC,
            self.key,
            self.parent_key,
            self.namespace_number,
            self.shard,
            self.slot,
            self.payload_bytes,
            (self.fingerprint & _LOW_48) | self.token_count << 48,
            self.parent_fingerprint,
            self.table_hash,
            self.generation,
            self.epoch,
            0,
        )[:_CHECKED_BYTES]
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head, file_id))

    @classmethod
    def unpack(cls, data: bytes | memoryview, file_id: int) -> SlotHeader | None:
        """The inverse; None for anything that `pack` did not make for this file."""
        if data[:8] != _HEADER_MAGIC:
            return None
        fields = _HEADER.unpack(data)
        if fields[-1] != xxhash.xxh3_64_intdigest(data[:_CHECKED_BYTES], file_id):
            return None
        key, parent_key, number, shard, slot, payload, print_and_tokens, parent_print, table, generation, epoch, _ = (
            fields[1:]
        )
        return cls(
            key,
            parent_key,
            number,
            shard,
            slot,
            payload,
            print_and_tokens >> 48,
            print_and_tokens & _LOW_48,
            parent_print,
            table,
            generation,
            epoch,
        )


def header_block_bytes(slot_count: int) -> int:
    """Bytes of the header block of an extent with this many slots."""
    return -(-slot_count * HEADER_BYTES // UNIT_BYTES) * UNIT_BYTES


@dataclass(frozen=True, slots=True, order=True)
class ExtentPlace:
    """Bytes [start, stop) of the file, cut into slots of `slot_bytes` behind their header block."""

    start: int
    stop: int
    slot_bytes: int

    @property
    def slot_count(self) -> int:
        """Slots that fit behind the header block.

        What is left beside them is whole pages, so the header block may be rounded up to pages without another look.
        """
        return (self.stop - self.start) // (self.slot_bytes + HEADER_BYTES)

    @property
    def slots_start(self) -> int:
        """Offset of the first slot, in bytes."""
        return self.start + header_block_bytes(self.slot_count)

    def slot(self, index: int) -> int:
        """Name of slot `index`: its offset in the file / 4096."""
        return (self.slots_start + index * self.slot_bytes) // UNIT_BYTES

    def index(self, slot: int) -> int | None:
        """The inverse; None where no slot of this extent begins."""
        index, rest = divmod(slot * UNIT_BYTES - self.slots_start, self.slot_bytes)
        return index if not rest and 0 <= index < self.slot_count else None

    def is_sound(self, first: int, stop: int) -> bool:
        """True if it is aligned, has a slot and lies in [first, stop)."""
        aligned = not any(value % UNIT_BYTES for value in (self.start, self.stop, self.slot_bytes))
        return aligned and first <= self.start < self.stop <= stop and self.slot_bytes > 0 and self.slot_count > 0


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace's canonical description and, a geometry, the rectangles that are written on this node."""

    canonical: bytes
    geometries: tuple[tuple[Geometry, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Superblock:
    """Whose file this is and how it is cut. The copy with the higher `sequence` counts.

    `region_bytes`: room of one copy, fixed when the file is made. `size_bytes`: limit of the file, a multiple of 4096.
    """

    file_id: int
    node_id: str
    epoch: int
    size_bytes: int
    region_bytes: int
    sequence: int = 0
    extents: tuple[ExtentPlace, ...] = ()
    namespaces: tuple[StoredNamespace, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def slots_start(self) -> int:
        """Where extents may begin, in bytes."""
        return 2 * self.region_bytes

    @property
    def offset(self) -> int:
        """Where in the file this one is written: copies take turns."""
        return 0 if self.sequence % 2 else self.region_bytes

    def within(self, size_bytes: int) -> Superblock:
        """The same for a file of another size: without the extents that do not fit any more."""
        kept = tuple(extent for extent in self.extents if extent.stop <= size_bytes)
        return replace(self, size_bytes=size_bytes, extents=kept)

    def pack(self) -> bytes:
        """Bytes for one region. Raises LimitExceeded if they do not fit."""
        body = zlib.compress(json.dumps(self._body(), separators=(",", ":")).encode(), 1)
        if _BODY_START + len(body) > self.region_bytes:
            raise LimitExceeded(
                f"{len(self.extents)} extents and {len(self.namespaces)} namespaces take {_BODY_START + len(body)} "
                f"bytes, over the limit of {self.region_bytes} bytes of this SSD file's superblock; a larger file "
                "that is made anew has more room"
            )
        frame = _FRAME.pack(
            SUPERBLOCK_MAGIC, self.format_version, self.region_bytes, len(body), 0, self.file_id, self.sequence
        )
        return frame + _CHECKSUM.pack(_superblock_hash(frame, body)) + body

    def _body(self) -> dict[str, Any]:
        return {
            "node_id": self.node_id,
            "epoch": self.epoch,
            "size_bytes": self.size_bytes,
            "extents": [[extent.start, extent.stop, extent.slot_bytes] for extent in self.extents],
            "namespaces": [
                {
                    "canonical": space.canonical.decode(),
                    "geometries": [
                        [
                            [[r.layer_start, r.layer_stop, r.head_start, r.head_stop] for r in geometry.rectangles],
                            list(written_here),
                        ]
                        for geometry, written_here in space.geometries
                    ],
                }
                for space in self.namespaces
            ],
        }

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Superblock | None:
        """The inverse, from a region's first bytes; None if they are damaged, short or no superblock.

        Raises LayoutMismatch for an undamaged one of another format version. Magic, version, lengths and checksum
        stand at the same place in every version, so that damage is told from age.
        """
        if len(data) < _BODY_START or data[:8] != SUPERBLOCK_MAGIC:
            return None
        _, version, region_bytes, body_bytes, _, file_id, sequence = _FRAME.unpack_from(data)
        (checksum,) = _CHECKSUM.unpack_from(data, _FRAME.size)
        body = data[_BODY_START : _BODY_START + body_bytes]
        if len(body) != body_bytes or checksum != _superblock_hash(data[: _FRAME.size], body):
            return None
        if version != FORMAT_VERSION:
            raise LayoutMismatch(
                f"the SSD file has format version {version}, this kvstore reads {FORMAT_VERSION}; start the kvstore "
                "that wrote it, or delete the file: the node makes a new one and its cached pages are lost"
            )
        try:
            fields = json.loads(zlib.decompressobj().decompress(body, _BODY_LIMIT_BYTES))
            block = cls(
                file_id,
                fields["node_id"],
                fields["epoch"],
                fields["size_bytes"],
                region_bytes,
                sequence,
                tuple(ExtentPlace(*extent) for extent in fields["extents"]),
                tuple(_namespace(space) for space in fields["namespaces"]),
            )
        except (zlib.error, ValueError, KeyError, TypeError, InvalidRequest):
            return None
        return block if block._is_sound() else None

    def _is_sound(self) -> bool:
        ordered = sorted(self.extents)
        return (
            REGION_LEAST_BYTES <= self.region_bytes <= REGION_MOST_BYTES
            and self.region_bytes % UNIT_BYTES == 0
            and all(extent.is_sound(self.slots_start, self.size_bytes) for extent in ordered)
            and all(one.stop <= other.start for one, other in pairwise(ordered))
        )


def bytes_to_read(head: bytes | memoryview) -> int:
    """How many bytes the superblock has whose first bytes these are; 0 if it is none. Not checked yet."""
    if len(head) < _BODY_START or head[:8] != SUPERBLOCK_MAGIC:
        return 0
    length: int = _BODY_START + _FRAME.unpack_from(head)[3]
    return length if length <= REGION_MOST_BYTES else 0


def region_bytes_of(size_bytes: int) -> int:
    """Room of one superblock copy in a new file of this size."""
    wanted = min(max(size_bytes // 64, REGION_LEAST_BYTES), REGION_MOST_BYTES)
    return -(-wanted // UNIT_BYTES) * UNIT_BYTES


def _namespace(fields: dict[str, Any]) -> StoredNamespace:
    return StoredNamespace(
        fields["canonical"].encode(),
        tuple(
            (Geometry(tuple(Rectangle(*rectangle) for rectangle in rectangles)), tuple(written_here))
            for rectangles, written_here in fields["geometries"]
        ),
    )


def _superblock_hash(frame: bytes | memoryview, body: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(frame)
    state.update(body)
    return state.intdigest()
