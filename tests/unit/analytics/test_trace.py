from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore.analytics.trace import LINE_LIMIT_BYTES, Request, block_tokens, read_trace
from kvstore.errors import InvalidRequest


def line(**changes: object) -> str:
    fields: dict[str, object] = {"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}
    return json.dumps({key: value for key, value in (fields | changes).items() if value is not None})


def test_reads_requests_in_order_and_skips_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + "\n\n" + line(timestamp=4, input_length=512, hash_ids=[7]) + "\n")
    first, second = read_trace(path)
    assert first == Request(3, 700, 5, (0, 9))
    assert second == Request(4, 512, 5, (7,))
    assert list(read_trace(path, limit=1)) == [first]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        (line(hash_ids=[]), "hash_ids"),
        (line(hash_ids=[0, 1.5]), "hash_ids"),
        (line(hash_ids=[0, -1]), "hash_ids"),
        (line(hash_ids=[0, 1, 2]), "700 tokens are 2 blocks"),
        (line(input_length=0, hash_ids=[1]), "input_length"),
        (line(input_length=True), "integers"),
        (line(timestamp=None), "integers"),
        (line(output_length=-1), "output_length"),
        ("x" * (LINE_LIMIT_BYTES + 5), "longer than"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + "\n" + text + "\n")
    with pytest.raises(InvalidRequest, match=r"trace\.jsonl:2: .*" + complaint):
        list(read_trace(path))


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        list(read_trace(tmp_path / "absent"))


def test_equal_ids_give_equal_tokens_and_other_ids_differ() -> None:
    left = Request(0, 700, 1, (0, 9)).tokens(1000)
    right = Request(0, 1024, 1, (0, 9)).tokens(1000)
    other = Request(0, 1024, 1, (0, 10)).tokens(1000)
    assert len(left) == 700
    assert np.array_equal(left, right[:700]), "a partial last block is the beginning of the full one"
    assert np.array_equal(right[:512], other[:512])
    assert not np.array_equal(right[512:], other[512:])
    assert left.max() < 1000


def test_many_ids_give_distinct_blocks() -> None:
    blocks = block_tokens(tuple(range(5000)), 16, 512)
    assert len({row.tobytes() for row in blocks}) == 5000


def test_tokens_are_the_same_in_every_process() -> None:
    assert block_tokens((0, 182789), 3, 1 << 32).tolist() == [
        [2065550767, 2713282036, 2148091215],
        [2097150727, 1636012622, 4215531328],
    ]


@pytest.mark.parametrize(("length", "shrunk_length"), [(512, 16), (513, 17), (1023, 32), (1024, 32), (1, 1)])
def test_shrinking_keeps_the_blocks(length: int, shrunk_length: int) -> None:
    request = Request(1, length, 33, tuple(range(-(-length // 512))))
    small = request.shrunk(32)
    assert (small.input_length, small.output_length, small.block_tokens) == (shrunk_length, 2, 16)
    assert small.hash_ids == request.hash_ids
    assert len(small.tokens(100)) == shrunk_length


def test_a_scale_that_does_not_divide_the_block_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="scale 3"):
        Request(0, 1, 1, (0,)).shrunk(3)
