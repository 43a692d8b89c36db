"""Which way pages go to the SSD of a node: what it says of it, and a start that is refused."""

from __future__ import annotations

import importlib.metadata
import threading
from pathlib import Path

import pytest

from kvstore import metrics
from kvstore.errors import ConfigurationError
from tests.chaos.node_thread import NodeThread
from tests.chaos.tier_node import TierNode
from tests.unit.node.tiered_node import IO_WAYS

DETAILS = {"auto": ("threads",), "threads": ("threads",), "nixl": ("nixl (io_uring)", "nixl (libaio)")}


@pytest.mark.parametrize("ssd_io", ["auto", *IO_WAYS])
def test_a_node_announces_and_exports_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssd_io: str) -> None:
    node = TierNode(tmp_path, monkeypatch, ssd_io=ssd_io)
    keys = node.on_ssd(1, 4)
    assert node.read(keys).chunks == 4
    node.check()
    way = "threads" if ssd_io == "auto" else ssd_io
    assert node.node.facts["ssd_io"] in DETAILS[ssd_io]
    figures = node.call(node.tiers.figures)
    assert {name: value for name, value in figures.items() if name.startswith("ssd_io")} == {
        f"ssd_io_{each}": int(each == way) for each in ("threads", "nixl")
    }
    node.call(node.node.daemon.export)
    assert metrics.SSD_IO.labels(way)._value.get() == 1
    payload_reads = [place for place in node.disk.reads if len(place) > 4096]
    assert bool(payload_reads) == (way == "threads"), "nothing else reads whole slots"
    node.close()
    assert not any(thread.name == "kvstore-ssd-nixl" for thread in threading.enumerate())


def test_without_an_ssd_there_is_no_way(tmp_path: Path) -> None:
    node = NodeThread(tmp_path)
    assert node.facts["ssd_io"] == ""
    node.stop()


def test_a_start_without_the_nixl_that_was_named_is_refused_and_leaves_the_file_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", missing)
        with pytest.raises(ConfigurationError, match="NIXL is not installed: pip install"):
            NodeThread(tmp_path, ssd=f"{tmp_path / 'ssd'}:4MiB", ssd_io="nixl")
    node = NodeThread(tmp_path, ssd=f"{tmp_path / 'ssd'}:4MiB")
    assert node.facts["ssd_io"] == "threads"
    node.stop()
