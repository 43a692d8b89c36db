"""Random steps of `node_machine`: a few short ones by hypothesis, long walks by seed, and walks with a guard off."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings

from kvstore.node import slots
from kvstore.node.chunks import Chunk
from kvstore.node.core import NodeCore
from kvstore.node.reservations import Reservations
from kvstore.node.tier import Tier
from tests.model.node_machine import NodeMachine, RoomNodeMachine, WideNodeMachine

VARIANTS = (NodeMachine, WideNodeMachine, RoomNodeMachine)
BOUNDS = settings(max_examples=15, stateful_step_count=30)
TestNode = pytest.mark.slow(NodeMachine.TestCase)
TestRoom = pytest.mark.slow(RoomNodeMachine.TestCase)
TestWide = pytest.mark.slow(WideNodeMachine.TestCase)
TestNode.settings = TestRoom.settings = TestWide.settings = BOUNDS

STEPS = {
    "store": 5, "reserve": 6, "commit": 6, "abort": 1, "acknowledge": 1, "acquire": 3, "release": 2, "remove": 1,
    "write_late": 3, "time_passes": 1, "renew": 1, "connect": 2, "lose_session": 1, "kill_process": 1,
    "index_starts_empty": 1,
}  # fmt: skip
"""Steps of a walk and how often each comes."""


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of four slots, so that the arena has several."""
    monkeypatch.setattr(slots, "EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "EXTENT_SLOTS", 4)


def walk(machine: NodeMachine, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    machine.start()
    for _ in range(steps):
        (name,) = rng.choices(list(STEPS), list(STEPS.values()))
        if machine.makes_sense(name):
            step = getattr(machine, name)
            step() if name in ("connect", "index_starts_empty") else step(rng)
            machine.laws()
    machine.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_long_walk_keeps_the_laws(variant: type[NodeMachine]) -> None:
    walk(variant(), seed=2, steps=1200)


def without_holds(_: Tier, chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
    return not chunk.pending and all(child in chosen for child in chunk.children())


def without_children(_: Tier, chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
    return not chunk.holds and not chunk.pending


GUARDS = {
    "quarantine": (Reservations, "quarantine", Reservations.abort),
    "leases and pins": (Tier, "_may_go", without_holds),
    "leaf first": (Tier, "_may_go", without_children),
    "late commits": (
        NodeCore,
        "_attempt",
        lambda core, number, attempt: core.session(number).writer.attempts.get(attempt),
    ),
    "told with the parent only": (Chunk, "is_root", property(lambda chunk: True)),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_walk_notices_a_guard_that_is_off(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement = GUARDS[guard]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises((AssertionError, KeyError)):  # a chunk that is gone under the node's own hands
        walk(NodeMachine(), seed=0, steps=3000)
