"""The SSD tier of a node: saving and read-back against raw O_DIRECT, and what Reserve feels of a busy cleaner.

`op: save` is what the cleaner does (payload, table, headers), `op: read_back` what Acquire does for an SSD hit (read
into DRAM, verify all checksums, publish), both without sockets, in this process; raw: preadv and pwritev of as many
slots of the same size by as many threads. `--io` names the ways in which pages go (`ssd_io`), each with a tier of its
own, in turn; `cpu_seconds_per_gib`: of the whole process, checksums and the tier's books included. `op: reserve` is a
client's Reserve of 8 chunks at a node in another process, quiet and while that node saves what was just written; p99 as
the median of alternated rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from measure import percentile, ratio, report
from servers import Node

import kvstore
from kvstore.client import Cache, Client
from kvstore.model import checksum
from kvstore.model.layout import Dtype, Geometry, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import NodeInfo, Outcome
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import pages
from kvstore.node.arena.ssd_format import HEADER_BYTES
from kvstore.node.arena.ssd_io import open_ssd_io
from kvstore.node.catalog import CatalogWriter
from kvstore.node.core import CoreSettings, NodeCore
from kvstore.node.daemon import NodeMemory
from kvstore.node.slots import SlotAllocator, slot_bytes
from kvstore.node.tiers import TierStack
from kvstore.node.tiers.disk import READERS

ROUND_BYTES = 256 << 20
ROUNDS = 5
RESERVES = 400
RESERVE_CHUNKS = 8


def layout_of(chunk_bytes: int) -> PageLayout:
    """8 KV heads of 128 bf16 values, 32 tokens a page: 128 KiB a layer."""
    return PageLayout(
        layers=chunk_bytes >> 17, kv_heads=8, head_dim=128, dtype=Dtype.BF16, page_tokens=32, pages_per_chunk=1
    )


class Tiers:
    """A node's core and SSD tier without the rest, with one prompt of `count` chunks."""

    def __init__(self, folder: Path, layout: PageLayout, count: int, io: str) -> None:
        self.layout = layout
        self.slot_bytes = slot_bytes(layout, layout.whole)
        size = count * self.slot_bytes * 5 // 4 + (64 << 20)
        self._memory = NodeMemory.create(size, 2 * count)
        while self._memory.arena.populated_bytes < size:
            self._memory.arena.populate_step()
        self.arena = SsdArena.open(folder / f"ssd-{io}", size + (64 << 20), "bench", 1)
        allocator = SlotAllocator(
            self.arena.size_bytes, self.arena.size_bytes, start_bytes=self.arena.slots_start, header_bytes=HEADER_BYTES
        )
        self.core = NodeCore(
            NodeInfo("bench", 1, "bench", "", ""),
            CatalogWriter(self._memory.catalog, self._memory.shape, 1),
            SlotAllocator(size, size),
            time.monotonic,
            CoreSettings(session_share=1.0),
            allocator,
        )
        self.view = np.frombuffer(self._memory.arena.memory, dtype=np.uint8)
        self.io = open_ssd_io(io, self.arena, self.view)
        self.tiers = TierStack(self.core, self.view, self.arena, self.io)
        namespace, geometry = Namespace("bench", "1", layout), Geometry((layout.whole,))
        self.session = self.core.open_session("bench", shared=True, owner=(1, 1)).number
        self.core.register_namespace(self.session, namespace, geometry, ())
        self.shard, self.namespace = geometry.shard(0), namespace
        self.keys: Keys = KeyChain(namespace).keys(np.arange(count * layout.chunk_tokens, dtype=np.uint32))

    def write(self) -> None:
        """All chunks into DRAM."""
        answer = self.core.reserve(self.session, self.keys, self.shard, b"")
        assert set(answer.outcomes) == {Outcome.GRANTED}
        hashes = []
        for slot in answer.slots:
            payload = self.view[slot * 4096 :][: self.layout.chunk_bytes]
            table = checksum.table_of(payload, self.layout, self.layout.whole)
            self.view[slot * 4096 + len(payload) :][: table.nbytes] = table.view(np.uint8).ravel()
            hashes.append(checksum.table_hash(table))
        self.core.commit(self.session, answer.attempt, range(len(hashes)), hashes, True)

    async def save(self) -> float:
        """Seconds until all of it is on the SSD."""
        began = time.perf_counter()
        done, reason = await self.tiers.persist(self.keys, time.monotonic() + 100)
        took = time.perf_counter() - began
        if done < len(self.keys):
            raise SystemExit(f"only {done} chunks were saved: {reason}")
        return took

    async def read_back(self) -> float:
        """Seconds until all of it is in DRAM again, after it was dropped there."""
        pool = self.core.pool
        for chunk in sorted(pool.forest.chunks.values(), key=lambda chunk: -chunk.depth):
            pool._evict_from_dram(chunk)
        began = time.perf_counter()
        await self.tiers.stage_all(self.keys, self.layout.whole, 0, time.monotonic() + 100)
        took = time.perf_counter() - began
        if pool.dram.chunk_count < len(self.keys):
            raise SystemExit("not all chunks came back")
        return took

    async def forget(self) -> None:
        """Remove everything."""
        self.core.remove(self.session, self.namespace.id, [self.keys[0]])
        await self.tiers.forget_removed()


