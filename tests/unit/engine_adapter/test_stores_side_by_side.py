"""Stores whose chunks hang on chunks of others: the engine has only the end of a prompt, its window went on."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
from replayed_engine import Held, ReplayedEngine, group, tokens

from engine_adapter.engine_chunks import EngineChunks
from engine_adapter.plans import GroupChunks, KvGroup, StepPlan, StorePlan
from engine_adapter.session import PoolSession
from engine_adapter.transfers import How, Transfers
from kvstore.client import Cache, Client
from kvstore.model.prefix import Keys
from tests.chaos.pool_processes import until

FULL, WINDOW, SECOND_WINDOW = group(), group("sliding:8", window_tokens=8), group("sliding:4", window_tokens=4)
PROMPT = tokens(1, 24)
WHOLE = (0, 1, 2, 3, 4, 5)
END = (None, None, None, 1, 4, 5)
"""Blocks of three chunks: the first one is gone, of the second its beginning."""


@pytest.fixture
def cache(pool: Client) -> Cache:
    return pool.bind(WINDOW.namespace)


@pytest.fixture
def keys(cache: Cache) -> Keys:
    return cache.keys(PROMPT)


@pytest.fixture
def engine(pool: Client, engines: list[ReplayedEngine]) -> ReplayedEngine:
    engines.append(ReplayedEngine(pool, groups=[WINDOW]))
    return engines[0]


def plan(number: int, request: str, *groups: tuple[Keys, Sequence[int | None]]) -> StorePlan:
    return StorePlan(number, request, tuple(GroupChunks(keys, tuple(blocks)) for keys, blocks in groups), 0)


def begin(engine: ReplayedEngine, *plans: StorePlan) -> None:
    engine.transfers.after_step(StepPlan(stores=plans))


def ended(engine: ReplayedEngine) -> dict[int, int]:
    """Visible chunks of all stores since the last call, once all have ended."""
    assert engine.transfers.wait_idle(10.0)
    return engine.transfers.report().stored_chunks


class SlowFirst:
    """The first copy of all waits until the test lets it go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._begun, self._go, copying = threading.Event(), threading.Event(), EngineChunks._copying
        first = threading.Lock()

        def copying_late(chunks: EngineChunks, index: int) -> AbstractContextManager[Any]:
            if first.acquire(blocking=False):
                self._begun.set()
                assert self._go.wait(10.0)
            return copying(chunks, index)

        patch.setattr(EngineChunks, "_copying", copying_late)

    def has_begun(self) -> None:
        assert self._begun.wait(10.0)

    def go(self) -> None:
        self._go.set()


@pytest.fixture
def slow_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowFirst]:
    slow = SlowFirst(monkeypatch)
    yield slow
    slow.go()


def resting(engine: ReplayedEngine, number: int) -> None:
    until(lambda: engine.transfers._stores[number].resting)


@pytest.mark.parametrize("who", ["the same request", "another request"])
@pytest.mark.parametrize("groups", [1, 2], ids=["window", "full and window"])
def test_the_end_of_a_prompt_is_stored_behind_a_beginning_that_is_late(
    pool: Client, engines: list[ReplayedEngine], slow_first: SlowFirst, who: str, groups: int
) -> None:
    kinds = [FULL, WINDOW][-groups:]
    engines.append(engine := ReplayedEngine(pool, groups=kinds))
    caches = [pool.bind(each.namespace) for each in kinds]
    keys = [cache.keys(PROMPT) for cache in caches]
    begin(engine, plan(1, "a", *((each.slice(0, 2), WHOLE[:4]) for each in keys)))
    slow_first.has_begun()
    late = [(keys[0], WHOLE), (keys[-1], END)][-groups:]
    begin(engine, plan(2, "a" if who == "the same request" else "b", *late))
    resting(engine, 2)
    slow_first.go()
    # Of the full group the beginning was in the other store's hands when this one was done with it.
    assert ended(engine) == {1: 2, 2: 3 if groups == 1 else 0}
    assert [cache.present_here(each) for cache, each in zip(caches, keys, strict=True)] == [3] * groups
    assert "stores_without_parent" not in engine.transfers.take_counts()


