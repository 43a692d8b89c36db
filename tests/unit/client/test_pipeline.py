"""The reading pipeline over a scripted connection: what is asked for ahead, and what comes of staging when it fails."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvstore.client import pipeline as pipeline_module
from kvstore.client.buffers import ChunkArray
from kvstore.client.layers import layer_groups
from kvstore.client.pipeline import ASKED, Delivery, Pipeline
from kvstore.client.values import Destination
from kvstore.model import checksum
from kvstore.model.layout import Rectangle
from kvstore.model.values import MissReason
from kvstore.node import ShardPlace
from kvstore.transport import ReadDescriptor, ReadResult, ReadStatus
from kvstore.transport.staging import Staging
from tests.unit.client.pages import LAYOUT, POISON, Bytes, namespace

CHUNKS = 6
SIZE = LAYOUT.chunk_bytes
BLOCK = SIZE + 4096
ARENA = np.random.default_rng(5).integers(0, 256, CHUNKS << 14, dtype=np.uint8)
PLACES = [[ShardPlace(i, 0, i * 4, 7, 0, LAYOUT.whole)] for i in range(CHUNKS)]
DONE = ReadResult(ReadStatus.DONE)
LATE = ReadResult(ReadStatus.DEADLINE)


@dataclass
class Script:
    """A connection. Exchange i has the payload `payloads[i]` and the words `fences[i]`; by default all is well."""

    payloads: dict[int, ReadResult | BaseException] = field(default_factory=dict)
    fences: dict[int, ReadResult] = field(default_factory=dict)
    refuses: Callable[[int], bool] = lambda number: False
    """Exchanges that cannot be started now, asked each time."""
    log: list[str] = field(default_factory=list)
    cancelled: bool = False
    name: str = "script"
    is_open: bool = True
    count: int = 0
    asked_bytes: int = 0

    def start(self, descriptors: Sequence[ReadDescriptor], staging: Bytes, deadline_s: float) -> Scripted | None:
        if self.refuses(self.count):
            self.log.append(f"refuse {self.count}")
            return None
        self.log.append(f"start {self.count}")
        self.asked_bytes += sum(one.length for one in descriptors)
        self.count += 1
        return Scripted(self, self.count - 1, descriptors, staging)

    def read(self, descriptors: Sequence[ReadDescriptor], staging: Bytes, deadline_s: float) -> ReadResult:
        raise NotImplementedError

    def cancel(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        raise NotImplementedError


@dataclass
class Scripted:
    connection: Script
    number: int
    descriptors: Sequence[ReadDescriptor]
    staging: Bytes

    def payload(self) -> ReadResult:
        self.connection.log.append(f"payload {self.number}")
        if self.connection.cancelled:
            return ReadResult(ReadStatus.CANCELLED)
        result = self.connection.payloads.get(self.number, DONE)
        if isinstance(result, BaseException):
            raise result
        for one in self.descriptors if result.status is ReadStatus.DONE else ():
            self.staging[one.staging_offset :][: one.length] = ARENA[one.offset :][: one.length]
        return result

    def fence(self) -> ReadResult:
        self.connection.log.append(f"fence {self.number}")
        return self.connection.fences.get(self.number, ReadResult(ReadStatus.DONE, (7,) * len(self.descriptors)))


class Reader:
    """Reads all chunks, one a batch, through staging with room for `blocks` of them."""

    def __init__(
        self,
        script: Script,
        blocks: int = 16,
        destination: Destination | None = None,
        groups: tuple[Rectangle, ...] = (),
    ) -> None:
        self.groups = groups
        self.told: list[int] = []
        self.script = script
        self.staging = Staging(blocks * BLOCK)
        self.pages = np.full((CHUNKS, *LAYOUT.shape(LAYOUT.whole)), POISON, dtype=np.uint8)
        self.destination = destination or ChunkArray(self.pages, LAYOUT.whole)
        self.pipeline: Pipeline

    def read(self, deadline_s: float = 10.0) -> tuple[int, MissReason | None]:
        try:
            with ThreadPoolExecutor(1) as executor:
                end_s = time.monotonic() + deadline_s
                delivery = Delivery(
                    namespace(),
                    LAYOUT.whole,
                    self.destination,
                    self.staging,
                    executor,
                    end_s,
                    groups=self.groups,
                    on_group=self.told.append,
                )
                self.pipeline = Pipeline(delivery, 0, self.script)
                return self.pipeline.read(PLACES, True)
        finally:
            self.staging.check()

    def right(self, chunks: int) -> bool:
        wanted = ARENA.reshape(CHUNKS, -1)[:, :SIZE].reshape(self.pages.shape)
        return bool((self.pages[:chunks] == wanted[:chunks]).all() and (self.pages[chunks:] == POISON).all())

    @property
    def all_free(self) -> bool:
        return self.staging.usage().free_bytes == self.staging.total_bytes


@pytest.fixture(autouse=True)
def one_chunk_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "BATCH_BYTES", SIZE)


def most_under_way(log: Sequence[str]) -> int:
    """Exchanges that were started and whose payload was not waited for yet, at most."""
    most = now = 0
    for step in log:
        now += step.startswith("start") - step.startswith("payload")
        most = max(most, now)
    return most


def test_the_next_is_asked_for_before_a_payload_is_waited_for() -> None:
    reader = Reader(Script())
    assert reader.read() == (CHUNKS, None)
    assert reader.right(CHUNKS) and reader.all_free and reader.pipeline.healthy
    log = [step for step in reader.script.log if not step.startswith("fence")]
    assert log[:4] == ["start 0", "start 1", "payload 0", "start 2"] and most_under_way(log) == ASKED
    assert reader.pipeline.moved == 0 and reader.script.count == CHUNKS


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_little_staging_asks_for_less_ahead(blocks: int) -> None:
    """With a quarter of it smaller than a chunk, one block after the other: never a wait for itself."""
    reader = Reader(Script(), blocks)
    assert reader.read() == (CHUNKS, None)
    assert reader.right(CHUNKS) and reader.all_free
    assert most_under_way(reader.script.log) == min(blocks, ASKED)


def test_readers_that_share_little_staging_do_not_wait_for_each_other() -> None:
    """Each holds what it asked for ahead; if both waited for another block, both would wait till their deadlines."""
    shared, readers = Staging(3 * BLOCK), [Reader(Script()) for _ in range(4)]
    for reader in readers:
        reader.staging = shared
    results: list[object] = []

    def repeat(reader: Reader) -> None:
        for _ in range(20):
            reader.script.count = 0
            results.append(reader.read(20.0))

    threads = [threading.Thread(target=repeat, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [(CHUNKS, None)] * 80
    assert shared.usage().free_bytes == shared.total_bytes


@pytest.mark.parametrize("at", range(CHUNKS))
def test_a_payload_that_fails_ends_the_read_there(at: int) -> None:
    reader = Reader(Script({at: LATE}))
    assert reader.read() == (at, MissReason.DEADLINE)
    assert reader.right(at) and reader.all_free and not reader.pipeline.healthy


def test_what_may_still_come_is_quarantined_until_it_has_ended() -> None:
    over: list[bool] = []
    pending = ReadResult(ReadStatus.DEADLINE, ended=lambda: bool(over))
    reader = Reader(Script({2: pending, 3: pending}))
    assert reader.read() == (2, MissReason.DEADLINE)
    assert reader.staging.usage().quarantined_bytes == 2 * BLOCK, "the one that was asked for ahead too"
    over.append(True)
    assert reader.all_free


@pytest.mark.parametrize("at", range(CHUNKS))
@pytest.mark.parametrize(
    ("words", "reason", "healthy"),
    [
        (ReadResult(ReadStatus.DONE, (9,)), MissReason.FENCE, True),
        (ReadResult(ReadStatus.UNREACHABLE), MissReason.UNREACHABLE, False),
    ],
)
def test_words_that_differ_or_do_not_come(at: int, words: ReadResult, reason: MissReason, healthy: bool) -> None:
    """What was asked for ahead is taken all the same: with bytes under way no other read could use the connection."""
    reader = Reader(Script(fences={at: words}))
    assert reader.read() == (at, reason)
    assert reader.right(at) and reader.all_free and reader.pipeline.healthy is healthy
    steps = [step.split()[0] for step in reader.script.log]
    assert steps.count("start") == steps.count("payload")


@pytest.mark.parametrize("at", range(CHUNKS))
def test_a_destination_that_raises_is_heard_and_keeps_nothing(at: int) -> None:
    class Failing:
        def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
            if index == at:
                raise RuntimeError("no room")

    reader = Reader(Script(), destination=Failing())
    with pytest.raises(RuntimeError, match="no room"):
        reader.read()
    assert reader.all_free and reader.script.cancelled and not reader.pipeline.healthy


def test_a_wait_that_is_interrupted_leaves_its_block_to_nobody() -> None:
    """Nobody can say when the bytes of that exchange have come; the others' end is known."""
    reader = Reader(Script({1: KeyboardInterrupt()}))
    with pytest.raises(KeyboardInterrupt):
        reader.read()
    assert reader.staging.usage().quarantined_bytes == BLOCK and reader.script.cancelled