def raw_seconds(arena: SsdArena, slot: int, count: int, *, writes: bool) -> float:
    """The same number of slots by bare system calls of as many threads, through a descriptor of its own."""
    fd = os.open(arena.path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if arena.direct else 0))
    call = os.pwritev if writes else os.preadv
    memory = [memoryview(pages(slot)) for _ in range(READERS)]

    def share(first: int) -> None:
        for number in range(first, count, READERS):
            if call(fd, [memory[first]], arena.slots_start + number * slot) != slot:
                raise SystemExit("a raw transfer was cut short; the comparison would not be fair")

    try:
        with ThreadPoolExecutor(READERS) as threads:
            began = time.perf_counter()
            list(threads.map(share, range(READERS)))
            return time.perf_counter() - began
    finally:
        os.close(fd)


@dataclass(slots=True)
class Took:
    """Seconds of each round, and of the processor."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


class Measured:
    """One way of the tier against raw, round by round."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.took = {name: Took() for name in ("save", "raw write", "read_back", "raw read")}

    async def round(self, *, counts: bool) -> None:
        """Write, save, read back, forget; then the same by system calls."""
        tiers = self.tiers
        tiers.write()
        await self._note("save", tiers.save, counts)
        await self._note("read_back", tiers.read_back, counts)
        await tiers.forget()
        for name, writes in (("raw write", True), ("raw read", False)):
            await self._note(name, functools.partial(self._raw, writes=writes), counts)

    async def _raw(self, *, writes: bool) -> float:
        tiers = self.tiers
        return await asyncio.to_thread(raw_seconds, tiers.arena, tiers.slot_bytes, len(tiers.keys), writes=writes)

    async def _note(self, name: str, work: Callable[[], Awaitable[float]], counts: bool) -> None:
        began = time.process_time()
        seconds = await work()
        if counts:
            self.took[name].seconds.append(seconds)
            self.took[name].cpu_seconds.append(time.process_time() - began)

    def tell(self) -> None:
        """Two rows."""
        tiers = self.tiers
        count, chunk_bytes = len(tiers.keys), tiers.layout.chunk_bytes
        for op, raw in (("save", "raw write"), ("read_back", "raw read")):
            ours, other = self.took[op], self.took[raw]
            report(
                bench="ssd_node",
                op=op,
                transport="file",
                io=tiers.io.detail,
                chunk_bytes=chunk_bytes,
                count=count,
                depth=READERS,
                direct=tiers.arena.direct,
                checksum=True,
                condition="quiet",
                against="raw",
                bytes_per_second=count * chunk_bytes / statistics.median(ours.seconds),
                against_bytes_per_second=count * tiers.slot_bytes / statistics.median(other.seconds),
                ratio=ratio(ours.seconds, other.seconds),
                cpu_seconds_per_gib=statistics.median(ours.cpu_seconds) / (count * chunk_bytes) * (1 << 30),
                against_cpu_seconds_per_gib=statistics.median(other.cpu_seconds) / (count * chunk_bytes) * (1 << 30),
            )


