"""Arrays and tensors as destinations and sources; aligned memory."""

from __future__ import annotations

import mmap
from typing import Any, cast

import numpy as np

from kvstore.client.values import Bytes, Destination, Source
from kvstore.errors import LayoutMismatch
from kvstore.model import checksum
from kvstore.model.layout import PageLayout, Rectangle


class ChunkArray:
    """An array (n, layers, pages, heads, head_page_bytes), uint8, of one rectangle."""

    scatters_at_once = gathers_at_once = True

    def __init__(self, array: Bytes, rectangle: Rectangle) -> None:
        self._array = array
        self._layer, self._head = rectangle.layer_start, rectangle.head_start
        self.sums_on_the_way = checksum.hashed_natively(array[0]) if len(array) else False

    def _at(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> Bytes:
        layer, head = layer_start - self._layer, head_start - self._head
        return self._array[index, layer : layer + piece.shape[0], :, head : head + piece.shape[2]]

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """Copy a piece in."""
        self._at(index, piece, layer_start, head_start)[...] = piece

    def scatter_checked(
        self, index: int, piece: Bytes, layer_start: int, head_start: int, table: checksum.Table
    ) -> bool:
        """Copy a piece in if it has these checksums."""
        return checksum.copy_in(piece, table, self._at(index, piece, layer_start, head_start))

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        """Copy a piece out."""
        slot[...] = self._at(index, slot, layer_start, head_start)

    def gather_summed(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> checksum.Table:
        """Copy a piece out; returns its checksums."""
        return checksum.copy_out(self._at(index, slot, layer_start, head_start), slot)


def as_destination(target: Any, layout: PageLayout, rectangle: Rectangle, count: int) -> Destination:
    """A destination as it is, or an array or CPU tensor of the rectangle's shape with room for `count` chunks."""
    if hasattr(target, "scatter") and not _is_tensor(target):
        return cast(Destination, target)
    array = _as_array(target, layout, rectangle, count)
    if not array.flags.writeable:
        raise LayoutMismatch("the destination is read-only")
    return ChunkArray(array, rectangle)


def as_source(source: Any, layout: PageLayout, rectangle: Rectangle, count: int) -> Source:
    """A source as it is, or an array or CPU tensor of the rectangle's shape with `count` chunks."""
    if hasattr(source, "gather") and not _is_tensor(source):
        return cast(Source, source)
    return ChunkArray(_as_array(source, layout, rectangle, count), rectangle)


def empty(layout: PageLayout, rectangle: Rectangle, count: int) -> Bytes:
    """Page-aligned private memory for `count` chunks of a rectangle."""
    shape = (count, *layout.shape(rectangle))
    size = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=np.uint8)[:size].reshape(shape)


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _as_array(value: Any, layout: PageLayout, rectangle: Rectangle, count: int) -> Bytes:
    if _is_tensor(value):
        if value.device.type != "cpu" or not value.is_contiguous():
            raise LayoutMismatch(f"a tensor must be contiguous and on the CPU, this one is on {value.device}")
        import torch

        value = value.detach().view(torch.uint8).numpy()
    shape = (count, *layout.shape(rectangle))
    array = np.asarray(value)
    if array.dtype != np.uint8:
        raise LayoutMismatch(f"pages are uint8 arrays, not {array.dtype}; use .view(np.uint8)")
    if array.shape != shape:
        if not array.flags.c_contiguous or array.size != int(np.prod(shape)):
            raise LayoutMismatch(
                f"an array of shape {array.shape} does not hold {shape} (chunks, layers, pages, heads, bytes)"
            )
        array = array.reshape(shape)
    return array
