"""Same-host read and write of 2 MiB chunks through shared memory, against memcpy of the same pieces.

256 chunks (32 layers x 4 pages x 2 KV heads x 8 KiB head pages, one checksum a layer and head) in random order,
from a live node process, into page-aligned private memory. `memcpy_pieces`: the same 2 MiB pieces, in the same
order, between two private 4 KiB-page mappings. `memcpy_block`: one copy of the whole.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import statistics
import time

import numpy as np
from measure import ROUNDS, alternated, ratio, report
from servers import Node

import kvstore
from kvstore.client import Cache, Client
from kvstore.model.prefix import Keys


def private(shape: tuple[int, ...]) -> np.ndarray:
    """Page-aligned private memory with 4 KiB pages, touched."""
    size = int(np.prod(shape))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8).reshape(shape)
    array[:] = 1
    return array


def bind(client: Client, head_page_bytes: int, pages: int, *, checksums: bool, revision: str) -> Cache:
    """A namespace with the wanted head pages: K and V of 16 tokens in bf16."""
    head_dim = head_page_bytes // (16 * 2 * 2)
    layout = kvstore.PageLayout(32, 2, head_dim, kvstore.Dtype.BF16, 16, pages)
    return client.bind(kvstore.Namespace("bench", revision, layout), checksums=checksums)


class Destination:
    """Scatters chunk i of the keys to the piece that the random order names."""

    scatters_at_once = gathers_at_once = True

    def __init__(self, pieces: np.ndarray, order: list[int]) -> None:
        self._pieces, self._order = pieces, order

    def scatter(self, index: int, piece: np.ndarray, layer_start: int, head_start: int) -> None:
        self._pieces[self._order[index]][...] = piece

    def gather(self, index: int, slot: np.ndarray, layer_start: int, head_start: int) -> None:
        slot[...] = self._pieces[self._order[index]][layer_start : layer_start + len(slot)]


class Workload:
    """Chunks in random order, stored with and without checksums, beside the same pieces in private memory."""

    def __init__(self, client: Client, count: int, head_page_bytes: int, pages: int) -> None:
        rng = np.random.default_rng(7)
        self.plain = bind(client, head_page_bytes, pages, checksums=False, revision=f"plain-{head_page_bytes}")
        self.checked = bind(client, head_page_bytes, pages, checksums=True, revision=f"checked-{head_page_bytes}")
        shape = (count, *self.plain.layout.shape(self.plain.rectangle))
        self.count = count
        self.source, self.target = private(shape), private(shape)
        rng.random(out=self.source.reshape(-1).view(np.float64))
        self.order, self.far = rng.permutation(count).tolist(), rng.permutation(count).tolist()
        self.endpoint = Destination(self.source, self.order)
        self.landing = Destination(self.target, self.far)
        self.seconds: dict[Cache, list[float]] = {self.plain: [], self.checked: []}
        self._fresh = iter(range(1 << 30))
        self.stored = self.keys_of(self.plain)
        self.plain.write(self.stored, self.endpoint)

    def keys_of(self, owner: Cache) -> Keys:
        """Keys that were never used before."""
        base = next(self._fresh) * 1_000_003
        return owner.keys(np.arange(base, base + self.count * owner.layout.chunk_tokens, dtype=np.int64) % (1 << 31))

    def read(self) -> None:
        result = self.plain.read(self.stored, self.landing)
        if result.chunks != self.count:
            raise SystemExit(f"read {result.chunks} of {self.count} chunks: {result.reason}")

    def write(self, owner: Cache) -> None:
        """One write under fresh keys; `seconds` gets the time without the removal behind it."""
        keys = self.keys_of(owner)
        began = time.perf_counter()
        stored = owner.write(keys, self.endpoint).stored
        self.seconds[owner].append(time.perf_counter() - began)
        if stored != self.count:
            raise SystemExit(f"only {stored} of {self.count} chunks were stored; give the node more memory")
        owner.remove(keys.slice(0, 1))

    def pieces(self) -> None:
        for to, of in zip(self.far, self.order, strict=True):
            self.target[to][...] = self.source[of]

    def block(self) -> None:
        self.target[...] = self.source

    def check(self) -> None:
        """End the bench if the last read delivered anything else than what was written."""
        self.read()
        if not all(np.array_equal(self.target[self.far[i]], self.source[self.order[i]]) for i in range(self.count)):
            raise SystemExit("wrong bytes")


def run(client: Client, count: int, head_page_bytes: int, pages: int, condition: str) -> None:
    """Read and write, with and without checksums."""
    work = Workload(client, count, head_page_bytes, pages)
    work.check()
    chunk_bytes = work.plain.layout.chunk_bytes
    total = count * chunk_bytes
    common = {
        "bench": "local",
        "transport": "shm",
        "chunk_bytes": chunk_bytes,
        "count": count,
        "head_page_bytes": head_page_bytes,
        "condition": condition,
    }
    took = alternated({"read": work.read, "memcpy_pieces": work.pieces, "memcpy_block": work.block})
    for against in ("memcpy_pieces", "memcpy_block"):
        report(
            **common,
            op="read",
            checksum=False,
            against=against,
            bytes_per_second=total / statistics.median(took["read"]),
            against_bytes_per_second=total / statistics.median(took[against]),
            ratio=ratio(took["read"], took[against]),
        )
    work.plain.remove(work.stored.slice(0, 1))
    owners = {"plain": work.plain, "checked": work.checked}
    writes = {name: functools.partial(work.write, owner) for name, owner in owners.items()}
    took = alternated({**writes, "memcpy_pieces": work.pieces})
    for name, owner in owners.items():
        ours = work.seconds[owner][-ROUNDS:]
        report(
            **common,
            op="write",
            checksum=name == "checked",
            against="memcpy_pieces",
            bytes_per_second=total / statistics.median(ours),
            ratio=ratio(ours, took["memcpy_pieces"]),
        )


def cold(client: Client, count: int) -> None:
    """The first write into slots that no process has mapped yet, and the first read by this process."""
    cache = bind(client, 8192, 4, checksums=False, revision="cold")
    shape = (count, *cache.layout.shape(cache.rectangle))
    source, target = private(shape), private(shape)
    keys = cache.keys(np.arange(count * cache.layout.chunk_tokens))
    began = time.perf_counter()
    cache.write(keys, source)
    middle = time.perf_counter()
    cache.read(keys, target)
    took = middle - began, time.perf_counter() - middle
    began = time.perf_counter()
    for index in range(count):
        target[index][...] = source[index]
    memcpy = time.perf_counter() - began
    for op, seconds in zip(("write", "read"), took, strict=True):
        report(
            bench="local",
            op=op,
            transport="shm",
            chunk_bytes=cache.layout.chunk_bytes,
            count=count,
            checksum=False,
            condition="cold",
            against="memcpy_pieces",
            bytes_per_second=count * cache.layout.chunk_bytes / seconds,
            ratio=memcpy / seconds,
        )
    cache.remove(keys.slice(0, 1))


def main() -> None:
    """Parse, start a node, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=256)
    count = parser.parse_args().count
    with Node(dram=f"{count * 5}MiB", slots=4096) as node, kvstore.connect(node.control_address) as client:
        node.wait_populated()
        with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled") as setting:
            report(bench="local", op="setting", shmem_enabled=setting.read().strip())
        cold(client, min(64, count))
        run(client, count, 8192, 4, "warm")
        run(client, count, 2048, 4 * 4, "warm")


if __name__ == "__main__":
    main()
