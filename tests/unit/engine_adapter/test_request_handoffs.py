"""Handoffs as the engine-neutral halves of an adapter see them: tickets promised, believed, waited for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from replayed_engine import (
    LAYOUT,
    ReplayedEngine,
    tokens,
)

from engine_adapter.requests import Rules
from kvstore.client import Client
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket, TicketRank

SYNC = Rules(is_async=False)


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
