"""A million chunk reads on each path against a node that reuses its slots without pause: never a wrong byte."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client import buffers, copiers, pipeline
from kvstore.client.peers import Peer
from kvstore.client.pipeline import Delivery
from kvstore.client.remote import RemoteRead, read_remote
from kvstore.client.values import Bytes
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, NodeInfo
from kvstore.node import AcquireAnswer
from kvstore.node.lookup import CatalogReader, Found
from kvstore.node.remote import RemoteNode
from kvstore.transport.staging import Staging
from kvstore.transport.tcp import TcpTransport
from tests.chaos.raced_node import LAYOUT, NAMESPACE, prompt_keys, wrong_chunks

ROOT = Path(__file__).resolve().parents[2]
CHUNK_READS = 1_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """Prompts and their chunks; fewer slots, so that what is not removed and put again is evicted for others."""

    prompts: int
    chunks: int
    slots: int
    pause_ms: int

    @property
    def keys(self) -> list[Keys]:
        return [prompt_keys(prompt, self.chunks) for prompt in range(self.prompts)]


SHM = Size(10, 128, 900, 0)
TCP = Size(6, 1000, 5400, 40)
"""With a pause, because the thread that writes is the one that answers Acquire."""


@dataclass
class RacingNode:
    """The process of `raced_node`, writing until `rest`."""

    process: subprocess.Popen[str]
    facts: dict[str, Any]

    @classmethod
    def start(cls, folder: Path, size: Size) -> RacingNode:
        command = [sys.executable, "-m", "tests.chaos.raced_node", str(folder)]
        command += map(str, (size.slots, size.prompts, size.chunks, size.pause_ms))
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return cls(process, json.loads(process.stdout.readline()))

    @property
    def info(self) -> NodeInfo:
        fields = ("node_id", "epoch", "host_id", "control_address", "data_address", "socket_path")
        return NodeInfo(*(self.facts[name] for name in fields))

    def rest(self) -> int:
        """Stop writing; the number of chunks that were put."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("rest\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RacingNode]:
    node = RacingNode.start(tmp_path, request.param)
    yield node
    node.stop()


raced_in_memory = pytest.mark.parametrize("node", [SHM], indirect=True, ids=["shm"])
raced_by_tcp = pytest.mark.parametrize("node", [TCP], indirect=True, ids=["tcp"])


@dataclass
class Tally:
    """What many reads came to."""

    reads: int = 0
    chunks: int = 0
    wrong: int = 0
    needless: int = 0
    misses: Counter[str] = field(default_factory=Counter)

    def add(self, pages: np.ndarray, keys: Keys, chunks: int, reason: MissReason | None) -> None:
        self.reads += 1
        self.chunks += chunks
        self.wrong += wrong_chunks(pages, keys, chunks)
        if reason is not None:
            self.misses[reason.value] += 1

    def report(self, path: str, put: int, seconds: float) -> None:
        print(
            f"\n{path}: {self.chunks} chunks in {self.reads} reads, {put} chunks put meanwhile, {seconds:.1f} s; "
            f"wrong {self.wrong}, needless misses {self.needless}, misses by reason {dict(self.misses)}"
        )


def still_there(reader: CatalogReader, keys: Keys, before: Found, index: int) -> bool:
    """True if chunk `index` was there all the time: the same entry and slot, with one generation, before and now."""
    after = reader.find(keys, LAYOUT.whole)
    if min(before.run, after.run) <= index or (before.rows[index] != after.rows[index]).any():
        return False
    return reader.confirm(after.part(index, index + 1)) == 1  # else it is being withdrawn right now


class Hesitating(buffers.ChunkArray):
    """Takes its time now and then, as an engine's copy does: slots get new bytes before they are copied."""

    _never = threading.Event()

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        if index % 32 == 16:
            self._never.wait(0.0005)
        super().scatter(index, piece, layer_start, head_start)


def drop_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CatalogReader, "confirm", lambda reader, found: found.run)


