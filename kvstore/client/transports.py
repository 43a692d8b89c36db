"""Which way bytes come from another node: chosen when a connection is made, by what both sides have.

`auto` takes NIXL where both hosts have an RDMA device and the node offers it, else tcp, which moves verified pages
faster than NIXL does over TCP. A named transport is the only one used: it works, or reads from that node are misses.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.client.counters import Counters
from kvstore.errors import ConfigurationError, KvStoreError, NotFound, Unreachable
from kvstore.model.values import NodeInfo
from kvstore.transport import Connection, Transport
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.nixl_agent import is_installed, rdma_devices
from kvstore.transport.tcp import TcpTransport

logger = logging.getLogger(__name__)
SUBSTITUTE_S = 5.0
"""So long a connection over tcp is kept that was made because NIXL did not answer."""
CHOICES = ("auto", "shm", "tcp", "nixl")
"""Of a client; shm: this host's node by shared memory or not at all, others as with auto."""


@dataclass(frozen=True, slots=True)
class Way:
    """How other nodes are read: one of CHOICES, NIXL's back-end and devices (none = all), the nodes' secret."""

    choice: str = "auto"
    nixl_backend: str = "UCX"
    nixl_devices: tuple[str, ...] = ()
    secret: bytes = field(default=b"", repr=False)


class Transports:
    """`staging`: memory that NIXL registers. Thread-safe. NIXL is loaded and tried here, which takes a second or two.

    Raises ConfigurationError for nixl where it, its back-end or a device is not there.
    """

    def __init__(self, way: Way, staging: npt.NDArray[np.uint8], counters: Counters) -> None:
        choice, secret = way.choice, way.secret
        if choice not in CHOICES:
            raise ConfigurationError(f"unknown transport {choice!r}; known: {', '.join(CHOICES)}")
        if choice == "nixl" and not is_installed():
            raise ConfigurationError("transport nixl needs the nixl package: pip install 'kvstore[nixl]', or use tcp")
        self._counters = counters
        self._forced = choice == "nixl"
        self._tcp: Transport = TcpTransport(secret)
        self._nixl: Transport | None = None
        if self._forced or (choice != "tcp" and is_installed() and rdma_devices()):
            self._nixl = self._prepared(
                NixlTransport(staging, backend=way.nixl_backend, devices=way.nixl_devices, credential=secret)
            )
        self._told: set[str] = set()

    def _prepared(self, nixl: NixlTransport) -> NixlTransport | None:
        try:
            nixl.prepare()
        except ConfigurationError as exc:
            if self._forced:
                raise
            logger.warning("other nodes are read over tcp, although this host has RDMA devices: %s", exc)
            self._counters.add("nixl_fallbacks")
            return None
        return nixl

    @property
    def path(self) -> str:
        """The way that is tried first."""
        return self._nixl.path if self._nixl is not None else self._tcp.path

    def connect(self, node: NodeInfo, deadline_s: float) -> Connection:
        """See Transport."""
        if self._nixl is None:
            return self._tcp.connect(node, deadline_s)
        try:
            return self._nixl.connect(node, deadline_s)
        except (NotFound, Unreachable, ConfigurationError) as exc:
            if self._forced:
                if isinstance(exc, NotFound):
                    raise Unreachable(str(exc)) from exc
                raise
            self._tell(node, exc)
            if isinstance(exc, Unreachable):  # it may be starting again: do not stay with tcp for good
                return _Substitute(self._tcp.connect(node, deadline_s))
        return self._tcp.connect(node, deadline_s)

    def close(self) -> None:
        """All connections are closed already. Idempotent."""
        for transport in (self._nixl, self._tcp):
            if transport is not None:
                transport.close()

    def _tell(self, node: NodeInfo, exc: KvStoreError) -> None:
        self._counters.add("nixl_fallbacks")
        if node.node_id not in self._told:
            self._told.add(node.node_id)
            logger.warning("node %s is read over tcp, although this host has RDMA devices: %s", node.node_id, exc)


class _Substitute:
    """A connection that is good for a while only, so that the better way is tried again."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._end_s = time.monotonic() + SUBSTITUTE_S
        self.name = connection.name
        self.read, self.start = connection.read, connection.start
        self.cancel, self.close = connection.cancel, connection.close

    @property
    def is_open(self) -> bool:
        """See Connection."""
        return time.monotonic() < self._end_s and self._connection.is_open
