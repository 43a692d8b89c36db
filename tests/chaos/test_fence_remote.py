"""Reads from another node while its slots are reused, its bytes are changed, or it stands still. By a whole node."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import buffers, pipeline
from kvstore.client.peers import Peer
from kvstore.client.pipeline import Delivery
from kvstore.client.remote import RemoteRead, read_remote
from kvstore.client.values import Bytes, Destination
from kvstore.model import checksum
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from kvstore.node import AcquireAnswer
from kvstore.transport import tcp_server
from kvstore.transport.staging import Staging, StagingBlock
from kvstore.transport.tcp import TcpTransport
from tests.chaos.node_thread import NodeThread
from tests.chaos.raced_node import LAYOUT as SMALL
from tests.chaos.raced_node import NAMESPACE, PagesWriter, prompt_keys, wrong_chunks
from tests.chaos.test_fence_races import RacingNode, Size

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=64, dtype=Dtype.FP32, page_tokens=64, pages_per_chunk=1)
"""Chunks of 128 KiB, so that they go by sendfile."""
SPACE = Namespace("far", "r1", LAYOUT)
CHUNKS = 4
KEYS = prompt_keys(1, CHUNKS, SPACE)
OTHERS = prompt_keys(2, 24, SPACE)
"""More than the rest of the room: they take the slots of KEYS as soon as these are free."""
ONE = KEYS.slice(0, 1)
"""All of it fits into the sockets' buffers while nobody receives."""
POISON = 0xEE


class Far:
    """A node that holds KEYS, and a reader without shared memory."""

    def __init__(self, folder: Path) -> None:
        self.node = NodeThread(folder)
        self.arena = np.frombuffer(self.node.daemon._memory.arena.memory, dtype=np.uint8)
        self.writer = self.node.call(lambda: PagesWriter(self.node.core, self.arena, SPACE))
        assert self.node.call(lambda: self.writer.put(KEYS)) == CHUNKS
        self.transport = TcpTransport()
        self.executor = ThreadPoolExecutor(1)
        self.staging = Staging(4 << 20)
        self.pages = buffers.empty(LAYOUT, LAYOUT.whole, CHUNKS)
        self.peer = Peer(self.node.info, self.transport, "far", 5.0)

    def reuse(self) -> None:
        """On the node: KEYS are removed, and their slots have new bytes, all visible under new generations."""
        self.node.call(lambda: self.writer.remove(KEYS))
        assert self.node.call(lambda: self.writer.put(OTHERS)) >= CHUNKS

    def put_back(self) -> None:
        self.node.call(lambda: self.writer.remove(OTHERS) + self.writer.remove(KEYS))
        assert self.node.call(lambda: self.writer.put(KEYS)) == CHUNKS

    def slot_of(self, chunk: int) -> int:
        """Offset in the arena."""
        copies = self.node.call(lambda: self.node.core.pool.forest.chunks[KEYS[chunk]].copies)
        return next(iter(copies.values())).slot * 4096

    def read(
        self,
        destination: Destination | None = None,
        *,
        verify: bool = True,
        deadline_s: float = 10.0,
        keys: Keys = KEYS,
        executor: Any = None,
    ) -> RemoteRead:
        into = destination or self.fresh()
        end_s = time.monotonic() + deadline_s
        workers = executor or self.executor
        delivery = Delivery(SPACE, LAYOUT.whole, into, self.staging, workers, end_s, verify)
        return read_remote(self.peer, delivery, keys, 0)

    def fresh(self) -> Destination:
        self.pages[:] = POISON
        return buffers.ChunkArray(self.pages, LAYOUT.whole)

    def wrong(self, chunks: int) -> int:
        return wrong_chunks(self.pages.reshape(CHUNKS, -1), KEYS, chunks)

    def untouched(self, first: int = 0) -> bool:
        return bool((self.pages[first:] == POISON).all())

    def close(self) -> None:
        self.staging.check()
        usage = self.staging.usage()
        assert usage.free_bytes == self.staging.total_bytes, "staging is not given back"
        self.peer.close()
        self.executor.shutdown()
        self.node.call(self.node.core.check)
        self.node.stop()


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    far = Far(tmp_path)
    yield far
    far.close()


