"""All decisions of a node in one synchronous object with one owner. No I/O, no clock of its own.

`NodeCore` joins the pool, the reservations and the holds under the verbs of `NodeApi`, adds sessions (who is
asking, when do they end). `server.py` and `assemble.open_local` put a
world around it: event loop and sockets, or a lock.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvstore.errors import CapacityExhausted, InvalidRequest, LayoutMismatch, LimitExceeded, NotFound, SessionLost
from kvstore.metadata import EventKind
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, NodeInfo, Outcome, Tier
from kvstore.node import (
    KEYS_LIMIT,
    LEASE_LIMIT_MS,
    RESERVATION_LIFETIME_MS,
    TICKET_LIFETIME_MS,
    AcquireAnswer,
    CommitAnswer,
    ReserveAnswer,
    ShardPlace,
)
from kvstore.node.admission import Admission
from kvstore.node.catalog import CatalogWriter
from kvstore.node.chunks import Chunk, KnownNamespace
from kvstore.node.figures import pool_figures
from kvstore.node.holds import Holds
from kvstore.node.news import News
from kvstore.node.pool import Pool
from kvstore.node.quotas import Quota, Quotas
from kvstore.node.reservations import ALL_PLACES, Attempt, Reservations, Writer
from kvstore.node.side_objects import SideObjects
from kvstore.node.slots import SlotAllocator

NOTHING_STAGED: Final = range(0)
SESSIONS_LIMIT = 4096
REMOTE_IDLE_S = 120.0
"""A session without a socket ends when no call named it for this long."""


@dataclass(slots=True, eq=False)
class Session:
    """One client. `shared` sessions have a Unix socket and may hold grants; others only read."""

    number: int
    name: str
    shared: bool
    writer: Writer
    last_call_s: float
    open: bool = True


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the core needs to know of the configuration."""

    eviction: str = "lru"
    room_chunks: int = 0
    session_share: float = 0.5
    """A session's reserved plus quarantined bytes are at most this part of the tier."""
    quotas: tuple[Quota, ...] = ()
    ssd_admission: str = "always"


