from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvstore.analytics.offline import simulate
from kvstore.analytics.trace import Request, read_trace
from kvstore.errors import ConfigurationError, InvalidRequest


@cache
def trace(path: Path) -> list[Request]:
    return list(read_trace(path))


def request(*ids: int, length: int | None = None) -> Request:
    return Request(0, length or 512 * len(ids), 1, ids)


def test_hits_are_contiguous_from_the_head_and_counted_in_tokens() -> None:
    counts = simulate([request(1, 2, 3), request(1, 2, 4, length=1100), request(5, 2)])
    assert (counts.requests, counts.blocks, counts.hit_blocks) == (3, 8, 2)
    assert (counts.tokens, counts.hit_tokens) == (1536 + 1100 + 1024, 1024)
    assert counts.evictions == 0


def test_a_partial_block_counts_its_own_tokens() -> None:
    counts = simulate([request(1, 2, length=600), request(1, 2, length=600)])
    assert counts.hit_tokens == 600
    assert counts.token_ratio == 0.5


def test_room_is_made_from_the_tail_of_the_oldest_prompt() -> None:
    counts = simulate([request(1, 2, 3), request(4), request(1, 2, 3)], capacity_blocks=3)
    assert counts.hit_blocks == 2, "block 3 left, its parents stayed"
    assert counts.evictions == 2


def test_no_room_gives_no_hits() -> None:
    assert simulate([request(1), request(1)], capacity_blocks=0).hit_blocks == 0


def test_an_empty_trace_has_ratio_zero() -> None:
    assert simulate([]).block_ratio == simulate([]).token_ratio == 0.0


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidRequest, match="capacity_blocks"):
        simulate([], capacity_blocks=-1)
    with pytest.raises(ConfigurationError, match="unknown eviction policy"):
        simulate([], policy="oracle")


@pytest.mark.traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capacity_blocks", "ratio"),
    [
        ("conversation", 1000, 0.0445),
        ("conversation", 5859, 0.1361),
        ("conversation", 10_000, 0.2116),
        ("conversation", 30_000, 0.3257),
        ("conversation", None, 0.3664),
        ("synthetic", 1000, 0.0841),
        ("synthetic", 10_000, 0.4239),
        ("synthetic", None, 0.6396),
    ],
)
def test_published_figures(traces_folder: Path, name: str, capacity_blocks: int | None, ratio: float) -> None:
    counts = simulate(trace(traces_folder / f"{name}_trace.jsonl"), capacity_blocks=capacity_blocks)
    assert counts.block_ratio == pytest.approx(ratio, abs=0.00005)
    if capacity_blocks is None:
        tokens = {"conversation": 0.3736, "synthetic": 0.6512}[name]
        assert counts.token_ratio == pytest.approx(tokens, abs=0.00005)
        assert counts.evictions == 0


def test_policies_get_the_places_of_the_keys() -> None:
    """With two prompts used once each, GDSF gives up the shorter one although it is the younger."""
    requests = [request(*range(100)), request(*range(200, 210)), request(300), request(*range(100))]
    assert simulate(requests, capacity_blocks=110, policy="gdsf").hit_blocks == 100
    assert simulate(requests, capacity_blocks=110, policy="lru").hit_blocks == 99
