"""Reads layer by layer: the choice of mode, the cut into groups, and that what is told is there, from every source."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client import Cache, Client, LayerRead, LayersReady, TransferMode, connect, copiers
from kvstore.client.layers import choose, layer_groups
from kvstore.client.local import read_local
from kvstore.errors import DeadlineExceeded, InvalidRequest, LayoutMismatch
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.values import MissReason
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import LAYOUT, MIB, POISON, Bytes, namespace, pages_of, poisoned, prompt
from tests.unit.client.test_remote_read import AlwaysThere, reader_of

CHUNKS = 4
SPACE = namespace("layers", MIB)
"""A layer of a chunk has 128 KiB."""
LAYERS = MIB.layers


@pytest.fixture
def local() -> Iterator[Client]:
    with kvstore.open_local("16MiB") as client:
        yield client


@pytest.fixture
def far(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, 16 << 20, node_id="far")
    yield node
    node.stop()


def written(cache: Cache, chunks: int = CHUNKS, number: int = 1) -> tuple[Any, Bytes]:
    keys = cache.keys(prompt(number, 64 * chunks))
    pages = pages_of(keys, cache.layout)
    cut = cache.rectangle
    mine = pages[:, cut.layer_start : cut.layer_stop, :, cut.head_start : cut.head_stop]
    assert cache.write(keys, mine).visible == chunks
    return keys, pages


def followed(read: LayerRead, target: Bytes, pages: Bytes, first_layer: int = 0) -> list[LayersReady]:
    """All that is told; everything that is told of is there when it is told."""
    told = []
    for ready in read:
        layers = slice(ready.layer_start - first_layer, ready.layer_stop - first_layer)
        assert np.array_equal(target[: ready.chunks, layers], pages[: ready.chunks, layers]), ready
        told.append(ready)
    return told


def each_layer(chunks: int = CHUNKS, start: int = 0, stop: int = LAYERS) -> list[LayersReady]:
    return [LayersReady(layer, layer + 1, chunks) for layer in range(start, stop)]


# --- choice and cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "tokens", "threshold", "chosen"),
    [
        ("auto", 511, 512, "serialized"),
        ("auto", 512, 512, "layerwise"),
        ("auto", 0, 0, "layerwise"),
        ("serialized", 1 << 20, 512, "serialized"),
        ("layerwise", 1, 512, "layerwise"),
    ],
)
def test_auto_chooses_by_tokens(mode: str, tokens: int, threshold: int, chosen: str) -> None:
    assert choose(TransferMode(mode), tokens, threshold) == chosen


def test_the_default_threshold_is_512_tokens(local: Client) -> None:
    cache = local.bind(SPACE)
    for tokens, mode in ((511, "serialized"), (512, "layerwise")):
        keys = cache.keys(prompt(9, tokens))
        pages = pages_of(keys, MIB)
        cache.write(keys, pages)
        target = poisoned(cache, len(keys))
        with cache.read_layers(keys, target) as read:
            told = followed(read, target, pages)
            assert read.mode == mode and read.result().tokens == tokens
        assert len(told) == (LAYERS if mode == "layerwise" else 1)
    stats = local.stats()
    assert (stats["reads_layerwise"], stats["reads_serialized"], stats["reads"]) == (1, 1, 2)


@pytest.mark.parametrize("corners", [(0, 8, 0, 4), (3, 8, 1, 3), (5, 6, 0, 1)])
@pytest.mark.parametrize("at_once", [0, 1, 3, 8, 100])
def test_groups_tile_the_rectangle_in_order(corners: tuple[int, int, int, int], at_once: int) -> None:
    wanted = Rectangle(*corners)
    groups = layer_groups(MIB, wanted, at_once)
    layers = [layer for group in groups for layer in range(group.layer_start, group.layer_stop)]
    assert layers == list(range(wanted.layer_start, wanted.layer_stop))
    assert all((g.head_start, g.head_stop) == (wanted.head_start, wanted.head_stop) for g in groups)
    assert all(g.layers == (at_once or groups[0].layers) for g in groups[:-1])


def test_the_default_group_is_the_least_with_64_kib_of_a_chunk() -> None:
    assert [g.layers for g in layer_groups(MIB, MIB.whole)] == [1] * 8  # 128 KiB a layer
    assert [g.layers for g in layer_groups(MIB, Rectangle(0, 8, 0, 1))] == [2] * 4  # 32 KiB a layer
    assert [g.layers for g in layer_groups(LAYOUT, LAYOUT.whole)] == [4]  # 8 KiB in all
    with pytest.raises(InvalidRequest, match="layers_at_once"):
        layer_groups(MIB, MIB.whole, -1)


# --- right bytes when told, from every source -------------------------------------------------------------------


def test_layers_come_in_order_from_the_own_host_and_count_like_one_read(local: Client) -> None:
    cache = local.bind(SPACE)
    keys, pages = written(cache)
    core = local._host.core  # type: ignore[union-attr]
    plain = cache.read(keys, poisoned(cache, CHUNKS))
    before, target = local.stats(), poisoned(cache, CHUNKS)
    with cache.read_layers(keys, target, mode="layerwise") as read:
        assert followed(read, target, pages) == each_layer()
        assert next(read, None) is None, "it stays at its end"
        assert read.result() == plain
    assert np.array_equal(target, pages)
    assert core.stats()["touched_tokens"] == 2 * keys.token_count
    after = local.stats()
    for name in ("reads", "asked_tokens", "hit_tokens_local", "read_bytes_shm"):
        assert after[name] == 2 * before[name], name


def test_layers_come_in_order_over_tcp(far: NodeThread) -> None:
    with connect(far.info.socket_path) as writer, reader_of(far.info, staging=8 << 20) as client:
        keys, pages = written(writer.bind(SPACE))
        cache = client.bind(SPACE)
        target = poisoned(cache, CHUNKS)
        with cache.read_layers(keys, target, mode="layerwise") as read:
            assert followed(read, target, pages) == each_layer()
            result = read.result()
        assert (result.chunks, result.remote_chunks, result.reason) == (CHUNKS, CHUNKS, None)
        assert client.stats()["reads_layerwise"] == 1 and far.call(far.core.stats)["leases"] == 0
        client.staging.check()
        assert client.staging.usage().free_bytes == client.staging.total_bytes


def test_a_group_larger_than_a_batch_is_told_once(far: NodeThread) -> None:
    """Staging holds a chunk's layer or two at a time."""
    with connect(far.info.socket_path) as writer, reader_of(far.info, staging=600 << 10) as client:
        keys, pages = written(writer.bind(SPACE), 6)
        cache = client.bind(SPACE)
        target = poisoned(cache, 6)
        with cache.read_layers(keys, target, mode="layerwise", layers_at_once=3) as read:
            told = followed(read, target, pages)
        assert told == [LayersReady(0, 3, 6), LayersReady(3, 6, 6), LayersReady(6, 8, 6)]


