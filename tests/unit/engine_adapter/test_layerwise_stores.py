"""Stores that follow a step layer by layer: begun with its first layer, never ahead of it, seen with the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from replayed_engine import LAYERS, ReplayedEngine, group, layer_name, tokens

from engine_adapter.plans import StepPlan
from engine_adapter.requests import Scheduled
from engine_adapter.transfers import How
from kvstore.client import Client

LAYERWISE = How(layerwise_stores=True)
PROMPT = tokens(1, 25)


class AtOnce(Executor):
    """Runs a store within the call that begins it."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args, **kwargs))
        return future


@pytest.mark.parametrize("groups", [(group(),), (group("full"), group("sliding", 9))], ids=["one", "two groups"])
@pytest.mark.parametrize("count", [24, 25, 7])
def test_what_was_stored_layer_by_layer_is_loaded(
    pool: Client, engines: list[ReplayedEngine], groups: Sequence[Any], count: int
) -> None:
    engines += [ReplayedEngine(pool, groups=groups, how=LAYERWISE), ReplayedEngine(pool, groups=groups)]
    assert engines[0].run("a", tokens(1, count)) == 0
    assert engines[1].run("a", tokens(1, count)) == count // 8 * 8


def test_chunks_that_several_steps_computed_are_stored_whole(pool: Client, engines: list[ReplayedEngine]) -> None:
    engines += [ReplayedEngine(pool, how=LAYERWISE), ReplayedEngine(pool)]
    engine, running = engines[0], engines[0].add("a", PROMPT)
    engine.admit("a")
    while running.computed < len(PROMPT):
        engine.step("a", compute=5)
    engine.finish("a")
    engine.settle()
    assert engines[1].run("a", PROMPT) == 24


def test_a_layer_is_taken_while_the_step_goes_on_and_seen_with_the_last_one(
    pool: Client, engines: list[ReplayedEngine]
) -> None:
    engine = ReplayedEngine(pool, how=LAYERWISE)
    engines.append(engine)
    taken = [threading.Event() for _ in range(LAYERS)]
    present: list[int | None] = []
    make = engine.transfers._groups[0].make

    def watched(pages: int, ids: Sequence[Sequence[int]]) -> Any:
        endpoint = make(pages, ids)
        gather = endpoint.gather

        def tell(index: int, slot: Any, layer_start: int, head_start: int) -> None:
            gather(index, slot, layer_start, head_start)
            taken[layer_start].set()

        endpoint.gather = tell  # type: ignore[method-assign]
        return endpoint

    object.__setattr__(engine.transfers._groups[0], "make", watched)

    def after_layer(layer: int) -> None:
        assert taken[layer].wait(10.0), "the layer is taken before the next one is computed"
        assert not any(later.is_set() for later in taken[layer + 1 :])
        present.append(engine.sessions[0].present_here(engine.book._requests["a"].keys[0]))

    engine.after_layer = after_layer
    engine.add("a", PROMPT)
    engine.admit("a")
    engine.step("a")
    engine.after_layer = lambda layer: None
    assert present[:-1] == [0] * (LAYERS - 1)
    engine.finish("a")
    engine.settle()
    assert engine.sessions[0].present_here(engine.book._chains[0].keys(PROMPT)) == 3


def test_a13_a_layer_that_is_not_computed_yet_is_never_taken(pool: Client, engines: list[ReplayedEngine]) -> None:
    """The store runs when the first layer is begun, and gives up where the others do not come in its time."""
    engine = ReplayedEngine(pool, how=How(layerwise_stores=True, store_deadline_s=0.05), savers=AtOnce())
    engines += [engine, ReplayedEngine(pool)]
    engine.add("a", PROMPT)
    engine.admit("a")
    engine.step("a")
    engine.finish("a")
    engine.settle()
    assert engine.transfers.take_counts()["stores_too_late"] == 1
    assert engines[1].run("a", PROMPT) == 0


def test_a_step_that_never_ends_keeps_no_thread(pool: Client, engines: list[ReplayedEngine]) -> None:
    engine = ReplayedEngine(pool, how=LAYERWISE)
    running = engine.add("a", PROMPT)
    engine.admit("a")
    running.computed = len(PROMPT)
    plan = engine.book.step([Scheduled("a", running.computed, lambda: running.blocks)])
    assert plan.stores
    engine.transfers.save_layer(plan, layer_name(0, 0))
    engine.close()
    assert engine.transfers.wait_idle(10.0)
    assert engine.sessions[0].present_here(engine.book._chains[0].keys(PROMPT)) == 0


def test_a_step_whose_layers_are_not_told_is_stored_at_its_end(pool: Client, engines: list[ReplayedEngine]) -> None:
    """A graph that was captured whole calls nothing between the layers."""
    engines += [ReplayedEngine(pool, how=LAYERWISE), ReplayedEngine(pool)]
    engine = engines[0]

    def silent(plan: StepPlan, name: str) -> None:
        """Nothing is told."""

    engine.transfers.save_layer = silent  # type: ignore[method-assign]
    assert engine.run("a", PROMPT) == 0
    assert engines[1].run("a", PROMPT) == 24
