"""What settings amount to: the memory in all, and every bound that is in force."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import NodeSettings
from kvstore.errors import ConfigurationError
from kvstore.node.core import CoreSettings
from kvstore.node.daemon import NodeMemory
from kvstore.node.operators import limits
from kvstore.node.operators.limits import MemoryPlan, effective_limits
from tests.chaos.node_thread import NodeThread

GIB = 1 << 30


def test_c07_memory_is_refused_as_a_sum_before_anything_is_allocated() -> None:
    plan = MemoryPlan.of(4 * GIB, 65_536)
    assert plan.total_bytes == 4 * GIB + plan.catalog_bytes
    plan.check(plan.total_bytes)
    with pytest.raises(ConfigurationError) as caught:
        plan.check(plan.total_bytes - 1)
    text = str(caught.value)
    assert "whole node, not of one rank" in text and "pages 4GiB + its catalog " in text and "--dram" in text
    with pytest.raises(ConfigurationError, match="what lies on the SSD"):
        MemoryPlan.of(4 * GIB, 65_536, ssd_bytes=GIB).check(0)


def test_c07_the_daemon_refuses_before_it_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(NodeMemory, "create", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ConfigurationError, match="not of one rank"):
        NodeThread(tmp_path, dram_bytes=1 << 20)


def test_f12_every_bound_has_its_effective_value() -> None:
    found = effective_limits(1 << 20, 256, 0, CoreSettings())
    assert found["pinned_bytes"] == 256 << 10 and found["session_bytes"] == 512 << 10
    assert found["room_chunks"] == "none" and int(found["catalog_entries"]) >= 512
    assert effective_limits(1 << 20, 256, 7, CoreSettings())["room_chunks"] == 7
    assert all(value == "none" or int(value) > 0 for value in found.values())


def test_f12_a_bound_that_comes_out_as_nothing_is_an_error() -> None:
    assert effective_limits(16384, 1, 0, CoreSettings())["pinned_bytes"] == 4096
    with pytest.raises(ConfigurationError, match=r"pinned_bytes.* comes out as 4095 bytes.* use at least 16384"):
        effective_limits(16383, 1, 0, CoreSettings())
    with pytest.raises(ConfigurationError, match="session_bytes"):
        effective_limits(1 << 20, 1, 0, CoreSettings(session_share=0.0))


def test_f12_the_announcement_has_the_limits_and_the_total(tmp_path: Path) -> None:
    node = NodeThread(tmp_path, dram_bytes=1 << 20, node_id="limited")
    try:
        facts = node.facts
        assert facts["limits"] == effective_limits(1 << 20, 256, 0, CoreSettings())
        assert facts["memory_bytes"] == MemoryPlan.of(1 << 20, 256).total_bytes > facts["dram_bytes"]
        assert facts["eviction"] == NodeSettings().eviction
    finally:
        node.stop()
