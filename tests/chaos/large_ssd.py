"""A sparse SSD file of 100 GiB, full of headers and without payloads, as an earlier node left it."""

from __future__ import annotations

from pathlib import Path

from kvstore.model.layout import Dtype, Geometry, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import Calls
from kvstore.node.arena.ssd_format import HEADER_BYTES, ExtentPlace, SlotHeader, StoredNamespace
from kvstore.node.slots import SlotAllocator, slot_bytes

SIZE_BYTES = 100 << 30
LAYOUT = PageLayout(layers=32, kv_heads=8, head_dim=64, dtype=Dtype.BF16, page_tokens=31, pages_per_chunk=1)
"""A slot has nearly 2 MiB."""
SPACE = Namespace("large", "1", LAYOUT)
CHUNKS_A_PROMPT = 1600


def make(path: Path, node_id: str) -> int:
    """Make the file; returns how many chunks it tells of: prompts of 1,600 chunks."""
    geometry = Geometry.whole(LAYOUT)
    size = slot_bytes(LAYOUT, LAYOUT.whole)
    with SsdArena.open(path, SIZE_BYTES, node_id, 1, calls=Calls(fdatasync=lambda fd: None)) as arena:
        allocator = SlotAllocator(
            arena.size_bytes, arena.size_bytes, start_bytes=arena.slots_start, header_bytes=HEADER_BYTES
        )
        slots = allocator.allocate(size, SIZE_BYTES // size)
        extents = [ExtentPlace(*extent) for extent in allocator.extents()]
        for extent in extents:
            arena.format_extent(extent)
        arena.write_superblock([StoredNamespace(SPACE.canonical, ((geometry, (0,)),))], extents)
        headers = []
        for prompt, first in enumerate(range(0, len(slots), CHUNKS_A_PROMPT)):
            some = slots[first : first + CHUNKS_A_PROMPT]
            keys = KeyChain(SPACE).keys([prompt * 1_000_000 + i for i in range(len(some) * LAYOUT.chunk_tokens)])
            assert keys.fingerprints is not None
            prints = keys.fingerprints.tolist()
            for index, slot in enumerate(some):
                header = SlotHeader(
                    key=keys[index],
                    parent_key=keys[index - 1] if index else SPACE.id,
                    namespace_number=1,
                    shard=geometry.shard(0),
                    slot=slot,
                    payload_bytes=LAYOUT.chunk_bytes,
                    token_count=LAYOUT.chunk_tokens,
                    fingerprint=prints[index + 1],
                    parent_fingerprint=prints[index],
                    table_hash=1,
                    generation=2 * (first + index + 1),
                    epoch=1,
                )
                headers.append((slot, header))
        arena.write_headers(headers)
        return len(slots)
