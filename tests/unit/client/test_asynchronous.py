"""A14, the client's side: nothing counts, and no memory is used again, before asynchronous copies have ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache, Client, connect
from kvstore.client.reading import _Shifted
from kvstore.client.values import is_asynchronous
from kvstore.model import checksum
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Outcome
from kvstore.transport.staging import Staging, StagingBlock
from tests.chaos.node_thread import NodeThread
from tests.unit.client.fake_host import BreakableHost
from tests.unit.client.late_copies import LateCopies
from tests.unit.client.pages import LAYOUT, POISON, namespace, pages_of, poisoned, prompt


@pytest.fixture
def host() -> BreakableHost:
    return BreakableHost()


@pytest.fixture
def cache(host: BreakableHost) -> Iterator[Cache]:
    with Client(None, None, None, host=host) as client:
        yield client.bind(namespace())


def stored(cache: Cache, number: int = 1, chunks: int = 4) -> Keys:
    keys = cache.keys(prompt(number, 16 * chunks))
    assert cache.write(keys, pages_of(keys)).stored == chunks
    return keys


# --- reads ---


def test_a14_a_read_is_done_when_its_copies_are(cache: Cache) -> None:
    keys = stored(cache)
    target = poisoned(cache, len(keys))
    late = LateCopies(target, LAYOUT.whole)
    assert cache.read(keys, late).chunks == len(keys)
    assert not late.is_due
    assert np.array_equal(target, pages_of(keys))


def test_a14_the_fence_comes_after_the_copies(cache: Cache) -> None:
    """The chunks leave and their slots are filled anew while a device still copies: what it copied must not count."""
    keys = stored(cache)
    late = LateCopies(poisoned(cache, len(keys)), LAYOUT.whole)

    def refill() -> None:
        cache.remove(keys.slice(0, 1))
        stored(cache, number=2, chunks=8)

    late.before = refill
    result = cache.read(keys, late)
    assert (result.chunks, result.reason) == (0, MissReason.ABSENT)
    assert late.waits == 1


def test_a_read_whose_destination_raises_waits_for_what_it_began(cache: Cache) -> None:
    keys = stored(cache)

    class Raises(LateCopies):
        def scatter(self, index: int, piece: np.ndarray, layer_start: int, head_start: int) -> None:
            super().scatter(index, piece, layer_start, head_start)
            if index == 2:
                raise RuntimeError("full")

    late = Raises(poisoned(cache, len(keys)), LAYOUT.whole)
    with pytest.raises(RuntimeError, match="full"):
        cache.read(keys, late)
    assert not late.is_due


def test_what_begins_behind_a_delivered_prefix_is_waited_for_too(cache: Cache) -> None:
    keys = stored(cache)
    target = poisoned(cache, len(keys))
    late = LateCopies(target, LAYOUT.whole)
    rest = _Shifted(late, 1)
    assert is_asynchronous(rest)
    rest.scatter(2, pages_of(keys)[3], 0, 0)
    rest.launch()
    rest.synchronize()
    assert (late.launches, late.waits) == (1, 1)
    assert np.array_equal(target[3], pages_of(keys)[3])


# --- writes ---


@pytest.mark.parametrize("checksums", [True, False])
def test_a_commit_waits_for_the_copies_into_its_slots(host: BreakableHost, checksums: bool) -> None:
    with Client(None, None, None, host=host) as client:
        cache = client.bind(namespace(), checksums=checksums)
        keys = cache.keys(prompt(1, 64))
        source = LateCopies(pages_of(keys), LAYOUT.whole)
        host.broken.before["commit"] = lambda: _not_due(source)
        with cache.begin_write(keys) as pending:
            for layer in range(LAYOUT.layers):
                pending.put_layers(layer, layer + 1, source)
            assert source.is_due and source.launches == LAYOUT.layers and source.waits == 0, "layers overlap"
            assert pending.commit().stored == len(keys)
        target = poisoned(cache, len(keys))
        assert cache.read(keys, target).chunks == len(keys)
        assert np.array_equal(target, pages_of(keys))


def _not_due(source: LateCopies) -> None:
    assert not source.is_due, "the node was told before the copies had ended"


def test_checksums_are_those_of_the_copied_bytes(cache: Cache, host: BreakableHost) -> None:
    keys = cache.keys(prompt(1, 64))
    assert cache.write(keys, LateCopies(pages_of(keys), LAYOUT.whole)).stored == len(keys)
    found = host.reader.find(keys, LAYOUT.whole)
    for index, pages in enumerate(pages_of(keys)):
        table = checksum.table_of(pages.reshape(-1), LAYOUT, LAYOUT.whole)
        assert int(found.table_hashes[index, 0]) == checksum.table_hash(table)


def test_a13_an_abort_waits_for_the_copies_into_its_slots(cache: Cache, host: BreakableHost) -> None:
    keys = cache.keys(prompt(1, 64))
    source = LateCopies(pages_of(keys), LAYOUT.whole)
    host.broken.before["abort"] = lambda: _not_due(source)
    pending = cache.begin_write(keys)
    pending.put_layers(0, LAYOUT.layers, source)
    pending.abort()
    assert host.broken.calls[-1] == "abort"


def test_what_a_source_had_begun_before_it_failed_has_its_checksums(cache: Cache, host: BreakableHost) -> None:
    keys = cache.keys(prompt(1, 64))

    class Fails(LateCopies):
        def gather(self, index: int, slot: np.ndarray, layer_start: int, head_start: int) -> None:
            if index == 2:
                raise RuntimeError("no such block")
            super().gather(index, slot, layer_start, head_start)

    with cache.begin_write(keys) as pending:
        with pytest.raises(RuntimeError, match="no such block"):
            pending.put_layers(0, LAYOUT.layers, Fails(pages_of(keys), LAYOUT.whole))
        assert pending.commit(2).visible == 2
    found = host.reader.find(keys.slice(0, 2), LAYOUT.whole)
    for index, pages in enumerate(pages_of(keys)[:2]):
        table = checksum.table_of(pages.reshape(-1), LAYOUT, LAYOUT.whole)
        assert int(found.table_hashes[index, 0]) == checksum.table_hash(table)


def test_what_a_failed_source_wrote_never_counts(cache: Cache) -> None:
    keys = cache.keys(prompt(1, 64))
    source = LateCopies(pages_of(keys), LAYOUT.whole)

    def fail() -> None:
        raise RuntimeError("device lost")

    source.before = fail
    with cache.begin_write(keys) as pending:
        pending.put_layers(0, LAYOUT.layers, source)
        with pytest.raises(RuntimeError, match="device lost"):
            pending.commit()
        result = pending.commit()
    assert list(result.outcomes) == [Outcome.REFUSED_STALE] * len(keys)
    assert cache.read(keys, poisoned(cache, len(keys))).chunks == 0


# --- another host ---


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, node_id="far")
    yield node
    node.stop()


def test_a_staging_block_is_given_back_after_the_copies_out_of_it(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(node.info.socket_path) as near, connect(node.info.control_address, transport="tcp") as far:
        keys = stored(near.bind(namespace()), chunks=6)
        cache = far.bind(namespace())
        target = poisoned(cache, len(keys))
        late = LateCopies(target, LAYOUT.whole)
        release, released = Staging.release, []

        def poison(staging: Staging, block: StagingBlock) -> None:
            released.append(late.is_due)
            block.view[:] = POISON ^ 0xFF  # as the next batch would
            release(staging, block)

        monkeypatch.setattr(Staging, "release", poison)
        assert cache.read(keys, late).chunks == len(keys)
        assert released and not any(released)
        assert np.array_equal(target, pages_of(keys))


def test_pages_for_another_hosts_node_are_sent_when_they_are_there(node: NodeThread) -> None:
    with connect(node.info.control_address, transport="tcp") as far:
        cache = far.bind(namespace())
        keys = cache.keys(prompt(1, 64))
        assert cache.write(keys, LateCopies(pages_of(keys), LAYOUT.whole)).stored == len(keys)
        target = poisoned(cache, len(keys))
        assert cache.read(keys, target).chunks == len(keys)
        assert np.array_equal(target, pages_of(keys))
