"""Pages that say what they are, a writer that puts them into a node as fast as it can, and a process that does so.

A page holds `mark ^ (place * ODD)` in its u64 word number `place`; the mark joins 40 bits of the key and 24 bits of a
version, which is new at every write. So a page of another key, of two versions at once, or one that was moved is
recognised.

Run as a script it is a node that reuses its slots: `raced_node.py FOLDER SLOTS PROMPTS CHUNKS PAUSE_MS`. It
prints what the node announces, writes so many prompts of so many chunks each, with so long a pause between two, until a
line arrives on its standard input, answers how many chunks it put, and serves on until the input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.config import NodeSettings
from kvstore.model import checksum
from kvstore.model.layout import Dtype, Geometry, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import Outcome
from kvstore.node.core import NodeCore
from kvstore.node.daemon import NodeDaemon

Bytes = npt.NDArray[np.uint8]
LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=32, dtype=Dtype.FP32, page_tokens=8, pages_per_chunk=1)
NAMESPACE = Namespace("raced", "r1", LAYOUT)
GEOMETRY = Geometry.whole(LAYOUT)
UNIT_BYTES = 4096
"""Every slot of this layout is one unit."""
ODD = np.uint64(0x9E3779B97F4A7C15)
VERSION_BITS = np.uint64(24)


def prompt_keys(prompt: int, chunks: int, space: Namespace = NAMESPACE) -> Keys:
    return KeyChain(space).keys([prompt << 16 | place for place in range(chunks * space.layout.chunk_tokens)])


def _pattern(words: int) -> npt.NDArray[np.uint64]:
    return np.arange(words, dtype=np.uint64) * ODD


def marks(keys: Keys, version: int) -> npt.NDArray[np.uint64]:
    return keys.words[:, 0] >> VERSION_BITS << VERSION_BITS | np.uint64(version)


def pages_of(keys: Keys, version: int, chunk_bytes: int = LAYOUT.chunk_bytes) -> Bytes:
    """The pages of these chunks, uint8 (chunks, chunk_bytes)."""
    return (marks(keys, version)[:, None] ^ _pattern(chunk_bytes // 8)).view(np.uint8)


def wrong_chunks(pages: Bytes, keys: Keys, count: int) -> int:
    """How many of the first `count` chunks are not pages of their key, whole and of one version."""
    words = pages.reshape(len(pages), -1).view(np.uint64)[:count]
    plain = words ^ _pattern(words.shape[1])
    good = (plain == plain[:, :1]).all(axis=1)
    good &= plain[:, 0] >> VERSION_BITS == keys.words[:count, 0] >> VERSION_BITS
    return int(count - good.sum())


@dataclass
class PagesWriter:
    """Puts and removes prompts, on the thread that owns the core. `arena`: all of it, uint8."""

    core: NodeCore
    arena: Bytes
    space: Namespace = NAMESPACE
    checksums: bool = True
    version: int = 0
    session: int = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.core.open_session("writer", shared=True).number
        self.shard = Geometry.whole(self.space.layout).shard(0)
        self.core.register_namespace(self.session, self.space, Geometry.whole(self.space.layout), ())

    def put(self, keys: Keys) -> int:
        """Reserve, fill and commit what is missing; the number of chunks that became visible."""
        self.version = (self.version + 1) % (1 << 24)
        answer = self.core.reserve(self.session, keys, self.shard, b"")
        granted = [i for i, outcome in enumerate(answer.outcomes) if outcome is Outcome.GRANTED]
        if not granted:
            return 0
        slots = [answer.slots[index] for index in granted]
        hashes = self._fill(keys, granted, slots)
        done = self.core.commit(self.session, answer.attempt, granted, hashes, True)
        return done.outcomes.count(Outcome.COMMITTED)

    def _fill(self, keys: Keys, granted: Sequence[int], slots: Sequence[int]) -> list[int]:
        layout = self.space.layout
        size = layout.chunk_bytes
        pages = pages_of(keys, self.version, size)[granted]
        for slot, page in zip(slots, pages, strict=True):
            self.arena[slot * UNIT_BYTES : slot * UNIT_BYTES + size] = page
        if not self.checksums:
            return [0] * len(slots)
        hashes = []
        for slot, page in zip(slots, pages, strict=True):
            table = checksum.table_of(page, layout, layout.whole)
            at = slot * UNIT_BYTES + size
            self.arena[at : at + table.nbytes] = table.view(np.uint8).ravel()
            hashes.append(checksum.table_hash(table))
        return hashes

    def remove(self, keys: Keys) -> int:
        return self.core.remove(self.session, self.space.id, list(keys))


async def _race(folder: Path, slots: int, prompt_count: int, chunks: int, pause_ms: int) -> None:
    settings = NodeSettings(
        control_address="127.0.0.1:0",
        metrics_address="",
        dram=slots * UNIT_BYTES,
        slots=slots,
        host_id="raced",
        node_id="raced",
        socket_dir=str(folder),
        data_dir=str(folder),
    )
    daemon = NodeDaemon(settings, None)
    facts = await daemon.start()
    while daemon.core.pool.allocator.open_until < settings.dram:
        await asyncio.sleep(0.001)
    writer = PagesWriter(daemon.core, np.frombuffer(daemon._memory.arena.memory, dtype=np.uint8))
    prompts = [prompt_keys(prompt, chunks) for prompt in range(prompt_count)]
    for keys in prompts:
        writer.put(keys)
    print(json.dumps(facts), flush=True)
    told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    generator, count = random.Random(4), 0
    while not told.done():
        keys = prompts[generator.randrange(prompt_count)]
        if generator.random() < 0.7:  # else what is there stays, and others are evicted for what is not
            tail = min(chunks, generator.choice((4, 32, 256, chunks)))
            writer.remove(keys.slice(chunks - tail, chunks))
        count += writer.put(keys)
        await asyncio.sleep(pause_ms / 1000)
    print(count, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    daemon.core.check()
    await daemon.stop()


if __name__ == "__main__":
    asyncio.run(_race(Path(sys.argv[1]), *map(int, sys.argv[2:])))
