from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from engine_adapter import kernels
from engine_adapter.device_copy import DeviceCopier, DevicePagedKv
from engine_adapter.kernels import KernelMover, fits, launch_arguments
from engine_adapter.movers import Blocks
from tests.unit.engine_adapter.kernel_text import TextKernel

PAGES = 2


def tensors(shape: tuple[int, ...], layers: int = 2, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(layers)]


def copied(kernel: TextKernel, views: list[torch.Tensor], pool: np.ndarray, blocks: list[list[int]]) -> np.ndarray:
    """The pool's chunks scattered into the blocks by the kernel and gathered again."""
    kv = DevicePagedKv(views, PAGES, blocks, copier=DeviceCopier("cpu", mover=KernelMover(kernel)))
    for index, chunk in enumerate(pool):
        kv.scatter(index, chunk, 0, 0)
    kv.synchronize()
    back = np.zeros_like(pool)
    for index in range(len(pool)):
        kv.gather(index, back[index], 0, 0)
    kv.synchronize()
    return back


@pytest.mark.parametrize("head_page_bytes", [16, 48, 4096 + 16, 16384])
def test_head_pages_of_any_size_go_in_one_launch_a_batch(head_page_bytes: int) -> None:
    kernel, views = TextKernel(kernels.move_head_pages), tensors((6, 2, head_page_bytes))
    pool = np.random.default_rng(1).integers(0, 256, (2, 2, PAGES, 2, head_page_bytes), dtype=np.uint8)
    assert np.array_equal(copied(kernel, views, pool, [[5, 0], [2, 3]]), pool)
    assert kernel.launches == 2
    assert np.array_equal(views[1][[2, 3]].numpy(), pool[1, 1])
    assert not views[0][[1, 4]].any()


def test_views_that_the_kernel_cannot_move_go_the_other_way() -> None:
    kernel = TextKernel(kernels.move_head_pages)
    tokens_outside = [each.transpose(1, 2) for each in tensors((6, 4, 2, 16))]
    pool = np.random.default_rng(2).integers(0, 256, (1, 2, PAGES, 2, 64), dtype=np.uint8)
    assert np.array_equal(copied(kernel, tokens_outside, pool, [[5, 1]]), pool)
    assert kernel.launches == 0


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        (tensors((4, 2, 64)), True),
        (tensors((4, 2, 8), dtype=torch.bfloat16), True),
        (tensors((4, 2, 24)), False),
        ([torch.zeros((4, 2, 72), dtype=torch.uint8)[..., :64]], False),
        ([torch.zeros((4, 2, 80), dtype=torch.uint8)[..., :64]], True),
        ([torch.zeros(4 * 2 * 64 + 8, dtype=torch.uint8)[8:].view(4, 2, 64)], False),
        ([torch.zeros((4, 2, 64), dtype=torch.uint8), torch.zeros((4, 2, 80), dtype=torch.uint8)[..., :64]], False),
    ],
)
def test_only_aligned_contiguous_head_pages_fit(views: list[torch.Tensor], expected: bool) -> None:
    assert fits(Blocks.of(views)) is expected


def test_sizes_are_in_words_and_a_tile_is_a_power_of_two() -> None:
    sizes = launch_arguments(Blocks.of([torch.zeros((4, 3, 96), dtype=torch.bfloat16)[..., :72]]))
    assert sizes == {"head_words": 24, "page_words": 18, "TILE": 32}
    assert launch_arguments(Blocks.of(tensors((1, 1, 1 << 15))))["TILE"] == 1024


@pytest.mark.slow
def test_without_triton_the_module_loads_and_says_so() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from engine_adapter.kernels import KernelMover\n"
        "print(KernelMover.available(torch.device('cuda', 0)), KernelMover.available(torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
