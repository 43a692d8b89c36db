"""Side objects on a node without a world: all or nothing with their chunks, bounded, ended by release or time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import CapacityExhausted, InvalidRequest, LayoutMismatch, LimitExceeded, NotFound, StaleReference
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.side_object import NeededChunks, SideObject
from kvstore.model.values import MissReason
from kvstore.node import SideAnswer, side_objects
from kvstore.node.core import Session
from kvstore.node.steps import finish
from tests.unit.node.small_node import SMALL, SmallNode, keys_of, namespace

TICKET, OTHER = b"t" * 16, b"u" * 16
SPACE = namespace()
KEYS = keys_of(SPACE, 1, 3)
HALVES = Geometry.parallel(SMALL, tp=2)


def made(name: str = "hidden", data: bytes = b"abcd", ticket: bytes = TICKET) -> SideObject:
    return SideObject.made_for(ticket, name, "uint8", (len(data),), data)


class Setting:
    """A node with the chunks of KEYS committed under the ticket."""

    def __init__(self) -> None:
        self.node = SmallNode(slots=16)
        self.core = self.node.core
        self.table = self.core.side_objects
        self.session = self.node.open(SPACE)

    def write(self, keys: Keys = KEYS, count: int | None = None, ticket: bytes = TICKET) -> None:
        answer = self.node.reserve(self.session, keys, ticket=ticket)
        self.node.commit(self.session, answer.attempt, range(len(keys) if count is None else count))

    def put(
        self,
        *objects: SideObject,
        ticket: bytes = TICKET,
        keys: Keys = KEYS,
        rectangle: Rectangle = SMALL.whole,
        lifetime_ms: int = 60_000,
    ) -> int:
        try:
            needed = NeededChunks(keys.namespace_id, keys[-1], rectangle)
            return self.table.put(ticket, needed, objects or (made(ticket=ticket),), lifetime_ms)
        finally:
            self.core.check()

    def get(self, *names: str, ticket: bytes = TICKET) -> SideAnswer:
        answer = finish(self.table.look(ticket, names))
        self.table.count(answer)
        self.core.check()
        return answer

    def reason(self, *names: str, ticket: bytes = TICKET) -> MissReason | None:
        return self.get(*names, ticket=ticket).reason


@pytest.fixture
def setting() -> Setting:
    return Setting()


# --- all or nothing ------------------------------------------------------------------------------------------


def test_objects_are_handed_out_with_their_chunks_again_and_again(setting: Setting) -> None:
    setting.write()
    first, second = made("hidden"), made("logits", b"xyz")
    assert setting.put(first, second) == 60_000
    for _ in range(2):
        assert setting.get() == SideAnswer((first, second), None)
    assert setting.get("logits") == SideAnswer((second,), None)
    assert setting.core.stats()["side_objects_read"] == 5 and setting.core.stats()["side_bytes"] == 7


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_a_chunk_that_never_came_is_a_miss_of_all_objects(setting: Setting, committed: int) -> None:
    setting.write(count=committed)
    setting.put()
    assert setting.get() == SideAnswer((), MissReason.CHUNK_MISSING)
    setting.write()
    assert setting.reason() is None
    assert setting.core.stats()["side_miss_chunk_missing"] == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_chunk_that_was_removed_is_a_miss_of_all_objects(setting: Setting, place: int) -> None:
    setting.write()
    setting.put()
    setting.core.remove(setting.session.number, SPACE.id, [KEYS[place]])
    assert setting.get() == SideAnswer((), MissReason.CHUNK_MISSING)


def test_a_chunk_that_was_evicted_is_a_miss_of_all_objects(setting: Setting) -> None:
    setting.write(ticket=b"")  # not pinned
    setting.put()
    for prompt in range(2, 8):
        setting.node.store(setting.session, keys_of(SPACE, prompt, 3))
    assert setting.node.resident(KEYS) < 3
    assert setting.reason() is MissReason.CHUNK_MISSING


def test_one_rank_is_bound_to_its_rectangle_only(setting: Setting) -> None:
    session = setting.node.open(SPACE, HALVES)
    setting.node.store(session, KEYS, shard=HALVES.shard(0))
    setting.put(rectangle=HALVES.rectangles[0])
    assert setting.reason() is None
    setting.put(made("of rank 1"), rectangle=HALVES.rectangles[1])
    assert setting.reason() is MissReason.CHUNK_MISSING, "another writer's chunks count as well"
    setting.node.store(session, KEYS, shard=HALVES.shard(1))
    assert len(setting.get().objects) == 2


def test_a_hole_in_the_middle_is_noticed(setting: Setting) -> None:
    """The last chunk is whole, one before it lacks a half: presence of the last one is not enough."""
    session = setting.node.open(SPACE, HALVES)
    setting.node.store(session, KEYS, shard=HALVES.shard(0))
    answer = setting.node.reserve(session, KEYS, shard=HALVES.shard(1))
    setting.node.commit(session, answer.attempt, [0, 2])
    setting.put(rectangle=HALVES.rectangles[1])
    assert setting.reason() is MissReason.CHUNK_MISSING
    setting.put(made("x", ticket=OTHER), ticket=OTHER, rectangle=HALVES.rectangles[0])
    assert setting.reason(ticket=OTHER) is None


def test_a_key_of_another_namespace_does_not_count(setting: Setting) -> None:
    other = namespace(revision="r2")
    setting.core.register_namespace(setting.session.number, other, Geometry.whole(SMALL), ())
    setting.write()
    setting.table.put(TICKET, NeededChunks(other.id, KEYS[-1], SMALL.whole), (made(),), 1000)
    assert setting.reason() is MissReason.CHUNK_MISSING


def test_a_chunk_that_leaves_during_a_long_look_is_noticed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_objects, "STEP_CHUNKS", 1)
    setting.write()
    setting.put()
    steps = setting.table.look(TICKET)
    next(steps)
    next(steps)
    setting.core.remove(setting.session.number, SPACE.id, [KEYS[1]])
    assert finish(steps).reason is MissReason.CHUNK_MISSING


def test_a_chunk_that_is_being_written_anew_during_a_long_look_is_noticed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_objects, "STEP_CHUNKS", 1)
    setting.write()
    setting.put()
    steps = setting.table.look(TICKET)
    next(steps)
    next(steps)
    setting.core.remove(setting.session.number, SPACE.id, [KEYS[2]])
    setting.node.reserve(setting.session, KEYS)
    assert finish(steps).reason is MissReason.CHUNK_MISSING


def test_a_prefix_without_its_beginning_is_none(setting: Setting) -> None:
    setting.write(ticket=b"")
    setting.put()
    first = setting.core.pool.forest.get(KEYS[0])
    assert first is not None
    setting.core.drop(first, "broken")
    assert len(setting.core.pool.forest) == 2
    assert setting.reason() is MissReason.CHUNK_MISSING


def test_a_ticket_that_ends_during_a_long_look_is_a_miss(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_objects, "STEP_CHUNKS", 1)
    setting.write()
    setting.put()
    steps = setting.table.look(TICKET)
    next(steps)
    setting.core.release(setting.session.number, [], [TICKET])
    assert finish(steps).objects == ()


def test_long_prefixes_are_walked_in_steps(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_objects, "STEP_CHUNKS", 2)
    keys = keys_of(SPACE, 1, 9)
    setting.write(keys)
    setting.put(keys=keys)
    steps = setting.table.look(TICKET)
    assert len(list(steps)) == 4


# --- put: whole or not at all --------------------------------------------------------------------------------


def test_the_same_again_is_no_error_and_counts_once(setting: Setting) -> None:
    setting.write()
    setting.put(made(), made("b"))
    setting.put(made())
    assert [each.name for each in setting.get().objects] == ["hidden", "b"]
    assert setting.core.stats()["side_objects_put"] == 2 and setting.core.stats()["side_bytes"] == 8


@pytest.mark.parametrize(
    "other",
    [made(data=b"abce"), replace(made(), dtype="int8"), replace(made(), shape=(2, 2)), replace(made(), checksum=1)],
)
def test_other_bytes_under_a_name_are_refused_and_nothing_of_that_call_is_kept(
    setting: Setting, other: SideObject
) -> None:
    setting.write()
    setting.put(made())
    with pytest.raises(InvalidRequest, match=r"'hidden'.*other bytes"):
        setting.put(made("new"), other)
    assert setting.get() == SideAnswer((made(),), None)
    assert setting.core.stats()["side_puts_refused"] == 1


def test_one_call_cannot_give_a_name_two_meanings(setting: Setting) -> None:
    with pytest.raises(InvalidRequest, match="other bytes"):
        setting.put(made(), made(data=b"zz"))
    assert setting.core.stats()["side_tickets"] == 0
    setting.put(made(), made())


def test_nothing_is_refused(setting: Setting) -> None:
    with pytest.raises(InvalidRequest, match="no side object"):
        setting.table.put(TICKET, NeededChunks(SPACE.id, KEYS[-1], SMALL.whole), (), 1000)
    assert setting.core.stats()["side_tickets"] == 0


def test_objects_belong_to_a_known_namespace_and_layout(setting: Setting) -> None:
    with pytest.raises(NotFound, match="not registered"):
        setting.table.put(TICKET, NeededChunks(b"n" * 16, KEYS[-1], SMALL.whole), (made(),), 1000)
    with pytest.raises(LayoutMismatch, match="2 layers"):
        setting.put(rectangle=Rectangle(0, 3, 0, 2))


# --- limits --------------------------------------------------------------------------------------------------


def test_a_ticket_has_16_objects(setting: Setting) -> None:
    setting.write()
    setting.put(*(made(f"n{number}") for number in range(10)))
    with pytest.raises(LimitExceeded, match="16 side objects; this would make 17"):
        setting.put(*(made(f"m{number}") for number in range(7)))
    setting.put(*(made(f"m{number}") for number in range(6)))
    setting.put(made("n0"))
    assert len(setting.get().objects) == 16


def test_a_ticket_is_bound_to_16_prefixes(setting: Setting) -> None:
    for prompt in range(16):
        setting.put(made(), keys=keys_of(SPACE, prompt, 1))
    with pytest.raises(LimitExceeded, match="16"):
        setting.put(made(), keys=keys_of(SPACE, 16, 1))


def test_bytes_of_a_ticket_are_bounded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_objects, "SIDE_BYTES_A_TICKET", 10)
    setting.put(made(data=bytes(6)))
    with pytest.raises(LimitExceeded, match="at most 10 bytes; these would make 11"):
        setting.put(made("b", bytes(5)))
    setting.put(made("b", bytes(4)))


def test_bytes_of_a_node_are_bounded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_objects, "SIDE_BYTES", 10)
    setting.put(made(data=bytes(6)))
    with pytest.raises(CapacityExhausted, match="at most 10 bytes"):
        setting.put(made(data=bytes(5), ticket=OTHER), ticket=OTHER)
    setting.core.release(setting.session.number, [], [TICKET])
    setting.put(made(data=bytes(5), ticket=OTHER), ticket=OTHER)


def test_tickets_of_a_node_are_bounded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_objects, "SIDE_TICKETS", 1)
    setting.put()
    setting.put(made("b"))
    with pytest.raises(CapacityExhausted, match="at most 1 tickets"):
        setting.put(ticket=OTHER)
    with pytest.raises(CapacityExhausted, match="at most 1 tickets"):
        setting.core.drop_ticket(setting.session.number, OTHER)
    setting.core.check()
    setting.core.drop_ticket(setting.session.number, TICKET)
    setting.core.check()


# --- the end -------------------------------------------------------------------------------------------------


def test_objects_end_when_their_time_is_up(setting: Setting) -> None:
    setting.write()
    assert setting.put(lifetime_ms=1500) == 1500
    setting.node.clock.now += 1.49
    setting.core.tick()
    assert setting.reason() is None
    setting.node.clock.now += 0.01
    assert setting.reason() is MissReason.ABSENT, "also before the next tick"
    assert setting.core.stats()["side_tickets"] == setting.core.stats()["side_bytes"] == 0
    assert setting.core.stats()["side_tickets_expired"] == 1


def test_the_tick_ends_what_nobody_asks_for(setting: Setting) -> None:
    setting.put(lifetime_ms=1000)
    setting.node.clock.now += 1.0
    setting.core.tick()
    assert setting.core.stats()["side_tickets"] == 0


def test_a_lifetime_is_at_most_that_of_the_tickets_pins(setting: Setting) -> None:
    assert setting.put(lifetime_ms=10**9) == 60_000
    setting.node.clock.now += 60.0
    setting.core.tick()
    assert setting.core.stats()["side_tickets"] == 0


def test_a_later_put_never_shortens_a_life(setting: Setting) -> None:
    setting.write()
    setting.put(lifetime_ms=5000)
    setting.put(made("b"), lifetime_ms=1)
    setting.node.clock.now += 4.9
    assert len(setting.get().objects) == 2
    setting.put(made(), lifetime_ms=5000)
    setting.node.clock.now += 4.9
    assert len(setting.get().objects) == 2


def test_release_ends_this_ticket_only(setting: Setting) -> None:
    setting.write()
    setting.put()
    setting.put(ticket=OTHER)
    setting.core.release(setting.session.number, [], [TICKET, b"unknown ticket.."])
    assert setting.reason() is MissReason.ABSENT
    assert setting.reason(ticket=OTHER) is None


def test_objects_outlive_the_session_that_wrote_them(setting: Setting) -> None:
    setting.write()
    setting.put()
    reader: Session = setting.node.open(SPACE, shared=False)
    setting.core.process_gone(setting.session.number)
    setting.core.tick()
    assert setting.reason() is None
    setting.core.release(reader.number, [], [TICKET])
    assert setting.reason() is MissReason.ABSENT


def test_unknown_tickets_and_names_are_absent(setting: Setting) -> None:
    setting.write()
    assert setting.reason() is MissReason.ABSENT
    setting.put()
    assert setting.get("hidden", "logits") == SideAnswer((), MissReason.ABSENT), "all names or none"
    assert setting.core.stats()["side_miss_absent"] == 2


# --- a writer that gives up ----------------------------------------------------------------------------------


def test_b03_what_was_dropped_is_gone_and_says_so(setting: Setting) -> None:
    setting.write()
    setting.put()
    assert setting.core.stats()["pinned_bytes"] > 0
    for _ in range(2):
        setting.core.drop_ticket(setting.session.number, TICKET)
        assert setting.get() == SideAnswer((), MissReason.DROPPED)
    stats = setting.core.stats()
    assert (stats["side_bytes"], stats["side_tickets"], stats["side_tickets_dropped"]) == (0, 1, 1)
    assert stats["tickets"] == stats["pinned_bytes"] == 0, "nobody will read what its pins keep"
    with pytest.raises(StaleReference, match="new ticket"):
        setting.put()
    assert setting.node.resident(KEYS) == 3, "chunks that are committed are good for others"


def test_b03_the_mark_of_a_writer_that_gave_up_ends_too(setting: Setting) -> None:
    setting.core.drop_ticket(setting.session.number, TICKET)
    setting.core.drop_ticket(setting.session.number, OTHER)
    setting.core.release(setting.session.number, [], [OTHER])
    assert setting.reason() is MissReason.DROPPED and setting.reason(ticket=OTHER) is MissReason.ABSENT
    setting.node.clock.now += 60.0
    setting.core.tick()
    setting.core.check()
    assert setting.reason() is MissReason.ABSENT
    assert setting.core.stats()["side_tickets_expired"] == 0, "a mark is no unread handoff"
