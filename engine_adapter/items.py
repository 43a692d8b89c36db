"""How a strided view of an engine's head pages is cut into items: runs of bytes that move in one piece. Pure.

An item is the longest run that lies in one piece in the engine and in stored head pages, so a copy is a list of
equal items on both sides:

    HND, whole head pages together       an item is a head page (or a unit of it, where pages are re-tiled)
    NHD, K and V joined                  an item is K||V of one token and head
    K and V far apart                    an item is K or V, of one token or of all tokens of a head

Distances in the engine need not be multiples of that run (padding, a slice of a wider tensor); then items are
shorter. Two elements of a view never share memory, else a write would depend on its order: that is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from engine_adapter.views import HeadPages
from kvstore.errors import LayoutMismatch

Places = npt.NDArray[np.intp]
Extent = tuple[int, int]
"""(count, distance in bytes) along one dimension."""


@dataclass(frozen=True, slots=True)
class ItemCut:
    """Where the items of a view lie, counted in items from its first byte, and where they lie in stored head pages."""

    item_bytes: int
    block_step: int
    head_step: int
    unit_step: int
    inside: Places
    """Items of one unit of a head page, in stored order."""
    count: int
    """Items from the first byte of the view to its last, what lies between them included."""
    stored_shape: tuple[int, ...]
    """A stored head page: (units, the dimensions of `inside`, item_bytes), with the one of K and V where apart."""
    which: tuple[slice | int, ...]
    """Index of this view's items in an array (layers, pages, heads, *stored_shape)."""


def cut_items(pages: HeadPages, number: int) -> ItemCut:
    """The cut of view `number` of each layer. LayoutMismatch where the layers differ, or elements share memory."""
    views = [layer[number] for layer in pages.layers]
    kinds = {(tuple(view.shape), view.stride(), view.dtype) for view in views}
    if len(kinds) != 1:
        raise LayoutMismatch(f"all layers have one shape, one dtype and the same distances in memory, not {kinds}")
    outside, inside = _extents(views[0], pages.units_per_block)
    apart = len(pages.layers[0]) > 1
    first = pages.vector_axis if apart else 0  # what is joined must not reach over the dimension of K and V
    outer, run_bytes = _run(inside, first)
    item_bytes = gcd(run_bytes, *(distance for count, distance in (*outside, *inside[:outer]) if count > 1))
    items = [*inside[:outer], (run_bytes // item_bytes, item_bytes)]
    counts = [count for count, _ in items]
    stored = [*counts[:first], len(pages.layers[0]), *counts[first:]] if apart else counts
    block_step, head_step, unit_step = (distance // item_bytes for _, distance in outside)
    return ItemCut(
        item_bytes,
        block_step,
        head_step,
        unit_step,
        _places(items, item_bytes),
        sum((count - 1) * distance for count, distance in (*outside, *items)) // item_bytes + 1,
        (pages.units_per_page, *stored, item_bytes),
        (slice(None),) * (4 + first) + (number,) if apart else (),
    )


def _extents(view: torch.Tensor, units: int) -> tuple[list[Extent], list[Extent]]:
    """Blocks, heads and units of a block; and the inside of a unit, down to single bytes."""
    if view.dim() < 3 or not view.numel():
        raise LayoutMismatch(f"a KV tensor is (blocks, kv_heads, ...), not {tuple(view.shape)}")
    size = view.element_size()
    blocks, heads, (rows, distance), *rest = (
        (count, stride * size) for count, stride in zip(view.shape, view.stride(), strict=True)
    )
    rows //= units
    outside, inside = [blocks, heads, (units, rows * distance)], [(rows, distance), *rest, (size, 1)]
    end = 0
    for distance, count in sorted((distance, count) for count, distance in (*outside, *inside) if count > 1):
        if distance <= end:
            raise LayoutMismatch(f"elements of a KV tensor lie over one another: strides {view.stride()}")
        end += (count - 1) * distance
    return outside, inside


def _run(inside: list[Extent], first: int) -> tuple[int, int]:
    """(dimensions before the run, its bytes): the longest run at the end of `inside`, from dimension `first` on."""
    outer, run_bytes = len(inside), 1
    while outer > first and (inside[outer - 1][0] == 1 or inside[outer - 1][1] == run_bytes):
        outer -= 1
        run_bytes *= inside[outer][0]
    return outer, run_bytes


def _places(items: list[Extent], item_bytes: int) -> Places:
    places = np.zeros((), np.intp)
    for count, distance in items:
        places = places[..., None] + np.arange(count) * (distance // item_bytes)
    return places
