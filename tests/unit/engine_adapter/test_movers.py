"""How an engine's tensors are taken: as integers as wide as strides and addresses allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_adapter.movers import Blocks
from kvstore.errors import LayoutMismatch


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def misaligned() -> torch.Tensor:
    memory = np.zeros(4 * 2 * 64 + 16, dtype=np.uint8)
    first = -memory.ctypes.data % 8 + 4
    return torch.from_numpy(memory[first : first + 4 * 2 * 64]).view(4, 2, 64)


@pytest.mark.parametrize(
    ("tensor", "integer"),
    [
        (bf16(4, 2, 8, 16), torch.int64),
        (bf16(4, 2, 8, 18), torch.int32),
        (bf16(4, 2, 8, 17), torch.int16),
        (bf16(4, 2, 16, 8).transpose(2, 3), torch.int16),
        (bf16(4, 8, 2, 16).transpose(1, 2), torch.int64),
        (bf16(4 * 2 * 16 + 2)[2:].view(4, 2, 16), torch.int32),
        (misaligned(), torch.int32),
        (torch.zeros((4, 2, 3), dtype=torch.float64), torch.int64),
    ],
)
def test_elements_are_taken_together_where_they_can_be(tensor: torch.Tensor, integer: torch.dtype) -> None:
    blocks = Blocks.of([tensor])
    assert blocks.layers[0].dtype == integer
    assert blocks.head_page_bytes == tensor[0, 0].numel() * tensor.element_size()
    assert blocks.layers[0].data_ptr() == tensor.data_ptr()


def test_what_no_integer_is_as_wide_as_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="16"):
        Blocks.of([torch.zeros((4, 2, 3), dtype=torch.complex128)])
