"""Bytes that must not be taken for others: other weights, other dtypes, other tenants, one flipped byte on the way."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client import Cache, Client
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from tests.chaos.node_thread import NodeThread

TOKENS = list(range(1000, 1100))


def layout(dtype: kvstore.Dtype = kvstore.Dtype.BF16) -> kvstore.PageLayout:
    return kvstore.PageLayout(layers=2, kv_heads=2, head_dim=32, dtype=dtype, page_tokens=16, pages_per_chunk=1)


def space(revision: str = "r1", dtype: kvstore.Dtype = kvstore.Dtype.BF16) -> kvstore.Namespace:
    return kvstore.Namespace("model", revision, layout(dtype))


def store(cache: Cache, value: int) -> Keys:
    keys = cache.keys(TOKENS)
    pages = cache.empty(len(keys))
    pages[:] = value
    assert cache.write(keys, pages).visible == len(keys)
    return keys


def found(cache: Cache) -> int:
    keys = cache.keys(TOKENS)
    result = cache.read(keys, cache.empty(len(keys)))
    assert result.chunks == cache.match(keys).local_chunks
    return result.chunks


@pytest.fixture
def client() -> Client:  # type: ignore[misc]
    with kvstore.open_local("8MiB") as opened:
        yield opened


def test_a06_other_weights_under_the_same_name_find_nothing(client: Client) -> None:
    first, second = client.bind(space("r1")), client.bind(space("r2"))
    store(first, 1)
    assert found(second) == 0 and found(first) == 7
    store(second, 2)
    for cache, value in ((first, 1), (second, 2)):
        keys = cache.keys(TOKENS)
        pages = cache.empty(len(keys))
        assert cache.read(keys, pages).chunks == 7 and (pages == value).all()


@pytest.mark.parametrize("pair", [("bf16", "fp16"), ("bf16", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"), ("fp32", "bf16")])
def test_a08_a_page_of_one_dtype_is_never_read_as_another(client: Client, pair: tuple[str, str]) -> None:
    for writer, reader in (pair, pair[::-1]):
        store(client.bind(space("r-" + writer + reader, kvstore.Dtype(writer))), 1)
        assert found(client.bind(space("r-" + writer + reader, kvstore.Dtype(reader)))) == 0


def test_a05_another_tenant_or_salt_finds_nothing(client: Client) -> None:
    mine = client.bind(space(), secret=b"a" * 32)
    store(mine, 1)
    assert found(client.bind(space(), secret=b"b" * 32)) == 0
    salted = mine.keys(TOKENS, [kvstore.Extra(kvstore.ExtraKind.SALT, b"salt")])
    assert mine.match(salted).local_chunks == 0 and found(mine) == 7


CHUNKS = 2000


def test_a25_a_flipped_byte_is_found_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One byte of 8,000 head pages changes behind the writer's back; the reader comes by tcp."""
    node = NodeThread(tmp_path, 64 << 20)
    try:
        with kvstore.connect(node.info.control_address) as writer:
            cache = writer.bind(space())
            keys = cache.keys(np.arange(CHUNKS * 16))
            pages = cache.empty(CHUNKS)
            pages[:] = np.arange(CHUNKS, dtype=np.uint64)[:, None, None, None, None].astype(np.uint8)
            assert cache.write(keys, pages).visible == CHUNKS
            bad = 1234
            copy = node.call(lambda: next(iter(node.core.pool.forest.chunks[keys[bad]].copies.values())))
            arena = np.frombuffer(node.daemon._memory.arena.memory, dtype=np.uint8)
            arena[copy.slot * 4096 + 777] ^= 1
        with kvstore.connect(node.info.control_address, transport="tcp", staging="8MiB") as reader:
            cache = reader.bind(space())
            into = cache.empty(CHUNKS)
            with caplog.at_level(logging.WARNING, "kvstore"):
                result = cache.read(keys, into, deadline_s=30)
            assert (result.chunks, result.reason) == (bad, MissReason.CHECKSUM)
            assert np.array_equal(into[:bad], pages[:bad])
            assert reader.stats()["misses_checksum"] == 1
            assert keys[bad].hex() in caplog.text
            arena[copy.slot * 4096 + 777] ^= 1
            assert cache.read(keys, into, deadline_s=30).chunks == CHUNKS and np.array_equal(into, pages)
        del arena
    finally:
        node.stop()