def test_one_at_a_time_where_the_connection_cannot_do_more() -> None:
    """It refuses until the words of the one before were asked for."""
    script = Script()
    script.refuses = lambda number: number > 0 and f"fence {number - 1}" not in script.log
    reader = Reader(script)
    assert reader.read() == (CHUNKS, None)
    assert reader.right(CHUNKS) and reader.all_free and reader.pipeline.healthy
    assert most_under_way(script.log) == 1


def test_a_connection_that_never_takes_another_ends_the_read() -> None:
    reader = Reader(Script(refuses=lambda number: number == 2))
    assert reader.read() == (2, MissReason.UNREACHABLE)
    assert reader.right(2) and reader.all_free and not reader.pipeline.healthy


# --- in groups of layers ------------------------------------------------------------------------------------


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Bytes:
    """The arena with a checksum table behind each chunk, and places that know the tables' hashes."""
    arena, places = ARENA.copy(), []
    for index, (place,) in enumerate(PLACES):
        start = index << 14
        table = checksum.table_of(arena[start : start + SIZE], LAYOUT, LAYOUT.whole)
        arena[start + SIZE :][: table.nbytes] = table.view(np.uint8).ravel()
        places.append([replace(place, table_hash=checksum.table_hash(table))])
    monkeypatch.setattr(sys.modules[__name__], "ARENA", arena)
    monkeypatch.setattr(sys.modules[__name__], "PLACES", places)
    return arena


GROUPS = layer_groups(LAYOUT, LAYOUT.whole, 1)


def test_a_table_comes_once_however_many_groups_there_are(summed: Bytes) -> None:
    reader = Reader(Script(), groups=GROUPS)
    assert reader.read() == (CHUNKS, None)
    assert reader.right(CHUNKS) and reader.all_free
    assert reader.told == list(range(len(GROUPS)))
    assert reader.script.asked_bytes == CHUNKS * (SIZE + checksum.table_bytes(LAYOUT.whole))


@pytest.mark.parametrize("layer", range(LAYOUT.layers))
def test_each_group_is_compared_with_the_table(summed: Bytes, layer: int) -> None:
    summed[(2 << 14) + layer * SIZE // LAYOUT.layers] ^= 1
    reader = Reader(Script(), groups=GROUPS)
    assert reader.read() == (2, MissReason.CHECKSUM)
    assert reader.told == list(range(layer)) and reader.all_free


def test_a_table_of_another_hash_is_not_believed_in_any_group(summed: Bytes) -> None:
    summed[(2 << 14) + SIZE] ^= 1
    reader = Reader(Script(), groups=GROUPS)
    assert reader.read() == (2, MissReason.CHECKSUM) and not reader.told
