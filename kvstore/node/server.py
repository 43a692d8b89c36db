"""`NodeService` over grpc.aio: validates messages, calls the core on the event loop, answers. A thin shell.

The event loop is the core's one owner. Nothing here works on more than one message between two awaits; copies of
Put and Get run in `streams`, off the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from kvstore.errors import InvalidRequest, LimitExceeded, NotFound, Unauthorized
from kvstore.model.layout import GEOMETRY_RECTANGLES_LIMIT, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Outcome
from kvstore.node import (
    HANDOFF_WAIT_MS,
    RESERVATION_LIFETIME_MS,
    AcquireAnswer,
    CommitAnswer,
    ShardPlace,
    messages,
)
from kvstore.node.core import NOTHING_STAGED, REMOTE_IDLE_S, NodeCore
from kvstore.node.messages import STREAM_LIMIT_S
from kvstore.node.side_verbs import SideVerbs
from kvstore.node.streams import PageStreams, next_part
from kvstore.node.tiers import TierStack
from kvstore.rpc import handshake, wire
from kvstore.rpc.counting import counted
from kvstore.rpc.v1 import node_pb2, node_pb2_grpc

WAIT_LIMIT_MS = 10_000
STEP_CHUNKS = 256
"""Chunks that one turn of the event loop commits or resolves: about 4 ms."""
CLIENT_NAME_LIMIT_BYTES = 128
ANSWER_S = 0.05
"""Kept of a call's time for its answer, when it waits for a disk."""
HINTS_LIMIT = 64
"""Parts that are read ahead of their readers at a time; a further one is left to its reader."""
HINT_S = 30.0

