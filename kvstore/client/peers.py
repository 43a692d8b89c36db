"""Another node as a client sees it: a gRPC session and data connections, for one incarnation."""

from __future__ import annotations

import threading
from typing import Protocol

from kvstore.errors import StaleReference
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.values import NodeInfo
from kvstore.node.remote import RemoteNode
from kvstore.transport import Connection

CONNECTIONS_KEPT = 8


class Connector(Protocol):
    """What makes data connections: a transport, or the choice of one."""

    def connect(self, node: NodeInfo, deadline_s: float) -> Connection:
        """See Transport."""


class Peer:
    """One incarnation of another node: its gRPC session and some idle data connections. Thread-safe."""

    def __init__(self, info: NodeInfo, transport: Connector, name: str, deadline_s: float) -> None:
        self.info = info
        self._transport = transport
        self.api = RemoteNode(info.control_address, name=name, deadline_s=deadline_s)
        if self.api.info is not None and self.api.info.epoch != info.epoch:
            self.api.close()
            raise StaleReference(f"node {info.node_id} has restarted")
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False
        self._registered: set[bytes] = set()
        self._written: set[tuple[bytes, Geometry, tuple[int, ...]]] = set()

    def register(self, namespace: Namespace, deadline_s: float) -> None:
        """Tell the node of the namespace, once."""
        if namespace.id not in self._registered:
            self.api.register_namespace(namespace, None, (), deadline_s)
            self._registered.add(namespace.id)

    def register_writer(
        self, namespace: Namespace, geometry: Geometry, written_here: tuple[int, ...], deadline_s: float
    ) -> None:
        """Tell the node how this client cuts the namespace's chunks, once."""
        place = namespace.id, geometry, written_here
        if place not in self._written:
            self.api.register_namespace(namespace, geometry, written_here, deadline_s)
            self._written.add(place)

    def take(self, deadline_s: float) -> tuple[Connection, bool]:
        """(a connection for one thread, whether it was kept from an earlier read)."""
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                break
            if kept.is_open:
                return kept, True
            kept.close()  # the owner has ended it meanwhile
        return self._transport.connect(self.info, deadline_s), False

    def give_back(self, connection: Connection, *, healthy: bool) -> None:
        """Keep a healthy connection for the next read, close any other; also when this peer was closed meanwhile."""
        with self._lock:
            if healthy and not self._closed and len(self._idle) < CONNECTIONS_KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """End everything."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for connection in idle:
            connection.close()
        self.api.close()
