"""Copies between pool memory and an engine's paged KV on any torch device, ordered after the engine's own work.

    pool memory  ──copy──►  dense staging on the device  ──scatter──►  blocks of all layers       load
    pool memory  ◄──copy──  dense staging on the device  ◄──gather───  blocks of all layers       store

A `DeviceCopier` is a worker's one copier for one device: a copy stream, staging memory and the way to move head pages
(`engine_adapter.movers`). A `DevicePagedKv` is one request's chunks; it collects pieces and gives them to the copier in
batches, so that a batch costs one gather or scatter.

Order (`engine_adapter.streams`): each batch first waits, on the device, for all that the engine has given to its
compute stream by then, so it neither reads blocks that are still being computed nor overwrites blocks that are still
being read. The other way round the engine has two means: `synchronize`, which every read and write of the client calls
before anything counts, waits on the host; `hold_compute` lets later work of the compute stream wait on the device. The
waits end when the engine's own earlier work and the copy have ended; they have no deadline of their own, because a
copy that was given up would go on writing into blocks or slots that somebody else has by then.

From pinned host memory (`engine_adapter.pinned`) copies run beside the host; from other memory they are right, only
slower. On CUDA this has never run: on the CPU all of it is tested, with streams that run late and out of order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from engine_adapter.kernels import ALIGNMENT_BYTES, KernelMover
from engine_adapter.movers import Blocks, Mover, Part, TorchMover
from engine_adapter.pieces import BlockIds, Bytes, EngineShape, check_writeable, checked_blocks
from engine_adapter.streams import Event, Stream, compute_stream, copy_stream
from kvstore.errors import ForkedProcess, InvalidRequest, KvStoreError, LimitExceeded

STAGING_BYTES = 32 << 20
"""Device memory of a copier."""
LAUNCH_BYTES = 8 << 20
"""So much is collected before it is given to the device: enough for full bandwidth, little to wait for."""


@dataclass(frozen=True, slots=True)
class Move:
    """A piece in pool memory and its place in the engine. `is_load`: from the pool into the engine."""

    piece: Bytes
    block_ids: BlockIds
    layer: int
    head: int
    is_load: bool

    def layers(self) -> Iterator[Move]:
        """The same, a layer at a time."""
        for place in range(len(self.piece)):
            yield Move(self.piece[place : place + 1], self.block_ids, self.layer + place, self.head, self.is_load)


class DeviceCopier:
    """One device's copy stream and staging. Thread-safe; of no use in a forked child.

    `compute`: the stream on which the engine computes, by default the calling thread's current one.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        compute: Stream | None = None,
        copies: Stream | None = None,
        mover: Mover | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.device = torch.empty(0, device=device).device  # with its number
        self._compute = compute_stream(self.device) if compute is None else compute
        self._copies = copy_stream(self.device) if copies is None else copies
        if mover is None:
            mover = KernelMover() if KernelMover.available(self.device) else TorchMover()
        self._mover = mover
        self._staging_bytes = staging_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._staging: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raise ForkedProcess in a forked child, whose CUDA calls would fail or hang."""
        if os.getpid() != self._pid:
            raise ForkedProcess("this copier belongs to the parent process; make one in the child, and use spawn")

    def run(self, blocks: Blocks, moves: Sequence[Move]) -> Event:
        """Give the copies to the device, behind what its compute stream has now; the event comes when they have ended.

        The pieces' memory must stay until then. Raises LimitExceeded if a layer of a piece is larger than the staging.
        """
        self.check_process()
        batches = list(self._batches(moves))
        with self._lock:
            self._copies.wait(self._compute.record())
            for batch, parts in batches:
                self._copies.run(partial(self._move, blocks, batch, parts))
            return self._copies.record()

    def hold_compute(self, event: Event) -> None:
        """What is given to the compute stream from now on runs after the event."""
        self.check_process()
        self._compute.wait(event)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Within the block no copy is under way and none is begun."""
        self.check_process()
        with self._lock:
            self._copies.record().synchronize()
            yield

    def _batches(self, moves: Sequence[Move]) -> Iterator[tuple[list[Move], list[Part]]]:
        """As many moves of one direction as fit into the staging, and where each lies in it."""
        batch: list[Move] = []
        parts: list[Part] = []
        end = 0
        for move in self._fitting(moves):
            size = move.piece.nbytes
            if batch and (end + size > self._staging_bytes or move.is_load != batch[0].is_load):
                yield batch, parts
                batch, parts, end = [], [], 0
            batch.append(move)
            layers, _, heads, _ = move.piece.shape
            parts.append(Part(move.block_ids, move.layer, layers, move.head, heads, end, size))
            end += size
        if batch:
            yield batch, parts

    def _fitting(self, moves: Sequence[Move]) -> Iterator[Move]:
        for move in moves:
            if move.piece.nbytes <= self._staging_bytes:
                if move.piece.nbytes:
                    yield move
                continue
            if move.piece[0].nbytes > self._staging_bytes:
                raise LimitExceeded(
                    f"a layer of a chunk has {move.piece[0].nbytes} bytes, the copier's staging {self._staging_bytes}; "
                    "give it more staging or use fewer pages a chunk"
                )
            yield from move.layers()

    # --- on the copy stream ------------------------------------------------------------------------------

    def _move(self, blocks: Blocks, batch: Sequence[Move], parts: Sequence[Part]) -> None:
        if self._staging is None:
            # Made here, so that torch's allocator counts it as the copy stream's memory.
            self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=self.device)
        staging = self._staging
        pairs = [(move.piece, staging[p.start : p.start + p.size_bytes]) for move, p in zip(batch, parts, strict=True)]
        if batch[0].is_load:
            for piece, staged in pairs:
                staged.view(piece.shape).copy_(self._sendable(piece), non_blocking=True)
            self._mover.to_blocks(staging, blocks, parts)
            return
        self._mover.to_dense(staging, blocks, parts)
        for piece, staged in pairs:
            host = _host_tensor(piece)
            # torch takes a strided target by way of memory of its own, which is filled when a blocking copy returns.
            host.copy_(staged.view(piece.shape), non_blocking=host.is_contiguous())

    def _sendable(self, piece: Bytes) -> torch.Tensor:
        """The piece as one run of memory; what is not is put together in pinned memory first."""
        host = _host_tensor(piece)
        if host.is_contiguous() or self.device.type != "cuda":
            return host
        return torch.empty(host.shape, dtype=torch.uint8, pin_memory=True).copy_(host)


