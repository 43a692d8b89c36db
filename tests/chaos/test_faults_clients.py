"""What a client must not do to others or to itself when something ends at the wrong moment."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client import Cache
from kvstore.errors import ForkedProcess, LayoutMismatch, Unreachable
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.values import Outcome
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import LAYOUT, namespace, pages_of, poisoned, prompt

Bytes = np.ndarray


class Window:
    """A source that holds two chunks at a time, as an engine's small buffer does."""

    def __init__(self, pages: Bytes, first: int) -> None:
        self._held, self._first = pages[first : first + 2].copy(), first

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        slot[...] = self._held[(index - self._first) % 2][layer_start : layer_start + len(slot)]


@pytest.fixture
def cache() -> Iterator[Cache]:
    with kvstore.open_local("4MiB") as client:
        yield client.bind(namespace())


def test_a13_a_chunk_that_came_free_is_filled_only_from_a_source_given_for_it(cache: Cache) -> None:
    """It was filled from the last source given for other chunks: wrong bytes, with right checksums."""
    keys = cache.keys(prompt(1, 64))
    pages = pages_of(keys)
    rival = cache.begin_write(keys.slice(0, 2))
    pending = cache.begin_write(keys)
    assert pending.granted == (2, 3)
    for first in (0, 2):
        pending.put_layers(0, LAYOUT.layers, Window(pages, first), chunks=range(first, first + 2))
    rival.abort()
    assert list(pending.commit().outcomes) == [Outcome.COMMITTED] * 4
    into = poisoned(cache, 4)
    assert cache.read(keys, into).chunks == 4 and np.array_equal(into, pages)


def test_a_chunk_that_came_free_without_a_source_is_given_back(cache: Cache) -> None:
    keys = cache.keys(prompt(1, 64))
    rival = cache.begin_write(keys.slice(0, 2))
    pending = cache.begin_write(keys)
    pending.put_layers(0, LAYOUT.layers, Window(pages_of(keys), 2), chunks=[2, 3])
    rival.abort()
    assert pending.commit().visible == 0
    assert cache.begin_write(keys.slice(0, 2)).granted == (0, 1)


def in_a_child(act: object) -> int:
    """Exit status of a forked child: 0 if `act` raised ForkedProcess, 1 otherwise, negative for a signal."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        try:
            act()  # type: ignore[operator]
        except ForkedProcess:
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("embedded", [True, False])
def test_b14_a_forked_child_cannot_touch_a_write_of_its_parent(embedded: bool, tmp_path: Path) -> None:
    node = None if embedded else NodeThread(tmp_path)
    client = kvstore.open_local("4MiB") if node is None else kvstore.connect(node.info.socket_path)
    try:
        cache = client.bind(namespace())
        keys = cache.keys(prompt(1, 32))
        pages = pages_of(keys)
        pending = cache.begin_write(keys)
        pending.put_layers(0, LAYOUT.layers, Window(pages, 0))
        other = Window(pages_of(keys, version=1), 0)
        assert in_a_child(lambda: pending.put_layers(0, LAYOUT.layers, other)) == 0
        assert in_a_child(pending.commit) == 0
        slot = pending.answer.slots[0] * 4096
        arena = pending.host.arena
        assert in_a_child(lambda: arena.__setitem__(slot, 0)) == -signal.SIGSEGV, "the child has no mapping"
        assert pending.commit().visible == 2
        into = poisoned(cache, 2)
        assert cache.read(keys, into).chunks == 2 and np.array_equal(into, pages)
    finally:
        client.close()
        if node is not None:
            node.stop()


def test_a_bind_that_is_refused_does_not_cut_the_client_off_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.nodes.RETRY_EVERY_S", 0.0)
    node = NodeThread(tmp_path)
    with kvstore.connect(node.info.socket_path) as client:
        cache = client.bind(namespace())
        with pytest.raises(LayoutMismatch):
            client.bind(namespace("r2"), written_here=[7])
        keys = cache.keys(prompt(1, 32))
        assert cache.write(keys, pages_of(keys)).visible == 2
        node.stop()
        with pytest.raises(Unreachable):
            cache.write(keys, pages_of(keys))
        node = NodeThread(tmp_path)
        assert cache.write(keys, pages_of(keys)).visible == 2
    node.stop()


def test_b04_a_reserve_that_is_answered_too_late_is_given_back(tmp_path: Path) -> None:
    """Its slots stayed reserved, and its keys in progress, for as long as the client lived."""
    node = NodeThread(tmp_path)
    with kvstore.connect(node.info.socket_path) as client:
        cache = client.bind(namespace())
        keys = cache.keys(prompt(1, 32))
        held, go = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert go.wait(10)

        stuck = threading.Thread(target=node.call, args=(hold,))
        stuck.start()
        assert held.wait(10)
        with pytest.raises(kvstore.DeadlineExceeded):
            cache.write(keys, pages_of(keys), deadline_s=0.1)
        go.set()
        stuck.join(10)
        patience = threading.Event()
        for _ in range(1000):
            if not node.call(lambda: node.core.stats()["reserved_slots"]):
                break
            patience.wait(0.01)
        assert cache.write(keys, pages_of(keys)).visible == 2
    node.stop()


def test_a_large_first_chunk_does_not_make_all_later_ones_a_miss(tmp_path: Path) -> None:
    """Batches were cut by the size of the first chunk, whose shards were larger than what is read of the others."""
    layout = kvstore.PageLayout(4, 16, 32, kvstore.Dtype.FP32, 64, 1)
    space = kvstore.Namespace("model", "r1", layout)
    fine = Geometry(tuple(Rectangle(0, 4, head, head + 1) for head in range(16)))
    node = NodeThread(tmp_path, 64 << 20)
    try:
        with kvstore.connect(node.info.socket_path) as writer:
            whole = writer.bind(space)
            keys = whole.keys(range(64 * 8))
            for rank in range(16):
                part = writer.bind(space, geometry=fine, rank=rank)
                part.write(keys.slice(0, 1), np.full_like(part.empty(1), rank))
            assert whole.write(keys, np.full_like(whole.empty(8), 3)).visible == 8
        with kvstore.connect(node.info.control_address, transport="tcp", staging="4MiB") as reader:
            one = reader.bind(space, geometry=fine, rank=3)
            into = one.empty(8)
            assert one.read(keys, into).chunks == 8 and (into == 3).all()
    finally:
        node.stop()
