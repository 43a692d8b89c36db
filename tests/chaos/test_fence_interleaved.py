"""The fence of a same-host read, with the writer and the reader stopped between any two of their memory accesses.

Every history is read under every schedule (see `interleaver`), with the rows gathered upwards, downwards and in
shuffled orders: never wrong bytes. Then each guard is switched off, and the same search finds wrong bytes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvstore.node.catalog import ENTRY_WORDS, CatalogWriter, EntryValue, tag_of
from kvstore.node.lookup import CatalogReader, Found
from tests.chaos.interleaver import (
    ASCENDING,
    DESCENDING,
    X_OTHER_TOKENS,
    Y_OTHER_TAG,
    Ending,
    OvertakenAtRandom,
    OvertakenTwice,
    Prompt,
    RacedReader,
    Timeline,
    X,
    Y,
    count_endings,
    ever_wrong,
)

Orders = tuple[Sequence[int], Sequence[int]]
STRAIGHT: list[Orders] = [(first, second) for first in (ASCENDING, DESCENDING) for second in (ASCENDING, DESCENDING)]


def _shuffled() -> list[Orders]:
    generator = random.Random(20)
    return [(generator.sample(ASCENDING, ENTRY_WORDS), generator.sample(ASCENDING, ENTRY_WORDS)) for _ in range(4)]


ORDERS = STRAIGHT + _shuffled()

# --- histories: what the writer does while a read goes on ----------------------------------------------------


def slot_and_entry_to_another_key(time: Timeline, x: Prompt, y: Prompt, slot: int) -> None:
    time.put(x, slot)
    time.begin()
    time.withdraw(x)
    time.put(y, slot)


def slot_to_another_key_and_back(time: Timeline, x: Prompt, y: Prompt, slot: int) -> None:
    slot_and_entry_to_another_key(time, x, y, slot)
    time.withdraw(y)
    time.put(x, slot)


def key_to_another_slot(time: Timeline, x: Prompt, y: Prompt, slot: int) -> None:
    """The entry stays the key's own; its old slot goes to the other key."""
    time.put(x, slot)
    time.begin()
    time.withdraw(x)
    time.put(x, 1 - slot)
    time.put(y, slot)


def keys_change_places(time: Timeline, x: Prompt, y: Prompt, slot: int) -> None:
    """Entries and slots of two keys, crosswise."""
    time.put(x, slot)
    time.put(y, 1 - slot)
    time.begin()
    time.withdraw(x)
    time.withdraw(y)
    time.put(y, slot)
    time.put(x, 1 - slot)


def entry_to_another_slot_and_back(time: Timeline, x: Prompt, y: Prompt, slot: int) -> None:
    """The other key lies elsewhere, in the first one's entry; then the first one comes back into it."""
    time.put(x, slot)
    time.begin()
    time.withdraw(x)
    time.put(y, 1 - slot)
    time.withdraw(y)
    time.put(x, slot)


def first_publish(time: Timeline, x: Prompt, y: Prompt, slot: int) -> None:
    """Nothing was ever in entry and slot; then the other key after the first."""
    time.begin()
    time.put(x, slot)
    time.withdraw(x)
    time.put(y, slot)


History = Callable[[Timeline, Prompt, Prompt, int], None]
HISTORIES: list[History] = [
    slot_and_entry_to_another_key,
    slot_to_another_key_and_back,
    key_to_another_slot,
    keys_change_places,
    entry_to_another_slot_and_back,
    first_publish,
]
PAIRS = [(X, Y), (Y, X), (X, Y_OTHER_TAG), (X, X_OTHER_TOKENS)]


def _history(
    history: History, pair: tuple[Prompt, Prompt], slot: int, writer: type[CatalogWriter] = CatalogWriter
) -> Timeline:
    time = Timeline(writer)
    history(time, *pair, slot)
    return time


