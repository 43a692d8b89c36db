"""The engine-neutral halves of an adapter, called in the order in which vLLM calls a connector."""

from __future__ import annotations

import logging
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from replayed_engine import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    LAYERS,
    LAYOUT,
    POISON,
    ReplayedEngine,
    group,
    tokens,
)

import kvstore
from engine_adapter.plans import GroupChunks, StepPlan, StepReport, StorePlan
from engine_adapter.requests import Rules
from engine_adapter.session import PoolSession, guarded
from engine_adapter.transfers import LOADS_AT_ONCE, How
from kvstore.client import Client, ReadResult
from kvstore.model.prefix import Extra, ExtraKind, Keys
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.model.values import MissReason

SYNC = Rules(is_async=False)


@pytest.fixture
def pool() -> Iterator[Client]:
    with kvstore.open_local("8MiB") as client:
        yield client


@pytest.fixture
def engines(pool: Client) -> Iterator[list[ReplayedEngine]]:
    made: list[ReplayedEngine] = []
    yield made
    for engine in made:
        engine.close()


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


class Held(Executor):
    """Stores wait until the test lets them go."""

    def __init__(self) -> None:
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: call(*args, **kwargs)))
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing to end."""

    def go(self) -> None:
        for future, call in self._calls:
            future.set_result(call())
        self._calls.clear()


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


class ReplayedEngineRuns:
    def __init__(self, pool: Client, engines: list[ReplayedEngine]) -> None:
        self._pool, self._engines = pool, engines

    def hits(self, prompt: list[int]) -> int:
        engine = ReplayedEngine(self._pool)
        self._engines.append(engine)
        return engine.run("probe", prompt)


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
    _, ((request_id, (keys,)),) = engine.book.reported(second)
    assert (request_id, len(keys)) == ("a", 0)


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


# --- handoffs ---


def handing_on(pool: Client, rules: Rules = Rules()) -> ReplayedEngine:  # noqa: B008 (a value)
    """An engine whose prompts get tickets of the pool's node."""
    engine = ReplayedEngine(pool, rules=rules)
    node = pool.node
    assert node is not None

    def tickets(groups: Sequence[Keys]) -> tuple[Ticket, ...]:
        ranks = (TicketRank(node.node_id, node.epoch, LAYOUT.whole),)
        return tuple(
            Ticket(b"t" * 16, keys.namespace_id, keys[0], keys[-1], len(keys), keys.last_tokens, ranks)
            for keys in groups
        )

    engine.book._make_tickets = tickets
    return engine


@pytest.mark.parametrize("count", [5, 8, 21, 24], ids=str)
def test_a_handoff_brings_the_last_token_of_the_prompt_too(
    pool: Client, engines: list[ReplayedEngine], count: int
) -> None:
    prefill, decode = handing_on(pool), ReplayedEngine(pool, rules=SYNC)
    engines += [prefill, decode]
    running = prefill.add("p", tokens(1, count), outgoing=True)
    prefill.admit("p")
    prefill.step("p")
    keep, tickets = prefill.book.finished("p", running.computed, running.blocks)
    assert len(tickets) == 1, "named before the stores have ended"
    if keep:
        prefill.kept["p"] = running
    prefill.settle()
    received = decode.add("d", tokens(1, count), incoming=tickets)
    assert decode.admit("d") is True, "a handoff is waited for beside the steps, whatever the rule"
    assert received.computed == count
    assert not decode.until_received("d").failed
    decode.assert_right(received)


@pytest.mark.parametrize("saves", [True, False])
def test_a_handoff_is_promised_by_who_stores_only(pool: Client, engines: list[ReplayedEngine], saves: bool) -> None:
    """Else the other engine waits its whole deadline for what nobody writes."""
    prefill = handing_on(pool, Rules(save=saves))
    engines.append(prefill)
    running = prefill.add("p", tokens(1, 16), outgoing=True)
    prefill.admit("p")
    prefill.step("p")
    keep, tickets = prefill.book.finished("p", running.computed, running.blocks)
    assert bool(tickets) == saves
    if keep:
        prefill.kept["p"] = running
    prefill.settle()


def test_tickets_of_another_prompt_are_not_believed(pool: Client, engines: list[ReplayedEngine]) -> None:
    prefill, decode = handing_on(pool), ReplayedEngine(pool)
    engines += [prefill, decode]
    running = prefill.add("p", tokens(1, 16), outgoing=True)
    prefill.admit("p")
    prefill.step("p")
    _, tickets = prefill.book.finished("p", running.computed, running.blocks)
    decode.add("d", tokens(2, 16), incoming=tickets)
    assert decode.admit("d") is False
    assert decode.book.counts["tickets_of_other_prompts"] == 1
    assert prefill.transfers.wait_idle(10.0)


def test_a15_a_handoff_that_never_came_is_computed(pool: Client, engines: list[ReplayedEngine]) -> None:
    prefill, decode = handing_on(pool), ReplayedEngine(pool)
    engines += [prefill, decode]
    prefill.add("p", tokens(1, 20), outgoing=True)
    prefill.admit("p")
    tickets = prefill.book._requests["p"].tickets
    running = decode.add("d", tokens(1, 20), incoming=tickets)
    assert decode.admit("d") is True
    assert decode.until_received("d").failed == {"d"}
    running.computed = 0
    decode.step("d")
    decode.assert_right(running)
    decode.finish("d")
    decode.settle()
