"""Keys: golden vectors, chunk ends, kinds of tokens, slices. Who may share what: test_key_isolation.py."""

from __future__ import annotations

import array
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Extra, ExtraKind, KeyChain, Keys

GOLDEN_FOLDER = Path(__file__).parents[2] / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "keys.json").read_text())
CHUNK = 16
NAMESPACE = Namespace(
    "m", "r", PageLayout(layers=2, kv_heads=2, head_dim=8, dtype=Dtype.BF16, page_tokens=CHUNK, pages_per_chunk=1)
)
CHAIN = KeyChain(NAMESPACE)


def golden_tokens(case: dict[str, Any]) -> list[int]:
    rule = case["tokens"]
    return [(index * rule["step"] + rule["first"]) % rule["modulus"] for index in range(rule["count"])]


def golden_keys(case: dict[str, Any]) -> Keys:
    text = json.dumps(case["namespace"], sort_keys=True, separators=(",", ":")).encode()
    extras = [
        Extra(ExtraKind(one["kind"]), bytes.fromhex(one["value"]), one["start"], one["stop"]) for one in case["extras"]
    ]
    return KeyChain(Namespace.from_canonical(text), bytes.fromhex(case["secret"])).keys(golden_tokens(case), extras)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_vectors(case: dict[str, Any]) -> None:
    keys = golden_keys(case)
    assert [key.hex() for key in keys] == case["keys"]
    assert keys.fingerprints is not None
    assert [f"{value:016x}" for value in keys.fingerprints] == case["fingerprints"]
    assert keys.namespace_id.hex() == keys.parent.hex() == case["namespace_id"]
    assert keys.token_count == case["tokens"]["count"]


def test_the_golden_file_is_what_the_documented_format_gives() -> None:
    subprocess.run([sys.executable, GOLDEN_FOLDER / "make_keys.py", "--check"], check=True, timeout=60)


# What each rank of an engine does: the geometry of its TP size, its own shard, and the keys of the prompt.
CHILD = """
import json, sys
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain
case, tp = json.loads(sys.stdin.read()), int(sys.argv[1])
text = json.dumps(case["namespace"], sort_keys=True, separators=(",", ":")).encode()
namespace = Namespace.from_canonical(text)
geometry = Geometry.parallel(namespace.layout, tp=tp)
rule = case["tokens"]
tokens = [(index * rule["step"] + rule["first"]) % rule["modulus"] for index in range(rule["count"])]
keys = [[key.hex() for key in KeyChain(namespace).keys(tokens)] for rank in range(tp)]
print(json.dumps({"keys": keys, "shards": [geometry.shard(rank) for rank in range(tp)]}))
"""


def test_a01_same_prompt_same_keys_in_every_process() -> None:
    """A01: hash seeds unset, fixed and different, TP 1 and 2: the same 32 keys, those of the golden file."""
    case = next(case for case in GOLDEN if case["name"] == "512 tokens")
    runs = [(None, 1), (None, 2), ("0", 1), ("4242", 2)]
    children = []
    for seed, tp in runs:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tp)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
    answers = []
    for child in children:
        output, _ = child.communicate(json.dumps(case), timeout=60)
        assert child.returncode == 0
        answers.append(json.loads(output))
    assert len(case["keys"]) == 32
    for (_, tp), answer in zip(runs, answers, strict=True):
        assert answer["keys"] == [case["keys"]] * tp
    # The cut is in the shard id, and only there; it is the same in both processes as well.
    assert answers[0]["shards"] == answers[2]["shards"] != answers[1]["shards"][:1]
    assert answers[1]["shards"] == answers[3]["shards"]


