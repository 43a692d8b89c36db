"""Writing to the own host's node: Reserve, copy into the slots, Commit with checksums.

The source is kept until the last Commit: a key that somebody else was writing may come back free, and is then
written from the same source. Slots are written only between the grant and the end of the reservation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import numpy as np

from kvstore.client.copiers import ALONE, Copiers
from kvstore.client.host import HostNode
from kvstore.client.values import (
    Asynchronous,
    Bytes,
    Source,
    WriteResult,
    gathers_at_once,
    is_asynchronous,
    takes_checksums,
)
from kvstore.errors import ForkedProcess, InvalidRequest, KvStoreError, SessionLost
from kvstore.model import checksum
from kvstore.model.layout import PageLayout, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome
from kvstore.node import CommitAnswer, ReserveAnswer

UNIT_BYTES = 4096
CACHE_BYTES = 1 << 20
"""What is copied before its checksums are taken, as much as a common second-level cache holds. With half of it two
threads that copy win nothing: they change places here."""
SUMMED_BYTES = 8 << 20
"""What a source copies in one call that takes checksums on the way: whoever ends its copies waits for that long."""
_ROUNDS = 3
"""Second looks at keys in progress; what is still in progress then is left to its writer."""
_ABORT_S = 1.0
"""Least time for giving a reservation back, in seconds."""


@dataclass(slots=True)
class _Filled:
    """Which layers of a granted chunk are written (one bit a layer), and their checksums (layers, heads)."""

    layers: int
    table: checksum.Table | None


@dataclass(slots=True)
class _Given:
    """A source that the caller gave, and the chunks that it gave it for (None = all)."""

    source: Source
    chunks: set[int] | None


@dataclass(slots=True)
class PendingWrite:
    """A reservation that the caller fills and commits, layer by layer if it likes.

    `granted`: places in the keys that the caller must fill. Not thread-safe. Must end with `commit()` or
    `abort()`; used as a context manager it aborts what was not committed.
    """

    host: HostNode
    layout: PageLayout
    rectangle: Rectangle
    keys: Keys
    answer: ReserveAnswer
    deadline_s: float
    checksums: bool = True
    copiers: Copiers = ALONE
    """Copy and take checksums, where the source lets several threads call it."""
    outcomes: list[Outcome] = field(init=False)
    _shape: tuple[int, int, int, int] = field(init=False)
    _payload_bytes: int = field(init=False)
    _slots: dict[int, int] = field(init=False)
    _filled: dict[int, _Filled] = field(init=False, default_factory=dict)
    _sources: dict[tuple[int, int, int], _Given] = field(init=False, default_factory=dict)
    _copying: dict[int, Asynchronous] = field(init=False, default_factory=dict)
    """Sources whose copies may be under way, by `id`."""
    _unsummed: list[tuple[int, int, int]] = field(init=False, default_factory=list)
    """(place in the keys, first layer, stop layer) that such a source fills and whose checksums are not taken yet."""
    _pid: int = field(init=False, default_factory=os.getpid)
    _ended: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._shape = self.layout.shape(self.rectangle)
        self._payload_bytes = self.layout.payload_bytes(self.rectangle)
        self.outcomes = list(self.answer.outcomes)
        self._slots = {i: slot for i, slot in enumerate(self.answer.slots) if self.outcomes[i] is Outcome.GRANTED}

    def __enter__(self) -> PendingWrite:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._ended:
            return
        try:
            self.abort()
        except KvStoreError:
            if error is None:  # else the first failure is the one to tell of
                raise

    @property
    def granted(self) -> tuple[int, ...]:
        """Places in the keys that are reserved for this caller and not committed yet."""
        return tuple(self._slots)

    def put_layers(
        self, layer_start: int, layer_stop: int, source: Source, chunks: Sequence[int] | None = None
    ) -> None:
        """Copy layers [layer_start, layer_stop) (numbers of the model) of the granted chunks out of `source`.

        `chunks`: places in the keys; None = all granted. Places that are not granted are skipped. The source must
        stay as it is until `commit()`; an asynchronous one is only begun here. Raises SessionLost if the node has gone.
        """
        if not self.rectangle.layer_start <= layer_start < layer_stop <= self.rectangle.layer_stop:
            raise InvalidRequest(f"layers {layer_start}..{layer_stop} do not lie in {self.rectangle}")
        self._check_process()
        given = self._sources.setdefault((layer_start, layer_stop, id(source)), _Given(source, set()))
        given.chunks = None if chunks is None or given.chunks is None else given.chunks.union(chunks)
        if not self.host.alive:
            raise SessionLost("the node's session ended; what was not committed is lost")
        first, last = layer_start - self.rectangle.layer_start, layer_stop - self.rectangle.layer_start
        places = tuple(self._slots) if chunks is None else tuple(i for i in dict.fromkeys(chunks) if i in self._slots)
        for index in places:
            self._filled.setdefault(index, _Filled(0, None))
        asynchronous = source if is_asynchronous(source) else None
        if asynchronous is not None:
            self._copying[id(source)] = asynchronous
            self._unsummed += [(index, first, last) for index in places if self.checksums]
            ALONE.each(places, 0, partial(self._put, first, last, source, False))
            asynchronous.launch()
        else:
            copiers = self.copiers if gathers_at_once(source) else ALONE
            piece_bytes = self._payload_bytes * (last - first) // self.rectangle.layers
            copiers.each(places, piece_bytes, partial(self._put, first, last, source, self.checksums))

    def _put(self, first: int, last: int, source: Source, sums: bool, index: int) -> None:
        """Copy layers [first, last) of the rectangle of one chunk, and take their checksums on the way if `sums`."""
        pages, state = self._pages(index)[first:last], self._filled[index]
        if sums:
            self._copy_and_sum(index, pages, self.rectangle.layer_start + first, source, state)
        else:
            source.gather(index, pages, self.rectangle.layer_start + first, self.rectangle.head_start)
        state.layers |= (1 << last) - (1 << first)

    def _wait_copied(self) -> None:
        """No source writes into a slot any more when this returns. If one fails, nothing counts as filled."""
        filled, self._filled = self._filled, {}
        for place, source in list(self._copying.items()):
            source.synchronize()
            del self._copying[place]
        self._filled = filled

    def _sum_copied(self) -> None:
        """Wait for asynchronous sources, then take the checksums of what they have filled."""
        self._wait_copied()
        for index, first, last in self._unsummed:
            if index in self._filled:
                self._sum(self._filled[index], self._pages(index)[first:last], self.rectangle.layer_start + first)
        self._unsummed.clear()

    def _copy_and_sum(self, index: int, pages: Bytes, layer_start: int, source: Source, state: _Filled) -> None:
        """Where the source does not take the checksums, take them piece by piece, still in the core's own cache."""
        summing = source if takes_checksums(source) else None
        step = max(1, (CACHE_BYTES if summing is None else SUMMED_BYTES) // pages[0].nbytes)
        for start in range(0, len(pages), step):
            piece, layer = pages[start : start + step], layer_start + start
            if summing is None:
                source.gather(index, piece, layer, self.rectangle.head_start)
                self._sum(state, piece, layer)
            else:
                self._note_sums(state, summing.gather_summed(index, piece, layer, self.rectangle.head_start), layer)

    def _sum(self, state: _Filled, pages: Bytes, layer_start: int) -> None:
        """Take the checksums of these layers (layers, pages, heads, head_page_bytes) of a chunk."""
        self._note_sums(state, checksum.table_of_layers(pages), layer_start)

    def _note_sums(self, state: _Filled, table: checksum.Table, layer_start: int) -> None:
        if state.table is None:
            state.table = np.zeros((self.rectangle.layers, self.rectangle.heads), dtype="<u8")
        first = layer_start - self.rectangle.layer_start
        state.table[first : first + len(table)] = table

    def commit(self, upto: int | None = None) -> WriteResult:
        """Make filled chunks visible.

        `upto`: only places below it, and the reservation goes on; None: all, and it ends.
        A granted chunk that is not filled in all layers is given back at the end. Keys that others were writing are
        looked at again at the end and written too if they came free.
        """
        self._check_process()
        self._sum_copied()
        last = upto is None
        self._commit([i for i in self._slots if upto is None or i < upto], last)
        rounds = 0
        while last and self._slots and rounds < _ROUNDS:
            rounds += 1
            for (layer_start, layer_stop, _), given in list(self._sources.items()):
                meant = [i for i in self._slots if given.chunks is None or i in given.chunks]
                self.put_layers(layer_start, layer_stop, given.source, meant)
            self._sum_copied()
            self._commit(list(self._slots), last)
        if last and self._slots:
            self.abort()
        self._ended = self._ended or last
        return WriteResult(tuple(self.outcomes))

    def _ready(self, places: Sequence[int]) -> list[int]:
        whole = (1 << self.rectangle.layers) - 1
        return [i for i in places if i in self._filled and self._filled[i].layers == whole]

    def _commit(self, places: list[int], last: bool) -> None:
        ready = self._ready(places)
        if not self.answer.attempt or (not ready and not last):
            return
        hashes = [self._write_table(index) for index in ready]
        answer = self.host.api.commit(self.answer.attempt, ready, hashes, last, self._left())
        self._note(ready, answer, last)

    def _note(self, ready: list[int], answer: CommitAnswer, last: bool) -> None:
        for index, outcome in zip(ready, answer.outcomes, strict=True):
            self.outcomes[index] = outcome
            self._slots.pop(index)
            self._filled.pop(index)
        if last:
            for index in self._slots:  # not filled: given back
                self.outcomes[index] = Outcome.REFUSED_STALE
            self._slots = {}
            for index, outcome, slot in answer.waiting:
                self.outcomes[index] = outcome
                if outcome is Outcome.GRANTED:
                    self._slots[index] = slot
        if any(outcome is Outcome.REFUSED_STALE for outcome in answer.outcomes):
            # The reservation ended under us, or a part of it was removed. The abort says that we have stopped
            # writing, so no slot of it may be written after this.
            self.abort()

    def abort(self) -> None:
        """Give everything back that was not committed."""
        self._check_process()
        self._ended = True
        for index in self._slots:
            self.outcomes[index] = Outcome.REFUSED_STALE
        self._slots = {}
        self._wait_copied()  # the answer to an abort may be that somebody else gets the slots
        if self.answer.attempt:
            # Also after the deadline: what is not given back stays reserved as long as the session lives.
            self.host.api.abort(self.answer.attempt, max(_ABORT_S, self._left()))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this write belongs to the parent process, which alone may go on with it")

    def _pages(self, index: int) -> Bytes:
        """The payload of a granted slot, (layers, pages, heads, head_page_bytes)."""
        start = self._slots[index] * UNIT_BYTES
        return self.host.arena[start : start + self._payload_bytes].reshape(self._shape)

    def _write_table(self, index: int) -> int:
        """Put the checksum table behind the payload; returns its hash, 0 without checksums."""
        table = self._filled[index].table
        if table is None:
            return 0
        start = self._slots[index] * UNIT_BYTES + self._payload_bytes
        self.host.arena[start : start + table.nbytes] = table.view(np.uint8).ravel()
        return checksum.table_hash(table)

    def _left(self) -> float:
        return max(0.001, self.deadline_s - time.monotonic())
