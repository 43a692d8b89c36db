"""A node with an SSD tier counts each read as one use, comes to rest, and holds as much as its file has room for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.analytics.replay import payloads
from kvstore.client import Cache
from kvstore.model.prefix import Keys
from kvstore.node.eviction import policy_names
from kvstore.node.slots import slot_bytes, ssd_file_bytes
from tests.chaos.node_thread import NodeThread
from tests.unit.node.small_node import SMALL, namespace

SPACE = namespace(SMALL)
SLOT_BYTES = slot_bytes(SMALL, SMALL.whole)
WAIT_S = 20.0


class Setting:
    """A node whose DRAM holds `room_chunks` and whose SSD `ssd_chunks`, and a client of it."""

    def __init__(self, folder: Path, room_chunks: int, ssd_chunks: int, **more: Any) -> None:
        size = ssd_file_bytes(ssd_chunks, SLOT_BYTES)
        self.node = NodeThread(
            folder, 2 << 20, ssd=f"{folder}/pool.kvssd:{size}", slots=2048, room_chunks=room_chunks, **more
        )
        self.client = kvstore.connect(node=self.node.info.control_address)
        self.cache: Cache = self.client.bind(SPACE)

    def keys(self, prompt: int, chunks: int) -> Keys:
        tokens = SMALL.chunk_tokens
        return self.cache.keys([prompt * 1000 + i for i in range(chunks * tokens)])

    def store(self, prompt: int, chunks: int) -> None:
        keys = self.keys(prompt, chunks)
        assert self.cache.write(keys, self._content(keys)).visible == chunks
        self.rest()

    def read(self, prompt: int, chunks: int) -> kvstore.ReadResult:
        keys = self.keys(prompt, chunks)
        content = self._content(keys)
        found = ~content
        result = self.cache.read(keys, found)
        assert np.array_equal(found[: result.chunks], content[: result.chunks])
        self.client.flush_touches()
        self.rest()
        return result

    def _content(self, keys: Keys) -> Any:
        return payloads(keys, SMALL.chunk_bytes).reshape(len(keys), *SMALL.shape(SMALL.whole))

    def rest(self) -> None:
        """Until the cleaner has nothing to do."""
        self.wait(lambda: not self.node.core.pool.backlog.waiting)
        self.node.call(self.node.core.check)

    def wait(self, condition: Callable[[], bool]) -> None:
        ends_s, pause = time.monotonic() + WAIT_S, threading.Event()
        while not self.node.call(condition):
            assert time.monotonic() < ends_s, "the cleaner never comes to rest"
            pause.wait(0.002)

    def uses(self, prompt: int, chunks: int) -> list[int]:
        forest = self.node.core.pool.forest
        return self.node.call(lambda: [forest.chunks[key].uses for key in self.keys(prompt, chunks)])

    def close(self) -> None:
        self.client.close()
        self.node.stop()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def start(**options: Any) -> Setting:
        made.append(Setting(tmp_path, **options))
        return made[-1]

    yield start
    for setting in made:
        setting.close()


def test_a_node_holds_exactly_as_many_chunks_as_the_file_was_made_for(make: Callable[..., Setting]) -> None:
    setting = make(room_chunks=4, ssd_chunks=45)
    for prompt in range(12):
        setting.store(prompt, 5)
    ssd = setting.node.core.pool.ssd
    assert ssd is not None and ssd.chunk_count == 45
    assert setting.node.core.pool.counts["ssd_no_room"] == 0


def test_a_read_of_both_tiers_is_one_use_of_each_chunk(make: Callable[..., Setting]) -> None:
    setting = make(room_chunks=6, ssd_chunks=40)
    setting.store(1, 6)
    setting.store(2, 3)  # the tail of the first leaves the DRAM
    assert setting.uses(1, 6) == [1] * 6
    result = setting.read(1, 6)
    assert (result.chunks, result.ssd_tokens) == (6, 3 * SMALL.chunk_tokens)
    assert setting.uses(1, 6) == [2] * 6
    assert setting.read(1, 6).ssd_tokens == 0
    assert setting.uses(1, 6) == [3] * 6


def test_what_comes_back_keeps_to_the_room_in_dram(make: Callable[..., Setting]) -> None:
    setting = make(room_chunks=6, ssd_chunks=40)
    setting.store(1, 6)
    setting.store(2, 6)
    assert setting.read(1, 6).ssd_tokens == 6 * SMALL.chunk_tokens
    assert setting.node.core.pool.dram.chunk_count == 6


@pytest.mark.parametrize("policy", policy_names())
def test_the_cleaner_comes_to_rest_where_the_ssd_drops_what_dram_has(make: Callable[..., Setting], policy: str) -> None:
    """Saved again at once, it pushed out another chunk that was in DRAM too, and so on."""
    setting = make(room_chunks=60, ssd_chunks=8, eviction=policy)
    for prompt in range(10):
        setting.store(prompt, 3)
        setting.read(prompt // 2, 3)
    assert setting.node.core.pool.counts["ssd_copies_dropped"] > 0
    assert setting.read(0, 3).chunks == 3
    assert all(chunk.ssd for chunk in map(setting.node.core.pool.forest.get, setting.keys(0, 3)) if chunk), "used again"


def test_saved_chunks_leave_the_ssd_from_the_tail(make: Callable[..., Setting]) -> None:
    setting = make(room_chunks=60, ssd_chunks=40)
    setting.store(1, 7)
    ssd = setting.node.core.pool.ssd
    assert ssd is not None
    (policy,) = ssd._policies.values()
    assert setting.node.call(lambda: list(policy.victims())) == list(setting.keys(1, 7))[::-1]