def mixed(tmp_path: Path, far: NodeThread, here: int) -> tuple[NodeThread, Client, Any, Bytes]:
    """A near node with the first `here` chunks of what the far one has, and a client of both."""
    near = NodeThread(tmp_path, 16 << 20, node_id="near")
    with connect(far.info.socket_path) as writer:
        keys, pages = written(writer.bind(SPACE))
    client = connect(near.info.socket_path)
    client._index = AlwaysThere(infos=[far.info])
    client.bind(SPACE).write(keys.slice(0, here), pages[:here])
    return near, client, keys, pages


@pytest.mark.parametrize("here", [1, CHUNKS - 1])
def test_what_is_local_comes_first_and_the_rest_layer_by_layer(tmp_path: Path, far: NodeThread, here: int) -> None:
    near, client, keys, pages = mixed(tmp_path, far, here)
    cache, target = client.bind(SPACE), poisoned(client.bind(SPACE), CHUNKS)
    with cache.read_layers(keys, target, mode="layerwise") as read:
        assert followed(read, target, pages) == each_layer()
        result = read.result()
    assert (result.local_chunks, result.remote_chunks, result.reason) == (here, CHUNKS - here, None)
    assert np.array_equal(target, pages)
    client.close()
    near.stop()


@pytest.mark.parametrize("source", ["local", "tcp"])
@pytest.mark.parametrize("corners", [(0, 8, 1, 3), (2, 7, 0, 4), (4, 8, 2, 4), (3, 5, 3, 4)])
def test_readers_of_other_cuts_follow_their_own_layers(
    far: NodeThread, source: str, corners: tuple[int, int, int, int]
) -> None:
    """Written by two stages of two ranks, read by any rectangle."""
    geometry, part = Geometry.parallel(MIB, tp=2, pp=2), Rectangle(*corners)
    with connect(far.info.socket_path) as writer:
        for rank in range(4):
            keys, pages = written(writer.bind(SPACE, geometry=geometry, rank=rank))
        wanted = pages[:, part.layer_start : part.layer_stop, :, part.head_start : part.head_stop]
        with reader_of(far.info, staging=8 << 20) as away:
            cache = (writer if source == "local" else away).bind(SPACE)
            target = poisoned(cache, CHUNKS, part)
            with cache.read_layers(keys, target, mode="layerwise", layers_at_once=2, rectangle=part) as read:
                told = followed(read, target, wanted, part.layer_start)
                assert read.result().chunks == CHUNKS
    starts = list(range(part.layer_start, part.layer_stop, 2))
    assert told == [LayersReady(start, min(start + 2, part.layer_stop), CHUNKS) for start in starts]
    assert np.array_equal(target, wanted)


