"""The GPU arena: limits before allocation, what a transport registers, several pieces in one call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvstore.errors import ConfigurationError
from kvstore.node.arena.gpu import GpuArena, device_free_bytes
from kvstore.node.memory import UNIT_BYTES
from tests.contract.arena_suite import contents, pages

GIB = 1 << 30


def test_c07_too_much_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **more: object) -> torch.Tensor:
        raise AssertionError("it was allocated")

    monkeypatch.setattr(torch, "zeros", never)
    with pytest.raises(ConfigurationError) as refused:
        GpuArena(4 * GIB, "cpu", free_bytes=lambda device: 3 * GIB)
    for part in (f"{4 * GIB} bytes", f"{3 * GIB} are free", "on cpu", "whole node", "not for each rank"):
        assert part in str(refused.value)


def test_memory_that_went_meanwhile_is_the_same_refusal() -> None:
    with pytest.raises(ConfigurationError, match="GPU tier wants"):
        GpuArena(1 << 60, "cpu", free_bytes=lambda device: 1 << 62)


@pytest.mark.parametrize("size_bytes", [0, UNIT_BYTES - 1])
def test_less_than_a_unit_is_refused(size_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 4096"):
        GpuArena(size_bytes, "cpu")


@pytest.mark.parametrize(("device", "reason"), [("meta", "not on meta"), ("cuda:99", "no cuda:99")])
def test_a_device_that_is_not_there_is_named(device: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        GpuArena(UNIT_BYTES, device)


def test_free_memory_of_the_cpu_is_what_the_dram_tier_counts_on() -> None:
    assert 0 < device_free_bytes(torch.device("cpu")) < 1 << 50


def test_what_a_transport_registers() -> None:
    arena = GpuArena(3 * UNIT_BYTES + 1, "cpu")
    assert arena.address % UNIT_BYTES == 0 and arena.address == arena.memory.data_ptr()
    assert (arena.size_bytes, len(arena.memory), arena.device_index) == (3 * UNIT_BYTES, 3 * UNIT_BYTES, 0)
    assert not arena.memory.any(), "nothing of what lay there before"
    arena.close()
    arena.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = arena.memory


def test_several_pieces_lie_side_by_side() -> None:
    arena = GpuArena(8 * UNIT_BYTES, "cpu")
    arena.write_all(UNIT_BYTES, [contents(1), contents(2, 3), contents(3)])
    into = [pages(2), pages(3)]
    arena.read_all(UNIT_BYTES, into)
    stored = contents(1)[:] + contents(2, 3)[:] + contents(3)[:]
    assert into[0][:] + into[1][:] == stored
    arena.write_all(0, [])


def test_arenas_and_node_load_without_torch() -> None:
    code = "import sys; import kvstore.node.arena.dram, kvstore.assemble; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.gpu
def test_c07_a_device_does_not_give_more_than_it_has() -> None:
    total = torch.cuda.mem_get_info(0)[1]
    with pytest.raises(ConfigurationError, match="cuda:0"):
        GpuArena(total + UNIT_BYTES, "cuda")
