"""Random steps of `tier_machine`: a few short ones by hypothesis, long walks by seed, and walks with a guard off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from kvstore.node import slots
from kvstore.node.chunks import Chunk
from kvstore.node.holds import Holds
from kvstore.node.pool import Pool
from kvstore.node.tier import Tier
from tests.model.tier_machine import ScanResistantTierMachine, TierMachine, walk

VARIANTS = (TierMachine, ScanResistantTierMachine)
TestTiers = pytest.mark.slow(TierMachine.TestCase)
TestTiers.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of four slots, so that both tiers have several."""
    monkeypatch.setattr(slots, "EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "SMALL_EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "EXTENTS", 1 << 20)
    monkeypatch.setattr(slots, "EXTENT_SLOTS", 4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_long_walk_keeps_the_laws_of_both_tiers(variant: type[TierMachine]) -> None:
    walk(variant(), seed=3, steps=500)


def without_children(tier: Tier, chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
    is_last = not (chunk.ssd if tier.name.name == "DRAM" else chunk.copies or chunk.pending)
    is_held = bool(chunk.holds) and (is_last or tier.name.name == "DRAM")
    return not is_held and not chunk.pending and chunk not in tier.kept


def without_holds(tier: Tier, chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
    holds, chunk.holds = chunk.holds, 0
    try:
        return may_go(tier, chunk, chosen)
    finally:
        chunk.holds = holds


def without_kept(tier: Tier, chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
    kept, tier.kept = tier.kept, set()
    try:
        return may_go(tier, chunk, chosen)
    finally:
        tier.kept = kept


may_go = Tier._may_go
GUARDS: dict[str, tuple[Any, str, Any]] = {
    "leaf first on each tier": (Tier, "_may_go", without_children),
    "leases, pins and moves": (Tier, "_may_go", without_holds),
    "kept parents": (Tier, "_may_go", without_kept),
    "minima of groups": (Tier, "_kept_bytes", lambda tier, group: 0),
    "bounds of groups": (Tier, "trim", lambda tier: None),
    "orphans are withdrawn": (Pool, "_untell_below", lambda pool, chunk: None),
    "moves hold": (Holds, "keep", lambda holds, chunk: holds.moving.update([chunk])),
    "emptied headers": (Pool, "removed_slots", property(lambda pool: [], lambda pool, slots: None)),
}


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tests.unit.node.tiered_node.WAIT_S", 1.0)
    yield


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_a_walk_over_both_tiers_notices_a_guard_that_is_off(
    guard: str, short_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, replacement = GUARDS[guard]
    monkeypatch.setattr(owner, name, replacement, raising=False)
    with pytest.raises((AssertionError, KeyError)):
        walk(TierMachine(), seed=5, steps=1500)
