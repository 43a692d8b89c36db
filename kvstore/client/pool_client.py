"""`Client`: one process's way to the pool. It finds nodes, keeps sessions and connections, and counts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.client.counters import Counters
from kvstore.client.host import HostNode, SocketHost, same_host
from kvstore.client.remote import Peer
from kvstore.errors import ConfigurationError, ForkedProcess, KvStoreError, NotFound, StaleReference, Unreachable
from kvstore.metadata import Index, NodeMatch
from kvstore.metadata.remote import RemoteIndex
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo
from kvstore.node.remote import RemoteNode
from kvstore.setting_types import parse_size
from kvstore.transport.staging import Staging
from kvstore.transport.tcp import TcpTransport

if TYPE_CHECKING:
    from kvstore.client.cache import Cache

TRANSPORTS = ("auto", "shm", "tcp")
RETRY_EVERY_S = 0.5
"""A node or index that did not answer is not asked again for this long: a miss must stay cheap."""


def connect(
    node: str | None = None,
    metadata: str | None = None,
    *,
    transport: str = "auto",
    staging: str | int = "64MiB",
    name: str = "",
    host_id: str = "",
    deadline_s: float = 5.0,
) -> Client:
    """A client of the node at `node` (gRPC address or path of its Unix socket) and the index at `metadata`.

    `transport`: auto = shared memory where the node is on this host, else tcp; shm and tcp force one. The node is on
    this host if it hands its memory over and its host id is `host_id`; empty: the hand-over alone decides. Raises
    Unreachable if the node does not answer, ConfigurationError for shm where memory cannot be shared.
    """
    if transport not in TRANSPORTS:
        raise ConfigurationError(f"unknown transport {transport!r}; known: {', '.join(TRANSPORTS)}")
    if node is None and metadata is None:
        raise ConfigurationError("give the address of a node, of the metadata service, or of both")
    size = staging if isinstance(staging, int) else parse_size(staging)
    name = name or f"pid {os.getpid()}"
    host, own = _meet(node, transport, host_id, name, deadline_s) if node else (None, None)
    path = host.path if host is not None else None
    index = RemoteIndex(metadata) if metadata else None
    return Client(path, own, index, transport=transport, staging_bytes=size, name=name, host=host)


def _meet(
    node: str, transport: str, host_id: str, name: str, deadline_s: float
) -> tuple[SocketHost | None, NodeInfo | None]:
    """(session with a node that is on this host, None where tcp is to be used; what is known of the node)."""
    if "/" in node:
        if transport == "tcp":
            raise ConfigurationError("transport tcp needs the node's gRPC address, not its socket")
        host = SocketHost(node, name, deadline_s)
        if host_id in ("", host.info.host_id):
            return host, host.info
        host.close()
        raise ConfigurationError(f"{node} belongs to host {host.info.host_id}, not {host_id}; give its gRPC address")
    info = _probe(node, deadline_s)
    shared = same_host(info, host_id, name, deadline_s) if transport != "tcp" else None
    if transport == "shm" and shared is None:
        raise ConfigurationError(
            f"{node} (host {info.host_id}, socket {info.socket_path}) shares no memory with this process; use tcp"
        )
    return shared, info


def _probe(address: str, deadline_s: float) -> NodeInfo:
    """What the node at a gRPC address says of itself."""
    probe = RemoteNode(address, name="probe", deadline_s=deadline_s)
    info = probe.info
    probe.close()
    if info is None:
        raise Unreachable(f"{address} did not say what it is")
    return info


class Client:
    """Thread-safe; of no use in a forked child. Close it, or use it as a context manager."""

    def __init__(
        self,
        host_path: str | None,
        own: NodeInfo | None,
        index: Index | None,
        *,
        transport: str = "auto",
        staging_bytes: int = 64 << 20,
        name: str = "",
        host: HostNode | None = None,
    ) -> None:
        self.counters = Counters()
        self.staging = Staging(staging_bytes)
        self.transport = transport
        self._host_path = host_path
        self._host = host
        self._own = own if host is None else host.info
        self._index = index
        self._name = name or f"pid {os.getpid()}"
        self._lock = threading.RLock()
        self._peers: dict[tuple[str, int], Peer] = {}
        self._bad_until: dict[str, float] = {}
        self._addresses: dict[str, NodeInfo] = {}
        self._caches: list[Cache] = []
        self._background: ThreadPoolExecutor | None = None
        self._prefetcher: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._tcp = TcpTransport()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def bind(
        self,
        namespace: Namespace,
        *,
        secret: bytes = b"",
        geometry: Geometry | None = None,
        rank: int = 0,
        written_here: Sequence[int] = (),
        checksums: bool = True,
    ) -> Cache:
        """The namespace as one rank sees it. `rank` is a rectangle number of `geometry` (default: whole chunks).

        `written_here`: rectangles that writers of this group store on this node, all by default. `secret`: the
        tenant's, at most 64 bytes. `checksums` False stores without them (measurements only).
        """
        from kvstore.client.cache import Cache

        self.check_process()
        cache = Cache(
            self,
            namespace,
            secret=secret,
            geometry=geometry or Geometry.whole(namespace.layout),
            rank=rank,
            written_here=tuple(written_here),
            checksums=checksums,
        )
        with self._lock:
            self._caches.append(cache)
        host = self.host()
        if host is not None:
            cache.register(host, 5.0)
        return cache

    # --- nodes -------------------------------------------------------------------------------------------

    @property
    def node(self) -> NodeInfo | None:
        """The own host's node (or the one that was named), None if there is none."""
        return self._own

    def host(self, deadline_s: float = 5.0) -> HostNode | None:
        """The session with the own host's node, opened again if it was lost; None if there is none now."""
        self.check_process()
        host = self._host
        if host is not None and host.alive:
            return host
        with self._lock:
            if self._host is not None and self._host.alive:
                return self._host
            if self._host_path is None or self._is_bad(self._host_path):
                return None
            lost, self._host = self._host, None
            if lost is not None:
                lost.close()
                self.counters.add("sessions_lost")
            fresh: SocketHost | None = None
            try:
                fresh = SocketHost(self._host_path, self._name, deadline_s)
                for cache in self._caches:
                    cache.register(fresh, deadline_s)
            except KvStoreError:
                if fresh is not None:
                    fresh.close()
                self._mark_bad(self._host_path)
                return None
            self._host, self._own = fresh, fresh.info
            return fresh

    def nodes_with(self, keys: Keys, rectangle: Rectangle, deadline_s: float) -> list[NodeMatch]:
        """Other nodes that hold a prefix of these keys, the longest first. Empty if the index does not answer."""
        if self._index is None or not len(keys) or self._is_bad("index"):
            return []
        try:
            if isinstance(self._index, RemoteIndex):
                found = self._index.match(keys, rectangle, deadline_s=deadline_s)
            else:
                found = self._index.match(keys, rectangle)
        except KvStoreError:
            self._mark_bad("index")
            self.counters.add("index_unreachable")
            return []
        return [match for match in found if not self._is_host(match.node)]

    def node_info(self, node_id: str, epoch: int) -> NodeInfo:
        """What the index knows of a node; raises NotFound or Unreachable."""
        if self._own is not None and self._own.node_id == node_id:
            return self._own
        for (known_id, known_epoch), peer in list(self._peers.items()):
            if (known_id, known_epoch) == (node_id, epoch):
                return peer.info
        for status in self._index.nodes() if self._index is not None else []:
            if status.node.node_id == node_id and status.node.epoch == epoch:
                return status.node
        raise NotFound(f"node {node_id} with epoch {epoch} is not known to the index")

    def write_target(self, node: NodeInfo | str | None, deadline_s: float) -> NodeInfo | None:
        """The node to send pages to, None for the own host's, whose memory is shared.

        `node`: what the index says of it, or its gRPC address. Raises Unreachable.
        """
        host = self.host()
        if isinstance(node, str):
            known = self._addresses.get(node)
            if known is None:
                known = self._addresses[node] = _probe(node, deadline_s)
            node = known
        elif node is None and host is None and self._host_path is None:
            node = self._own  # a node was named, but not to share memory with
        return None if host is not None and node is not None and node.node_id == host.info.node_id else node

    def peer(self, info: NodeInfo, deadline_s: float) -> Peer:
        """The connection to another node; raises Unreachable, also for a while after it failed."""
        if self._is_bad(info.control_address):
            raise Unreachable(f"node {info.node_id} did not answer a moment ago")
        place = info.node_id, info.epoch
        with self._lock:
            known = self._peers.get(place)
            if known is not None:
                return known
            older = [other for other in self._peers if other[0] == info.node_id]
        for other in older:
            self.drop_peer(*other)
        try:
            fresh = Peer(info, self._tcp, self._name, deadline_s)
        except StaleReference:
            self._forget_addresses(info.node_id)
            if info == self._own:
                self._own = _probe(info.control_address, deadline_s)
            raise
        except KvStoreError:
            self._mark_bad(info.control_address)
            raise
        with self._lock:
            known = self._peers.setdefault(place, fresh)
        if known is not fresh:
            fresh.close()
        return known

    def drop_peer(self, node_id: str, epoch: int) -> None:
        """Forget a connection that failed; the next use makes a new one."""
        with self._lock:
            peer = self._peers.pop((node_id, epoch), None)
        self._forget_addresses(node_id)
        if peer is not None:
            peer.close()

    def _forget_addresses(self, node_id: str) -> None:
        """The node at these addresses failed: ask anew who is there."""
        with self._lock:
            self._addresses = {a: info for a, info in self._addresses.items() if info.node_id != node_id}

    def _is_host(self, info: NodeInfo) -> bool:
        host = self._host
        return host is not None and host.alive and host.info.node_id == info.node_id

    def _is_bad(self, what: str) -> bool:
        return self._bad_until.get(what, 0.0) > time.monotonic()

    def _mark_bad(self, what: str) -> None:
        if len(self._bad_until) > 1024:
            self._bad_until.clear()
        self._bad_until[what] = time.monotonic() + RETRY_EVERY_S

    # --- the rest ----------------------------------------------------------------------------------------

    def background(self) -> ThreadPoolExecutor:
        """Threads for what overlaps with the caller's own work: commits and checks of a batch."""
        with self._lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(4, thread_name_prefix="kvstore-client")
            return self._background

    def prefetcher(self) -> ThreadPoolExecutor:
        """Threads for whole prefetches: these wait for `background`, so they must not fill it."""
        with self._lock:
            if self._prefetcher is None:
                self._prefetcher = ThreadPoolExecutor(2, thread_name_prefix="kvstore-prefetch")
            return self._prefetcher

    def flush_touches(self, deadline_s: float = 1.0) -> None:
        """Return when the own host's node has seen all uses so far."""
        host = self.host()
        if host is not None:
            host.flush(deadline_s)

    def stats(self) -> dict[str, int]:
        """What this client counted, and its staging by state (bytes)."""
        usage = self.staging.usage()
        return {
            **self.counters.snapshot(),
            "staging_free_bytes": usage.free_bytes,
            "staging_in_use_bytes": usage.in_use_bytes,
            "staging_quarantined_bytes": usage.quarantined_bytes,
        }

    def check_process(self) -> None:
        """Raise ForkedProcess in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedProcess("this client belongs to the parent process; connect anew after the fork, or use spawn")

    def close(self) -> None:
        """End all sessions and connections. No call may be under way."""
        self.check_process()
        for threads in (self._prefetcher, self._background):
            if threads is not None:
                threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            host, self._host, self._host_path = self._host, None, None
        for peer in peers:
            peer.close()
        if host is not None:
            host.close()
        closing = getattr(self._index, "close", None)
        if closing is not None:
            closing()
