"""What operators ask of one node, on top of its core: lists, pins, removal, checks. Pure and synchronous.

Verbs that may look at very many chunks are generators: the caller runs them step by step and lets others have their
turn in between (`STEP_CHUNKS` a step, 1 to 4 ms; the first step also lists all chunks, 5 ms for 200,000). What they
return is right for a node that changes meanwhile: chunks that come or go between two steps may be seen or not.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest, LimitExceeded, NotFound
from kvstore.model import checksum
from kvstore.model.layout import PageLayout, Rectangle
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.chunks import Chunk, KnownNamespace
from kvstore.node.core import NodeCore
from kvstore.node.holds import PIN_LIFETIME_LIMIT_S, NamedPin
from kvstore.node.operators.pins import KeptPin
from kvstore.node.steps import Steps, finish

STEP_CHUNKS: Final = 1000
"""Chunks that are looked at in one turn of the loop."""
PIN_NAME_LIMIT_BYTES: Final = 128


class Promoter(Protocol):
    """Brings chunks from slower tiers into DRAM."""

    async def promote(self, chunks: Sequence[Chunk], ends_s: float) -> int:
        """Read these in, first to last, until one does not come or the (monotonic) time is up; how many are there."""

    async def is_broken(self, chunk: Chunk, shard: int) -> bool:
        """True if a shard on the slower tier differs from its checksums."""

    def drop_broken(self, chunk: Chunk) -> None:
        """Take a chunk's copies, and all below, out of the slower tier."""

    async def forget_removed(self) -> None:
        """Wait until what was removed cannot come back after a restart. Raises StorageFailed where it might."""


@dataclass(frozen=True, slots=True)
class NamespaceContents:
    """What a node holds of one namespace; counters of hits and evictions are in `space`."""

    space: KnownNamespace
    chunks: int
    dram_bytes: int
    ssd_bytes: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """`chunks` leading ones of the prefix are kept now; `refused_chunks` were not, for want of room for pins."""

    chunks: int
    bytes: int
    refused_chunks: int


@dataclass(frozen=True, slots=True)
class SampledShard:
    """One shard in DRAM whose bytes are to be compared with its checksums."""

    key: bytes
    layout: PageLayout
    rectangle: Rectangle
    slot: int
    generation: int
    table_hash: int

    def is_broken(self, arena: npt.NDArray[np.uint8]) -> bool:
        """True if the bytes differ, which counts only if the slot's generation is still the same. Reads them all.

        A shard that was stored without checksums is never broken.
        """
        start = self.slot * UNIT_BYTES
        payload_bytes = self.layout.payload_bytes(self.rectangle)
        payload = arena[start : start + payload_bytes]
        table = arena[start + payload_bytes :][: checksum.table_bytes(self.rectangle)]
        return bool(self.table_hash) and (
            checksum.table_hash(table) != self.table_hash
            or checksum.differs(payload, table, self.layout, self.rectangle)
        )


