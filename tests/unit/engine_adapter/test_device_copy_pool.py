"""DevicePagedKv against a whole pool, on streams that run late: stores, preemption, loads, batches that get lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

import kvstore
from engine_adapter.device_copy import DeviceCopier, DevicePagedKv
from engine_adapter.movers import Blocks, Part, TorchMover
from kvstore.client import Cache
from kvstore.errors import KvStoreError
from kvstore.model.prefix import Keys
from tests.unit.client.pages import LAYOUT, namespace, pages_of, prompt
from tests.unit.engine_adapter.queued_streams import QueuedDevice, QueuedStream

CHUNKS, BLOCKS = 4, 12
PLACES = [[3, 7], [0, 11], [5, 2], [9, 8]]


class Engine:
    """Blocks for `CHUNKS` chunks of `LAYOUT`, on a queued device."""

    def __init__(self, mover: TorchMover | None = None) -> None:
        self.device = QueuedDevice()
        self.compute, copies = QueuedStream(self.device), QueuedStream(self.device)
        self.device.prefer = self.compute
        shape = BLOCKS, LAYOUT.kv_heads, LAYOUT.head_page_bytes
        self.tensors = [torch.zeros(shape, dtype=torch.uint8) for _ in range(LAYOUT.layers)]
        copier = DeviceCopier("cpu", compute=self.compute, copies=copies, mover=mover)
        self.kv = DevicePagedKv(self.tensors, LAYOUT.pages_per_chunk, PLACES, copier=copier)

    def fill(self, pages: np.ndarray) -> None:
        """The engine computes these pages, some time."""

        def work() -> None:
            for layer, tensor in enumerate(self.tensors):
                tensor[torch.tensor(PLACES)] = torch.from_numpy(pages[:, layer].copy())

        self.compute.run(work)

    def holds(self, pages: np.ndarray) -> bool:
        return all(np.array_equal(t[torch.tensor(PLACES)].numpy(), pages[:, i]) for i, t in enumerate(self.tensors))


@pytest.fixture
def cache() -> Iterator[Cache]:
    with kvstore.open_local("1MiB") as client:
        yield client.bind(namespace())


def keys_of(cache: Cache, number: int = 1) -> Keys:
    return cache.keys(prompt(number, LAYOUT.chunk_tokens * CHUNKS))


def test_what_one_engine_stores_another_loads(cache: Cache) -> None:
    keys, one, other = keys_of(cache), Engine(), Engine()
    one.fill(pages_of(keys))
    assert cache.write(keys, one.kv).stored == CHUNKS
    assert cache.read(keys, other.kv).chunks == CHUNKS
    assert other.holds(pages_of(keys))


def test_a13_blocks_that_are_preempted_while_they_are_stored(cache: Cache) -> None:
    keys, engine = keys_of(cache), Engine()
    engine.fill(pages_of(keys))
    with cache.begin_write(keys) as pending:
        pending.put_layers(0, LAYOUT.layers, engine.kv)
        engine.kv.hold_compute()
        engine.fill(pages_of(keys, version=2))  # by the request that got the blocks
        engine.device.run_until(lambda: not engine.compute.is_busy)
        assert pending.commit().stored == CHUNKS
    target = cache.empty(CHUNKS)
    assert cache.read(keys, target).chunks == CHUNKS
    assert np.array_equal(target, pages_of(keys))


def test_a13_a_store_that_is_aborted_has_stopped_writing(cache: Cache) -> None:
    keys, engine, others = keys_of(cache), Engine(), keys_of(cache, 2)
    engine.fill(pages_of(keys))
    pending = cache.begin_write(keys)
    pending.put_layers(0, LAYOUT.layers, engine.kv)
    pending.abort()
    assert cache.write(others, pages_of(others)).stored == CHUNKS  # perhaps into the same slots
    engine.device.drain()
    target = cache.empty(CHUNKS)
    assert cache.read(keys, target).chunks == 0
    assert cache.read(others, target).chunks == CHUNKS
    assert np.array_equal(target, pages_of(others))


class Lossy(TorchMover):
    """Cannot gather `losses` times, as where a device is out of memory."""

    losses = 1

    def to_dense(self, dense: torch.Tensor, blocks: Blocks, parts: Sequence[Part]) -> None:
        if self.losses:
            self.losses -= 1
            raise torch.OutOfMemoryError("no memory left on the device")
        super().to_dense(dense, blocks, parts)


def test_chunks_whose_copies_were_never_begun_do_not_count(cache: Cache) -> None:
    keys = keys_of(cache)
    tensors = [
        torch.from_numpy(pages_of(keys)[:, layer].reshape(-1, LAYOUT.kv_heads, LAYOUT.head_page_bytes).copy())
        for layer in range(LAYOUT.layers)
    ]
    blocks = np.arange(CHUNKS * LAYOUT.pages_per_chunk).reshape(CHUNKS, -1).tolist()
    kv = DevicePagedKv(tensors, LAYOUT.pages_per_chunk, blocks, copier=DeviceCopier("cpu", mover=Lossy()))
    with cache.begin_write(keys) as pending:
        with pytest.raises(torch.OutOfMemoryError):
            pending.put_layers(0, LAYOUT.layers, kv)
        with pytest.raises(KvStoreError, match="none of them counts"):
            pending.commit()
        assert pending.commit().stored == 0
    assert cache.read(keys, cache.empty(CHUNKS)).chunks == 0
    assert cache.write(keys, kv).stored == CHUNKS
    target = cache.empty(CHUNKS)
    assert cache.read(keys, target).chunks == CHUNKS and np.array_equal(target, pages_of(keys))