class NodeCore:
    """The node's verbs. `clock` gives monotonic seconds."""

    def __init__(
        self,
        info: NodeInfo,
        catalog: CatalogWriter,
        allocator: SlotAllocator,
        clock: Callable[[], float],
        settings: CoreSettings,
        ssd_allocator: SlotAllocator | None = None,
    ) -> None:
        self.info = info
        self.pool = Pool(
            catalog,
            allocator,
            clock=clock,
            publish=self._tell,
            eviction=settings.eviction,
            room_chunks=settings.room_chunks,
            ssd_allocator=ssd_allocator,
            admission=Admission(settings.ssd_admission),
        )
        self.news = News(lambda: self.info, self.pool.forest)
        self.quotas = Quotas(settings.quotas, self.pool.tiers)
        seed = random.SystemRandom()
        self.reservations = Reservations(self.pool, seed.getrandbits(47) << 16 | 1)
        self.holds = Holds(allocator.arena_bytes)
        self.side_objects = SideObjects(self.pool, clock)
        self.sessions: dict[int, Session] = {}
        self.own_slots: set[int] = set()
        """Slots that the node itself fills just now, with what comes back from the SSD."""
        self.on_commit: Callable[[], None] = lambda: None
        self.on_lease: Callable[[], None] = lambda: None
        self._session_limit_bytes = int(allocator.arena_bytes * settings.session_share)
        self._clock = clock
        self._random = seed

    @property
    def draining(self) -> bool:
        """New chunks are refused: the node is being emptied."""
        return self.reservations.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self.reservations.draining = value

    # --- sessions ----------------------------------------------------------------------------------------

    def open_session(self, name: str, *, shared: bool, owner: tuple[int, int] = (0, 0)) -> Session:
        """A new session. Raises CapacityExhausted over 4096."""
        if len(self.sessions) >= SESSIONS_LIMIT:
            raise CapacityExhausted(f"this node serves {SESSIONS_LIMIT} sessions already; close some clients")
        number = self._random.getrandbits(63) | 1
        session = Session(number, name, shared, Writer(number, owner, self._session_limit_bytes), self._clock())
        self.sessions[number] = session
        return session

    def session(self, number: int) -> Session:
        """The open session of that number; raises SessionLost."""
        session = self.sessions.get(number)
        if session is None or not session.open:
            raise SessionLost("this session is not open on the node (it ended, or the node restarted); open a new one")
        session.last_call_s = self._clock()
        return session

    def session_lost(self, number: int) -> None:
        """The client's socket closed: its leases end, its grants wait in quarantine for the end of the process."""
        session = self.sessions.get(number)
        if session is None or not session.open:
            return
        session.open = False
        self.holds.end_session(number)
        for attempt in list(session.writer.attempts.values()):
            self.reservations.quarantine(attempt)
        if not session.writer.held_bytes:
            del self.sessions[number]

    def process_gone(self, number: int) -> None:
        """The client's process is certainly gone (or never could write): free what it held."""
        self.session_lost(number)
        session = self.sessions.pop(number, None)
        if session is not None:
            self.reservations.writer_gone(session.writer)

    def keep_out(self, owner: tuple[int, int], slots: dict[int, list[tuple[int, int]]]) -> int:
        """Keep slots (attempt -> slot, bytes) out of use that a process may still write into, though its session
        ended with an earlier worker. Returns the number to tell `process_gone`."""
        held_bytes = sum(size for several in slots.values() for _, size in several)
        session = self.open_session("before the restart", shared=True, owner=owner)
        session.open = False
        session.writer.quarantined, session.writer.held_bytes = slots, held_bytes
        session.writer.limit_bytes = max(session.writer.limit_bytes, held_bytes)
        return session.number

    def renew(self, number: int) -> None:
        """The client lives: its reservations last another 30 s."""
        for attempt in self.session(number).writer.attempts.values():
            attempt.expires_s = self._clock() + RESERVATION_LIFETIME_MS / 1000

    def tick(self) -> None:
        """End what has run out: leases, tickets, reservations, sessions of remote readers."""
        now = self._clock()
        self.holds.expire(now)
        self.side_objects.expire()
        for attempt in [a for a in self.reservations.attempts.values() if a.expires_s <= now]:
            self.reservations.quarantine(attempt)
        for session in [s for s in self.sessions.values() if not s.shared and s.last_call_s + REMOTE_IDLE_S <= now]:
            self.process_gone(session.number)
        self.pool.trim()  # what came from the SSD by a hint

    # --- verbs -------------------------------------------------------------------------------------------

    def register_namespace(
        self, session: int, namespace: Namespace, geometry: Geometry | None, written_here: Sequence[int]
    ) -> KnownNamespace:
        """See NodeApi. Empty `written_here` means all rectangles of the geometry."""
        self.session(session)
        numbers: Sequence[int] = ()
        if geometry is not None:
            numbers = written_here or range(len(geometry.rectangles))
            if any(number >= len(geometry.rectangles) for number in numbers):
                raise LayoutMismatch(
                    f"written_here {list(numbers)} of a geometry with {len(geometry.rectangles)} rectangles"
                )
        return self.know(namespace, geometry, numbers)

    def know(self, namespace: Namespace, geometry: Geometry | None, written_here: Sequence[int]) -> KnownNamespace:
        """Know a namespace, and a geometry with exactly those of its rectangles that are written here."""
        space = self.pool.register(namespace, geometry, written_here)
        space.group = self.quotas.group_of(namespace)
        if geometry is not None:
            self.news.know(namespace.id, geometry)
        return space

    def reserve(
        self, session: int, keys: Keys, shard: int, ticket_id: bytes, wanted: Sequence[int] = ()
    ) -> ReserveAnswer:
        """See NodeApi. The present part of the chain counts as used, and is pinned where a ticket is named."""
        owner = self.session(session)
        space = self._space(keys)
        if keys.fingerprints is None:
            raise InvalidRequest("writers send the fingerprints of their keys: readers confirm a hit by them")
        if space.rectangle(shard) is None:
            raise NotFound(f"shard {shard:#010x} belongs to no geometry registered for {space.namespace.title}")
        life_s = RESERVATION_LIFETIME_MS / 1000
        names = set(keys)
        if len(names) != len(keys) or keys.parent in names or keys.namespace_id in names:
            raise InvalidRequest("a chain names each chunk once, and never itself as its parent")
        places = frozenset(wanted) if wanted else ALL_PLACES
        if wanted and not 0 <= min(places) <= max(places) < len(keys):
            raise InvalidRequest(f"wanted places lie in the chain of {len(keys)} keys")
        answer, _ = self.reservations.reserve(
            owner.writer, space, keys, shard, ticket_id, self._clock(), life_s, places
        )
        for outcome, count in Counter(answer.outcomes).items():
            self.pool.counts[f"reserve_{outcome.name.lower()}"] += count
        present = [key for key, outcome in zip(keys, answer.outcomes, strict=True) if outcome is Outcome.PRESENT]
        self.pool.order(present, space)
        if ticket_id:
            self._pin(ticket_id, [self.pool.forest.chunks[key] for key in present])
        return answer

    def commit(
        self, session: int, attempt: int, indices: Sequence[int], table_hashes: Sequence[int], last: bool
    ) -> CommitAnswer:
        """See NodeApi. A reservation that has ended answers REFUSED_STALE for each index."""
        live = self._attempt(session, attempt)
        if live is None:
            return CommitAnswer([Outcome.REFUSED_STALE] * len(indices), [])
        if len(indices) != len(table_hashes) or any(not 0 <= index < len(live.keys) for index in indices):
            raise LimitExceeded("indices of a commit lie in the reservation's chain, with one table hash each")
        answer = self.reservations.commit(live, indices, table_hashes, last, self._clock())
        done = [
            live.key_list[i]
            for i, outcome in zip(indices, answer.outcomes, strict=True)
            if outcome is Outcome.COMMITTED
        ]
        if last:
            self.pool.order(live.key_list, live.space)
        if live.ticket_id:
            found = (self.pool.forest.get(key) for key in done)
            self._pin(live.ticket_id, [chunk for chunk in found if chunk is not None])
        self.pool.trim()
        self.on_commit()
        return answer

    def abort(self, session: int, attempt: int) -> None:
        """See NodeApi. Also the acknowledgement that frees quarantined slots of an attempt that had ended."""
        owner = self.session(session)
        live = owner.writer.attempts.get(attempt)
        if live is not None:
            self.reservations.abort(live)
        else:
            self.reservations.acknowledge(owner.writer, attempt)
        self.on_commit()

    def acquire(
        self,
        session: int,
        keys: Keys,
        rectangle: Rectangle,
        lease_ms: int,
        *,
        staged: range = NOTHING_STAGED,
        unstaged: MissReason | None = None,
    ) -> AcquireAnswer:
        """See NodeApi; without waiting and without reading from the SSD, which are the shell's.

        `more` tells that the chunk after the run is on the SSD. `staged`: places of those that were brought into DRAM
        for this call; `unstaged`: why not more of them.
        """
        answer = self.resolve(session, keys, rectangle)
        if not lease_ms:  # a probe: not counted, and no use
            return answer
        ssd_tokens = self.use(session, keys.slice(0, answer.run), staged)
        return self.lease(session, keys, answer, lease_ms, staged, ssd_tokens, unstaged)

    def use(self, session: int, keys: Keys, staged: range = NOTHING_STAGED) -> int:
        """These keys are read as one prefix. What was staged for this counts as used already.

        Returns how many of their tokens came from the SSD for this reader, also ahead of it. A same-host reader asks
        only for what follows its own finds, and tells of the use of those itself.
        """
        chain, pool = list(keys), self.pool
        pool.touch(chain[: staged.start] + chain[staged.stop :])
        if staged:
            first = pool.forest.get(chain[0])
            if self.session(session).shared and first is not None:
                chain = [*first.line(), *chain[1:]]
            pool.order(chain, pool.spaces[keys.namespace_id])
        first_token, last_token = (keys.tokens_of_first(min(edge, len(keys))) for edge in (staged.start, staged.stop))
        return last_token - first_token + pool.came_ahead(keys, staged)

    def lease(
        self,
        session: int,
        keys: Keys,
        answer: AcquireAnswer,
        lease_ms: int,
        staged: range,
        ssd_tokens: int,
        unstaged: MissReason | None,
    ) -> AcquireAnswer:
        """Lease and count what `resolve` found for these keys. Its last chunk may be gone again: then there is none."""
        if unstaged is not None and answer.run <= staged.stop and answer.run < len(keys):
            # What did not come may have been dropped for it: that it is absent now is not why it was missed.
            answer = replace(answer, more=False, reason=unstaged)
        space, tokens = self.pool.spaces[keys.namespace_id], keys.tokens_of_first(answer.run)
        counts, lease_ms = self.pool.counts, min(lease_ms, LEASE_LIMIT_MS)
        counts["acquired_tokens"] += tokens
        counts["acquired_ssd_tokens"] += ssd_tokens
        space.ssd_hit_tokens += ssd_tokens
        space.dram_hit_tokens += tokens - ssd_tokens
        self.pool.used_spaces.add(space)
        self.count_miss(keys, answer)
        leaf = self.pool.forest.get(keys[answer.run - 1]) if answer.run else None
        lease = 0 if leaf is None else self.holds.lease(session, leaf, self._clock() + lease_ms / 1000)
        if lease:
            self.on_lease()
        if staged:
            self.pool.trim()
        return replace(answer, lease=lease, lease_ms=lease_ms if lease else 0, ssd_tokens=ssd_tokens)

    def count_miss(self, keys: Keys, answer: AcquireAnswer) -> None:
        """Count what a read of these keys did not get, if the answer says why."""
        if answer.reason is not None:
            self.pool.counts[f"acquire_miss_{answer.reason.value}"] += 1
            missed_tokens = keys.token_count - keys.tokens_of_first(answer.run)
            self.pool.counts[f"acquire_miss_tokens_{answer.reason.value}"] += missed_tokens

    def present_run(self, session: int, keys: Keys, rectangle: Rectangle) -> int:
        """Leading chunks that are on this node, on whatever tier. Keeps nothing."""
        self.session(session)
        space = self._space(keys)
        space.layout.check_rectangle(rectangle)
        for index, (chunk, _) in enumerate(self.pool.walk(space, keys)):
            if chunk is None or chunk.covering_anywhere(rectangle) is None:
                return index
        return len(keys)

    def resolve(self, session: int, keys: Keys, rectangle: Rectangle) -> AcquireAnswer:
        """Where the leading chunks lie in DRAM, without a lease. `more` tells that the next is on the SSD."""
        self.session(session)
        space = self._space(keys)
        space.layout.check_rectangle(rectangle)
        places: list[ShardPlace] = []
        run, reason, more = len(keys), None, False
        for index, (chunk, why) in enumerate(self.pool.walk(space, keys)):
            if chunk is None:
                run, reason = index, why
                break
            shards = chunk.covering(rectangle)
            if shards is None:
                run = index
                more = chunk.covering_anywhere(rectangle) is not None
                if not more:
                    reason = MissReason.IN_PROGRESS if chunk.pending else MissReason.NOT_COVERED
                break
            for shard in shards:
                copy = chunk.copies[shard]
                stored = space.kinds[shard].rectangle
                places.append(ShardPlace(index, shard, copy.slot, copy.generation, copy.table_hash, stored))
        return AcquireAnswer(run, places, 0, 0, reason, self.info.epoch, more)

    def release(self, session: int, leases: Sequence[int], ticket_ids: Sequence[bytes]) -> None:
        """See NodeApi. A session ends its own leases only."""
        self.session(session)
        mine = self.holds.by_session.get(session, set())
        for number in leases:
            if number in mine:
                self.holds.end_lease(number)
        for ticket_id in ticket_ids:
            self.holds.end_ticket(ticket_id)
            self.side_objects.end(ticket_id)

    def drop_ticket(self, session: int, ticket_id: bytes) -> None:
        """See NodeApi."""
        self.session(session)
        self.side_objects.drop(ticket_id)
        self.holds.end_ticket(ticket_id)
        self.on_commit()

    def remove(self, session: int, namespace_id: bytes, keys: Sequence[bytes]) -> int:
        """See NodeApi. Readers get a miss from now on; grants in the removed part end as REFUSED_STALE."""
        self.session(session)
        if namespace_id not in self.pool.spaces:
            raise NotFound("unknown namespace")
        removed = 0
        for key in keys:
            chunk = self.pool.forest.get(key)
            if chunk is None or chunk.space.namespace.id != namespace_id:
                continue
            for each in self.pool.forest.subtree(chunk):
                removed += self.drop(each)
        return removed

    def drop(self, chunk: Chunk, reason: str = "removed") -> bool:
        """Take one chunk without children out, pinned or not; True if it had committed shards."""
        had = chunk.is_committed
        self.pool.remove(chunk, reason)
        if chunk.holds:
            self.holds.forget(chunk)
        return had

    def touch(self, session: int, keys: Sequence[bytes]) -> None:
        """A same-host reader used these keys as one prefix, head first."""
        self.session(session)
        tokens = self.pool.touch(keys)
        chunks = self.pool.forest.chunks
        first = next((chunks[key] for key in keys if key in chunks), None)
        if first is not None:
            first.space.touched_tokens += tokens
            self.pool.counts["touched_tokens"] += tokens
            self.pool.used_spaces.add(first.space)

    def order(self, session: int, keys: Keys) -> None:
        """These keys were used or stored as one prefix, in several parts: order them as one. Not another use."""
        self.session(session)
        self.pool.order(list(keys), self.pool.spaces[keys.namespace_id])

    def settle(self) -> None:
        """What an earlier start left is taken up: order it, and tell the index of it."""
        self.pool.settle()
        self.news.start_anew()

    def _tell(self, kind: EventKind, chunk: Chunk, shard: int, tier: Tier) -> None:
        self.news.add(kind, chunk, shard, tier)

    # --- small parts -------------------------------------------------------------------------------------

    def _space(self, keys: Keys) -> KnownNamespace:
        if len(keys) > KEYS_LIMIT:
            raise LimitExceeded(f"{len(keys)} keys in one call; the limit is {KEYS_LIMIT}")
        space = self.pool.spaces.get(keys.namespace_id)
        if space is None:
            raise NotFound(f"namespace {keys.namespace_id.hex()[:8]} is not registered on this node")
        return space

    def _writers(self) -> list[Writer]:
        return [session.writer for session in self.sessions.values()]

    def _attempt(self, session: int, number: int) -> Attempt | None:
        live = self.session(session).writer.attempts.get(number)
        if live is not None and live.expires_s <= self._clock():
            self.reservations.quarantine(live)
            return None
        return live

    def _pin(self, ticket_id: bytes, chunks: Sequence[Chunk]) -> None:
        expires = self._clock() + TICKET_LIFETIME_MS / 1000
        self.pool.counts["unpinned_for_room"] += self.holds.pin(ticket_id, chunks, _bytes_of, expires)

    def stats(self) -> dict[str, int]:
        """Flat figures for people and dashboards. Takes time in proportion to sessions and attempts, not to chunks."""
        return {
            **pool_figures(self.pool),
            "sessions": len(self.sessions),
            **self.reservations.figures(self._writers()),
            "reading_slots": len(self.own_slots),
            **self.holds.figures(),
            **self.side_objects.figures(),
            "draining": int(self.draining),
            "events_waiting": len(self.news),
            **dict(sorted(self.pool.counts.items())),
        }

    def check(self) -> None:
        """Every invariant of the node. Called by tests after each step; costs time in proportion to its contents."""
        self.pool.check()
        self.reservations.check(self._writers())
        self.holds.check(list(self.pool.forest.chunks.values()))
        self.side_objects.check()
        used = {copy.slot for chunk in self.pool.forest.chunks.values() for copy in chunk.copies.values()}
        used |= self.own_slots
        used |= {grant.slot for attempt in self.reservations.attempts.values() for grant in attempt.grants.values()}
        for session in self.sessions.values():
            used |= {slot for slots in session.writer.quarantined.values() for slot, _ in slots}
        assert used == self.pool.allocator.used_slots(), "a slot is used by nobody, or by two"


def _bytes_of(chunk: Chunk) -> int:
    return sum(copy.size_bytes for copy in chunk.copies.values())