class DevicePagedKv:
    """The pages of some chunks in an engine's KV tensors on a device: a sink for reads and a source for writes.

    `tensors`: one a layer, each a view (blocks, kv_heads, *interior) with any strides, or `Blocks` made from them once.
    `block_ids[i]` names the `pages_per_chunk` blocks of chunk i, the same in all layers. `layer_offset` and
    `head_offset`: place of the engine's first layer and KV head in the model. `copier`: the worker's; None: a new one.

    It is `kvstore.client.values.Asynchronous`: `scatter` and `gather` only note what to do, and what they were given
    must stay until `synchronize` returned. Not for concurrent use; several of them may share a copier. Raises
    LayoutMismatch for shapes that do not fit and InvalidRequest for block ids out of range.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] | Blocks,
        pages_per_chunk: int,
        block_ids: Sequence[Sequence[int]],
        layer_offset: int = 0,
        head_offset: int = 0,
        *,
        copier: DeviceCopier | None = None,
    ) -> None:
        self._blocks = blocks = tensors if isinstance(tensors, Blocks) else Blocks.of(tensors)
        self._shape = EngineShape(
            len(blocks.layers), blocks.heads, pages_per_chunk, blocks.head_page_bytes, layer_offset, head_offset
        )
        self._block_ids = checked_blocks(block_ids, pages_per_chunk, len(blocks.layers[0]))
        self._copier = DeviceCopier(blocks.device) if copier is None else copier
        if self._copier.device != blocks.device:
            raise InvalidRequest(f"the copier works on {self._copier.device}, the KV is on {blocks.device}")
        self._waiting: list[Move] = []
        self._waiting_bytes = 0
        self._begun: list[Move] = []
        """Given to the device, and perhaps not ended: their memory must stay."""
        self._end: Event | None = None
        """Of all of these."""
        self._lost_count = 0
        """Batches that could not be given to the device."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._block_ids)

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """Copy `piece` (layers, pages, heads, head_page_bytes) of chunk `index` into the engine's pages."""
        self._add(index, piece, layer_start, head_start, is_load=True)

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        """Fill `slot` (layers, pages, heads, head_page_bytes) from the engine's pages of chunk `index`."""
        check_writeable(slot)
        self._add(index, slot, layer_start, head_start, is_load=False)

    def _add(self, index: int, piece: Bytes, layer_start: int, head_start: int, *, is_load: bool) -> None:
        if not 0 <= index < len(self._block_ids):
            raise InvalidRequest(f"chunk {index} of {len(self._block_ids)}")
        layer, head = self._shape.place(piece, layer_start, head_start)
        self._copier.check_process()
        self._waiting.append(Move(piece, self._block_ids[index], layer, head, is_load))
        self._waiting_bytes += piece.nbytes
        if self._waiting_bytes >= LAUNCH_BYTES:
            self.launch()

    def launch(self) -> None:
        """Give all copies to the device, behind what the engine has given to its compute stream. Does not wait."""
        if self._waiting:
            moves, self._waiting, self._waiting_bytes = self._waiting, [], 0
            self._begun += moves
            self._lost_count += 1
            self._end = self._copier.run(self._blocks, moves)
            self._lost_count -= 1

    def hold_compute(self) -> None:
        """Let work that the engine gives to its compute stream from now on run after all copies so far.

        With it loaded blocks may be used, and stored ones handed to another request, before `synchronize`. Not
        needed after that.
        """
        self.launch()
        if self._end is not None:
            self._copier.hold_compute(self._end)

    def synchronize(self) -> None:
        """Return when all copies so far have ended, in both directions.

        Raises KvStoreError if some of them could not be begun, though what began has ended then too.
        """
        self._copier.check_process()
        try:
            self.launch()
        finally:
            lost, self._lost_count = self._lost_count, 0
            if lost:  # a part of a lost batch may be under way, without an event behind it
                with self._copier.idle():
                    pass
            elif self._end is not None:
                self._end.synchronize()
            self._end, self._begun = None, []
        if lost:
            raise KvStoreError("copies of these chunks could not be given to the device; none of them counts")


class _Alias:
    """An array's memory without its read-only flag, which torch tensors do not know. Keeps the array alive."""

    def __init__(self, array: Bytes) -> None:
        interface: dict[str, Any] = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._array = array


def _host_tensor(array: Bytes) -> torch.Tensor:
    """The array's own memory as a tensor. Of a read-only array nothing may be written through it."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Alias(array)))
