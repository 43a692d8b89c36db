"""`AdminService` over grpc.aio: validates messages, runs the verbs of `operations` in steps, answers. A thin shell.

Between two steps of a verb the event loop serves others. Stored bytes are compared with their checksums in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigurationError, InvalidRequest, LimitExceeded
from kvstore.model.layout import GEOMETRY_RECTANGLES_LIMIT, Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import TOKEN_FINGERPRINT_MASK
from kvstore.model.values import NodeInfo
from kvstore.node.chunks import Chunk
from kvstore.node.core import NodeCore
from kvstore.node.operators.moving import Mover
from kvstore.node.operators.operations import NamespaceContents, Operations, Promoter, SampledShard
from kvstore.node.operators.pins import PinFile
from kvstore.node.steps import in_turns
from kvstore.node.tier import Bounds, Tier
from kvstore.rpc import wire
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc

SAMPLE_LIMIT: Final = 65_536
GEOMETRIES_LIMIT: Final = 64
DRAIN_TARGETS_LIMIT: Final = 1024
RECORDS_A_MESSAGE: Final = 500
"""Chunks in one answer of ListChunks: making it takes about 2 ms."""
ANSWER_S: Final = 0.05
"""Kept of a call's time for its answer, when it waits for a disk."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The operators' service of one node. `arena`: the DRAM tier's bytes.

    `mover` None: chunks cannot be moved to or from other nodes. `promoter` None: there is no slower tier.
    """

    def __init__(
        self,
        core: NodeCore,
        operations: Operations,
        arena: npt.NDArray[np.uint8],
        pin_file: PinFile,
        mover: Mover | None = None,
        promoter: Promoter | None = None,
    ) -> None:
        self._core = core
        self._operations = operations
        self._arena = arena
        self._pin_file = pin_file
        self._mover = mover
        self._promoter = promoter
        self._saving = asyncio.Lock()

    # --- looking -----------------------------------------------------------------------------------------

    async def ListNamespaces(
        self, request: admin_pb2.ListNamespacesRequest, _: Any
    ) -> admin_pb2.ListNamespacesResponse:
        """Figures by namespace."""
        contents = await in_turns(self._operations.namespaces())
        tiers = self._core.pool.tiers
        return admin_pb2.ListNamespacesResponse(namespaces=[_figures(one, tiers) for one in contents])

    async def ListChunks(
        self, request: admin_pb2.ListChunksRequest, _: Any
    ) -> AsyncIterator[admin_pb2.ListChunksResponse]:
        """Chunks of a namespace, or of one prefix of it."""
        space = self._operations.space(wire.check_key("namespace_id", request.namespace_id))
        parts: Iterable[Sequence[Chunk]] = self._operations.chunks(space)
        if request.up_to_key:
            parts = (self._operations.prefix(space, wire.check_key("up_to_key", request.up_to_key)),)
        for part in parts:
            for start in range(0, len(part), RECORDS_A_MESSAGE):
                stored = [chunk for chunk in part[start : start + RECORDS_A_MESSAGE] if chunk.is_committed]
                yield admin_pb2.ListChunksResponse(chunks=[self._record(chunk) for chunk in stored])
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _record(self, chunk: Chunk) -> admin_pb2.ChunkRecord:
        return admin_pb2.ChunkRecord(
            key=chunk.key,
            parent_key=chunk.parent_key,
            fingerprint=(chunk.fingerprint or 0) & TOKEN_FINGERPRINT_MASK,
            parent_fingerprint=chunk.parent_fingerprint or 0,
            token_count=chunk.token_count,
            dram_shards=list(chunk.copies),
            ssd_shards=list(chunk.ssd),
            unused_ms=int(self._operations.unused_s(chunk) * 1000),
        )

    # --- pins and warming --------------------------------------------------------------------------------

    async def Pin(self, request: admin_pb2.PinRequest, context: Any) -> admin_pb2.PinResponse:
        """Keeps a prefix, in DRAM. Answers when the pin is on the disk, so that it outlives the node."""
        namespace_id, key = wire.check_key("namespace_id", request.namespace_id), wire.check_key("key", request.key)
        pinned = await in_turns(self._operations.pin(request.name, namespace_id, key, request.lifetime_ms / 1000))
        await self._save_pins()
        line = self._operations.prefix(self._operations.space(namespace_id), key)
        await self._promote(line[: pinned.chunks], context)
        return admin_pb2.PinResponse(
            pinned_chunks=pinned.chunks, pinned_bytes=pinned.bytes, refused_chunks=pinned.refused_chunks
        )

    async def Unpin(self, request: admin_pb2.UnpinRequest, _: Any) -> admin_pb2.UnpinResponse:
        """Ends a pin."""
        found = self._operations.unpin(request.name)
        if found:
            await self._save_pins()
        return admin_pb2.UnpinResponse(found=found)

    async def ListPins(self, request: admin_pb2.ListPinsRequest, _: Any) -> admin_pb2.ListPinsResponse:
        """All pins."""
        pins = [
            admin_pb2.PinFigures(
                name=pin.name,
                namespace_id=pin.namespace_id,
                key=pin.key,
                chunks=len(pin.chunks),
                bytes=sum(pin.chunks.values()),
                left_ms=int(left_s * 1000),
            )
            for pin, left_s in self._operations.pins()
        ]
        return admin_pb2.ListPinsResponse(pins=pins)

    async def _save_pins(self) -> None:
        async with self._saving:
            await asyncio.to_thread(self._pin_file.save, self._operations.kept_pins())

    async def Warm(self, request: admin_pb2.WarmRequest, context: Any) -> admin_pb2.WarmResponse:
        """Brings chunks into DRAM: a prefix, or of a namespace what was used last, as much as fits."""
        space = self._operations.space(wire.check_key("namespace_id", request.namespace_id))
        asked: list[Chunk] = []
        if request.key:
            asked = self._operations.prefix(space, wire.check_key("key", request.key))
        else:
            asked = await in_turns(self._operations.warmest(space, self._core.pool.allocator.arena_bytes))
        promoted = await self._promote(asked, context)
        in_dram = sum(chunk.ssd.keys() <= chunk.copies.keys() for chunk in asked)
        return admin_pb2.WarmResponse(dram_chunks=in_dram, asked_chunks=len(asked), promoted_chunks=promoted)

    async def _promote(self, chunks: Sequence[Chunk], context: Any) -> int:
        """Bring those of the chunks into DRAM that are not; how many came."""
        missing = [chunk for chunk in chunks if not chunk.ssd.keys() <= chunk.copies.keys()]
        if self._promoter is None or not missing:
            return 0
        ends_s = time.monotonic() + context.time_remaining() - ANSWER_S
        return await self._promoter.promote(missing, ends_s)

    # --- removal and checks ------------------------------------------------------------------------------

    async def RemoveNamespace(
        self, request: admin_pb2.RemoveNamespaceRequest, _: Any
    ) -> admin_pb2.RemoveNamespaceResponse:
        """Removes all of a namespace."""
        namespace_id = wire.check_key("namespace_id", request.namespace_id)
        had_pins = any(pin.namespace_id == namespace_id for pin, _ in self._operations.pins())
        removed = await in_turns(self._operations.remove_namespace(namespace_id))
        if self._promoter is not None:
            await self._promoter.forget_removed()
        if had_pins:
            await self._save_pins()
        return admin_pb2.RemoveNamespaceResponse(removed_chunks=removed)

    async def Check(self, request: admin_pb2.CheckRequest, _: Any) -> admin_pb2.CheckResponse:
        """Laws, then the bytes of a sample. A slot that was used anew meanwhile is no finding."""
        if request.sample_chunks > SAMPLE_LIMIT:
            raise LimitExceeded(f"a check takes a sample of at most {SAMPLE_LIMIT} chunks")
        findings = []
        if law := self._operations.broken_law():
            findings.append(admin_pb2.Finding(kind="law", text=law))
        chunk_count = self._operations.chunk_count
        sampled, shards = self._operations.sample(request.sample_chunks)
        for shard in shards:
            if await asyncio.to_thread(shard.is_broken, self._arena) and self._operations.still_holds(shard):
                findings.append(await self._broken(shard, request.repair))
        if self._promoter is not None:
            for chunk in sampled:
                findings += await self._broken_on_ssd(self._promoter, chunk, request.repair)
        return admin_pb2.CheckResponse(chunks=chunk_count, sampled_chunks=len(sampled), findings=findings)

    async def _broken_on_ssd(self, promoter: Promoter, chunk: Chunk, repair: bool) -> list[admin_pb2.Finding]:
        """What differs on the SSD; with `repair` its copies there go, with all below that need them there."""
        found = []
        for shard in list(chunk.ssd):
            if await promoter.is_broken(chunk, shard):
                text = f"the bytes of chunk {chunk.key.hex()}, shard {shard:#010x}, differ on the SSD"
                found.append(admin_pb2.Finding(kind="ssd_checksum", text=text, key=chunk.key, repaired=repair))
        if found and repair:
            promoter.drop_broken(chunk)
            await promoter.forget_removed()
        return found

    async def _broken(self, shard: SampledShard, repair: bool) -> admin_pb2.Finding:
        """The finding; with `repair` the chunk goes, with all below it, which is of no use without it."""
        text = f"the bytes of chunk {shard.key.hex()}, {shard.rectangle}, differ from their checksums"
        self._core.pool.counts["dram_checksum_failures"] += 1
        if repair:
            removed = await in_turns(self._operations.remove([shard.key], "broken"))
            text += f"; {removed} chunks removed (it and all below it)"
        return admin_pb2.Finding(kind="dram_checksum", text=text, key=shard.key, repaired=repair)

    # --- other nodes -------------------------------------------------------------------------------------

    async def Replicate(self, request: admin_pb2.ReplicateRequest, context: Any) -> admin_pb2.ReplicateResponse:
        """Has the mover pull a chain from another node."""
        namespace = Namespace.from_canonical(request.namespace)
        wire.check_count("geometries", len(request.geometries), GEOMETRIES_LIMIT)
        geometries = [_geometry(each, namespace) for each in request.geometries]
        if not geometries:
            raise InvalidRequest("geometries is empty; name at least one way in which the chunks are cut")
        keys = wire.keys_from_message(request.chain, namespace.layout.chunk_tokens)
        if keys.namespace_id != namespace.id or keys.parent != namespace.id or keys.fingerprints is None:
            raise InvalidRequest("chain must begin at the start of a prompt of this namespace and have fingerprints")
        source = wire.node_info_from_message(request.source)
        self._check_other(source)
        done = await self._need_mover().replicate(namespace, geometries, keys, source, context.time_remaining())
        return admin_pb2.ReplicateResponse(
            held_chunks=done.held_chunks,
            pulled_chunks=done.pulled_chunks,
            pulled_bytes=done.pulled_bytes,
            reason=done.reason,
        )

    async def Drain(self, request: admin_pb2.DrainRequest, _: Any) -> AsyncIterator[admin_pb2.DrainProgress]:
        """Refuses new chunks from now on and has others pull what is here."""
        wire.check_count("targets", len(request.targets), DRAIN_TARGETS_LIMIT)
        targets = [wire.node_info_from_message(target) for target in request.targets]
        if not targets:
            raise InvalidRequest("targets is empty; name the nodes that take over what is here")
        for target in targets:
            self._check_other(target)
        mover = self._need_mover()
        self._core.draining = True
        async for progress in mover.drain(targets):
            yield admin_pb2.DrainProgress(
                chunks=progress.chunks,
                moved_chunks=progress.moved_chunks,
                failed_chunks=progress.failed_chunks,
                reason=progress.reason,
            )

    def _check_other(self, node: NodeInfo) -> None:
        if node.node_id == self._core.info.node_id:
            raise InvalidRequest(f"{node.node_id} is this node itself; name another one")

    def _need_mover(self) -> Mover:
        if self._mover is None:
            raise ConfigurationError(
                "this node cannot move chunks to or from other nodes: it was started without a mover; "
                "start it with `kvstore node` or `kvstore up`"
            )
        return self._mover


def _figures(contents: NamespaceContents, tiers: Sequence[Tier]) -> admin_pb2.NamespaceFigures:
    space = contents.space
    bounds: dict[str, int] = {}
    for tier in tiers:
        found = tier.bounds.get(space.group, Bounds())
        name = tier.name.name.lower()
        bounds |= {f"{name}_min_bytes": found.min_bytes, f"{name}_max_bytes": found.max_bytes}
    written = {shards[0] >> 8: [shard & 0xFF for shard in shards] for shards in space.sets_here}
    return admin_pb2.NamespaceFigures(
        namespace_id=space.id,
        namespace=space.namespace.canonical,
        geometries=[
            admin_pb2.Geometry(rectangles=wire.geometry_to_messages(geometry), written_here=written.get(digest, ()))
            for digest, geometry in space.geometries.items()
        ],
        chunks=contents.chunks,
        dram_bytes=contents.dram_bytes,
        ssd_bytes=contents.ssd_bytes,
        **bounds,
        evicted_chunks=space.evicted_chunks,
        dram_hit_tokens=space.dram_hit_tokens,
        ssd_hit_tokens=space.ssd_hit_tokens,
    )


def _geometry(message: admin_pb2.Geometry, namespace: Namespace) -> tuple[Geometry, tuple[int, ...]]:
    geometry = wire.geometry_from_messages(message.rectangles)
    geometry.check_fits(namespace.layout)
    wire.check_count("written_here", len(message.written_here), GEOMETRY_RECTANGLES_LIMIT)
    if any(number >= len(geometry.rectangles) for number in message.written_here):
        raise InvalidRequest(
            f"written_here {list(message.written_here)} of a geometry with {len(geometry.rectangles)} rectangles"
        )
    return geometry, tuple(message.written_here)
