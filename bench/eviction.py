"""Hits of every eviction policy on the published traces, computed; beside them libcachesim's policy of that name.

    python bench/eviction.py [--traces FOLDER]

One JSON line a measurement on stdout.

`op: one_tier`: a node with DRAM for 1,000 / 5,859 / 10,000 / 30,000 chunks. `ratio` = hits / hits of libcachesim's
policy, which is fed a prompt's blocks head first and knows no chains; `hit_ratio` counts what leads the prompt without
a gap, for both. `published` = the LRU figure that comes with the traces. `cost_ratio` = share of the prefill's cost
that the hits save, where a deep chunk costs more: GDSF's measure.

`op: two_tiers` (conversation): DRAM for 5,000 chunks and an SSD for 25,000, by admission.

The traces lie in the folder that KVSTORE_TRACES names, else in ../shared/traces beside the repository.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import libcachesim
from measure import report

from kvstore.analytics.offline import HitCounts, simulate
from kvstore.analytics.offline_tiers import ADMISSIONS, SimulatedNode
from kvstore.analytics.trace import Request, read_trace
from kvstore.node.eviction import policy_names
from kvstore.node.eviction.gdsf import recompute_cost

CAPACITIES = (1000, 5859, 10_000, 30_000)
DRAM_CHUNKS, SSD_CHUNKS = 5000, 25_000
TWO_TIERS_TRACE = "conversation"
PEERS = {"lru": "LRU", "s3fifo": "S3FIFO", "sieve": "Sieve", "arc": "ARC", "gdsf": "GDSF"}
PUBLISHED = {
    "conversation": {
        "lru": dict(zip(CAPACITIES, (0.0445, 0.1361, 0.2116, 0.3257), strict=True)),
        "belady": dict(zip(CAPACITIES, (0.191, 0.350, 0.366, 0.366), strict=True)),
    },
    "synthetic": {
        "lru": dict(zip(CAPACITIES, (0.0841, 0.3094, 0.4239, 0.6242), strict=True)),
        "belady": dict(zip(CAPACITIES, (0.277, 0.546, 0.618, 0.640), strict=True)),
    },
}


def our_hits(requests: Sequence[Request], policy: str, capacity: int) -> tuple[HitCounts, float]:
    """Hits of one node, and the share of all recompute cost that they save."""
    node, counts = SimulatedNode(policy, capacity), HitCounts()
    saved = total = 0.0
    for request in requests:
        found = node.serve([number.to_bytes(8, "little") for number in request.hash_ids], request.block_tokens)
        counts.add(request, found.blocks)
        costs = [recompute_cost(index * request.block_tokens) for index in range(len(request.hash_ids))]
        saved += sum(costs[: found.blocks])
        total += sum(costs)
    return counts, saved / total


def peer_hit_ratio(requests: Sequence[Request], policy: str, capacity: int) -> float:
    """The same count over libcachesim's policy: blocks that lead a prompt without a gap, over all blocks."""
    cache = getattr(libcachesim, PEERS[policy])(cache_size=capacity)
    asked = libcachesim.Request()
    asked.obj_size = 1
    hits = blocks = 0
    for request in requests:
        leading = True
        for number in request.hash_ids:
            asked.obj_id = number
            leading = cache.get(asked) and leading
            hits += leading
        blocks += len(request.hash_ids)
    return hits / blocks


def one_tier(trace: str, requests: Sequence[Request]) -> None:
    """Every policy at every capacity."""
    for capacity in CAPACITIES:
        for policy in policy_names():
            began = time.perf_counter()
            counts, cost_ratio = our_hits(requests, policy, capacity)
            seconds = time.perf_counter() - began
            peer = peer_hit_ratio(requests, policy, capacity)
            report(
                bench="eviction",
                op="one_tier",
                trace=trace,
                policy=policy,
                dram_chunks=capacity,
                count=counts.blocks,
                hit_ratio=round(counts.block_ratio, 4),
                token_ratio=round(counts.token_ratio, 4),
                cost_ratio=round(cost_ratio, 4),
                published=PUBLISHED[trace].get(policy, {}).get(capacity),
                belady=PUBLISHED[trace]["belady"][capacity],
                against=f"peer:libcachesim {version('libcachesim')}",
                peer_hit_ratio=round(peer, 4),
                ratio=round(counts.block_ratio / peer, 3),
                condition="cold",
                us_per_chunk=round(1e6 * seconds / counts.blocks, 2),
            )


def two_tiers(trace: str, requests: Sequence[Request]) -> None:
    """DRAM and SSD, by policy and admission."""
    for policy in policy_names():
        for admission in ADMISSIONS:
            counts = simulate(
                requests, capacity_blocks=DRAM_CHUNKS, ssd_blocks=SSD_CHUNKS, policy=policy, admission=admission
            )
            report(
                bench="eviction",
                op="two_tiers",
                trace=trace,
                policy=policy,
                dram_chunks=DRAM_CHUNKS,
                ssd_chunks=SSD_CHUNKS,
                admission=admission,
                count=counts.blocks,
                hit_ratio=round(counts.block_ratio, 4),
                token_ratio=round(counts.token_ratio, 4),
                dram_hit_ratio=round(counts.dram_hit_blocks / counts.blocks, 4),
                ssd_chunks_written=counts.ssd_blocks_written,
                evicted_chunks=counts.evictions,
                lost_chunks=counts.lost_blocks,
                condition="cold",
            )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(__file__).resolve().parents[1] / "../shared/traces"
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("KVSTORE_TRACES") or beside))
    folder = parser.parse_args().traces
    if not folder.is_dir():
        print(f"no traces in {folder}; name their folder by --traces or KVSTORE_TRACES", file=sys.stderr)
        return 1
    for trace in PUBLISHED:
        requests = list(read_trace(folder / f"{trace}_trace.jsonl"))
        print(f"{trace}: {len(requests)} requests", file=sys.stderr)
        one_tier(trace, requests)
        if trace == TWO_TIERS_TRACE:
            two_tiers(trace, requests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
