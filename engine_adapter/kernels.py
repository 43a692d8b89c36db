"""One Triton launch that moves all head pages of a batch between an engine's blocks and dense memory.

A table names each row, which is one page of one layer of one piece:

    address of its first head page in the engine | word of `dense` where it begins | its heads

The program (row, tile, head) moves `TILE` words of 8 bytes of one head page. Addresses are computed on the host, so
that layers may lie anywhere and pieces of any shape go in one launch.

The kernel has never been compiled nor run: the machine it was written on has neither CUDA nor Triton. A test executes
its text on plain memory instead; the tests with the marker `gpu` are its first run. The module can be imported without
Triton; `KernelMover.available` says whether it can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine_adapter.movers import Blocks, Part, TorchMover, on_device

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

WORD_BYTES: Final = 8
ALIGNMENT_BYTES: Final = 16
"""Head pages begin at multiples of this, so that a thread moves 16 bytes at a time."""
TILE_WORDS: Final = 1024
ROW_FIELDS: Final = 3


def move_head_pages(
    rows: Any,
    dense: Any,
    head_words: Any,
    page_words: Any,
    TO_DENSE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The kernel's text. `head_words`: from one head page to the next in the engine; `page_words`: of a head page."""
    row = rows + tl.program_id(0) * 3
    head = tl.program_id(2).to(tl.int64)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (word < page_words) & (head < tl.load(row + 2))
    blocks = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16)
    start = tl.multiple_of(tl.load(row + 1), 2)
    engine = blocks + head * head_words + word
    staged = dense + start + head * page_words + word
    if TO_DENSE:
        tl.store(staged, tl.load(engine, mask=inside), mask=inside)
    else:
        tl.store(engine, tl.load(staged, mask=inside), mask=inside)


class KernelMover:
    """One launch a batch; what the kernel cannot do goes the way of `TorchMover`."""

    def __init__(self, kernel: Any = None) -> None:
        """`kernel`: what runs `move_head_pages` instead of Triton."""
        if kernel is None and triton is not None:
            kernel = triton.jit(move_head_pages)
        self._kernel = kernel
        self._otherwise = TorchMover()

    @staticmethod
    def available(device: torch.device) -> bool:
        """True on CUDA with Triton installed."""
        return device.type == "cuda" and triton is not None

    def to_blocks(self, dense: torch.Tensor, blocks: Blocks, parts: Sequence[Part]) -> None:
        """See Mover."""
        if not self._launch(dense, blocks, parts, to_dense=False):
            self._otherwise.to_blocks(dense, blocks, parts)

    def to_dense(self, dense: torch.Tensor, blocks: Blocks, parts: Sequence[Part]) -> None:
        """See Mover."""
        if not self._launch(dense, blocks, parts, to_dense=True):
            self._otherwise.to_dense(dense, blocks, parts)

    def _launch(self, dense: torch.Tensor, blocks: Blocks, parts: Sequence[Part], *, to_dense: bool) -> bool:
        """False if the kernel cannot do it."""
        if self._kernel is None or not fits(blocks):
            return False
        rows = row_table(blocks, parts)
        arguments = launch_arguments(blocks)
        grid = (len(rows), -(-arguments["page_words"] // arguments["TILE"]), max(part.heads for part in parts))
        table = on_device(rows, blocks.device)
        self._kernel[grid](table, dense.view(torch.int64), TO_DENSE=to_dense, **arguments)
        return True


def fits(blocks: Blocks) -> bool:
    """True if head pages are contiguous and aligned; else the kernel cannot move them."""
    first = blocks.layers[0]
    width = first.element_size()
    steps = (blocks.head_page_bytes, first.stride(0) * width, first.stride(1) * width)
    return (
        not any(step % ALIGNMENT_BYTES for step in steps)
        and all(layer.stride() == first.stride() for layer in blocks.layers)
        and all(layer.data_ptr() % ALIGNMENT_BYTES == 0 for layer in blocks.layers)
        and first[0, 0].is_contiguous()
    )


def launch_arguments(blocks: Blocks) -> dict[str, int]:
    """Sizes for the kernel, in words."""
    first = blocks.layers[0]
    page_words = blocks.head_page_bytes // WORD_BYTES
    tile = min(TILE_WORDS, 1 << (page_words - 1).bit_length())
    return {"head_words": first.stride(1) * first.element_size() // WORD_BYTES, "page_words": page_words, "TILE": tile}


def row_table(blocks: Blocks, parts: Sequence[Part]) -> npt.NDArray[np.int64]:
    """(rows, ROW_FIELDS): address, first word in the dense memory, heads; a row for each page of each layer."""
    first = blocks.layers[0]
    block_bytes, head_bytes = (first.stride(place) * first.element_size() for place in (0, 1))
    bases = np.array([layer.data_ptr() for layer in blocks.layers], dtype=np.int64)
    tables = []
    for part in parts:
        table = np.empty((part.layers, len(part.block_ids), ROW_FIELDS), dtype=np.int64)
        of_layers = bases[part.layer : part.layer + part.layers, None]
        table[..., 0] = of_layers + part.block_ids * block_bytes + part.head * head_bytes
        row_words = part.heads * blocks.head_page_bytes // WORD_BYTES
        count = part.layers * len(part.block_ids)
        table[..., 1] = (part.start // WORD_BYTES + np.arange(count) * row_words).reshape(table.shape[:2])
        table[..., 2] = part.heads
        tables.append(table.reshape(count, ROW_FIELDS))
    return np.concatenate(tables)