# --- all guards on --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("slot", [0, 1])  # a cleared word 5 names slot 0
@pytest.mark.parametrize("history", HISTORIES)
def test_never_wrong_bytes_under_any_schedule(history: History, slot: int) -> None:
    total: Counter[Ending] = Counter()
    for pair in PAIRS:
        if pair[1] is X_OTHER_TOKENS and history in (keys_change_places, key_to_another_slot):
            continue  # a node refuses the second of two prompts with one key while the first is there
        time = _history(history, pair, slot)
        for orders in ORDERS:
            for with_prints in (True, False):
                if pair[1] is X_OTHER_TOKENS and not with_prints:
                    continue  # without tokens nobody can tell them apart
                endings = count_endings(RacedReader(time, pair[0], orders, with_prints=with_prints))
                assert endings[Ending.HIT] and not endings[Ending.WRONG], (pair, orders, with_prints, endings)
                total += endings
    print(f"{history.__name__}, slot {slot}: {total[Ending.HIT]} hits, {total[Ending.MISS]} misses")


@pytest.mark.slow
@pytest.mark.parametrize("history", HISTORIES)
def test_never_wrong_bytes_under_random_schedules(history: History) -> None:
    """Without the cuts of the search: the writer comes as far as it likes before any load."""
    generator = random.Random(21)
    endings: Counter[Ending] = Counter()
    time = _history(history, (X, Y), 0)
    for orders in ORDERS:
        reader = RacedReader(time, X, orders, with_prints=False)
        endings += Counter(reader.read(OvertakenAtRandom(time, generator)) for _ in range(300))
    assert not endings[Ending.WRONG] and endings[Ending.HIT] and endings[Ending.MISS], endings


@pytest.mark.slow
@pytest.mark.parametrize("orders", STRAIGHT)
def test_a_writer_stopped_at_any_two_stores_and_a_reader_at_any_load(orders: Orders) -> None:
    """The whole grid: the read begins after one number of stores and goes on, from any of its loads, after another."""
    time = _history(slot_to_another_key_and_back, (X, Y), 0)
    reader = RacedReader(time, X, orders, with_prints=False)
    unraced = OvertakenTwice(time, 0, 0, 0)
    assert reader.read(unraced) is Ending.HIT
    endings: Counter[Ending] = Counter()
    for first in range(len(time) + 1):
        for second in range(first, len(time) + 1, 2):
            endings += Counter(
                reader.read(OvertakenTwice(time, first, second, at)) for at in range(0, unraced.loads, 2)
            )
    assert not endings[Ending.WRONG] and endings[Ending.HIT], endings


# --- each guard off -------------------------------------------------------------------------------------------


