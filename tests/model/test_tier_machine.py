"""Random steps of `tier_machine`: a few short ones by hypothesis, long walks by seed, and walks with a guard off."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kvstore.node import slots
from kvstore.node.chunks import Chunk
from kvstore.node.holds import Holds
from kvstore.node.pool import Pool
from kvstore.node.tier import Tier
from tests.model.tier_machine import SPACES, ScanResistantTierMachine, TierMachine
from tests.unit.node.small_node import keys_of
from tests.unit.node.tiered_node import TieredNode

VARIANTS = (TierMachine, ScanResistantTierMachine)
TestTiers = pytest.mark.slow(TierMachine.TestCase)
TestTiers.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)

STEPS = {
    "store": 8, "persist": 4, "save_the_coldest": 6, "read": 6, "remove": 1, "lease": 2, "release": 2, "pin": 1,
    "time_passes": 1, "damage": 1, "ssd_fails": 0.2, "restart_the_worker": 0.4, "restart_the_host": 0.4,
}  # fmt: skip
"""Steps of a walk and how often each comes."""


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of four slots, so that both tiers have several."""
    monkeypatch.setattr(slots, "EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "SMALL_EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "EXTENTS", 1 << 20)
    monkeypatch.setattr(slots, "EXTENT_SLOTS", 4)


def walk(machine: TierMachine, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    machine.start()
    try:
        for _ in range(steps):
            (name,) = rng.choices(list(STEPS), list(STEPS.values()))
            step: Callable[..., None] = getattr(machine, name)
            alone = ("save_the_coldest", "ssd_fails", "restart_the_worker", "restart_the_host")
            step() if name in alone else step(rng)
            machine.laws()
    finally:
        machine.teardown()


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


may_go = Tier._may_go
SEEDS = (1, 2, 4, 5)
"""Walks of which at least one notices each guard that is off."""
GUARDS: dict[str, tuple[Any, str, Any]] = {
    "leaf first on each tier": (Tier, "_may_go", without_children),
    "leases, pins and moves": (Tier, "_may_go", without_holds),
    "minima of groups": (Tier, "_kept_bytes", lambda tier, group: 0),
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
        for seed in SEEDS:
            walk(TierMachine(), seed, steps=400)


@pytest.mark.slow
def test_the_same_walks_find_nothing_with_all_guards_on() -> None:
    for seed in SEEDS:
        walk(TierMachine(), seed, steps=400)


async def grown_by_a_chunk(path: Path) -> tuple[int, int]:
    """The SSD is full of one prompt, which grows: (chunks that are saved, how often one of them gave way)."""
    node = TieredNode(path, (128 + 52) << 10, slots=64)
    keys = keys_of(SPACES[0], 0, 5)
    for chunks in (4, 5):
        node.store(SPACES[0], keys.slice(0, chunks))
        run, _ = await node.tiers.persist(keys.slice(0, chunks), time.monotonic() + 0.5)
        node.core.check()
    await node.die()
    return run, node.core.pool.counts["ssd_copies_dropped"]


def test_a_parent_is_kept_while_its_child_is_saved(tmp_path: Path) -> None:
    assert asyncio.run(grown_by_a_chunk(tmp_path / "ssd")) == (4, 0)


def test_without_that_it_gives_way_to_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_kept(tier: Tier, chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
        kept, tier.kept = tier.kept, set()
        try:
            return may_go(tier, chunk, chosen)
        finally:
            tier.kept = kept

    monkeypatch.setattr(Tier, "_may_go", without_kept)
    assert asyncio.run(grown_by_a_chunk(tmp_path / "ssd")) != (4, 0)


async def writes_of_what_does_not_fit(path: Path) -> tuple[int, int]:
    """Chunks in DRAM for which the SSD has no room together: how many are written, also after a pause."""
    node = TieredNode(path, (128 + 52) << 10, slots=64)
    node.tiers.start()
    for prompt in range(6):
        node.store(SPACES[0], keys_of(SPACES[0], prompt, 1))
        await node.rest()
    before = node.core.pool.counts["saves"]
    for _ in range(20):
        await asyncio.sleep(0)
    await node.rest()
    after = node.core.pool.counts["saves"]
    await node.die()
    return before, after


def test_chunks_that_do_not_all_fit_do_not_push_each_other_out_for_ever(tmp_path: Path) -> None:
    assert asyncio.run(writes_of_what_does_not_fit(tmp_path / "ssd")) == (6, 6)
