"""Moving head pages between an engine's blocks and dense memory, both on one device.

    blocks   per layer: (blocks, heads, *interior), strides as they like
    dense    parts back to back, each (layers, pages, heads, head_page_bytes)

`TorchMover` works on every device and for every strided view, with a few torch calls a layer for all parts of equal
shape. `engine_adapter.kernels.KernelMover` does a whole batch in one launch, on CUDA, where head pages are contiguous.
Everything is given to the current stream; nothing here waits. On CUDA neither has ever run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine_adapter.pieces import BlockIds
from kvstore.errors import LayoutMismatch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are moved as integers: no kernel is missing for a rare dtype, and no NaN is made quiet."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """An engine's KV tensors, one a layer, as integers (blocks, heads, *interior), as wide as they can be."""

    layers: tuple[torch.Tensor, ...]
    heads: int
    head_page_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Blocks:
        """Views of the tensors, or of any strided views of them. Raises LayoutMismatch for what does not fit."""
        if not tensors:
            raise LayoutMismatch("an engine has at least one layer")
        shapes = {(*t.shape, t.dtype, t.device) for t in tensors}
        if len(shapes) != 1:
            raise LayoutMismatch(f"all layers have one shape, dtype and device, not {shapes}")
        first = tensors[0]
        if first.dim() < 3 or not math.prod(first.shape[1:]):
            raise LayoutMismatch(f"a KV tensor is (blocks, kv_heads, ...), not {tuple(first.shape)}")
        width = first.element_size()
        if width not in _INTEGERS:
            raise LayoutMismatch(f"elements have 1, 2, 4 or 8 bytes; {first.dtype} has {width}")
        integer = _INTEGERS[max(w for w in _INTEGERS if w == width or all(_can_be_viewed(t, w) for t in tensors))]
        layers = tuple(tensor.detach().view(integer) for tensor in tensors)
        return cls(layers, first.shape[1], math.prod(first.shape[2:]) * first.element_size())

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.layers[0].device


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a chunk: `layers` layers from `layer`, `heads` heads from `head`, of the blocks `block_ids`.

    `start`: byte of the dense memory where its `size_bytes` begin.
    """

    block_ids: BlockIds
    layer: int
    layers: int
    head: int
    heads: int
    start: int
    size_bytes: int


class Mover(Protocol):
    """Gives the moves of some parts to the current stream. `dense`: uint8, one dimension, on the blocks' device.

    No two parts overlap in `dense`, and the parts lie in it in the order of the sequence.
    """

    def to_blocks(self, dense: torch.Tensor, blocks: Blocks, parts: Sequence[Part]) -> None:
        """Scatter."""

    def to_dense(self, dense: torch.Tensor, blocks: Blocks, parts: Sequence[Part]) -> None:
        """Gather."""


class TorchMover:
    """index_copy_ and index_select, a layer at a time."""

    def to_blocks(self, dense: torch.Tensor, blocks: Blocks, parts: Sequence[Part]) -> None:
        """See Mover."""
        for run in _equal_runs(parts):
            first, staged, ids = run[0], _staged(dense, blocks, run), _ids(run, blocks.device)
            for place in range(first.layers):
                heads = blocks.layers[first.layer + place].narrow(1, first.head, first.heads)
                heads.index_copy_(0, ids, staged[:, place].flatten(0, 1))

    def to_dense(self, dense: torch.Tensor, blocks: Blocks, parts: Sequence[Part]) -> None:
        """See Mover."""
        for run in _equal_runs(parts):
            first, staged, ids = run[0], _staged(dense, blocks, run), _ids(run, blocks.device)
            for place in range(first.layers):
                heads = blocks.layers[first.layer + place].narrow(1, first.head, first.heads)
                staged[:, place].copy_(heads.index_select(0, ids).view(staged[:, place].shape))


def on_device(values: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The array on the device. To CUDA through pinned memory, which torch keeps until the copy has ended."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _can_be_viewed(tensor: torch.Tensor, width: int) -> bool:
    """True if its elements can be taken together as integers of `width` bytes: there are fewer to move then."""
    size = tensor.element_size()
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return (
        width > size
        and tensor.stride(-1) == 1
        and not any(step * size % width for step in steps)
        and tensor.data_ptr() % width == 0
    )


def _equal_runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours with the same rectangle, which one call can move."""
    return [list(run) for _, run in groupby(parts, key=lambda p: (p.layer, p.layers, p.head, p.heads))]


def _staged(dense: torch.Tensor, blocks: Blocks, run: Sequence[Part]) -> torch.Tensor:
    """The run's dense memory as (parts, layers, pages, heads, *interior)."""
    first = run[0]
    memory = dense[first.start : first.start + len(run) * first.size_bytes].view(blocks.layers[0].dtype)
    return memory.view(len(run), first.layers, len(first.block_ids), first.heads, *blocks.layers[0].shape[2:])


def _ids(run: Sequence[Part], device: torch.device) -> torch.Tensor:
    return on_device(np.concatenate([part.block_ids for part in run]).astype(np.int64, copy=False), device)
