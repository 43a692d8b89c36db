"""Chunks that others were told of are told as gone when they are, once, and never while they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from replayed_engine import LAYOUT, tokens

import kvstore
from engine_adapter.looks import Looks
from engine_adapter.session import PoolSession
from engine_adapter.told import EXPECTED_LIMIT, EXPECTED_S, LOOKS_AT_ONCE, SWEEP_EVERY_S, ToldChunks
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys

SPACE = Namespace("replayed", "1", LAYOUT)


def keys_of(seed: int, chunks: int, shared: int = 0) -> Keys:
    """Keys of full chunks, the first `shared` of which all prompts have."""
    return KeyChain(SPACE).keys([*tokens(0, 8 * shared), *tokens(seed, 8 * (chunks - shared))])


class Pool:
    """What is present by key; sweeps run when the test says so."""

    def __init__(self, limit: int = 1000) -> None:
        self.present: set[bytes] | None = set()
        self.now = 0.0
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.told = ToldChunks(self.look, self.submit, limit=limit, clock=lambda: self.now)

    def look(self, groups: Sequence[Keys]) -> int | None:
        if self.present is None:
            return None
        present = self.present
        return min(next((i for i, key in enumerate(keys) if key not in present), len(keys)) for keys in groups)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, call))
        return future

    def store(self, keys: Keys) -> int:
        """Store and tell of them; returns how many were new."""
        assert self.present is not None
        self.present.update(keys)
        first = self.told.new(keys)
        names = [f"{key.hex()}-{half}" for key in keys.slice(first, len(keys)) for half in range(2)]
        self.told.add([keys.slice(first, len(keys))], names)
        return len(keys) - first

    def sweep(self) -> list[str]:
        """One whole sweep; the names that are gone."""
        self.now += SWEEP_EVERY_S
        gone = self.told.take_gone()
        for future, call in self.calls:
            future.set_result(call())
        self.calls.clear()
        return gone + self.told.take_gone()


def names(keys: Keys, start: int) -> list[str]:
    return [f"{key.hex()}-{half}" for key in keys.slice(start, len(keys)) for half in range(2)]


def test_what_is_there_is_never_told_as_gone_and_what_went_is_once() -> None:
    pool, keys = Pool(), keys_of(1, 5)
    assert pool.store(keys) == 5
    assert pool.sweep() == []
    assert pool.present is not None
    pool.present -= {*keys.slice(3, 5)}
    assert pool.sweep() == names(keys, 3)
    assert pool.sweep() == []
    pool.present.clear()
    assert pool.sweep() == names(keys.slice(0, 3), 0)
    assert len(pool.told) == 0


def test_a_chunk_behind_one_that_went_is_gone_too() -> None:
    pool, keys = Pool(), keys_of(1, 5)
    pool.store(keys)
    assert pool.present is not None
    pool.present.discard(keys[1])
    assert pool.sweep() == names(keys, 1)


def test_a_shared_prefix_is_told_once_and_again_after_it_went() -> None:
    pool = Pool()
    first, second = keys_of(1, 4, shared=2), keys_of(2, 4, shared=2)
    assert pool.store(first) == 4
    assert pool.store(second) == 2
    assert pool.present is not None
    pool.present -= {*first}
    assert sorted(pool.sweep()) == sorted(names(first, 0))
    assert pool.store(first) == 4


def test_a_block_that_two_chunks_have_goes_with_the_last_one() -> None:
    """Two prompts part within a chunk: its first block is the same, and so is the block's name."""
    pool = Pool()
    assert pool.present is not None
    first, second = keys_of(1, 1), keys_of(2, 1)
    pool.present.update([*first, *second])
    pool.told.add([first], ["both", "one"])
    pool.told.add([second], ["both", "two"])
    pool.present -= {*first}
    assert pool.sweep() == ["one"]
    pool.present.clear()
    assert pool.sweep() == ["both", "two"]
    assert not pool.told._names


def test_nothing_is_told_as_gone_while_there_is_no_node_to_ask() -> None:
    pool, keys = Pool(), keys_of(1, 3)
    pool.store(keys)
    pool.present = None
    assert pool.sweep() == []
    pool.present = set()
    assert pool.sweep() == names(keys, 0)


def test_the_oldest_are_told_as_gone_where_there_are_too_many() -> None:
    pool = Pool(limit=6)
    first, second, third = (keys_of(seed, 3) for seed in range(3))
    for keys in (first, second, third):
        pool.store(keys)
    assert pool.told.take_gone() == names(first, 0)
    assert len(pool.told) == 6


def test_all_are_gone_after_a_reset_also_during_a_sweep() -> None:
    pool, keys = Pool(), keys_of(1, 3)
    pool.store(keys)
    pool.now += SWEEP_EVERY_S
    assert pool.told.take_gone() == []
    pool.told.clear()
    assert pool.present is not None
    pool.present.clear()
    assert pool.sweep() == names(keys, 0)
    assert pool.sweep() == []


