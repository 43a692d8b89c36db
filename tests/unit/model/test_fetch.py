"""Fetch plans: which bytes of a stored shard a network reader asks for, and where they lie in staging."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import LayoutMismatch
from kvstore.model import checksum
from kvstore.model.fetch import LEAST_RUN_BYTES, FetchPlan, plan_fetch
from kvstore.model.layout import Attention, Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.reshard import ByteRange, ShardPart, plan_read

Bytes = npt.NDArray[np.uint8]


def stored_shard(layout: PageLayout, rectangle: Rectangle) -> Bytes:
    """Payload and checksum table, as they lie in a slot."""
    payload = np.random.default_rng(7).integers(0, 256, layout.payload_bytes(rectangle), dtype=np.uint8)
    table = checksum.table_of(payload, layout, rectangle).view(np.uint8).ravel()
    return np.concatenate((payload, table))


def fetched(plan: FetchPlan, shard: Bytes) -> tuple[Bytes, Bytes]:
    """(the staged block, how often each of its bytes was written)."""
    block, written = np.full(plan.staged_bytes, 0xA5, np.uint8), np.zeros(plan.staged_bytes, np.uint8)
    for run in plan.runs:
        block[run.target_offset : run.target_stop] = shard[run.source_offset : run.source_stop]
        written[run.target_offset : run.target_stop] += 1
    return block, written


def descriptors(layout: PageLayout, part: ShardPart, least_run_bytes: int) -> int:
    """As the module's table says."""
    stored, common = part.stored, part.common
    last_layer, last_head = common.layer_stop == stored.layer_stop, common.head_stop == stored.head_stop
    if part.is_whole_shard:
        return 1
    if common.heads == stored.heads or common.heads * layout.head_page_bytes < least_run_bytes:
        return 2 - last_layer
    return common.layers * layout.pages_per_chunk + 1 - (last_layer and last_head)


def check_fetch(layout: PageLayout, part: ShardPart, least_run_bytes: int) -> None:
    plan, shard = plan_fetch(layout, part, least_run_bytes), stored_shard(layout, part.stored)
    assert len(plan.runs) == descriptors(layout, part, least_run_bytes)
    assert sum(run.length_bytes for run in plan.runs) == plan.staged_bytes <= len(shard)
    for one, other in itertools.pairwise(plan.runs):
        assert one.source_stop <= other.source_offset and one.target_stop == other.target_offset
        assert one.source_stop < other.source_offset, "runs that follow one another on both sides are one"
    block, written = fetched(plan, shard)
    assert (written == 1).all()
    assert np.array_equal(block[plan.table_offset :], shard[layout.payload_bytes(part.stored) :])
    payload = block[: plan.table_offset]
    whole = shard[: layout.payload_bytes(part.stored)].reshape(layout.shape(part.stored))
    assert np.array_equal(payload.reshape(layout.shape(plan.staged))[plan.wanted_slices], whole[part.stored_slices])
    table = block[plan.table_offset :].view("<u8").reshape(part.stored.layers, part.stored.heads)
    assert np.array_equal(checksum.table_of(payload, layout, plan.staged), table[plan.table_slices])


@st.composite
def parts(draw: st.DrawFn) -> tuple[PageLayout, ShardPart]:
    """A shard somewhere in a chunk, and any rectangle of it. Head pages are multiples of 8 bytes, as in engines."""
    layout = PageLayout(
        layers=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 6)),
        head_dim=draw(st.integers(1, 3)),
        dtype=Dtype.FP32,
        page_tokens=draw(st.integers(1, 3)),
        pages_per_chunk=draw(st.integers(1, 3)),
    )
    stored = draw(rectangles(layout.whole))
    return layout, ShardPart(draw(st.integers(0, 255)), stored, draw(rectangles(stored)))


@st.composite
def rectangles(draw: st.DrawFn, outer: Rectangle) -> Rectangle:
    layer = draw(st.integers(outer.layer_start, outer.layer_stop - 1))
    head = draw(st.integers(outer.head_start, outer.head_stop - 1))
    return Rectangle(
        layer,
        draw(st.integers(layer + 1, outer.layer_stop)),
        head,
        draw(st.integers(head + 1, outer.head_stop)),
    )


@settings(max_examples=200)
@given(drawn=parts(), least_run_bytes=st.sampled_from((0, 48, 100, LEAST_RUN_BYTES)))
def test_any_part_of_any_shard(drawn: tuple[PageLayout, ShardPart], least_run_bytes: int) -> None:
    check_fetch(*drawn, least_run_bytes)


LAYOUT = PageLayout(layers=4, kv_heads=8, head_dim=128, dtype=Dtype.BF16, page_tokens=64, pages_per_chunk=2)
HEAD_PAGE = 64 * 2 * 128 * 2
ROW = 8 * HEAD_PAGE


def part_of(geometry: Geometry, wanted: Rectangle) -> ShardPart:
    (part,) = plan_read(LAYOUT, geometry, wanted).parts
    return part


def test_a_whole_shard_is_one_run_with_its_table() -> None:
    part = part_of(Geometry.parallel(LAYOUT, tp=4), Rectangle(0, 4, 2, 4))
    plan = plan_fetch(LAYOUT, part)
    size = 4 * 2 * 2 * HEAD_PAGE
    assert plan.runs == (ByteRange(0, 0, size + 8 * 4 * 2),)
    assert (plan.staged, plan.table_offset) == (part.stored, size)


