"""A live pool into and out of an engine's per-layer paged torch tensors, against memcpy of the whole chunks.

32 layers, 8 and 2 KV heads, head pages of 8 KiB, 4 pages a chunk, blocks at random places. A real node process;
`read` is Cache.read into the engine's pages (look-up, one copy, fence), `write` is Cache.write out of them
(Reserve, one copy, checksums where said, Commit). Both alternate with the memcpy; `ratio` is bytes per second over
those of the memcpy. `path`: numpy (`PagedKv`), or torch (`DevicePagedKv` on the device "cpu", which copies twice: by
way of its staging).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from local import private
from measure import ROUNDS, report
from servers import Node

import kvstore
from engine_adapter.copy import PagedKv
from engine_adapter.device_copy import DeviceCopier, DevicePagedKv
from kvstore.client import Cache, Client
from kvstore.client.values import synchronize
from kvstore.model.prefix import Keys

LAYERS, PAGES, HEAD_PAGE_BYTES = 32, 4, 8192


def timed_read(cache: Cache, keys: Keys, kv: PagedKv | DevicePagedKv) -> float:
    """Seconds of one whole read."""
    began = time.perf_counter()
    result = cache.read(keys, kv)
    took = time.perf_counter() - began
    if result.chunks != len(kv):
        sys.exit(f"read {result.chunks} of {len(kv)} chunks: {result.reason}")
    return took


def timed_write(cache: Cache, kv: PagedKv | DevicePagedKv, number: int) -> float:
    """Seconds of one whole write under fresh keys; they are removed again outside the time."""
    tokens = np.arange(len(kv) * cache.layout.chunk_tokens, dtype=np.int64) + number * 1_000_003
    keys = cache.keys(tokens)
    began = time.perf_counter()
    stored = cache.write(keys, kv).stored
    took = time.perf_counter() - began
    if stored != len(kv):
        sys.exit(f"only {stored} of {len(kv)} chunks were stored")
    cache.remove(keys.slice(0, 1))
    return took


def check(cache: Cache, keys: Keys, kv: PagedKv | DevicePagedKv, source: np.ndarray, target: np.ndarray) -> None:
    """End the bench if what is read into the engine is not what was stored."""
    timed_read(cache, keys, kv)
    for index in range(len(kv)):
        kv.gather(index, target[index], 0, 0)
    synchronize(kv)
    if not np.array_equal(source, target):
        sys.exit("what was read into the engine differs from what was stored")


def run(client: Client, heads: int, chunks: int) -> None:
    """One line a direction and checksum setting."""
    layout = kvstore.PageLayout(LAYERS, heads, 128, kvstore.Dtype.BF16, 16, PAGES)
    caches = {
        checksums: client.bind(kvstore.Namespace("bench", f"engine-{heads}-{checksums}", layout), checksums=checksums)
        for checksums in (False, True)
    }
    shape = (chunks, *layout.shape(layout.whole))
    source, target = private(shape), private(shape)
    rng = np.random.default_rng(heads)
    source[:] = rng.integers(0, 256, source.shape[1:], dtype=np.uint8)
    source[..., 0] = np.arange(chunks)[:, None, None, None]  # no two chunks are equal
    blocks = rng.permutation(chunks * PAGES).reshape(chunks, PAGES).tolist()
    # (blocks, heads, tokens, K || V): 16 tokens of 2 x 128 elements are a head page of 8 KiB.
    tensors = [torch.zeros((chunks * PAGES, heads, 16, 256), dtype=torch.bfloat16) for _ in range(LAYERS)]
    copier = DeviceCopier("cpu")
    paths: dict[str, PagedKv | DevicePagedKv] = {
        "numpy": PagedKv(tensors, PAGES, blocks),
        "torch": DevicePagedKv(tensors, PAGES, blocks, copier=copier),
    }
    plain = caches[False]
    keys = plain.keys(np.arange(chunks * layout.chunk_tokens))
    plain.write(keys, source)
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS + 1):
        took = {}
        began = time.perf_counter()
        for index in range(chunks):
            np.copyto(target[index], source[index])
        took["memcpy", ""] = time.perf_counter() - began
        for place, (path, kv) in enumerate(paths.items()):
            took["read", path] = timed_read(plain, keys, kv)
            took["write", path] = timed_write(plain, kv, 4 * number + 2 * place + 1)
            took["write checked", path] = timed_write(caches[True], kv, 4 * number + 2 * place + 2)
        if number:
            for name, value in took.items():
                seconds.setdefault(name, []).append(value)
    for kv in paths.values():
        for tensor in tensors:
            tensor.zero_()
        check(plain, keys, kv, source, target)
    base = seconds.pop(("memcpy", ""))
    for (op, path), taken in seconds.items():
        report(
            bench="engine_copy",
            op=op.split()[0],
            path=path,
            transport="shm",
            chunk_bytes=layout.chunk_bytes,
            count=ROUNDS,
            keys=chunks,
            kv_heads=heads,
            shards_per_key=1,
            checksum=op.endswith("checked"),
            against="memcpy_pieces",
            condition="warm",
            bytes_per_second=source.size / statistics.median(taken),
            against_bytes_per_second=source.size / statistics.median(base),
            ratio=statistics.median(one / other for one, other in zip(base, taken, strict=True)),
            torch=version("torch"),
        )
    plain.remove(keys.slice(0, 1))


def main() -> None:
    """Run both widths against one node."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=64)
    chunks = parser.parse_args().chunks
    torch.set_num_threads(1)
    with Node(dram=f"{chunks * 8 * 5}MiB", slots=4096) as node, kvstore.connect(node.control_address) as client:
        node.wait_populated()
        for heads in (8, 2):
            run(client, heads, chunks)


if __name__ == "__main__":
    main()
