"""What a restarted worker makes of the shared memory that an earlier one left, at whatever store that one died.

Believed are the entries of the catalog that are even and whose slot has the same generation, together with the slot's
record; that is what readers believe as well. Everything else is emptied in the order of a withdrawal (generation of
the slot, tag, entry). Slots that were reserved or in quarantine stay out of use until their writer has ended: it may
be in the middle of a copy. Leases and pins are not in shared memory and are gone.

A crash in the middle of this is repaired by doing it again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import LayoutMismatch
from kvstore.model.values import Tier
from kvstore.node.catalog import BUCKET_ENTRIES, ENTRY_WORDS, RECORD_WORDS, CatalogShape, age_of
from kvstore.node.chunks import Chunk, Copy, KnownNamespace
from kvstore.node.core import NodeCore
from kvstore.node.handover import KeptWriter, Owner, Seat
from kvstore.node.pool import SlotState

_LOW_32 = (1 << 32) - 1
_LOW_48 = (1 << 48) - 1
_TWO_WORDS = struct.Struct("<QQ")
_NOBODY: Owner = (0, 0)
_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of an earlier worker's contents; counts of chunks, of shards and of slots.

    `holders`: sessions that stand for the processes behind the quarantined slots.
    """

    chunks: int
    shards: int
    dropped_shards: int
    quarantined_slots: int
    holders: dict[Owner, int]


def recover(core: NodeCore, memory: mmap.mmap, now_s: float) -> Recovered:
    """Fill a fresh core from `memory`, the catalog that its writer has taken over. `now_s`: the core's clock.

    Afterwards what lies on the SSD may be taken up; `core.settle` comes last.

    Raises LayoutMismatch where the memory contradicts itself; only new memory helps then.
    """
    return _Recovery(core, memory, now_s).run()


