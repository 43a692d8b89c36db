"""Loads that fail, break, come too late or in part: the engine hears of each once, and computes."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from replayed_engine import (
    CHUNK_TOKENS,
    LAYERS,
    Held,
    ReplayedEngine,
    ReplayedEngineRuns,
    tokens,
)

from engine_adapter.requests import Rules
from engine_adapter.session import PoolSession, guarded
from engine_adapter.transfers import LOADS_AT_ONCE, How
from kvstore.client import Client, ReadResult
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason

SYNC = Rules(is_async=False)


@pytest.mark.parametrize("rules", [Rules(), SYNC], ids=["async", "sync"])
def test_a_chunk_that_left_after_the_lookup_is_computed_and_not_asked_for_again(
    pool: Client, engines: list[ReplayedEngine], rules: Rules
) -> None:
    engines += [ReplayedEngine(pool), ReplayedEngine(pool, rules=rules)]
    engines[0].run("a", tokens(1, 40)[:24])
    engine, running = engines[1], engines[1].add("a", tokens(1, 40))
    engine.admit("a")
    assert running.computed == 24
    cache = pool.bind(engine.groups[0].namespace)
    cache.remove(cache.keys(tokens(1, 40)).slice(1, 2))
    if rules.is_async:
        engine.until_received("a")
    else:
        plan = engine.step("a")
        assert not plan.stores, "nothing is stored that may be computed from pages that did not come"
    assert engine.last.failed == {"a"}
    assert engine.last.bad_blocks == {*running.blocks[0][2:6]}
    assert engine.book.counts["loads_failed"] == 1
    running.computed = CHUNK_TOKENS  # what vLLM does: on from the first bad block
    engine.step("a")
    engine.assert_right(running)
    engine.finish("a")
    engine.settle()
    assert ReplayedEngineRuns(pool, engines).hits(tokens(1, 40)) == 40, "stored again, with the right bytes"


def test_a_load_that_fails_twice_is_not_tried_for_ever(pool: Client, engines: list[ReplayedEngine]) -> None:
    engines += [ReplayedEngine(pool), ReplayedEngine(pool)]
    engines[0].run("a", tokens(1, 16))
    engine, running = engines[1], engines[1].add("a", tokens(1, 16))
    engine.admit("a")
    cache = pool.bind(engine.groups[0].namespace)
    cache.remove(cache.keys(tokens(1, 16)))
    engine.until_received("a")
    engine.preempt("a")  # vLLM frees all of it and asks anew
    engines[0].run("b", tokens(1, 16))
    assert engine.book.matched_tokens("a", 0) == (0, False)
    running.loading = False
    assert engine.admit("a") is False


@pytest.mark.parametrize(("rules", "how"), [(Rules(), How()), (SYNC, How()), (SYNC, How(layerwise=True))], ids=str)
def test_b01_a_load_that_breaks_in_an_unknown_way_is_reported_all_the_same(
    pool: Client, engines: list[ReplayedEngine], rules: Rules, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines += [ReplayedEngine(pool), ReplayedEngine(pool, rules=rules, how=how)]
    engines[0].run("a", tokens(1, 25))
    engine, running = engines[1], engines[1].add("a", tokens(1, 25))

    def broken(*_: object) -> None:
        raise ValueError("nobody thought of this")

    monkeypatch.setattr("engine_adapter.transfers.EngineChunks", broken)
    engine.admit("a")
    if rules.is_async:
        assert "a" in engine.until_received("a").failed
    else:
        engine.step("a")
    assert engine.last.bad_blocks == {*running.blocks[0][:6]}
    running.computed = 0
    engine.step("a")  # its stores break as well, and are reported
    engine.assert_right(running)
    assert not engine.finish("a") or engine.transfers.wait_idle(10.0)
    engine.settle()
    assert engine.transfers.take_counts()["errors_load_ValueError"] == 1


@pytest.mark.parametrize(("rules", "how"), [(Rules(), How()), (SYNC, How()), (SYNC, How(layerwise=True))], ids=str)
def test_b01_all_loads_of_a_step_end_within_one_deadline(
    pool: Client, engines: list[ReplayedEngine], rules: Rules, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that holds still costs requests, and a step that waits for it, one deadline and not one a load."""
    engines += [ReplayedEngine(pool), ReplayedEngine(pool, rules=rules, how=how)]
    waiting = [f"a{number}" for number in range(2 * LOADS_AT_ONCE)]
    for number, request_id in enumerate(waiting):
        engines[0].run(request_id, tokens(number, 9))
    engine, now_s, lock = engines[1], [1000.0], threading.Lock()

    def stopped(_: object, keys: Keys, *__: object, deadline_s: float, **___: object) -> ReadResult:
        with lock:
            now_s[0] += deadline_s
        return ReadResult(0, 0, 0, 0, MissReason.DEADLINE)

    for name in ("read", "load_layers"):
        monkeypatch.setattr(PoolSession, name, stopped)
    monkeypatch.setattr("engine_adapter.transfers.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(engine.transfers, "_loaders", Held() if rules.is_async else engine.transfers._loaders)
    for number, request_id in enumerate(waiting):
        engine.add(request_id, tokens(number, 9))
        engine.admit(request_id)
    plan = engine.book.step([])
    assert len(plan.loads) == len(waiting)
    engine.execute(plan)
    if rules.is_async:
        cast(Held, engine.transfers._loaders).go()
        engine.execute(engine.book.step([]))
    assert engine.last.failed == set(waiting)
    assert now_s[0] - 1000.0 <= LOADS_AT_ONCE * how.load_deadline_s
    assert engine.transfers.take_counts()["load_misses_deadline"] == len(waiting)


def test_the_last_layer_is_there_when_it_is_known_that_the_load_was_whole(
    pool: Client, engines: list[ReplayedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a draft model vLLM asks for bad blocks after the last layer and before it says that the step has ended."""
    engines += [ReplayedEngine(pool), ReplayedEngine(pool, rules=SYNC, how=How(layerwise=True))]
    engines[0].run("a", tokens(1, 25))
    engine, seen = engines[1], []

    def breaks_at_its_end(_: object, keys: Keys, *calls: Any, **__: object) -> ReadResult:
        for layer_stop in range(1, LAYERS + 1):
            calls[1](SimpleNamespace(layer_stop=layer_stop))
            seen.append([load.ready for load in engine.transfers._layer_loads])
        return ReadResult(0, 0, 0, 0, MissReason.CHECKSUM)

    monkeypatch.setattr(PoolSession, "load_layers", breaks_at_its_end)
    engine.add("a", tokens(1, 25))
    engine.admit("a")
    engine.transfers.start_loads(engine.book.step([]))
    for layer in range(LAYERS):
        engine.transfers.wait_layer(f"layer.{layer}")
    assert engine.transfers.ended().failed == {"a"}
    assert seen == [[1], [2], [LAYERS - 1]]


def test_a_pool_that_is_down_is_counted_each_time_and_logged_ever_more_rarely(
    pool: Client, engines: list[ReplayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine takes the counts after each step."""
    engine = ReplayedEngine(pool)
    engines.append(engine)

    def down() -> None:
        raise OSError("the pool is down")

    told = Counter[str]()
    with caplog.at_level(logging.WARNING):
        for _ in range(64):
            guarded(engine.sessions[0].errors, "look", down, None)
            told.update(engine.transfers.take_counts())
    assert told == {"errors_look_OSError": 64}
    assert len(caplog.records) == 7, "the 1st, 2nd, 4th … 64th"