class Operations:
    """The verbs. `clock` is the core's: monotonic seconds."""

    def __init__(self, core: NodeCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._turn = 0

    def space(self, namespace_id: bytes) -> KnownNamespace:
        """Raises NotFound."""
        space = self._core.pool.spaces.get(namespace_id)
        if space is None:
            raise NotFound(f"namespace {namespace_id.hex()} is not known on this node; `kvstore namespaces` lists them")
        return space

    # --- looking -----------------------------------------------------------------------------------------

    def namespaces(self) -> Steps[list[NamespaceContents]]:
        """What the node holds, by namespace, in the order in which they became known."""
        chunks: Counter[bytes] = Counter()
        in_dram: Counter[bytes] = Counter()
        on_ssd: Counter[bytes] = Counter()
        for part in self._parts():
            for chunk in part:
                if chunk.is_committed:
                    chunks[chunk.space.id] += 1
                    in_dram[chunk.space.id] += sum(copy.size_bytes for copy in chunk.copies.values())
                    on_ssd[chunk.space.id] += sum(copy.size_bytes for copy in chunk.ssd.values())
            yield
        return [
            NamespaceContents(space, chunks[space.id], in_dram[space.id], on_ssd[space.id])
            for space in self._core.pool.spaces.values()
        ]

    def chunks(self, space: KnownNamespace) -> Iterator[list[Chunk]]:
        """The stored chunks of a namespace in parts, parents before their children. A part may be empty."""
        listed: set[Chunk] = set()
        for part in self._parts():
            found: list[Chunk] = []
            for chunk in part:
                if chunk.space is not space:
                    continue
                line: list[Chunk] = []
                ancestor: Chunk | None = chunk
                while ancestor is not None and ancestor not in listed:
                    listed.add(ancestor)
                    line.append(ancestor)
                    ancestor = ancestor.parent
                found.extend(each for each in reversed(line) if each.is_committed)
                if len(found) >= STEP_CHUNKS:
                    yield found
                    found = []
            yield found

    def prefix(self, space: KnownNamespace, key: bytes) -> list[Chunk]:
        """The chunk of this key and all before it, first to last. Raises NotFound unless all of them are here."""
        chunk = self._core.pool.forest.get(key)
        line: list[Chunk] = []
        while chunk is not None and chunk.space is space and chunk.is_committed:
            line.append(chunk)
            if chunk.is_root:
                return line[::-1]
            chunk = chunk.parent
        raise NotFound(
            f"this node does not hold the whole prefix that ends with chunk {key.hex()} of {space.namespace.title}; "
            "store it first: serve the prompt once"
        )

    def unused_s(self, chunk: Chunk) -> float:
        """Time since it was stored or read last."""
        return max(0.0, self._clock() - chunk.used_s)

    def warmest(self, space: KnownNamespace, limit_bytes: int) -> Steps[list[Chunk]]:
        """Stored chunks of a namespace, those used last first, each behind its ancestors; up to so many bytes."""
        found: list[Chunk] = []
        for part in self.chunks(space):
            found += part
            yield
        found.sort(key=lambda chunk: (-chunk.used_s, chunk.depth))
        chosen: dict[Chunk, None] = {}
        for chunk in found:
            line: list[Chunk] = []
            above: Chunk | None = chunk
            while above is not None and above not in chosen:
                line.append(above)
                above = above.parent
            limit_bytes -= sum(bytes_of(each) for each in line)
            if limit_bytes < 0:
                break
            chosen.update(dict.fromkeys(reversed(line)))
        return list(chosen)

    def _parts(self) -> Iterator[list[Chunk]]:
        """All chunks that are here now, a step's worth at a time."""
        chunks = list(self._core.pool.forest.chunks.values())
        return (chunks[at : at + STEP_CHUNKS] for at in range(0, len(chunks), STEP_CHUNKS))

    # --- pins --------------------------------------------------------------------------------------------

    def pin(self, name: str, namespace_id: bytes, key: bytes, lifetime_s: float) -> Steps[Pinned]:
        """Keep a prefix from eviction; a pin of the same name ends. Raises NotFound, LimitExceeded, InvalidRequest."""
        if not name:
            raise InvalidRequest("a pin needs a name, by which `kvstore unpin` ends it")
        if len(name.encode()) > PIN_NAME_LIMIT_BYTES:
            raise LimitExceeded(f"the name of a pin has at most {PIN_NAME_LIMIT_BYTES} bytes")
        if not 0 < lifetime_s <= PIN_LIFETIME_LIMIT_S:
            raise LimitExceeded(f"a pin lasts more than 0 and at most {PIN_LIFETIME_LIMIT_S / 86_400:g} days")
        line = self.prefix(self.space(namespace_id), key)
        pin = NamedPin(name, namespace_id, key, self._clock() + lifetime_s)
        self._core.holds.set_named(pin)
        yield from self._apply(pin, line)
        return Pinned(len(pin.chunks), sum(pin.chunks.values()), len(line) - len(pin.chunks))

    def _apply(self, pin: NamedPin, line: Sequence[Chunk]) -> Steps[None]:
        """Pin the chunks of a prefix, first to last, until one has left meanwhile or pins would take too much."""
        holds, chunks = self._core.holds, self._core.pool.forest.chunks
        pin.waits = False
        for start in range(0, len(line), STEP_CHUNKS):
            if start:
                yield
            part = line[start : start + STEP_CHUNKS]
            if holds.named.get(pin.name) is not pin:
                return
            if any(chunks.get(chunk.key) is not chunk for chunk in part):
                pin.waits = True
                return
            if not holds.extend_named(pin, part, bytes_of):
                return

    def unpin(self, name: str) -> bool:
        """End a pin; False if there is none of that name."""
        return self._core.holds.end_named(name)

    def pins(self) -> list[tuple[NamedPin, float]]:
        """All pins with the seconds that are left to each."""
        now_s = self._clock()
        return [(pin, pin.expires_s - now_s) for pin in self._core.holds.named.values() if pin.expires_s > now_s]

    def kept_pins(self) -> list[KeptPin]:
        """All pins as they are kept over a restart."""
        return [KeptPin(pin.name, pin.namespace_id, pin.key, left_s) for pin, left_s in self.pins()]

    def restore(self, kept: Iterable[KeptPin]) -> None:
        """Take up pins of an earlier start. Prefixes that are not here yet are looked for by `tick`."""
        for one in kept:
            left_s = min(one.left_s, PIN_LIFETIME_LIMIT_S)
            pin = NamedPin(one.name, one.namespace_id, one.key, self._clock() + left_s)
            self._core.holds.set_named(pin)
            self._look_for(pin)

    def tick(self) -> None:
        """Look for the prefix of one pin that waits for it: the next in turn."""
        waiting = [pin for pin in self._core.holds.named.values() if pin.waits]
        if waiting:
            self._turn += 1
            self._look_for(waiting[self._turn % len(waiting)])

    def _look_for(self, pin: NamedPin) -> None:
        """Pin what a waiting pin names, if all of it is here."""
        space = self._core.pool.spaces.get(pin.namespace_id)
        if space is None or pin.key not in self._core.pool.forest.chunks:
            return
        try:
            line = self.prefix(space, pin.key)
        except NotFound:
            return
        finish(self._apply(pin, line))

    # --- removal -----------------------------------------------------------------------------------------

    def remove_namespace(self, namespace_id: bytes) -> Steps[int]:
        """Remove what is there of a namespace, pinned or not, and end its pins; how many stored chunks went."""
        space = self.space(namespace_id)
        for name in [n for n, pin in self._core.holds.named.items() if pin.namespace_id == namespace_id]:
            self._core.holds.end_named(name)
        removed, chunks = 0, list(self._core.pool.forest.chunks.values())
        # The newest first: they have few or no children, so that the subtrees below are small.
        while chunks:
            part = chunks[: -STEP_CHUNKS - 1 : -1]
            del chunks[-STEP_CHUNKS:]  # chunks that went are freed step by step, too
            keys = [chunk.key for chunk in part if chunk.space is space]
            part.clear()
            removed += yield from self.remove(keys, "removed")
            yield
        return removed

    def remove(self, keys: Iterable[bytes], reason: str) -> Steps[int]:
        """Remove chunks with all that hangs below them, children first; how many stored chunks went."""
        forest, removed, count = self._core.pool.forest, 0, 0
        for key in keys:
            chunk = forest.get(key)
            for each in forest.subtree(chunk) if chunk is not None else ():
                # Gone in a pause, or with new children since then: what is there now counts.
                for last in forest.subtree(each) if forest.get(each.key) is each else ():
                    removed += self._core.drop(last, reason)
                count += 1
                if not count % (STEP_CHUNKS // 2):  # removing takes longer than looking
                    yield
        return removed

    # --- checks ------------------------------------------------------------------------------------------

    def broken_law(self) -> str:
        """What is wrong with the node's records; empty if nothing is. Takes about 20 us a chunk."""
        try:
            self._core.check()
        except AssertionError as exc:
            last = traceback.extract_tb(exc.__traceback__)[-1]
            return f"{exc or last.line} ({last.name} in {last.filename.rpartition('/')[2]})"
        return ""

    def sample(self, count: int) -> tuple[list[Chunk], list[SampledShard]]:
        """Up to `count` chunks, drawn at random, and all their shards in DRAM."""
        stored = [chunk for chunk in self._core.pool.forest.chunks.values() if chunk.is_committed]
        chosen = random.SystemRandom().sample(stored, min(count, len(stored)))
        shards = [
            SampledShard(
                chunk.key,
                chunk.space.layout,
                chunk.space.kinds[shard].rectangle,
                copy.slot,
                copy.generation,
                copy.table_hash,
            )
            for chunk in chosen
            for shard, copy in chunk.copies.items()
        ]
        return chosen, shards

    def still_holds(self, shard: SampledShard) -> bool:
        """True if the slot was not used for anything else since the sample was drawn."""
        return self._core.pool.catalog.generation(shard.slot) == shard.generation

    @property
    def chunk_count(self) -> int:
        """Chunks with at least one committed shard."""
        return self._core.pool.chunk_count


def bytes_of(chunk: Chunk) -> int:
    """Bytes of a chunk's slots in DRAM, or of those that it would take there."""
    return sum(copy.size_bytes for copy in chunk.shards.values())
