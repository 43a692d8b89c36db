"""A small SSD file for tests: chunks whose bytes follow from their key, and a record of every system call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from kvstore.model import checksum
from kvstore.model.layout import Geometry
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import Buffer, Calls, pages
from kvstore.node.arena.ssd_format import ExtentPlace, SlotHeader, StoredNamespace
from kvstore.node.memory import UNIT_BYTES
from kvstore.node.slots import slot_bytes
from tests.unit.node.small_node import WIDE, keys_of, namespace

SIZE_BYTES = 256 << 10
"""Two superblocks of 64 KiB and 128 KiB of slots."""
NODE_ID = "node-a"
SPACE = namespace(WIDE)
WHOLE = Geometry.whole(WIDE)
STORED = StoredNamespace(SPACE.canonical, ((WHOLE, (0,)),))
SLOT_BYTES = slot_bytes(WIDE, WIDE.whole)
"""Three pages: payload and table."""
KEYS = keys_of(SPACE, 1, 40)
NUMBERS = {KEYS[number]: number for number in range(len(KEYS))}


def no_sync(fd: int) -> None:
    """Instead of fdatasync, where power loss is not the question."""


def open_arena(path: Path, epoch: int = 1, *, calls: Calls | None = None, size_bytes: int = SIZE_BYTES) -> SsdArena:
    """The arena of `NODE_ID`."""
    return SsdArena.open(path, size_bytes, NODE_ID, epoch, calls=calls or Calls(fdatasync=no_sync))


@cache
def slot_contents(number: int) -> np.ndarray:
    """Payload and table of chunk `number`, the rest zero."""
    payload_bytes = WIDE.payload_bytes(WIDE.whole)
    slot = np.zeros(SLOT_BYTES, dtype=np.uint8)
    slot[:payload_bytes] = np.random.default_rng(number).integers(0, 256, payload_bytes, dtype=np.uint8)
    table = checksum.table_of(slot[:payload_bytes], WIDE, WIDE.whole).view(np.uint8).ravel()
    slot[payload_bytes : payload_bytes + len(table)] = table
    return slot


def header_of(number: int, slot: int, generation: int = 2, **other: int) -> SlotHeader:
    """Header of chunk `number` of one long prompt."""
    payload_bytes = WIDE.payload_bytes(WIDE.whole)
    table = slot_contents(number)[payload_bytes : payload_bytes + checksum.table_bytes(WIDE.whole)]
    fields: dict[str, int] = {
        "table_hash": checksum.table_hash(table),
        "namespace_number": 1,
        "shard": WHOLE.shard(0),
        "payload_bytes": payload_bytes,
        "epoch": 1,
    } | other
    return SlotHeader(
        key=KEYS[number],
        parent_key=KEYS[number - 1] if number else SPACE.id,
        slot=slot,
        token_count=WIDE.chunk_tokens,
        fingerprint=number,
        parent_fingerprint=number,
        generation=generation,
        **fields,
    )


def is_whole(arena: SsdArena, header: SlotHeader) -> bool:
    """True if the slot of a header holds what its key stands for."""
    buffer = pages(SLOT_BYTES)
    arena.read(header.slot * UNIT_BYTES, buffer)
    return np.array_equal(np.frombuffer(buffer, np.uint8), slot_contents(NUMBERS[header.key]))


def write_chunk(arena: SsdArena, number: int, slot: int) -> None:
    """Payload and table only."""
    buffer = pages(SLOT_BYTES)
    buffer[:] = slot_contents(number).tobytes()
    arena.write(slot * UNIT_BYTES, buffer)


def store(arena: SsdArena, number: int, slot: int, generation: int = 2) -> None:
    """As a node does it: payload before header."""
    write_chunk(arena, number, slot)
    arena.write_headers([(slot, header_of(number, slot, generation))])


def cut(arena: SsdArena, extents: int, slot_count: int = 3, slot_bytes: int = SLOT_BYTES) -> list[ExtentPlace]:
    """Make extents of so many slots each, one behind the other."""
    length = UNIT_BYTES + slot_count * slot_bytes
    places = [
        ExtentPlace(arena.slots_start + i * length, arena.slots_start + (i + 1) * length, slot_bytes)
        for i in range(extents)
    ]
    for place in places:
        arena.format_extent(place)
    arena.write_superblock([STORED], places)
    return places


@dataclass
class Event:
    """One system call that changed the file: a write, a new length (`data` None) or a sync (offset -1)."""

    offset: int
    data: bytes | None


@dataclass
class Recorder:
    """Makes the calls and remembers them in order."""

    events: list[Event] = field(default_factory=list)

    @property
    def calls(self) -> Calls:
        return Calls(pwritev=self._pwritev, fdatasync=self._fdatasync, ftruncate=self._ftruncate)

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.events.append(Event(offset, b"".join(map(bytes, buffers))))
        return os.pwritev(fd, buffers, offset)

    def _fdatasync(self, fd: int) -> None:
        self.events.append(Event(-1, None))

    def _ftruncate(self, fd: int, length: int) -> None:
        self.events.append(Event(length, None))
        os.ftruncate(fd, length)


def image_of(events: Sequence[Event]) -> bytearray:
    """The file as these calls leave it."""
    image = bytearray()
    for event in events:
        if event.data is None and event.offset >= 0:
            image = image[: event.offset].ljust(event.offset, b"\0")
        elif event.data is not None:
            stop = event.offset + len(event.data)
            image = image.ljust(stop, b"\0")
            image[event.offset : stop] = event.data
    return image


def filled(path: Path) -> list[ExtentPlace]:
    """A file with chunk 0 in the first slot of one extent and chunk 1 in the first one of another."""
    with open_arena(path) as arena:
        extents = cut(arena, 2)
        for number, extent in enumerate(extents):
            store(arena, number, extent.slot(0))
    return extents


def found(arena: SsdArena) -> set[bytes]:
    """The keys of all chunks that a scan finds, each of them whole."""
    headers = list(arena.scan())
    assert all(is_whole(arena, header) for header in headers)
    return {header.key for header in headers}
