"""KV between an engine's blocks on a device and the pool, against bare copies of as many bytes in the same run.

`gather` and `scatter`: blocks of all layers into dense memory of the device and back, by torch and by the kernel,
against one copy within the device. `store` and `load`: Cache.write and Cache.read of a real node on this host, from and
into the device, with the node's memory registered and not, against one copy of a pinned tensor. `through_pool`: from
one engine's blocks to another's on the same device, by way of the pool, against one copy within the device.

    python bench/gpu_copy.py                    a CUDA device; ends with status 3 where there is none
    python bench/gpu_copy.py --device cpu       a trial of the bench itself
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from devices import LAYERS, LAYOUT, EngineKv, facts, parsed, wait
from measure import alternated, ratio, report
from servers import Node

import kvstore
from engine_adapter.device_copy import DeviceCopier
from engine_adapter.kernels import KernelMover
from engine_adapter.movers import Mover, Part, TorchMover
from engine_adapter.pinned import pin_host
from kvstore.client import Cache, Client
from kvstore.model.prefix import Keys

DENSE_CHUNKS = 8


def waited(device: torch.device, work: Callable[[], object]) -> Callable[[], None]:
    """The work, until the device has done it."""

    def run() -> None:
        work()
        wait(device)

    return run


def tell(took: dict[str, list[float]], ours: str, against: str, total_bytes: int, **fields: Any) -> None:
    """One line."""
    report(
        bench="gpu_copy",
        chunk_bytes=LAYOUT.chunk_bytes,
        count=len(took[ours]),
        against=against,
        bytes_per_second=total_bytes / statistics.median(took[ours]),
        against_bytes_per_second=total_bytes / statistics.median(took[against]),
        ratio=ratio(took[ours], took[against]),
        **fields,
    )


def kernels(device: torch.device, chunks: int, rounds: int) -> None:
    """Gather and scatter within the device."""
    chunks = min(chunks, DENSE_CHUNKS)
    engine = EngineKv(device, chunks, seed=1)
    engine.fill(1)
    size = LAYOUT.chunk_bytes
    parts = [Part(engine.block_ids[i], 0, LAYERS, 0, LAYOUT.kv_heads, i * size, size) for i in range(chunks)]
    dense, other = (torch.empty(chunks * size, dtype=torch.uint8, device=device) for _ in range(2))
    movers: dict[str, Mover] = {"torch": TorchMover()}
    if KernelMover.available(device):
        movers["kernel"] = KernelMover()
    for op in ("gather", "scatter"):
        ways = {"device_copy": waited(device, functools.partial(other.copy_, dense))}
        for name, mover in movers.items():
            move = mover.to_dense if op == "gather" else mover.to_blocks
            ways[name] = waited(device, functools.partial(move, dense, engine.blocks, parts))
        took = alternated(ways, rounds)
        for name in movers:
            common = {"keys": chunks, "transport": name, "checksum": False, "condition": "warm", **facts(device)}
            tell(took, name, "device_copy", chunks * size, op=op, **common)


class Pool:
    """One engine's writes and another's reads, on one device, through the node of this host."""

    def __init__(self, client: Client, device: torch.device, chunks: int) -> None:
        self.device, self.chunks = device, chunks
        self.copier = DeviceCopier(device)
        self.writer, self.reader = EngineKv(device, chunks, seed=1), EngineKv(device, chunks, seed=2)
        self.writer.fill(1)
        self.caches = {
            checksums: client.bind(kvstore.Namespace("bench", f"gpu-{checksums}", LAYOUT), checksums=checksums)
            for checksums in (False, True)
        }
        self._fresh = itertools.count(1)
        self.kept = self.keys(self.caches[False])
        self._stored(self.caches[False], self.kept)

    def keys(self, cache: Cache) -> Keys:
        """Keys that were never used before."""
        base = next(self._fresh) * 1_000_003
        return cache.keys(np.arange(base, base + self.chunks * LAYOUT.chunk_tokens))

    def _stored(self, cache: Cache, keys: Keys) -> None:
        stored = cache.write(keys, self.writer.kv(self.copier)).stored
        if stored != self.chunks:
            sys.exit(f"only {stored} of {self.chunks} chunks were stored; give the node more memory")

    def _loaded(self, cache: Cache, keys: Keys) -> None:
        result = cache.read(keys, self.reader.kv(self.copier))
        if result.chunks != self.chunks:
            sys.exit(f"read {result.chunks} of {self.chunks} chunks: {result.reason}")

    def store(self, checksums: bool) -> None:
        """Blocks into the pool. What was stored is removed, which costs little beside it."""
        cache = self.caches[checksums]
        keys = self.keys(cache)
        self._stored(cache, keys)
        cache.remove(keys.slice(0, 1))

    def load(self) -> None:
        """Out of the pool into blocks."""
        self._loaded(self.caches[False], self.kept)

    def through(self) -> None:
        """From one engine's blocks into another's."""
        cache = self.caches[False]
        keys = self.keys(cache)
        self._stored(cache, keys)
        self._loaded(cache, keys)
        cache.remove(keys.slice(0, 1))

    def check(self) -> None:
        """End the bench if what was loaded is not what was stored."""
        for tensor in self.reader.tensors:
            tensor.zero_()
        wait(self.device)
        self.through()
        wait(self.device)
        if not self.reader.holds_what(self.writer):
            sys.exit("wrong bytes")


def pool(client: Client, device: torch.device, chunks: int, rounds: int, conditions: list[str]) -> None:
    """Store, load and through, first over memory that is not registered."""
    work = Pool(client, device, chunks)
    total = chunks * LAYOUT.chunk_bytes
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat = torch.empty(total, dtype=torch.uint8, device=device)
    other = torch.empty_like(flat)
    ways: dict[str, Callable[[], object]] = {
        "store": functools.partial(work.store, False),
        "store checked": functools.partial(work.store, True),
        "load": work.load,
        "through_pool": work.through,
        "to_host": lambda: host.copy_(flat, non_blocking=True),
        "to_device": lambda: flat.copy_(host, non_blocking=True),
        "device_copy": lambda: other.copy_(flat),
    }
    for condition in conditions:
        session = client.host()
        if condition == "registered" and session is not None:
            pin_host(session, [work.copier], deadline_s=60.0)
        work.check()
        took = alternated({name: waited(device, way) for name, way in ways.items()}, rounds)
        for name, against in (
            ("store", "to_host"),
            ("store checked", "to_host"),
            ("load", "to_device"),
            ("through_pool", "device_copy"),
        ):
            op, _, checked = name.partition(" ")
            common = {"keys": chunks, "transport": "shm", "checksum": bool(checked), "shards_per_key": 1}
            tell(took, name, against, total, op=op, condition=condition, **common, **facts(device))


def main() -> None:
    """Measure kernels, then the pool."""
    given = parsed(__doc__, chunks=32)
    torch.set_num_threads(1)
    kernels(given.device, given.chunks, given.rounds)
    mib = given.chunks * (LAYOUT.chunk_bytes >> 20)
    with (
        Node(dram=f"{3 * mib + 64}MiB", slots=4096) as node,
        kvstore.connect(node.control_address, transport="shm") as client,
    ):
        node.wait_populated()
        conditions = ["pageable", "registered"] if given.device.type == "cuda" else ["pageable"]
        pool(client, given.device, given.chunks, given.rounds, conditions)


if __name__ == "__main__":
    main()