def assert_next_read_hits(far: Far) -> None:
    far.put_back()
    assert (far.read().chunks, far.wrong(CHUNKS)) == (CHUNKS, 0)


# --- slots reused under the read --------------------------------------------------------------------------------


def reuse_behind_sendfile(far: Far) -> None:
    """When the last page of the payload is queued on the node, and before the reader takes its first byte."""
    reused = threading.Event()

    def reuse() -> None:
        far.node.tcp.hold_for_tests(None)
        far.reuse()
        reused.set()

    def wait() -> None:
        far.transport.hold_for_tests(None)
        assert reused.wait(20)

    far.peer.take(5.0)[0].close()  # a connection that was kept would know nothing of the hold
    far.node.tcp.hold_for_tests(reuse)
    far.transport.hold_for_tests(wait)


@pytest.fixture(autouse=True)
def sendfile_for_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It queues pages, not bytes; a chunk as small as these would be copied."""
    monkeypatch.setattr(tcp_server, "SENDFILE_FROM_BYTES", 1 << 16)


def test_an_undisturbed_read_delivers_everything(far: Far) -> None:
    assert far.read() == RemoteRead(CHUNKS, None, CHUNKS * (LAYOUT.chunk_bytes + 32), path="tcp")
    assert far.wrong(CHUNKS) == 0


def test_a_slot_reused_between_sendfile_and_recv_is_a_miss(far: Far) -> None:
    reuse_behind_sendfile(far)
    result = far.read(keys=ONE)
    assert (result.chunks, result.reason) == (0, MissReason.FENCE)
    assert far.untouched()
    assert_next_read_hits(far)


def test_without_the_words_asked_for_afterwards_it_would_be_wrong_bytes(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner answers the words as they were when it queued the payload; the checksums are the second guard."""
    answer = far.node.core.acquire(far.writer.session, KEYS, LAYOUT.whole, 0)
    early = {place.slot: place.generation for place in answer.places}
    monkeypatch.setattr(far.node.tcp, "_generations", lambda slots: [early[slot] for slot in slots])
    for verify, expected in ((False, (1, None)), (True, (0, MissReason.CHECKSUM))):
        reuse_behind_sendfile(far)
        result = far.read(keys=ONE, verify=verify)
        assert (result.chunks, result.reason) == expected
        assert far.wrong(result.chunks) == result.chunks
        far.put_back()
        fresh = far.node.core.acquire(far.writer.session, KEYS, LAYOUT.whole, 0)
        early.clear()
        early.update({place.slot: place.generation for place in fresh.places})


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_slot_reused_between_acquire_and_the_read_is_a_miss(far: Far, comes_back: bool) -> None:
    """Also when the same chunk lies in the same slot again: its reference is old."""

    def overtake() -> None:
        far.transport.hold_for_tests(None)
        far.reuse()
        if comes_back:
            far.put_back()

    take = far.peer.take

    def take_late(deadline_s: float) -> Any:
        far.peer.take = take  # type: ignore[method-assign]
        overtake()
        return take(deadline_s)

    far.peer.take = take_late  # type: ignore[method-assign]
    result = far.read()
    assert (result.chunks, result.reason) == (0, MissReason.FENCE)
    assert far.untouched()
    assert_next_read_hits(far)


def test_only_the_chunks_before_the_reused_one_count(far: Far) -> None:
    def remove_two() -> None:
        assert far.node.call(lambda: far.writer.remove(KEYS.slice(2, 3))) == 2

    far.transport.hold_for_tests(remove_two)
    result = far.read()
    assert (result.chunks, result.reason) == (2, MissReason.FENCE)
    assert far.wrong(2) == 0 and far.untouched(2)


# --- bytes that changed -----------------------------------------------------------------------------------------


