"""`connect` and `Client`: one process's way to the pool."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvstore.client.cache import Cache
from kvstore.client.host import SocketHost, same_host
from kvstore.client.nodes import Nodes
from kvstore.client.transports import CHOICES, Way
from kvstore.errors import ConfigurationError
from kvstore.metadata.remote import RemoteIndex
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.values import NodeInfo
from kvstore.node.remote import ask_info
from kvstore.setting_types import parse_size

_NETWORK = ("tcp", "nixl")
"""Transports that use the network, also to this host's node."""


def connect(
    node: str | None = None,
    metadata: str | None = None,
    *,
    transport: str = "auto",
    nixl_backend: str = "UCX",
    nixl_devices: Sequence[str] = (),
    peer_secret: bytes = b"",
    staging: str | int = "64MiB",
    copy_threads: int = 0,
    verify: bool = False,
    name: str = "",
    host_id: str = "",
    deadline_s: float = 5.0,
) -> Client:
    """A client of the node at `node` (gRPC address or path of its Unix socket) and the index at `metadata`.

    `transport`: auto = shared memory where the node is on this host, else nixl where both hosts have RDMA devices, else
    tcp; shm, tcp and nixl force one. The node is on this host if it hands its memory over and its host id is `host_id`;
    empty: the hand-over alone decides. `nixl_backend`: UCX or LIBFABRIC, `nixl_devices`: the network devices to use,
    all by default. `peer_secret`: what nodes ask of those who read their memory over the network, where it is set.
    `copy_threads`: of one large read or write through shared memory, the caller's among them; 1 copies on the caller's
    thread only, 0 takes one a usable CPU, at most 4. `verify`: also check the checksums of what is read through shared
    memory, where the fence alone is enough but for bytes that change in place; it costs a second copy. Raises
    Unreachable if the node does not answer, ConfigurationError for wrong arguments, for shm where memory cannot be
    shared and for nixl where it is not installed.
    """
    if transport not in CHOICES:
        raise ConfigurationError(f"unknown transport {transport!r}; known: {', '.join(CHOICES)}")
    if copy_threads < 0:
        raise ConfigurationError(f"copy_threads is {copy_threads}; it must be 0 (chosen here) or more")
    if node is None and metadata is None:
        raise ConfigurationError("give the address of a node, of the metadata service, or of both")
    size = staging if isinstance(staging, int) else parse_size(staging)
    name = name or f"pid {os.getpid()}"
    host, own = _meet(node, transport, host_id, name, deadline_s) if node else (None, None)
    path = host.path if host is not None else None
    index = RemoteIndex(metadata) if metadata else None
    way = Way(transport, nixl_backend, tuple(nixl_devices), peer_secret)
    return Client(
        path,
        own,
        index,
        way=way,
        staging_bytes=size,
        copy_threads=copy_threads,
        verify=verify,
        name=name,
        host=host,
    )


def _meet(
    node: str, transport: str, host_id: str, name: str, deadline_s: float
) -> tuple[SocketHost | None, NodeInfo | None]:
    """(session with a node that is on this host, None where tcp is to be used; what is known of the node)."""
    if "/" in node:
        if transport in _NETWORK:
            raise ConfigurationError(f"transport {transport} needs the node's gRPC address, not its socket")
        host = SocketHost(node, name, deadline_s)
        if host_id in ("", host.info.host_id):
            return host, host.info
        host.close()
        raise ConfigurationError(f"{node} belongs to host {host.info.host_id}, not {host_id}; give its gRPC address")
    info = ask_info(node, deadline_s)
    shared = same_host(info, host_id, name, deadline_s) if transport not in _NETWORK else None
    if transport == "shm" and shared is None:
        raise ConfigurationError(
            f"{node} (host {info.host_id}, socket {info.socket_path}) shares no memory with this process; use tcp"
        )
    return shared, info


class Client(Nodes):
    """The public face of the nodes: binds namespaces. Close it, or use it as a context manager."""

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
        self.each_session(cache.register, 5.0)
        return cache
