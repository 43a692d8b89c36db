"""The nodes that a client reaches: the session with the own host's, connections to others, the index that names them.

What did not answer is left alone for half a second, so that a miss stays cheap; what was lost is opened again by the
next call that needs it.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore.client.copiers import Copiers
from kvstore.client.counters import Counters
from kvstore.client.host import HostNode, SocketHost
from kvstore.client.local import STRONG_ORDER
from kvstore.client.peers import Peer
from kvstore.client.transports import Transports, Way
from kvstore.errors import (
    DeadlineExceeded,
    ForkedProcess,
    InvalidRequest,
    KvStoreError,
    NotFound,
    StaleReference,
    Unreachable,
)
from kvstore.metadata import Index, NodeMatch
from kvstore.metadata.remote import RemoteIndex
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo
from kvstore.node.remote import ask_info
from kvstore.transport.staging import Staging

logger = logging.getLogger(__name__)
RETRY_EVERY_S = 0.5
"""A node or index that did not answer is not asked again for this long: a miss must stay cheap."""
READS_AT_ONCE = 8
"""Reads layer by layer that are under way at a time; more wait for their turn, within their deadlines."""
SICK_LIMIT_S = 8.0
"""Longest time that a node whose data do not come is asked after all others."""
SICK_SHOWN_S = 60.0
"""So long after that time it still counts as degraded, unless a read has worked."""


class Nodes:
    """Thread-safe; of no use in a forked child. `counters`, `staging` and `copiers` are shared by all its users."""

    def __init__(
        self,
        host_path: str | None,
        own: NodeInfo | None,
        index: Index | None,
        *,
        way: Way = Way(),  # noqa: B008 (a value)
        staging_bytes: int = 64 << 20,
        copy_threads: int = 0,
        verify: bool = False,
        name: str = "",
        host: HostNode | None = None,
    ) -> None:
        self.counters = Counters()
        self.staging = Staging(staging_bytes)
        self.copiers = Copiers(copy_threads)
        self.verify = verify or not STRONG_ORDER
        """Reads of the own host's memory are checked against their checksums too."""
        self.transport = way.choice
        self._transports = Transports(way, self.staging.memory, self.counters)
        self._host_path = host_path
        self._host = host
        self._own = own if host is None else host.info
        self._index = index
        self._name = name or f"pid {os.getpid()}"
        self._lock = threading.RLock()
        self._peers: dict[tuple[str, int], Peer] = {}
        self._meeting: dict[str, threading.Lock] = {}
        """By node: one thread at a time connects to it, so that it does not get a session from each."""
        self._bad_until: dict[str, float] = {}
        self._sick: dict[str, tuple[float, float]] = {}
        """By node: until when it is asked last, and how long that was."""
        self._addresses: dict[str, NodeInfo] = {}
        self._listing: tuple[float, list[NodeInfo]] | None = None
        self._on_session: list[Callable[[HostNode, float], None]] = []
        self._opening = threading.Lock()
        self._background: ThreadPoolExecutor | None = None
        self._prefetcher: ThreadPoolExecutor | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self.closed = False

    @property
    def node(self) -> NodeInfo | None:
        """The own host's node (or the one that was named), None if there is none."""
        return self._own

    @property
    def living_host(self) -> HostNode | None:
        """The session with the own host's node, None if there is none at this moment. Opens nothing, never waits."""
        host = self._host
        return host if host is not None and host.alive else None

    def host(self, deadline_s: float = 5.0) -> HostNode | None:
        """The session with the own host's node, opened again if it was lost; None if there is none now."""
        self.check_process()
        host = self._host
        if host is not None and host.alive:
            return host
        if not self._opening.acquire(timeout=deadline_s):
            return None  # another thread is still trying, with more patience
        try:
            if self._host is not None and self._host.alive:
                return self._host
            if self._host_path is None or self._is_bad(self._host_path):
                return None
            return self._open_host(self._host_path, deadline_s)
        finally:
            self._opening.release()

    def _open_host(self, path: str, deadline_s: float) -> HostNode | None:
        lost, self._host = self._host, None
        if lost is not None:
            lost.close()
            self.counters.add("sessions_lost")
        fresh: SocketHost | None = None
        try:
            fresh = SocketHost(path, self._name, deadline_s)
            for tell in list(self._on_session):
                self._tell(tell, fresh, deadline_s)
        except KvStoreError:
            if fresh is not None:
                fresh.close()
            self._mark_bad(path)
            return None
        self._host, self._own = fresh, fresh.info
        return fresh

    def each_session(self, tell: Callable[[HostNode, float], None], deadline_s: float) -> None:
        """Call `tell(session, deadline_s)` with the present session, if there is one, and with every later one.

        What it raises for the present session is raised, and later ones are not told.
        """
        host = self.host(deadline_s)
        if host is not None:
            tell(host, deadline_s)
        with self._lock:
            self._on_session.append(tell)

    def _tell(self, tell: Callable[[HostNode, float], None], host: HostNode, deadline_s: float) -> None:
        """One listener's refusal must not cut all others off from the node; a node that is gone is another matter."""
        try:
            tell(host, deadline_s)
        except (StaleReference, Unreachable, DeadlineExceeded):
            raise
        except KvStoreError as exc:
            logger.warning("the node refused what this client had told its predecessor: %s", exc)
            self.counters.add("registrations_refused")

    @property
    def remote_path(self) -> str:
        """The way that pages of other nodes come, as far as this side decides."""
        return self._transports.path

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

    def spread(self, matches: Sequence[NodeMatch]) -> NodeMatch:
        """One of the best: data paths that work first, then nodes that beat, then the longest run, then chance."""
        now = time.monotonic()

        def rank(match: NodeMatch) -> tuple[bool, bool, int]:
            works = self._sick.get(match.node.node_id, (0.0, 0.0))[0] <= now
            return works, not match.suspect, match.run

        best = max(map(rank, matches))
        return random.choice([match for match in matches if rank(match) == best])

    def note_data_path(self, info: NodeInfo, *, works: bool, why: str = "") -> None:
        """A read from this node has ended. One that fails is asked after all others for a while, longer each time."""
        if works:
            if self._sick.pop(info.node_id, None) is not None:
                logger.info("node %s: its data come again", info.node_id)
            return
        if info.node_id not in self._sick:
            logger.warning("node %s: its data do not come (%s); others are asked first", info.node_id, why)
        pause_s = min(SICK_LIMIT_S, 2 * self._sick.get(info.node_id, (0.0, RETRY_EVERY_S / 2))[1])
        if len(self._sick) > 1024:
            self._sick.clear()
        self._sick[info.node_id] = time.monotonic() + pause_s, pause_s
        self.counters.add("data_path_failures")

    def leave_alone(self, info: NodeInfo) -> None:
        """This incarnation could not be read: do not ask it for a moment, each time costs it a session."""
        self._mark_bad(f"{info.node_id} {info.epoch}")

    def is_left_alone(self, info: NodeInfo) -> bool:
        """True for half a second after `leave_alone`."""
        return self._is_bad(f"{info.node_id} {info.epoch}")

    def degraded_nodes(self) -> tuple[str, ...]:
        """Ids of nodes whose data did not come when they were last asked, lately; they may well beat and answer."""
        shown_from_s = time.monotonic() - SICK_SHOWN_S
        return tuple(sorted(node for node, (until_s, _) in list(self._sick.items()) if until_s > shown_from_s))

    def node_info(self, node_id: str, epoch: int, deadline_s: float) -> NodeInfo:
        """What the index knows of a node; raises NotFound or Unreachable."""
        if self._own is not None and self._own.node_id == node_id:
            return self._own
        for (known_id, known_epoch), peer in list(self._peers.items()):
            if (known_id, known_epoch) == (node_id, epoch):
                return peer.info
        for known in self._listed(deadline_s):
            if (known.node_id, known.epoch) == (node_id, epoch):
                return known
        raise NotFound(f"node {node_id} with epoch {epoch} is not known to the index")

    def _listed(self, deadline_s: float) -> list[NodeInfo]:
        """The nodes that the index lists, also remembered for a moment; raises Unreachable, DeadlineExceeded."""
        if self._index is None:
            return []
        if self._is_bad("index"):
            raise Unreachable("the metadata service did not answer a moment ago")
        now = time.monotonic()
        if self._listing is None or now - self._listing[0] > RETRY_EVERY_S:
            try:
                if isinstance(self._index, RemoteIndex):
                    statuses = self._index.nodes(deadline_s=deadline_s)
                else:
                    statuses = self._index.nodes()
            except KvStoreError:
                self._mark_bad("index")
                raise
            self._listing = now, [status.node for status in statuses]
        return self._listing[1]

    def write_target(self, node: NodeInfo | str | None, deadline_s: float) -> NodeInfo | None:
        """The node to send pages to, None for the own host's, whose memory is shared.

        `node`: what the index says of it, or its gRPC address. Raises Unreachable.
        """
        host = self.host(deadline_s)
        if isinstance(node, str):
            known = self._addresses.get(node)
            if known is None:
                known = self._addresses[node] = ask_info(node, deadline_s)
            node = known
        elif node is None and host is None and self._host_path is None:
            node = self._own  # a node was named, but not to share memory with
        return None if host is not None and node is not None and node.node_id == host.info.node_id else node

    def peer(self, info: NodeInfo, deadline_s: float) -> Peer:
        """The connection to another node; raises Unreachable, also for a while after it failed, DeadlineExceeded."""
        if self._is_bad(info.control_address):
            raise Unreachable(f"node {info.node_id} did not answer a moment ago")
        end_s = time.monotonic() + deadline_s
        with self._lock:
            known = self._peers.get((info.node_id, info.epoch))
            if known is not None:
                return known
            if len(self._meeting) > 1024:
                self._meeting.clear()
            meeting = self._meeting.setdefault(info.node_id, threading.Lock())
        if not meeting.acquire(timeout=deadline_s):
            raise DeadlineExceeded(f"another thread is still connecting to node {info.node_id}")
        try:
            return self._meet(info, max(0.001, end_s - time.monotonic()))
        finally:
            meeting.release()

    def _meet(self, info: NodeInfo, deadline_s: float) -> Peer:
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
            fresh = Peer(info, self._transports, self._name, deadline_s)
        except StaleReference:
            self._forget_addresses(info.node_id)
            if info == self._own:
                self._own = ask_info(info.control_address, deadline_s)
            raise
        except KvStoreError:
            self._mark_bad(info.control_address)
            raise
        with self._lock:
            self._peers[place] = fresh
        return fresh

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

    # --- shared means ------------------------------------------------------------------------------------

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

    def readers(self) -> ThreadPoolExecutor:
        """Threads for reads that the caller follows layer by layer; these wait for `background` too."""
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="kvstore-read")
            return self._readers

    def flush_touches(self, deadline_s: float = 1.0) -> None:
        """Return when the own host's node has seen all uses so far. Raises Unreachable if it cannot be had."""
        end_s = time.monotonic() + deadline_s
        host = self.host(deadline_s)
        if host is not None:
            host.flush(max(0.001, end_s - time.monotonic()))
        elif self._host_path is not None:
            raise Unreachable("the session with this host's node is lost; uses since then were not told to it")

    def stats(self) -> dict[str, int]:
        """What this client counted, and its staging by state (bytes)."""
        usage = self.staging.usage()
        return {
            **self.counters.snapshot(),
            "degraded_nodes": len(self.degraded_nodes()),
            "staging_free_bytes": usage.free_bytes,
            "staging_in_use_bytes": usage.in_use_bytes,
            "staging_quarantined_bytes": usage.quarantined_bytes,
        }

    def check_process(self) -> None:
        """Raise ForkedProcess in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedProcess("this client belongs to the parent process; connect anew after the fork, or use spawn")

    def check_open(self) -> None:
        """Raise InvalidRequest after `close`, ForkedProcess in a forked child."""
        self.check_process()
        if self.closed:
            raise InvalidRequest("this client is closed; connect anew")

    def close(self) -> None:
        """End all sessions and connections; idempotent. No call may be under way."""
        if self.closed:
            return
        self.check_process()
        self.closed = True
        for threads in (self._readers, self._prefetcher, self._background):
            if threads is not None:
                threads.shutdown(wait=True, cancel_futures=True)
        self.copiers.close()
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            host, self._host, self._host_path = self._host, None, None
        for peer in peers:
            peer.close()
        self._transports.close()
        if host is not None:
            host.close()
        closing = getattr(self._index, "close", None)
        if closing is not None:
            closing()
