"""What the gRPC shell of a node adds to the core: who may do what, waits, limits. Called without sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from small_node import SMALL, SmallNode, keys_of, namespace

from kvstore.errors import DeadlineExceeded, InvalidRequest, LimitExceeded, NotFound, SessionLost, Unauthorized
from kvstore.model.layout import Geometry
from kvstore.model.values import Outcome
from kvstore.node import messages, server, streams
from kvstore.node.server import NodeServicer
from kvstore.node.streams import PageStreams
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2

TICKET = b"t" * 16
SHARD = Geometry.whole(SMALL).shard(0)


class Context:
    """What the shell asks a gRPC call for."""

    def __init__(self, seconds: float = 20.0) -> None:
        self._ends_s = time.monotonic() + seconds

    def time_remaining(self) -> float:
        return self._ends_s - time.monotonic()


class Setting:
    def __init__(self, slots: int = 64) -> None:
        self.node = SmallNode(slots)
        self.core = self.node.core
        self.space = namespace()
        self.servicer = NodeServicer(self.core, PageStreams(self.core, self.node.arena), dict)
        self.reader = self.node.open(self.space, shared=False)
        self.writer = self.core.open_session("writer", shared=True, owner=(4711, 1))

    def acquire(self, chunks: int, *, wait_ms: int = 500, **changed: Any) -> node_pb2.AcquireRequest:
        fields: dict[str, Any] = {
            "session": self.reader.number,
            "chain": wire.chain_to_message(keys_of(self.space, 1, chunks)),
            "rectangle": wire.rectangle_to_message(SMALL.whole),
            "ticket_id": TICKET,
            "wait_ms": wait_ms,
        }
        return node_pb2.AcquireRequest(**{**fields, **changed})


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_only_sessions_that_can_write_get_slots() -> None:
    async def work() -> None:
        setting = Setting()
        chain = wire.chain_to_message(keys_of(setting.space, 1, 2))
        read_only = setting.core.open_session("no pidfd", shared=True)
        for number in (setting.reader.number, read_only.number):
            with pytest.raises(Unauthorized, match="Put"):
                await setting.servicer.Reserve(
                    node_pb2.ReserveRequest(session=number, chain=chain, shard=SHARD), Context()
                )
            with pytest.raises(Unauthorized, match="Put"):
                await setting.servicer.Commit(node_pb2.CommitRequest(session=number, attempt=1), Context())
        assert setting.core.stats()["reserved_slots"] == 0
        request = node_pb2.ReserveRequest(session=setting.writer.number, chain=chain, shard=SHARD)
        answer = await setting.servicer.Reserve(request, Context())
        assert list(answer.outcomes) == [Outcome.GRANTED] * 2

    run(work())


def test_acquire_waits_for_a_tickets_chunks_and_looks_at_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 commits one by one: the waiter must not walk the whole chain again for each."""

    async def work() -> None:
        setting = Setting()
        keys = keys_of(setting.space, 1, 20)
        answer = setting.node.reserve(setting.writer, keys)
        looks, real = [0], setting.core.present_run

        def counted(session: int, part: Any, *rest: Any) -> int:
            run = real(session, part, *rest)
            looks[0] += run + 1
            return run

        monkeypatch.setattr(setting.core, "present_run", counted)
        task = asyncio.create_task(setting.servicer.Acquire(setting.acquire(20, lease_ms=1000), Context()))
        for index in range(20):
            await asyncio.sleep(0)
            setting.core.commit(setting.writer.number, answer.attempt, [index], [7], index == 19)
        found = await task
        assert found.run == 20 and found.lease
        assert looks[0] <= 20 + 21 + 21

    run(work())


def test_acquire_gives_up_when_nothing_more_is_committed() -> None:
    async def work() -> None:
        setting = Setting()
        answer = setting.node.reserve(setting.writer, keys_of(setting.space, 1, 3))
        setting.core.commit(setting.writer.number, answer.attempt, [0], [7], False)
        found = await setting.servicer.Acquire(setting.acquire(3, wait_ms=30), Context())
        assert (found.run, found.miss_reason) == (1, "in_progress")
        found = await setting.servicer.Acquire(setting.acquire(3, wait_ms=9000), Context(0.1))
        assert found.run == 1, "the call's own deadline is respected"

    run(work())


