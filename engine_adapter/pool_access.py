"""An engine process's one way to the pool: a client that its sessions share, or a pool inside the process.

Scheduler and worker of an engine may be one process or several. A pool inside the process serves both halves of an
engine of one process (`embedded` keeps it by the engine's name); several processes share a node, at least one of their
own (`engine_adapter.private_node`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import kvstore
from kvstore.client import Client

CONNECT_DEADLINE_S = 2.0


@dataclass(slots=True)
class _Embedded:
    client: Client
    users: int


_embedded: dict[str, _Embedded] = {}
_embedded_lock = threading.Lock()


class PoolAccess:
    """Opens its client at the first use and keeps it. Thread-safe; `close` once, after the sessions."""

    def __init__(self, open_client: Callable[[], Client]) -> None:
        self._open_client = open_client
        self._lock = threading.Lock()
        self._client: Client | None = None
        self.on_close: Callable[[], None] | None = None
        """Instead of closing the client."""
        self.after_close: Callable[[], None] = lambda: None

    def client(self) -> Client:
        """The shared client; raises what opening it raises, and tries again at the next call."""
        with self._lock:
            if self._client is None:
                self._client = self._open_client()
            return self._client

    def close(self) -> None:
        """End the client."""
        with self._lock:
            client, self._client = self._client, None
        if self.on_close is not None:
            self.on_close()
        elif client is not None:
            client.close()
        self.after_close()


def to_node(
    node: str, metadata: str, *, transport: str, staging: str, name: str, host_id: str, verify: bool
) -> PoolAccess:
    """The pool of which `node` is this host's node."""

    def open_client() -> Client:
        return kvstore.connect(
            node or None,
            metadata or None,
            transport=transport,
            staging=staging,
            name=name,
            host_id=host_id,
            verify=verify,
            deadline_s=CONNECT_DEADLINE_S,
        )

    return PoolAccess(open_client)


def embedded(name: str, dram: str, *, verify: bool = False) -> PoolAccess:
    """The pool of this process with that name; it goes when the last access to it is closed.

    Raises ConfigurationError if the memory is not there.
    """
    with _embedded_lock:
        known = _embedded.get(name)
        if known is None:
            known = _embedded[name] = _Embedded(kvstore.open_local(dram, verify=verify), 0)
        known.users += 1
    access = PoolAccess(lambda: known.client)

    def leave() -> None:
        with _embedded_lock:
            known.users -= 1
            if not known.users:
                del _embedded[name]
        if not known.users:
            known.client.close()

    access.on_close = leave
    return access
