"""The table of side objects against a naive model: dicts of tickets, sets of chunks, one clock.

Chunks come, are removed and evicted; tickets are put, read, dropped, released, and run out. Whatever the order: objects
are handed out whole and only with all their chunks, and the table's sums are those of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvstore.errors import CapacityExhausted, InvalidRequest, LimitExceeded, StaleReference
from kvstore.model.side_object import NeededChunks, SideObject
from kvstore.model.values import MissReason
from kvstore.node import SideAnswer, side_objects
from kvstore.node.steps import finish
from tests.unit.node.small_node import SMALL, SmallNode, keys_of, namespace

TICKETS = tuple(bytes([n]) * 16 for n in range(1, 6))
NAMES = ("a", "b", "c")
SPACE = namespace()
CHAINS = tuple(keys_of(SPACE, prompt, 4) for prompt in range(3))
NODE_BYTES, TICKET_BYTES, NODE_TICKETS = 40, 20, 4


@dataclass
class Kept:
    """What the model believes of a ticket. No objects: its writer gave up."""

    ends_s: float
    objects: dict[str, SideObject] = field(default_factory=dict)
    lasts: set[tuple[int, int]] = field(default_factory=set)
    """(chain, place of the last chunk)"""

    @property
    def size(self) -> int:
        return sum(len(each.data) for each in self.objects.values())


class SideObjectMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.node = SmallNode(slots=10)
        self.core, self.table = self.node.core, self.node.core.side_objects
        self.session = self.node.open(SPACE)
        self.kept: dict[bytes, Kept] = {}

    def live(self) -> dict[bytes, Kept]:
        now = self.node.clock.now
        return {ticket: each for ticket, each in self.kept.items() if each.ends_s > now}

    @rule(chain=st.integers(0, 2), count=st.integers(1, 4))
    def write(self, chain: int, count: int) -> None:
        """Some of it may be evicted for others: there is room for 10 chunks of 12."""
        self.node.store(self.session, CHAINS[chain].slice(0, count))

    @rule(chain=st.integers(0, 2), place=st.integers(0, 3))
    def remove(self, chain: int, place: int) -> None:
        self.core.remove(self.session.number, SPACE.id, [CHAINS[chain][place]])

    @rule(
        ticket=st.sampled_from(TICKETS),
        names=st.lists(st.sampled_from(NAMES), max_size=3),
        size=st.integers(1, 12),
        version=st.integers(0, 1),
        last=st.tuples(st.integers(0, 2), st.integers(0, 3)),
        lifetime_ms=st.sampled_from([1, 5_000, 60_000, 90_000]),
    )
    def put(
        self, ticket: bytes, names: list[str], size: int, version: int, last: tuple[int, int], lifetime_ms: int
    ) -> None:
        objects = [SideObject.made_for(ticket, name, "uint8", (size,), bytes([version] * size)) for name in names]
        needed = NeededChunks(SPACE.id, CHAINS[last[0]][last[1]], SMALL.whole)
        expected = self.refusal(ticket, objects)
        if expected is not None:
            with pytest.raises(expected):
                self.table.put(ticket, needed, objects, lifetime_ms)
            return
        assert self.table.put(ticket, needed, objects, lifetime_ms) == min(lifetime_ms, 60_000)
        kept = self.live().get(ticket) or Kept(0.0)
        kept.objects |= {each.name: each for each in objects}
        kept.lasts.add(last)
        kept.ends_s = max(kept.ends_s, self.node.clock.now + min(lifetime_ms, 60_000) / 1000)
        self.kept[ticket] = kept

    def refusal(self, ticket: bytes, objects: list[SideObject]) -> type[Exception] | None:
        kept = self.live().get(ticket)
        if kept is not None and not kept.objects:
            return StaleReference
        known = dict(kept.objects) if kept is not None else {}
        if not objects or any(known.get(each.name, each) != each for each in objects):
            return InvalidRequest
        after = known | {each.name: each for each in objects}
        size = sum(len(each.data) for each in after.values())
        if size > TICKET_BYTES:
            return LimitExceeded
        others = sum(each.size for name, each in self.table_view().items() if name != ticket)
        full = kept is None and len(self.table_view()) >= NODE_TICKETS
        return CapacityExhausted if full or others + size > NODE_BYTES else None

    def table_view(self) -> dict[bytes, Kept]:
        """The model's tickets that the table still has: what ran out leaves with the next tick or look."""
        return {ticket: self.kept[ticket] for ticket in self.table._handoffs}

    @rule(ticket=st.sampled_from(TICKETS), names=st.lists(st.sampled_from(NAMES), max_size=2, unique=True))
    def read(self, ticket: bytes, names: list[str]) -> None:
        answer, kept = finish(self.table.look(ticket, names)), self.live().get(ticket)
        if kept is None or (kept.objects and any(name not in kept.objects for name in names)):
            assert answer == SideAnswer((), MissReason.ABSENT)
        elif not kept.objects:
            assert answer == SideAnswer((), MissReason.DROPPED)
        elif not all(self.node.resident(CHAINS[chain].slice(0, place + 1)) == place + 1 for chain, place in kept.lasts):
            assert answer == SideAnswer((), MissReason.CHUNK_MISSING)
        else:
            wanted = {name: kept.objects[name] for name in names or kept.objects}
            assert answer.reason is None and {each.name: each for each in answer.objects} == wanted

    @rule(ticket=st.sampled_from(TICKETS))
    def drop(self, ticket: bytes) -> None:
        if ticket not in self.live() and len(self.table_view().keys() - {ticket}) >= NODE_TICKETS:
            with pytest.raises(CapacityExhausted):
                self.core.drop_ticket(self.session.number, ticket)
            return
        self.core.drop_ticket(self.session.number, ticket)
        self.kept[ticket] = Kept(self.node.clock.now + 60.0)

    @rule(ticket=st.sampled_from(TICKETS))
    def release(self, ticket: bytes) -> None:
        self.core.release(self.session.number, [], [ticket])
        self.kept.pop(ticket, None)

    @rule(seconds=st.sampled_from([0.001, 4.0, 30.0]), tick=st.booleans())
    def wait(self, seconds: float, tick: bool) -> None:
        self.node.clock.now += seconds
        self.core.renew(self.session.number)
        if tick:
            self.core.tick()
            assert set(self.table._handoffs) == set(self.live())

    @invariant()
    def the_table_is_what_the_model_says(self) -> None:
        self.core.check()
        assert set(self.live()) <= set(self.table._handoffs)
        assert self.table.figures()["side_bytes"] == sum(each.size for each in self.table_view().values())


@pytest.mark.slow
def test_side_objects_against_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_objects, "SIDE_BYTES", NODE_BYTES)
    monkeypatch.setattr(side_objects, "SIDE_BYTES_A_TICKET", TICKET_BYTES)
    monkeypatch.setattr(side_objects, "SIDE_TICKETS", NODE_TICKETS)
    run_state_machine_as_test(
        SideObjectMachine, settings=settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)
    )
