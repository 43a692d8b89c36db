"""Writing to a node whose memory this process does not share: pages go by the Put stream of its gRPC service.

Slower than the own host's memory (gRPC copies and checksums each page), and no ticket can be pinned; the outcomes are
the same. The source is read once, in another thread, before the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from kvstore.client.nodes import Nodes
from kvstore.client.values import Bytes, Source, WriteResult, synchronize
from kvstore.errors import CapacityExhausted, SessionLost, Unreachable
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo, Outcome


def write_remote(
    nodes: Nodes,
    info: NodeInfo,
    namespace: Namespace,
    geometry: Geometry,
    written_here: tuple[int, ...],
    shard: int,
    keys: Keys,
    source: Source,
    end_s: float,
) -> WriteResult:
    """Store one shard of each key on the node `info` until `end_s` (monotonic seconds).

    A full node is an outcome. A session that ran out while it was not used is opened again, once. Raises
    LayoutMismatch, DeadlineExceeded, Unreachable, StaleReference where the node has restarted.
    """
    if not len(keys):
        return WriteResult(())
    rectangle = geometry.rectangles[shard & 0xFF]
    for again in (True, False):
        peer = nodes.peer(info, _left(end_s))
        try:
            peer.register_writer(namespace, geometry, written_here, _left(end_s))
            payloads = _payloads(namespace, rectangle, source, len(keys))
            return WriteResult(tuple(peer.api.put(keys, shard, payloads, _left(end_s))))
        except CapacityExhausted:
            return WriteResult((Outcome.REFUSED_FULL, *[Outcome.REFUSED_PARENT_MISSING] * (len(keys) - 1)))
        except SessionLost:
            nodes.drop_peer(info.node_id, info.epoch)
            if not again:
                raise
        except Unreachable:
            nodes.drop_peer(info.node_id, info.epoch)
            raise
    raise AssertionError("the second try returns or raises")


def _payloads(namespace: Namespace, rectangle: Rectangle, source: Source, count: int) -> Iterator[Bytes]:
    """Each chunk's rectangle in turn, in one buffer."""
    pages = np.empty(namespace.layout.shape(rectangle), dtype=np.uint8)
    for index in range(count):
        source.gather(index, pages, rectangle.layer_start, rectangle.head_start)
        synchronize(source)
        yield pages


def _left(end_s: float) -> float:
    return max(0.001, end_s - time.monotonic())
