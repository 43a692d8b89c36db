"""Driving a live pool with a request trace, and counting what it delivers.

One chunk is one block of the trace. Its payload of 4 KiB follows from its key, so that any wrong byte of a read
is seen: destinations are filled with the complement of what must arrive, and every delivered byte is compared.
Request i starts at node i mod N, which reads the longest prefix that the pool has; the chunks that were missing
are written to the node that holds the longest prefix of the chain itself (the starting node where that is a tie).
A trace has no time between its requests, so the replay waits where a pool would have had it: until the index knows of
what was stored, and until the nodes have written to their SSDs what is to be written.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.analytics.offline import HitCounts
from kvstore.analytics.trace import BLOCK_TOKENS, Request
from kvstore.client import Cache, Client
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Outcome

INDEX_WAIT_S: Final = 5.0
"""Longest wait for the index to tell of chunks that were committed on another node a moment ago."""

SAVE_WAIT_S: Final = 10.0
"""Longest wait for the nodes to save a request's chunks."""

_POLL_S: Final = 0.001
_NOISE_SEED: Final = 20_250_213


def replay_namespace(block_tokens: int = BLOCK_TOKENS) -> Namespace:
    """One layer, one head, one page of 8 bytes a token: 4 KiB a chunk for blocks of 512 tokens."""
    layout = PageLayout(
        layers=1, kv_heads=1, head_dim=4, dtype=Dtype.FP8_E4M3, page_tokens=block_tokens, pages_per_chunk=1
    )
    return Namespace("trace-replay", "1", layout)


def payloads(keys: Keys, chunk_bytes: int) -> npt.NDArray[np.uint8]:
    """What the chunks of these keys hold, shape (n, chunk_bytes): the key over and over, with a fixed noise over
    it, so that neither another chunk's bytes nor shifted ones can pass. Unused tokens of the last chunk are zero."""
    content = (keys.words[:, None, :] ^ _noise(chunk_bytes)).reshape(len(keys), chunk_bytes // 8).view(np.uint8)
    if len(keys):
        content[-1, chunk_bytes * keys.last_tokens // keys.chunk_tokens :] = 0
    return content


@functools.cache
def _noise(chunk_bytes: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(_NOISE_SEED).integers(0, 1 << 63, size=(chunk_bytes // 16, 2), dtype=np.uint64)


class Replayer:
    """One client a node, all of one pool. `counts` and the counters beside it grow with every `serve`.

    `wrong_bytes` are delivered bytes that differ from what was written. `misses` counts every missing chunk under
    one reason; `refused` every chunk that could not be stored. `to_save` tells how many chunks the nodes have still to
    write to their SSDs; None: there is no SSD.
    """

    def __init__(
        self, clients: Sequence[Client], namespace: Namespace, to_save: Callable[[], int] | None = None
    ) -> None:
        if not clients:
            raise InvalidRequest("a replay needs at least one node")
        self._clients = clients
        self._caches: list[Cache] = [client.bind(namespace) for client in clients]
        self._layout = namespace.layout
        self._to_save = to_save
        self.counts = HitCounts()
        self.local_hits = 0
        self.remote_hits = 0
        self.wrong_bytes = 0
        self.index_waits = 0
        self.save_waits = 0
        self.saves_given_up = 0
        self.misses: Counter[MissReason] = Counter()
        self.refused: Counter[Outcome] = Counter()

    def serve(self, number: int, request: Request) -> None:
        """Read the longest prefix at node `number` mod N, write the rest, flush the touches."""
        if request.block_tokens != self._layout.chunk_tokens:
            raise InvalidRequest(f"blocks of {request.block_tokens} tokens in chunks of {self._layout.chunk_tokens}")
        start = number % len(self._caches)
        keys = self._caches[start].keys(request.tokens())
        content = payloads(keys, self._layout.chunk_bytes)
        home = self._home(keys, start)
        run = self._read(start, request, keys, content)
        if run < len(keys):
            result = self._caches[home].write(keys, self._shaped(content))
            self.refused.update(outcome for outcome in result.outcomes if outcome.refused)
        for client in {start: self._clients[start], home: self._clients[home]}.values():
            client.flush_touches()
        self._wait_saved()

    def _wait_saved(self) -> None:
        """Until the nodes have nothing left to save, at most `SAVE_WAIT_S`."""
        ends_at_s = time.monotonic() + SAVE_WAIT_S
        while self._to_save is not None and self._to_save():
            if time.monotonic() >= ends_at_s:
                self.saves_given_up += 1
                return
            self.save_waits += 1
            time.sleep(_POLL_S)

    def _home(self, keys: Keys, start: int) -> int:
        """The node with the longest prefix on its own tiers. Waits until the index knows of it as well: the
        replay counts what the pool holds, and a trace has no time between its requests."""
        if len(self._caches) == 1:
            return start
        matches = [cache.match(keys) for cache in self._caches]
        home = max(range(len(matches)), key=lambda node: (matches[node].local_chunks, node == start))
        wanted = matches[home].local_chunks
        seen = matches[start]
        ends_at_s = time.monotonic() + INDEX_WAIT_S
        while max(seen.local_chunks, seen.pool_chunks) < wanted and time.monotonic() < ends_at_s:
            self.index_waits += 1
            time.sleep(_POLL_S)
            seen = self._caches[start].match(keys)
        return home

    def _read(self, start: int, request: Request, keys: Keys, content: npt.NDArray[np.uint8]) -> int:
        destination = ~content
        result = self._caches[start].read(keys, self._shaped(destination))
        run = result.chunks
        # Of a node's run, what it had on the SSD only are whole chunks; the last one of the prompt may be short.
        ssd_run = -(-result.ssd_tokens // request.block_tokens)
        self.counts.add(request, run, ssd_run)
        self.wrong_bytes += int(np.count_nonzero(destination[:run] != content[:run]))
        self.local_hits += result.local_chunks
        self.remote_hits += result.remote_chunks
        if run < len(keys):
            self.misses[result.reason or MissReason.ABSENT] += 1
            self.misses[MissReason.PARENT_MISS] += len(keys) - run - 1
        return run

    def _shaped(self, chunks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return chunks.reshape(len(chunks), *self._layout.shape(self._layout.whole))
