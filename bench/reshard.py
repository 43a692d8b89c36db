"""Resharding by read plans: stored shards of one parallel layout into the paged tensors of an engine with another.

One rank of the reading engine, all in this process: no node and no network, so what is measured is the plan and the
copy. Model: 32 layers, 8 KV heads of 128 elements in bf16, chunks of 64 tokens (8 MiB over all ranks), blocks at
random places. Lines a case:

    op read      each shard's part of each chunk, straight from where it is stored into the engine's blocks
    op staged    the runs of its fetch plan into a dense block, then from there: what a network reader copies
    op write     the other way: from the engine's blocks into the slots of the writer's own shards

against `memcpy_pieces` (as many bytes as the rank wants, chunk by chunk, nothing rearranged) and `peer:torch` (the
usual way: put the shards together with `torch.cat`, then index). `ratio` is bytes per second over those of the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from local import private
from measure import alternated, percentile, ratio, report

import kvstore
from engine_adapter.copy import PagedKv
from engine_adapter.views import Order, Vectors, head_pages
from kvstore.model.fetch import FetchPlan, plan_fetch
from kvstore.model.parallel import Rank, Share, share_of
from kvstore.model.reshard import plan_read

LAYERS, HEADS, DIM, CHUNK_TOKENS, CHUNKS = 32, 8, 128, 64, 16


@dataclass(frozen=True)
class Case:
    """Writers and readers as (tp, pp); the last rank of the readers reads. Pages are what the pool stores."""

    name: str
    writer: tuple[int, int]
    reader: tuple[int, int]
    page_tokens: int = 16
    block_tokens: int = 16
    order: Order = Order.HND


CASES = [
    Case("same", (2, 1), (2, 1)),
    Case("tp4_to_tp2", (4, 1), (2, 1)),
    Case("tp2_to_tp8", (2, 1), (8, 1)),
    Case("pp2_to_pp1", (2, 2), (2, 1)),
    Case("tp8_to_single", (8, 1), (1, 1)),
    Case("pages_16_to_64", (2, 1), (2, 1), page_tokens=16, block_tokens=64),
    Case("pages_64_to_16", (2, 1), (2, 1), page_tokens=64, block_tokens=16),
    Case("hnd_to_nhd", (2, 1), (2, 1), order=Order.NHD),
]


class Reading:
    """One rank's engine, the shards that it reads, and the ways to bring these into it."""

    def __init__(self, case: Case, chunks: int) -> None:
        self.case, self.chunks = case, chunks
        pages = CHUNK_TOKENS // case.page_tokens
        self.layout = kvstore.PageLayout(LAYERS, HEADS, DIM, kvstore.Dtype.BF16, case.page_tokens, pages)
        writer_tp, writer_pp = case.writer
        reader_tp, reader_pp = case.reader
        written: Share = share_of(self.layout, Rank(tp=writer_tp, pp=writer_pp))
        self.held = share_of(self.layout, Rank(reader_tp - 1, reader_tp, reader_pp - 1, reader_pp)).held
        self.parts = plan_read(self.layout, written.geometry, self.held).parts
        self.plans: list[FetchPlan] = [plan_fetch(self.layout, part) for part in self.parts]
        rng = np.random.default_rng(7)
        # Each shard as it lies in its slot: payload and checksum table.
        self.stored = [private((chunks, self.layout.payload_bytes(p.stored) + p.stored.area * 8)) for p in self.parts]
        for shard in self.stored:
            shard[:] = rng.integers(0, 256, shard.shape[1:], dtype=np.uint8)
            shard[:, :8] = np.arange(chunks, dtype="<u8").view(np.uint8).reshape(chunks, 8)  # no two are equal
        self.staging = [private((plan.staged_bytes,)) for plan in self.plans]
        self.flat = private((2, chunks, self.layout.payload_bytes(self.held)))
        count = CHUNK_TOKENS // case.block_tokens
        self.blocks = rng.permutation(chunks * count).reshape(chunks, count).tolist()
        self.ours, self.naive = self._engine(), self._engine()
        views = head_pages(self.layout, self.ours, case.order, Vectors.JOINED)
        self.kv = PagedKv(views, pages, self.blocks, self.held.layer_start, self.held.head_start)

    @property
    def wanted_bytes(self) -> int:
        return self.chunks * self.layout.payload_bytes(self.held)

    def _engine(self) -> list[torch.Tensor]:
        tokens, heads = self.case.block_tokens, self.held.heads
        inner = (heads, tokens) if self.case.order is Order.HND else (tokens, heads)
        blocks = self.chunks * CHUNK_TOKENS // tokens
        return [torch.zeros((blocks, *inner, 2 * DIM), dtype=torch.bfloat16) for _ in range(self.held.layers)]

    def _payload(self, number: int, chunk: int) -> np.ndarray:
        shape = self.layout.shape(self.parts[number].stored)
        return self.stored[number][chunk, : int(np.prod(shape))].reshape(shape)

    def read(self) -> None:
        for chunk in range(self.chunks):
            for number, part in enumerate(self.parts):
                piece = self._payload(number, chunk)[part.stored_slices]
                self.kv.scatter(chunk, piece, part.common.layer_start, part.common.head_start)

    def read_staged(self) -> None:
        for chunk in range(self.chunks):
            for plan, shard, block in zip(self.plans, self.stored, self.staging, strict=True):
                source, common = shard[chunk], plan.part.common
                for run in plan.runs:
                    block[run.target_offset : run.target_stop] = source[run.source_offset : run.source_stop]
                payload = block[: plan.table_offset].reshape(self.layout.shape(plan.staged))
                self.kv.scatter(chunk, payload[plan.wanted_slices], common.layer_start, common.head_start)

    def write(self) -> None:
        for chunk in range(self.chunks):
            for number, part in enumerate(self.parts):
                slot = self._payload(number, chunk)[part.stored_slices]
                self.kv.gather(chunk, slot, part.common.layer_start, part.common.head_start)

    def memcpy(self) -> None:
        for chunk in range(self.chunks):
            np.copyto(self.flat[1, chunk], self.flat[0, chunk])

    def _wanted(self, chunk: int) -> torch.Tensor:
        """(layers, pages, heads, tokens, K||V) of the rank, put together from the shards."""
        rows: dict[int, list[torch.Tensor]] = {}
        for number, part in enumerate(self.parts):
            piece = torch.from_numpy(self._payload(number, chunk)).view(torch.bfloat16)
            layers, _, heads, _ = part.stored_slices
            rows.setdefault(part.common.layer_start, []).append(piece[layers, :, heads])
        whole = torch.cat([torch.cat(heads, dim=2) for _, heads in sorted(rows.items())])
        return whole.reshape(*whole.shape[:-1], self.layout.page_tokens, 2 * DIM)

    def index(self) -> None:
        """The usual way: one tensor of the chunk, then a list of blocks for each layer."""
        hnd = self.case.order is Order.HND
        for chunk in range(self.chunks):
            kv = self._wanted(chunk).transpose(2, 3).flatten(1, 2)  # (layers, tokens of the chunk, heads, K||V)
            kv = kv.reshape(len(kv), -1, self.case.block_tokens, *kv.shape[2:])
            for layer, blocks in zip(self.naive, kv, strict=True):
                layer[self.blocks[chunk]] = blocks.transpose(1, 2) if hnd else blocks

    def check(self) -> None:
        for way in (self.read, self.read_staged):
            for tensor in self.ours:
                tensor.zero_()
            way()
            self.index()
            pairs = zip(self.ours, self.naive, strict=True)
            if any(not torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in pairs):
                sys.exit(f"{self.case.name}: {way.__name__} differs from plain indexing")
        before = [shard.copy() for shard in self.stored]
        self.write()
        if any(not np.array_equal(shard, copy) for shard, copy in zip(self.stored, before, strict=True)):
            sys.exit(f"{self.case.name}: what was written back differs")