@pytest.mark.parametrize(
    "key",
    [
        bytes(16),
        bytes(15) + b"\x01",
        b"\x00\x00\x00" + bytes(range(1, 14)),
        b"\x80" + bytes(15),
        bytes(15) + b"\x80",
        b"\xff" * 16,
    ],
)
def test_a01_a_key_survives_text_and_words(key: bytes) -> None:
    """A01: leading zero bytes and top bits are kept by both other forms of a key."""
    assert bytes.fromhex(key.hex()) == key and len(key.hex()) == 32
    keys = Keys(bytes(16), bytes(16), key + key, None, CHUNK, CHUNK)
    assert keys[0] == keys[1] == keys[-1] == key
    assert keys.words.shape == (2, 2) and keys.words.tobytes() == key + key
    assert [int(word).to_bytes(8, "little") for word in keys.words[0]] == [key[:8], key[8:]]


@pytest.mark.parametrize(
    ("count", "chunks", "last_tokens"),
    [(0, 0, 0), (1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 1), (31, 2, 15), (32, 2, 16), (33, 3, 1)],
)
def test_chunk_ends(count: int, chunks: int, last_tokens: int) -> None:
    keys = CHAIN.keys(list(range(count)))
    assert len(keys) == len(list(keys)) == chunks
    assert keys.last_tokens == last_tokens and keys.token_count == count
    assert sum(keys.tokens_of(index) for index in range(chunks)) == count
    assert [keys.tokens_of_first(index) for index in range(chunks + 1)] == [
        min(index * CHUNK, count) for index in range(chunks + 1)
    ]
    for index in (-1, chunks):
        with pytest.raises(IndexError):
            keys.tokens_of(index)


def test_a_shorter_last_chunk_has_a_key_of_its_own() -> None:
    """Every length of the last chunk is another key; the full chunks before it are shared."""
    by_length = [CHAIN.keys(list(range(length))) for length in range(CHUNK + 1, 2 * CHUNK + 1)]
    assert {keys[0] for keys in by_length} == {CHAIN.keys(list(range(CHUNK)))[0]}
    assert len({keys[1] for keys in by_length}) == CHUNK


def test_zeros_behind_the_end_are_tokens_and_not_padding() -> None:
    assert CHAIN.keys([7])[0] != CHAIN.keys([7, 0])[0]
    assert CHAIN.keys([0])[0] != CHAIN.keys([0] * CHUNK)[0]


def test_a_key_names_its_whole_prefix() -> None:
    one, other = CHAIN.keys([1] * 48), CHAIN.keys([2] + [1] * 47)
    assert not set(one) & set(other)
    longer = CHAIN.keys([1] * 64)
    assert list(longer)[:3] == list(one)
    assert len(set(longer)) == 4, "equal chunks at different places have different keys"


TOKENS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, *range(20)]


@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        lambda tokens: array.array("I", tokens),
        lambda tokens: array.array("q", tokens),
        lambda tokens: np.array(tokens, dtype=np.int64),
        lambda tokens: np.array(tokens, dtype=np.uint64),
        lambda tokens: np.array(tokens, dtype=np.uint32),
        lambda tokens: np.array(tokens, dtype=">u4"),
        lambda tokens: np.repeat(np.array(tokens, dtype=np.int64), 2)[::2],
        lambda tokens: [np.int64(token) for token in tokens],
    ],
    ids=["tuple", "array-I", "array-q", "int64", "uint64", "uint32", "big-endian", "strided", "numpy-scalars"],
)
def test_kinds_of_tokens(convert: Callable[[list[int]], object]) -> None:
    assert CHAIN.keys(convert(TOKENS)).blob == CHAIN.keys(TOKENS).blob  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32])
def test_narrow_integers(dtype: type) -> None:
    assert CHAIN.keys(np.arange(40, dtype=dtype)).blob == CHAIN.keys(range(40)).blob


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.0],
        ["1"],
        [None],
        "text",
        b"1234",
        bytearray(4),
        array.array("d", [1.0]),
        array.array("i", [-1]),
        np.array([-1]),
        np.array([2**32]),
        np.array([2**64 - 1], dtype=np.uint64),
        np.array([1.0]),
        np.array([True]),
        np.zeros((2, 2), dtype=np.int64),
    ],
    ids=repr,
)
def test_what_is_no_token_is_refused(tokens: object) -> None:
    with pytest.raises(InvalidRequest):
        CHAIN.keys(tokens)  # type: ignore[arg-type]


