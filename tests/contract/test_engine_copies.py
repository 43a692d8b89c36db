"""The copy suite over all copies: numpy on the CPU, torch on any device, the kernel on CUDA and its text on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine_adapter.copy import PagedKv
from engine_adapter.device_copy import DeviceCopier, DevicePagedKv
from engine_adapter.kernels import KernelMover, move_head_pages
from engine_adapter.movers import Mover, TorchMover
from kvstore.errors import InvalidRequest, LimitExceeded
from tests.contract.copy_suite import CHUNKS, LAYERS, PAGES, CopySuite, StridedCopySuite, pool_bytes, random_blocks, raw
from tests.unit.engine_adapter.kernel_text import TextKernel


class TestPagedKv(CopySuite):
    def make(
        self,
        tensors: Sequence[torch.Tensor],
        pages: int,
        block_ids: Sequence[Sequence[int]],
        layer_offset: int = 0,
        head_offset: int = 0,
    ) -> PagedKv:
        return PagedKv(tensors, pages, block_ids, layer_offset, head_offset)


class TestPagedKvInRows(TestPagedKv):
    """Items as rows of bytes, as long ones are."""

    @pytest.fixture(autouse=True)
    def rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine_adapter.copy.ROW_BYTES", 1)


class DeviceCopySuite(StridedCopySuite):
    staging_bytes = 1 << 20

    def mover(self) -> Mover:
        return TorchMover()

    def make(
        self,
        tensors: Sequence[torch.Tensor],
        pages: int,
        block_ids: Sequence[Sequence[int]],
        layer_offset: int = 0,
        head_offset: int = 0,
    ) -> DevicePagedKv:
        copier = DeviceCopier(self.device, mover=self.mover(), staging_bytes=self.staging_bytes)
        return DevicePagedKv(tensors, pages, block_ids, layer_offset, head_offset, copier=copier)


class TestTorch(DeviceCopySuite):
    pass


class TestTorchWithLittleStaging(DeviceCopySuite):
    """Two layers of a chunk fit, so that whole chunks go in parts."""

    staging_bytes = 2 * PAGES * 4 * 64

    def test_a_layer_that_does_not_fit_is_refused_with_both_sizes(self) -> None:
        tensors = self.poisoned()
        kv = DevicePagedKv(tensors, PAGES, random_blocks(), copier=DeviceCopier("cpu", staging_bytes=256))
        kv.scatter(0, pool_bytes()[0], 0, 0)
        with pytest.raises(LimitExceeded, match=r"512 bytes.* 256"):
            kv.synchronize()


class TestKernelText(DeviceCopySuite):
    def mover(self) -> Mover:
        return KernelMover(TextKernel(move_head_pages))


@pytest.mark.gpu
class TestTorchOnCuda(DeviceCopySuite):
    device = torch.device("cuda", 0)


@pytest.mark.gpu
class TestKernelOnCuda(DeviceCopySuite):
    device = torch.device("cuda", 0)

    def mover(self) -> Mover:
        if not KernelMover.available(self.device):
            pytest.skip("Triton is not installed")
        return KernelMover()


def test_two_requests_share_a_copier() -> None:
    copier, pool, blocks = DeviceCopier("cpu"), pool_bytes(), random_blocks()
    tensors = CopySuite().poisoned()
    one = DevicePagedKv(tensors, PAGES, blocks[:2], copier=copier)
    other = DevicePagedKv(tensors, PAGES, blocks[2:], copier=copier)
    for index in range(CHUNKS):
        kv, place = (one, index) if index < 2 else (other, index - 2)
        kv.scatter(place, pool[index], 0, 0)
    other.synchronize()
    one.synchronize()
    for index, ids in enumerate(blocks):
        assert all(np.array_equal(raw(tensors[layer])[ids], pool[index, layer]) for layer in range(LAYERS))


def test_kv_elsewhere_than_its_copier_or_than_the_cpu_copy_is_refused() -> None:
    tensors = [torch.zeros((4, 2, 64), dtype=torch.uint8, device="meta")]
    with pytest.raises(InvalidRequest, match="meta"):
        DevicePagedKv(tensors, 2, [[0, 1]], copier=DeviceCopier("cpu"))
    with pytest.raises(InvalidRequest, match="DevicePagedKv"):
        PagedKv(tensors, 2, [[0, 1]])
