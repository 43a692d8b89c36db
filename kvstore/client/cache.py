"""`Cache`: one namespace as one rank sees it. Every verb takes many chunks; there is no single-key twin."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from kvstore.client import buffers, handoff, layers
from kvstore.client.handoff import HandoffResult, SideResult
from kvstore.client.host import HostNode
from kvstore.client.layers import THRESHOLD_TOKENS, LayerRead, TransferMode
from kvstore.client.nodes import Nodes
from kvstore.client.reading import Reading
from kvstore.client.remote_writing import write_remote
from kvstore.client.values import Bytes, Durability, Match, ReadResult, WriteResult
from kvstore.client.writing import PendingWrite
from kvstore.errors import InvalidRequest, Unreachable
from kvstore.model.layout import Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Extra, KeyChain, Keys, Tokens
from kvstore.model.ticket import Ticket
from kvstore.model.values import MissReason, NodeInfo, Outcome
from kvstore.node import NodeApi, ReserveAnswer


class Cache:
    """Made by `Client.bind`. Thread-safe; a `PendingWrite` belongs to one thread."""

    def __init__(
        self,
        nodes: Nodes,
        namespace: Namespace,
        *,
        secret: bytes,
        geometry: Geometry,
        rank: int,
        written_here: Sequence[int],
        checksums: bool,
    ) -> None:
        self.namespace = namespace
        self.geometry = geometry
        self.shard = geometry.shard(rank)
        geometry.check_fits(namespace.layout)
        self.rectangle: Rectangle = geometry.rectangles[rank]
        self._nodes = nodes
        self._written_here = written_here
        self._checksums = checksums
        self._chain = KeyChain(namespace, secret)

    @property
    def layout(self) -> PageLayout:
        """The layout of the namespace."""
        return self.namespace.layout

    def register(self, host: HostNode, deadline_s: float) -> None:
        """Tell the own host's node of namespace and geometry. Idempotent."""
        host.api.register_namespace(self.namespace, self.geometry, self._written_here, deadline_s)

    def keys(self, tokens: Tokens, extras: Sequence[Extra] = ()) -> Keys:
        """The keys of a prompt; see `KeyChain.keys`."""
        return self._chain.keys(tokens, extras)

    def empty(self, count: int, rectangle: Rectangle | None = None) -> Bytes:
        """Page-aligned memory for `count` chunks: uint8 (count, layers, pages, heads, head_page_bytes)."""
        return buffers.empty(self.layout, rectangle or self.rectangle, count)

    # --- look-up -----------------------------------------------------------------------------------------

    def match(self, keys: Keys, *, rectangle: Rectangle | None = None, deadline_s: float = 1.0) -> Match:
        """How many leading chunks are there, on the own host's node and on the best node, on whatever tier.

        Keeps and pins nothing.
        """
        self._check(keys, reads=True)
        if self._nodes.closed:
            return Match(0, 0, 0, 0)
        wanted = rectangle or self.rectangle
        host = self._nodes.host(deadline_s)
        local = host.reader.find(keys, wanted).present if host is not None else 0
        pool = local
        if local < len(keys):
            pool = max([local, *(match.run for match in self._nodes.nodes_with(keys, wanted, deadline_s))])
        return Match(local, pool, keys.tokens_of_first(local), keys.tokens_of_first(pool))

    def present_here(self, keys: Keys, *, rectangle: Rectangle | None = None) -> int | None:
        """Leading chunks that the own host's node has, on whatever tier; None while there is no session with it.

        Never waits: no call, no lock, nothing is opened. Chunks may come from one geometry first and from another then.
        """
        self._check(keys, reads=True)
        host = self._nodes.living_host
        if host is None:
            return None
        wanted, run = rectangle or self.rectangle, 0
        while run < len(keys):
            found = host.reader.find(keys.slice(run, len(keys)) if run else keys, wanted).present
            if not found:
                break
            run += found
        return run

    # --- read --------------------------------------------------------------------------------------------

    def read(
        self,
        keys: Keys,
        into: Any,
        *,
        rectangle: Rectangle | None = None,
        deadline_s: float = 5.0,
        ticket: Ticket | None = None,
    ) -> ReadResult:
        """Deliver the longest prefix of `keys` that the pool holds, within `deadline_s` seconds.

        `into`: uint8 array or CPU tensor (n, layers, pages, heads, head_page_bytes) of the rectangle (default: the
        rank's own), or a `Destination`. With a ticket its nodes are asked first and keys that are still being
        written are waited for. Raises LayoutMismatch for a destination that does not fit and InvalidRequest for
        keys of another namespace; everything else that can go wrong is a reason in the result.
        """
        self._check(keys, reads=True)
        if self._nodes.closed:
            return ReadResult(0, 0, 0, 0, MissReason.SESSION_LOST)
        end_s = time.monotonic() + deadline_s
        wanted = rectangle or self.rectangle
        self.layout.check_rectangle(wanted)
        destination = buffers.as_destination(into, self.layout, wanted, len(keys))
        reading = Reading(self._nodes, self.namespace, keys, wanted, destination, end_s)
        reading.run(ticket)
        return reading.result()

    def read_layers(
        self,
        keys: Keys,
        into: Any,
        *,
        mode: TransferMode | str = TransferMode.AUTO,
        threshold_tokens: int = THRESHOLD_TOKENS,
        layers_at_once: int = 0,
        rectangle: Rectangle | None = None,
        deadline_s: float = 5.0,
        ticket: Ticket | None = None,
    ) -> LayerRead:
        """Begin what `read` does and tell of layers as they come: an iterator of `LayersReady`, first layer first.

        `mode`: `serialized` tells all layers at the end, `layerwise` each group of layers when it is there, `auto`
        the one below `threshold_tokens` tokens of the keys and the other from there on. `layers_at_once`: of a
        group; 0 = as few as give a chunk's part 64 KiB. Use what it returns as a context manager: `into` belongs to the
        read until it is closed or its `result` is there. Raises what `read` raises.
        """
        self._check(keys, reads=True)
        end_s = time.monotonic() + deadline_s
        wanted = rectangle or self.rectangle
        self.layout.check_rectangle(wanted)
        destination = buffers.as_destination(into, self.layout, wanted, len(keys))
        groups = layers.groups_for(mode, keys.token_count, threshold_tokens, self.layout, wanted, layers_at_once)
        return layers.start_read(
            self._nodes, self.namespace, keys, wanted, destination, end_s, groups=groups, ticket=ticket
        )

    def prefetch(self, keys: Keys, *, deadline_s: float = 30.0) -> Future[ReadResult]:
        """Bring chunks to the own host's node that others hold, and into its DRAM what it has on its SSD.

        Runs in the background. The SSD is only told what to read; that goes on after the answer. The result says how
        many leading chunks the own node holds afterwards. Its `reason` is why not more.
        """
        self._check(keys)
        return self._nodes.prefetcher().submit(self._prefetch, keys, deadline_s)

    def _prefetch(self, keys: Keys, deadline_s: float) -> ReadResult:
        before = self.match(keys)
        host = self._nodes.host(deadline_s)
        if host is not None and before.local_chunks:
            host.api.prefetch(keys.slice(0, before.local_chunks), self.rectangle, deadline_s)
        if before.local_chunks == before.pool_chunks:
            reason = MissReason.ABSENT if before.local_chunks < len(keys) else None
            return ReadResult(before.local_chunks, before.local_tokens, before.local_chunks, 0, reason)
        head = keys.slice(0, before.pool_chunks)
        pages = self.empty(len(head))
        result = self.read(head, pages, deadline_s=deadline_s)
        stored = self.write(keys.slice(0, result.chunks), pages[: result.chunks], deadline_s=deadline_s)
        visible, reason = stored.visible, result.reason or MissReason.ABSENT
        if visible < result.chunks:
            is_written = stored.outcomes[visible] is Outcome.IN_PROGRESS
            reason = MissReason.IN_PROGRESS if is_written else MissReason.ABSENT
        return ReadResult(
            visible,
            keys.tokens_of_first(visible),
            result.local_chunks,
            result.remote_chunks,
            reason if visible < len(keys) else None,
            result.bytes_by_path,
        )

    # --- write and remove --------------------------------------------------------------------------------

    def write(
        self,
        keys: Keys,
        source: Any,
        *,
        deadline_s: float = 10.0,
        for_ticket: Ticket | None = None,
        node: NodeInfo | str | None = None,
        durability: Durability = Durability.DRAM,
    ) -> WriteResult:
        """Store the rank's rectangle of these chunks on the own host's node, or on `node` (or its gRPC address).

        `keys` must start at the beginning of the prompt, so that missing ancestors are stored too. `source`: array or
        tensor like `read`'s, or a `Source`. A node that shares no memory with this process gets the pages by gRPC;
        then they are not pinned for the ticket. `durability` SSD: the answer waits until they are on that node's SSD;
        `WriteResult.durable` says how many are. Raises SessionLost, Unreachable, DeadlineExceeded.
        """
        self._check(keys)
        end_s = time.monotonic() + deadline_s
        target = self._nodes.write_target(node, deadline_s)
        if target is not None:
            result = self._write_remote(target, keys, source, end_s, for_ticket)
        else:
            result = self._write_here(keys, source, end_s, for_ticket)
        if durability is Durability.DRAM:
            return result
        saved, reason = self._api_of(target, end_s).persist(keys, _left(end_s))
        return replace(result, durable=saved, not_durable=reason)

    def _write_here(self, keys: Keys, source: Any, end_s: float, for_ticket: Ticket | None) -> WriteResult:
        pending = self.begin_write(keys, for_ticket=for_ticket, deadline_s=_left(end_s))
        with pending:
            pages = buffers.as_source(source, self.layout, self.rectangle, len(keys))
            pending.put_layers(self.rectangle.layer_start, self.rectangle.layer_stop, pages)
            return pending.commit()

    def persist(self, keys: Keys, *, deadline_s: float = 10.0) -> tuple[int, str]:
        """Wait until the own host's node has these chunks on its SSD: (leading chunks that are, why not the next).

        The reason is `no_ssd`, `absent`, `ssd_full`, `ssd_error` or `deadline`; empty when all are. Raises SessionLost,
        Unreachable, DeadlineExceeded.
        """
        self._check(keys)
        end_s = time.monotonic() + deadline_s
        return self._api_of(None, end_s).persist(keys, _left(end_s))

    def _api_of(self, target: NodeInfo | None, end_s: float) -> NodeApi:
        """The session with a node of another host, or with the own host's (None)."""
        if target is not None:
            return self._nodes.peer(target, _left(end_s)).api
        host = self._nodes.host(_left(end_s))
        if host is None:
            raise Unreachable("there is no node on this host; start `kvstore node` here")
        return host.api

    def _write_remote(
        self, target: NodeInfo, keys: Keys, source: Any, end_s: float, for_ticket: Ticket | None
    ) -> WriteResult:
        if for_ticket is not None:
            self._nodes.counters.add("writes_not_pinned")
        filled = buffers.as_source(source, self.layout, self.rectangle, len(keys))
        written_here = tuple(self._written_here)
        return write_remote(
            self._nodes, target, self.namespace, self.geometry, written_here, self.shard, keys, filled, end_s
        )

    def begin_write(
        self,
        keys: Keys,
        *,
        chunks: Sequence[int] | None = None,
        for_ticket: Ticket | None = None,
        deadline_s: float = 30.0,
    ) -> PendingWrite:
        """Reserve; the caller fills what is granted and commits. See `PendingWrite`.

        `chunks`: places in the keys that this writer stores, where other writers of the same prompt store the others,
        before or after it (context-parallel ranks); None = all. The keys are the whole chain all the same.
        """
        self._check(keys)
        end_s = time.monotonic() + deadline_s
        host = self._nodes.host(deadline_s)
        if host is None:
            raise Unreachable("there is no node on this host to write to; start `kvstore node` here")
        if not host.writable:
            raise InvalidRequest("the node gave this process read-only memory (no pidfd); it cannot write")
        ticket_id = for_ticket.id if for_ticket is not None else b""
        if chunks is None or chunks:
            answer = host.api.reserve(keys, self.shard, ticket_id, _left(end_s), chunks or ())
        else:
            answer = ReserveAnswer(0, [Outcome.LEFT_TO_OTHERS] * len(keys), [0] * len(keys))
        return PendingWrite(
            host, self.layout, self.rectangle, keys, answer, end_s, self._checksums, self._nodes.copiers
        )

    def remove(self, keys: Keys, *, deadline_s: float = 5.0) -> int:
        """Remove these chunks and everything below them from the own host's node; returns how many went."""
        self._check(keys)
        end_s = time.monotonic() + deadline_s
        host = self._nodes.host(deadline_s)
        if host is None:
            raise Unreachable("there is no node on this host; start `kvstore node` here")
        return host.api.remove(self.namespace.id, list(keys), _left(end_s))

    def release(self, ticket: Ticket, *, deadline_s: float = 1.0) -> None:
        """The handoff has been read: end its pins and side objects on all its nodes. Failing that they run out within
        a minute."""
        handoff.release(self._nodes, ticket, deadline_s)

    # --- side objects of a handoff -----------------------------------------------------------------------

    def put_side_objects(
        self,
        ticket: Ticket,
        objects: Mapping[str, Any],
        *,
        keys: Keys,
        lifetime_s: float = 60.0,
        deadline_s: float = 5.0,
    ) -> float:
        """Keep small named arrays or CPU tensors for the ticket's reader, on the node that `write` stores on.

        All of them or, where this raises, none. They are handed out while the rank's rectangle of all chunks of
        `keys` is readable on that node, until `release`, for at most `lifetime_s` (60 at most; what is granted is
        returned). Raises LayoutMismatch (no numbers, not on the CPU), LimitExceeded (16 objects or 16 MiB a ticket),
        InvalidRequest (other bytes under a name that the ticket has), CapacityExhausted (the node is full),
        StaleReference (after `drop_ticket`), Unreachable, DeadlineExceeded.
        """
        self._check(keys)
        packed = handoff.pack(ticket, objects)
        return handoff.put(self._nodes, self.namespace, self.rectangle, ticket, keys, packed, lifetime_s, deadline_s)

    def read_side_objects(
        self, ticket: Ticket, *, names: Sequence[str] = (), rank: int | None = None, deadline_s: float = 5.0
    ) -> SideResult:
        """Side objects of these names (default: all that are there) from the ticket's nodes, or from that of one rank.

        Waits for what is still coming, as `read` does for chunks. Everything that can go wrong is a reason.
        """
        self._nodes.check_process()
        if self._nodes.closed:
            return SideResult(reason=MissReason.SESSION_LOST)
        return handoff.read(self._nodes, ticket, names, rank, deadline_s)

    def read_handoff(
        self,
        ticket: Ticket,
        keys: Keys,
        into: Any,
        *,
        names: Sequence[str] = (),
        rectangle: Rectangle | None = None,
        rank: int | None = None,
        deadline_s: float = 5.0,
    ) -> HandoffResult:
        """Chunks as by `read` and side objects as by `read_side_objects`: both whole, or no objects and why."""
        end_s = time.monotonic() + deadline_s
        result = self.read(keys, into, rectangle=rectangle, deadline_s=deadline_s, ticket=ticket)
        if result.reason is not None:
            return HandoffResult(result, {}, result.reason)
        side = self.read_side_objects(ticket, names=names, rank=rank, deadline_s=end_s - time.monotonic())
        return HandoffResult(result, side.objects, side.reason)

    def drop_ticket(self, ticket: Ticket, *, deadline_s: float = 1.0) -> None:
        """The writer gives a handoff up: readers that wait for it hear at once, its side objects and pins end."""
        handoff.drop(self._nodes, ticket, deadline_s)

    def _check(self, keys: Keys, *, reads: bool = False) -> None:
        """A closed client still answers reads: with a miss."""
        if reads:
            self._nodes.check_process()
        else:
            self._nodes.check_open()
        if keys.namespace_id != self.namespace.id:
            raise InvalidRequest("these keys belong to another namespace")


def _left(end_s: float) -> float:
    """Seconds until `end_s`; what is over already gets a millisecond, and then fails as too late."""
    return max(0.001, end_s - time.monotonic())
