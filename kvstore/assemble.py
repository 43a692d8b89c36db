"""The one place that picks back-ends and runs servers: what `kvstore up | node | metadata | router` start, and the
pool inside one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore import metrics
from kvstore.client import Client
from kvstore.client.transports import Way
from kvstore.client.values import Bytes
from kvstore.config import MetadataSettings, NodeSettings, RouterSettings, Settings
from kvstore.forks import leave_out_of_children
from kvstore.metadata.remote import RemoteIndex
from kvstore.metadata.server import serve_metadata
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.side_object import NeededChunks, SideObject
from kvstore.model.values import NodeInfo
from kvstore.node import AcquireAnswer, CommitAnswer, NodeApi, ReserveAnswer, SideAnswer
from kvstore.node.arena.dram import POPULATE_STEP_BYTES
from kvstore.node.catalog import CatalogWriter
from kvstore.node.core import CoreSettings, NodeCore
from kvstore.node.daemon import NodeDaemon, NodeMemory, OnProgress
from kvstore.node.data_paths import read_secret
from kvstore.node.handover import Seat
from kvstore.node.lookup import CatalogReader
from kvstore.node.slots import SlotAllocator
from kvstore.node.steps import finish
from kvstore.replication import NodeMover
from kvstore.rpc.channel import format_address, parse_address
from kvstore.scheduler.server import serve_router
from kvstore.setting_types import parse_size

Announce = Callable[[dict[str, Any]], None]
AnySettings = TypeVar("AnySettings", bound=Settings)
_BOUND = {
    "address": "control_address",
    "control_address": "control_address",
    "data_address": "data_address",
    "metrics_address": "metrics_address",
}
"""Setting of a listening address -> what the announcement calls it."""
EMBEDDED_SLOT_BYTES = 16 << 10
"""Expected slot of an embedded pool, for the size of its catalog."""


def run_node(
    settings: NodeSettings, announce: Announce, seat: Seat | None = None, on_progress: OnProgress | None = None
) -> None:
    """Run a node until SIGTERM or SIGINT. Raises ConfigurationError before anything is announced.

    `seat`: this process is a worker of a supervisor, which keeps memory and ports; None: nothing outlives it.
    """
    settings = _bound_before(settings, seat, "node")

    async def serve(stack: contextlib.AsyncExitStack) -> None:
        _tell(announce, seat, await _start_node(settings, settings.metadata_address, stack, seat, on_progress))

    _run(serve)


def run_metadata(settings: MetadataSettings, announce: Announce) -> None:
    """Run the metadata service until SIGTERM or SIGINT."""

    async def serve(stack: contextlib.AsyncExitStack) -> None:
        announce(await _start_metadata(settings, stack))

    _run(serve)


def run_router(settings: RouterSettings, announce: Announce) -> None:
    """Run the scheduler until SIGTERM or SIGINT."""

    async def serve(stack: contextlib.AsyncExitStack) -> None:
        announce(await _start_router(settings, settings.metadata_address, stack))

    _run(serve)


def run_up(
    node: NodeSettings,
    metadata: MetadataSettings,
    router: RouterSettings | None,
    announce: Announce,
    seat: Seat | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Run a whole pool on this machine: metadata service, node and, if wanted, the scheduler.

    `seat`: see `run_node`.
    """
    node, metadata = _bound_before(node, seat, "node"), _bound_before(metadata, seat, "metadata")
    router = None if router is None else _bound_before(router, seat, "router")

    async def serve(stack: contextlib.AsyncExitStack) -> None:
        facts = [await _start_metadata(metadata, stack)]
        metadata_address = facts[0]["control_address"]
        facts.append(await _start_node(node, metadata_address, stack, seat, on_progress))
        if router is not None:
            facts.append(await _start_router(router, metadata_address, stack))
        _tell(announce, seat, *facts)

    _run(serve)


def _tell(announce: Announce, seat: Seat | None, *facts: dict[str, Any]) -> None:
    """Everything is bound: tell the supervisor, and people unless an earlier worker has done so."""
    if seat is not None:
        seat.ready({each["role"]: each for each in facts})
    if seat is None or not seat.announced:
        for each in facts:
            announce(each)


def _bound_before(settings: AnySettings, seat: Seat | None, role: str) -> AnySettings:
    """The settings with the ports that an earlier worker bound, so that all who know this server find it again."""
    facts = seat.bound.get(role, {}) if seat is not None else {}
    ports = {}
    for name in _BOUND.keys() & type(settings).model_fields.keys():
        if bound := facts.get(_BOUND[name]):
            host, _ = parse_address(getattr(settings, name))
            ports[name] = format_address(host, parse_address(bound)[1])
    return settings.model_copy(update=ports)