class _Recovery:
    def __init__(self, core: NodeCore, memory: mmap.mmap, now_s: float) -> None:
        self._core = core
        self._now_s = now_s
        self._catalog = catalog = core.pool.catalog
        shape: CatalogShape = catalog.shape
        words = np.frombuffer(memory, dtype="<u8")
        entry_words = shape.buckets * BUCKET_ENTRIES * ENTRY_WORDS
        self._entries: _Words = words[shape.entries_offset // 8 :][:entry_words].reshape(-1, ENTRY_WORDS)
        self._tags = words[shape.tags_offset // 8 :][: shape.buckets].view("<u2")
        self._generations: _Words = words[shape.generations_offset // 8 :][: shape.units]
        record_words = shape.units * RECORD_WORDS
        self._records: _Words = words[shape.records_offset // 8 :][:record_words].reshape(-1, RECORD_WORDS)
        self._spaces: dict[int, KnownNamespace] = {}
        self._kept_entries: set[int] = set()
        self._slots: dict[int, int] = {}
        """Slots in use after all, with their size in bytes."""

    def run(self) -> Recovered:
        """See `recover`."""
        pool = self._core.pool
        self._know_namespaces()
        for entry in self._valid_entries():
            if self._adopt(entry):
                self._kept_entries.add(entry)
        held = self._held_slots()
        self._free_slots()
        dropped = self._clear_entries()
        pool.allocator.adopt(self._slots.items())
        holders = {owner: self._core.keep_out(owner, slots) for owner, slots in held.items()}
        quarantined = sum(len(several) for slots in held.values() for several in slots.values())
        return Recovered(pool.chunk_count, len(self._kept_entries), dropped, quarantined, holders)

    def _know_namespaces(self) -> None:
        namespaces, geometries = self._catalog.load_directory()
        for number, namespace in namespaces.items():
            self._spaces[number] = self._core.know(namespace, None, ())
        for listed in geometries:
            namespace = namespaces[listed.namespace_number]
            self._core.know(namespace, listed.geometry, listed.written_here)

    # --- what is kept ------------------------------------------------------------------------------------

    def _valid_entries(self) -> list[int]:
        """Entries that a reader would believe, in the order of their commits."""
        generations = self._entries[:, 3]
        slots = (self._entries[:, 5] & np.uint64(_LOW_32)).astype(np.int64)
        valid = (generations & np.uint64(1) == 0) & (generations != 0) & (slots < len(self._generations))
        valid &= self._generations.take(slots, mode="clip") == generations
        chosen = np.flatnonzero(valid).tolist()
        return sorted(chosen, key=lambda entry: age_of(int(generations[entry])))

    def _adopt(self, entry: int) -> bool:
        """Take up one valid entry; False if it and its slot's record do not tell of one shard that is known."""
        row: list[int] = self._entries[entry].tolist()
        slot, length, shard = row[5] & _LOW_32, row[5] >> 32, row[6] & _LOW_32
        number, tier = row[6] >> 32 & 0xFFFFFF, row[6] >> 56
        record: list[int] = self._records[slot].tolist()
        space = self._spaces.get(number)
        kind = space.kinds.get(shard) if space is not None else None
        same = record[4:6] == row[:2] and record[2] >> 32 == shard and record[0] == SlotState.COMMITTED | number << 32
        if space is None or kind is None or not same or tier != Tier.DRAM or length != kind.payload_bytes:
            return False
        if slot in self._slots:
            return False
        chunk = self._chunk(space, row, _key(record[6:8]))
        if chunk is None or shard in chunk.copies or not self._catalog.claim_again(entry, chunk.key, shard):
            return False
        if not chunk.copies:
            self._core.pool.forest.add(chunk)
        pool = self._core.pool
        pool.adopt(pool.dram, chunk, shard, Copy(slot, row[3], entry, kind.slot_bytes, row[4]))
        self._slots[slot] = kind.slot_bytes
        return True

    def _chunk(self, space: KnownNamespace, row: list[int], parent_key: bytes) -> Chunk | None:
        """The chunk of an entry, new if this is its first shard; None if another shard tells of another chunk."""
        key, own, parent, tokens = _key(row[:2]), row[7] & _LOW_48, row[2], row[7] >> 48
        has_prints = bool(own or parent)
        known = self._core.pool.forest.get(key)
        if known is None:
            return Chunk(
                key=key,
                parent_key=parent_key,
                space=space,
                token_count=tokens,
                fingerprint=own if has_prints else None,
                parent_fingerprint=parent if has_prints else None,
                first_seen_s=self._now_s,
            )
        differs = known.differs(space, parent_key, own if has_prints else None, parent if has_prints else None)
        return None if differs or known.token_count != tokens else known

    # --- what is not -------------------------------------------------------------------------------------

    def _held_slots(self) -> dict[Owner, dict[int, list[tuple[int, int]]]]:
        """Slots that somebody may be writing into: owner -> attempt -> (slot, bytes).

        Also a slot that is noted as committed and is not visible: the worker died in the middle of a commit, and its
        client was not told that the slot is not its own any more (or in the middle of a withdrawal: one slot too many).
        """
        held: dict[Owner, dict[int, list[tuple[int, int]]]] = {}
        for slot in self._begun_slots():
            word, attempt, pid_and_shard, started = self._records[slot, :4].tolist()
            owner = pid_and_shard & _LOW_32, started
            is_free = word & _LOW_32 == SlotState.FREE
            if slot in self._slots or is_free or owner == _NOBODY:  # nobody: a stream, which the worker wrote itself
                continue
            space = self._spaces.get(word >> 32)
            kind = space.kinds.get(pid_and_shard >> 32) if space is not None else None
            if kind is None:
                raise LayoutMismatch(f"slot {slot} is in use for a shard that nobody registered")
            held.setdefault(owner, {}).setdefault(attempt, []).append((slot, kind.slot_bytes))
        for several in (slots for attempts in held.values() for slots in attempts.values()):
            self._slots.update(several)
            for slot, _ in several:
                self._set_aside(slot, SlotState.QUARANTINED)
        return held

    def _begun_slots(self) -> list[int]:
        """Slots whose record or generation says that they are in use."""
        begun = np.flatnonzero(self._generations)
        free = self._records[begun, 0] & np.uint64(_LOW_32) == int(SlotState.FREE)
        odd = self._generations[begun] & np.uint64(1) == 1
        slots: list[int] = begun[~(free & odd)].tolist()
        return slots

    def _free_slots(self) -> None:
        """Every slot that is not in use. Before its entry is emptied, see `withdraw`."""
        for slot in self._begun_slots():
            if slot not in self._slots:
                self._set_aside(slot, SlotState.FREE)

    def _set_aside(self, slot: int, state: SlotState) -> None:
        """An odd generation first, so that no reader believes in it; then the state."""
        if not self._catalog.generation(slot) & 1:
            self._catalog.raise_generation(slot)
        self._catalog.set_state(slot, state)

    def _clear_entries(self) -> int:
        """Empty what is not kept; returns how many entries told of something."""
        words = self._entries
        told = words.any(axis=1) | (self._tags != 0)
        dropped = 0
        for entry in np.flatnonzero(told).tolist():
            if entry in self._kept_entries:
                continue
            row: list[int] = words[entry].tolist()
            if any(row[:3]) or any(row[4:]) or self._tags[entry] or not row[3] & 1:
                self._catalog.clear(entry, row[3] | 1)
                dropped += 1
        return dropped


def _key(words: Sequence[int]) -> bytes:
    return _TWO_WORDS.pack(*words)


class FormerWriters:
    """The processes behind `Recovered.holders`. `poll` gives back what belonged to those that have ended.

    A pidfd that the supervisor kept tells it for certain, also across containers. For a process without one, which
    cannot have got writable memory, its pid and start time in /proc have to do.
    """

    def __init__(self, core: NodeCore, holders: dict[Owner, int], seat: Seat | None) -> None:
        self._core = core
        self._holders = dict(holders)
        self._seat = seat
        self._kept: dict[Owner, list[KeptWriter]] = {}
        for writer in seat.writers if seat is not None else ():
            if writer.owner in holders:
                self._kept.setdefault(writer.owner, []).append(writer)
            else:
                self._forget(writer)

    def __len__(self) -> int:
        return len(self._holders)

    def poll(self) -> None:
        """Look at all of them; never waits."""
        for owner in [owner for owner in self._holders if self._has_ended(owner)]:
            self._core.process_gone(self._holders.pop(owner))
            for writer in self._kept.pop(owner, ()):
                self._forget(writer)

    def _has_ended(self, owner: Owner) -> bool:
        kept = self._kept.get(owner)
        if kept:
            return all(has_ended(writer.pidfd) for writer in kept)
        return not is_running(*owner)

    def _forget(self, writer: KeptWriter) -> None:
        os.close(writer.pidfd)
        if self._seat is not None:
            self._seat.drop(writer.session)


def has_ended(pidfd: int) -> bool:
    """True if the process of a pidfd has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def is_running(pid: int, start_time: int) -> bool:
    """True if the process with this pid began at this time (clock ticks since boot) and is not a zombie."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) == start_time and fields[0] not in "ZX"
    return False