def test_several_of_them_go_on_one_after_the_other(pool: Client, engine: ReplayedEngine, slow_first: SlowFirst) -> None:
    cache = pool.bind(WINDOW.namespace)
    keys = cache.keys(tokens(2, 40))
    begin(engine, plan(1, "a", (keys.slice(0, 2), WHOLE[:4])))
    slow_first.has_begun()
    begin(engine, plan(2, "a", (keys.slice(0, 3), (*[None] * 4, 4, 5))))
    begin(engine, plan(3, "a", (keys.slice(0, 4), (*[None] * 6, 6, 7))), plan(4, "a", (keys, (*[None] * 8, 8, 9))))
    for number in (2, 3, 4):
        resting(engine, number)
    slow_first.go()
    assert ended(engine) == {1: 2, 2: 3, 3: 4, 4: 5} and cache.present_here(keys) == 5


def test_a_store_that_rests_keeps_no_thread(
    engine: ReplayedEngine, cache: Cache, keys: Keys, slow_first: SlowFirst
) -> None:
    begin(engine, plan(1, "a", (keys.slice(0, 2), WHOLE[:4])))
    slow_first.has_begun()
    begin(engine, *(plan(number, "a", (keys, END)) for number in range(2, 8)))
    others = {number: cache.keys(tokens(number, 24)) for number in range(8, 12)}
    begin(engine, *(plan(number, str(number), (each, WHOLE)) for number, each in others.items()))
    until(lambda: all(cache.present_here(each) == 3 for each in others.values()))
    assert engine.transfers._stores.keys() >= {*range(1, 8)}
    slow_first.go()
    assert ended(engine).keys() == {*range(1, 12)} and cache.present_here(keys) == 3
    assert "stores_without_parent" not in engine.transfers.take_counts()


def test_nothing_is_stored_behind_a_chunk_that_is_nowhere(pool: Client, engine: ReplayedEngine, cache: Cache) -> None:
    """Nor does anything leave a full pool for it."""
    for number in range(100, 200):
        full = cache.keys(tokens(number, 32))
        cache.write(full, cache.empty(4))
    before = pool.stats()
    keys = cache.keys(PROMPT)
    assert not cache.present_here(keys)
    begin(engine, plan(1, "a", (keys, END)))
    assert ended(engine) == {1: 0}
    assert engine.transfers.take_counts() == {"stores_without_parent": 1}
    assert pool.stats() == before
    assert cache.present_here(full) == 4


