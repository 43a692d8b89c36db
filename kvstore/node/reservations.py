"""Who may write into which slot: attempts, grants and quarantine. Pure, synchronous.

Only the session that got a grant writes into its slot. A grant ends by commit, by abort (the client says that
it has stopped writing), or by running out. A slot whose grant ran out, or whose session was lost, is
quarantined: it is not handed out again before the writing process is certainly unable to write into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome
from kvstore.node import KEYS_LIMIT, CommitAnswer, ReserveAnswer
from kvstore.node.chunks import Chunk, KnownNamespace
from kvstore.node.pool import Pool, SlotState

ATTEMPTS_PER_SESSION = 1024
"""Reservations of one session at a time; a further one is refused like one over the session's bytes."""

ALL_PLACES: Final = range(KEYS_LIMIT)
"""A writer wants every chunk of its chain."""


@dataclass(slots=True, eq=False)
class Writer:
    """The session behind grants. `owner` = (pid, start time) of its process, (0, 0) if unknown.

    `held_bytes` counts reserved plus quarantined slots and is bounded by `limit_bytes`.
    """

    session: int
    owner: tuple[int, int]
    limit_bytes: int
    held_bytes: int = 0
    attempts: dict[int, Attempt] = field(default_factory=dict)
    quarantined: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Attempt -> (slot, bytes) that wait for an abort or for the end of the process."""


@dataclass(slots=True, eq=False)
class Grant:
    """One slot reserved for one shard of one chunk."""

    chunk: Chunk
    slot: int
    entry: int
    size_bytes: int


@dataclass(slots=True, eq=False)
class Attempt:
    """One Reserve: the chain, the shard, what was granted (by place in the chain) and what others are writing."""

    number: int
    writer: Writer
    space: KnownNamespace
    keys: Keys
    shard: int
    ticket_id: bytes
    expires_s: float
    wanted: Container[int]
    """Places in the chain that this writer stores; the others are stored by others, before or after it."""
    key_list: list[bytes] = field(init=False)
    """The keys as a list, and below it their fingerprints as ints: a batch looks at each several times."""
    prints: list[int] | None = field(init=False)
    last: int = field(init=False)
    grants: dict[int, Grant] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.key_list = list(self.keys)
        self.last = len(self.key_list) - 1
        self.prints = None if self.keys.fingerprints is None else self.keys.fingerprints.tolist()

    def parent_key(self, index: int) -> bytes:
        """Key of the chunk before the one at this place."""
        return self.key_list[index - 1] if index else self.keys.parent

    def collides(self, chunk: Chunk, index: int) -> bool:
        """True if the stored chunk is not the one that this attempt means."""
        prints = self.prints
        own, parent = (None, None) if prints is None else (prints[index + 1], prints[index])
        return chunk.differs(self.space, self.parent_key(index), own, parent)


class Reservations:
    """All live attempts of a node. Time comes in as `now_s` (monotonic seconds)."""

    def __init__(self, pool: Pool, first_attempt: int) -> None:
        self._pool = pool
        self._next = first_attempt
        self.draining = False
        """Nothing new is granted."""
        self.attempts: dict[int, Attempt] = {}

    # --- reserve -----------------------------------------------------------------------------------------

    def reserve(
        self,
        writer: Writer,
        space: KnownNamespace,
        keys: Keys,
        shard: int,
        ticket_id: bytes,
        now_s: float,
        life_s: float,
        wanted: Container[int] = ALL_PLACES,
    ) -> tuple[ReserveAnswer, Attempt | None]:
        """Classify each key, then grant slots for what is missing, first to last."""
        attempt = Attempt(self._next, writer, space, keys, shard, ticket_id, now_s + life_s, wanted)
        outcomes = [self._classify(attempt, index) for index in range(len(keys))]
        if len(writer.attempts) >= ATTEMPTS_PER_SESSION:
            kept = (Outcome.PRESENT, Outcome.LEFT_TO_OTHERS, Outcome.REFUSED_COLLISION)
            outcomes = [outcome if outcome in kept else Outcome.REFUSED_SESSION_LIMIT for outcome in outcomes]
        attempt.waiting = [index for index, outcome in enumerate(outcomes) if outcome is Outcome.IN_PROGRESS]
        self._grant(attempt, [i for i, outcome in enumerate(outcomes) if outcome is Outcome.GRANTED], outcomes, now_s)
        self._refuse_children(attempt, outcomes)
        slots = [attempt.grants[i].slot if i in attempt.grants else 0 for i in range(len(keys))]
        if not attempt.grants and not attempt.waiting:
            return ReserveAnswer(0, outcomes, slots), None
        self._next += 1
        self.attempts[attempt.number] = writer.attempts[attempt.number] = attempt
        return ReserveAnswer(attempt.number, outcomes, slots), attempt

    def _classify(self, attempt: Attempt, index: int) -> Outcome:
        """PRESENT, IN_PROGRESS, LEFT_TO_OTHERS, a collision, or GRANTED meaning: wants a slot."""
        chunk = self._pool.forest.chunks.get(attempt.key_list[index])
        unwanted = index not in attempt.wanted
        if chunk is None:
            return Outcome.LEFT_TO_OTHERS if unwanted else Outcome.GRANTED
        if attempt.collides(chunk, index):
            self._pool.counts["collisions"] += 1
            return Outcome.REFUSED_COLLISION
        if chunk.covering_anywhere(attempt.space.kinds[attempt.shard].rectangle) is not None:
            return Outcome.PRESENT
        if unwanted:
            return Outcome.LEFT_TO_OTHERS
        return Outcome.IN_PROGRESS if attempt.shard in chunk.pending else Outcome.GRANTED

    def _refuse_children(self, attempt: Attempt, outcomes: list[Outcome]) -> None:
        """A chunk whose parent is neither stored, granted nor left to others is not stored: its new grant is undone."""
        keys, space = attempt.keys, attempt.space
        parent = self._pool.forest.get(keys.parent)
        parent_ok = keys.parent == space.id or (parent is not None and parent.space is space)
        for index, outcome in enumerate(outcomes):
            if outcome is Outcome.GRANTED and not parent_ok:
                outcomes[index] = Outcome.REFUSED_PARENT_MISSING
            parent_ok = not outcomes[index].refused
        for index in [i for i in attempt.grants if outcomes[i] is not Outcome.GRANTED]:
            self._undo(attempt, index)

    def _grant(self, attempt: Attempt, wanted: list[int], outcomes: list[Outcome], now_s: float) -> None:
        """Slots and catalog entries for the places `wanted`; the others' outcomes say why not."""
        if self.draining:
            for index in wanted:
                outcomes[index] = Outcome.REFUSED_DRAINING
            return
        writer, pool, size = attempt.writer, self._pool, attempt.space.kinds[attempt.shard].slot_bytes
        affordable = max(0, (writer.limit_bytes - writer.held_bytes) // size)
        for index in wanted[affordable:]:
            outcomes[index] = Outcome.REFUSED_SESSION_LIMIT
        wanted = wanted[:affordable]
        if not wanted:
            return
        # The chain's own chunks must not be evicted to make room for its tail; what the SSD has too only leaves DRAM.
        chain = (attempt.keys.parent, *attempt.key_list)
        found = [chunk for key in chain if (chunk := pool.forest.chunks.get(key)) is not None]
        kept = [chunk for chunk in found if not (chunk.ssd and chunk.is_saved)]
        for chunk in kept:
            chunk.holds += 1
        slots = pool.take_slots(size, len(wanted), attempt.space)
        at_bound = pool.dram.is_at_bound(attempt.space.group, size, len(slots))
        full = Outcome.REFUSED_QUOTA if at_bound else Outcome.REFUSED_FULL
        for index in wanted[len(slots) :]:
            outcomes[index] = full
        for index, slot in zip(wanted, slots, strict=False):
            entry = pool.claim(attempt.key_list[index], attempt.shard)
            if entry is None:
                outcomes[index] = Outcome.REFUSED_CATALOG_FULL
                pool.allocator.release(slot)
            else:
                attempt.grants[index] = self._take(attempt, index, slot, entry, size, now_s)
        for chunk in kept:
            chunk.holds -= 1

    def _take(self, attempt: Attempt, index: int, slot: int, entry: int, size: int, now_s: float) -> Grant:
        pool, prints = self._pool, attempt.prints
        key, parent_key = attempt.key_list[index], attempt.parent_key(index)
        chunk = pool.forest.chunks.get(key)
        if chunk is None:
            chunk = Chunk(
                key=key,
                parent_key=parent_key,
                space=attempt.space,
                token_count=attempt.keys.last_tokens if index == attempt.last else attempt.keys.chunk_tokens,
                fingerprint=None if prints is None else prints[index + 1],
                parent_fingerprint=None if prints is None else prints[index],
                first_seen_s=now_s,
                pending={attempt.shard: attempt.number},
                depth=index,
                parent_promised=index > 0 and index - 1 not in attempt.wanted,
            )
            pool.forest.add(chunk)
        chunk.pending[attempt.shard] = attempt.number
        pool.catalog.raise_generation(slot)
        pool.catalog.record(
            slot,
            SlotState.RESERVED,
            attempt.space.number,
            attempt.number,
            attempt.writer.owner,
            attempt.shard,
            key,
            parent_key,
        )
        attempt.writer.held_bytes += size
        pool.dram.reserved_bytes[attempt.space.group] += size
        return Grant(chunk, slot, entry, size)

    # --- the ends of a grant -----------------------------------------------------------------------------

    def commit(
        self, attempt: Attempt, indices: Sequence[int], table_hashes: Sequence[int], last: bool, now_s: float
    ) -> CommitAnswer:
        """Make the shards at these places visible, in the order given."""
        outcomes = []
        for index, table_hash in zip(indices, table_hashes, strict=True):
            outcomes.append(self._commit_one(attempt, index, table_hash))
        waiting: list[tuple[int, Outcome, int]] = []
        if last:
            for index in list(attempt.grants):
                self._undo(attempt, index)
            waiting = self._second_look(attempt, now_s)
            if not attempt.grants:
                self._forget(attempt)
        return CommitAnswer(outcomes, waiting)

    def _commit_one(self, attempt: Attempt, index: int, table_hash: int) -> Outcome:
        grant = attempt.grants.get(index)
        if grant is None:
            return Outcome.COMMITTED if index in attempt.committed else Outcome.REFUSED_STALE
        if self._pool.forest.get(grant.chunk.key) is not grant.chunk:  # removed while it was being written
            self._undo(attempt, index)
            return Outcome.REFUSED_STALE
        self._end(attempt, index)
        del grant.chunk.pending[attempt.shard]
        attempt.writer.held_bytes -= grant.size_bytes
        attempt.committed.add(index)
        self._pool.commit(grant.chunk, attempt.shard, grant.slot, grant.entry, table_hash)
        return Outcome.COMMITTED

    def _second_look(self, attempt: Attempt, now_s: float) -> list[tuple[int, Outcome, int]]:
        """Keys that others were writing at Reserve: committed by now, still in progress, or free again."""
        looked = {index: self._classify(attempt, index) for index in attempt.waiting}
        free = [index for index, outcome in looked.items() if outcome is Outcome.GRANTED]
        places, chunks = range(len(attempt.key_list)), self._pool.forest.chunks
        unwanted = {index: self._classify(attempt, index) for index in places if index not in attempt.wanted}
        outcomes = [
            looked.get(index) or unwanted.get(index) or (Outcome.PRESENT if key in chunks else Outcome.REFUSED_STALE)
            for index, key in enumerate(attempt.key_list)
        ]
        self._grant(attempt, free, outcomes, now_s)
        self._refuse_children(attempt, outcomes)
        attempt.waiting = []
        return [(i, outcomes[i], attempt.grants[i].slot if i in attempt.grants else 0) for i in looked]

    def abort(self, attempt: Attempt) -> None:
        """The client has stopped writing: all slots are free at once."""
        for index in list(attempt.grants):
            self._undo(attempt, index)
        self._forget(attempt)

    def acknowledge(self, writer: Writer, attempt_number: int) -> None:
        """The client has stopped writing for an attempt that had ended already: free its quarantined slots."""
        for slot, size in writer.quarantined.pop(attempt_number, ()):
            writer.held_bytes -= size
            self._pool.free_slot(slot)

    def quarantine(self, attempt: Attempt) -> None:
        """The attempt ends, but its process may still write: keep the slots out of use."""
        kept = []
        for index in list(attempt.grants):
            grant = self._end(attempt, index)
            self._leave_chunk(attempt, grant)
            self._pool.catalog.set_state(grant.slot, SlotState.QUARANTINED)
            kept.append((grant.slot, grant.size_bytes))
        if kept:
            attempt.writer.quarantined[attempt.number] = kept
            self._pool.counts["quarantined"] += len(kept)
        self._forget(attempt)

    def writer_gone(self, writer: Writer) -> None:
        """The process is gone or can no longer reach the memory: end its attempts, free all its slots."""
        for attempt in list(writer.attempts.values()):
            self.abort(attempt)
        for number in list(writer.quarantined):
            self.acknowledge(writer, number)

    def _undo(self, attempt: Attempt, index: int) -> None:
        grant = self._end(attempt, index)
        self._leave_chunk(attempt, grant)
        attempt.writer.held_bytes -= grant.size_bytes
        self._pool.free_slot(grant.slot)

    def _end(self, attempt: Attempt, index: int) -> Grant:
        grant = attempt.grants.pop(index)
        self._pool.dram.reserved_bytes[attempt.space.group] -= grant.size_bytes
        return grant

    def _leave_chunk(self, attempt: Attempt, grant: Grant) -> None:
        self._pool.catalog.unclaim(grant.entry)
        grant.chunk.pending.pop(attempt.shard, None)
        known = self._pool.forest.get(grant.chunk.key) is grant.chunk
        if known and not grant.chunk.is_committed and not grant.chunk.pending:
            self._pool.forest.remove(grant.chunk)

    def _forget(self, attempt: Attempt) -> None:
        self.attempts.pop(attempt.number, None)
        attempt.writer.attempts.pop(attempt.number, None)

    def figures(self, writers: Sequence[Writer]) -> dict[str, int]:
        """For Stats: how much is granted, and how much waits for its writer."""
        slot_count = size_bytes = 0
        for attempt in self.attempts.values():
            slot_count += len(attempt.grants)
            size_bytes += len(attempt.grants) * attempt.space.kinds[attempt.shard].slot_bytes
        return {
            "reserved_slots": slot_count,
            "reserved_bytes": size_bytes,
            "quarantined_slots": sum(len(slots) for writer in writers for slots in writer.quarantined.values()),
            "quarantined_bytes": sum(writer.held_bytes for writer in writers) - size_bytes,
        }

    def check(self, writers: Sequence[Writer]) -> None:
        """Grants and pending marks agree; held bytes add up."""
        granted = {}
        for attempt in self.attempts.values():
            for grant in attempt.grants.values():
                granted[grant.slot] = grant
                assert grant.chunk.pending.get(attempt.shard) == attempt.number or (
                    self._pool.forest.get(grant.chunk.key) is not grant.chunk
                )
        for writer in writers:
            reserved = sum(g.size_bytes for a in writer.attempts.values() for g in a.grants.values())
            kept = sum(size for slots in writer.quarantined.values() for _, size in slots)
            assert writer.held_bytes == reserved + kept <= writer.limit_bytes, "held bytes"
        reserved_by_group: Counter[int] = Counter()
        for attempt in self.attempts.values():
            reserved_by_group[attempt.space.group] += sum(grant.size_bytes for grant in attempt.grants.values())
        assert +reserved_by_group == +self._pool.dram.reserved_bytes, "reserved bytes of the quota groups"
        pending = {(c.key, s) for c in self._pool.forest.chunks.values() for s in c.pending}
        owned = {(g.chunk.key, a.shard) for a in self.attempts.values() for g in a.grants.values()}
        assert pending <= owned, "a pending mark without a grant"
