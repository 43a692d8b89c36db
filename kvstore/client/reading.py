"""One read: the own host's memory first, then the nodes of the ticket, then those that the index names.

Each source extends the delivered prefix; the last one asked gives the reason why it ends.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvstore.client.host import HostNode
from kvstore.client.local import LocalRead, read_local
from kvstore.client.nodes import Nodes
from kvstore.client.pipeline import Delivery
from kvstore.client.remote import RemoteRead, read_remote
from kvstore.client.values import (
    Bytes,
    Destination,
    ReadResult,
    is_asynchronous,
    scatter_checked,
    scatters_at_once,
    synchronize,
)
from kvstore.errors import DeadlineExceeded, KvStoreError
from kvstore.model import checksum
from kvstore.model.layout import Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket
from kvstore.model.values import MissReason, NodeInfo
from kvstore.node import HANDOFF_WAIT_MS
from kvstore.transport import Connection

logger = logging.getLogger(__name__)
FENCE_RETRIES = 3
_GONE = (MissReason.UNREACHABLE, MissReason.SESSION_LOST)
_FAILED = (MissReason.UNREACHABLE, MissReason.DEADLINE)


class Reading:
    """One read under way: which chunks are done, from where, and why it stopped.

    `groups`, `on_group` and `on_connection` as in `Delivery`: where one source has all that is left, that is delivered
    group by group.
    """

    def __init__(
        self,
        nodes: Nodes,
        namespace: Namespace,
        keys: Keys,
        wanted: Rectangle,
        destination: Destination,
        end_s: float,
        groups: tuple[Rectangle, ...] = (),
        on_group: Callable[[int], None] = lambda group: None,
        on_connection: Callable[[Connection | None], None] = lambda connection: None,
    ) -> None:
        self._groups = groups
        self._on_group, self._on_connection = on_group, on_connection
        self._given_up = False
        self._nodes = nodes
        self._namespace = namespace
        self._keys = keys
        self._wanted = wanted
        self._destination = destination
        self._end_s = end_s
        self._done = self._local = self._ssd_tokens = 0
        self._slower = False
        self._untold = b""
        """Keys that were read without asking: the node does not know of their use."""
        self._reason: MissReason | None = MissReason.ABSENT
        self._bytes: Counter[str] = Counter()

    @property
    def complete(self) -> bool:
        """True if all chunks are delivered."""
        return self._done == len(self._keys)

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def run(self, ticket: Ticket | None) -> None:
        """Ask one source after the other until all chunks are delivered."""
        self.from_host(ticket)
        if ticket is not None and not self.complete:
            self.from_ticket(ticket)
        if not self.complete:
            self.from_others()

    def give_up(self) -> None:
        """From any thread: nothing new is begun, and what fails now says nothing of the node."""
        self._given_up = True
        self._end_s = time.monotonic()

    def from_host(self, ticket: Ticket | None) -> None:
        """The own host's node, by shared memory; with a ticket of this node its writer is waited for."""
        host = self._nodes.host(max(0.05, self._left_s()))
        if host is None:
            named = self._nodes.node
            if named is not None:  # a node was named, but not to share memory with
                ours = ticket is not None and any(rank.node_id == named.node_id for rank in ticket.ranks)
                self._read_peer(
                    named, ticket.id if ticket is not None and ours else b"", HANDOFF_WAIT_MS if ours else 0
                )
            return
        self._from_host(host, ticket)
        if self._untold:
            host.touch(self._untold)

    def _from_host(self, host: HostNode, ticket: Ticket | None) -> None:
        self._read_host(host)
        self._read_slower(host)
        waits = ticket is not None and any(rank.node_id == host.info.node_id for rank in ticket.ranks)
        if ticket is not None and waits and not self.complete and self._left_s() > 0:
            try:
                host.api.acquire(self._keys, self._wanted, 0, ticket.id, HANDOFF_WAIT_MS, self._left_s())
            except KvStoreError:
                self._reason = MissReason.UNREACHABLE
                return
            self._read_host(host)
            self._read_slower(host)

    def _read_slower(self, host: HostNode) -> None:
        """What the own host's node has on a slower tier: it brings that into DRAM, part by part, under a lease."""
        while not self.complete and self._slower and self._left_s() > 0:
            rest, before = self._keys.slice(self._done, len(self._keys)), self._done
            try:
                lease_ms = int(self._left_s() * 1000) + 1000
                answer = host.api.acquire(rest, self._wanted, lease_ms, b"", 0, self._left_s())
            except DeadlineExceeded:
                self._reason = MissReason.DEADLINE
                return
            except KvStoreError:
                self._reason = MissReason.UNREACHABLE
                return
            try:
                self._read_host(host, told=answer.run)
                self._slower |= answer.more
            finally:
                self._release(host, answer.lease)
            came = self._keys.tokens_of_first(self._done) - self._keys.tokens_of_first(before)
            self._ssd_tokens += min(answer.ssd_tokens, came)
            if answer.reason is not None and self._done >= before + answer.run:
                self._reason = answer.reason
                return
            if self._done == before:
                return

    def _release(self, host: HostNode, lease: int) -> None:
        if lease:
            try:
                host.api.release([lease], [], max(0.05, min(1.0, self._left_s())))
            except KvStoreError:  # then it runs out by itself
                self._nodes.counters.add("leases_left_to_run_out")

    def _read_host(self, host: HostNode, *, told: int | None = None) -> None:
        """Deliver what is in its DRAM. `told`: so many chunks are leased, and counted as used; only those then."""
        stop = len(self._keys) if told is None else self._done + told
        rest = self._keys.slice(self._done, stop)
        into = self._destination if not self._done else _Shifted(self._destination, self._done)
        result = self._copy_from(host, rest, into, grouped=bool(self._groups) and stop == len(self._keys))
        self._slower = result.slower
        self._done += result.chunks
        self._local += result.chunks
        self._reason = result.reason
        if result.retries:
            self._nodes.counters.add("fence_retries", result.retries)
        if result.chunks:
            self._bytes["shm"] += result.chunks * self._namespace.layout.payload_bytes(self._wanted)
            if told is None:
                self._untold += self._keys.blob[(self._done - result.chunks) * 16 : self._done * 16]

    def _copy_from(self, host: HostNode, rest: Keys, into: Destination, grouped: bool) -> LocalRead:
        """What is in its DRAM: group by group if all of it is there, else at once, because nobody waits for less.

        Also at once where checksums are verified, for which a chunk is copied whole.
        """
        nodes, layout = self._nodes, self._namespace.layout
        copy = partial(read_local, host, layout, copiers=nodes.copiers, verify=nodes.verify)
        at_once = not grouped or nodes.verify or not host.alive
        if at_once or host.reader.find(rest, self._wanted).run < len(rest):
            return copy(rest, self._wanted, into, self._end_s)
        done = LocalRead(len(rest), None, 0)
        for number, group in enumerate(self._groups):
            left = rest.slice(0, done.chunks)
            part = copy(left, group, into, self._end_s)
            retries = done.retries + part.retries
            # A chunk that went under the copy is left out of the next groups; the first reason is the one to tell.
            done = replace(part if part.chunks < done.chunks else done, retries=retries)
            if not done.chunks:
                break
            if done.chunks == len(rest):
                self._on_group(number)
        return done

    def from_ticket(self, ticket: Ticket) -> None:
        """The nodes that the ticket names, waiting for what is still being written."""
        for rank in ticket.ranks:
            if self.complete or self._left_s() <= 0:
                return
            host = self._nodes.host(max(0.05, self._left_s()))
            if host is not None and rank.node_id == host.info.node_id:
                continue
            try:
                info = self._nodes.node_info(rank.node_id, rank.epoch, self._left_s())
            except KvStoreError:
                self._reason = MissReason.UNREACHABLE
                continue
            self._read_peer(info, ticket.id, HANDOFF_WAIT_MS)

    def from_others(self) -> None:
        """Nodes that the index names, the longest run first, of equal ones any; another one where the first fails.

        One that does not answer in time must leave time for the next: while there are others, each gets half of what is
        left. Nodes whose data did not come lately are asked last.
        """
        tried: set[str] = set()
        while not self.complete and self._left_s() > 0:
            matches = self._nodes.nodes_with(self._keys, self._wanted, self._left_s())
            better = [m for m in matches if m.run > self._done and m.node.node_id not in tried]
            if not better:
                return
            node = self._nodes.spread(better).node
            tried.add(node.node_id)
            share = 1.0 if len(better) == 1 else 0.5
            self._read_peer(node, b"", 0, time.monotonic() + share * self._left_s())
            if not self.complete:
                self._nodes.counters.add("reads_continued_elsewhere" if len(better) > 1 else "reads_without_replica")

    def _read_peer(self, info: NodeInfo, ticket_id: bytes, wait_ms: int, end_s: float | None = None) -> None:
        """Read from one node until `end_s`, by default as long as the whole read may take."""
        end_s = self._end_s if end_s is None else end_s
        if self._nodes.is_left_alone(info):
            self._reason = MissReason.UNREACHABLE
            return
        for _ in range(FENCE_RETRIES):
            if self.complete:
                return
            if time.monotonic() >= end_s:
                self._reason = MissReason.DEADLINE
                return
            result = self._read_peer_once(info, ticket_id, wait_ms, end_s)
            self._done += result.chunks
            self._ssd_tokens += result.ssd_tokens
            self._reason = result.reason
            if result.payload_bytes:
                self._bytes[result.path] += result.payload_bytes
            if result.reason is MissReason.SESSION_LOST:  # it ran out while this client was idle: open another
                self._nodes.drop_peer(info.node_id, info.epoch)
            elif result.reason is not MissReason.FENCE:
                break
        if self._given_up:
            return
        self._nodes.note_data_path(info, works=self._reason not in _FAILED, why=str(self._reason))
        if self._reason is MissReason.UNREACHABLE:
            self._nodes.leave_alone(info)
        if self._reason in _GONE:
            self._nodes.drop_peer(info.node_id, info.epoch)

    def _read_peer_once(self, info: NodeInfo, ticket_id: bytes, wait_ms: int, end_s: float) -> RemoteRead:
        try:
            peer = self._nodes.peer(info, max(0.001, end_s - time.monotonic()))
        except KvStoreError:
            return RemoteRead(0, MissReason.UNREACHABLE, 0)
        nodes = self._nodes
        delivery = Delivery(
            self._namespace,
            self._wanted,
            self._destination,
            nodes.staging,
            nodes.background(),
            end_s,
            groups=self._groups,
            on_group=self._on_group,
            on_connection=self._on_connection,
        )
        keys = self._keys.slice(self._done, len(self._keys))
        return read_remote(peer, delivery, keys, self._done, ticket_id=ticket_id, wait_ms=wait_ms)

    def result(self) -> ReadResult:
        """Count and answer."""
        keys, done = self._keys, self._done
        reason = None if self.complete else self._reason
        if reason is not None and self._left_s() <= 0:
            reason = MissReason.DEADLINE
        if reason is MissReason.CHECKSUM:
            logger.warning(
                "chunk %s of %s differs from what was stored: served as a miss",
                keys[done].hex(),
                self._namespace.title,
            )
        local_tokens, tokens = keys.tokens_of_first(self._local), keys.tokens_of_first(done)
        self._nodes.counters.read(
            local_tokens=local_tokens,
            remote_tokens=tokens - local_tokens,
            ssd_tokens=self._ssd_tokens,
            missed_tokens=keys.token_count - tokens,
            reason=reason,
        )
        for path, count in self._bytes.items():
            self._nodes.counters.add(f"read_bytes_{path}", count)
        return ReadResult(done, tokens, self._local, done - self._local, reason, dict(self._bytes), self._ssd_tokens)


class _Shifted:
    """A destination whose first chunk is chunk `by` of another."""

    def __init__(self, destination: Destination, by: int) -> None:
        self._destination = destination
        self._by = by
        self.scatters_at_once = scatters_at_once(destination)

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """See Destination."""
        self._destination.scatter(self._by + index, piece, layer_start, head_start)

    def scatter_checked(
        self, index: int, piece: Bytes, layer_start: int, head_start: int, table: checksum.Table
    ) -> bool:
        """See Checking."""
        return scatter_checked(self._destination, self._by + index, piece, layer_start, head_start, table)

    def launch(self) -> None:
        """See Asynchronous."""
        if is_asynchronous(self._destination):
            self._destination.launch()

    def synchronize(self) -> None:
        """See Asynchronous."""
        synchronize(self._destination)
