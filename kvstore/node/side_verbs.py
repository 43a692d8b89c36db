"""Serves side objects: checks messages, asks the core's table, waits for what is still coming. A thin shell.

Runs on the node's event loop. A reader waits as `Acquire` with a ticket does: as long as something of the ticket keeps
arriving, objects or chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore.model.side_object import SIDE_OBJECTS_A_TICKET, NeededChunks
from kvstore.model.values import MissReason
from kvstore.node import SideAnswer, messages
from kvstore.node.core import NodeCore
from kvstore.node.steps import in_turns
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2

ANSWER_S: Final = 0.05
"""Kept of a call's time for its answer."""


class SideVerbs:
    """`next_change`: the event that is set when something is committed, put or dropped next."""

    def __init__(self, core: NodeCore, next_change: Callable[[], asyncio.Event]) -> None:
        self._core = core
        self._next_change = next_change

    def put(self, request: node_pb2.PutSideObjectsRequest) -> node_pb2.PutSideObjectsResponse:
        """Keep objects, all or none. See `kvstore.node.side_objects.SideObjects.put`."""
        self._core.session(request.session)
        if not request.HasField("rectangle"):
            raise InvalidRequest("rectangle is missing: what this node is to hold of the chunks of these objects")
        if not request.lifetime_ms:
            raise InvalidRequest("lifetime_ms is 0; side objects are kept for 1 to 60000 ms")
        lifetime_ms = self._core.side_objects.put(
            wire.check_key("ticket_id", request.ticket_id),
            NeededChunks(request.namespace_id, request.last_key, wire.rectangle_from_message(request.rectangle)),
            wire.side_objects_from_messages(request.objects),
            request.lifetime_ms,
        )
        self._core.on_commit()
        return node_pb2.PutSideObjectsResponse(lifetime_ms=lifetime_ms)

    async def get(
        self, request: node_pb2.GetSideObjectsRequest, wait_s: float, context: Any
    ) -> node_pb2.GetSideObjectsResponse:
        """Objects or a reason. What cannot come any more (`dropped`) is not waited for."""
        ticket_id, names = wire.check_key("ticket_id", request.ticket_id), list(request.names)
        wire.check_count("names", len(names), SIDE_OBJECTS_A_TICKET)
        answer = await self._wait_for(request.session, ticket_id, names, wait_s, context)
        self._core.side_objects.count(answer)
        return messages.side_to_message(answer)

    async def _wait_for(
        self, session: int, ticket_id: bytes, names: list[str], wait_s: float, context: Any
    ) -> SideAnswer:
        loop = asyncio.get_running_loop()
        arrived, patience_ends = self._arrived(ticket_id), loop.time() + wait_s
        while True:
            self._core.session(session)
            answer = await in_turns(self._core.side_objects.look(ticket_id, names))
            if answer.reason is None or answer.reason is MissReason.DROPPED:
                return answer
            before, arrived = arrived, self._arrived(ticket_id)
            if arrived != before:
                patience_ends = loop.time() + wait_s
            left_s = min(patience_ends - loop.time(), context.time_remaining() - ANSWER_S)
            if left_s <= 0:
                return answer
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._next_change().wait(), left_s)

    def _arrived(self, ticket_id: bytes) -> tuple[int, int]:
        """Chunks and objects of a ticket so far: what grows while its writers go on."""
        pins = self._core.holds.tickets.get(ticket_id)
        return pins.arrived if pins is not None else 0, self._core.side_objects.size(ticket_id)
