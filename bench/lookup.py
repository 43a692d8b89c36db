"""Looking keys up from another process, all checks included, against a bare numpy.take from the same memory.

A node process holds 1,000,000 chunks (the bench stores them through the node's own verbs). This process maps the
catalog by the session's hand-shake and looks up prefixes of 1 / 16 / 128 / 1,000 keys: `find` (first gather) and
`confirm` (second gather and generations). With take(k) = p50 of `numpy.take` of k random 64-byte rows of the same
mapping, the bound is 45 x take(1) + 6 x take(k); `ratio` = p50 / bound (1 or less is wanted).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np
from measure import ROUNDS, percentile, report
from servers import Node

import kvstore
from kvstore.client import Cache, Client
from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome

CHAIN = 1000
LAYOUT = kvstore.PageLayout(1, 4, 4, kvstore.Dtype.BF16, 1, 1)
WHOLE = kvstore.Namespace("bench", "lookup", LAYOUT)
CUT = kvstore.Namespace("bench", "lookup-cut", LAYOUT)
CALLS = 200


def store(cache: Cache, chains: int) -> list[Keys]:
    """Chains of 1,000 chunks, stored without payload bytes worth speaking of.

    A few keys in a million find both of their buckets full (entries never move); such a chain ends early and is not
    looked up.
    """
    pages = cache.empty(CHAIN)
    stored, refused = [], 0
    for number in range(chains):
        keys = cache.keys(np.arange(number * CHAIN, (number + 1) * CHAIN, dtype=np.int64))
        outcomes = cache.write(keys, pages, deadline_s=60).outcomes
        full = outcomes.count(Outcome.REFUSED_CATALOG_FULL)
        refused += full
        if all(outcome is Outcome.COMMITTED for outcome in outcomes):
            stored.append(keys)
        elif not full:
            raise SystemExit(f"chain {number} was not stored: {set(outcomes)}")
        if number % 100 == 99:
            print(f"  {(number + 1) * CHAIN} chunks stored, {refused} refused by a full catalog", file=sys.stderr)
    return stored


def rows_of(client: Client) -> np.ndarray:
    """The catalog's entries as u64 (n, 8)."""
    host = client.host()
    if host is None:
        raise SystemExit("no shared memory with the node")
    return host.reader.entry_rows


def measure(client: Client, cache: Cache, stored: list[Keys], count: int, shards: int, condition: str) -> None:
    """Alternate look-ups and bare takes, 7 rounds; each round gives a p50 of both."""
    host = client.host()
    assert host is not None
    rows, rng = rows_of(client), np.random.default_rng(count)
    p50s: list[tuple[float, float, float]] = []
    slowest: list[float] = []
    misses = 0
    for _ in range(ROUNDS):
        picked = [stored[int(i)].slice(0, count) for i in rng.integers(0, len(stored), CALLS)]
        times = []
        for keys in picked:
            began = time.perf_counter()
            found = host.reader.find(keys, cache.layout.whole)
            held = host.reader.confirm(found)
            times.append(time.perf_counter() - began)
            misses += held != count
        takes = {}
        for size in {1, count * shards}:
            indices = [rng.integers(0, len(rows), size) for _ in range(CALLS)]
            spent = []
            for index in indices:
                began = time.perf_counter()
                np.take(rows, index, axis=0)
                spent.append(time.perf_counter() - began)
            takes[size] = statistics.median(spent)
        p50s.append((statistics.median(times), takes[1], takes[count * shards]))
        slowest.append(percentile(times, 0.99))
    p50, one, many = (statistics.median(column) for column in zip(*p50s, strict=True))
    ratio = statistics.median(ours / (45 * first + 6 * rest) for ours, first, rest in p50s)
    report(
        bench="lookup",
        op="lookup",
        transport="shm",
        keys=count,
        shards_per_key=shards,
        condition=condition,
        against="numpy_take",
        p50_us=p50 * 1e6,
        p99_us=statistics.median(slowest) * 1e6,
        take_1_us=one * 1e6,
        take_k_us=many * 1e6,
        misses=misses,
        calls=ROUNDS * CALLS,
        ratio=ratio,
    )


def churn(address: str) -> None:
    """Keep the node evicting: write new chains until ended. Runs in a process of its own."""
    with kvstore.connect(address) as client:
        cache = client.bind(WHOLE, checksums=False)
        pages = cache.empty(CHAIN)
        number = 1 << 20
        while True:
            number += 1
            cache.write(cache.keys(np.arange(number * CHAIN, (number + 1) * CHAIN, dtype=np.int64) % (1 << 31)), pages)


def main() -> None:
    """Parse, start a node, fill it, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=1000, help="chains of 1,000 chunks")
    parser.add_argument("--churn", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.churn:
        churn(options.churn)
    chains = options.chains
    room = chains * CHAIN + CHAIN * 8
    with Node(dram=f"{(room * 2) * 4096}", slots=room) as node, kvstore.connect(node.control_address) as client:
        node.wait_populated(300)
        cache = client.bind(WHOLE, checksums=False)
        stored = store(cache, chains)
        for count in (1, 16, 128, 1000):
            measure(client, cache, stored, count, 1, "quiet")
        parts = kvstore.Geometry.parallel(LAYOUT, tp=4)
        for rank in range(4):
            part = client.bind(CUT, geometry=parts, rank=rank, checksums=False)
            some = store(part, 4)
        for count in (1, 16, 128, 1000):
            measure(client, part, some, count, 4, "quiet")
    with Node(dram=f"{room * 4096}", slots=room, more=("--room-chunks", str(chains * CHAIN))) as node:
        with kvstore.connect(node.control_address) as client:
            node.wait_populated(300)
            cache = client.bind(WHOLE, checksums=False)
            stored = store(cache, chains)
            churning = subprocess.Popen([sys.executable, __file__, "--churn", node.control_address])
            for count in (1, 16, 128, 1000):
                measure(client, cache, stored[-chains // 4 :], count, 1, "evicting")
            churning.terminate()
            churning.wait(10)


if __name__ == "__main__":
    main()
