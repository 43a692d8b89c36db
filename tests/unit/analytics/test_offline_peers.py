"""Every policy against libcachesim's policy of that name, on the published conversation trace."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from kvstore.analytics.offline import simulate
from kvstore.analytics.trace import Request, read_trace
from kvstore.node.eviction import gdsf, policy_names

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
pytestmark = [pytest.mark.traces, pytest.mark.slow]

PEERS = {"lru": "LRU", "s3fifo": "S3FIFO", "sieve": "Sieve", "arc": "ARC", "gdsf": "GDSF"}
DISTANCES = {"lru": 0.001, "s3fifo": 0.02, "sieve": 0.001, "arc": 0.001, "gdsf": 0.002}
"""Prefix-hit ratio, ours from theirs. Ours know chains, theirs do not; S3-FIFO fills its queues otherwise, which tells
most at the beginning of a trace."""
REQUESTS = 4000


@cache
def trace(folder: Path) -> list[Request]:
    return list(read_trace(folder / "conversation_trace.jsonl", limit=REQUESTS))


def peer_ratio(requests: list[Request], policy: str, capacity: int) -> float:
    peer = getattr(libcachesim, PEERS[policy])(cache_size=capacity)
    asked = libcachesim.Request()
    asked.obj_size = 1
    hits = blocks = 0
    for request in requests:
        leading = True
        for number in request.hash_ids:
            asked.obj_id = number
            leading = peer.get(asked) and leading
            hits += leading
        blocks += len(request.hash_ids)
    return hits / blocks


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("capacity", [1000, 10_000])
def test_hits_are_those_of_libcachesim(
    traces_folder: Path, policy: str, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # libcachesim's GDSF takes every key for as costly as any other.
    monkeypatch.setattr(gdsf, "ATTENTION_EQUAL_TOKENS", math.inf)
    requests = trace(traces_folder)
    ours = simulate(requests, capacity_blocks=capacity, policy=policy).block_ratio
    assert ours == pytest.approx(peer_ratio(requests, policy, capacity), abs=DISTANCES[policy])


def test_recompute_cost_trades_some_hits_of_gdsf_for_deep_ones(traces_folder: Path) -> None:
    requests = trace(traces_folder)
    ours = simulate(requests, capacity_blocks=10_000, policy="gdsf").block_ratio
    assert ours == pytest.approx(peer_ratio(requests, "gdsf", 10_000), abs=0.021)