def test_a_chunk_that_is_not_covered_is_never_told_of(local: Client) -> None:
    """Only the first stage has written: its layers are there, but no chunk is a hit."""
    geometry = Geometry.parallel(MIB, pp=2)
    keys, _ = written(local.bind(SPACE, geometry=geometry, rank=0))
    cache = local.bind(SPACE)
    target = poisoned(cache, CHUNKS)
    with cache.read_layers(keys, target, mode="layerwise") as read:
        assert list(read) == [] and read.result() == cache.read(keys, poisoned(cache, CHUNKS))
        assert read.result().chunks == 0
    assert (target == POISON).all()


@pytest.mark.parametrize("source", ["local", "tcp"])
def test_what_is_not_whole_is_told_at_the_end_and_equals_a_read(far: NodeThread, source: str) -> None:
    with connect(far.info.socket_path) as writer, reader_of(far.info, staging=8 << 20) as away:
        _, pages = written(writer.bind(SPACE), 2)
        longer = writer.bind(SPACE).keys(prompt(1, 64 * 5))
        cache = (writer if source == "local" else away).bind(SPACE)
        target = poisoned(cache, 5)
        with cache.read_layers(longer, target, mode="layerwise") as read:
            assert followed(read, target, pages) == [LayersReady(0, LAYERS, 2)]
            assert read.result() == cache.read(longer, poisoned(cache, 5))
        assert (target[2:] == POISON).all()


def test_nothing_wanted_and_nothing_found_end_at_once(local: Client) -> None:
    cache = local.bind(SPACE)
    for keys in (cache.keys([]), cache.keys(prompt(3, 64))):
        with cache.read_layers(keys, poisoned(cache, len(keys)), mode="layerwise") as read:
            assert list(read) == [] and read.result().chunks == 0
    assert read.result().reason is MissReason.ABSENT


def test_wrong_arguments_are_told_before_anything_runs(local: Client) -> None:
    cache = local.bind(SPACE)
    keys = cache.keys(prompt(1, 64))
    with pytest.raises(InvalidRequest, match="serialized, layerwise, auto"):
        cache.read_layers(keys, poisoned(cache, 1), mode="eager")
    with pytest.raises(InvalidRequest, match="layers_at_once"):
        cache.read_layers(keys, poisoned(cache, 1), layers_at_once=-1)
    with pytest.raises(LayoutMismatch):
        cache.read_layers(keys, poisoned(cache, 1), rectangle=Rectangle(0, 9, 0, 4))


def test_a_closed_pool_misses() -> None:
    client = kvstore.open_local("4MiB")
    cache = client.bind(SPACE)
    keys = cache.keys(prompt(1, 64))
    client.close()
    read = cache.read_layers(keys, cache.empty(1))
    assert list(read) == [] and read.result().reason is MissReason.SESSION_LOST
    assert client._readers is None


# --- a chunk that goes under the copy ---------------------------------------------------------------------------


