"""A node's SSD tier after a crash at any disk call and after a loss of power, through the whole recovery."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from ssd_life import Life, due, live, wrong_after

from kvstore.node import slots
from tests.unit.node.ssd_setting import Event, image_of


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of four slots."""
    monkeypatch.setattr(slots, "EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "SMALL_EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "EXTENTS", 1 << 20)
    monkeypatch.setattr(slots, "EXTENT_SLOTS", 4)


def lived(path: Path) -> Life:
    life = Life(path)
    asyncio.run(live(life))
    return life


WORK_EVERY = 7
"""Every so many images the node that was started on one also has to do more work."""


def is_made(life: Life) -> int:
    """Disk calls until the file had its length."""
    return next(place for place, event in enumerate(life.events) if event.data is None and event.offset >= 0) + 1


async def wrong_after_crashes(life: Life, path: Path, every: int = 1) -> list[str]:
    """For every prefix of the disk calls, and for the next one torn in half."""
    wrong: list[str] = []
    chains = list(life.chains.values())
    for count in range(is_made(life), len(life.events) + 1, every):
        images = [(False, life.events[:count])]
        data = life.events[count].data if count < len(life.events) else None
        if data is not None:
            half = Event(life.events[count].offset, data[: len(data) // 2])
            images.append((True, [*life.events[:count], half]))
        for torn, events in images:
            owed = due(life.states, count, torn=torn)
            works = (count // every) % WORK_EVERY == 0
            found = await wrong_after(path, bytes(image_of(events)), owed, chains, goes_on=works)
            wrong += [f"after {count} calls{' and a half' if torn else ''}: {each}" for each in found]
    return wrong


@pytest.mark.slow
def test_a_node_that_dies_at_any_disk_call_keeps_its_promises(tmp_path: Path) -> None:
    life = lived(tmp_path / "ssd")
    assert asyncio.run(wrong_after_crashes(life, tmp_path / "crashed")) == []


async def wrong_after_power_losses(life: Life, path: Path, every: int = 1, rounds: int = 2) -> list[str]:
    """Where any of the writes since the last sync may be missing: all of them first, then some."""
    rng, wrong, chains = random.Random(5), [], list(life.chains.values())
    syncs = [place + 1 for place, event in enumerate(life.events) if event.data is None and event.offset < 0]
    for count in range(is_made(life), len(life.events) + 1, every):
        safe = max(place for place in syncs if place <= count)
        for number in range(rounds):
            likely = 0.5 * (number > 0)
            kept = [each for each in life.events[safe:count] if each.data is None or rng.random() < likely]
            owed = due(life.states, count, torn=False, power_lost=True)
            works = not number and (count // every) % WORK_EVERY == 0
            image = bytes(image_of([*life.events[:safe], *kept]))
            found = await wrong_after(path, image, owed, chains, is_power_loss=True, goes_on=works)
            wrong += [f"after {count} calls, {len(kept)} of {count - safe} kept: {each}" for each in found]
    return wrong


@pytest.mark.slow
def test_a_loss_of_power_breaks_no_promise(tmp_path: Path) -> None:
    life = lived(tmp_path / "ssd")
    assert asyncio.run(wrong_after_power_losses(life, tmp_path / "crashed")) == []
