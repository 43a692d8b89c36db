"""Side objects through the node's shell: waiting for what is coming, and messages that cannot be right."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from small_node import SMALL, SmallNode, keys_of, namespace

from kvstore.errors import InvalidRequest, KvStoreError, LimitExceeded, SessionLost
from kvstore.model.side_object import SideObject
from kvstore.node import server
from kvstore.node.server import NodeServicer, SessionVerbs
from kvstore.node.streams import PageStreams
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2

TICKET = b"t" * 16
SPACE = namespace()
KEYS = keys_of(SPACE, 1, 3)
LONG_MS = 9_000


class Context:
    """What the shell asks a gRPC call for."""

    def __init__(self, seconds: float = 20.0) -> None:
        self._ends_s = time.monotonic() + seconds

    def time_remaining(self) -> float:
        return self._ends_s - time.monotonic()


class Setting:
    def __init__(self) -> None:
        self.node = SmallNode(slots=16)
        self.core = self.node.core
        self.servicer = NodeServicer(self.core, PageStreams(self.core, self.node.arena), dict)
        self.reader = self.node.open(SPACE, shared=False)
        self.writer = self.core.open_session("writer", shared=True, owner=(4711, 1))

    def put(self, *names: str, **changed: Any) -> Coroutine[Any, Any, node_pb2.PutSideObjectsResponse]:
        objects = [SideObject.made_for(TICKET, name, "uint8", (4,), b"abcd") for name in names or ("hidden",)]
        fields: dict[str, Any] = {
            "session": self.writer.number,
            "ticket_id": TICKET,
            "namespace_id": SPACE.id,
            "last_key": KEYS[-1],
            "rectangle": wire.rectangle_to_message(SMALL.whole),
            "lifetime_ms": 1000,
            "objects": wire.side_objects_to_messages(objects),
        }
        return self.servicer.PutSideObjects(node_pb2.PutSideObjectsRequest(**{**fields, **changed}), Context())

    def get(
        self, *names: str, wait_ms: int = LONG_MS, seconds: float = 20.0, **changed: Any
    ) -> asyncio.Task[node_pb2.GetSideObjectsResponse]:
        fields = {"session": self.reader.number, "ticket_id": TICKET, "names": names, "wait_ms": wait_ms}
        request = node_pb2.GetSideObjectsRequest(**{**fields, **changed})
        return asyncio.create_task(self.servicer.GetSideObjects(request, Context(seconds)))

    def drop(self, **changed: Any) -> Coroutine[Any, Any, node_pb2.DropTicketResponse]:
        fields = {"session": self.writer.number, "ticket_id": TICKET}
        return self.servicer.DropTicket(node_pb2.DropTicketRequest(**{**fields, **changed}), Context())

    def begin(self) -> int:
        return self.node.reserve(self.writer, KEYS, ticket=TICKET).attempt

    def commit(self, attempt: int, indices: Sequence[int]) -> None:
        self.node.commit(self.writer, attempt, indices, last=2 in indices)


def run(work: Coroutine[Any, Any, None], limit_s: float = 8.0) -> None:
    asyncio.run(asyncio.wait_for(work, limit_s))  # less than LONG_MS: who waits that long in vain fails


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def names_of(answer: node_pb2.GetSideObjectsResponse) -> list[str]:
    assert bool(answer.objects) != bool(answer.miss_reason)
    return [each.name for each in answer.objects]


def test_a_reader_waits_for_the_objects_and_then_for_the_chunks() -> None:
    async def work() -> None:
        setting = Setting()
        task = setting.get()
        attempt = setting.begin()
        setting.commit(attempt, [0])
        await turns()
        assert (await setting.put()).lifetime_ms == 1000
        await turns()
        setting.commit(attempt, [1])
        await turns()
        assert not task.done()
        setting.commit(attempt, [2])
        assert names_of(await task) == ["hidden"]

    run(work())


def test_a_reader_waits_for_the_names_that_it_wants() -> None:
    async def work() -> None:
        setting = Setting()
        setting.commit(setting.begin(), [0, 1, 2])
        await setting.put("a", "b")
        task = setting.get("c", "a")
        await turns()
        assert not task.done()
        await setting.put("c")
        assert names_of(await task) == ["c", "a"]

    run(work())


def test_without_a_wait_the_answer_comes_at_once() -> None:
    async def work() -> None:
        setting = Setting()
        assert (await setting.get(wait_ms=0)).miss_reason == "absent"
        await setting.put()
        assert (await setting.get(wait_ms=0)).miss_reason == "chunk_missing"
        assert setting.core.stats()["side_miss_chunk_missing"] == 1, "a look that goes on waiting is no miss"

    run(work())


def test_a_reader_gives_up_when_nothing_more_arrives_or_its_time_is_up() -> None:
    async def work() -> None:
        setting = Setting()
        assert (await setting.get(wait_ms=20)).miss_reason == "absent"
        assert (await setting.get(seconds=0.1)).miss_reason == "absent", "the call's own deadline is respected"

    run(work())


def test_a_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(server, "WAIT_LIMIT_MS", 20)
        assert (await Setting().get(wait_ms=2**32 - 1)).miss_reason == "absent"

    run(work())


def test_patience_begins_anew_with_everything_that_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and objects of the ticket, not those of others."""

    async def work() -> None:
        setting = Setting()
        loop, late_s = asyncio.get_running_loop(), 0.0
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + late_s)
        attempt, task = setting.begin(), setting.get("hidden", wait_ms=5000)
        await turns()
        for arrive in (
            lambda: setting.commit(attempt, [0]),
            lambda: setting.commit(attempt, [1]),
            lambda: setting.put("other"),
            setting.core.on_commit,  # somebody else's
        ):
            late_s += 3.0
            arriving = arrive()
            if arriving is not None:
                await arriving
            await turns()
            assert not task.done()
        late_s += 3.0
        setting.core.on_commit()
        assert (await task).miss_reason == "absent"

    run(work(), limit_s=60.0)