def run(case: Case, chunks: int) -> None:
    """One line a direction and comparison."""
    reading = Reading(case, chunks)
    reading.check()
    ways: dict[str, Callable[[], None]] = {
        "read": reading.read,
        "staged": reading.read_staged,
        "write": reading.write,
        "memcpy_pieces": reading.memcpy,
        "peer:torch": reading.index,
    }
    seconds = alternated(ways)
    for op, against in (
        ("read", "memcpy_pieces"),
        ("read", "peer:torch"),
        ("staged", "memcpy_pieces"),
        ("write", "memcpy_pieces"),
    ):
        report(
            bench="reshard",
            op=op,
            case=case.name,
            transport="none",
            chunk_bytes=reading.wanted_bytes // chunks,
            count=len(seconds[op]),
            keys=chunks,
            shards_per_key=len(reading.parts),
            descriptors_per_key=sum(len(plan.runs) for plan in reading.plans),
            fetched_over_wanted=sum(plan.staged_bytes for plan in reading.plans) * chunks / reading.wanted_bytes,
            checksum=False,
            against=against,
            condition="warm",
            bytes_per_second=reading.wanted_bytes / percentile(seconds[op], 0.5),
            against_bytes_per_second=reading.wanted_bytes / percentile(seconds[against], 0.5),
            p50_us=percentile(seconds[op], 0.5) * 1e6 / chunks,
            p99_us=percentile(seconds[op], 0.99) * 1e6 / chunks,
            ratio=ratio(seconds[op], seconds[against]),
            torch=version("torch"),
        )


def main() -> None:
    """All cases, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--case", choices=[case.name for case in CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        if options.case in (None, case.name):
            run(case, options.chunks)


if __name__ == "__main__":
    main()