def tamper(far: Far, what: str, chunk: int) -> None:
    """Change one byte of a payload or of a table, or payload and table so that they fit each other."""
    start, length = far.slot_of(chunk), LAYOUT.chunk_bytes
    if what == "table":
        far.arena[start + length] ^= 0x10
        return
    far.arena[start + 777] ^= 0x10
    if what == "payload and its table":
        table = checksum.table_of(far.arena[start : start + length], LAYOUT, LAYOUT.whole)
        far.arena[start + length : start + length + table.nbytes] = table.view(np.uint8).ravel()


@pytest.mark.parametrize("chunk", [0, 2, 3])
@pytest.mark.parametrize("what", ["payload", "table", "payload and its table"])
def test_a_byte_that_changed_in_the_arena_is_a_miss(far: Far, what: str, chunk: int) -> None:
    tamper(far, what, chunk)
    result = far.read()
    assert (result.chunks, result.reason) == (chunk, MissReason.CHECKSUM)
    assert far.wrong(chunk) == 0 and far.untouched(chunk)
    unverified = far.read(verify=False)
    assert (unverified.chunks, unverified.reason) == (CHUNKS, None)
    assert far.wrong(CHUNKS) == (0 if what == "table" else 1), "the test's change is not noticed without checksums"
    far.node.call(lambda: far.writer.remove(KEYS))
    far.node.call(lambda: far.writer.put(KEYS))
    assert far.read().chunks == CHUNKS


# --- staging ----------------------------------------------------------------------------------------------------


def test_without_staging_a_read_that_fails_its_fence_leaves_foreign_bytes_behind(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquire_destination(staging: Staging, length_bytes: int, deadline_s: float) -> StagingBlock:
        return StagingBlock(0, length_bytes, far.pages.reshape(-1)[:length_bytes])

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "acquire", acquire_destination)
        patched.setattr(Staging, "release", lambda staging, block: None)
        reuse_behind_sendfile(far)
        assert far.read(keys=ONE).chunks == 0
        assert not far.untouched()
    far.put_back()
    reuse_behind_sendfile(far)
    assert far.read(keys=ONE).chunks == 0
    assert far.untouched()


class _Nested:
    """A destination that, before it takes its first piece, lets another read run through the same staging."""

    def __init__(self, into: Destination, other: Callable[[], None]) -> None:
        self._into = into
        self._other: Callable[[], None] | None = other

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        other, self._other = self._other, None
        if other is not None:
            other()
        self._into.scatter(index, piece, layer_start, head_start)