def test_b03_a_waiting_reader_hears_at_once_that_the_writer_gave_up() -> None:
    async def work() -> None:
        setting = Setting()
        setting.begin()
        side = setting.get()
        chain = wire.chain_to_message(KEYS)
        chunks = asyncio.create_task(
            setting.servicer.Acquire(
                node_pb2.AcquireRequest(
                    session=setting.reader.number,
                    chain=chain,
                    rectangle=wire.rectangle_to_message(SMALL.whole),
                    ticket_id=TICKET,
                    wait_ms=LONG_MS,
                ),
                Context(),
            )
        )
        await turns()
        assert not side.done() and not chunks.done()
        await setting.drop()
        assert (await side).miss_reason == "dropped"
        assert (await chunks).run == 0, "who waits for the chunks hears it too"
        assert (await setting.get()).miss_reason == "dropped", "and who comes later"

    run(work())


def test_a_wait_ends_with_its_session() -> None:
    async def work() -> None:
        setting = Setting()
        task = setting.get()
        await turns()
        setting.core.process_gone(setting.reader.number)
        setting.core.on_commit()
        with pytest.raises(SessionLost):
            await task

    run(work())


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"ticket_id": b"t"}, InvalidRequest, "ticket_id"),
        ({"namespace_id": b""}, InvalidRequest, "namespace_id"),
        ({"last_key": b"k" * 17}, InvalidRequest, "last_key"),
        ({"rectangle": None}, InvalidRequest, "rectangle is missing"),
        ({"lifetime_ms": 0}, InvalidRequest, "lifetime_ms"),
        ({"objects": [node_pb2.SideObject(name="x", dtype="uint8", shape=[1], data=b"x")] * 17}, LimitExceeded, "16"),
        ({"objects": [node_pb2.SideObject(name="x", dtype="uint8", shape=[1] * 9)]}, LimitExceeded, "shape"),
        ({"objects": [node_pb2.SideObject(dtype="uint8", data=b"x")]}, InvalidRequest, "name"),
        ({"session": 1}, SessionLost, "session"),
    ],
)
def test_puts_that_cannot_be_right_are_refused_by_name(
    changed: dict[str, Any], error: type[Exception], named: str
) -> None:
    async def work() -> None:
        setting = Setting()
        with pytest.raises(error, match=named):
            await setting.put(**changed)
        assert setting.core.stats()["side_tickets"] == 0

    run(work())


