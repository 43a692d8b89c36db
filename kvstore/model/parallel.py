"""Who of an engine's ranks writes what, and what each of them reads. Pure values, no I/O.

    tensor parallel    ranks share the KV heads; where there are fewer heads than ranks, engines give neighbouring
                       ranks copies of one head (so do vLLM and SGLang: head group = tp_rank // copies)
    MLA                the same with one latent head: every tensor-parallel rank has a copy of it
    pipeline parallel  ranks share the layers
    context parallel   ranks share the prompt: rank r writes the whole chunks i with i mod cp = r

One copy is stored. Of ranks with equal heads the first writes everything, or each of them a part of the layers,
which spreads the copying; both are geometries that a reader of any layout reads from. Which rank is the first is
counted among the copies, never over all ranks: a rank of another pipeline stage or context group has other bytes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Geometry, PageLayout, Rectangle


@dataclass(frozen=True, slots=True)
class Rank:
    """Place of one worker among the tensor-, pipeline- and context-parallel workers of an engine.

    InvalidRequest unless each rank lies in 0..size-1.
    """

    tp_rank: int = 0
    tp: int = 1
    pp_rank: int = 0
    pp: int = 1
    cp_rank: int = 0
    cp: int = 1

    def __post_init__(self) -> None:
        for kind in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, kind)
            if not 0 <= rank < size:
                raise InvalidRequest(f"{kind}_rank {rank} does not lie in 0..{size - 1} of {kind}={size}")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of the chunks. Made by `share_of`."""

    rank: Rank
    geometry: Geometry
    """How all writers together cut a chunk: the same value on each rank."""
    held: Rectangle
    """What the rank's own KV tensors hold: what it reads, and what its writes are a part of."""
    written: tuple[int, ...]
    """Numbers of the rectangles of `geometry` that this rank writes: one, or none where another rank writes them."""

    def writes_chunk(self, number: int) -> bool:
        """True if chunk `number` of a prompt, counted from its start, is written by this rank's context group."""
        return number % self.rank.cp == self.rank.cp_rank

    def written_chunks(self, first: int, count: int) -> tuple[int, ...]:
        """Places among `count` consecutive keys, the first of which is chunk `first` of its prompt, to write here."""
        if not self.written:
            return ()
        return tuple(place for place in range(count) if self.writes_chunk(first + place))


def share_of(layout: PageLayout, rank: Rank, *, split_copies: bool = False) -> Share:
    """What `rank` holds and writes.

    `split_copies`: ranks with copies of one head write a part of the layers each, instead of the first everything;
    it makes no difference where no head is copied. LayoutMismatch, with both numbers named, where heads or layers
    cannot be cut evenly over the ranks; LimitExceeded over 256 rectangles.
    """
    by_ranks = Geometry.parallel(layout, tp=rank.tp, pp=rank.pp)
    groups = len(by_ranks.rectangles) // rank.pp
    copies = rank.tp // groups
    group, copy = divmod(rank.tp_rank, copies)
    held = by_ranks.rectangles[rank.pp_rank * groups + group]
    writers = min(copies, held.layers) if split_copies else 1
    pieces = sorted(piece for rectangle in by_ranks.rectangles for piece in _pieces(rectangle, writers))
    written = (pieces.index(_pieces(held, writers)[copy]),) if copy < writers else ()
    return Share(rank, Geometry(tuple(pieces)), held, written)


def _pieces(rectangle: Rectangle, count: int) -> list[Rectangle]:
    """The rectangle cut by layers, as evenly as whole layers allow."""
    edges = [rectangle.layer_start + rectangle.layers * i // count for i in range(count + 1)]
    heads = rectangle.head_start, rectangle.head_stop
    return [Rectangle(first, last, *heads) for first, last in itertools.pairwise(edges)]
