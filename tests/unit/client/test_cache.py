"""Reads and writes through the public surface of a pool in one process: edges of prompts, rectangles and arguments."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore.client import Cache, Client
from kvstore.errors import InvalidRequest, LayoutMismatch, LimitExceeded
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.values import MissReason, Outcome
from tests.unit.client.pages import LAYOUT, POISON, namespace, pages_of, poisoned, prompt


@pytest.fixture
def client() -> Iterator[Client]:
    with kvstore.open_local("2MiB") as client:
        yield client


@pytest.fixture
def cache(client: Client) -> Cache:
    return client.bind(namespace())


def test_nothing_is_a_complete_write_and_a_complete_read(client: Client, cache: Cache) -> None:
    keys = cache.keys([])
    assert len(keys) == 0
    written = cache.write(keys, pages_of(keys))
    assert (written.outcomes, written.stored, written.visible) == ((), 0, 0)
    result = cache.read(keys, cache.empty(0))
    assert (result.chunks, result.tokens, result.reason) == (0, 0, None)
    assert cache.match(keys).pool_chunks == 0 and cache.remove(keys) == 0
    assert client.stats()["reads"] == 1


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 64])
def test_prompts_around_the_edges_of_chunks(cache: Cache, tokens: int) -> None:
    """One token, exact multiples, one less and one more."""
    keys = cache.keys(prompt(tokens, tokens))
    assert len(keys) == -(-tokens // 16) and keys.token_count == tokens
    assert cache.write(keys, pages_of(keys)).stored == len(keys)
    target = poisoned(cache, len(keys))
    result = cache.read(keys, target)
    assert (result.chunks, result.tokens, result.reason) == (len(keys), tokens, None)
    assert np.array_equal(target, pages_of(keys))
    shorter = cache.keys(prompt(tokens, tokens - 1)) if tokens > 1 else keys
    assert cache.match(shorter).local_tokens == (tokens - 1) // 16 * 16 if tokens > 1 else 1
    longer = cache.keys(prompt(tokens, tokens + 1))
    assert cache.match(longer).local_tokens == tokens // 16 * 16


def test_a_partial_read_delivers_a_prefix_and_says_why(client: Client, cache: Cache) -> None:
    keys = cache.keys(prompt(1, 64))
    cache.write(keys.slice(0, 2), pages_of(keys)[:2])
    target = poisoned(cache, 4)
    result = cache.read(keys, target)
    assert (result.chunks, result.tokens, result.local_chunks, result.reason) == (2, 32, 2, MissReason.ABSENT)
    assert (target[2:] == POISON).all(), "nothing was written behind the prefix"
    stats = client.stats()
    assert stats["hit_tokens_local"] + stats["miss_tokens_absent"] == 64
    assert result.bytes_by_path == {"shm": 2 * LAYOUT.chunk_bytes}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
def test_bytes_that_change_in_place_are_noticed_where_the_client_verifies(verify: bool, layerwise: bool) -> None:
    """A flip in memory that nobody wrote to; the fence cannot see it."""
    with kvstore.open_local("2MiB", verify=verify) as client:
        cache = client.bind(namespace())
        keys, target = cache.keys(prompt(1, 64)), poisoned(cache, 4)
        cache.write(keys, pages_of(keys))
        host = client.host()
        assert host is not None
        offset = int(host.reader.find(keys, LAYOUT.whole).offsets[2, 0])
        host.arena[offset] ^= 1
        if layerwise:
            with cache.read_layers(keys, target, mode="layerwise") as read:
                result = read.result()
        else:
            result = cache.read(keys, target)
    assert (result.chunks, result.reason) == ((2, MissReason.CHECKSUM) if verify else (4, None))
    assert np.array_equal(target[:2], pages_of(keys)[:2])


def test_a_deadline_that_has_passed_is_a_reason(cache: Cache) -> None:
    keys = cache.keys(prompt(1, 64))
    cache.write(keys, pages_of(keys))
    result = cache.read(keys, poisoned(cache, 4), deadline_s=0.0)
    assert (result.chunks, result.reason) == (0, MissReason.DEADLINE)


def test_any_rectangle_can_be_read(cache: Cache) -> None:
    keys = cache.keys(prompt(1, 32))
    whole = pages_of(keys)
    cache.write(keys, whole)
    for corners in [(0, 1, 0, 1), (1, 4, 1, 2), (2, 3, 0, 2), (0, 4, 0, 2)]:
        part = Rectangle(*corners)
        target = poisoned(cache, 2, part)
        assert cache.read(keys, target, rectangle=part).chunks == 2
        expected = whole[:, part.layer_start : part.layer_stop, :, part.head_start : part.head_stop]
        assert np.array_equal(target, expected)
    with pytest.raises(LayoutMismatch):
        cache.read(keys, poisoned(cache, 2), rectangle=Rectangle(0, 5, 0, 2))


def test_arrays_that_do_not_fit_are_refused_before_anything_is_reserved(client: Client, cache: Cache) -> None:
    keys = cache.keys(prompt(1, 32))
    wrong = [
        np.zeros((2, 4), dtype=np.uint8),
        np.zeros((1, *LAYOUT.shape(LAYOUT.whole)), dtype=np.uint8),
        np.zeros((2, *LAYOUT.shape(LAYOUT.whole)), dtype=np.float32),
    ]
    for array in wrong:
        with pytest.raises(LayoutMismatch):
            cache.write(keys, array)
        with pytest.raises(LayoutMismatch):
            cache.read(keys, array)
    frozen = pages_of(keys)
    frozen.flags.writeable = False
    with pytest.raises(LayoutMismatch, match="read-only"):
        cache.read(keys, frozen)
    assert cache.write(keys, frozen).stored == 2, "a source may be read-only"


def test_keys_of_another_namespace_are_refused(client: Client, cache: Cache) -> None:
    other = client.bind(namespace("r2"))
    keys = other.keys(prompt(1, 16))
    for call in (cache.match, cache.remove, cache.prefetch, lambda k: cache.read(k, cache.empty(1))):
        with pytest.raises(InvalidRequest, match="another namespace"):
            call(keys)
    assert other.match(keys).local_chunks == 0


def test_a_value_of_two_gib_is_refused_with_the_limit_named(client: Client) -> None:
    layout = PageLayout(64, 8, 1024, Dtype.BF16, 1024, 1)
    assert layout.chunk_bytes == 2 << 30
    with pytest.raises(LimitExceeded, match="268435456"):
        client.bind(namespace(layout=layout))
    within = client.bind(namespace(layout=layout), geometry=Geometry.parallel(layout, pp=8), rank=3)
    assert within.layout.payload_bytes(within.rectangle) == 256 << 20


def test_a_chunk_that_the_whole_pool_cannot_hold_is_refused_not_waited_for(client: Client) -> None:
    layout = PageLayout(16, 8, 128, Dtype.BF16, 64, 1)
    cache = client.bind(namespace(layout=layout))
    keys = cache.keys(prompt(1, 64))
    outcomes = cache.write(keys, np.zeros((1, *layout.shape(layout.whole)), dtype=np.uint8)).outcomes
    assert outcomes[0] in (Outcome.REFUSED_FULL, Outcome.REFUSED_SESSION_LIMIT)


def test_ten_thousand_look_ups_keep_nothing(client: Client, cache: Cache) -> None:
    keys, absent = cache.keys(prompt(1, 160)), cache.keys(prompt(2, 160))
    cache.write(keys, pages_of(keys))
    core = client._host.core  # type: ignore[union-attr]
    before = core.stats()
    for _ in range(5000):
        assert cache.match(keys).local_chunks == 10
        assert cache.match(absent).pool_chunks == 0
    core.check()
    assert core.stats() == before


def test_removed_chunks_are_gone_at_once(cache: Cache) -> None:
    keys = cache.keys(prompt(1, 64))
    cache.write(keys, pages_of(keys))
    assert cache.remove(keys.slice(2, 4)) == 2
    assert cache.match(keys).local_chunks == 2
    assert cache.remove(keys) == 2 and cache.remove(keys) == 0


def test_torch_tensors_are_pages_too(cache: Cache) -> None:
    torch = pytest.importorskip("torch")
    keys = cache.keys(prompt(1, 32))
    source = torch.from_numpy(pages_of(keys))
    assert cache.write(keys, source).stored == 2
    target = torch.zeros_like(source)
    assert cache.read(keys, target).chunks == 2 and torch.equal(target, source)
    with pytest.raises(LayoutMismatch):
        cache.read(keys, target.transpose(1, 3))


def test_a_closed_pool_misses_and_refuses_writes() -> None:
    client = kvstore.open_local("1MiB")
    cache = client.bind(namespace())
    keys = cache.keys(prompt(1, 16))
    cache.write(keys, pages_of(keys))
    client.close()
    result = cache.read(keys, cache.empty(1))
    assert (result.chunks, result.reason) == (0, MissReason.SESSION_LOST)
    assert cache.match(keys).pool_chunks == 0
    with pytest.raises(InvalidRequest, match="closed"):
        cache.write(keys, pages_of(keys))
    client.close()  # again


def test_a_look_that_never_waits_goes_on_over_geometries(client: Client, cache: Cache) -> None:
    halves = Geometry((Rectangle(0, 4, 0, 1), Rectangle(0, 4, 1, 2)))
    keys = cache.keys(prompt(1, 64))
    pages = pages_of(keys)
    for number in range(2):
        rank = client.bind(namespace(), geometry=halves, rank=number)
        rank.write(keys.slice(0, 2), pages[:2, :, :, number : number + 1].copy())
    assert cache.present_here(keys) == 2
    cache.write(keys, pages)
    assert cache.present_here(keys) == 4, "two chunks as the ranks cut them, two whole ones"
    assert cache.present_here(keys, rectangle=Rectangle(1, 2, 0, 1)) == 4
    client.close()
    assert cache.present_here(keys) is None
