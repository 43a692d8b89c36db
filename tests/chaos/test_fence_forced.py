"""Evictions forced into same-host reads at every place of the copy: right bytes or a miss, and the next read hits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvstore
from kvstore.assemble import EmbeddedHost
from kvstore.client import Cache, Client, ReadResult, local
from kvstore.client.local import FENCE_RETRIES, LocalRead, read_local
from kvstore.client.values import Bytes
from kvstore.model.layout import Dtype, Geometry, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from kvstore.node.lookup import CatalogReader, Words
from tests.chaos.raced_node import pages_of, prompt_keys, wrong_chunks

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=32, dtype=Dtype.FP32, page_tokens=4, pages_per_chunk=1)
SPACE = Namespace("forced", "r1", LAYOUT)
CHUNKS = 4
ROOM = 8
"""Chunks that fit, cut in two or not."""
POISON = 0xEE


class Pool:
    """A pool in this process with room for eight chunks, written by `tp` ranks."""

    def __init__(self, tp: int) -> None:
        self.client: Client = kvstore.open_local(ROOM * 8192)
        geometry = Geometry.parallel(LAYOUT, tp=tp)
        self.ranks = [self.client.bind(SPACE, geometry=geometry, rank=rank) for rank in range(tp)]
        self.cache: Cache = self.ranks[0]
        self.keys = prompt_keys(1, CHUNKS, SPACE)
        self.others = prompt_keys(2, ROOM, SPACE)
        self.pages: Bytes = np.empty((CHUNKS, *LAYOUT.shape(LAYOUT.whole)), dtype=np.uint8)
        self.put(self.keys)

    @property
    def host(self) -> EmbeddedHost:
        host = self.client.host()
        assert isinstance(host, EmbeddedHost)
        return host

    def put(self, keys: Keys) -> None:
        pages = pages_of(keys, 1, LAYOUT.chunk_bytes).reshape(len(keys), *LAYOUT.shape(LAYOUT.whole))
        for cache in self.ranks:
            part = cache.rectangle
            mine = pages[:, part.layer_start : part.layer_stop, :, part.head_start : part.head_stop]
            assert cache.write(keys, np.ascontiguousarray(mine)).visible == len(keys)

    def evict(self) -> None:
        """Another prompt takes all the room."""
        self.put(self.others)

    def remove(self) -> None:
        """Somebody removes the prompt, and another one takes its slots."""
        self.cache.remove(self.keys)
        self.put(self.others)

    def move(self) -> None:
        """Evicted and stored again: the same bytes in other slots, or in the same ones."""
        self.put(self.others)
        self.cache.remove(self.others)
        self.put(self.keys)

    def read(self, destination: object) -> ReadResult:
        self.pages[:] = POISON
        return self.cache.read(self.keys, destination, rectangle=LAYOUT.whole)

    def wrong(self, chunks: int) -> int:
        return wrong_chunks(self.pages.reshape(CHUNKS, -1), self.keys, chunks)


@pytest.fixture(params=[1, 2], ids=["whole", "tp2"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(request.param)
    yield pool
    pool.host.core.check()
    pool.client.close()


class Overtaken:
    """A destination that lets `act` happen in its scatter number `at`: before, in the middle of or after the copy."""

    def __init__(self, pages: Bytes, act: Callable[[], None], at: int, moment: str) -> None:
        self._pages = pages
        self._act = act
        self._at = at
        self._moment = moment
        self.calls = 0

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        layers, _, heads, _ = piece.shape
        place = self._pages[index, layer_start : layer_start + layers, :, head_start : head_start + heads]
        now = self.calls == self._at or self._at < 0
        self.calls += 1
        if now and self._moment == "before":
            self._act()
        place[:1] = piece[:1]
        if now and self._moment == "middle":
            self._act()
        place[1:] = piece[1:]
        if now and self._moment == "after":
            self._act()


MOMENTS = ("before", "middle", "after")


def every_place(pool: Pool) -> Iterator[tuple[int, str]]:
    """All scatters of an undisturbed read, three moments each."""
    undisturbed = Overtaken(pool.pages, lambda: None, 0, "before")
    assert pool.read(undisturbed).chunks == CHUNKS
    return ((at, moment) for at in range(undisturbed.calls) for moment in MOMENTS)


@pytest.mark.parametrize("batch_chunks", [1, 8])
@pytest.mark.parametrize("act", ["evict", "remove", "move"])
def test_right_bytes_or_a_miss_wherever_the_slots_are_reused(
    pool: Pool, act: str, batch_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "BATCH_BYTES", batch_chunks * LAYOUT.chunk_bytes)
    for at, moment in every_place(pool):
        destination = Overtaken(pool.pages, getattr(pool, act), at, moment)
        result = pool.read(destination)
        assert pool.wrong(result.chunks) == 0, (at, moment)
        confirmed = at // len(pool.ranks) if batch_chunks == 1 else 0
        if act == "move":
            assert (result.chunks, result.reason) == (CHUNKS, None)
        else:
            assert (result.chunks, result.reason) == (confirmed, MissReason.ABSENT), (at, moment)
        pool.host.core.check()
        pool.cache.remove(pool.others)
        pool.put(pool.keys)
        assert pool.read(pool.pages).chunks == CHUNKS, "the next read hits"
        assert pool.wrong(CHUNKS) == 0


@pytest.mark.parametrize("act", ["evict", "remove"])
def test_without_the_second_look_the_same_reads_give_wrong_bytes(
    pool: Pool, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CatalogReader, "confirm", lambda reader, found: found.run)
    wrong = {}
    for at, moment in every_place(pool):
        result = pool.read(Overtaken(pool.pages, getattr(pool, act), at, moment))
        wrong[at, moment] = pool.wrong(result.chunks)
        pool.cache.remove(pool.others)
        pool.put(pool.keys)
    last = max(at for at, _ in wrong)
    assert all(count > 0 for place, count in wrong.items() if place != (last, "after")), wrong
    assert wrong[last, "after"] == 0


def test_a_prompt_that_moves_without_end_is_given_up(pool: Pool) -> None:
    """Every copy is overtaken: three retries, then a miss, and no wrong byte counts."""
    result = pool.read(Overtaken(pool.pages, pool.move, -1, "before"))
    assert (result.chunks, result.reason) == (0, MissReason.FENCE)
    stats = pool.client.stats()
    assert (stats["fence_retries"], stats["misses_fence"]) == (FENCE_RETRIES, 1)
    assert pool.read(pool.pages).chunks == CHUNKS
    assert pool.wrong(CHUNKS) == 0


def test_a_torn_row_that_points_beyond_the_arena_does_not_vouch_for_the_chunks_before_it(pool: Pool) -> None:
    """The copy stops at chunk 2, whose row is torn; chunks 0 and 1 were overtaken and must not count unconfirmed."""
    reader, looks = pool.host.reader, []
    gather = reader._gather

    def torn(rows: Words, indices: np.ndarray) -> Words:
        seen = gather(rows, indices)
        looks.append(len(seen))
        if len(looks) == 1:
            seen[2 * len(pool.ranks), 5] |= np.uint64(0xFFFFFFFF)
        return seen

    reader._gather = torn
    result = pool.read(Overtaken(pool.pages, pool.evict, 1, "before"))
    assert (result.chunks, pool.wrong(result.chunks)) == (0, 0)
    assert len(looks) == 3, "look, confirm of the two chunks before the torn one, look again"


# --- bytes that changed in place --------------------------------------------------------------------------------


def read_verified(pool: Pool, verify: bool) -> LocalRead:
    pool.pages[:] = POISON
    destination = Overtaken(pool.pages, lambda: None, 0, "before")
    end_s = time.monotonic() + 5
    return read_local(pool.host, LAYOUT, pool.keys, LAYOUT.whole, destination, end_s, verify=verify)


@pytest.mark.parametrize("tampered", ["payload", "table", "both"])
def test_verified_reads_notice_bytes_that_changed_in_place(pool: Pool, tampered: str) -> None:
    """What a reader on a weakly ordered CPU relies on; without it the same bytes are delivered."""
    found = pool.host.reader.find(pool.keys, LAYOUT.whole)
    start = int(found.offsets[2, -1])
    length = int(found.rows[-1, 5]) >> 32
    arena = pool.host.arena
    if tampered != "table":
        arena[start + length - 1] ^= 0x01
    if tampered != "payload":
        arena[start + length] ^= 0x01
    assert read_verified(pool, True) == LocalRead(2, MissReason.CHECKSUM, FENCE_RETRIES)
    assert pool.wrong(2) == 0
    unverified = read_verified(pool, False)
    assert (unverified.chunks, pool.wrong(CHUNKS)) == (CHUNKS, 0 if tampered == "table" else 1)


def test_a_verified_read_passes_on_nothing_that_is_wrong(pool: Pool) -> None:
    """The destination of the wrong chunk is not touched: it is checked in private memory."""
    found = pool.host.reader.find(pool.keys, LAYOUT.whole)
    pool.host.arena[int(found.offsets[2, 0])] ^= 0x01
    assert read_verified(pool, True).chunks == 2
    assert (pool.pages[2:] == POISON).all()
