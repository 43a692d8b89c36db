"""What calls of the client return, and the protocols of callers that copy pages themselves."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from kvstore.model import checksum
from kvstore.model.values import MissReason, Outcome

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Match:
    """Leading chunks (and their tokens) on the own host's node, and on the best node of the pool."""

    local_chunks: int
    pool_chunks: int
    local_tokens: int
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`chunks` leading chunks were delivered; what lies behind them in the destination is undefined.

    `reason`: why the next chunk was not, None if all were. `bytes_by_path`: payload bytes by transport name.
    `ssd_tokens`: those of `tokens` that a node had on its SSD only.
    """

    chunks: int
    tokens: int
    local_chunks: int
    remote_chunks: int
    reason: MissReason | None
    bytes_by_path: Mapping[str, int] = field(default_factory=dict)
    ssd_tokens: int = 0


class Durability(enum.StrEnum):
    """What a write waits for."""

    DRAM = "dram"
    """Visible to readers; on the SSD later, where there is one."""
    SSD = "ssd"
    """On the SSD, flushed: it outlives a restart of the host."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """`outcomes` are parallel to the keys written.

    `durable`: leading chunks that are on the node's SSD, and `not_durable` why not the next, where that was asked for.
    """

    outcomes: Sequence[Outcome]
    durable: int = 0
    not_durable: str = ""

    @property
    def stored(self) -> int:
        """Chunks that this call made visible."""
        return sum(outcome is Outcome.COMMITTED for outcome in self.outcomes)

    @property
    def visible(self) -> int:
        """Leading chunks that are visible now, whoever stored them."""
        for index, outcome in enumerate(self.outcomes):
            if outcome not in (Outcome.COMMITTED, Outcome.PRESENT):
                return index
        return len(self.outcomes)


class Destination(Protocol):
    """Takes pages out of pool memory.

    One that has an attribute `scatters_at_once`, and it is True, may be called by several threads at a time, each for
    another chunk; large reads are copied so. Every call has ended before the read goes on to what comes next.
    """

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """Copy `piece` (uint8 view, (layers, pages, heads, head_page_bytes)) of chunk `index` to its place.

        `layer_start` and `head_start` are the piece's first layer and head in the model. The view ends with the
        call, or with `Asynchronous.synchronize`. A chunk may be delivered again after a failed fence; the last delivery
        counts.
        """


class Source(Protocol):
    """Puts pages into pool memory. `gathers_at_once` as `scatters_at_once` of a `Destination`."""

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        """Fill `slot` (writable uint8 view, (layers, pages, heads, head_page_bytes)) with chunk `index`.

        `layer_start` and `head_start` as in `Destination.scatter`. Unused tokens of a partial chunk are zero.
        """


class Summing(Protocol):
    """What a Source has besides, if it takes checksums while it copies. Who overrides one verb overrides both."""

    sums_on_the_way: bool
    """True if each byte is read once then; if not, the verb is not used."""

    def gather_summed(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> checksum.Table:
        """As `gather`; returns `kvstore.model.checksum.table_of_layers` of what it put into `slot`."""


class Checking(Protocol):
    """What a Destination has besides, if it checks checksums while it copies. Who overrides one verb overrides both."""

    def scatter_checked(
        self, index: int, piece: Bytes, layer_start: int, head_start: int, table: checksum.Table
    ) -> bool:
        """As `scatter`, but no layer before its checksums were found to be those of `table` (layers, heads).

        False if a layer has others: neither it nor a layer behind it is copied.
        """


def scatters_at_once(destination: Destination) -> bool:
    """True if several threads may call its `scatter` at a time."""
    return getattr(destination, "scatters_at_once", False) is True


def gathers_at_once(source: Source) -> bool:
    """True if several threads may call its `gather` at a time."""
    return getattr(source, "gathers_at_once", False) is True


def takes_checksums(source: Source) -> TypeGuard[Summing]:
    """True if it takes checksums while it copies, and that is faster than one after the other."""
    return (
        checksum.NATIVE
        and getattr(source, "sums_on_the_way", False) is True
        and _defined_together(type(source), "gather", "gather_summed")
        and "gather" not in getattr(source, "__dict__", ())
    )


def scatter_checked(
    destination: Destination, index: int, piece: Bytes, layer_start: int, head_start: int, table: checksum.Table
) -> bool:
    """`Checking.scatter_checked`, of the destination's own where it has one."""
    if (
        checksum.NATIVE
        and _defined_together(type(destination), "scatter", "scatter_checked")
        and "scatter" not in getattr(destination, "__dict__", ())
    ):
        return cast(Checking, destination).scatter_checked(index, piece, layer_start, head_start, table)
    if not checksum.matches(piece, table):
        return False
    destination.scatter(index, piece, layer_start, head_start)
    return True


@cache
def _defined_together(kind: type, *verbs: str) -> bool:
    """True if the class that defines the one verb for `kind` defines the other too.

    A subclass that overrides only one of them means it for both: the other would go past it.
    """
    nearest = next((each for each in kind.__mro__ if any(verb in vars(each) for verb in verbs)), object)
    return all(verb in vars(nearest) for verb in verbs)


class Asynchronous(Protocol):
    """What a Destination or Source has besides, if its copies may end after `scatter` or `gather` returned.

    The client keeps the views that it gave until `synchronize` has returned. Only then does it look whether what was
    read still held, use that memory for something else, take checksums or commit.
    """

    def launch(self) -> None:
        """Begin all copies that were asked for. Does not wait."""

    def synchronize(self) -> None:
        """Return when all copies that were asked for have ended. If this raises, none of them counts."""


def is_asynchronous(endpoint: Destination | Source) -> TypeGuard[Asynchronous]:
    """True if copies may go on after `scatter` or `gather` returned."""
    # Not isinstance: with a protocol it takes many times as long, and small reads would feel it.
    return hasattr(endpoint, "synchronize")


def synchronize(endpoint: Destination | Source) -> None:
    """Return when no copy of this destination or source is under way any more."""
    if is_asynchronous(endpoint):
        endpoint.synchronize()
