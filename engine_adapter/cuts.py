"""How an engine's ranks share a KV group: heads as engines cut them, layers as pipeline stages have them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import LayoutMismatch
from kvstore.model.layout import Geometry, Rectangle


@dataclass(frozen=True, slots=True)
class Cut:
    """A rectangle for each pipeline stage and group of heads; `copies` neighbouring tensor ranks have equal heads."""

    rectangles: tuple[tuple[Rectangle, ...], ...]
    copies: int = 1

    @classmethod
    def of(cls, layers: Sequence[int], heads: int, tp: int) -> Cut:
        """`layers` of each pipeline stage, the model's KV heads, the number of tensor parallel ranks.

        LayoutMismatch where heads and ranks do not divide each other.
        """
        groups = min(heads, tp)
        if tp < 1 or heads % groups or tp % groups:
            raise LayoutMismatch(f"{heads} KV heads cannot be cut evenly over tp={tp}")
        width, edges = heads // groups, list(itertools.accumulate(layers, initial=0))
        stages = tuple(
            tuple(Rectangle(start, stop, at * width, (at + 1) * width) for at in range(groups))
            for start, stop in itertools.pairwise(edges)
        )
        return cls(stages, tp // groups)

    @property
    def geometry(self) -> Geometry:
        """All rectangles, in canonical order."""
        return Geometry(tuple(sorted(itertools.chain.from_iterable(self.rectangles))))

    def held(self, tp_rank: int, pp_rank: int) -> tuple[Rectangle, bool]:
        """(what a rank holds, whether it stores that: the first of its copies does)."""
        return self.rectangles[pp_rank][tp_rank // self.copies], tp_rank % self.copies == 0