async def _start_node(
    settings: NodeSettings,
    metadata_address: str,
    stack: contextlib.AsyncExitStack,
    seat: Seat | None,
    on_progress: OnProgress | None,
) -> dict[str, Any]:
    index = RemoteIndex(metadata_address) if metadata_address else None
    if index is not None:
        stack.callback(index.close)
    way = Way(
        settings.transport,
        settings.nixl_backend,
        tuple(device for device in settings.nixl_devices.split(",") if device),
        read_secret(settings.peer_secret_file),
    )
    daemon = NodeDaemon(settings, index, seat, make_mover=lambda core: NodeMover(core, way), on_progress=on_progress)
    facts = await daemon.start()
    stack.push_async_callback(daemon.stop)
    return {**facts, "metadata_address": metadata_address}


async def _start_metadata(settings: MetadataSettings, stack: contextlib.AsyncExitStack) -> dict[str, Any]:
    server = await serve_metadata(settings.address, insecure=settings.insecure)
    stack.push_async_callback(server.stop)
    metrics_address = metrics.serve_metrics(settings.metrics_address)
    return {"role": "metadata", "control_address": server.address, "metrics_address": metrics_address}


async def _start_router(settings: RouterSettings, metadata: str, stack: contextlib.AsyncExitStack) -> dict[str, Any]:
    router = await serve_router(settings.address, metadata, policy=settings.policy, insecure=settings.insecure)
    stack.push_async_callback(router.stop)
    facts = {"role": "router", "control_address": router.address, "metadata_address": metadata}
    return {**facts, "metrics_address": metrics.serve_metrics(settings.metrics_address)}


