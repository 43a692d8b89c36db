"""A node's SSD tier after a crash at any disk call and after a loss of power, through the whole recovery."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import large_ssd
import pytest
from node_thread import NodeThread
from ssd_life import FIRST, SSD_BYTES, Due, GatedDisk, Life, due, live, wrong_after

from kvstore.errors import StorageFailed
from kvstore.model import checksum
from kvstore.model.layout import Geometry
from kvstore.node import slots, tiers
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import Buffer, Calls
from kvstore.node.memory import UNIT_BYTES
from kvstore.node.pool import Pool
from tests.unit.node import tiered_node
from tests.unit.node.small_node import keys_of
from tests.unit.node.ssd_setting import Event, image_of
from tests.unit.node.tiered_node import IO_WAYS


@pytest.fixture
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents of four slots."""
    monkeypatch.setattr(slots, "EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "SMALL_EXTENT_BYTES", 1)
    monkeypatch.setattr(slots, "EXTENTS", 1 << 20)
    monkeypatch.setattr(slots, "EXTENT_SLOTS", 4)


def lived(path: Path, way: str = "threads", **disk: bool) -> Life:
    life = Life(path, GatedDisk(**disk), way)
    asyncio.run(live(life))
    return life


WORK_EVERY = 7
"""Every so many calls the node that was started on the file also has to do more work."""
STEPS = {"threads": 1, "nixl": 9}
"""Crashes at every so manieth place: what is found does not depend on how it got there."""


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


def crashes(life: Life, step: int = 1) -> Iterator[Case]:
    """After every disk call (or every so manieth), and in the middle of every write."""
    for count in range(is_made(life), len(life.events) + 1, step):
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
@pytest.mark.usefixtures("small_extents")
@pytest.mark.parametrize("way", IO_WAYS)
def test_a_node_that_dies_at_any_disk_call_keeps_its_promises(tmp_path: Path, way: str) -> None:
    life = lived(tmp_path / "ssd", way)
    assert bytes(image_of(life.disk.events)) == life.path.read_bytes(), "the record is what is in the file"
    assert list(wrongs(crashes(life, STEPS[way]), life, tmp_path / "crashed")) == []


@pytest.mark.slow
@pytest.mark.usefixtures("small_extents")
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
@pytest.mark.usefixtures("small_extents")
@pytest.mark.parametrize("guard", GUARDS)
def test_the_crashes_notice_a_guard_that_is_off(guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, cases = GUARDS[guard]
    monkeypatch.setattr(owner or owner_of(name), name, replacement, raising=False)
    monkeypatch.setattr(tiered_node, "WAIT_S", 2.0)
    try:
        life = lived(tmp_path / "ssd")
        assert next(wrongs(cases(life), life, tmp_path / "crashed"), "")
    except (AssertionError, KeyError, StorageFailed) as exc:
        assert name in ("_stands", "differs"), exc  # a node that lives notices it itself


@pytest.mark.usefixtures("small_extents")
def test_the_crashes_notice_a_header_before_its_payload(tmp_path: Path) -> None:
    life = lived(tmp_path / "ssd", header_first=True)
    assert next(wrongs(crashes(life), life, tmp_path / "crashed"), "")


async def removed_while_it_is_read(path: Path) -> None:
    disk = GatedReads()
    node = tiered_node.TieredNode(path, SSD_BYTES, slots=64, calls=disk.calls)
    keys = keys_of(FIRST, 1, 1)
    node.store(FIRST, keys)
    assert await node.tiers.persist(keys, asyncio.get_running_loop().time() + 10) == (1, "")
    await node.die()
    node = tiered_node.TieredNode(path, SSD_BYTES, epoch=2, slots=64, calls=disk.calls)
    session = node.session(FIRST, Geometry.whole(FIRST.layout)).number
    disk.held.set()
    reading = asyncio.create_task(node.read(FIRST, keys))
    await node.until(disk.reached.is_set)
    assert node.core.remove(session, FIRST.id, [keys[0]]) == 1
    node.store(FIRST, keys, version=1)
    disk.go_on.set()
    await reading
    assert await node.read(FIRST, keys) == ([1], None)
    await node.tiers.forget_removed()
    node.core.check()
    assert not node.core.own_slots and not node.core.holds.moving
    await node.die()


class GatedReads:
    """Holds the first read of a slot once `held` is set."""

    def __init__(self) -> None:
        self.held, self.reached, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.calls = Calls(preadv=self._preadv, fdatasync=lambda fd: None)

    def _preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.held.is_set():
            self.reached.set()
            assert self.go_on.wait(10)
        return os.preadv(fd, buffers, offset)


def test_a_chunk_that_is_removed_while_it_is_read_back_is_not_delivered(tmp_path: Path) -> None:
    asyncio.run(removed_while_it_is_read(tmp_path / "ssd"))


@pytest.mark.slow
def test_the_whole_start_with_100_gib_finds_every_chunk(tmp_path: Path) -> None:
    chunks = large_ssd.make(tmp_path / "ssd", "raced")
    began_s, cpu_s = time.perf_counter(), time.process_time()
    node = NodeThread(tmp_path, ssd=f"{tmp_path}/ssd:100GiB", slots=1 << 16)
    try:
        print(f"{chunks} chunks: {time.perf_counter() - began_s:.1f} s, {time.process_time() - cpu_s:.1f} s of CPU")
        assert node.core.pool.chunk_count == chunks > 51_200
        node.call(node.core.check)
    finally:
        node.stop()
