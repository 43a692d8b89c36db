"""`kvstore replay` through live processes, against the offline simulation and the published figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.analytics.offline import simulate
from kvstore.analytics.trace import read_trace

SCRIPT = Path(sys.executable).parent / "kvstore"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.traces,
    pytest.mark.skipif(not SCRIPT.is_file(), reason="the package is not installed"),
]


def replay(trace: Path, *options: str) -> dict[str, Any]:
    command = [SCRIPT, "replay", trace, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_two_nodes_hit_what_one_boundless_cache_would(traces_folder: Path) -> None:
    figures = replay(traces_folder / "conversation_trace.jsonl", "--nodes", "2", "--requests", "400")
    expected = simulate(read_trace(traces_folder / "conversation_trace.jsonl", limit=400))
    assert figures["wrong_bytes"] == 0
    assert figures["hit_chunk_ratio"] == round(expected.block_ratio, 4)
    assert figures["hit_token_ratio"] == round(expected.token_ratio, 4)
    assert figures["local_hits"] > 0
    assert figures["remote_hits"] > 0
    assert figures["local_hits"] + figures["remote_hits"] == expected.hit_blocks
    assert sum(figures["misses"].values()) == expected.blocks - expected.hit_blocks
    assert figures["refused"] == {}


def test_three_nodes_share_a_trace_of_many_beginnings(traces_folder: Path) -> None:
    figures = replay(traces_folder / "synthetic_trace.jsonl", "--nodes", "3", "--requests", "300")
    expected = simulate(read_trace(traces_folder / "synthetic_trace.jsonl", limit=300))
    assert figures["wrong_bytes"] == 0
    assert figures["hit_chunk_ratio"] == round(expected.block_ratio, 4)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "sieve", "arc"])
def test_little_room_evicts_as_the_simulation_does(traces_folder: Path, policy: str) -> None:
    options = ("--room-chunks", "2000", "--requests", "600", "--eviction", policy)
    figures = replay(traces_folder / "synthetic_trace.jsonl", *options)
    assert figures["wrong_bytes"] == 0
    assert figures["evictions"] > 0
    computed = replay(traces_folder / "synthetic_trace.jsonl", *options, "--offline")
    assert computed["hit_chunk_ratio"] == figures["offline_hit_chunk_ratio"]
    assert figures["hit_chunk_ratio"] == pytest.approx(computed["hit_chunk_ratio"], abs=0.005)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "gdsf"])
def test_two_tiers_hit_what_the_simulation_does(traces_folder: Path, policy: str) -> None:
    """Sharp: how often a read counts as a use, when room is made, and what is saved in which order all show here."""
    options = ("--room-chunks", "300", "--ssd-chunks", "1500", "--requests", "300", "--eviction", policy)
    figures = replay(traces_folder / "synthetic_trace.jsonl", *options, "--tolerance", "0.005")
    computed = replay(traces_folder / "synthetic_trace.jsonl", *options, "--offline")
    assert figures["wrong_bytes"] == figures["saves_given_up"] == 0
    assert figures["ssd_hits"] > 0 and figures["evictions"] > 0
    assert figures["offline_hit_chunk_ratio"] == computed["hit_chunk_ratio"]
    for name in ("dram_hits", "ssd_hits", "ssd_chunks_written"):
        assert figures[name] == pytest.approx(computed[name], abs=0.005 * figures["chunks"]), name


def test_the_whole_synthetic_trace_gives_the_published_figures(traces_folder: Path) -> None:
    figures = replay(traces_folder / "synthetic_trace.jsonl", "--nodes", "2")
    assert figures["wrong_bytes"] == 0
    assert (figures["hit_chunk_ratio"], figures["hit_token_ratio"]) == (0.6396, 0.6512)


def test_a_missing_trace_is_one_line() -> None:
    done = subprocess.run([SCRIPT, "replay", "absent.jsonl"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: cannot read the trace absent.jsonl: No such file or directory\n"