def test_acquire_ends_with_its_session() -> None:
    async def work() -> None:
        setting = Setting()
        setting.node.reserve(setting.writer, keys_of(setting.space, 1, 3))
        task = asyncio.create_task(setting.servicer.Acquire(setting.acquire(3, wait_ms=9000), Context()))
        await asyncio.sleep(0)
        setting.core.process_gone(setting.reader.number)
        setting.core.on_commit()
        with pytest.raises(SessionLost):
            await task

    run(work())


def test_long_chains_are_committed_and_resolved_in_turns_with_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(server, "STEP_CHUNKS", 8)
        setting = Setting()
        keys = keys_of(setting.space, 1, 30)
        answer = setting.node.reserve(setting.writer, keys)
        turns: list[int] = []

        async def other_work() -> None:
            while True:
                turns.append(setting.core.stats()["chunks"])
                await asyncio.sleep(0)

        other = asyncio.create_task(other_work())
        request = node_pb2.CommitRequest(
            session=setting.writer.number,
            attempt=answer.attempt,
            indices=range(28),
            table_hashes=range(1, 29),
            last=True,
        )
        done = await setting.servicer.Commit(request, Context())
        assert list(done.outcomes) == [Outcome.COMMITTED] * 28
        assert {8, 16, 24} <= set(turns), "others had their turns in between"
        assert setting.core.stats()["reserved_slots"] == 0
        setting.core.check()
        for wanted, lease_ms in ((30, 1000), (28, 1000), (30, 0)):
            acquired = setting.acquire(wanted, lease_ms=lease_ms, ticket_id=b"")
            found = messages.acquire_from_message(await setting.servicer.Acquire(acquired, Context()))
            direct = setting.core.acquire(setting.reader.number, keys.slice(0, wanted), SMALL.whole, lease_ms)
            assert (found.run, found.places, found.reason) == (direct.run, direct.places, direct.reason)
            assert (found.lease_ms, bool(found.lease)) == (direct.lease_ms, bool(direct.lease))
        other.cancel()
        policy = setting.core.pool.dram._policy(4096, 0)
        assert list(policy.victims()) == list(keys)[27::-1], "tails go first"
        setting.core.check()

    run(work())


def test_a_session_of_before_a_restart_is_ended_not_an_unknown_namespace() -> None:
    """Its peer would believe for ever that the node has nothing: it registered the namespace already."""

    async def work() -> None:
        setting = Setting()
        chain = node_pb2.Chain(namespace_id=b"n" * 16, parent_key=b"n" * 16)
        with pytest.raises(SessionLost):
            await setting.servicer.Acquire(setting.acquire(1, session=1, chain=chain), Context())
        with pytest.raises(NotFound):
            await setting.servicer.Acquire(setting.acquire(1, chain=chain), Context())

    run(work())


def test_fields_out_of_range() -> None:
    async def work() -> None:
        setting = Setting()
        number = setting.reader.number
        with pytest.raises(LimitExceeded, match="128 bytes"):
            await setting.servicer.OpenSession(node_pb2.OpenSessionRequest(client_name="é" * 65), Context())
        with pytest.raises(InvalidRequest, match="rectangle is missing"):
            await setting.servicer.Acquire(setting.acquire(1, rectangle=None), Context())
        with pytest.raises(LimitExceeded, match="written_here"):
            request = node_pb2.RegisterNamespaceRequest(session=number, written_here=range(257))
            await setting.servicer.RegisterNamespace(request, Context())
        with pytest.raises(LimitExceeded, match="600 s"):
            await setting.servicer.Put(_requests(), Context(700))

    run(work())


def test_a_put_without_a_header_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(streams.next_part, "__defaults__", (0.05,))
        with pytest.raises(DeadlineExceeded):
            await Setting().servicer.Put(_silence(), Context())

    run(work())


async def _requests(*requests: node_pb2.PutRequest) -> AsyncIterator[node_pb2.PutRequest]:
    for request in requests:
        yield request


async def _silence() -> AsyncIterator[node_pb2.PutRequest]:
    await asyncio.Event().wait()
    yield node_pb2.PutRequest()


def test_answers_that_do_not_fit_the_question_are_refused() -> None:
    place = node_pb2.ShardPlace(index=2, rectangle=wire.rectangle_to_message(SMALL.whole))
    with pytest.raises(InvalidRequest, match="places"):
        messages.acquire_from_message(node_pb2.AcquireResponse(run=2, places=[place]))
    with pytest.raises(InvalidRequest, match="unknown outcome"):
        messages.put_from_message(node_pb2.PutResponse(outcomes=[9]))  # type: ignore[list-item]
