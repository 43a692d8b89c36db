"""The client of our side: writes and reads chunks of a live node, verified as `Client.bind` does by default.

The chunks are 64 tokens in 4 pages of 8 KiB head pages (16 tokens, 4 KV heads of 128 in bf16): 16 layers make 2 MiB,
one layer 128 KiB. They lie in pieces in random order, or with `--paged` in an engine's tensors, a page here, a page
there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from drive import Pieces, serve

import kvstore
from kvstore.client import Client
from kvstore.model import checksum
from kvstore.model.prefix import Keys

PAGES, HEADS, PAGE_TOKENS = 4, 4, 16
LAYER_BYTES = PAGES * HEADS * 8192
CHUNK_TOKENS = PAGES * PAGE_TOKENS
DEADLINE_S = 60.0


class Scattered:
    """Source and destination of chunks that lie in a list of pieces."""

    scatters_at_once = gathers_at_once = sums_on_the_way = True

    def __init__(self, pieces: Sequence[npt.NDArray[np.uint8]], shape: tuple[int, ...]) -> None:
        self._pieces = [piece.reshape(shape) for piece in pieces]

    def scatter(self, index: int, piece: npt.NDArray[np.uint8], layer_start: int, head_start: int) -> None:
        """See `kvstore.client.Destination`; always whole heads."""
        self._pieces[index][layer_start : layer_start + len(piece)] = piece

    def scatter_checked(self, index: int, piece: Any, layer_start: int, head_start: int, table: Any) -> bool:
        """See `kvstore.client.Checking`; always whole heads."""
        return checksum.copy_in(piece, table, self._pieces[index][layer_start : layer_start + len(piece)])

    def gather(self, index: int, slot: npt.NDArray[np.uint8], layer_start: int, head_start: int) -> None:
        """See `kvstore.client.Source`; always whole heads."""
        slot[...] = self._pieces[index][layer_start : layer_start + len(slot)]

    def gather_summed(self, index: int, slot: Any, layer_start: int, head_start: int) -> Any:
        """See `kvstore.client.Summing`; always whole heads."""
        return checksum.copy_out(self._pieces[index][layer_start : layer_start + len(slot)], slot)


class Ours:
    """A namespace of the pool; `memory` says what is poisoned, compared and copied."""

    def __init__(self, client: Client, count: int, layers: int, memory: Any, source: Any, into: Any) -> None:
        self._count, self._source, self._into = count, source, into
        self._cache = client.bind(kvstore.Namespace("bench", f"peers-{layers}", layout_of(layers)))
        self._shared = client.host() is not None
        self.poison, self.check, self.copy = memory.poison, memory.check, memory.copy
        self._generation = 0

    def write(self) -> None:
        """Fresh keys; the tokens stay for look-ups."""
        self._generation += 1
        length = self._count * CHUNK_TOKENS
        self._tokens = np.arange(length, dtype=np.int64) + self._generation * length
        self._keys = self._cache.keys(self._tokens)
        result = self._cache.write(self._keys, self._source, deadline_s=DEADLINE_S)
        if result.stored != self._count:
            raise SystemExit(f"stored {result.stored} of {self._count} chunks: {set(result.outcomes)}")

    def read(self) -> str:
        """All chunks, or the end."""
        result = self._cache.read(self._keys, self._into, deadline_s=DEADLINE_S)
        if result.chunks != self._count:
            raise SystemExit(f"read {result.chunks} of {self._count} chunks: {result.reason}")
        return "+".join(result.bytes_by_path)

    def forget(self) -> None:
        """Remove the chain, where the node is on this host; the node of another host evicts what is oldest."""
        if self._shared:
            self._cache.remove(self._keys.slice(0, 1))

    def lookup(self, keys: int) -> None:
        """From tokens to the number of leading chunks."""
        self._ask(self._cache.keys(self._tokens[: keys * CHUNK_TOKENS]))

    def match(self, keys: int) -> None:
        """From keys, which an engine makes once a request, to the number of leading chunks."""
        self._ask(self._keys.slice(0, keys))

    def _ask(self, keys: Keys) -> None:
        found = self._cache.match(keys)
        if found.pool_chunks != len(keys):
            raise SystemExit(f"found {found.pool_chunks} of {len(keys)} chunks")

    def settle(self) -> None:
        """A look-up holds nothing."""


def layout_of(layers: int) -> kvstore.PageLayout:
    """Chunks of `layers` x 128 KiB."""
    return kvstore.PageLayout(layers, HEADS, 128, kvstore.Dtype.BF16, PAGE_TOKENS, PAGES)


def in_pieces(client: Client, count: int, layers: int) -> Ours:
    """Chunks that lie in one piece each."""
    pieces, layout = Pieces(count, layers * LAYER_BYTES), layout_of(layers)
    shape = layout.shape(layout.whole)
    source, target = (Scattered(places, shape) for places in (pieces.sources(), pieces.targets()))
    return Ours(client, count, layers, pieces, source, target)


def in_pages(client: Client, count: int, layers: int) -> Ours:
    """Chunks that lie in an engine's tensors, KV head outermost in a block."""
    import torch
    from paged import Paged

    from engine_adapter.copy import PagedKv

    shape = (2 * count * PAGES, HEADS, PAGE_TOKENS, 2 * 128)
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]
    memory = Paged(tensors, 0, PAGES)
    source, target = (PagedKv(tensors, PAGES, blocks) for blocks in (memory.source, memory.target))
    return Ours(client, count, layers, memory, source, target)


def main() -> None:
    """Connect and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--piece-bytes", type=int, required=True)
    parser.add_argument("--paged", action="store_true")
    options = parser.parse_args()
    client = kvstore.connect(options.address)
    make = in_pages if options.paged else in_pieces
    versions = {name: version(name) for name in ("kvstore", "numpy", "xxhash")}
    serve(lambda: make(client, options.count, options.piece_bytes // LAYER_BYTES), versions)


if __name__ == "__main__":
    main()
