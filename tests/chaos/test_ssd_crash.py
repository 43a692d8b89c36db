"""The SSD file after a crash at any system call, a loss of power, a flipped byte anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_format import HEADER_BYTES, ExtentPlace
from kvstore.node.memory import UNIT_BYTES
from tests.unit.node.ssd_setting import (
    NUMBERS,
    SIZE_BYTES,
    SLOT_BYTES,
    STORED,
    Event,
    Recorder,
    cut,
    header_of,
    image_of,
    is_whole,
    open_arena,
    store,
    write_chunk,
)


@dataclass
class Life:
    """When (in events) a chunk was committed and when its withdrawal began and was over; None = never."""

    number: int
    committed: int
    withdrawing: int | None = None
    withdrawn: int | None = None
    is_durable: bool = False
    """Its withdrawal was synced."""


@dataclass
class Workload:
    """Everything that a node does with the file, recorded, with what it may rely on after each step."""

    path: Path
    header_first: bool = False
    keep_header: bool = False
    skip_sync: bool = False
    recorder: Recorder = field(default_factory=Recorder)
    lives: list[Life] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)

    def run(self) -> list[Event]:
        """Returns the recorded calls."""
        with open_arena(self.path, calls=self.recorder.calls) as arena:
            first, second = cut(arena, 2)
            for number in range(3):
                self._store(arena, number, first.slot(number))
            self._sync(arena)
            self._store(arena, 3, second.slot(0))
            self._remove(arena, 3, second.slot(0))
            self._drop(arena, 2, first.slot(2))
            self._store(arena, 4, first.slot(2))  # reuse
            arena.write_headers([(second.slot(0), None)])
            other = ExtentPlace(second.start, second.stop + UNIT_BYTES, SLOT_BYTES + 2 * UNIT_BYTES)
            arena.format_extent(other)  # the same place for another class
            arena.write_superblock([STORED], [first, other])
            self._store(arena, 5, other.slot(0))
            self._store(arena, 6, other.slot(1))
            self._sync(arena)
            self._drop(arena, 6, other.slot(1))
            self._store(arena, 7, other.slot(1))
        return self.recorder.events

    @property
    def _now(self) -> int:
        return len(self.recorder.events)

    def _store(self, arena: SsdArena, number: int, slot: int) -> None:
        header = [(slot, header_of(number, slot, generation=2 + 2 * number))]
        if self.header_first:
            arena.write_headers(header)
            write_chunk(arena, number, slot)
        else:
            write_chunk(arena, number, slot)
            arena.write_headers(header)
        self.lives.append(Life(number, self._now))

    def _drop(self, arena: SsdArena, number: int, slot: int) -> Life:
        life = next(each for each in self.lives if each.number == number)
        life.withdrawing = self._now
        if not self.keep_header:
            arena.write_headers([(slot, None)])
        life.withdrawn = self._now
        return life

    def _remove(self, arena: SsdArena, number: int, slot: int) -> None:
        life = self._drop(arena, number, slot)
        if not self.skip_sync:
            self._sync(arena)
        life.withdrawn, life.is_durable = self._now, True

    def _sync(self, arena: SsdArena) -> None:
        arena.sync()
        self.synced.append(self._now)


def found_in(path: Path, image: bytes) -> tuple[set[int], set[int]]:
    """Chunks that a starting node finds in this file: whole ones, others."""
    path.write_bytes(image)
    with open_arena(path, epoch=2) as arena:
        headers = list(arena.scan())
        whole = {NUMBERS[header.key] for header in headers if is_whole(arena, header)}
        return whole, {NUMBERS[header.key] for header in headers} - whole


def crashes(events: list[Event]) -> list[tuple[int, bytes]]:
    """(whole calls, file) for a crash after each call and in the middle of each write."""
    cases = []
    for count in range(len(events) + 1):
        cases.append((count, bytes(image_of(events[:count]))))
        data = events[count].data if count < len(events) else None
        if data is not None:
            for stop in (len(data) // 2, 64):
                torn = Event(events[count].offset, data[:stop])
                cases.append((count, bytes(image_of([*events[:count], torn]))))
    return cases


def wrong_after_crash(workload: Workload, path: Path) -> list[str]:
    """What a node would believe wrongly, or miss, after a crash at any point."""
    wrong = []
    for count, image in crashes(workload.run()):
        whole, other = found_in(path, image)
        wrong += [f"after {count} calls chunk {number} is believed and not whole" for number in other]
        for life in workload.lives:
            begun = life.withdrawing is not None and life.withdrawing <= count
            if life.committed <= count and not begun and life.number not in whole:
                wrong.append(f"after {count} calls chunk {life.number} is lost")
            if life.withdrawn is not None and life.withdrawn <= count and life.number in whole | other:
                wrong.append(f"after {count} calls chunk {life.number} is back")
    return wrong


def test_a_crash_at_any_call_leaves_whole_and_committed_chunks_only(tmp_path: Path) -> None:
    assert wrong_after_crash(Workload(tmp_path / "ssd"), tmp_path / "crashed") == []


@pytest.mark.parametrize("careless", [{"header_first": True}, {"keep_header": True}])
def test_the_crash_test_notices_a_wrong_order(tmp_path: Path, careless: dict[str, bool]) -> None:
    assert wrong_after_crash(Workload(tmp_path / "ssd", **careless), tmp_path / "crashed")


def wrong_after_power_loss(workload: Workload, path: Path, rounds: int = 6) -> list[str]:
    """The same where any of the writes since the last sync may be missing."""
    events, rng, wrong = workload.run(), random.Random(5), []
    syncs = [place for place, event in enumerate(events) if event.data is None and event.offset < 0]
    created = next(place for place, event in enumerate(events) if event.data is None and event.offset >= 0)
    for count in range(created + 1, len(events) + 1):
        safe = max(place for place in syncs if place < count)
        for _ in range(rounds):
            kept = [each for each in events[safe:count] if each.data is None or rng.random() < 0.5]
            whole, other = found_in(path, bytes(image_of(events[:safe] + kept)))
            for life in workload.lives:
                begun = life.withdrawing is not None and life.withdrawing <= count
                if life.committed <= safe and not begun and life.number not in whole:
                    wrong.append(f"after {count} calls chunk {life.number} is lost")
                gone = life.is_durable and life.withdrawn is not None and life.withdrawn <= count
                if gone and life.number in whole | other:
                    wrong.append(f"after {count} calls chunk {life.number} is back")
            late = {life.number for life in workload.lives if life.committed > safe or life.withdrawn is not None}
            wrong += [f"after {count} calls synced chunk {number} is not whole" for number in other - late]
    return wrong


@pytest.mark.slow
def test_a_loss_of_power_loses_what_was_not_synced_and_nothing_else(tmp_path: Path) -> None:
    assert wrong_after_power_loss(Workload(tmp_path / "ssd"), tmp_path / "crashed") == []


@pytest.mark.slow
def test_the_power_loss_test_notices_a_missing_sync(tmp_path: Path) -> None:
    assert wrong_after_power_loss(Workload(tmp_path / "ssd", skip_sync=True), tmp_path / "crashed")


FINAL = {0, 1, 4, 5, 7}


@pytest.fixture
def image(tmp_path: Path) -> bytes:
    return bytes(image_of(Workload(tmp_path / "first").run()))


def flipped(image: bytes, at: int) -> bytes:
    return image[:at] + bytes([image[at] ^ 0x10]) + image[at + 1 :]


Region = Callable[[bytes], list[int]]


def superblock_bytes(image: bytes, offset: int) -> list[int]:
    stop = len(image[offset : offset + (64 << 10)].rstrip(b"\0"))
    return list(range(offset, offset + stop, 3))


def test_a_flipped_byte_in_one_superblock_falls_back_to_the_other(image: bytes, tmp_path: Path) -> None:
    newest = max((0, 64 << 10), key=lambda offset: image[offset + 32])  # low byte of the sequence
    for offset in (0, 64 << 10):
        for at in superblock_bytes(image, offset):
            whole, other = found_in(tmp_path / "ssd", flipped(image, at))
            # The older copy knows the second extent with its former class, whose slots began elsewhere.
            assert (whole, other) == (FINAL - {7} if offset == newest else FINAL, set()), at


def test_a_flipped_byte_in_a_header_makes_that_header_invalid(image: bytes, tmp_path: Path) -> None:
    start = 128 << 10
    for index, number in enumerate((0, 1, 4)):
        for at in range(start + index * HEADER_BYTES, start + (index + 1) * HEADER_BYTES, 3):
            assert found_in(tmp_path / "ssd", flipped(image, at)) == (FINAL - {number}, set()), at


def test_a_flipped_byte_in_a_slot_is_left_to_its_checksums(image: bytes, tmp_path: Path) -> None:
    start = (128 << 10) + UNIT_BYTES
    for index, number in enumerate((0, 1, 4)):
        for at in range(start + index * SLOT_BYTES, start + (index + 1) * SLOT_BYTES, 997):
            assert found_in(tmp_path / "ssd", flipped(image, at)) == (FINAL - {number}, {number}), at


def test_a_flipped_byte_anywhere_is_never_wrong_bytes(image: bytes, tmp_path: Path) -> None:
    rng = random.Random(11)
    assert found_in(tmp_path / "ssd", image) == (FINAL, set())
    for at in rng.sample(range(SIZE_BYTES), 200):
        whole, other = found_in(tmp_path / "ssd", flipped(image, at))
        assert whole <= FINAL and other <= FINAL and len(FINAL - whole) <= 1, at


def test_a_second_crash_while_it_starts_changes_nothing(tmp_path: Path) -> None:
    image = bytes(image_of(Workload(tmp_path / "first").run()))
    path, recorder = tmp_path / "ssd", Recorder()
    path.write_bytes(image)
    with open_arena(path, epoch=3, calls=recorder.calls):
        pass
    for _, after in crashes([Event(len(image), None), Event(0, image), *recorder.events])[4:]:
        assert found_in(path, after) == (FINAL, set())


def test_a_crash_between_making_and_finishing_the_file_leaves_one_that_starts(tmp_path: Path) -> None:
    recorder = Recorder()
    with open_arena(tmp_path / "first", calls=recorder.calls):
        pass
    for count, image in crashes(recorder.events):
        path = tmp_path / "ssd"
        path.write_bytes(image)
        with open_arena(path) as arena:
            store(arena, 0, cut(arena, 1)[0].slot(0))
        assert found_in(path, path.read_bytes()) == ({0}, set()), count
