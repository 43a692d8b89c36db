"""The arena suite over all arenas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.node.arena import Arena
from kvstore.node.arena.dram import DramArena
from kvstore.node.arena.gpu import GpuArena
from kvstore.node.arena.ssd import LEAST_ROOM_BYTES, SsdArena
from kvstore.node.arena.ssd_format import region_bytes_of
from kvstore.node.memory import UNIT_BYTES
from tests.contract.arena_suite import UNITS, ArenaSuite

SIZE_BYTES = 2 * UNITS * UNIT_BYTES
SUPERBLOCKS_BYTES = 2 * region_bytes_of(0)


class TestDram(ArenaSuite):
    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        with closing(DramArena(SIZE_BYTES)) as arena:
            yield arena


class TestSsd(ArenaSuite):
    start = SUPERBLOCKS_BYTES

    @pytest.fixture
    def arena(self, tmp_path: Path) -> Iterator[Arena]:
        size_bytes = SUPERBLOCKS_BYTES + max(SIZE_BYTES, LEAST_ROOM_BYTES)
        with SsdArena.open(tmp_path / "ssd", size_bytes, "suite", 1) as arena:
            assert arena.slots_start == self.start
            yield arena


class TestGpuOnTheCpu(ArenaSuite):
    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        with closing(GpuArena(SIZE_BYTES, "cpu")) as arena:
            yield arena


@pytest.mark.gpu
class TestGpuOnCuda(ArenaSuite):
    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        with closing(GpuArena(SIZE_BYTES, "cuda:0")) as arena:
            yield arena
