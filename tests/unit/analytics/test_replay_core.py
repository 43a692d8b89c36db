"""The replay's counting, on a pool inside this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.analytics import replay
from kvstore.analytics.offline import simulate
from kvstore.analytics.replay import Replayer, payloads, replay_namespace
from kvstore.analytics.trace import Request
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import KeyChain
from kvstore.model.values import MissReason

BLOCK = 16
NAMESPACE = replay_namespace(BLOCK)


@pytest.fixture
def client() -> Iterator[kvstore.Client]:
    with kvstore.open_local(dram="32MiB") as opened:
        yield opened


def random_trace(count: int, seed: int) -> list[Request]:
    """Prompts that extend earlier ones at random places; ids follow the prefix, as in a real trace."""
    random = np.random.default_rng(seed)
    prompts: list[tuple[int, ...]] = [()]
    made: list[Request] = []
    fresh = 0
    for _ in range(count):
        base = prompts[int(random.integers(len(prompts)))]
        head = base[: int(random.integers(len(base) + 1))]
        tail = tuple(range(fresh, fresh + int(random.integers(1, 6))))
        fresh += len(tail)
        prompts.append(head + tail)
        # The last block may be partial, and is then nobody's prefix: its id is not drawn again.
        last = int(random.integers(1, BLOCK + 1))
        partial = (*head, *tail, fresh)
        fresh += 1
        made.append(Request(0, (len(partial) - 1) * BLOCK + last, 1, partial, BLOCK))
    return made


def test_payloads_follow_from_keys_and_are_zero_behind_the_tokens() -> None:
    keys = KeyChain(NAMESPACE).keys(list(range(40)))
    content = payloads(keys, NAMESPACE.layout.chunk_bytes)
    assert content.shape == (3, NAMESPACE.layout.chunk_bytes)
    assert len({row.tobytes() for row in content}) == 3
    assert content[2, : 8 * 8].any()
    assert not content[2, 8 * 8 :].any()
    assert np.array_equal(content[:2], payloads(keys.slice(0, 2), NAMESPACE.layout.chunk_bytes))
    assert payloads(keys.slice(0, 0), NAMESPACE.layout.chunk_bytes).shape[0] == 0


def test_a_chunk_of_a_full_block_has_4_kib() -> None:
    assert replay_namespace().layout.chunk_bytes == 4096


def test_live_hits_equal_the_simulation(client: kvstore.Client) -> None:
    requests = random_trace(200, seed=3)
    replayer = Replayer([client], NAMESPACE)
    for number, request in enumerate(requests):
        replayer.serve(number, request)
    expected = simulate(requests)
    assert replayer.counts == expected
    assert replayer.wrong_bytes == 0
    assert replayer.local_hits == expected.hit_blocks > 0
    assert replayer.remote_hits == 0
    assert sum(replayer.misses.values()) == expected.blocks - expected.hit_blocks
    assert not replayer.refused


def test_a_request_waits_until_its_chunks_are_saved_but_not_for_ever(
    client: kvstore.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([3, 1, 0, 0])
    replayer = Replayer([client], NAMESPACE, lambda: next(left))
    replayer.serve(0, Request(0, BLOCK, 1, (1,), BLOCK))
    replayer.serve(1, Request(0, BLOCK, 1, (2,), BLOCK))
    assert (replayer.save_waits, replayer.saves_given_up) == (2, 0)
    monkeypatch.setattr(replay, "SAVE_WAIT_S", 0.0)
    stuck = Replayer([client], NAMESPACE, lambda: 1)
    stuck.serve(0, Request(0, BLOCK, 1, (3,), BLOCK))
    assert stuck.saves_given_up == 1


def test_wrong_bytes_are_seen(client: kvstore.Client) -> None:
    request = Request(0, 3 * BLOCK, 1, (1, 2, 3), BLOCK)
    cache = client.bind(NAMESPACE)
    keys = cache.keys(request.tokens())
    content: Any = payloads(keys, NAMESPACE.layout.chunk_bytes)
    content[1, 5] ^= 1
    cache.write(keys, content.reshape(3, *NAMESPACE.layout.shape(NAMESPACE.layout.whole)))
    replayer = Replayer([client], NAMESPACE)
    replayer.serve(0, request)
    assert replayer.wrong_bytes == 1
    assert replayer.counts.hit_blocks == 3


def test_misses_are_counted_once_a_chunk(client: kvstore.Client) -> None:
    replayer = Replayer([client], NAMESPACE)
    replayer.serve(0, Request(0, 3 * BLOCK, 1, (1, 2, 3), BLOCK))
    assert replayer.misses == {MissReason.ABSENT: 1, MissReason.PARENT_MISS: 2}


def test_impossible_replays_are_refused(client: kvstore.Client) -> None:
    with pytest.raises(InvalidRequest, match="at least one node"):
        Replayer([], NAMESPACE)
    with pytest.raises(InvalidRequest, match="blocks of 512 tokens in chunks of 16"):
        Replayer([client], NAMESPACE).serve(0, Request(0, 512, 1, (1,)))
