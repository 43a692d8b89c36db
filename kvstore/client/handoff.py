"""The reader's and the writer's side of a handoff besides the chunks: side objects, and the end of a ticket.

Side objects are read from the nodes that the ticket names, never from an index: they are of one request only. Each is
verified against the checksum that its writer took; one that differs is a miss of all.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.client.nodes import Nodes
from kvstore.client.values import ReadResult
from kvstore.errors import DeadlineExceeded, InvalidRequest, KvStoreError, LayoutMismatch, SessionLost, Unreachable
from kvstore.model.layout import Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.side_object import NeededChunks, SideObject
from kvstore.model.ticket import Ticket
from kvstore.model.values import MissReason
from kvstore.node import HANDOFF_WAIT_MS, NodeApi

logger = logging.getLogger(__name__)
_Place = tuple[str, int]
"""(node id, epoch)"""


@dataclass(frozen=True, slots=True)
class SideResult:
    """Side objects by name, all that were asked for; or none, and `reason` says why."""

    objects: Mapping[str, SideObject] = field(default_factory=dict)
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class HandoffResult:
    """Chunks and side objects of one handoff. Unless both are whole `objects` is empty and `reason` says why.

    `read`: what was delivered of the chunks, as `Cache.read` tells it; a leading part is of use without the objects.
    """

    read: ReadResult
    objects: Mapping[str, SideObject]
    reason: MissReason | None


def pack(ticket: Ticket, objects: Mapping[str, Any]) -> list[SideObject]:
    """Arrays and CPU tensors as side objects of a ticket, with their checksums. Raises LayoutMismatch for others."""
    return [SideObject.made_for(ticket.id, name, *_described(name, value)) for name, value in objects.items()]


def put(
    nodes: Nodes,
    namespace: Namespace,
    rectangle: Rectangle,
    ticket: Ticket,
    keys: Keys,
    objects: Sequence[SideObject],
    lifetime_s: float,
    deadline_s: float,
) -> float:
    """Keep them on the node that this client writes to, bound to `rectangle` of the chunks; the lifetime in seconds."""
    if not len(keys):
        raise InvalidRequest("side objects belong to the chunks of a handoff; give the keys of at least one")
    if not lifetime_s > 0:
        raise InvalidRequest(f"side objects live for some time, not {lifetime_s} s")
    end_s = time.monotonic() + deadline_s
    needed = NeededChunks(keys.namespace_id, keys[-1], rectangle)
    api = _own_api(nodes, namespace, end_s)
    lifetime_ms = max(1, int(min(lifetime_s, 1e6) * 1000))
    granted_ms = api.put_side_objects(ticket.id, needed, objects, lifetime_ms, _left(end_s))
    nodes.counters.add("side_objects_put", len(objects))
    return granted_ms / 1000


def _own_api(nodes: Nodes, namespace: Namespace, end_s: float) -> NodeApi:
    """The node that `Cache.write` stores on."""
    target = nodes.write_target(None, _left(end_s))
    if target is not None:
        peer = nodes.peer(target, _left(end_s))
        peer.register(namespace, _left(end_s))
        return peer.api
    host = nodes.host(_left(end_s))
    if host is None:
        raise Unreachable("there is no node on this host; start `kvstore node` here")
    return host.api


def read(nodes: Nodes, ticket: Ticket, names: Sequence[str], rank: int | None, deadline_s: float) -> SideResult:
    """Ask the node of one rank, or those of all ranks, the last one first; verify; count.

    The last rank's node is waited for, because what follows from the last token comes out of the last pipeline stage;
    the others, by then, have had their time.
    """
    end_s = time.monotonic() + deadline_s
    reason = MissReason.ABSENT
    for number, place in enumerate(_places(ticket, rank)):
        if _left(end_s) <= _TOO_LATE_S:
            reason = MissReason.DEADLINE
            break
        found = _read_from(nodes, ticket, place, names, 0 if number else HANDOFF_WAIT_MS, end_s)
        if found.reason is None:
            nodes.counters.add("side_objects_read", len(found.objects))
            nodes.counters.add("side_bytes_read", sum(len(each.data) for each in found.objects.values()))
            return found
        if found.reason is MissReason.DROPPED:
            reason = found.reason
            break
        if reason is MissReason.ABSENT:  # what a node knows says more than that another one knows nothing
            reason = found.reason
    nodes.counters.add(f"side_misses_{reason.value}")
    return SideResult(reason=reason)


def _places(ticket: Ticket, rank: int | None) -> Iterable[_Place]:
    if rank is None:
        return dict.fromkeys((each.node_id, each.epoch) for each in reversed(ticket.ranks))
    if not 0 <= rank < len(ticket.ranks):
        raise InvalidRequest(f"rank {rank} of a ticket with {len(ticket.ranks)} ranks")
    return [(ticket.ranks[rank].node_id, ticket.ranks[rank].epoch)]


def _read_from(
    nodes: Nodes, ticket: Ticket, place: _Place, names: Sequence[str], wait_ms: int, end_s: float
) -> SideResult:
    """One node's answer, verified. A session that ran out while this client was idle is opened again, once."""
    for again in (True, False):
        try:
            answer = _api_at(nodes, place, end_s).get_side_objects(ticket.id, names, wait_ms, _left(end_s))
            break
        except DeadlineExceeded:
            return SideResult(reason=MissReason.DEADLINE)
        except SessionLost:
            nodes.drop_peer(*place)
            if not again:
                return SideResult(reason=MissReason.SESSION_LOST)
        except KvStoreError:
            nodes.drop_peer(*place)
            return SideResult(reason=MissReason.UNREACHABLE)
    if answer.reason is not None:
        return SideResult(reason=answer.reason)
    wrong = [each.name for each in answer.objects if not each.holds_for(ticket.id)]
    if wrong:
        logger.warning("side object %s differs from what was put: served as a miss", wrong[0])
        return SideResult(reason=MissReason.CHECKSUM)
    return SideResult({each.name: each for each in answer.objects})