class GenerationOnly(CatalogReader):
    """The second gather looks at the generation alone."""

    def confirm(self, found: Found) -> int:
        again = self._gather(self._entries, found.entries)
        slots = (found.rows[:, 5] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        same = self._generations.take(slots, mode="clip") == found.rows[:, 3]
        return int((again[:, 3] == found.rows[:, 3]).all() and same.all())


class NoSlotGeneration(CatalogReader):
    """The slot's own generation is not looked at."""

    def confirm(self, found: Found) -> int:
        return int((self._gather(self._entries, found.entries) == found.rows).all())


class NoSecondGather(CatalogReader):
    """Only the slot's generation is looked at."""

    def confirm(self, found: Found) -> int:
        slots = (found.rows[:, 5] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return int((self._generations.take(slots, mode="clip") == found.rows[:, 3]).all())


class SlotGenerationFirst(CatalogReader):
    """The slot's generation is loaded before the second gather and not after it."""

    def confirm(self, found: Found) -> int:
        slots = (found.rows[:, 5] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        same = self._generations.take(slots, mode="clip") == found.rows[:, 3]
        return int((self._gather(self._entries, found.entries) == found.rows).all() and same.all())


class NoFence(CatalogReader):
    """What was found counts."""

    def confirm(self, found: Found) -> int:
        return found.run


@pytest.mark.parametrize(
    ("reader", "orders", "compared"),
    [
        (GenerationOnly, (ASCENDING, ASCENDING), (3,)),
        (NoSlotGeneration, (ASCENDING, DESCENDING), ASCENDING),
        (NoSecondGather, (ASCENDING, ASCENDING), ()),
        (SlotGenerationFirst, (ASCENDING, DESCENDING), ASCENDING),
        (NoFence, (ASCENDING, ASCENDING), ()),
    ],
)
def test_a_reader_without_one_guard_takes_wrong_bytes(
    reader: type[CatalogReader], orders: Orders, compared: Sequence[int]
) -> None:
    time = _history(entry_to_another_slot_and_back, (X, Y), 0)
    for with_prints in (False, True):
        raced = RacedReader(time, X, orders, reader, with_prints, compared)
        # Fingerprints stand in word 7, behind the generation: read upwards, a torn row shows the other key's.
        torn_upwards = with_prints and reader is not NoFence
        assert ever_wrong(raced) is not torn_upwards
        assert not ever_wrong(RacedReader(time, X, orders, with_prints=with_prints))


class NeverRaised(CatalogWriter):
    """A slot's next use carries the number of the one before."""

    def raise_generation(self, slot: int) -> int:
        present = self.generation(slot)
        if not present:
            return super().raise_generation(slot)
        self._store(self._generations_word + slot, present | 1)
        return present | 1


def test_a_generation_that_is_not_raised_lets_wrong_bytes_pass() -> None:
    """The slot is the first key's again when the reader looks for the second time; in between it was not."""
    assert ever_wrong(RacedReader(_history(slot_to_another_key_and_back, (X, Y), 1, NeverRaised), X))
    assert not ever_wrong(RacedReader(_history(slot_to_another_key_and_back, (X, Y), 1), X))


class _Marker(CatalogWriter):
    """A publish without the odd generation before, and a withdraw that does not clear the entry, as chosen."""

    odd_first = True
    clears = True

    def publish(self, entry: int, value: EntryValue) -> None:
        at, words = self._entries_word + entry * ENTRY_WORDS, value.words()
        self._store(self._generations_word + value.slot, value.generation)
        self._store(at + 3, value.generation | self.odd_first)
        for word in (0, 1, 2, 4, 5, 6, 7):
            self._store(at + word, words[word])
        self._store(at + 3, value.generation)
        self._store_tag(entry, tag_of(value.key, value.shard))

    def withdraw(self, entry: int, slot: int) -> int:
        if self.clears:
            return super().withdraw(entry, slot)
        generation = self.raise_generation(slot)
        self._store_tag(entry, 0)
        self._store(self._entries_word + entry * ENTRY_WORDS + 3, generation)
        self.unclaim(entry)
        return generation


class NoOddMarker(_Marker):
    odd_first = False


class NotCleared(_Marker):
    clears = False


class NeitherMarkerNorClearing(_Marker):
    odd_first = False
    clears = False


def test_the_odd_marker_and_the_cleared_entry_stand_in_for_each_other() -> None:
    """Either is enough, also downwards and shuffled; with both off the old key stands beside the new generation."""
    for history in (slot_and_entry_to_another_key, slot_to_another_key_and_back):
        for writer, wrong in (
            (_Marker, False),
            (NoOddMarker, False),
            (NotCleared, False),
            (NeitherMarkerNorClearing, True),
        ):
            time = _history(history, (X, Y), 1, writer)
            found = [ever_wrong(RacedReader(time, X, orders, with_prints=False)) for orders in ORDERS]
            assert any(found) is wrong, (history, writer)


def _published_before_it_is_filled(time: Timeline) -> None:
    time.put(Y, 0)
    time.withdraw(Y)
    time.begin()
    time.reserve(X, 0)
    time.fill(X, slice(0, 3))
    time.publish(X)
    time.fill(X, slice(3, 4))


def _reused_before_it_is_withdrawn(time: Timeline) -> None:
    time.put(X, 0)
    time.begin()
    time._slots[Y.key] = 0
    time.fill(Y)
    time.withdraw(X)


@pytest.mark.parametrize("order", [_published_before_it_is_filled, _reused_before_it_is_withdrawn])
def test_publish_after_commit_and_withdraw_before_reuse_are_needed(order: Callable[[Timeline], None]) -> None:
    time = Timeline()
    order(time)
    assert ever_wrong(RacedReader(time, X))


def test_a_copy_that_overtakes_the_fence_needs_the_checksum() -> None:
    """On weakly ordered CPUs the copy's last load may come after the fence's; only the bytes themselves then tell."""
    time = _history(slot_and_entry_to_another_key, (X, Y), 0)
    assert ever_wrong(RacedReader(time, X, copy_late=True))
    endings = count_endings(RacedReader(time, X, copy_late=True, verify=True))
    assert endings[Ending.HIT] and not endings[Ending.WRONG]