@pytest.mark.parametrize("handed_on_early", [False, True])
def test_a_staging_block_belongs_to_one_read_until_its_bytes_are_delivered(
    far: Far, handed_on_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = OTHERS.slice(0, CHUNKS)
    far.node.call(lambda: far.writer.put(OTHERS))
    if handed_on_early:
        acquire, release = Staging.acquire, Staging.release

        def acquire_and_free(staging: Staging, length_bytes: int, deadline_s: float) -> StagingBlock | None:
            block = acquire(staging, length_bytes, deadline_s)
            if block is not None:
                release(staging, block)
            return block

        monkeypatch.setattr(Staging, "acquire", acquire_and_free)
        monkeypatch.setattr(Staging, "release", lambda staging, block: None)
    elsewhere = buffers.empty(LAYOUT, LAYOUT.whole, CHUNKS)

    def read_others() -> None:
        with ThreadPoolExecutor(1) as executor:
            into = buffers.ChunkArray(elsewhere, LAYOUT.whole)
            assert far.read(into, keys=others, executor=executor).chunks == CHUNKS

    result = far.read(_Nested(far.fresh(), read_others))
    assert wrong_chunks(elsewhere.reshape(CHUNKS, -1), others, CHUNKS) == 0
    # Its checksums held when they were looked at; only the block's exclusive use keeps the bytes until the copy.
    assert result.chunks >= 1 and (far.wrong(1) > 0) is handed_on_early


def test_full_staging_is_a_miss_at_the_deadline_and_passes(far: Far) -> None:
    held = far.staging.acquire(far.staging.total_bytes, 1.0)
    assert held is not None
    result = far.read(deadline_s=0.2)
    assert (result.chunks, result.reason) == (0, MissReason.STAGING_FULL)
    far.staging.release(held)
    assert (far.read().chunks, far.wrong(CHUNKS)) == (CHUNKS, 0)


def test_a_read_larger_than_staging_streams_through_it(far: Far) -> None:
    far.staging = Staging(LAYOUT.chunk_bytes + 8192)
    assert (far.read().chunks, far.wrong(CHUNKS)) == (CHUNKS, 0)


def test_a_chunk_larger_than_staging_is_a_miss(far: Far) -> None:
    far.staging = Staging(LAYOUT.chunk_bytes)  # without room for its table
    result = far.read()
    assert (result.chunks, result.reason) == (0, MissReason.STAGING_FULL)


@pytest.mark.parametrize("fails_at", range(CHUNKS))
def test_a_destination_that_fails_keeps_no_staging(far: Far, fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is one chunk; the next one is being received while the failing one is delivered."""
    monkeypatch.setattr(pipeline, "BATCH_BYTES", LAYOUT.chunk_bytes)

    class Failing:
        def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
            if index == fails_at:
                raise RuntimeError("the destination is full")

    with pytest.raises(RuntimeError, match="is full"):
        far.read(Failing())
    assert far.staging.usage().free_bytes == far.staging.total_bytes
    assert (far.read().chunks, far.wrong(CHUNKS)) == (CHUNKS, 0)


@pytest.mark.parametrize("fenced", range(CHUNKS))
def test_a_fence_that_fails_keeps_no_staging(far: Far, fenced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror of a failing destination: the batch behind the failed one is in staging too."""
    monkeypatch.setattr(pipeline, "BATCH_BYTES", LAYOUT.chunk_bytes)
    acquire = far.peer.api.acquire

    def acquire_and_remove(*arguments: Any) -> AcquireAnswer:
        answer = acquire(*arguments)
        far.node.call(lambda: far.writer.remove(KEYS.slice(fenced, fenced + 1)))
        return answer

    monkeypatch.setattr(far.peer.api, "acquire", acquire_and_remove)
    result = far.read()
    assert (result.chunks, result.reason, far.wrong(fenced)) == (fenced, MissReason.FENCE, 0)
    assert far.untouched(fenced)


# --- a node that stands still -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_late_bytes_of_a_stopped_node_touch_nothing_that_is_in_use(tmp_path: Path) -> None:
    """The node stops within a read, the read ends at its deadline, staging has new users, and the node goes on."""
    size = Size(1, 2000, 4200, 1000)
    node = RacingNode.start(tmp_path, size)
    node.rest()
    keys = size.keys[0]
    staging, transport = Staging(16 << 20), TcpTransport()
    pages = buffers.empty(SMALL, SMALL.whole, size.chunks)
    peer = Peer(node.info, transport, "far", 5.0)

    def read(deadline_s: float) -> RemoteRead:
        into, end_s = buffers.ChunkArray(pages, SMALL.whole), time.monotonic() + deadline_s
        with ThreadPoolExecutor(1) as executor:
            delivery = Delivery(NAMESPACE, SMALL.whole, into, staging, executor, end_s)
            return read_remote(peer, delivery, keys, 0)

    assert read(10.0).chunks == size.chunks
    pages[:] = POISON
    peer.take(5.0)[0].close()  # the next read connects anew, with the hold

    def stop() -> None:
        node.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.process.pid, os.WSTOPPED | os.WNOWAIT)

    transport.hold_for_tests(stop)
    started = time.monotonic()
    result = read(0.5)
    assert (result.chunks, result.reason) == (0, MissReason.DEADLINE)
    assert 0.4 < time.monotonic() - started < 3.0
    assert (pages == POISON).all()
    assert staging.usage().free_bytes == staging.total_bytes
    transport.hold_for_tests(None)
    staging.memory[:] = 0x3C
    node.process.send_signal(signal.SIGCONT)
    assert peer.api.acquire(keys, SMALL.whole, 0, b"", 0, 10.0).run == size.chunks, "it works again"
    assert (staging.memory == 0x3C).all() and (pages == POISON).all()
    assert (read(10.0).chunks, wrong_chunks(pages, keys, size.chunks)) == (size.chunks, 0)
    peer.close()
    node.stop()