def test_slices_keep_parent_fingerprints_and_counts() -> None:
    keys = CHAIN.keys(list(range(3 * CHUNK + 5)))
    assert keys.fingerprints is not None
    for start in range(5):
        for stop in range(start, 5):
            part = keys.slice(start, stop)
            assert list(part) == list(keys)[start:stop]
            assert part.parent == (keys.parent if start == 0 else keys[start - 1])
            assert part.fingerprints is not None
            assert part.fingerprints.tolist() == keys.fingerprints[start : stop + 1].tolist()
            assert part.first_index == start
            assert part.token_count == sum(keys.tokens_of(index) for index in range(start, stop))
    assert keys.slice(1, 4).slice(1, 3).first_index == 2
    assert list(keys.slice(2, 99)) == list(keys)[2:]
    assert len(keys.slice(3, 1)) == 0
    assert list(keys.slice(0, 3).slice(0, 2)) == list(keys)[:2]


def test_a_slice_of_keys_without_tokens_has_no_fingerprints() -> None:
    keys = CHAIN.keys(list(range(40)))
    bare = Keys(keys.namespace_id, keys.parent, keys.blob, None, CHUNK, keys.last_tokens)
    assert bare.slice(1, 3).fingerprints is None


def test_indexing_outside_is_an_index_error() -> None:
    keys = CHAIN.keys(list(range(40)))
    assert keys[-3] == keys[0]
    for index in (3, -4):
        with pytest.raises(IndexError):
            keys[index]


@pytest.mark.parametrize(
    "fields",
    [
        (bytes(16), bytes(16), bytes(17), None, CHUNK, CHUNK),
        (bytes(16), bytes(15), bytes(16), None, CHUNK, CHUNK),
        (bytes(15), bytes(16), bytes(16), None, CHUNK, CHUNK),
        (bytes(16), bytes(16), bytes(16), np.zeros(1, np.uint64), CHUNK, CHUNK),
        (bytes(16), bytes(16), bytes(16), None, CHUNK, 0),
        (bytes(16), bytes(16), bytes(16), None, CHUNK, CHUNK + 1),
    ],
)
def test_keys_that_cannot_be_right_are_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest):
        Keys(*fields)


def test_a_long_secret_is_refused() -> None:
    KeyChain(NAMESPACE, bytes(64))
    with pytest.raises(InvalidRequest, match="at most 64 bytes"):
        KeyChain(NAMESPACE, bytes(65))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_keys_of_a_prompt_that_went_on_are_those_of_the_whole(case: dict[str, Any]) -> None:
    text = json.dumps(case["namespace"], sort_keys=True, separators=(",", ":")).encode()
    space, tokens = Namespace.from_canonical(text), golden_tokens(case)
    extras = [
        Extra(ExtraKind(one["kind"]), bytes.fromhex(one["value"]), one["start"], one["stop"]) for one in case["extras"]
    ]
    chain, whole = KeyChain(space, bytes.fromhex(case["secret"])), golden_keys(case)
    for count in {0, 1, len(tokens) // 2, max(0, len(tokens) - 1), len(tokens)}:
        keys = chain.extended(chain.keys(tokens[:count], extras), tokens, extras)
        assert (keys.blob, keys.last_tokens) == (whole.blob, whole.last_tokens)
        assert keys.fingerprints is not None and whole.fingerprints is not None
        assert keys.fingerprints.tolist() == whole.fingerprints.tolist()


def test_only_keys_from_the_start_of_a_prompt_of_the_namespace_go_on() -> None:
    keys = CHAIN.keys(list(range(40)))
    with pytest.raises(InvalidRequest, match="go on"):
        CHAIN.extended(keys.slice(1, 3), list(range(60)))
    with pytest.raises(InvalidRequest, match="go on"):
        KeyChain(Namespace("m", "other", NAMESPACE.layout)).extended(keys, list(range(60)))
