"""Chunks that an engine names and cuts itself, as rows of bytes: the pool behind an engine's own host tier.

An engine that offloads by itself gives each chunk a name (a hash of everything before it) and a row of bytes in its
host memory. Here the name becomes a key, and each row a chunk of its own at the start of a prompt: without the tokens
there is no chain, so rows leave the pool one by one, as they do in the engine. Whether two rows are the same is for the
engine's names to say; that two models' rows are not is for the namespace.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import xxhash

from engine_adapter.looks import Looks
from engine_adapter.session import PoolSession
from kvstore.client.buffers import ChunkArray
from kvstore.errors import LayoutMismatch
from kvstore.model.layout import Attention, Dtype, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KEY_BYTES, Keys
from kvstore.model.values import MissReason

Move = Callable[[bytes, int, float], bool]
"""(name, place of its row, seconds left, none if 0 or less) -> whether it is done."""
Rows = npt.NDArray[np.uint8]
"""(rows, row bytes): the engine's host memory."""
JOBS_AT_ONCE = 4
LOST_LIMIT = 65536
"""Names of rows that were found and not delivered: they count as missing until they are stored again."""


def row_layout(row_bytes: int, row_tokens: int) -> PageLayout:
    """A layout with chunks of exactly `row_bytes`: one page of `row_tokens` tokens in as few layers as sizes allow.

    LayoutMismatch where no such cut exists.
    """
    a_token, rest = divmod(row_bytes, row_tokens)
    layers = next((n for n in range(1, 1 << 12) if not a_token % n and a_token // n < 1 << 16), 0)
    if rest or not layers:
        raise LayoutMismatch(f"rows of {row_bytes} bytes for {row_tokens} tokens cannot be cut into equal layers")
    return PageLayout(
        layers=layers,
        kv_heads=1,
        head_dim=a_token // layers,
        dtype=Dtype.FP8_E4M3,  # one byte an element; what the elements are says the namespace
        page_tokens=row_tokens,
        pages_per_chunk=1,
        attention=Attention.MLA,
        interior="engine-row",
    )


@dataclass(frozen=True, slots=True)
class JobEnd:
    """A job that ended. `done`: names whose rows were stored, or delivered."""

    job: int
    done: tuple[bytes, ...]
    whole: bool
    seconds: float
    size_bytes: int


class RowPool:
    """The rows of one engine. `find` never waits; jobs run in threads. `session`: of a namespace with `row_layout`.

    A job's deadline counts from when it was given: jobs that waited for others behind a node that does not answer are
    given up with them, so that all have ended within one deadline.
    """

    def __init__(
        self,
        namespace: Namespace,
        session: PoolSession,
        looks: Looks,
        rows: Rows,
        *,
        secret: bytes,
        load_deadline_s: float,
        store_deadline_s: float,
    ) -> None:
        if rows.ndim != 2 or rows.shape[1] != namespace.layout.chunk_bytes:
            raise LayoutMismatch(f"rows are (count, {namespace.layout.chunk_bytes}) bytes, not {rows.shape}")
        self.counts: Counter[str] = Counter()
        self._namespace = namespace
        self._session = session
        self._looks = looks
        self._rows = rows
        self._secret = secret
        self._load_deadline_s = load_deadline_s
        self._store_deadline_s = store_deadline_s
        self._threads = ThreadPoolExecutor(JOBS_AT_ONCE, thread_name_prefix="kvstore-rows")
        self._idle = threading.Condition()
        self._under_way = 0
        self._ends: deque[JobEnd] = deque()
        self._lost: dict[bytes, None] = {}
        """Oldest first."""
        self._asking: dict[str, set[bytes]] = {}
        """Names that could not be answered at once, by request."""

    def keys(self, name: bytes) -> Keys:
        """The row's key."""
        key = blake2b(
            self._namespace.id + name, digest_size=KEY_BYTES, key=self._secret, person=b"kvstore-row"
        ).digest()
        root = xxhash.xxh3_64_intdigest(self._namespace.id)
        fingerprints = np.array([root, xxhash.xxh3_64_intdigest(name, root)], dtype=np.uint64)
        tokens = self._namespace.layout.chunk_tokens
        return Keys(self._namespace.id, self._namespace.id, key, fingerprints, tokens, tokens)

    def find(self, name: bytes, request_id: str) -> bool | None:
        """True if the pool has the row, None = not known yet, ask again. Call `settled` for each request once asked."""
        if name in self._lost:
            return False
        found = self._looks.ask(name.hex(), [self.keys(name)])
        if found is None:
            self._asking.setdefault(request_id, set()).add(name)
            return None
        return found > 0

    def settled(self, request_id: str) -> None:
        """The request asks no more: answers on their way to it need no place among the others any longer.

        An engine asks for all rows of a prompt and never again for those behind the first that is missing.
        """
        for name in self._asking.pop(request_id, ()):
            self._looks.forget(name.hex())

    def store(self, job: int, names: Sequence[bytes], places: Sequence[int]) -> None:
        """Store these rows; the engine leaves them as they are until the job has ended."""
        with self._idle:
            for name in names:
                self._lost.pop(name, None)
        self._begin(job, names, places, self._store_row, self._store_deadline_s)

    def load(self, job: int, names: Sequence[bytes], places: Sequence[int]) -> None:
        """Fill these rows. One that does not come is not found any more until it is stored again."""
        self._begin(job, names, places, self._load_row, self._load_deadline_s)

    def _begin(self, job: int, names: Sequence[bytes], places: Sequence[int], move: Move, deadline_s: float) -> None:
        with self._idle:
            self._under_way += 1
        # What a job waits for others counts: behind a pool that holds still all of them end within one deadline.
        until_s = time.monotonic() + deadline_s
        self._threads.submit(self._run, job, tuple(names), tuple(places), move, until_s)

    def _run(self, job: int, names: tuple[bytes, ...], places: tuple[int, ...], move: Move, until_s: float) -> None:
        start_s, done = time.monotonic(), []
        try:
            for name, place in zip(names, places, strict=True):
                if move(name, place, until_s - time.monotonic()):
                    done.append(name)
        finally:
            size_bytes = len(done) * self._namespace.layout.chunk_bytes
            end = JobEnd(job, tuple(done), len(done) == len(names), time.monotonic() - start_s, size_bytes)
            with self._idle:
                self._ends.append(end)
                self._under_way -= 1
                self._idle.notify_all()

    def _row(self, place: int) -> ChunkArray:
        layout = self._namespace.layout
        return ChunkArray(self._rows[place].reshape(1, *layout.shape(layout.whole)), layout.whole)

    def _store_row(self, name: bytes, place: int, left_s: float) -> bool:
        if left_s <= 0:
            return False
        with self._session.writer(self.keys(name), self._row(place), deadline_s=left_s) as writer:
            writer.put_chunks(0, 1)
            writer.finish()
        self.counts["store_rows"] += writer.stored_chunks
        return writer.visible_chunks == 1

    def _load_row(self, name: bytes, place: int, left_s: float) -> bool:
        reason: MissReason | None = MissReason.DEADLINE
        if left_s > 0:
            result = self._session.read(self.keys(name), self._row(place), deadline_s=left_s)
            if result.chunks:
                self.counts["load_rows"] += 1
                return True
            reason = result.reason
        self.counts[f"load_misses_{reason}"] += 1
        with self._idle:
            self._lost[name] = None
            if len(self._lost) > LOST_LIMIT:
                del self._lost[next(iter(self._lost))]
        return False

    def ended(self) -> list[JobEnd]:
        """Jobs that ended since the last call."""
        with self._idle:
            ends = list(self._ends)
            self._ends.clear()
        return ends

    @property
    def busy(self) -> bool:
        """True while a job is under way or has not been told."""
        return self._under_way > 0 or bool(self._ends)

    def wait_idle(self) -> None:
        """Return when no row is read or written any more: within the jobs' deadlines."""
        with self._idle:
            self._idle.wait_for(lambda: not self._under_way)

    def close(self) -> None:
        """End the threads after the jobs that are under way, and let go of the engine's memory."""
        self._threads.shutdown(wait=True)
        self._rows = np.empty((0, self._namespace.layout.chunk_bytes), np.uint8)