def test_nothing_waits_for_a_store_that_is_beyond_the_group(
    pool: Client, engines: list[ReplayedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the chunk, and the pool has lost it meanwhile: that store brings it no more."""
    engines.append(engine := ReplayedEngine(pool, groups=[WINDOW, FULL]))
    window, full = (pool.bind(each.namespace) for each in (WINDOW, FULL))
    keys, others = window.keys(PROMPT), full.keys(PROMPT)
    slow, go, writer = threading.Event(), threading.Event(), PoolSession.writer

    def late_in_the_second_group(session: PoolSession, keys: Keys, *arguments: Any, **options: Any) -> Any:
        if session is engine.sessions[1]:
            slow.set()
            assert go.wait(10.0)
        return writer(session, keys, *arguments, **options)

    monkeypatch.setattr(PoolSession, "writer", late_in_the_second_group)
    begin(engine, plan(1, "a", (keys, WHOLE), (others, WHOLE)))
    assert slow.wait(10.0)
    window.remove(keys)
    begin(engine, plan(2, "b", (keys, END), (others, WHOLE)))
    until(lambda: engine.transfers._counts["stores_without_parent"])
    go.set()
    assert ended(engine)[2] == 0 and (window.present_here(keys), full.present_here(others)) == (0, 3)


def test_only_earlier_stores_are_waited_for(pool: Client, engines: list[ReplayedEngine]) -> None:
    """Two that have each other's beginning, in two groups crosswise."""
    held, kinds = Held(), [WINDOW, SECOND_WINDOW]
    engines.append(engine := ReplayedEngine(pool, groups=kinds, savers=held))
    one, two = (pool.bind(each.namespace).keys(PROMPT) for each in kinds)
    begin(engine, plan(1, "a", (one, END), (two, WHOLE)), plan(2, "b", (one, WHOLE), (two, END)))
    held.go()
    assert ended(engine) == {1: 0, 2: 3}


def test_the_end_of_a_long_prompt_waits_for_the_store_before_it(
    pool: Client, engine: ReplayedEngine, slow_first: SlowFirst, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the first one of all, with which all would wake and look, and again with the second."""
    runs, store, cache = list[int](), Transfers._store, pool.bind(WINDOW.namespace)
    monkeypatch.setattr(Transfers, "_store", lambda mine, each: (runs.append(each.plan.number), store(mine, each))[1])
    count = 40
    keys = cache.keys(tokens(3, 8 * (count + 1)))
    begin(engine, plan(1, "a", (keys.slice(0, 2), WHOLE[:4])))
    slow_first.has_begun()
    for number in range(2, count + 1):
        begin(engine, plan(number, "a", (keys.slice(0, number + 1), (*[None] * (2 * number), 4, 5))))
        resting(engine, number)
    slow_first.go()
    assert len(ended(engine)) == count and cache.present_here(keys) == count + 1
    assert sorted(runs) == sorted([1, *range(2, count + 1), *range(2, count + 1)])


def test_two_that_lack_the_same_beginning_wait_for_nobody(
    pool: Client, engines: list[ReplayedEngine], keys: Keys
) -> None:
    held = Held()
    engines.append(engine := ReplayedEngine(pool, groups=[WINDOW], savers=held))
    begin(engine, plan(1, "a", (keys, END)), plan(2, "b", (keys, END)))
    held._calls.pop()[1]()
    assert engine.transfers.report().stored_chunks == {2: 0}
    held.go()
    assert ended(engine) == {1: 0}
    assert engine.transfers.take_counts() == {"stores_without_parent": 2}


@pytest.mark.parametrize("kinds", [[WINDOW, FULL], [FULL, WINDOW]], ids=["window first", "window last"])
def test_as_many_chunks_are_told_as_the_least_of_the_groups_has(
    pool: Client, engines: list[ReplayedEngine], kinds: list[KvGroup]
) -> None:
    engines.append(engine := ReplayedEngine(pool, groups=kinds))
    caches = [pool.bind(each.namespace) for each in kinds]
    of_group = {WINDOW: END, FULL: WHOLE}
    begin(
        engine, plan(1, "a", *((cache.keys(PROMPT), of_group[kind]) for cache, kind in zip(caches, kinds, strict=True)))
    )
    assert ended(engine) == {1: 0}


@pytest.mark.parametrize("writes", [(True, False), (False, True)])
def test_a_group_that_a_twin_stores_counts_as_stored(
    pool: Client, engines: list[ReplayedEngine], writes: tuple[bool, bool]
) -> None:
    engines.append(engine := ReplayedEngine(pool, groups=[FULL, WINDOW]))
    groups = zip(engine.transfers._groups, writes, strict=True)
    engine.transfers._groups = tuple(dataclasses.replace(each, writes=mine) for each, mine in groups)
    keys = [pool.bind(each.namespace).keys(PROMPT) for each in (FULL, WINDOW)]
    begin(engine, plan(1, "a", (keys[0], WHOLE), (keys[1], END if writes[0] else WHOLE)))
    assert ended(engine) == {1: 3}


def test_a_store_that_may_not_outlive_its_step_has_ended_with_it(
    pool: Client, engines: list[ReplayedEngine], keys: Keys, slow_first: SlowFirst
) -> None:
    engines.append(engine := ReplayedEngine(pool, groups=[WINDOW], how=How(async_stores=False)))
    threading.Timer(0.1, slow_first.go).start()
    begin(engine, plan(1, "a", (keys, WHOLE)))
    assert engine.transfers.report().stored_chunks == {1: 3}


def test_a_store_whose_beginning_fails_ends_with_it(engine: ReplayedEngine, keys: Keys, slow_first: SlowFirst) -> None:
    begin(engine, plan(1, "a", (keys.slice(0, 2), WHOLE[:4])))
    slow_first.has_begun()
    begin(engine, plan(2, "b", (keys, END)))
    resting(engine, 2)
    engine.transfers._stores[1].chunks[0]._open = False
    slow_first.go()
    assert ended(engine) == {1: 0, 2: 0}
    counts = engine.transfers.take_counts()
    assert (counts["errors_put_BlocksTaken"], counts["stores_without_parent"]) == (1, 1)


# --- blocks that the engine needs ------------------------------------------------------------------------


def test_a13_a_store_that_rests_lets_go_at_once(
    engine: ReplayedEngine, cache: Cache, keys: Keys, slow_first: SlowFirst, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[Any]()
    begin(engine, plan(1, "a", (keys.slice(0, 2), WHOLE[:4])))
    slow_first.has_begun()
    begin(engine, plan(2, "b", (keys, END)))
    resting(engine, 2)
    with monkeypatch.context() as patch:
        patch.setattr("engine_adapter.transfers.wait", lambda stores, **_: waits.append(list(stores)))
        engine.transfers.before_step(StepPlan(let_go=(2,)))
    assert waits == [[]], "it has nothing to end first"
    assert engine.transfers.report().stored_chunks == {2: 0}
    engine.transfers.after_step(StepPlan(ending=("b",)))
    assert engine.transfers.ended().sent == {"b"}, "its blocks are free while the other one is still at it"
    slow_first.go()
    assert ended(engine) == {1: 2} and cache.present_here(keys) == 2
    engine.transfers._savers.shutdown(wait=True)
    assert not engine.transfers.report(), "it was told once"
    assert engine.transfers.take_counts()["stores_given_up"] == 1


def test_a13_a_store_that_is_given_up_rests_no_more(
    engine: ReplayedEngine, keys: Keys, slow_first: SlowFirst, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are taken while it looks whom to wait for."""
    begin(engine, plan(1, "a", (keys.slice(0, 2), WHOLE[:4])))
    slow_first.has_begun()
    look, engine_thread = PoolSession.present_here, threading.current_thread()

    def given_up_meanwhile(session: PoolSession, *arguments: Any) -> int | None:
        if threading.current_thread() is not engine_thread:
            engine.transfers._give_up(engine.transfers._stores[2])
        return look(session, *arguments)

    monkeypatch.setattr(PoolSession, "present_here", given_up_meanwhile)
    begin(engine, plan(2, "b", (keys, END)))
    until(lambda: engine.transfers.report().stored_chunks == {2: 0})
    slow_first.go()
    assert ended(engine) == {1: 2}


def test_a_store_is_given_up_once(
    pool: Client, engines: list[ReplayedEngine], keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And waited for once: a node that does not answer must not cost each step of the engine."""
    engines.append(engine := ReplayedEngine(pool, groups=[WINDOW], how=How(let_go_s=0.0)))
    go, writer, waits = threading.Event(), PoolSession.writer, list[Any]()

    def late(session: PoolSession, *arguments: Any, **options: Any) -> Any:
        assert go.wait(10.0)
        return writer(session, *arguments, **options)

    monkeypatch.setattr(PoolSession, "writer", late)
    monkeypatch.setattr("engine_adapter.transfers.wait", lambda stores, **_: waits.append(stores))
    begin(engine, plan(1, "a", (keys, WHOLE)))
    for _ in range(3):
        engine.transfers.before_step(StepPlan(let_go=(1,)))
    go.set()
    assert ended(engine) == {1: 0}
    assert len(waits) == 1 and engine.transfers.take_counts()["stores_given_up"] == 1


def test_closing_ends_stores_that_rest_also_for_each_other(pool: Client, keys: Keys, slow_first: SlowFirst) -> None:
    engine = ReplayedEngine(pool, groups=[WINDOW])
    begin(engine, plan(1, "a", (keys.slice(0, 2), WHOLE[:4])))
    slow_first.has_begun()
    longer = pool.bind(WINDOW.namespace).keys([*PROMPT, *tokens(2, 8)])
    begin(engine, plan(2, "b", (keys, END)), plan(3, "c", (longer, (*[None] * 6, 6, 7))), plan(4, "b", (keys, END)))
    for number in (2, 3, 4):
        resting(engine, number)
    threading.Timer(0.2, slow_first.go).start()
    engine.close()
    report = engine.transfers.report()
    assert report.stored_chunks == dict.fromkeys(range(1, 5), 0) and not engine.transfers._stores
    assert set(report.stored.values()) == {1}
