"""Moving chunks from node to node: what the admin service needs of it, as values.

The implementation reads from the other node like any client, so it lives above this package and is handed in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo

PULLED_BYTES = {"tcp": "pulled_bytes_tcp", "nixl": "pulled_bytes_nixl"}
"""Path -> figure: bytes that came from other nodes by it, checksum tables included."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """`held_chunks` leading chunks are on this node now, `pulled_chunks` of them (and `pulled_bytes`) by this call.

    `reason`: why not all, a MissReason or the name of an Outcome in lower case; empty when all are held.
    """

    held_chunks: int
    pulled_chunks: int
    pulled_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Progress of a drain, in chunks of this node. `reason`: why the last failed one could not be moved."""

    chunks: int
    moved_chunks: int
    failed_chunks: int
    reason: str


class Mover(Protocol):
    """Pulls chunks to this node, and has others pull this node's."""

    async def replicate(
        self,
        namespace: Namespace,
        geometries: Sequence[tuple[Geometry, tuple[int, ...]]],
        keys: Keys,
        source: NodeInfo,
        deadline_s: float,
    ) -> Replicated:
        """Store what `source` holds of this chain (from the start of the prompt, with fingerprints).

        `geometries`: with the numbers of the rectangles that are written here. Raises Unreachable, DeadlineExceeded,
        LayoutMismatch.
        """

    def figures(self) -> dict[str, int]:
        """For statistics: those of PULLED_BYTES."""

    async def close(self) -> None:
        """End what is under way, while the node still answers. Idempotent."""

    def drain(self, targets: Sequence[NodeInfo]) -> AsyncIterator[Drained]:
        """Have `targets` replicate all chunks of this node, each chain on one of them, in turn."""