def release(nodes: Nodes, ticket: Ticket, deadline_s: float) -> None:
    """End the ticket on all its nodes; what is not reached runs out by itself."""
    _tell_all(nodes, ticket, deadline_s, "tickets_left_to_run_out", lambda api, s: api.release((), [ticket.id], s))


def drop(nodes: Nodes, ticket: Ticket, deadline_s: float) -> None:
    """The writer gives up: tell all nodes of the ticket, so that whoever waits there hears at once."""
    _tell_all(nodes, ticket, deadline_s, "drops_not_told", lambda api, s: api.drop_ticket(ticket.id, s))


def _tell_all(
    nodes: Nodes, ticket: Ticket, deadline_s: float, failed: str, tell: Callable[[NodeApi, float], None]
) -> None:
    nodes.check_open()
    end_s = time.monotonic() + deadline_s
    for place in _places(ticket, None):
        try:
            tell(_api_at(nodes, place, end_s), _left(end_s))
        except KvStoreError:
            nodes.counters.add(failed)


def _api_at(nodes: Nodes, place: _Place, end_s: float) -> NodeApi:
    """A session with a node of a ticket: the own host's, or that of another host."""
    node_id, epoch = place
    host = nodes.host(_left(end_s))
    if host is not None and host.info.node_id == node_id:
        return host.api
    return nodes.peer(nodes.node_info(node_id, epoch, _left(end_s)), _left(end_s)).api


def _described(name: str, value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype, shape, bytes) of an array or a CPU tensor."""
    if type(value).__module__.partition(".")[0] == "torch":
        return _tensor_described(name, value)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise LayoutMismatch(f"side object {name!r} has the type {array.dtype}, which is none of numbers")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return array.dtype.name, array.shape, little.tobytes()


def _tensor_described(name: str, tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    if tensor.device.type != "cpu":
        raise LayoutMismatch(f"side object {name!r} is on {tensor.device}; copy it to the CPU first")
    import torch  # it is there already: the caller has a tensor

    shape = tuple(int(size) for size in tensor.shape)
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if math.prod(shape) else b""
    return str(tensor.dtype).removeprefix("torch."), shape, data


_TOO_LATE_S = 0.001


def _left(end_s: float) -> float:
    """Seconds until `end_s`; what is over already gets a millisecond, and then fails as too late."""
    return max(_TOO_LATE_S, end_s - time.monotonic())