def test_a_chunk_that_goes_between_two_groups_no_longer_counts(local: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told stays right; the layers left are told for the chunks that count."""
    cache = local.bind(SPACE)
    keys, pages = written(cache)

    def copy(host: Any, layout: Any, rest: Any, group: Rectangle, *others: Any, **named: Any) -> Any:
        if group.layer_start == 5:
            assert cache.remove(keys.slice(3, 4)) == 1
        return read_local(host, layout, rest, group, *others, **named)

    monkeypatch.setattr("kvstore.client.reading.read_local", copy)
    target = poisoned(cache, CHUNKS)
    with cache.read_layers(keys, target, mode="layerwise") as read:
        told = followed(read, target, pages)
        result = read.result()
    assert told == [*each_layer(stop=5), LayersReady(5, LAYERS, 3)]
    assert (result.chunks, result.local_chunks, result.reason) == (3, 3, MissReason.ABSENT)
    assert result.bytes_by_path == {"shm": 3 * MIB.chunk_bytes}
    assert np.array_equal(target[:3], pages[:3])


# --- giving up --------------------------------------------------------------------------------------------------


class Held:
    """A destination whose pieces of one layer wait until they are let go; `begun` when `threads` of them do."""

    def __init__(self, array: Bytes, layer: int, threads: int = 1) -> None:
        self.array, self._layer = array, layer
        self.scatters_at_once = threads > 1
        self._waiting = threading.Semaphore(threads - 1)
        self.begun, self.go = threading.Event(), threading.Event()

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        if layer_start == self._layer:
            if not self._waiting.acquire(blocking=False):
                self.begun.set()
            assert self.go.wait(20)
        self.array[index, layer_start : layer_start + len(piece)] = piece


@pytest.mark.parametrize(("source", "threads"), [("local", 1), ("local", 2), ("tcp", 1)])
def test_a16_nothing_is_written_into_the_pages_after_an_early_close(
    far: NodeThread, source: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gives the request up in the middle, and its pages to another request."""
    monkeypatch.setattr(copiers, "PIECE_BYTES", 1)
    monkeypatch.setattr(copiers, "SHARE_BYTES", 1)
    with connect(far.info.socket_path, copy_threads=2) as writer, reader_of(far.info, staging=8 << 20) as away:
        keys, _ = written(writer.bind(SPACE))
        client = writer if source == "local" else away
        cache = client.bind(SPACE)
        held = Held(poisoned(cache, CHUNKS), 3, threads)
        closed = threading.Event()
        with cache.read_layers(keys, held, mode="layerwise") as read:
            assert next(read) == LayersReady(0, 1, CHUNKS)
            assert held.begun.wait(20)
            closer = threading.Thread(target=lambda: (read.close(), closed.set()))
            closer.start()
            assert not closed.wait(0.05), "the pieces that are being written are waited for"
            held.go.set()
            closer.join(20)
            assert closed.is_set()
            held.array[:] = POISON
            assert list(read) == [] and (read.result().chunks, read.result().reason) == (0, MissReason.DEADLINE)
        client.readers().shutdown()  # its threads have ended
        client.copiers.close()
        assert (held.array == POISON).all()
        client.staging.check()
        assert client.staging.usage().free_bytes == client.staging.total_bytes
        assert client.stats()["reads"] == 1
    assert far.call(far.core.stats)["leases"] == 0


def test_a_read_that_was_done_is_not_given_up_by_its_close(local: Client) -> None:
    cache = local.bind(SPACE)
    keys, _ = written(cache)
    with cache.read_layers(keys, poisoned(cache, CHUNKS), mode="layerwise") as read:
        result = read.result()
    read.close()
    assert read.result() == result and result.chunks == CHUNKS
    assert list(read) == each_layer(), "what was told before the end may still be looked at"


def test_waits_end_with_the_deadline(local: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.layers.LATE_S", 0.0)
    cache = local.bind(SPACE)
    keys, _ = written(cache)
    held = Held(poisoned(cache, CHUNKS), layer=0)
    read = cache.read_layers(keys, held, mode="layerwise", deadline_s=60.0)
    assert held.begun.wait(20)
    with pytest.raises(DeadlineExceeded):
        read.result(deadline_s=0.01)
    threading.Timer(0.3, held.go.set).start()  # closing waits for the piece
    read._end_s = 0.0
    assert list(read) == [] and read.result().reason is MissReason.DEADLINE


def test_a_deadline_that_has_passed_is_a_reason(local: Client) -> None:
    cache = local.bind(SPACE)
    keys, _ = written(cache)
    with cache.read_layers(keys, poisoned(cache, CHUNKS), mode="layerwise", deadline_s=0.0) as read:
        assert list(read) == [] and read.result().reason is MissReason.DEADLINE


@pytest.mark.parametrize("source", ["local", "tcp"])
def test_an_error_of_the_destination_reaches_the_caller(far: NodeThread, source: str) -> None:
    class Broken:
        def scatter(self, index: int, piece: object, layer_start: int, head_start: int) -> None:
            if layer_start == 2:
                raise RuntimeError("no such block")

    with connect(far.info.socket_path) as writer, reader_of(far.info, staging=8 << 20) as away:
        keys, _ = written(writer.bind(SPACE))
        cache = (writer if source == "local" else away).bind(SPACE)
        with cache.read_layers(keys, Broken(), mode="layerwise") as read:
            with pytest.raises(RuntimeError, match="no such block"):
                list(read)
            with pytest.raises(RuntimeError, match="no such block"):
                read.result()
        assert away.staging.usage().free_bytes == away.staging.total_bytes


def test_many_layer_reads_at_once_share_the_clients_threads(far: NodeThread) -> None:
    """More than there are threads for: they wait for their turn and all end."""
    with connect(far.info.socket_path) as writer, reader_of(far.info, staging=2 << 20) as client:
        keys, pages = written(writer.bind(SPACE))
        cache = client.bind(SPACE)
        targets = [poisoned(cache, CHUNKS) for _ in range(12)]
        reads = [cache.read_layers(keys, target, mode="layerwise", deadline_s=20.0) for target in targets]
        for read, target in zip(reads, targets, strict=True):
            assert followed(read, target, pages) == each_layer()
            assert read.result().chunks == CHUNKS
            read.close()
