"""A node on disks that fill up, fail, get slow or are pulled out, and on files that it must not take (F12, F13)."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import NodeSettings
from kvstore.errors import ConfigurationError, KvStoreError
from kvstore.model.values import MissReason
from tests.chaos import fuse_disk
from tests.chaos.fuse_disk import FuseDisk
from tests.chaos.node_thread import NodeThread
from tests.chaos.pool_processes import Processes, stats_of, until
from tests.chaos.test_ssd_limits import mounted
from tests.chaos.tier_node import SLOT_BYTES, WAIT_S, TierNode
from tests.unit.node.tiered_node import IO_WAYS

needs_fuse = pytest.mark.skipif(bool(fuse_disk.missing()), reason=f"no FUSE disk: {fuse_disk.missing()}")


# --- the FUSE stand-in ---------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FuseDisk]:
    with FuseDisk(tmp_path) as disk:
        yield disk


@pytest.fixture(params=IO_WAYS)
def node(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: FuseDisk
) -> Iterator[TierNode]:
    node = TierNode(tmp_path, monkeypatch, ssd_path=disk.path, ssd_io=request.param)
    yield node
    node.close()


def serves_from_dram(node: TierNode) -> None:
    for number in range(2000, 2012):
        keys = node.write(number, 8)
        assert node.read(keys).chunks == 8
        node.check()


@needs_fuse
def test_a_node_whose_disk_is_pulled_out_lives_on_and_loses_no_promise_silently(node: TierNode, disk: FuseDisk) -> None:
    on_ssd, hot = node.on_ssd(1, 4), node.saved(2, 4)
    disk.vanish()
    result = node.read(on_ssd)
    assert (result.chunks, result.reason) == (0, MissReason.TIER_FAILED)
    assert node.read(hot).chunks == 4
    serves_from_dram(node)
    assert node.cache.persist(node.write(3, 4), deadline_s=WAIT_S) == (0, "ssd_error")
    assert node.stats()["ssd_failures"] == 1


@needs_fuse
def test_a_node_on_a_disk_that_is_pulled_out_in_the_middle_of_a_write(node: TierNode, disk: FuseDisk) -> None:
    disk.tell("stop write")
    keys = node.write(1, 8)
    disk.wait_stopped()
    serves_from_dram(node)
    disk.vanish()
    until(lambda: node.call(lambda: node.core.pool.ssd) is None)
    assert node.cache.persist(keys, deadline_s=WAIT_S) == (0, "ssd_error")
    serves_from_dram(node)


@needs_fuse
def test_a_read_that_stands_still_holds_neither_the_node_nor_its_dram(node: TierNode, disk: FuseDisk) -> None:
    on_ssd = node.on_ssd(1, 1)
    node.settle()
    disk.tell("stop read")
    result = node.read(on_ssd, deadline_s=0.3)
    assert (result.chunks, result.reason) == (0, MissReason.DEADLINE)
    disk.wait_stopped()
    assert node.call(lambda: len(node.core.own_slots)) == 1, "the disk may still write there"
    for number in range(2000, 2004):
        keys = node.write(number, 8)
        assert node.read(keys).chunks == 8
        node.check()
    disk.tell("ok")
    until(lambda: node.call(lambda: not node.core.own_slots))
    assert node.read(on_ssd).chunks == 1
    node.check()


@needs_fuse
def test_a_slow_disk_is_only_slow(node: TierNode, disk: FuseDisk) -> None:
    disk.tell("slow 0.01")
    for number in range(3):
        keys = node.on_ssd(number, 4)
        assert node.read(keys).ssd_tokens == 64
        node.check()


@needs_fuse
def test_a_disk_that_is_full_for_a_while(node: TierNode, disk: FuseDisk) -> None:
    kept = node.saved(1, 4)
    disk.tell("full")
    keys = node.write(2, 4)
    assert node.cache.persist(keys, deadline_s=WAIT_S) == (0, "ssd_full")
    node.check()
    serves_from_dram(node)
    node.check()
    disk.tell("ok")
    assert node.call(lambda: node.tiers._saver._unbacked)
    node.call(lambda: setattr(node.tiers._saver, "_full_until_s", 0.0))  # 30 s later
    until(lambda: not node.call(lambda: node.tiers._saver._unbacked))
    node.check()
    node.saved(3, 4)
    assert node.read(kept).chunks in (0, 4) and "ssd_failures" not in node.stats()


# --- quotas and tiny disks -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ssd_io", IO_WAYS)
def test_a_limit_of_file_sizes_that_comes_while_the_node_runs(processes: Processes, ssd_io: str) -> None:
    """As a quota does: the part of the file beyond it takes nothing more, the rest serves on."""
    path = processes.folder / "pages.kvssd"
    node = processes.node(dram=512 << 10, ssd=f"{path}:4MiB", slots=4096, ssd_io=ssd_io)
    client = processes.client(node)
    assert client.do("write", prompt=0, chunks=8)["stored"] == 8
    until(lambda: stats_of(node).get("saves", 0) == 8)
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (512 << 10, 4 << 20))
    for prompt in range(1, 20):
        until(lambda prompt=prompt: client.do("write", prompt=prompt, chunks=8).get("stored") == 8)
    until(lambda: stats_of(node).get("ssd_disk_full", 0) > 0)
    stats = until(lambda: (found := stats_of(node)).get("saves", 0) > (400 << 10) // SLOT_BYTES and found)
    assert "ssd_failures" not in stats
    hits = [client.do("read", prompt=prompt, chunks=8) for prompt in range(20)]
    assert not any(hit["wrong"] for hit in hits) and hits[19]["chunks"] == 8
    assert node.terminate() == 0
    again = processes.node(dram=512 << 10, ssd=f"{path}:4MiB", slots=4096)
    assert stats_of(again)["recovered_ssd_chunks"] > 0
    assert not any(client.do("read", prompt=prompt, chunks=8).get("wrong") for prompt in range(20))


@pytest.mark.parametrize("ssd_io", IO_WAYS)
def test_a_tmpfs_too_small_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ssd_io: str
) -> None:
    """Without room for a superblock the start is refused; with room for little more the node lives by its DRAM."""
    (tmp_path / "tiny").mkdir()
    with mounted(tmp_path / "tiny", "-t", "tmpfs", "-o", "size=32k", "none") as folder:
        (folder / "other").write_bytes(bytes(32 << 10))
        with pytest.raises(KvStoreError, match=r"No space left on device.*free some"):
            NodeThread(tmp_path, ssd=f"{folder / 'ssd'}:4MiB")
        (folder / "other").unlink()
        node = TierNode(tmp_path, monkeypatch, ssd_path=folder / "ssd", ssd_io=ssd_io)
        assert "less free than --ssd names" in caplog.text
        assert node.cache.persist(node.write(1, 8), deadline_s=WAIT_S)[1] == "ssd_full"
        serves_from_dram(node)
        assert "ssd_failures" not in node.stats()
        node.close()


# --- files that it must not take -----------------------------------------------------------------------------


def refusal(tmp_path: Path, ssd: str, node_id: str = "tiers") -> str:
    with pytest.raises(ConfigurationError) as caught:
        NodeThread(tmp_path, 1 << 20, node_id, ssd=ssd)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_a_file_that_is_foreign_damaged_too_small_or_in_use_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = TierNode(tmp_path, monkeypatch)
    node.saved(1, 4)
    path = node.path
    other = tmp_path / "other"
    other.mkdir()
    assert "another process uses it" in refusal(other, f"{path}:4MiB")
    node.close()
    assert "belongs to node tiers, and this is node someone" in refusal(other, f"{path}:4MiB", "someone")
    before = path.read_bytes()
    assert "128" in refusal(tmp_path, f"{path}:128KiB") or "139264" in refusal(tmp_path, f"{path}:128KiB")
    (tmp_path / "text").write_text("something of somebody's " * 1000)
    assert "is no SSD file of a node" in refusal(tmp_path, f"{tmp_path / 'text'}:4MiB")
    assert "does not exist; make it" in refusal(tmp_path, f"{tmp_path / 'no' / 'folder' / 'ssd'}:4MiB")
    assert path.read_bytes() == before
    again = TierNode(tmp_path, monkeypatch)
    assert again.read(again.keys(1, 4)).chunks == 4
    again.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ssd": "/somewhere"}, "PATH:SIZE; write for example"),
        ({"ssd": "/somewhere:0"}, "not a size above 0"),
        ({"ssd": "/somewhere:many"}, "not a size above 0"),
        ({"quotas": "acme:drum=1GiB..2GiB"}, "is not a quota; write for example"),
        ({"quotas": "acme:dram=2GiB..1GiB"}, "the minimum of dram is above its maximum"),
        ({"quotas": "dram=1GiB..2GiB"}, "is not a quota"),
    ],
)
def test_f13_an_impossible_value_is_refused_with_an_example(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NodeSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"eviction": "lur"}, "unknown eviction policy 'lur'.*(known|did you mean).*lru"),
        ({"ssd_admission": "second-touch"}, "unknown ssd_admission 'second-touch'.*second_touch"),
        ({"ssd_io": "io_uring"}, "unknown ssd_io 'io_uring'; known: auto, threads, nixl, gds"),
        ({"ssd_io": "gds"}, "no GPU arena: use auto, threads or nixl"),
        ({"quotas": "a:dram=1MiB..;b:dram=3500KiB.."}, "the minima of DRAM are .* bytes together"),
        ({"quotas": "a:dram=1MiB..;a:ssd=1MiB.."}, "a name occurs twice"),
        ({"quotas": "a:ssd=1GiB.."}, "the minima of SSD are"),
    ],
)
def test_f12_a_setting_that_would_do_nothing_refuses_the_start(
    tmp_path: Path, settings: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        NodeThread(tmp_path, 4 << 20, ssd=f"{tmp_path / 'ssd'}:4MiB", **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--ssd-admision", "always"), "--ssd-admission"),
        (("--ssd", "/somewhere"), "PATH:SIZE"),
        (("--ssd", "/no/such/folder/ssd:4MiB"), "does not exist; make it"),
    ],
)
def test_f13_the_command_says_it_in_one_line(tmp_path: Path, flags: tuple[str, ...], text: str) -> None:
    places = ("--socket-dir", str(tmp_path), "--data-dir", str(tmp_path), "--metrics-address", "")
    command = [str(Path(sys.executable).with_name("kvstore")), "node", "--control-address", "127.0.0.1:0", *places]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0 and text in done.stderr and "Traceback" not in done.stderr
