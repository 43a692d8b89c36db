"""From one engine's tensors over stored shards and network fetches into another's, against naive torch indexing.

Every pair of writer and reader cuts. Nothing is simulated but the network: writers' ranks gather their shares into
shard bytes with a table behind, each reader's rank copies the runs of its fetch plans into a poisoned block, checks
them against the table and scatters them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engine_forms import FORMS, POISON, fill, make_engine, raw
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.copy import PagedKv
from engine_adapter.views import Order, Vectors, head_pages
from kvstore.model import checksum
from kvstore.model.fetch import plan_fetch
from kvstore.model.layout import Attention, Dtype, PageLayout, Rectangle
from kvstore.model.parallel import Rank, Share, share_of
from kvstore.model.reshard import ShardPart, plan_read

CUTS = list(itertools.product((1, 2, 4, 8), (1, 2)))
LAYERS, DIM, CHUNK_TOKENS = 4, 2, 64
Bytes = npt.NDArray[np.uint8]
Form = tuple[Order, Vectors] | None


@dataclass(frozen=True)
class Side:
    """How one of the two engines keeps its KV, and how its ranks share it."""

    form: Form
    block_tokens: int
    tp: int
    pp: int
    split_copies: bool = False
    blocks: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> list[Rank]:
        return [Rank(tp_rank, self.tp, pp_rank, self.pp) for pp_rank in range(self.pp) for tp_rank in range(self.tp)]


def rank_engine(side: Side, held: Rectangle, poison: int = POISON):
    return make_engine(side.form, held.layers, len(side.blocks) + 2, side.block_tokens, held.heads, DIM, poison=poison)


def paged(layout: PageLayout, side: Side, engine, held: Rectangle) -> PagedKv:
    order, vectors = side.form or (Order.NHD, Vectors.JOINED)
    pages = head_pages(layout, engine, order, vectors)
    return PagedKv(pages, layout.pages_per_chunk, [side.blocks], held.layer_start, held.head_start)


def held_tokens(tokens: torch.Tensor, held: Rectangle) -> torch.Tensor:
    return tokens[held.layer_start : held.layer_stop, :, held.head_start : held.head_stop]


def stored_shards(layout: PageLayout, writer: Side, tokens: torch.Tensor) -> tuple[Share, dict[int, Bytes]]:
    """What the writer's ranks leave in the slots: payload and checksum table of each rectangle."""
    stored: dict[int, Bytes] = {}
    for rank in writer.ranks:
        share = share_of(layout, rank, split_copies=writer.split_copies)
        engine = rank_engine(writer, share.held)
        fill(engine, writer.form, writer.blocks, held_tokens(tokens, share.held))
        kv = paged(layout, writer, engine, share.held)
        for number in share.written:
            assert number not in stored, "two ranks write one rectangle"
            rectangle = share.geometry.rectangles[number]
            payload = np.full(layout.shape(rectangle), POISON, np.uint8)
            kv.gather(0, payload, rectangle.layer_start, rectangle.head_start)
            payload = payload.reshape(-1)
            table = checksum.table_of(payload, layout, rectangle).view(np.uint8).ravel()
            stored[number] = np.concatenate((payload, table))
    return share, stored


def fetched(layout: PageLayout, part: ShardPart, shard: Bytes, least_run_bytes: int) -> Bytes:
    """The wanted part (layers, pages, heads, head_page_bytes), as a network reader gets and checks it."""
    plan = plan_fetch(layout, part, least_run_bytes)
    block = np.full(plan.staged_bytes, POISON, np.uint8)
    for run in plan.runs:
        block[run.target_offset : run.target_stop] = shard[run.source_offset : run.source_stop]
    payload, table = block[: plan.table_offset], block[plan.table_offset :].view("<u8")
    sums = table.reshape(part.stored.layers, part.stored.heads)[plan.table_slices]
    assert np.array_equal(checksum.table_of(payload, layout, plan.staged), sums)
    return payload.reshape(layout.shape(plan.staged))[plan.wanted_slices]


def written_by(layout: PageLayout, reader: Side, held: Rectangle, piece: Bytes, common: Rectangle) -> Bytes:
    """1 for each byte of the rank's tensors that this piece writes: those that do not depend on what was there."""
    engines = [rank_engine(reader, held, poison) for poison in (POISON, POISON ^ 0xFF)]
    for engine in engines:
        paged(layout, reader, engine, held).scatter(0, piece, common.layer_start, common.head_start)
    return (raw(engines[0]) == raw(engines[1])).astype(np.uint8)


def check_reader(
    layout: PageLayout, reader: Side, share: Share, stored: dict[int, Bytes], tokens: torch.Tensor, least_run_bytes: int
) -> None:
    for rank in reader.ranks:
        held = share_of(layout, rank).held
        engine, expected = rank_engine(reader, held), rank_engine(reader, held)
        fill(expected, reader.form, reader.blocks, held_tokens(tokens, held))
        kv, times = paged(layout, reader, engine, held), np.zeros(len(raw(engine)), np.uint8)
        for part in plan_read(layout, share.geometry, held).parts:
            piece = fetched(layout, part, stored[part.number], least_run_bytes)
            kv.scatter(0, piece, part.common.layer_start, part.common.head_start)
            times += written_by(layout, reader, held, piece, part.common)
        assert np.array_equal(raw(engine), raw(expected))
        full = rank_engine(reader, held, 0)
        fill(full, reader.form, reader.blocks, torch.full_like(held_tokens(tokens, held), -1.0))  # no byte is 0
        assert np.array_equal(times, raw(full) != 0), "each byte of the chunk's blocks once, and no other"


@st.composite
def sides(draw: st.DrawFn, cut: tuple[int, int], layout: PageLayout) -> Side:
    retiled = layout.interior == "kv_per_token"
    block_tokens = draw(st.sampled_from((16, 64))) if retiled else layout.page_tokens
    count = CHUNK_TOKENS // block_tokens
    blocks = draw(st.permutations(range(count + 2)))[:count]
    form = None if layout.attention is Attention.MLA else draw(st.sampled_from(FORMS))
    return Side(form, block_tokens, *cut, draw(st.booleans()), blocks)


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("attention", [Attention.GQA, Attention.MLA])
@pytest.mark.parametrize(("tp", "pp"), CUTS)
@settings(max_examples=3)
@given(data=st.data())
def test_every_pair_of_cuts(tp: int, pp: int, attention: Attention, page_tokens: int, data: st.DataObject) -> None:
    mla = attention is Attention.MLA
    layout = PageLayout(
        LAYERS,
        1 if mla else data.draw(st.sampled_from((2, 8))),
        DIM,
        Dtype.BF16,
        page_tokens,
        CHUNK_TOKENS // page_tokens,
        attention,
        data.draw(st.sampled_from(("kv_per_token", "k_then_v"))),
    )
    shape = LAYERS, CHUNK_TOKENS, layout.kv_heads, 1 if mla else 2, DIM
    tokens = torch.from_numpy(np.random.default_rng(7).integers(-(1 << 15), 1 << 15, shape, dtype=np.int16))
    tokens = tokens.view(torch.bfloat16)
    writer = data.draw(sides((tp, pp), layout))
    share, stored = stored_shards(layout, writer, tokens)
    for cut in CUTS:
        reader = data.draw(sides(cut, layout))
        least = data.draw(st.sampled_from((0, 2 * layout.head_page_bytes, 64 << 10)))
        check_reader(layout, reader, share, stored, tokens, least)
