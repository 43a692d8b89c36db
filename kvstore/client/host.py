"""The node of the own host, as the client uses it: mapped memory for the bytes, `NodeApi` for the verbs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from kvstore.client.values import Bytes
from kvstore.errors import Unreachable
from kvstore.model.values import NodeInfo
from kvstore.node import NodeApi
from kvstore.node.lookup import CatalogReader
from kvstore.node.remote import RemoteNode
from kvstore.transport.shm import SharedNode


class HostNode(Protocol):
    """A session with the own host's node. Thread-safe."""

    info: NodeInfo
    api: NodeApi
    arena: Bytes
    reader: CatalogReader
    writable: bool

    @property
    def alive(self) -> bool:
        """False once the session has ended."""

    def touch(self, prefix: bytes) -> None:
        """These keys (16 bytes each, head first) were used. Never blocks; dropped when too many wait."""

    def flush(self, deadline_s: float) -> None:
        """Return when the node has seen all touches so far."""

    def populated_bytes(self, deadline_s: float) -> int:
        """So much of the arena, from its start, has memory that the node pays for."""

    def on_end(self, release: Callable[[], None]) -> None:
        """Call `release` once when the session has ended, at once if it has. It must not raise.

        `alive` is False by then, so that nothing new is begun on the arena, which is still mapped: here is where copies
        under way are waited for and registrations with devices end.
        """

    def close(self) -> None:
        """End the session. What `on_end` was given has been called when this returns, or is being called."""


class SocketHost:
    """A node in another process of this host: its Unix socket's session, which its gRPC calls name."""

    def __init__(self, path: str, name: str, deadline_s: float = 5.0) -> None:
        self.path = path
        self._shared = SharedNode.connect(path, name, deadline_s)
        self.info = self._shared.info
        self.arena = self._shared.arena
        self.reader = self._shared.reader
        self.writable = self._shared.writable
        self._remote = RemoteNode(self.info.control_address, self._shared.session, direct=self._shared.call)
        self.api: NodeApi = self._remote

    @property
    def alive(self) -> bool:
        """False once the session has ended."""
        return self._shared.alive

    def touch(self, prefix: bytes) -> None:
        """See HostNode."""
        self._shared.touch(prefix)

    def flush(self, deadline_s: float) -> None:
        """See HostNode."""
        self._shared.flush(deadline_s)

    def populated_bytes(self, deadline_s: float) -> int:
        """See HostNode."""
        return int(json.loads(self._remote.stats(deadline_s))["populated_bytes"])

    def on_end(self, release: Callable[[], None]) -> None:
        """See HostNode."""
        self._shared.on_end(release)

    def close(self) -> None:
        """End the session and its channel."""
        self._shared.close()
        self._remote.close()


def same_host(info: NodeInfo, host_id: str, name: str, deadline_s: float) -> SocketHost | None:
    """The session with a node that answers at a gRPC address, if it is on this host; None if it is on another.

    On this host: its socket opens, *this* node hands its memory over there, and its host id is `host_id` (empty: any).
    A path alone says nothing: another host may have a node of its own there, or a socket that a dead one left. Raises
    Unreachable where the node is on this host but refuses, for example for want of a permission.
    """
    if not info.socket_path or host_id not in ("", info.host_id):
        return None
    try:
        shared = SocketHost(info.socket_path, name, deadline_s)
    except Unreachable as exc:
        if isinstance(exc.__cause__, FileNotFoundError | ConnectionRefusedError):
            return None
        raise
    if (shared.info.node_id, shared.info.host_id) == (info.node_id, info.host_id):
        return shared
    shared.close()
    return None