# --- the same host ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "chunk_reads"), [(1, CHUNK_READS), (2, CHUNK_READS // 4)])
@raced_in_memory
def test_a_million_raced_reads_of_shared_memory(
    node: RacingNode, threads: int, chunk_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally, generator, prompts, started = Tally(), random.Random(11), SHM.keys, time.monotonic()
    monkeypatch.setattr(copiers, "PIECE_BYTES", 1)
    monkeypatch.setattr(copiers, "SHARE_BYTES", 1)
    with kvstore.connect(node.info.socket_path, copy_threads=threads) as client:
        cache = client.bind(NAMESPACE)
        host = client.host()
        assert host is not None
        pages = cache.empty(SHM.chunks)
        wanted: list[Keys] = []
        refused_wrong = 0
        confirm = host.reader.confirm

        def confirm_and_look(found: Found) -> int:
            nonlocal refused_wrong
            held = confirm(found)
            if wanted:  # the first try of a read, from its first chunk on
                keys = wanted.pop()
                refused_wrong += held < found.run and wrong_chunks(pages, keys, found.run) > 0
            return held

        monkeypatch.setattr(host.reader, "confirm", confirm_and_look)
        while tally.chunks < chunk_reads:
            keys = generator.choice(prompts)
            before = host.reader.find(keys, LAYOUT.whole)
            slowly = threads > 1 or tally.reads % 8 == 0
            wanted[:] = [keys]
            result = cache.read(keys, Hesitating(pages, LAYOUT.whole) if slowly else pages)
            tally.add(pages, keys, result.chunks, result.reason)
            if result.reason is not None:
                tally.needless += still_there(host.reader, keys, before, result.chunks)
        retries = client.stats().get("fence_retries", 0)
        tally.report("shm", node.rest(), time.monotonic() - started)
        print(f"copies refused {retries}, {refused_wrong} of them over pages with wrong bytes")
        assert tally.wrong == 0
        assert refused_wrong > 5, "nothing was raced"
        assert tally.needless <= tally.reads / 1000
        whole = [keys for keys in prompts if host.reader.find(keys, LAYOUT.whole).run == SHM.chunks]
        assert whole
        for keys in whole:
            result = cache.read(keys, pages)
            assert (result.chunks, wrong_chunks(pages, keys, SHM.chunks)) == (SHM.chunks, 0)


@pytest.mark.slow
@raced_in_memory
def test_the_race_gives_wrong_bytes_without_the_second_look(node: RacingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    drop_confirm(monkeypatch)
    tally, generator, prompts, end = Tally(), random.Random(12), SHM.keys, time.monotonic() + 60
    with kvstore.connect(node.info.socket_path) as client:
        cache = client.bind(NAMESPACE)
        pages = cache.empty(SHM.chunks)
        while not tally.wrong and time.monotonic() < end:
            keys = generator.choice(prompts)
            result = cache.read(keys, Hesitating(pages, LAYOUT.whole))
            tally.add(pages, keys, result.chunks, result.reason)
        node.rest()
    print(f"wrong bytes after {tally.reads} reads")
    assert tally.wrong


# --- another host -----------------------------------------------------------------------------------------------


class OldAnswers(RemoteNode):
    """Answers Acquire with what it was told before, as long as that served: references grow old, without a lease."""

    def __init__(self, node: RacingNode) -> None:
        super().__init__(node.info.control_address)
        self.known: dict[bytes, AcquireAnswer] = {}

    def acquire(
        self, keys: Keys, rectangle: Rectangle, lease_ms: int, ticket_id: bytes, wait_ms: int, deadline_s: float
    ) -> AcquireAnswer:
        if keys.blob not in self.known:
            self.known[keys.blob] = super().acquire(keys, rectangle, 0, ticket_id, wait_ms, deadline_s)
        return self.known[keys.blob]

    def needless(self, keys: Keys, index: int) -> bool:
        """Ask anew. True if chunk `index` is still what it was when this was asked for the last time."""
        before = self.known.pop(keys.blob)
        now = self.acquire(keys, LAYOUT.whole, 0, b"", 0, 5.0)
        return min(before.run, now.run) > index and before.places[index].generation == now.places[index].generation


@dataclass
class FarReader:
    """Reads whole prompts of a node by the tcp transport."""

    peer: Peer
    answers: OldAnswers
    executor: ThreadPoolExecutor
    staging: Staging = field(default_factory=lambda: Staging(64 << 20))
    pages: np.ndarray = field(default_factory=lambda: buffers.empty(LAYOUT, LAYOUT.whole, TCP.chunks))

    def read(self, keys: Keys, *, verify: bool) -> RemoteRead:
        into = buffers.ChunkArray(self.pages, LAYOUT.whole)
        end_s = time.monotonic() + 10
        delivery = Delivery(NAMESPACE, LAYOUT.whole, into, self.staging, self.executor, end_s, verify)
        return read_remote(self.peer, delivery, keys, 0)


@contextlib.contextmanager
def far_reader(node: RacingNode) -> Iterator[FarReader]:
    peer = Peer(node.info, TcpTransport(), "far", 5.0)
    peer.api.close()
    peer.api = OldAnswers(node)
    with ThreadPoolExecutor(1) as executor:
        yield FarReader(peer, peer.api, executor)
    peer.close()


@pytest.mark.slow
@raced_by_tcp
def test_a_million_raced_reads_by_tcp(node: RacingNode) -> None:
    """Three of four reads without checksums, so that they cannot hide what the fence lets pass.

    Counted are chunks whose bytes came, whether the fence then let them pass or not.
    """
    came = 0
    tally, generator, prompts, started = Tally(), random.Random(13), TCP.keys, time.monotonic()
    with far_reader(node) as far:
        while came < CHUNK_READS:
            keys = generator.choice(prompts)
            result = far.read(keys, verify=tally.reads % 4 == 0)
            came += result.payload_bytes // (LAYOUT.chunk_bytes + 8)
            tally.add(far.pages, keys, result.chunks, result.reason)
            if result.reason is not None:
                tally.needless += far.answers.needless(keys, result.chunks)
        tally.report(f"tcp, {came} chunks came", node.rest(), time.monotonic() - started)
        assert tally.wrong == 0
        assert tally.misses["checksum"] == 0, "the fence let something pass that a checksum had to catch"
        assert tally.misses["fence"] > 20, "nothing was raced"
        assert tally.needless <= tally.reads / 1000
        far.answers.known.clear()
        whole = 0
        for keys in prompts:
            result = far.read(keys, verify=True)
            assert wrong_chunks(far.pages, keys, result.chunks) == 0 and result.reason in (None, MissReason.ABSENT)
            whole += result.chunks == TCP.chunks
        assert whole
        far.staging.check()
        assert far.staging.usage().free_bytes == far.staging.total_bytes


@pytest.mark.slow
@raced_by_tcp
def test_the_race_gives_wrong_bytes_without_the_generation_words(
    node: RacingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def believed(batch: Any, result: Any) -> list[int]:
        return [piece.place.generation for piece in batch.pieces]

    monkeypatch.setattr(pipeline._Batch, "words", believed)
    tally, generator, prompts, end = Tally(), random.Random(14), TCP.keys, time.monotonic() + 60
    with far_reader(node) as far:
        while not tally.wrong and time.monotonic() < end:
            keys = generator.choice(prompts)
            result = far.read(keys, verify=False)
            tally.add(far.pages, keys, result.chunks, result.reason)
        node.rest()
    print(f"wrong bytes after {tally.reads} reads")
    assert tally.wrong
