"""SIGKILL of a node with an SSD tier, at its disk calls: of the worker alone, and of the whole node."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from half_writer import LAYOUT, NAMESPACE
from supervised_node import SupervisedNode, eventually, supervised

import kvstore
from kvstore.cli.asking import ask_operator
from kvstore.client import Cache
from kvstore.errors import KvStoreError
from kvstore.model.prefix import Keys
from kvstore.rpc.v1 import admin_pb2

pytestmark = pytest.mark.slow
KILLER = Path(__file__).with_name("killing_disk")
CHUNKS = 4
PROMPTS = 9


def prompt_keys(cache: Cache, prompt: int, chunks: int = CHUNKS) -> Keys:
    return cache.keys([prompt] * (chunks * LAYOUT.chunk_tokens))


def pages_of(keys: Keys, version: int = 0) -> Any:
    shape = LAYOUT.shape(LAYOUT.whole)
    return np.stack([np.random.default_rng([version, *key]).integers(0, 256, shape, dtype=np.uint8) for key in keys])


class Customer:
    """Stores and removes prompts until the node is killed, and remembers what it was promised."""

    def __init__(self) -> None:
        self.persisted: set[int] = set()
        self.removed: set[int] = set()
        self.versions: dict[int, int] = {}

    def work(self, cache: Cache) -> None:
        """May end with any error of the node."""
        for prompt in range(PROMPTS):
            self._store(cache, prompt, 0)
            if prompt % 3 == 2:
                self._remove(cache, prompt)
                if prompt % 2:
                    self._store(cache, prompt, 1)

    def _store(self, cache: Cache, prompt: int, version: int) -> None:
        keys = prompt_keys(cache, prompt)
        self.removed.discard(prompt)
        self.versions[prompt] = version
        assert cache.write(keys, pages_of(keys, version)).visible == CHUNKS
        if cache.persist(keys) == (CHUNKS, ""):
            self.persisted.add(prompt)

    def _remove(self, cache: Cache, prompt: int) -> None:
        self.persisted.discard(prompt)
        assert cache.remove(prompt_keys(cache, prompt)) == CHUNKS
        self.removed.add(prompt)

    def check(self, cache: Cache) -> None:
        """Everything is as promised; whatever else is found is right."""
        for prompt, version in self.versions.items():
            keys = prompt_keys(cache, prompt)
            pages = np.full((CHUNKS, *LAYOUT.shape(LAYOUT.whole)), 0xA5, dtype=np.uint8)
            found = cache.read(keys, pages).chunks
            assert (pages[:found] == pages_of(keys, version)[:found]).all(), f"wrong bytes in prompt {prompt}"
            assert found == CHUNKS or prompt not in self.persisted, f"prompt {prompt} is lost"
            assert not found or prompt not in self.removed, f"prompt {prompt} is back"


@contextlib.contextmanager
def node_on(folder: Path, ssd_io: str = "threads", **plan: Any) -> Iterator[SupervisedNode]:
    path = os.pathsep.join([str(KILLER), os.environ.get("PYTHONPATH", str(KILLER.parents[2]))])
    environment = {"PYTHONPATH": path, "TEST_KILL_AT": json.dumps(plan)} if plan else {}
    places = ("--ssd", f"{folder}/ssd:4MiB", "--ssd-io", ssd_io)
    arguments = ("--dram", "1MiB", "--slots", "1024", *places, "--node-id", "killed")
    with supervised(folder, "node", *arguments, environment=environment) as node:
        node.wait_open()
        yield node


def laws_hold(node: SupervisedNode) -> None:
    answer = ask_operator(node.control_address, "Check", admin_pb2.CheckRequest(sample_chunks=1000), 20.0)
    assert not answer.findings, answer.findings


KILLS = [
    ("payload", 3, "before"),
    ("payload", 6, "middle"),
    ("header", 5, "middle"),
    ("zeroing", 4, "before"),
    ("superblock", 3, "before"),
    ("fdatasync", 9, "before"),
]
BY_NIXL = [pytest.param(*KILLS[number], "nixl", marks=pytest.mark.nixl) for number in (2, 5)]
"""Payloads are no system calls of ours there."""
BY_THREADS = [(*kill, "threads") for kill in KILLS]


@pytest.mark.parametrize(("kind", "number", "when", "ssd_io"), [*BY_THREADS, *BY_NIXL])
def test_a_node_that_is_killed_at_a_disk_call_keeps_its_promises(
    kind: str, number: int, when: str, ssd_io: str, tmp_path: Path
) -> None:
    marker, customer = tmp_path / "marker", Customer()
    plan = {"kind": kind, "number": number, "when": when, "marker": str(marker), "parent": True}
    with node_on(tmp_path, ssd_io, **plan) as node:
        with kvstore.connect(node.control_address) as client, pytest.raises(KvStoreError):
            customer.work(client.bind(NAMESPACE))
        node.process.wait(10)
    assert marker.exists()
    with node_on(tmp_path, ssd_io) as node, kvstore.connect(node.control_address) as client:
        cache = client.bind(NAMESPACE)
        laws_hold(node)
        customer.check(cache)
        customer.work(cache)
        customer.check(cache)
        laws_hold(node)


@pytest.mark.parametrize(("kind", "number", "when", "ssd_io"), [*BY_THREADS[1:4], BY_NIXL[0]])
def test_a_worker_that_is_killed_at_a_disk_call_comes_back_with_both_tiers(
    kind: str, number: int, when: str, ssd_io: str, tmp_path: Path
) -> None:
    marker, customer = tmp_path / "marker", Customer()
    plan = {"kind": kind, "number": number, "when": when, "marker": str(marker), "parent": False}
    with node_on(tmp_path, ssd_io, **plan) as node, kvstore.connect(node.control_address) as client:
        with pytest.raises(KvStoreError):
            customer.work(client.bind(NAMESPACE))
        assert marker.exists()
        stats = eventually(lambda: stats if (stats := node.stats())["worker_start"] == 2 else None)
        assert stats["recovered_chunks"] and stats["recovered_ssd_chunks"]
        # Another client: the one from before has to notice the restart first, which is not the question here.
        with kvstore.connect(node.control_address) as other:
            cache = other.bind(NAMESPACE)
            laws_hold(node)
            customer.check(cache)
            customer.work(cache)
            customer.check(cache)
            laws_hold(node)


def test_a_killed_worker_keeps_pins_dram_and_ssd(tmp_path: Path) -> None:
    with node_on(tmp_path) as node, kvstore.connect(node.control_address) as client:
        cache, customer = client.bind(NAMESPACE), Customer()
        customer.work(cache)
        keys = prompt_keys(cache, 0)
        pin = admin_pb2.PinRequest(name="system", namespace_id=NAMESPACE.id, key=keys[CHUNKS - 1], lifetime_ms=600_000)
        assert ask_operator(node.control_address, "Pin", pin, 5.0).pinned_chunks == CHUNKS
        before = node.stats()
        after = node.kill_worker()
        assert after["recovered_chunks"] + after["recovered_ssd_chunks"] >= before["chunks"] == after["chunks"]
        (kept,) = ask_operator(node.control_address, "ListPins", admin_pb2.ListPinsRequest(), 5.0).pins
        assert (kept.name, kept.chunks) == ("system", CHUNKS)
        laws_hold(node)
        assert node.stats()["reserved_slots"] == node.stats()["quarantined_bytes"] == 0
        with kvstore.connect(node.control_address) as other:
            customer.check(other.bind(NAMESPACE))
        laws_hold(node)