_Aimed = node_pb2.AcquireRequest | node_pb2.GetRequest | node_pb2.PrefetchRequest
_Chained = _Aimed | node_pb2.ReserveRequest | node_pb2.PutHeader | node_pb2.PersistRequest


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """The store service of one node. `more_stats` adds figures of the shell to Stats."""

    def __init__(
        self,
        core: NodeCore,
        streams: PageStreams,
        more_stats: Callable[[], dict[str, Any]],
        tiers: TierStack | None = None,
    ) -> None:
        self._core = core
        self._streams = streams
        self._tiers = tiers
        self._hints: set[asyncio.Task[object]] = set()
        self._more_stats = more_stats
        self._committed = asyncio.Event()
        core.on_commit = self._wake_waiters
        self._side = SideVerbs(core, lambda: self._committed)

    async def OpenSession(self, request: node_pb2.OpenSessionRequest, _: Any) -> node_pb2.OpenSessionResponse:
        """A session without shared memory."""
        if len(request.client_name.encode()) > CLIENT_NAME_LIMIT_BYTES:
            raise LimitExceeded(f"client_name is longer than {CLIENT_NAME_LIMIT_BYTES} bytes")
        session = self._core.open_session(request.client_name, shared=False)
        return node_pb2.OpenSessionResponse(
            session=session.number,
            node=wire.node_info_to_message(self._core.info),
            idle_limit_ms=int(REMOTE_IDLE_S * 1000),
        )

    async def RegisterNamespace(
        self, request: node_pb2.RegisterNamespaceRequest, _: Any
    ) -> node_pb2.RegisterNamespaceResponse:
        """Idempotent."""
        wire.check_count("written_here", len(request.written_here), GEOMETRY_RECTANGLES_LIMIT)
        namespace = Namespace.from_canonical(request.namespace)
        geometry = wire.geometry_from_messages(request.geometry) if request.geometry else None
        space = self._core.register_namespace(request.session, namespace, geometry, list(request.written_here))
        return node_pb2.RegisterNamespaceResponse(
            namespace_id=namespace.id,
            namespace_number=space.number,
            geometry_digest=geometry.digest if geometry else 0,
        )

    async def Reserve(self, request: node_pb2.ReserveRequest, _: Any) -> node_pb2.ReserveResponse:
        """Slots for one shard of each key."""
        self._check_writes(request.session)
        ticket = _ticket_id(request.ticket_id)
        wire.check_count("wanted", len(request.wanted))
        answer = self._core.reserve(request.session, self._keys(request), request.shard, ticket, request.wanted)
        return messages.reserve_to_message(answer, RESERVATION_LIFETIME_MS)

    async def Commit(self, request: node_pb2.CommitRequest, _: Any) -> node_pb2.CommitResponse:
        """Makes shards visible."""
        self._check_writes(request.session)
        wire.check_count("indices", len(request.indices))
        if len(request.indices) != len(request.table_hashes):
            raise InvalidRequest("commit: indices and table_hashes have different lengths")
        indices, hashes = list(request.indices), list(request.table_hashes)
        outcomes: list[Outcome] = []
        while len(indices) - len(outcomes) > STEP_CHUNKS:
            cut = slice(len(outcomes), len(outcomes) + STEP_CHUNKS)
            outcomes += self._core.commit(
                request.session, request.attempt, indices[cut], hashes[cut], last=False
            ).outcomes
            await asyncio.sleep(0)
        rest = slice(len(outcomes), len(indices))
        answer = self._core.commit(request.session, request.attempt, indices[rest], hashes[rest], request.last)
        return messages.commit_to_message(CommitAnswer(outcomes + answer.outcomes, answer.waiting))

    async def Abort(self, request: node_pb2.AbortRequest, _: Any) -> node_pb2.AbortResponse:
        """Gives slots back."""
        self._core.abort(request.session, request.attempt)
        return node_pb2.AbortResponse()

    async def Acquire(self, request: node_pb2.AcquireRequest, context: Any) -> node_pb2.AcquireResponse:
        """Resolves keys; with a ticket it waits for the writer as long as commits keep arriving.

        What lies on the SSD is read into DRAM first, as much as one call may.
        """
        keys, rectangle = self._keys(request), _rectangle(request)
        _ticket_id(request.ticket_id)
        if request.ticket_id:
            wait_s = min(request.wait_ms or HANDOFF_WAIT_MS, WAIT_LIMIT_MS) / 1000
            await self._wait_for(request.session, keys, rectangle, wait_s, context, request.ticket_id)
        staged, reason = NOTHING_STAGED, None
        if request.lease_ms and self._tiers is not None:
            staged, reason = await self._stage(self._tiers, request.session, keys, rectangle, context)
        if len(keys) <= STEP_CHUNKS:
            answer = self._core.acquire(
                request.session, keys, rectangle, request.lease_ms, staged=staged, unstaged=reason
            )
        else:
            answer = await self._acquire_in_steps(request.session, keys, rectangle, request.lease_ms, staged, reason)
        if len(keys) <= STEP_CHUNKS:
            return messages.acquire_to_message(answer)
        return await asyncio.to_thread(messages.acquire_to_message, answer)

    async def _stage(
        self, tiers: TierStack, session: int, keys: Keys, rectangle: Rectangle, context: Any
    ) -> tuple[range, MissReason | None]:
        """Bring what is next on the SSD into DRAM: (places of what came, why not more). Then the next part follows."""
        run = await self._dram_run(session, keys, rectangle)
        if run is None:
            return NOTHING_STAGED, None
        ends_s = time.monotonic() + context.time_remaining() - ANSWER_S
        staged, reason = await tiers.stage(keys, rectangle, run, ends_s)
        if staged and reason is None and run + staged < len(keys):
            self._hint(tiers.stage(keys, rectangle, run + staged, ends_s, ahead=True))
        return range(run, run + staged), reason

    def _hint(self, work: Coroutine[Any, Any, object]) -> None:
        """Do this after the answer; dropped where too much of that is under way."""
        if len(self._hints) >= HINTS_LIMIT:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._hints.add(task)
        task.add_done_callback(self._hints.discard)

    async def _dram_run(self, session: int, keys: Keys, rectangle: Rectangle) -> int | None:
        """Leading chunks in DRAM where the next one is on the SSD, else None."""
        run = 0
        while run < len(keys):
            part = self._core.resolve(session, keys.slice(run, run + STEP_CHUNKS), rectangle)
            run += part.run
            if part.more or part.reason is not None:
                return run if part.more else None
            await asyncio.sleep(0)
        return None

    async def _acquire_in_steps(
        self,
        session: int,
        keys: Keys,
        rectangle: Rectangle,
        lease_ms: int,
        staged: range,
        unstaged: MissReason | None,
    ) -> AcquireAnswer:
        """As `NodeCore.acquire`, but others get their turn in between.

        The lease is of the last chunk found, which keeps its ancestors. A chunk that leaves before that is noticed by
        the reader's fence.
        """
        places: list[ShardPlace] = []
        run, reason, more = 0, None, False
        while run < len(keys) and reason is None and not more:
            part = self._core.resolve(session, keys.slice(run, run + STEP_CHUNKS), rectangle)
            places += [replace(place, index=run + place.index) for place in part.places]
            run, reason, more = run + part.run, part.reason, part.more
            await asyncio.sleep(0)
        answer = AcquireAnswer(run, places, 0, 0, reason, self._core.info.epoch, more)
        if not lease_ms:
            return answer
        ssd_tokens = self._core.use(session, keys.slice(0, run), staged)
        return self._core.lease(session, keys, answer, lease_ms, staged, ssd_tokens, unstaged)

    async def _wait_for(
        self, session: int, keys: Keys, rectangle: Rectangle, wait_s: float, context: Any, ticket_id: bytes
    ) -> None:
        """Until all keys are there, the run has not grown for `wait_s`, the writer gave the ticket up, or the call's
        time is nearly up.

        Each look begins where the last one ended: a long chain must not be walked again for every commit.
        """
        loop = asyncio.get_running_loop()
        run, patience_ends = 0, loop.time() + wait_s
        while True:
            more = self._core.present_run(session, keys.slice(run, len(keys)), rectangle)
            run += more
            if run == len(keys) or self._core.side_objects.dropped(ticket_id):
                return
            if more:
                patience_ends = loop.time() + wait_s
            left_s = min(patience_ends - loop.time(), context.time_remaining() - 0.05)
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._committed.wait(), left_s)

    async def Release(self, request: node_pb2.ReleaseRequest, _: Any) -> node_pb2.ReleaseResponse:
        """Ends leases and tickets."""
        wire.check_count("leases", len(request.leases))
        blob = wire.check_key_blob("ticket_ids", request.ticket_ids)
        tickets = [blob[at : at + 16] for at in range(0, len(blob), 16)]
        self._core.release(request.session, list(request.leases), tickets)
        return node_pb2.ReleaseResponse()

    async def PutSideObjects(self, request: node_pb2.PutSideObjectsRequest, _: Any) -> node_pb2.PutSideObjectsResponse:
        """Keeps small tensors for the reader of a ticket."""
        return self._side.put(request)

    async def GetSideObjects(
        self, request: node_pb2.GetSideObjectsRequest, context: Any
    ) -> node_pb2.GetSideObjectsResponse:
        """Hands them out once their chunks are there."""
        return await self._side.get(request, min(request.wait_ms, WAIT_LIMIT_MS) / 1000, context)

    async def DropTicket(self, request: node_pb2.DropTicketRequest, _: Any) -> node_pb2.DropTicketResponse:
        """The writer gives a handoff up."""
        self._core.drop_ticket(request.session, wire.check_key("ticket_id", request.ticket_id))
        return node_pb2.DropTicketResponse()

    async def Remove(self, request: node_pb2.RemoveRequest, _: Any) -> node_pb2.RemoveResponse:
        """Removes keys and all below them."""
        wire.check_key("namespace_id", request.namespace_id)
        blob = wire.check_key_blob("keys", request.keys)
        keys = [blob[at : at + 16] for at in range(0, len(blob), 16)]
        removed = self._core.remove(request.session, request.namespace_id, keys)
        if self._tiers is not None:
            await self._tiers.forget_removed()
        return node_pb2.RemoveResponse(removed_chunks=removed)

    async def Prefetch(self, request: node_pb2.PrefetchRequest, _: Any) -> node_pb2.PrefetchResponse:
        """A hint: brings keys from the SSD into DRAM after the answer, one bound of a call after the other."""
        keys, rectangle = self._keys(request), _rectangle(request)
        present = self._core.present_run(request.session, keys, rectangle)
        run = await self._dram_run(request.session, keys, rectangle)
        in_dram = present if run is None else run
        if run is not None and self._tiers is not None:
            self._hint(self._tiers.stage_all(keys.slice(0, present), rectangle, run, time.monotonic() + HINT_S))
        return node_pb2.PrefetchResponse(present_chunks=present, dram_chunks=in_dram)

    async def Persist(self, request: node_pb2.PersistRequest, context: Any) -> node_pb2.PersistResponse:
        """Waits until keys are on the SSD."""
        keys = self._keys(request)
        if self._tiers is None:
            return node_pb2.PersistResponse(ssd_chunks=0, reason="no_ssd")
        ends_s = time.monotonic() + context.time_remaining() - ANSWER_S
        run, reason = await self._tiers.persist(keys, ends_s)
        return node_pb2.PersistResponse(ssd_chunks=run, reason=reason)

    async def Stats(self, request: node_pb2.StatsRequest, _: Any) -> node_pb2.StatsResponse:
        """Figures of the node."""
        figures = {**self._core.stats(), **self._more_stats()}
        return node_pb2.StatsResponse(node=wire.node_info_to_message(self._core.info), json=json.dumps(figures))

    async def Put(self, requests: AsyncIterator[node_pb2.PutRequest], context: Any) -> node_pb2.PutResponse:
        """Stores chunks from a stream."""
        _check_stream(context)
        parts = aiter(requests)
        first = await next_part(parts)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidRequest("put: the first message must be the header")
        keys = self._keys(first.header)
        outcomes = await self._streams.put(first.header.session, keys, first.header.shard, parts)
        return node_pb2.PutResponse(outcomes=messages.outcome_numbers(outcomes))

    async def Get(self, request: node_pb2.GetRequest, context: Any) -> AsyncIterator[node_pb2.GetResponse]:
        """Fetches chunks as a stream."""
        _check_stream(context)
        keys, rectangle = self._keys(request), _rectangle(request)
        async with contextlib.aclosing(self._streams.get(request.session, keys, rectangle)) as parts:
            async for part in parts:
                yield part

    def _keys(self, request: _Chained) -> Keys:
        """The request's keys. The session is looked at first: after a restart it is gone, whatever else is known."""
        self._core.session(request.session)
        chain = request.chain
        wire.check_key("chain.namespace_id", chain.namespace_id)
        space = self._core.pool.spaces.get(chain.namespace_id)
        if space is None:
            raise NotFound(
                f"namespace {chain.namespace_id.hex()[:8]} is not registered on this node; register it first"
            )
        return wire.keys_from_message(chain, space.layout.chunk_tokens)

    def _check_writes(self, number: int) -> None:
        """Only who can write into the arena gets slots; for others their former contents would become visible."""
        session = self._core.session(number)
        if not session.shared or session.writer.owner == (0, 0):
            raise Unauthorized("this session cannot write into the node's memory; store with Put")

    def _wake_waiters(self) -> None:
        if self._tiers is not None:
            self._tiers.wake()
        self._committed.set()
        self._committed = asyncio.Event()


