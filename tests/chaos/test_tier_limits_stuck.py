"""A disk that stands still, or whose callers go away in the middle: what was begun ends, nothing is told too early."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.errors import DeadlineExceeded
from kvstore.model.values import MissReason
from kvstore.node import tiers
from kvstore.node.tiers import disk
from tests.chaos.pool_processes import until
from tests.chaos.tier_node import SLOT_BYTES, WAIT_S, TierNode


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierNode]:
    node = TierNode(tmp_path, monkeypatch)
    yield node
    node.disk.work()
    node.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_persist_whose_time_is_up_promises_nothing_and_ends_what_it_began(node: TierNode, call: str) -> None:
    """The call was cancelled in the middle of a write, and the chunks counted as saved: the next one promised them."""
    with node.disk.held(call) as hold:
        keys = node.write(1, 8)
        try:
            answer = node.cache.persist(keys, deadline_s=0.3)
        except DeadlineExceeded:
            answer = (0, "deadline")
        hold.wait()
        assert answer == (0, "deadline")
        assert node.places(keys) in ((8, 0), (8, 8))
        node.check()
        assert node.cache.persist(keys, deadline_s=0.3) == (0, "deadline")
    assert node.cache.persist(keys, deadline_s=WAIT_S) == (8, "")
    node.check()


def test_what_a_cut_off_persist_saved_is_found_after_a_restart(
    node: TierNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node.disk.held("pwritev"):
        keys = node.write(1, 8)
        assert node.cache.persist(keys, deadline_s=0.3) == (0, "deadline")
    assert node.cache.persist(keys, deadline_s=WAIT_S) == (8, "")
    node.close()
    again = TierNode(tmp_path, monkeypatch)
    result = again.read(keys)
    assert (result.chunks, result.ssd_tokens) == (8, 8 * 16)
    again.close()


def test_a_removal_whose_time_is_up_still_takes_the_headers_away(
    node: TierNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call was cancelled in the middle: the slots were never free again, and a restart brought the pages back."""
    keys = node.saved(1, 8)
    with node.disk.held("pwritev") as hold:
        with pytest.raises(DeadlineExceeded):
            node.cache.remove(keys, deadline_s=0.3)
        hold.wait()
        node.check()
        assert node.read(keys, deadline_s=1.0).chunks == 0
    node.settle()
    node.check()
    assert node.call(lambda: node.core.pool.ssd.allocator.used_bytes) == 0
    node.close()
    again = TierNode(tmp_path, monkeypatch)
    assert again.stats()["chunks"] == 0
    again.close()


def test_everything_but_the_ssd_goes_on_while_the_disk_stands_still(node: TierNode) -> None:
    on_ssd = node.on_ssd(90, 4)
    node.settle()
    with node.disk.held("pwritev", "preadv", "fdatasync") as hold:
        node.write(1, 8)
        hold.wait()
        for number in range(2, 12):
            keys = node.write(number, 8)
            assert node.read(keys).chunks == 8
            assert node.cache.match(keys).local_chunks == 8
            node.check()
        result = node.read(on_ssd, deadline_s=0.4)
        assert (result.chunks, result.reason) == (0, MissReason.DEADLINE)
        node.check()
    node.settle()
    assert node.read(on_ssd).chunks == 4
    node.check()


def test_a_chunk_that_is_removed_while_it_is_read_back_is_absent_and_not_damaged(
    node: TierNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of the disk is a chunk here: two come, two are removed while they are read."""
    monkeypatch.setattr(disk, "JOB_BYTES", SLOT_BYTES)
    monkeypatch.setattr(disk, "LARGE_JOB_BYTES", SLOT_BYTES)
    keys = node.on_ssd(1, 4)
    places = node.offsets(keys.slice(2, 4))
    with ThreadPoolExecutor(1) as pool, node.disk.held("preadv", at=places) as hold:
        reading = pool.submit(node.read, keys)
        hold.wait()
        node.call(
            lambda: node.core.remove(
                node.core.open_session("x", shared=False).number, keys.namespace_id, list(keys)[2:]
            )
        )
        with node.path.open("r+b") as file:  # another chunk's bytes are there by now
            for offset in places:
                file.seek(offset)
                file.write(bytes(SLOT_BYTES))
        node.check()
        hold.go_on()
        result = reading.result(WAIT_S)
    assert (result.chunks, result.reason) == (2, MissReason.ABSENT)
    assert node.stats().get("ssd_checksum_failures", 0) == 0 and "differs" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_node_stops_within_its_bound_while_the_disk_stands_still(
    node: TierNode, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(tiers, "STOP_SAVING_S", 0.3)
    keys = node.on_ssd(90, 4)
    with node.disk.held(call) as hold:
        if call == "preadv":
            reading = threading.Thread(target=node.read, args=(keys,), kwargs={"deadline_s": 0.3})
            reading.start()
            hold.wait()
            reading.join(WAIT_S)
        else:
            node.write(1, 8)
            hold.wait()
        stopping = threading.Thread(target=node.close)
        stopping.start()
        stopping.join(WAIT_S)
        assert not stopping.is_alive()


def test_an_orderly_stop_saves_what_was_just_being_saved(
    node: TierNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cleaner was cut off in the middle of a batch, which then counted as saved and was lost."""
    with ThreadPoolExecutor(1) as pool, node.disk.held("pwritev") as hold:
        keys = node.write(1, 8)
        hold.wait()
        stopping = pool.submit(node.close)
        until(lambda: node.tiers._ending)
        hold.go_on()
        stopping.result(WAIT_S)
    again = TierNode(tmp_path, monkeypatch)
    assert again.read(keys).chunks == 8
    again.close()


def test_a_save_that_a_call_itself_began_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `second_touch` the cleaner leaves these chunks alone: the call whose time is up is the one that writes."""
    node = TierNode(tmp_path, monkeypatch, ssd_admission="second_touch")
    keys = node.write(1, 1)
    with node.disk.held("pwritev") as hold:
        assert node.cache.persist(keys, deadline_s=0.3) == (0, "deadline")
        hold.wait()
        node.check()
        assert node.places(keys) == (1, 0)
    until(lambda: node.places(keys) == (1, 1))
    node.check()
    assert node.cache.persist(keys, deadline_s=WAIT_S) == (1, "")
    node.close()
    again = TierNode(tmp_path, monkeypatch)
    assert again.read(keys).chunks == 1
    again.close()
