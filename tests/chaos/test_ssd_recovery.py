"""A node's SSD tier after a crash at any disk call and after a loss of power, through the whole recovery."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ssd_life import Due, GatedDisk, Life, due, live, wrong_after

from kvstore.model import checksum
from kvstore.node import slots, tiers
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.memory import UNIT_BYTES
from kvstore.node.pool import Pool
from tests.unit.node import tiered_node
from tests.unit.node.ssd_setting import Event, image_of


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of four slots."""
    monkeypatch.setattr(slots, "EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "SMALL_EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "EXTENTS", 1 << 20)
    monkeypatch.setattr(slots, "EXTENT_SLOTS", 4)


def lived(path: Path, **disk: bool) -> Life:
    life = Life(path, GatedDisk(**disk))
    asyncio.run(live(life))
    return life


WORK_EVERY = 7
"""Every so many calls the node that was started on the file also has to do more work."""


@dataclass(frozen=True)
class Case:
    """A file, and what a node that starts on it owes."""

    name: str
    events: list[Event]
    owed: Due
    is_power_loss: bool
    works: bool


def is_made(life: Life) -> int:
    """Disk calls until the file had its length."""
    return next(place for place, event in enumerate(life.events) if event.data is None and event.offset >= 0) + 1


def crashes(life: Life) -> Iterator[Case]:
    """After every disk call, and in the middle of every write."""
    for count in range(is_made(life), len(life.events) + 1):
        done, works = life.events[:count], count % WORK_EVERY == 0
        yield Case(f"after {count} calls", done, due(life.states, count, torn=False), False, works)
        data = life.events[count].data if count < len(life.events) else None
        if data is not None:
            half = Event(life.events[count].offset, data[: len(data) // 2])
            yield Case(f"in call {count}", [*done, half], due(life.states, count, torn=True), False, works)


def kept_of(events: Sequence[Event], rng: random.Random) -> list[Event]:
    """Some of these writes, and of some of those only some pages."""
    kept: list[Event] = []
    for event in events:
        fate = rng.random()
        if event.data is None or fate < 0.4:
            kept.append(event)
        elif fate < 0.6:
            starts = [at for at in range(0, len(event.data), UNIT_BYTES) if rng.random() < 0.5]
            kept += [Event(event.offset + at, event.data[at : at + UNIT_BYTES]) for at in starts]
    return kept


def power_losses(life: Life, rounds: int = 2) -> Iterator[Case]:
    """After every disk call, where all of the writes since the last sync may be missing, or some."""
    rng = random.Random(5)
    syncs = [place + 1 for place, event in enumerate(life.events) if event.data is None and event.offset < 0]
    for count in range(is_made(life), len(life.events) + 1):
        safe = max(place for place in syncs if place <= count)
        for number in range(rounds):
            kept = kept_of(life.events[safe:count], rng) if number else []
            name = f"after {count} calls with {count - safe} unsynced, round {number}"
            owed = due(life.states, count, torn=False, power_lost=True)
            works = not number and count % WORK_EVERY == 0
            yield Case(name, [*life.events[:safe], *kept], owed, True, works)


def wrongs(cases: Iterator[Case], life: Life, path: Path) -> Iterator[str]:
    """What nodes that are started on these files do wrongly."""
    chains = list(life.chains.values())
    with asyncio.Runner() as runner:
        for case in cases:
            image = bytes(image_of(case.events))
            started = wrong_after(path, image, case.owed, chains, is_power_loss=case.is_power_loss, goes_on=case.works)
            yield from (f"{case.name}: {each}" for each in runner.run(started))


@pytest.mark.slow
def test_a_node_that_dies_at_any_disk_call_keeps_its_promises(tmp_path: Path) -> None:
    life = lived(tmp_path / "ssd")
    assert list(wrongs(crashes(life), life, tmp_path / "crashed")) == []


@pytest.mark.slow
def test_a_loss_of_power_breaks_no_promise(tmp_path: Path) -> None:
    life = lived(tmp_path / "ssd")
    assert list(wrongs(power_losses(life), life, tmp_path / "crashed")) == []


def owner_of(name: str) -> Any:
    """The class in the tier's shell that has this method."""
    for module in (tiers,):
        for each in vars(module).values():
            if isinstance(each, type) and name in vars(each):
                return each
    raise AssertionError(f"nothing has {name}")


def headers_stay(arena: SsdArena, batch: Any) -> None:
    write_headers(arena, [(slot, header) for slot, header in batch if header is not None])


write_headers = SsdArena.write_headers
forgotten = property(lambda pool: [], lambda pool, slots: None)
GUARDS: dict[str, tuple[Any, str, Any, Callable[[Life], Iterator[Case]]]] = {
    "headers are emptied": (SsdArena, "write_headers", headers_stay, crashes),
    "slots that were given up are remembered": (Pool, "stale_slots", forgotten, power_losses),
    "removed while it is written": (None, "_stands", lambda owner, move: True, crashes),
    "removal waits for the disk": (SsdArena, "sync", lambda arena: None, power_losses),
    "what an eviction emptied is synced": (SsdArena, "has_unsynced_headers", False, power_losses),
    "checksums": (checksum, "differs", lambda *arguments: False, power_losses),
}


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_the_crashes_notice_a_guard_that_is_off(guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, cases = GUARDS[guard]
    monkeypatch.setattr(owner or owner_of(name), name, replacement, raising=False)
    monkeypatch.setattr(tiered_node, "WAIT_S", 2.0)
    try:
        life = lived(tmp_path / "ssd")
        assert next(wrongs(cases(life), life, tmp_path / "crashed"), "")
    except (AssertionError, KeyError) as exc:
        assert name in ("_stands", "differs"), exc  # a node that lives notices it itself


def test_the_crashes_notice_a_header_before_its_payload(tmp_path: Path) -> None:
    life = lived(tmp_path / "ssd", header_first=True)
    assert next(wrongs(crashes(life), life, tmp_path / "crashed"), "")