def _rectangle(request: _Aimed) -> Rectangle:
    if not request.HasField("rectangle"):
        raise InvalidRequest("rectangle is missing; the whole chunk is 0..layers x 0..KV heads")
    return wire.rectangle_from_message(request.rectangle)


def _check_stream(context: Any) -> None:
    if context.time_remaining() > STREAM_LIMIT_S:
        raise LimitExceeded(f"a stream may take at most {STREAM_LIMIT_S:g} s; set an earlier deadline")


def _ticket_id(value: bytes) -> bytes:
    return wire.check_key("ticket_id", value) if value else value


class SessionVerbs:
    """Serves the verbs that come over a session's own socket: the same methods, without gRPC around them."""

    def __init__(self, servicer: NodeServicer) -> None:
        self._verbs = {verb: (getattr(servicer, verb), getattr(node_pb2, f"{verb}Request")) for verb in handshake.VERBS}

    async def __call__(self, session: int, verb: str, body: bytes) -> bytes:
        """See `kvstore.node.sessions.Serve`. The socket, not the message, says whose session it is."""
        method, request_type = self._verbs[verb]
        with counted("NodeService", verb, "socket"):
            try:
                request = request_type.FromString(body)
            except DecodeError as exc:
                raise InvalidRequest(f"{verb}: not a request message: {exc}") from exc
            if request.session != session:
                raise Unauthorized("a session's socket serves only its own session")
            response: bytes = (await method(request, None)).SerializeToString()
            return response
