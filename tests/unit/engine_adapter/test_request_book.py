"""The engine-neutral halves of an adapter, called in the order in which vLLM calls a connector."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from replayed_engine import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    POISON,
    Held,
    ReplayedEngine,
    ReplayedEngineRuns,
    group,
    tokens,
)

from engine_adapter.plans import GroupChunks, StepPlan, StepReport, StorePlan
from engine_adapter.requests import Rules
from engine_adapter.session import PoolSession
from engine_adapter.transfers import How
from kvstore.client import Client
from kvstore.model.prefix import Extra, ExtraKind

SYNC = Rules(is_async=False)


@pytest.mark.parametrize("rules", [Rules(), SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("how", [How(), How(layerwise=True), How(async_stores=False)], ids=["plain", "layers", "wait"])
@pytest.mark.parametrize("count", [23, 24, 25, 8, 7], ids=str)
def test_what_one_engine_stored_another_one_loads(
    pool: Client, engines: list[ReplayedEngine], rules: Rules, how: How, count: int
) -> None:
    engines += [ReplayedEngine(pool, rules=rules, how=how) for _ in range(2)]
    whole = count // CHUNK_TOKENS * CHUNK_TOKENS
    assert engines[0].run("a", tokens(1, count)) == 0
    # A step that waits for its load computes one token at least, for its logits; an asynchronous load may bring all.
    assert engines[1].run("a", tokens(1, count)) == (whole if rules.is_async else min(whole, count - 1))


@pytest.mark.parametrize("again", ["preempted", "ended"])
def test_a13_a_store_under_way_never_takes_what_came_into_its_blocks(
    pool: Client, engines: list[ReplayedEngine], again: str
) -> None:
    held = Held()
    engine = ReplayedEngine(pool, how=How(let_go_s=0.0), savers=held)
    engines += [engine, ReplayedEngine(pool)]
    running = engine.add("a", tokens(1, 16))
    engine.admit("a")
    engine.step("a")
    if again == "preempted":
        engine.preempt("a")
    else:
        assert engine.finish("a"), "its blocks are kept"
        engine._free(engine.kept["a"])  # and an engine that does not keep them is no danger either
        running.blocks = []
    engine.add("b", tokens(2, 16))
    engine.admit("b")
    plan = engine.step("b")  # in the very blocks of a
    assert plan.let_go, "the plan says whose blocks are taken"
    held.go()
    assert engines[1].run("a", tokens(1, 16)) == 0, "given up, and never the other request's bytes"
    assert engines[1].run("b", tokens(2, 16)) == 16


def test_blocks_of_an_ended_request_stay_until_its_stores_were_told(
    pool: Client, engines: list[ReplayedEngine]
) -> None:
    engine = ReplayedEngine(pool)
    engines.append(engine)
    engine.add("a", tokens(1, 16))
    engine.admit("a")
    plan = engine.book.step([])
    assert not plan.stores
    engine.step("a")
    engine.finish("a")
    engine.settle()
    assert sorted(engine.free[0]) == list(range(32))


def test_an_abort_while_loading_gives_the_blocks_back_once(pool: Client, engines: list[ReplayedEngine]) -> None:
    engines += [ReplayedEngine(pool), ReplayedEngine(pool)]
    engines[0].run("a", tokens(1, 16))
    engine = engines[1]
    engine.add("a", tokens(1, 16))
    assert engine.admit("a") is True
    plan = engine.book.step([])
    assert not engine.finish("a", aborted=True), "vLLM keeps them itself until the load is reported"
    ended = engine.execute(plan)
    while "a" not in ended.received:
        assert engine.transfers.wait_idle(10.0)
        ended = engine.execute(engine.book.step([]))
    assert ended.sent == frozenset()
    assert len(engine.book) == 0


def test_b10_a_lookup_is_asked_again_and_a_second_call_changes_nothing(
    pool: Client, engines: list[ReplayedEngine]
) -> None:
    engines += [ReplayedEngine(pool), ReplayedEngine(pool)]
    engines[0].run("a", tokens(1, 24))
    engine = engines[1]
    engine.looks.answers = [None, None]
    engine.add("a", tokens(1, 24))
    assert engine.admit("a") is None
    assert engine.admit("a") is None
    assert engine.book.matched_tokens("a", 0) == (24, True)
    assert engine.book.matched_tokens("a", 8) == (16, True), "with more of its own the rest is less"
    assert engine.admit("a", local_tokens=8) is True


def test_tokens_that_the_engine_has_are_left_alone(pool: Client, engines: list[ReplayedEngine]) -> None:
    engines += [ReplayedEngine(pool), ReplayedEngine(pool)]
    engines[0].run("a", tokens(1, 24))
    engine, running = engines[1], engines[1].add("a", tokens(1, 24))
    assert engine.admit("a", local_tokens=BLOCK_TOKENS) is True  # in the middle of a chunk
    engine.until_received("a")
    first = running.blocks[0][0]
    assert bool((engine.tensors[0][0][first] == POISON).all()), "the engine's own block was not written"
    engine.assert_right(running, first=BLOCK_TOKENS)


def test_a_preempted_request_is_looked_up_again_with_what_it_had_generated(
    pool: Client, engines: list[ReplayedEngine]
) -> None:
    engine = ReplayedEngine(pool)
    engines.append(engine)
    running = engine.add("a", tokens(1, 20))
    engine.admit("a")
    engine.step("a")
    for token in tokens(9, 6):
        running.tokens.append(token)
        engine.step("a")
    engine.settle()
    engine.preempt("a")
    assert engine.admit("a") is True
    assert running.computed == 24
    engine.until_received("a")
    running.computed = 24
    engine.assert_right(running)
    assert engine.book.counts["preempted"] == 1


@pytest.mark.parametrize(("save_decode", "hits"), [(True, 24), (False, 16)], ids=["saved", "not"])
def test_what_was_generated_is_stored_where_that_is_wanted(
    pool: Client, engines: list[ReplayedEngine], save_decode: bool, hits: int
) -> None:
    engine = ReplayedEngine(pool, rules=Rules(save_decode=save_decode))
    engines.append(engine)
    running = engine.add("a", tokens(1, 17))
    engine.admit("a")
    engine.step("a")
    for token in tokens(9, 8):
        running.tokens.append(token)
        engine.step("a")
    engine.finish("a")
    engine.settle()
    assert ReplayedEngineRuns(pool, engines).hits(running.tokens[:25]) == hits


def test_chunks_are_stored_as_they_fill_and_each_once(pool: Client, engines: list[ReplayedEngine]) -> None:
    engine = ReplayedEngine(pool)
    engines.append(engine)
    engine.add("a", tokens(1, 24))
    engine.admit("a")
    stored = [
        [(plan.first_new, len(plan.groups[0].keys)) for plan in engine.step("a", compute=6).stores] for _ in range(4)
    ]
    assert stored == [[], [(0, 1)], [(1, 2)], [(2, 3)]]


def test_a03_a05_salt_and_adapter_share_with_nobody(pool: Client, engines: list[ReplayedEngine]) -> None:
    engine = ReplayedEngine(pool)
    engines.append(engine)
    variants: list[tuple[Extra, ...]] = [
        (),
        (Extra(ExtraKind.SALT, b"a"),),
        (Extra(ExtraKind.LORA, b"a"),),
        (Extra(ExtraKind.SALT, b"b"),),
    ]
    prompt = tokens(1, 16)
    for number, extras in enumerate(variants):
        assert engine.run(f"first-{number}", prompt, extras=extras) == 0
    for number, extras in enumerate(variants):
        assert engine.run(f"second-{number}", prompt, extras=extras) == 16


def test_a04_a_prompt_without_keys_is_neither_stored_nor_loaded(pool: Client, engines: list[ReplayedEngine]) -> None:
    engine = ReplayedEngine(pool)
    engines.append(engine)
    assert engine.run("a", tokens(1, 16), extras=None, no_keys="prompt_embeds") == 0
    assert engine.book.counts["no_keys_prompt_embeds"] > 0
    assert ReplayedEngineRuns(pool, engines).hits(tokens(1, 16)) == 0


def test_a_window_group_loads_only_the_blocks_that_are_there(pool: Client, engines: list[ReplayedEngine]) -> None:
    groups = [group("full"), group("sliding:8", window_tokens=8)]
    engines += [ReplayedEngine(pool, groups=groups), ReplayedEngine(pool, groups=groups)]
    assert engines[0].run("a", tokens(1, 32)) == 0
    engine, running = engines[1], engines[1].add("a", tokens(1, 33))
    engine._grow_windowed = True  # type: ignore[attr-defined]
    more, is_async = engine.book.matched_tokens("a", 0)
    assert (more, is_async) == (32, True)
    full = [engine.free[0].pop(0) for _ in range(9)]
    window = [None] * 6 + [engine.free[1].pop(0) for _ in range(3)]
    running.tokens = running.tokens[:33]
    running.blocks = [list(full), list(window)]
    running.computed, running.loading = 32, True
    engine.book.allocated("a", running.blocks, 32)
    engine.until_received("a")
    engine.assert_right(running)
    engine.step("a")
    engine.finish("a")
    engine.settle()


def test_several_groups_hit_as_far_as_all_of_them_have_it(pool: Client, engines: list[ReplayedEngine]) -> None:
    groups = [group("full"), group("sliding:8", window_tokens=8)]
    engines += [ReplayedEngine(pool, groups=groups), ReplayedEngine(pool, groups=groups)]
    engines[0].run("a", tokens(1, 32))
    cache = pool.bind(groups[1].namespace)
    cache.remove(cache.keys(tokens(1, 32)).slice(3, 4))
    assert engines[1].run("a", tokens(1, 32)) == 24


def test_plans_travel_between_processes(pool: Client, engines: list[ReplayedEngine]) -> None:
    engine = ReplayedEngine(pool)
    engines.append(engine)
    engine.add("a", tokens(1, 16))
    engine.admit("a")
    plan = engine.step("a")
    copied = pickle.loads(pickle.dumps(plan))
    assert [list(each.groups[0].keys) for each in copied.stores] == [list(each.groups[0].keys) for each in plan.stores]
    assert copied.let_go == plan.let_go


def test_b09_a_load_counts_when_all_ranks_have_reported(pool: Client, engines: list[ReplayedEngine]) -> None:
    engine = ReplayedEngine(pool)
    engines.append(engine)
    engine.book._ranks = 2
    engine.add("a", tokens(1, 16))
    engine.admit("a")
    plan = engine.step("a")
    number = plan.stores[0].number
    assert engine.transfers.wait_idle(10.0)
    engine.execute(engine.book.step([]))
    assert engine.finish("a"), "one of two ranks has stored: the other may still read the blocks"
    other = StepReport()
    other.stored[number] += 1
    engine.book.reported(other)
    engine.book.check()
    assert not engine.book._ending


def test_a07_requests_from_before_a_reset_are_neither_stored_nor_loaded_any_more(
    pool: Client, engines: list[ReplayedEngine]
) -> None:
    """Their keys name what the weights of before gave; what they compute from now on is something else."""
    engines += [ReplayedEngine(pool), ReplayedEngine(pool)]
    engines[0].run("before", tokens(1, 16))
    engine = engines[1]
    engine.add("waits", tokens(1, 16))
    running = engine.add("runs", tokens(2, 24))
    engine.admit("runs")
    engine.step("runs", compute=8)
    engine.settle()
    engine.book.forget_keys()
    assert engine.admit("waits") is False, "what is in the pool under its keys is of the weights of before"
    assert not engine.step("waits").stores
    engine.preempt("runs")
    assert engine.admit("runs") is False and running.computed == 0
    assert not engine.step("runs").stores, "computed anew, with other weights"
    for request_id in ("waits", "runs"):
        assert not engine.finish(request_id)
    assert engine.book.counts["no_keys_reset"] == 2
    assert ReplayedEngineRuns(pool, engines).hits(tokens(2, 24)) == 8, "what was stored before is right under its keys"


@pytest.mark.parametrize("aborted", [True, False], ids=["aborted", "ended"])
def test_what_another_connector_is_still_loading_is_not_stored(
    pool: Client, engines: list[ReplayedEngine], aborted: bool
) -> None:
    """Below a MultiConnector: vLLM counts the tokens as computed from the moment on at which the load begins."""
    engine = ReplayedEngine(pool)
    engines.append(engine)
    running = engine.add("a", tokens(1, 16))
    running.blocks = [[engine.free[0].pop(0) for _ in range(4)]]
    assert engine.book.matched_tokens("a", 0) == (0, False)
    engine.book.allocated("a", running.blocks, 0)  # another one was chosen to load
    running.computed = 16
    engine.execute(engine.book.step([]))
    assert not engine.finish("a", aborted=aborted)
    assert not engine.book.step([]).stores, "its blocks hold nothing yet"


def test_b09_as_many_chunks_are_told_as_stored_as_the_least_of_all_ranks_has(
    pool: Client, engines: list[ReplayedEngine]
) -> None:
    held = Held()
    engine = ReplayedEngine(pool, savers=held)
    engines.append(engine)
    engine.book._ranks = 2
    engine.add("a", tokens(1, 16))
    engine.admit("a")
    number = engine.step("a").stores[0].number
    held.go()
    first, second = StepReport(), engine.transfers.report()
    first.stored[number], first.stored_chunks[number] = 1, 0  # dropped there, and told in an earlier step
    assert engine.book.reported(first) == ([], [])
    assert second.stored_chunks == {number: 2}
    _, (stored,) = engine.book.reported(second)
    assert (stored.request_id, len(stored.groups[0]), stored.visible) == ("a", 2, 0)


def test_a_chunk_whose_beginning_the_engine_no_longer_has_is_never_stored(
    pool: Client, engines: list[ReplayedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window went on. The pool had that chunk when the store looked, and loses it before the store reserves."""
    groups = [group("sliding:8", window_tokens=8)]
    engine = ReplayedEngine(pool, groups=groups)
    engines.append(engine)
    engine.run("a", tokens(1, 16))
    cache = pool.bind(groups[0].namespace)
    keys = cache.keys(tokens(1, 24))
    look = PoolSession.present_here

    def lost_behind_the_look(session: PoolSession, *arguments: Any) -> int | None:
        found = look(session, *arguments)
        cache.remove(keys)
        return found

    monkeypatch.setattr(PoolSession, "present_here", lost_behind_the_look)
    chunks = GroupChunks(keys, (None, 1, 2, 3, 4, 5))
    engine.transfers.after_step(StepPlan(stores=(StorePlan(99, "b", (chunks,), 2),)))
    assert engine.transfers.wait_idle(10.0)
    assert engine.transfers.report().stored_chunks == {99: 0}
    assert cache.present_here(keys) == 0


def test_nothing_is_kept_of_requests_that_have_ended(pool: Client, engines: list[ReplayedEngine]) -> None:
    """Also of one whose stores had ended before it did, and of one that was aborted while it waited."""
    engine = ReplayedEngine(pool)
    engines.append(engine)
    for number in range(3):
        engine.add(f"a{number}", tokens(number, 16))
        engine.admit(f"a{number}")
        engine.step(f"a{number}")
        engine.settle()
        assert not engine.finish(f"a{number}"), "its stores were reported: nobody waits for it"
    engine.add("b", tokens(9, 16))
    engine.admit("b")
    engine.finish("b", aborted=True)
    engine.run("c", tokens(10, 16))
    engine.settle()
    kept = [engine.transfers._by_request, engine.transfers._ending, engine.transfers._stores]
    kept += [
        engine.book._owners,
        engine.book._saving,
        engine.book._keys,
        engine.book._reports,
        engine.book._visible,
        engine.book._ending,
    ]
    assert not any(kept), kept
