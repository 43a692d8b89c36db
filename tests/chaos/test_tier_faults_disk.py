"""A node whose disk fails, gives back other bytes or has no O_DIRECT (B06, F07, G06)."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import metrics
from kvstore.errors import StorageFailed
from kvstore.model.values import MissReason
from tests.chaos.pool_processes import until
from tests.chaos.tier_node import WAIT_S, Disk, TierNode


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierNode]:
    node = TierNode(tmp_path, monkeypatch)
    yield node
    node.disk.work()
    node.close()


# --- B06, F07: the disk fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENODEV])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_b06_a_disk_that_takes_no_writes_leaves_the_dram_as_it_is(
    node: TierNode, caplog: pytest.LogCaptureFixture, call: str, number: int
) -> None:
    """Also a file system that turned read-only while the node runs."""
    kept = node.saved(1, 4)
    node.disk.fail(call, number=number)
    keys = node.write(2, 4)
    assert node.cache.persist(keys, deadline_s=WAIT_S) == (0, "ssd_error")
    until(lambda: node.call(lambda: node.core.pool.ssd) is None)
    for number in range(3, 30):
        node.write(number, 8)
        node.check()
    assert node.read(node.keys(29, 8)).chunks == 8
    assert node.read(kept).chunks in (0, 4)
    assert node.stats()["ssd_failures"] == 1
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1 and "out of service" in errors[0].getMessage()


def test_f07_when_all_ssd_transfers_fail_the_node_is_well_and_says_so(node: TierNode) -> None:
    keys, other = node.on_ssd(1, 4), node.on_ssd(2, 4)
    hot = node.write(3, 4)
    node.settle()
    counted = metrics.MISSES.labels("tier_failed")._value.get()
    node.disk.fail("preadv", "pwritev", "fdatasync")
    result = node.read(keys)
    assert (result.chunks, result.reason) == (0, MissReason.TIER_FAILED)
    until(lambda: node.call(lambda: node.core.pool.ssd) is None)
    assert (node.read(other).chunks, node.read(hot).chunks) == (0, 4)
    node.check()
    stats = node.stats()
    assert (stats["ssd_failures"], stats["acquire_miss_tier_failed"]) == (1, 1)
    assert stats["acquire_miss_tokens_tier_failed"] == 64
    assert node.client.stats()["misses_tier_failed"] == 1
    until(lambda: metrics.MISSES.labels("tier_failed")._value.get() > counted)
    assert node.cache.persist(hot) == (0, "ssd_error")
    with pytest.raises(StorageFailed, match="may be found again after a restart"):
        node.cache.remove(hot)
    assert node.read(hot).chunks == 0
    node.write(1, 4)
    assert node.read(keys).chunks == 4, "stored anew in DRAM"


def test_a_flipped_byte_on_the_ssd_is_a_miss_and_the_good_copy_in_dram_is_saved_again(node: TierNode) -> None:
    keys = node.on_ssd(1, 4)
    slot = next(iter(node.chunks(keys)[2].ssd.values())).slot
    with node.path.open("r+b") as file:
        file.seek(slot * 4096 + 100)
        byte = file.read(1)
        file.seek(slot * 4096 + 100)
        file.write(bytes([byte[0] ^ 1]))
    result = node.read(keys)
    assert (result.chunks, result.reason) == (2, MissReason.CHECKSUM)
    until(lambda: node.call(lambda: not node.core.pool.removed_slots))
    node.check()
    assert node.places(keys) in ((2, 2), (3, 2)), "the last one, where it came first, waits for its parent"
    other = node.write(2, 80)
    until(lambda: node.places(other)[1] == 80)
    assert (node.stats()["ssd_checksum_failures"], node.stats()["acquire_miss_checksum"]) == (1, 1)
    node.write(1, 4)
    node.settle()
    node.demote(keys)
    assert node.read(keys).chunks == 4


# --- G06: no O_DIRECT ----------------------------------------------------------------------------------------


class NoDirect(Disk):
    """As some overlay file systems are."""

    def _pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super()._pwritev(fd, buffers, offset)


def test_g06_a_file_system_without_o_direct_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = TierNode(tmp_path, monkeypatch, disk=NoDirect())
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "no O_DIRECT here (Invalid argument)" in warnings[0]
    keys = node.on_ssd(1, 8)
    assert node.read(keys).chunks == 8
    node.check()
    node.close()
