"""Reading from the own host's node: find, copy, confirm. No RPC, no lock, no pin.

On x86 the fence is enough, because loads are not reordered with older loads, nor with the release of the lock by which
the caller learns that another thread's copy has ended. Elsewhere, or where `verify` is asked for, each shard is copied
to private memory first and only passed on when its checksums hold.
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass

from kvstore.client.copiers import ALONE, Copiers
from kvstore.client.host import HostNode
from kvstore.client.values import Destination, scatters_at_once, synchronize
from kvstore.model import checksum
from kvstore.model.layout import PageLayout, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.reshard import plan_read
from kvstore.model.values import MissReason
from kvstore.node.lookup import Found

BATCH_BYTES = 32 << 20
"""Copied between two looks at the entries: a chunk that goes in the middle costs a retry of one batch."""
FENCE_RETRIES = 3
_RETRIED = (MissReason.FENCE, MissReason.CHECKSUM)
STRONG_ORDER = platform.machine() in ("x86_64", "AMD64")
"""False where the processor may see a slot's new bytes before its new generation."""


@dataclass(frozen=True, slots=True)
class LocalRead:
    """`chunks` leading chunks were delivered; `reason` says why the next was not. `retries`: fences that failed.

    `slower`: the next chunk is on this node, but on a slower tier.
    """

    chunks: int
    reason: MissReason | None
    retries: int
    slower: bool = False


def read_local(
    host: HostNode,
    layout: PageLayout,
    keys: Keys,
    rectangle: Rectangle,
    destination: Destination,
    end_s: float,
    *,
    copiers: Copiers = ALONE,
    verify: bool,
) -> LocalRead:
    """Deliver the longest prefix that this node holds. `end_s`: monotonic time after which nothing new is begun.

    `copiers` copy, where the destination lets several threads call it.
    """
    copiers = copiers if scatters_at_once(destination) else ALONE
    done = retries = 0
    while True:
        if not host.alive:
            return LocalRead(done, MissReason.SESSION_LOST, retries)
        found = host.reader.find(keys.slice(done, len(keys)) if done else keys, rectangle)
        run = _Run(host, layout, rectangle, found, copiers, verify)
        copied, reason = run.copy(done, destination, end_s)
        done += copied
        if reason in _RETRIED and retries < FENCE_RETRIES and time.monotonic() < end_s:
            retries += 1
            continue
        return LocalRead(done, reason or found.reason, retries, reason is None and found.present > found.run)


class _Run:
    """The copy of one run of found chunks, and whether it holds."""

    def __init__(
        self,
        host: HostNode,
        layout: PageLayout,
        rectangle: Rectangle,
        found: Found,
        copiers: Copiers,
        verify: bool,
    ) -> None:
        self._host = host
        self._layout = layout
        self._found = found
        self._piece_bytes = layout.payload_bytes(rectangle)
        self._copiers = copiers
        self._verify = verify
        if found.geometry is None:
            return
        parts = plan_read(layout, found.geometry, rectangle).parts
        self._stored = [part.stored for part in parts]
        self._shapes = [layout.shape(part.stored) for part in parts]
        self._sizes = [layout.payload_bytes(part.stored) for part in parts]
        self._slices = [None if part.is_whole_shard else part.stored_slices for part in parts]
        self._starts = [(part.common.layer_start, part.common.head_start) for part in parts]

    def copy(self, first: int, destination: Destination, end_s: float) -> tuple[int, MissReason | None]:
        """(chunks that hold, why not more). Chunk i of the run is chunk `first + i` of the destination."""
        run, reader = self._found.run, self._host.reader
        offsets = self._found.offsets.tolist() if run else []

        def work(index: int) -> MissReason | None:
            return self._copy_chunk(index, offsets[index], first, destination)

        step = max(1, BATCH_BYTES // self._piece_bytes)
        for begin in range(0, run, step):
            if time.monotonic() >= end_s:
                return begin, MissReason.DEADLINE
            try:
                copied, reason = self._copiers.each(range(begin, min(begin + step, run)), self._piece_bytes, work)
            finally:
                # Before the second look: what is copied after it may be of somebody else. Also when the destination
                # raises: its caller computes into the same blocks then.
                synchronize(destination)
            held = reader.confirm(self._found.part(begin, begin + copied))
            if held < copied:
                return begin + held, MissReason.FENCE
            if reason is not None:
                return begin + copied, reason
        return run, None

    def _copy_chunk(self, index: int, offsets: list[int], first: int, destination: Destination) -> MissReason | None:
        arena = self._host.arena
        for place, offset in enumerate(offsets):
            size = self._sizes[place]
            stored = arena[offset : offset + size]
            if len(stored) != size:  # a torn look may show any offset, also one beyond the arena
                return MissReason.FENCE
            if self._verify:
                table_bytes = checksum.table_bytes(self._stored[place])
                held = arena[offset : offset + size + table_bytes].copy()
                stored, table = held[:size], held[size:]
                expected = int(self._found.table_hashes[index, place])
                if expected and (
                    checksum.table_hash(table) != expected
                    or checksum.differs(stored, table, self._layout, self._stored[place])
                ):
                    return MissReason.CHECKSUM
            pages = stored.reshape(self._shapes[place])
            cut = self._slices[place]
            destination.scatter(first + index, pages if cut is None else pages[cut], *self._starts[place])
        return None
