"""What a starting node makes of its SSD file. Runs before the node serves.

Believed are headers that are whole (`SsdArena.scan`), of a namespace and geometry that the superblock describes, and
whose chunk hangs on a chunk that is on the SSD as well; of two for one (key, shard) the one with the higher generation.
What lies behind a header is not looked at here: the first read compares it with its checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.model.namespace import Namespace
from kvstore.node.arena.ssd_format import SlotHeader, StoredNamespace, Superblock
from kvstore.node.catalog import age_of
from kvstore.node.chunks import Chunk, Copy, KnownNamespace
from kvstore.node.core import NodeCore


@dataclass(frozen=True, slots=True)
class RecoveredSsd:
    """Counts of chunks, of shards, and of headers that were not believed. `spaces`: as the superblock numbers them."""

    chunks: int
    shards: int
    dropped_shards: int
    spaces: tuple[KnownNamespace, ...]


def recover_ssd(core: NodeCore, superblock: Superblock, headers: Iterable[SlotHeader], now_s: float) -> RecoveredSsd:
    """Take up what is on the SSD into a core that may have chunks in DRAM already; `core.settle` comes afterwards."""
    pool = core.pool
    assert pool.ssd is not None
    spaces = tuple(_known(core, stored) for stored in superblock.namespaces)
    newest: dict[tuple[bytes, int], SlotHeader] = {}
    seen: list[int] = []
    for header in headers:
        seen.append(header.slot)
        space = spaces[header.namespace_number - 1]
        kind = space.kinds.get(header.shard)
        if kind is None or header.payload_bytes != kind.payload_bytes:
            continue
        known = newest.get((header.key, header.shard))
        if known is None or age_of(known.generation) < age_of(header.generation):
            newest[header.key, header.shard] = header
    believed = _with_parents(newest.values(), spaces)
    extents = [(extent.start, extent.stop, extent.slot_bytes) for extent in superblock.extents]
    misplaced = set(pool.ssd.allocator.restore(extents, [header.slot for header in believed]))
    adopted: set[int] = set()
    for header in believed:
        if header.slot not in misplaced and _adopt(core, spaces[header.namespace_number - 1], header, now_s):
            adopted.add(header.slot)
        elif header.slot not in misplaced:
            pool.ssd.allocator.release(header.slot)
    pool.stale_slots += [slot for slot in seen if slot not in adopted]  # what was not believed stays so
    return RecoveredSsd(pool.ssd.chunk_count, len(adopted), len(seen) - len(adopted), spaces)


def _known(core: NodeCore, stored: StoredNamespace) -> KnownNamespace:
    namespace = Namespace.from_canonical(stored.canonical)
    space = core.know(namespace, None, ())
    for geometry, written_here in stored.geometries:
        space = core.know(namespace, geometry, written_here)
    return space


def _with_parents(headers: Iterable[SlotHeader], spaces: Sequence[KnownNamespace]) -> list[SlotHeader]:
    """Those that hang, step by step, on the start of a prompt; parents before children."""
    children: dict[bytes, list[SlotHeader]] = {}
    for header in headers:
        children.setdefault(header.parent_key, []).append(header)
    found: list[SlotHeader] = []
    stack = [space.id for space in spaces]
    while stack:
        below = children.pop(stack.pop(), [])
        found += below
        stack += {header.key for header in below}
    return found


def _adopt(core: NodeCore, space: KnownNamespace, header: SlotHeader, now_s: float) -> bool:
    pool = core.pool
    assert pool.ssd is not None
    chunk = pool.forest.get(header.key)
    has_prints = bool(header.fingerprint or header.parent_fingerprint)
    own, above = (header.fingerprint, header.parent_fingerprint) if has_prints else (None, None)
    if chunk is None:
        chunk = Chunk(header.key, header.parent_key, space, header.token_count, own, above, now_s, used_s=now_s)
    elif chunk.differs(space, header.parent_key, own, above) or chunk.token_count != header.token_count:
        return False
    in_dram = chunk.copies.get(header.shard)
    entry = in_dram.entry if in_dram is not None else pool.catalog.claim(header.key, header.shard)
    if entry is None:
        return False
    if header.parent_key != space.id:
        parent = pool.forest.get(header.parent_key)
        if parent is None or not parent.ssd:  # it found no entry in the catalog, or is another chunk now
            if in_dram is None:
                pool.catalog.unclaim(entry)
            return False
    pool.catalog.skip_generations(age_of(header.generation))
    if not chunk.is_committed:
        pool.forest.add(chunk)
    size = space.kinds[header.shard].slot_bytes
    pool.adopt(pool.ssd, chunk, header.shard, Copy(header.slot, header.generation, entry, size, header.table_hash))
    if in_dram is None:
        pool.show_on_ssd(chunk, header.shard)
    return True