def _run(serve: Callable[[contextlib.AsyncExitStack], Coroutine[Any, Any, None]]) -> None:
    """Start, wait for SIGTERM or SIGINT, stop in reverse order."""
    logging.basicConfig(
        level=os.environ.get("LOGLEVEL", "WARNING"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        async with contextlib.AsyncExitStack() as stack:
            await serve(stack)
            await ended.wait()

    asyncio.run(main())


def open_local(
    dram: str | int = "256MiB", *, eviction: str = "lru", room_chunks: int = 0, slots: int = 0, verify: bool = False
) -> Client:
    """A pool inside this process: same client, same node, no daemon and no other process.

    `dram`: bytes or a size like "1GiB". `slots`: chunks expected to fit, 0 = one for each 16 KiB. `verify` as in
    `kvstore.connect`. The pool ends with `close()` of the client. Raises ConfigurationError if the memory is not there.
    """
    size = dram if isinstance(dram, int) else parse_size(dram)
    host = EmbeddedHost(size, slots or max(64, size // EMBEDDED_SLOT_BYTES), CoreSettings(eviction, room_chunks, 1.0))
    return Client(None, None, None, verify=verify, host=host)


class EmbeddedHost:
    """A node in this process: `HostNode` and `NodeApi` around a core, one lock instead of an event loop."""

    def __init__(self, dram_bytes: int, slots: int, settings: CoreSettings) -> None:
        memory = NodeMemory.create(dram_bytes, slots)
        epoch = random.SystemRandom().randrange(1, 1 << 20)
        self.info = NodeInfo(f"embedded-{os.getpid()}", epoch, "embedded", "", "")
        self.core = NodeCore(
            self.info,
            CatalogWriter(memory.catalog, memory.shape, epoch),
            SlotAllocator(dram_bytes),
            time.monotonic,
            settings,
        )
        leave_out_of_children(memory.arena.memory)  # a child must not write into its parent's slots
        self.api: NodeApi = self
        self.arena: Bytes = np.frombuffer(memory.arena.memory, dtype=np.uint8)
        self.writable = True
        self.reader = CatalogReader(mmap.mmap(memory.catalog_fd, memory.shape.total_bytes, prot=mmap.PROT_READ))
        self._memory = memory
        self._lock = threading.Lock()
        self._session = self.core.open_session("embedded", shared=True).number
        self._open = True
        self._on_end: list[Callable[[], None]] = []
        self.core.pool.allocator.open_until = min(dram_bytes, POPULATE_STEP_BYTES)
        self._populating = threading.Thread(target=self._populate, name="kvstore-populate", daemon=True)
        self._populating.start()

    def _populate(self) -> None:
        arena = self._memory.arena
        while self._open and arena.populated_bytes < arena.size_bytes:
            ready = arena.populate_step()
            with self._lock:
                self.core.pool.allocator.open_until = max(self.core.pool.allocator.open_until, ready)

    @property
    def alive(self) -> bool:
        """True until `close`."""
        return self._open

    def touch(self, prefix: bytes) -> None:
        """See HostNode."""
        with self._lock:
            self.core.touch(self._session, [prefix[at : at + 16] for at in range(0, len(prefix), 16)])

    def flush(self, deadline_s: float) -> None:
        """See HostNode; touches are never late here."""

    def populated_bytes(self, deadline_s: float) -> int:
        """See HostNode."""
        return self._memory.arena.populated_bytes

    def on_end(self, release: Callable[[], None]) -> None:
        """See HostNode."""
        if self._open:
            self._on_end.append(release)
        else:
            release()

    def close(self) -> None:
        """End the pool. Memory goes when the last view of it goes."""
        self._open = False
        for release in self._on_end:
            release()
        self._populating.join()
        with self._lock:
            self.core.process_gone(self._session)
            self.core.pool.catalog.stop_serving()
        os.close(self._memory.catalog_fd)
        self._memory.arena.close()

    # --- NodeApi -----------------------------------------------------------------------------------------

    def register_namespace(
        self, namespace: Namespace, geometry: Geometry | None, written_here: Sequence[int], deadline_s: float
    ) -> None:
        """See NodeApi."""
        with self._verb():
            self.core.register_namespace(self._session, namespace, geometry, written_here)

    def reserve(
        self, keys: Keys, shard: int, ticket_id: bytes, deadline_s: float, wanted: Sequence[int] = ()
    ) -> ReserveAnswer:
        """See NodeApi."""
        with self._verb():
            self.core.renew(self._session)
            return self.core.reserve(self._session, keys, shard, ticket_id, wanted)

    def commit(
        self, attempt: int, indices: Sequence[int], table_hashes: Sequence[int], last: bool, deadline_s: float
    ) -> CommitAnswer:
        """See NodeApi."""
        with self._verb():
            self.core.renew(self._session)
            return self.core.commit(self._session, attempt, indices, table_hashes, last)

    def abort(self, attempt: int, deadline_s: float) -> None:
        """See NodeApi."""
        with self._verb():
            self.core.abort(self._session, attempt)

    def acquire(
        self, keys: Keys, rectangle: Rectangle, lease_ms: int, ticket_id: bytes, wait_ms: int, deadline_s: float
    ) -> AcquireAnswer:
        """See NodeApi. There is nobody to wait for: writer and reader are one process."""
        with self._verb():
            return self.core.acquire(self._session, keys, rectangle, lease_ms)

    def prefetch(self, keys: Keys, rectangle: Rectangle, deadline_s: float) -> tuple[int, int]:
        """See NodeApi. Everything is in DRAM here."""
        with self._verb():
            run = self.core.present_run(self._session, keys, rectangle)
            return run, run

    def persist(self, keys: Keys, deadline_s: float) -> tuple[int, str]:
        """See NodeApi. A pool inside one process has no SSD."""
        return 0, "no_ssd"

    def release(self, leases: Sequence[int], ticket_ids: Sequence[bytes], deadline_s: float) -> None:
        """See NodeApi."""
        with self._verb():
            self.core.release(self._session, leases, ticket_ids)

    def remove(self, namespace_id: bytes, keys: Sequence[bytes], deadline_s: float) -> int:
        """See NodeApi."""
        with self._verb():
            return self.core.remove(self._session, namespace_id, keys)

    def put_side_objects(
        self,
        ticket_id: bytes,
        needed: NeededChunks,
        objects: Sequence[SideObject],
        lifetime_ms: int,
        deadline_s: float,
    ) -> int:
        """See NodeApi."""
        with self._verb():
            return self.core.side_objects.put(ticket_id, needed, objects, lifetime_ms)

    def get_side_objects(self, ticket_id: bytes, names: Sequence[str], wait_ms: int, deadline_s: float) -> SideAnswer:
        """See NodeApi. There is nobody to wait for."""
        with self._verb():
            answer = finish(self.core.side_objects.look(ticket_id, names))
            self.core.side_objects.count(answer)
            return answer

    def drop_ticket(self, ticket_id: bytes, deadline_s: float) -> None:
        """See NodeApi."""
        with self._verb():
            self.core.drop_ticket(self._session, ticket_id)

    @contextlib.contextmanager
    def _verb(self) -> Iterator[None]:
        """One owner at a time; what has run out ends first. Nobody reads the events of a pool without an index."""
        with self._lock:
            self.core.tick()
            yield
            self.core.news.forget()


__all__ = ["EmbeddedHost", "open_local", "run_metadata", "run_node", "run_router", "run_up"]
