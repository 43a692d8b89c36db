"""`kvstore replay` before and without its nodes: what it would start, and the computation beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.analytics.trace import Request
from kvstore.cli import main
from kvstore.cli.replay import SPARE_BYTES, _check_distance, _node_figures, _Plan
from kvstore.errors import KvStoreError
from kvstore.node.slots import ssd_file_bytes

SLOT = 8192
ROUNDS = [(1, 2), (3, 4), (5,), (1, 2), (3, 4)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)} for ids in ROUNDS
    ]
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plan(**changes: Any) -> _Plan:
    fields = {"node_count": 1, "room_chunks": 0, "eviction": "lru", "ssd_chunks": 0, "ssd_admission": "always"}
    return _Plan([Request(0, 512 * len(ids), 1, ids) for ids in ROUNDS], **(fields | changes))


def option(options: list[str], name: str) -> str:
    return options[options.index(name) + 1]


def test_a_node_gets_memory_for_every_distinct_chunk() -> None:
    options = plan().node_options(SLOT, Path("x.ssd"))
    assert option(options, "--dram") == str(5 * SLOT + SPARE_BYTES)
    assert option(options, "--eviction") == "lru"
    assert "--room-chunks" not in options and "--ssd" not in options


def test_a_node_gets_an_ssd_file_of_its_own() -> None:
    options = plan(room_chunks=2, ssd_chunks=4, ssd_admission="second_touch").node_options(SLOT, Path("/x/node-0.ssd"))
    assert option(options, "--ssd") == f"/x/node-0.ssd:{ssd_file_bytes(4, SLOT)}"
    assert option(options, "--ssd-admission") == "second_touch"
    assert int(option(options, "--slots")) == 2 + 4 + SPARE_BYTES // SLOT


def test_only_like_is_compared_with_like() -> None:
    assert plan(room_chunks=2).is_comparable
    assert plan(node_count=3).is_comparable
    assert not plan(node_count=3, room_chunks=2).is_comparable


def test_a_pool_that_hits_something_else_than_computed_fails() -> None:
    result = {"hit_chunk_ratio": 0.31, "offline_hit_chunk_ratio": 0.3}
    _check_distance(result, 0.011)
    _check_distance({"hit_chunk_ratio": 0.31}, 0.0)
    with pytest.raises(KvStoreError, match=r"hit ratio 0\.31, but 0\.3 was computed"):
        _check_distance(result, 0.005)


def test_figures_of_the_nodes_are_summed_under_the_names_of_the_computation() -> None:
    figures = _node_figures([{"evictions": 2, "saves": 3, "chunks": 9}, {"evictions": 1}])
    assert figures == {"evictions": 3, "ssd_chunks_written": 3}


def test_the_computation_alone_shows_hits_by_tier(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--offline", "--room-chunks", "4", "--ssd-chunks", "8", "--eviction", "lru", "--json"]
    with pytest.raises(SystemExit) as caught:
        main(["replay", str(trace), *options])
    assert caught.value.code == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == {
        "requests": 5,
        "chunks": 9,
        "tokens": 9 * 512,
        "hit_chunk_ratio": round(4 / 9, 4),
        "hit_token_ratio": round(4 / 9, 4),
        "dram_hits": 2,
        "ssd_hits": 2,
        "evictions": 0,
        "lost_chunks": 0,
        "ssd_chunks_written": 5,
    }


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (["--eviction", "oldest"], 2, "unknown eviction policy 'oldest'; known: arc, gdsf, lru, s3fifo, sieve"),
        (["--ssd-admission", "never"], 1, "unknown admission 'never'; known: always, second_touch"),
    ],
)
def test_an_unknown_name_is_one_line_before_anything_starts(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, complaint: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", str(trace), *options])
    assert caught.value.code == code
    assert capsys.readouterr().err == f"error: {complaint}\n"
