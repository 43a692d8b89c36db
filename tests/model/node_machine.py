"""A node against a naive model: dicts of what was committed, reserved and held, and the laws between the two.

Crashes come at any point: sessions are lost, processes go, time jumps, and writers whose reservation has ended go on
writing into their old slots for as long as their process lives. After each step:

- `core.check()`;
- what is stored is what the model says, and what was evicted was free to go, tails first;
- a reader of the same shared memory finds exactly the committed shards, and their slots hold what their writer
  put there;
- an index that was fed with the events knows what the node would put into a snapshot, as a prefix of each chain.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.layout import Geometry, PageLayout, Rectangle
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import MissReason, Outcome
from kvstore.node import RESERVATION_LIFETIME_MS
from kvstore.node.core import CoreSettings, Session
from tests.unit.node.small_node import SMALL, WIDE, SmallNode, namespace

PROMPTS = ((1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 7), (8, 9, 10, 11, 12), (8, 9, 13), (14,))
"""Prompts as lists of chunk names: they share prefixes, so their chains are a forest."""
NOISE = 1 << 40
"""Tags from here on are late writes, which no reader may ever see."""
RANDOM = st.integers(0, 1 << 32).map(random.Random)
"""The choices inside a step come from one seed, so that a walk without hypothesis can take the same steps."""
TICKETS = (b"s" * 16, b"t" * 16)


@dataclass
class Writing:
    """A reservation as its client sees it: places granted -> slot; `ends_s` at the node."""

    number: int
    keys: Keys
    shard: int
    ends_s: float
    slots: dict[int, int]
    waiting: list[int]
    removed: set[int] = field(default_factory=set)


@dataclass
class Client:
    """A client process. `old_slots` are slots it may still write into although its reservation has ended."""

    session: Session
    connected: bool = True
    writings: dict[int, Writing] = field(default_factory=dict)
    old_slots: dict[int, list[int]] = field(default_factory=dict)
    leases: dict[int, tuple[Keys, int, float]] = field(default_factory=dict)


def possible(step: str) -> Callable[[NodeMachine], bool]:
    return lambda machine: machine.makes_sense(step)


class NodeMachine(RuleBasedStateMachine):
    """`layout` and `room_chunks` are set by the variants below."""

    layout: PageLayout = SMALL
    slots = 14
    room_chunks = 0

    @initialize()
    def start(self) -> None:
        self.clients: list[Client] = []
        self.node = SmallNode(slots=self.slots, settings=CoreSettings("lru", self.room_chunks, 0.75))
        self.core = self.node.core
        self.space = namespace(self.layout)
        self.geometries = [Geometry.whole(self.layout), Geometry.parallel(self.layout, tp=2)]
        self.shards = [g.shard(n) for g in self.geometries for n in range(len(g.rectangles))]
        chain, size = KeyChain(self.space), self.layout.chunk_tokens
        self.chains = [chain.keys([name for name in prompt for _ in range(size)]) for prompt in PROMPTS]
        self.parent = {key: keys[i - 1] if i else self.space.id for keys in self.chains for i, key in enumerate(keys)}
        self.stored: dict[bytes, dict[int, int]] = {}
        self.tag = 0
        self.index = EmbeddedIndex(self.node.clock)
        self.acknowledged = 0
        self.may_evict: set[bytes] | None = None
        self.connect()

    def makes_sense(self, step: str) -> bool:
        """Whether there is anything that this step could do."""
        connected = self._connected()
        if step == "connect":
            return len(self.clients) < 4
        if step == "lose_session":
            return len(connected) > 1
        if step == "kill_process":
            return len(connected) > 1 or len(self.clients) > len(connected)
        if step == "write_late":
            return any(client.old_slots for client in self.clients)
        if step == "acknowledge":
            return any(client.old_slots for client in connected)
        return step not in ("commit", "abort") or any(client.writings for client in connected)

    # --- clients and their crashes -----------------------------------------------------------------------

    @precondition(possible("connect"))
    @rule()
    def connect(self) -> None:
        session = self.core.open_session("client", shared=True)
        for geometry in self.geometries:
            self.core.register_namespace(session.number, self.space, geometry, ())
        self.clients.append(Client(session))

    @precondition(possible("lose_session"))
    @rule(rng=RANDOM)
    def lose_session(self, rng: random.Random) -> None:
        client = self._client(rng)
        self.core.session_lost(client.session.number)
        client.connected = False
        for writing in list(client.writings.values()):
            self._ended(client, writing)
        client.leases.clear()

    @precondition(possible("kill_process"))
    @rule(rng=RANDOM)
    def kill_process(self, rng: random.Random) -> None:
        some = self.clients if len(self._connected()) > 1 else [each for each in self.clients if not each.connected]
        client = rng.choice(some)
        self.core.process_gone(client.session.number)
        self.clients.remove(client)

    @precondition(possible("write_late"))
    @rule(rng=RANDOM)
    def write_late(self, rng: random.Random) -> None:
        """A writer that does not know that its reservation has ended goes on writing."""
        slots_of = [slot for client in self.clients for old in client.old_slots.values() for slot in old]
        self.tag += 1
        self.node.fill(rng.choice(slots_of), NOISE + self.tag)

    @rule(rng=RANDOM)
    def time_passes(self, rng: random.Random) -> None:
        self.node.clock.now += rng.choice([0.2, 1.0, 29.0, 61.0])
        if rng.random() < 0.7:
            self._tick()
            for client in self.clients:
                for writing in [w for w in client.writings.values() if w.ends_s <= self.node.clock.now]:
                    self._ended(client, writing)

    def _tick(self) -> None:
        """What a lease or a reservation kept over the cap until now may go."""
        self.may_evict = set(self.stored) if self.room_chunks else None
        self.core.tick()

    @rule(rng=RANDOM)
    def renew(self, rng: random.Random) -> None:
        client = self._client(rng)
        self.core.renew(client.session.number)
        for writing in client.writings.values():
            writing.ends_s = self.node.clock.now + RESERVATION_LIFETIME_MS / 1000

    # --- writing -----------------------------------------------------------------------------------------

    @rule(rng=RANDOM)
    def store(self, rng: random.Random) -> None:
        """A write without a pause in the middle."""
        client, keys = self._client(rng), rng.choice(self.chains)
        number = self._reserve(client, keys, rng.choice(self.shards), b"")
        if number:
            writing = client.writings[number]
            self.stored_is_what_the_model_says()
            self._commit(client, writing, sorted(writing.slots), last=True)

    @rule(rng=RANDOM)
    def reserve(self, rng: random.Random) -> None:
        chain = rng.choice(self.chains)
        keys = chain.slice(0, rng.randint(1, len(chain)))
        turn = rng.choice([None, None, 0, 1])
        places = range(len(keys)) if turn is None else range(turn, len(keys), 2)
        self._reserve(self._client(rng), keys, rng.choice(self.shards), rng.choice([b"", *TICKETS]), places)

    def _reserve(self, client: Client, keys: Keys, shard: int, ticket: bytes, places: Sequence[int] = ()) -> int:
        """`places`: those that this writer wants, the others are some other writer's; none = all."""
        expected = [self._expected(key, shard) for key in keys]
        for index in set(range(len(keys))) - set(places or range(len(keys))):
            if expected[index] is not Outcome.PRESENT:
                expected[index] = Outcome.LEFT_TO_OTHERS
        self.may_evict = set(self.stored) - set(keys)
        answer = self.core.reserve(client.session.number, keys, shard, ticket, places)
        for outcome, wanted in zip(answer.outcomes, expected, strict=True):
            assert outcome is wanted or (wanted is Outcome.GRANTED and outcome.refused)
        self._no_child_without_parent(keys, answer.outcomes)
        granted = {i: slot for i, slot in enumerate(answer.slots) if answer.outcomes[i] is Outcome.GRANTED}
        waiting = [i for i, outcome in enumerate(answer.outcomes) if outcome is Outcome.IN_PROGRESS]
        assert bool(answer.attempt) == bool(granted or waiting)
        self._fill(granted)
        if answer.attempt:
            ends_s = self.node.clock.now + RESERVATION_LIFETIME_MS / 1000
            client.writings[answer.attempt] = Writing(answer.attempt, keys, shard, ends_s, granted, waiting)
        return answer.attempt

    @precondition(possible("commit"))
    @rule(rng=RANDOM)
    def commit(self, rng: random.Random) -> None:
        client, writing = self._writing(rng)
        places = sorted(writing.slots)
        chosen = places if rng.random() < 0.5 else rng.sample(places, rng.randint(0, len(places)))
        self._commit(client, writing, chosen, last=rng.random() < 0.5)

    def _commit(self, client: Client, writing: Writing, chosen: list[int], *, last: bool) -> None:
        alive = writing.ends_s > self.node.clock.now
        self.may_evict = set(self.stored) | {writing.keys[i] for i in chosen} if self.room_chunks else None
        if last and alive and writing.waiting:
            self.may_evict = set(self.stored) - set(writing.keys) if not self.room_chunks else self.may_evict
        tags = {i: self.node.tag(writing.slots[i]) for i in chosen}
        answer = self.core.commit(client.session.number, writing.number, chosen, [1] * len(chosen), last)
        for index, outcome in zip(chosen, answer.outcomes, strict=True):
            good = alive and index not in writing.removed
            assert outcome is (Outcome.COMMITTED if good else Outcome.REFUSED_STALE)
            if good:
                self.stored.setdefault(writing.keys[index], {})[writing.shard] = tags[index]
        if not alive:
            self._ended(client, writing)
            return
        for index in chosen:
            del writing.slots[index]
        if last:
            self._second_look(client, writing, answer.waiting)

    def _second_look(self, client: Client, writing: Writing, waiting: Sequence[tuple[int, Outcome, int]]) -> None:
        assert [index for index, _, _ in waiting] == writing.waiting
        writing.slots, writing.waiting, writing.removed = {}, [], set()
        for index, outcome, slot in waiting:
            wanted = self._expected(writing.keys[index], writing.shard)
            assert outcome is wanted or (wanted is Outcome.GRANTED and outcome.refused)
            if outcome is Outcome.GRANTED:
                writing.slots[index] = slot
        self._fill(writing.slots)
        if not writing.slots:
            del client.writings[writing.number]

    @precondition(possible("commit"))
    @rule(rng=RANDOM)
    def abort(self, rng: random.Random) -> None:
        client, writing = self._writing(rng)
        self.core.abort(client.session.number, writing.number)
        del client.writings[writing.number]

    @precondition(possible("acknowledge"))
    @rule(rng=RANDOM)
    def acknowledge(self, rng: random.Random) -> None:
        """The writer noticed that its reservation had ended, stopped, and says so."""
        client = rng.choice([each for each in self._connected() if each.old_slots])
        number = rng.choice(sorted(client.old_slots))
        self.core.abort(client.session.number, number)
        del client.old_slots[number]

    # --- reading and removing ----------------------------------------------------------------------------

    @rule(rng=RANDOM)
    def acquire(self, rng: random.Random) -> None:
        client, lease_ms = self._client(rng), rng.choice([0, 500, 40_000])
        keys, rectangle = rng.choice(self.chains), rng.choice(self._rectangles())
        answer = self.core.acquire(client.session.number, keys, rectangle, lease_ms)
        run = next((i for i, key in enumerate(keys) if not self._covering(key, rectangle)), len(keys))
        assert answer.run == run and (answer.reason is None) == (run == len(keys))
        if run < len(keys) and keys[run] not in self.stored and not self._pending(keys[run]):
            assert answer.reason is MissReason.ABSENT
        for place in answer.places:
            assert self.node.tag(place.slot) == self.stored[keys[place.index]][place.shard]
        assert bool(answer.lease) == bool(run and lease_ms)
        if answer.lease:
            client.leases[answer.lease] = keys, run, self.node.clock.now + lease_ms / 1000

    @rule(rng=RANDOM)
    def release(self, rng: random.Random) -> None:
        client = self._client(rng)
        leases = [lease for lease in client.leases if rng.random() < 0.5]
        tickets = [ticket for ticket in TICKETS if rng.random() < 0.3]
        self.core.release(client.session.number, [*leases, 10**12], tickets)
        for lease in leases:
            del client.leases[lease]

    @rule(rng=RANDOM)
    def remove(self, rng: random.Random) -> None:
        client = self._client(rng)
        key = rng.choice(list(rng.choice(self.chains)))
        gone = {each for each in self.parent if key in self._chain_to(each)}
        known = self.core.pool.forest.get(key) is not None
        removed = self.core.remove(client.session.number, self.space.id, [key])
        reached = gone & set(self.stored) if known else set()
        # What hangs below a hole is an orphan and not reached.
        reached = {each for each in reached if self._linked(each, key)}
        assert removed == len(reached)
        for each in reached:
            del self.stored[each]
        for other in self.clients:  # a lease on what was removed keeps nothing that comes back under the key
            other.leases = {n: lease for n, lease in other.leases.items() if lease[0][lease[1] - 1] not in reached}
        for writing in [w for c in self.clients for w in c.writings.values()]:
            writing.removed |= {i for i in writing.slots if self._dropped(writing, i)}

    @rule()
    def index_starts_empty(self) -> None:
        self.index, self.acknowledged = EmbeddedIndex(self.node.clock), 0
        for batch in self.core.news.take_batch(0, 4, resync=True, lease_ms=600_000):
            self.acknowledged = self.index.publish(batch).sequence

    # --- the laws ----------------------------------------------------------------------------------------

    @invariant()
    def laws(self) -> None:
        self.core.check()
        self.stored_is_what_the_model_says()  # first: it takes what was evicted out of the model
        self.presence_is_a_prefix()
        self.readers_find_exactly_what_is_committed()
        self.the_index_knows_what_a_snapshot_would_say()

    def stored_is_what_the_model_says(self) -> None:
        chunks = self.core.pool.forest.chunks
        there = {key: set(chunk.copies) for key, chunk in chunks.items() if chunk.copies}
        gone = set(self.stored) - set(there)
        if gone:
            assert self.may_evict is not None, "nothing asked for room"
            assert gone <= self.may_evict, "the chain that asked lost a part of its own"
            assert not gone & self._held(), "held, and gone all the same"
            assert not any(self.parent[key] in gone for key in there), "a child stayed behind"
        self.may_evict = None
        for key in gone:
            del self.stored[key]
        assert there == {key: set(shards) for key, shards in self.stored.items()}

    def presence_is_a_prefix(self) -> None:
        orphans = self.core.pool.forest.orphans
        for key in self.stored:
            parent = self.parent[key]
            missing = parent != self.space.id and parent not in self.core.pool.forest.chunks
            assert not missing or key in orphans[parent]

    def readers_find_exactly_what_is_committed(self) -> None:
        for keys in self.chains:
            for rectangle in self._rectangles():
                found = self.node.reader.find(keys, rectangle)
                assert found.run == max(self._run_of(keys, rectangle, geometry) for geometry in self.geometries)
                assert self.node.reader.confirm(found) == found.run
                if not found.run or found.geometry is None:
                    continue
                for key, offsets in zip(keys, found.offsets.tolist(), strict=False):
                    shards = [found.geometry.shard(number) for number in found.numbers]
                    assert [self.node.tag(offset >> 12) for offset in offsets] == [self.stored[key][s] for s in shards]

    def the_index_knows_what_a_snapshot_would_say(self) -> None:
        while self.acknowledged < self.core.news.last_sequence:
            for batch in self.core.news.take_batch(self.acknowledged, 4, resync=False, lease_ms=600_000):
                self.acknowledged = self.index.publish(batch).sequence
        told = {(event.key, event.shard) for batch in self.index.snapshot() for event in batch.events}
        published = {key for key in self.stored if self._published(key)}
        assert told == {(key, shard) for key in published for shard in self.stored[key]}
        for keys in self.chains:
            matches = self.index.match(keys, self.layout.whole)
            run = next((i for i, key in enumerate(keys) if key not in published), len(keys))
            run = next((i for i, key in enumerate(keys) if not self._covering(key, self.layout.whole)), run)
            assert [match.run for match in matches] == ([run] if run else [])

    def teardown(self) -> None:
        """Once everybody is gone and time has passed, nothing is held any more."""
        if not hasattr(self, "core"):
            return
        for client in self.clients:
            self.core.process_gone(client.session.number)
            client.writings.clear()
        self.node.clock.now += 120
        self._tick()
        self.core.check()
        self.stored_is_what_the_model_says()
        stats = self.core.stats()
        zero = ("leases", "tickets", "pinned_bytes", "reserved_slots", "quarantined_bytes", "sessions")
        assert not any(stats[name] for name in zero)
        assert stats["catalog_entries"] == sum(len(shards) for shards in self.stored.values())

    # --- the model's small parts -------------------------------------------------------------------------

    def _connected(self) -> list[Client]:
        return [client for client in self.clients if client.connected]

    def _client(self, rng: random.Random) -> Client:
        return rng.choice(self._connected())

    def _writing(self, rng: random.Random) -> tuple[Client, Writing]:
        client = rng.choice([each for each in self._connected() if each.writings])
        return client, client.writings[rng.choice(sorted(client.writings))]

    def _fill(self, granted: dict[int, int]) -> None:
        for slot in granted.values():
            self.tag += 1
            self.node.fill(slot, self.tag)

    def _ended(self, client: Client, writing: Writing) -> None:
        del client.writings[writing.number]
        if writing.slots:
            client.old_slots[writing.number] = list(writing.slots.values())

    def _rectangles(self) -> list[Rectangle]:
        return [rectangle for geometry in self.geometries for rectangle in geometry.rectangles]

    def _sets(self, rectangle: Rectangle, geometry: Geometry) -> list[int]:
        return [geometry.shard(number) for number, _, _ in geometry.overlapping(rectangle)]

    def _covering(self, key: bytes, rectangle: Rectangle) -> bool:
        held = self.stored.get(key, {})
        return any(all(shard in held for shard in self._sets(rectangle, g)) for g in self.geometries)

    def _run_of(self, keys: Keys, rectangle: Rectangle, geometry: Geometry) -> int:
        wanted = self._sets(rectangle, geometry)
        good = [all(shard in self.stored.get(key, {}) for shard in wanted) for key in keys]
        return good.index(False) if False in good else len(good)

    def _pending(self, key: bytes) -> set[int]:
        """Shards of a key that somebody is writing, as far as the node knows."""
        return {
            writing.shard
            for client in self.clients
            for writing in client.writings.values()
            for index in writing.slots
            if writing.keys[index] == key and index not in writing.removed
        }

    def _expected(self, key: bytes, shard: int) -> Outcome:
        rectangle = next(g.rectangles[shard & 0xFF] for g in self.geometries if g.digest == shard >> 8)
        if self._covering(key, rectangle):
            return Outcome.PRESENT
        return Outcome.IN_PROGRESS if shard in self._pending(key) else Outcome.GRANTED

    def _no_child_without_parent(self, keys: Keys, outcomes: Sequence[Outcome]) -> None:
        for before, outcome in itertools.pairwise(outcomes):
            assert outcome is not Outcome.GRANTED or not before.refused
        assert outcomes[0] is not Outcome.REFUSED_PARENT_MISSING

    def _chain_to(self, key: bytes) -> list[bytes]:
        chain = [key]
        while self.parent[chain[-1]] != self.space.id:
            chain.append(self.parent[chain[-1]])
        return chain

    def _linked(self, key: bytes, ancestor: bytes) -> bool:
        """True if all chunks between the two were known to the node before a removal."""
        between = self._chain_to(key)
        between = between[: between.index(ancestor)]
        return all(each in self.stored or self._pending(each) for each in between)

    def _dropped(self, writing: Writing, index: int) -> bool:
        chunk = self.core.pool.forest.get(writing.keys[index])
        return chunk is None or chunk.pending.get(writing.shard) != writing.number

    def _published(self, key: bytes) -> bool:
        return all(self._covering(each, self.layout.whole) for each in self._chain_to(key))

    def _held(self) -> set[bytes]:
        """What leases of the model and pins of the node keep, and what is being written, with all ancestors."""
        now = self.node.clock.now
        kept = [keys[run - 1] for c in self.clients for keys, run, ends_s in c.leases.values() if ends_s > now]
        chunks, tickets = self.core.pool.forest.chunks, self.core.holds.tickets.values()
        kept += [chunk.key for pins in tickets for chunk in pins.chunks if chunks.get(chunk.key) is chunk]
        kept += [w.keys[i] for c in self.clients for w in c.writings.values() for i in w.slots if i not in w.removed]
        held: set[bytes] = set()
        for key in kept:
            while key in self.stored or self._pending(key):  # up to a hole: what is above it is not an ancestor here
                held.add(key)
                key = self.parent[key]
        return held


class WideNodeMachine(NodeMachine):
    """Two slot classes in extents of four slots each."""

    layout = WIDE
    slots = 40


class RoomNodeMachine(NodeMachine):
    """A cap on chunks below what the memory holds."""

    room_chunks = 5