def arrived(pool: Pool) -> list[tuple[str, int]]:
    return [(owner, len(keys)) for owner, (keys,) in pool.told.arrived()]


@pytest.mark.parametrize("present", [0, 2])
def test_what_others_are_storing_is_told_when_it_is_there(present: int) -> None:
    """As far as it is there, each time more, until all is."""
    pool, keys = Pool(), keys_of(1, 4)
    assert pool.present is not None
    pool.present.update(keys.slice(0, present))
    pool.told.expect("a", [keys], present, "A")
    assert arrived(pool) == []
    pool.present.update(keys.slice(0, 3))
    assert arrived(pool) == [("A", 3)]
    assert arrived(pool) == []
    pool.present.update(keys)
    assert arrived(pool) == [("A", 4)]
    pool.present.clear()
    pool.present.update(keys)
    assert arrived(pool) == [], "it is expected no longer"


def test_only_the_next_chunk_is_looked_up_until_it_is_there() -> None:
    pool, keys = Pool(), keys_of(1, 6)
    assert pool.present is not None
    looked = list[int]()
    pool.told._look = lambda groups: looked.append(len(groups[0])) or pool.look(groups)  # type: ignore[func-returns-value]
    pool.told.expect("a", [keys], 2, "A")
    assert arrived(pool) == []
    pool.present.update(keys.slice(0, 5))
    assert arrived(pool) == [("A", 5)] and arrived(pool) == []
    assert looked == [1, 1, 6, 1]


def test_what_comes_behind_chunks_that_went_is_not_told() -> None:
    pool, keys = Pool(), keys_of(1, 6)
    assert pool.present is not None
    pool.told.expect("a", [keys], 2, "A")
    pool.present.update(keys.slice(2, 4))
    assert arrived(pool) == []
    pool.present.update(keys.slice(0, 4))
    assert arrived(pool) == [("A", 4)]


def test_several_words_on_a_request_are_one() -> None:
    """Its stores end in any order."""
    pool, keys = Pool(), keys_of(1, 6)
    assert pool.present is not None
    pool.told.expect("a", [keys.slice(0, 2)], 0, "A")
    pool.told.expect("a", [keys], 2, "A")
    pool.told.expect("a", [keys.slice(0, 4)], 4, "A")
    assert len(pool.told._expected) == 1
    pool.present.update(keys)
    assert arrived(pool) == [("A", 6)]
    pool.told.expect("a", [keys.slice(0, 4)], 1, "A")
    pool.told.expect("a", [keys], 6, "A")
    assert not pool.told._expected


def test_what_is_there_already_is_not_expected() -> None:
    pool, keys = Pool(), keys_of(1, 4)
    pool.told.expect("a", [keys], 4, "A")
    assert not pool.told._expected


def test_what_does_not_come_is_not_waited_for_for_ever() -> None:
    pool, keys = Pool(), keys_of(1, 4)
    assert pool.present is not None
    pool.told.expect("a", [keys], 0, "A")
    pool.now += EXPECTED_S
    assert arrived(pool) == []
    pool.present.update(keys)
    assert arrived(pool) == []


def test_nothing_arrives_while_there_is_no_node_to_ask() -> None:
    pool, keys = Pool(), keys_of(1, 4)
    pool.told.expect("a", [keys], 0, "A")
    pool.present = None
    assert arrived(pool) == []
    pool.present = {*keys}
    assert arrived(pool) == [("A", 4)]


def test_a_step_looks_for_so_many_stores_and_for_the_others_in_the_next() -> None:
    pool = Pool()
    assert pool.present is not None
    for number in range(2 * LOOKS_AT_ONCE):
        pool.told.expect(str(number), [keys_of(number, 2)], 0, str(number))
    pool.present.update(keys_of(LOOKS_AT_ONCE + 3, 2))
    pool.now += EXPECTED_S  # late, and looked up all the same
    assert arrived(pool) == []
    assert arrived(pool) == [(str(LOOKS_AT_ONCE + 3), 2)]


def test_expectations_are_bounded_and_end_with_a_reset() -> None:
    pool, keys = Pool(), keys_of(1, 1)
    assert pool.present is not None
    for number in range(EXPECTED_LIMIT + 1):
        pool.told.expect(str(number), [keys], 0, str(number))
    assert len(pool.told._expected) == EXPECTED_LIMIT
    pool.told.clear()
    pool.present.update(keys)
    assert arrived(pool) == []


@pytest.mark.parametrize("gone", [0, 2])
def test_a_live_node_is_asked_without_waiting(gone: int) -> None:
    with kvstore.open_local("8MiB") as client:
        session = PoolSession(SPACE, lambda: client)
        session.open()
        looks = Looks([session], others=False, wait_s=1.0)
        keys = keys_of(1, 4)
        cache = client.bind(SPACE)
        assert cache.write(keys, cache.empty(4)).stored == 4
        cache.remove(keys.slice(4 - gone, 4))
        assert looks.here([keys]) == 4 - gone
        looks.close()