def test_some_layers_are_one_run_and_the_table() -> None:
    """A layer-wise reader asks for one layer; PP 1 -> PP 2 for half of them."""
    whole = Geometry.whole(LAYOUT)
    assert plan_fetch(LAYOUT, part_of(whole, Rectangle(1, 2, 0, 8))).runs == (
        ByteRange(2 * ROW, 0, 2 * ROW),
        ByteRange(8 * ROW, 2 * ROW, 8 * 4 * 8),
    )
    assert plan_fetch(LAYOUT, part_of(whole, Rectangle(2, 4, 0, 8))).runs == (ByteRange(4 * ROW, 0, 4 * ROW + 8 * 32),)


def test_later_layers_of_a_shard_are_asked_for_without_its_table() -> None:
    plan = plan_fetch(LAYOUT, part_of(Geometry.whole(LAYOUT), Rectangle(2, 4, 0, 8)), with_table=False)
    assert plan.runs == (ByteRange(4 * ROW, 0, 4 * ROW),)
    assert plan.staged_bytes == plan.table_offset == 4 * ROW
    assert plan.table_slices == (slice(2, 4), slice(0, 8)), "in the table that came before"


def test_some_heads_are_a_run_a_row_if_long_enough() -> None:
    part = part_of(Geometry.parallel(LAYOUT, tp=2), Rectangle(0, 4, 5, 7))  # runs of 64 KiB
    plan = plan_fetch(LAYOUT, part)
    table = ByteRange(8 * 4 * HEAD_PAGE, 8 * 2 * HEAD_PAGE, 8 * 4 * 4)
    rows = tuple(
        ByteRange((row * 4 + 1) * HEAD_PAGE, row * 2 * HEAD_PAGE, 2 * HEAD_PAGE) for row in range(LAYOUT.layers * 2)
    )
    assert plan.runs == (*rows, table)
    assert plan.staged == part.common


def test_short_runs_of_heads_take_their_neighbours_with_them() -> None:
    part = part_of(Geometry.parallel(LAYOUT, tp=2), Rectangle(1, 3, 5, 6))  # runs of 32 KiB
    plan = plan_fetch(LAYOUT, part)
    assert plan.staged == Rectangle(1, 3, 4, 8) and len(plan.runs) == 2
    assert plan.wanted_slices == (slice(0, 2), slice(None), slice(1, 2), slice(None))
    assert plan.table_slices == (slice(1, 3), slice(0, 4))
    part = part_of(Geometry.parallel(LAYOUT, tp=2), Rectangle(0, 4, 5, 6))
    assert len(plan_fetch(LAYOUT, part).runs) == 1, "all layers with all heads are the shard"


def test_latent_pages_are_one_run() -> None:
    layout = PageLayout(
        layers=6,
        kv_heads=1,
        head_dim=576,
        dtype=Dtype.BF16,
        page_tokens=64,
        pages_per_chunk=1,
        attention=Attention.MLA,
    )
    for layers, count in ((Rectangle(0, 6, 0, 1), 1), (Rectangle(1, 3, 0, 1), 2), (Rectangle(5, 6, 0, 1), 1)):
        (part,) = plan_read(layout, Geometry.whole(layout), layers).parts
        assert len(plan_fetch(layout, part).runs) == count


def test_parts_that_lie_elsewhere_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="does not lie in"):
        plan_fetch(LAYOUT, ShardPart(0, Rectangle(0, 2, 0, 8), Rectangle(1, 3, 0, 8)))
    with pytest.raises(LayoutMismatch, match="4 layers x 8 KV heads"):
        plan_fetch(LAYOUT, ShardPart(0, Rectangle(0, 5, 0, 8), Rectangle(0, 1, 0, 8)))


def test_plans_are_cached_values() -> None:
    part = part_of(Geometry.whole(LAYOUT), Rectangle(0, 1, 0, 8))
    assert plan_fetch(LAYOUT, part) is plan_fetch(LAYOUT, part)


@pytest.mark.parametrize(
    ("writer", "reader", "descriptors_of_ranks", "fetched_over_wanted"),
    [
        ((4, 1), (2, 1), [2, 2], 1),  # two whole shards a rank
        ((8, 1), (1, 1), [8], 1),
        ((2, 1), (8, 1), [1] * 8, 4),  # one head a row is short: the whole shard
        ((1, 1), (2, 1), [9, 8], 1),  # four heads a row are long: a run a row, and the table
        ((1, 2), (1, 1), [2], 1),
        ((1, 1), (1, 2), [2, 1], 1),  # the later layers end where the table begins
        ((2, 2), (4, 1), [10, 8, 10, 8], 1),  # two heads a row of two shards, and each table
        ((4, 2), (4, 2), [1] * 8, 1),
    ],
)
def test_descriptors_of_whole_reads(
    writer: tuple[int, int], reader: tuple[int, int], descriptors_of_ranks: list[int], fetched_over_wanted: int
) -> None:
    geometry = Geometry.parallel(LAYOUT, tp=writer[0], pp=writer[1])
    counts, fetched_bytes = [], 0
    for wanted in Geometry.parallel(LAYOUT, tp=reader[0], pp=reader[1]).rectangles:
        plans = [plan_fetch(LAYOUT, part) for part in plan_read(LAYOUT, geometry, wanted).parts]
        counts.append(sum(len(plan.runs) for plan in plans))
        fetched_bytes += sum(plan.table_offset for plan in plans)
    assert counts == descriptors_of_ranks
    assert fetched_bytes == fetched_over_wanted * LAYOUT.chunk_bytes