def test_gets_and_drops_that_cannot_be_right_are_refused_by_name() -> None:
    async def work() -> None:
        setting = Setting()
        for changed, error, named in (
            ({"ticket_id": b""}, InvalidRequest, "ticket_id"),
            ({"names": ["x"] * 17}, LimitExceeded, "names"),
            ({"session": 1}, SessionLost, "session"),
        ):
            with pytest.raises(error, match=named):
                await setting.get(**changed)
        for changed, error in (({"ticket_id": b""}, InvalidRequest), ({"session": 1}, SessionLost)):
            with pytest.raises(error):
                await setting.drop(**changed)

    run(work())


def test_put_and_drop_go_over_a_sessions_own_socket() -> None:
    async def work() -> None:
        setting = Setting()
        serve = SessionVerbs(setting.servicer)
        request = node_pb2.DropTicketRequest(session=setting.writer.number, ticket_id=TICKET)
        assert await serve(setting.writer.number, "DropTicket", request.SerializeToString()) == b""
        put = node_pb2.PutSideObjectsRequest(session=setting.writer.number, ticket_id=b"x")
        with pytest.raises(InvalidRequest, match="rectangle"):
            await serve(setting.writer.number, "PutSideObjects", put.SerializeToString())

    run(work())


def made_up(rng: random.Random, right: bytes) -> bytes:
    return right if rng.random() < 0.9 else rng.randbytes(rng.choice([0, 1, 15, 16, 17, 4096]))


def made_up_object(rng: random.Random) -> node_pb2.SideObject:
    return node_pb2.SideObject(
        name=rng.choice(["hidden", "logits", "n" * 64, "", "n" * 65]),
        dtype=rng.choice(["uint8", "uint8", "uint8", ""]),
        shape=[rng.choice([4, 4, 4, 0, 2**64 - 1]) for _ in range(rng.choice([1, 1, 1, 2, 9]))],
        data=made_up(rng, b"abcd"),
        checksum=rng.choice([1, 1, 1, 2]),
    )


def test_b17_malformed_fields_are_normal_errors_and_leave_nothing() -> None:
    async def work() -> None:
        setting, rng, seen = Setting(), random.Random(7), Counter[str]()
        for _ in range(3000):
            ticket_id = made_up(rng, TICKET)
            session = rng.choice([*[setting.writer.number] * 8, rng.getrandbits(64)])
            changed: dict[str, Any] = {"session": session, "ticket_id": ticket_id}
            if (verb := rng.choice(["put"] * 8 + ["get", "drop"])) == "put":
                changed |= {
                    "namespace_id": made_up(rng, SPACE.id),
                    "last_key": made_up(rng, KEYS[-1]),
                    "rectangle": node_pb2.Rectangle(layer_stop=rng.choice([2] * 6 + [0, 3]), head_stop=2),
                    "lifetime_ms": rng.choice([1, 60_000, 60_000, 0, 2**32 - 1]),
                    "objects": [made_up_object(rng) for _ in range(rng.choice([0, 1, 1, 1, 2, 20]))],
                }
                call: Any = setting.put(**changed)
            elif verb == "get":
                call = setting.get(*rng.choice([(), ("hidden",), ("x",) * 20]), wait_ms=0, **changed)
            else:
                call = setting.drop(**changed)
            try:
                await call
                seen[verb] += 1
            except KvStoreError as exc:
                seen[type(exc).__name__] += 1
            if rng.random() < 0.2:
                setting.core.release(setting.writer.number, [], [TICKET])
            setting.core.side_objects.check()
        assert min(seen[each] for each in ("put", "get", "drop", "InvalidRequest", "LimitExceeded")) > 20, seen
        assert seen["StaleReference"] > 20 and setting.core.stats()["side_objects_put"] > 20
        setting.node.clock.now += 60.0
        setting.core.tick()
        setting.core.check()
        assert setting.core.stats()["side_tickets"] == setting.core.stats()["side_bytes"] == 0

    run(work())