async def moves(folder: Path, chunk_bytes: int, rounds: int, names: list[str]) -> None:
    """Save and read back by each way against raw, in turn."""
    count = ROUND_BYTES // chunk_bytes
    measured = [Measured(Tiers(folder, layout_of(chunk_bytes), count, name)) for name in names]
    for number in range(rounds + 1):
        for each in measured:
            await each.round(counts=number > 0)
    for each in measured:
        each.tell()
        await each.tiers.tiers.stop()


def reserve_seconds(cache: Cache, client: Client, first: int) -> list[float]:
    """Time of each Reserve, of chunks that nobody has."""
    host, seconds = client.host(), []
    assert host is not None
    for number in range(RESERVES):
        start = (first + number) * RESERVE_CHUNKS * cache.layout.chunk_tokens
        keys = cache.keys(np.arange(start, start + RESERVE_CHUNKS * cache.layout.chunk_tokens, dtype=np.uint32))
        began = time.perf_counter()
        answer = host.api.reserve(keys, cache.shard, b"", 5.0)
        seconds.append(time.perf_counter() - began)
        host.api.abort(answer.attempt, 5.0)
    return seconds


def waiting(node: Node) -> int:
    """Chunks that the node's cleaner has not saved yet."""
    stats = node.statistics()
    return int(stats["cleaner_waiting_chunks"])


def reserve(folder: Path, rounds: int) -> None:
    """Reserve of a quiet node and of one whose cleaner runs, in turn."""
    layout = layout_of(2 << 20)
    backlog = 256
    with (
        Node(dram="2GiB", more=("--ssd", f"{folder}/node:4GiB", "--slots", "8192")) as node,
        kvstore.connect(node=node.control_address) as client,
    ):
        node.wait_populated()
        cache = client.bind(Namespace("bench", "1", layout))
        pages_of = cache.empty(backlog)
        quiet, busy = [], []
        for number in range(rounds):
            while waiting(node):
                time.sleep(0.05)
            quiet.append(reserve_seconds(cache, client, (2 * number) * RESERVES))
            start = (1 << 28) + number * backlog * layout.chunk_tokens
            cache.write(cache.keys(np.arange(start, start + backlog * layout.chunk_tokens, dtype=np.uint32)), pages_of)
            before = waiting(node)
            busy.append(reserve_seconds(cache, client, (2 * number + 1) * RESERVES))
            print(f"  the cleaner had {before} chunks to save, then {waiting(node)}", file=sys.stderr)
        for condition, taken in (("quiet", quiet), ("cleaning", busy)):
            report(
                bench="ssd_node",
                op="reserve",
                transport="shm",
                chunk_bytes=layout.chunk_bytes,
                count=RESERVES,
                keys=RESERVE_CHUNKS,
                condition=condition,
                against="quiet",
                p50_us=1e6 * statistics.median(percentile(each, 0.5) for each in taken),
                p99_us=1e6 * statistics.median(percentile(each, 0.99) for each in taken),
                ratio=statistics.median(
                    percentile(one, 0.99) / percentile(other, 0.99) for one, other in zip(taken, quiet, strict=True)
                ),
            )


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the files are made")
    parser.add_argument("--io", default="threads", help="ways to compare in one run: threads,nixl")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    for chunk_bytes in (256 << 10, 2 << 20, 8 << 20):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            asyncio.run(moves(Path(folder), chunk_bytes, given.rounds, given.io.split(",")))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        reserve(Path(folder), given.rounds)


if __name__ == "__main__":
    main()
