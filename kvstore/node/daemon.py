"""One running node: memory, core, sockets, gRPC, tcp, publisher, put together on an event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import metrics
from kvstore.config import NodeSettings
from kvstore.errors import ConfigurationError
from kvstore.metadata import Index
from kvstore.model.values import NodeInfo
from kvstore.node.arena import SsdIo
from kvstore.node.arena.dram import DramArena
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_format import HEADER_BYTES
from kvstore.node.arena.ssd_io import check_choice, open_ssd_io
from kvstore.node.catalog import MAGIC, CatalogShape, CatalogWriter, Header, create_catalog
from kvstore.node.core import CoreSettings, NodeCore
from kvstore.node.data_paths import DataPaths
from kvstore.node.exporter import Exporter
from kvstore.node.handover import Seat
from kvstore.node.operators.admin import AdminServicer
from kvstore.node.operators.limits import MemoryPlan, effective_limits
from kvstore.node.operators.moving import PULLED_BYTES, Mover
from kvstore.node.operators.operations import Operations
from kvstore.node.operators.pins import PinFile
from kvstore.node.publisher import Publisher
from kvstore.node.quotas import quotas_of
from kvstore.node.recovery import FormerWriters, Recovered, recover
from kvstore.node.server import NodeServicer, SessionVerbs
from kvstore.node.sessions import SessionServer
from kvstore.node.slots import SlotAllocator
from kvstore.node.streams import PageStreams
from kvstore.node.tiers import TierStack
from kvstore.node.tiers.recovery import RecoveredSsd, recover_ssd
from kvstore.rpc import serving
from kvstore.rpc.channel import format_address, parse_address
from kvstore.rpc.v1 import admin_pb2_grpc, data_plane_pb2_grpc, node_pb2_grpc
from kvstore.setting_types import parse_quotas, split_ssd

logger = logging.getLogger(__name__)
TICK_S = 0.1
_SERVICES = ("kvstore.v1.NodeService", "kvstore.v1.AdminService", "kvstore.v1.DataPlaneService")
_GC_THRESHOLDS = 50_000, 20, 100_000
"""Chunks are freed by their reference counts; a full collection over a million of them would hold the loop for a
second, so the oldest generation is practically never collected."""


OnProgress = Callable[[str, int, int], None]
"""(what is going on, done, total): `recovering` counts chunks, `populating` bytes. Called on the event loop."""


@dataclass(slots=True)
class NodeMemory:
    """The shared memory of a node: arena and sealed catalog with its only writable mapping."""

    arena: DramArena
    catalog_fd: int
    catalog: mmap.mmap
    shape: CatalogShape

    @property
    def last_epoch(self) -> int:
        """Epoch of the worker that used this memory last; 0 if it is new."""
        words = memoryview(self.catalog).cast("Q")
        return int(words[Header.EPOCH]) if words[Header.MAGIC] == MAGIC else 0

    @classmethod
    def adopt(cls, seat: Seat, slots: int) -> NodeMemory:
        """What a supervisor holds; raises LayoutMismatch if an earlier worker left another layout in it."""
        words = memoryview(seat.catalog).cast("Q")
        used = bool(words[Header.MAGIC])
        shape = CatalogShape.read(words) if used else CatalogShape.make(seat.arena_bytes, slots)
        return cls(DramArena(seat.arena_bytes, seat.arena_fd), seat.catalog_fd, seat.catalog, shape)

    @classmethod
    def create(cls, dram_bytes: int, slots: int) -> NodeMemory:
        """Raises ConfigurationError if the memory is not there."""
        shape = CatalogShape.make(dram_bytes, slots)
        arena = DramArena(dram_bytes)
        catalog_fd, catalog = create_catalog(shape)
        return cls(arena, catalog_fd, catalog, shape)


def next_epoch(data_dir: Path, after: int = 0) -> int:
    """Number of this start, kept in the data folder; never repeats there, and is greater than `after`."""
    path = data_dir / "epoch"
    try:
        last = int(path.read_text()) if path.exists() else 0
    except ValueError as exc:
        raise ConfigurationError(f"{path} does not hold a number; remove it to start from 1 again") from exc
    last = max(last, after)
    replacement = path.with_suffix(".new")
    replacement.write_text(str(last + 1))
    replacement.rename(path)
    return last + 1


class NodeDaemon:
    """Starts and stops one node on the running loop. `index` None: the node stands alone.

    `seat`: the place that a supervisor gives it, with memory that outlives this process; None: memory of its own.
    `make_mover`: makes what moves chunks to and from other nodes; None: Replicate and Drain are refused.
    """

    def __init__(
        self,
        settings: NodeSettings,
        index: Index | None,
        seat: Seat | None = None,
        *,
        make_mover: Callable[[NodeCore], Mover] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._settings = settings.resolved()
        self._make_mover = make_mover
        self._mover: Mover | None = None
        self._on_progress = on_progress or (lambda stage, done, total: None)
        self._seat = seat
        self.tiers: TierStack | None = None
        self._recovered: Recovered | None = None
        self._recovered_ssd: RecoveredSsd | None = None
        self._ssd_io: SsdIo | None = None
        self._former: FormerWriters | None = None
        self._index = index
        self._tasks: list[asyncio.Task[None]] = []
        self._publisher: Publisher | None = None
        self._loop_lag_s = 0.0

    async def start(self) -> dict[str, Any]:
        """Bind everything; returns the announcement: addresses, node id, sizes."""
        gc.set_threshold(*_GC_THRESHOLDS)
        settings, seat = self._settings, self._seat
        core_settings = CoreSettings(
            eviction=settings.eviction,
            room_chunks=settings.room_chunks,
            quotas=quotas_of(parse_quotas(settings.quotas)),
            ssd_admission=settings.ssd_admission,
        )
        limits = effective_limits(settings.dram, settings.slots, settings.room_chunks, core_settings)
        ssd_bytes = split_ssd(settings.ssd)[1] if settings.ssd else 0
        plan = MemoryPlan.of(settings.dram, settings.slots, ssd_bytes)
        if seat is None:
            plan.check()
        self._memory = memory = (
            NodeMemory.create(settings.dram, settings.slots) if seat is None else NodeMemory.adopt(seat, settings.slots)
        )
        last_epoch = memory.last_epoch
        epoch = next_epoch(Path(settings.data_dir), last_epoch)
        catalog = CatalogWriter(memory.catalog, memory.shape, epoch)
        ssd = await self._open_ssd(epoch)
        self._data = await asyncio.to_thread(self._serve_data, epoch)
        self.core = core = self._make_core(core_settings, catalog, epoch, ssd)
        self._exporter = Exporter(core.pool)
        self._operations = Operations(core, time.monotonic)
        arena_view = np.frombuffer(memory.arena.memory, dtype=np.uint8)
        if last_epoch:
            self._recover_dram()
        if ssd is not None:
            await self._recover_ssd(core, arena_view, ssd)
        if last_epoch or ssd is not None:
            core.settle()
        await self._populate_step(core.pool.allocator)  # so that the first writer finds room
        await self._serve(arena_view)
        if self.tiers is not None:
            self.tiers.start()
        self._tasks = [asyncio.create_task(self._populate(core.pool.allocator)), asyncio.create_task(self._tick())]
        if self._index is not None:
            self._publisher = Publisher(core, asyncio.get_running_loop(), self._index)
            self._publisher.start()
        metrics_address = metrics.serve_metrics(settings.metrics_address)
        return {
            "role": "node",
            "node_id": core.info.node_id,
            "epoch": epoch,
            "host_id": core.info.host_id,
            "control_address": core.info.control_address,
            "data_address": core.info.data_address,
            "data_paths": list(self._data.names),
            "metrics_address": metrics_address,
            "socket_path": core.info.socket_path,
            "dram_bytes": settings.dram,
            "ssd_bytes": ssd.size_bytes if ssd is not None else 0,
            "ssd_io": self._ssd_io.detail if self._ssd_io is not None else "",
            "memory_bytes": plan.total_bytes,
            "eviction": settings.eviction,
            "limits": limits,
        }

    def _serve_data(self, epoch: int) -> DataPaths:
        settings, memory = self._settings, self._memory
        generations = np.frombuffer(memory.catalog, dtype="<u8")[memory.shape.generations_offset // 8 :]

        def generations_of(slots: Sequence[int]) -> list[int]:
            return [int(word) for word in generations.take(np.asarray(slots, dtype=np.int64))]

        return DataPaths(settings, memory.arena, generations_of, epoch)

    def _make_core(
        self, core_settings: CoreSettings, catalog: CatalogWriter, epoch: int, ssd: SsdArena | None
    ) -> NodeCore:
        """The core, empty. It needs the control address, and what is served there needs the core: `_serve` adds it."""
        settings = self._settings
        info = NodeInfo(
            node_id=settings.node_id,
            epoch=epoch,
            host_id=settings.host_id,
            control_address="",
            data_address=self._advertised(self._data.address),
            socket_path=str(Path(settings.socket_dir) / f"{settings.node_id}.sock"),
        )
        ssd_allocator = None
        if ssd is not None:
            size = ssd.size_bytes
            ssd_allocator = SlotAllocator(size, size, start_bytes=ssd.slots_start, header_bytes=HEADER_BYTES)
        return NodeCore(info, catalog, SlotAllocator(settings.dram), time.monotonic, core_settings, ssd_allocator)

    def _recover_dram(self) -> None:
        """Take up what an earlier worker left in memory that outlived it."""
        core = self.core
        self._on_progress("recovering", 0, 0)
        self._recovered = found = recover(core, self._memory.catalog, time.monotonic())
        logger.warning(
            "took over the memory of an earlier worker: %d chunks kept, %d shards dropped, %d slots in quarantine",
            found.chunks,
            found.dropped_shards,
            found.quarantined_slots,
        )
        self._on_progress("recovering", found.chunks, found.chunks)
        self._former = FormerWriters(core, found.holders, self._seat)

    async def _serve(self, arena_view: npt.NDArray[np.uint8]) -> None:
        """What is kept by name is kept again; then the services by gRPC and the sessions by Unix socket."""
        core, memory, settings = self.core, self._memory, self._settings
        pin_file = PinFile(Path(settings.data_dir))
        self._operations.restore(pin_file.load())
        if self._make_mover is not None:
            self._mover = self._make_mover(core)
        stage = self.tiers.stage if self.tiers is not None else None
        servicer = NodeServicer(core, PageStreams(core, arena_view, stage), self._more_stats, self.tiers)
        admin = AdminServicer(core, self._operations, arena_view, pin_file, self._mover, self.tiers)
        self._server = serving.Server(_SERVICES)
        self._server.add(node_pb2_grpc.add_NodeServiceServicer_to_server, servicer)
        self._server.add(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin)
        self._server.add(data_plane_pb2_grpc.add_DataPlaneServiceServicer_to_server, self._data.servicer)
        core.on_lease = self._data.wake
        control = await self._server.start(settings.control_address, insecure=settings.insecure)
        core.info = _with_control(core.info, self._advertised(control))
        verbs = SessionVerbs(servicer)
        self._sessions = SessionServer(core, memory.catalog_fd, memory.arena, core.info.socket_path, verbs, self._seat)
        self._sessions.start()

    async def _open_ssd(self, epoch: int) -> SsdArena | None:
        settings = self._settings
        check_choice(settings.ssd_io)
        if not settings.ssd:
            return None
        path, size_bytes = split_ssd(settings.ssd)
        arena = await asyncio.to_thread(SsdArena.open, Path(path), size_bytes, settings.node_id, epoch)
        memory = np.frombuffer(self._memory.arena.memory, dtype=np.uint8)
        try:
            self._ssd_io = await asyncio.to_thread(open_ssd_io, settings.ssd_io, arena, memory)
        except ConfigurationError:
            arena.close()
            raise
        logger.info("%s: pages go by %s", arena.path, self._ssd_io.detail)
        return arena

    async def _recover_ssd(self, core: NodeCore, memory: npt.NDArray[np.uint8], ssd: SsdArena) -> None:
        """Take up what an earlier start left on the SSD, before anybody is served."""
        began_s = time.monotonic()
        self._on_progress("recovering from the SSD", 0, 0)
        headers = await asyncio.to_thread(lambda: list(ssd.scan()))
        self._recovered_ssd = found = recover_ssd(core, ssd.superblock, headers, time.monotonic())
        self.tiers = TierStack(core, memory, ssd, self._ssd_io)
        self.tiers.take_up(found.spaces)
        self._on_progress("recovering from the SSD", found.chunks, found.chunks)
        if headers:
            seconds = time.monotonic() - began_s
            logger.warning("found %d chunks on the SSD (%s) in %.1f s", found.chunks, ssd.path, seconds)

    async def stop(self) -> None:
        """Leave: the index is told, sessions and servers close, readers drop their mappings."""
        for task in self._tasks:
            task.cancel()
        if self._mover is not None:
            await self._mover.close()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.stop)
        self.core.pool.catalog.stop_serving()
        self._sessions.stop()
        await self._server.stop()
        await asyncio.to_thread(self._data.stop)
        if self.tiers is not None:
            await self.tiers.stop()

    def _advertised(self, bound: str) -> str:
        host, port = parse_address(bound)
        return format_address(self._settings.advertise or host, port)

    async def _populate(self, allocator: SlotAllocator) -> None:
        """Touch the arena in steps, off the loop, and open what is ready."""
        while self._memory.arena.populated_bytes < self._memory.arena.size_bytes:
            await self._populate_step(allocator)
            self.core.on_commit()

    async def _populate_step(self, allocator: SlotAllocator) -> None:
        arena = self._memory.arena
        allocator.open_until = ready = await asyncio.to_thread(arena.populate_step)
        self._on_progress("populating", ready, arena.size_bytes)

    async def _tick(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._loop_lag_s = max(0.0, clock() - due_s)
            self.core.tick()
            self._operations.tick()
            if self.core.holds.leases:
                self._data.wake()
            if self._former is not None:
                self._former.poll()
            self.export()

    def export(self) -> None:
        """Bring the metrics up to date, in the node's loop."""
        figures = {**self.core.stats(), **self._more_stats()}
        self._exporter.export(figures, self._loop_lag_s, self._data.drain_send_seconds())

    def _more_stats(self) -> dict[str, Any]:
        return {
            **self._data.figures(),
            **(self._mover.figures() if self._mover is not None else dict.fromkeys(PULLED_BYTES.values(), 0)),
            "loop_lag_ms": round(self._loop_lag_s * 1000, 3),
            "publisher_failed_batches": self._publisher.failed_batches if self._publisher else 0,
            "populated_bytes": self._memory.arena.populated_bytes,
            **(self.tiers.figures() if self.tiers is not None else {}),
            **self._start_stats(),
        }

    def _start_stats(self) -> dict[str, int]:
        recovered = self._recovered
        return {
            "worker_start": self._seat.start if self._seat else 1,
            "recovered_chunks": recovered.chunks if recovered else 0,
            "recovered_shards": recovered.shards if recovered else 0,
            "recovered_ssd_chunks": self._recovered_ssd.chunks if self._recovered_ssd else 0,
            "dropped_shards": recovered.dropped_shards if recovered else 0,
            "former_writers": len(self._former) if self._former else 0,
        }


def _with_control(info: NodeInfo, control_address: str) -> NodeInfo:
    return NodeInfo(info.node_id, info.epoch, info.host_id, control_address, info.data_address, info.socket_path)
