"""Read plans: every stored cut to every wanted rectangle, each byte exactly once."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import LayoutMismatch, LimitExceeded
from kvstore.model.layout import Attention, Dtype, Geometry, PageLayout, Rectangle, SideComponent
from kvstore.model.reshard import ByteRange, ReadPlan, covers, plan_read

CUTS = list(itertools.product((1, 2, 4, 8), (1, 2)))
Bytes = npt.NDArray[np.uint8]


@st.composite
def layouts(draw: st.DrawFn, attention: Attention) -> PageLayout:
    """Small layouts that all CUTS fit, odd sizes of a head page included."""
    side = draw(st.integers(0, 3))
    return PageLayout(
        layers=draw(st.sampled_from((2, 4, 6))),
        kv_heads=1 if attention is Attention.MLA else draw(st.sampled_from((2, 4, 8, 16))),
        head_dim=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(Dtype)),
        page_tokens=draw(st.integers(1, 3)),
        pages_per_chunk=draw(st.integers(1, 3)),
        attention=attention,
        side_components=(SideComponent("scale", side),) if side else (),
    )


def cut(chunk: Bytes, rectangle: Rectangle) -> Bytes:
    """The naive way: index the whole chunk."""
    return chunk[rectangle.layer_start : rectangle.layer_stop, :, rectangle.head_start : rectangle.head_stop].copy()


def by_byte_ranges(plan: ReadPlan, stored: list[Bytes]) -> tuple[Bytes, Bytes]:
    """(bytes of the wanted rectangle, how often each was written)."""
    target = np.full(plan.layout.payload_bytes(plan.wanted), 0xA5, np.uint8)
    written = np.zeros(len(target), np.uint8)
    for part in plan.parts:
        payload = stored[part.number].reshape(-1)
        for one in plan.byte_ranges(part):
            source = payload[one.source_offset : one.source_offset + one.length_bytes]
            target[one.target_offset : one.target_offset + one.length_bytes] = source
            written[one.target_offset : one.target_offset + one.length_bytes] += 1
    return target, written


def by_slices(plan: ReadPlan, stored: list[Bytes]) -> tuple[Bytes, Bytes]:
    target = np.full(plan.layout.shape(plan.wanted), 0xA5, np.uint8)
    written = np.zeros_like(target)
    for part in plan.parts:
        where = part.wanted_slices(plan.wanted)
        target[where] = stored[part.number][part.stored_slices]
        written[where] += 1
    return target.reshape(-1), written.reshape(-1)


def check_plan(layout: PageLayout, geometry: Geometry, wanted: Rectangle, chunk: Bytes, stored: list[Bytes]) -> None:
    plan = plan_read(layout, geometry, wanted)
    expected = cut(chunk, wanted).reshape(-1)
    for execute in (by_byte_ranges, by_slices):
        target, written = execute(plan, stored)
        assert np.array_equal(target, expected)
        assert (written == 1).all()
    assert plan.shards == tuple(geometry.shard(part.number) for part in plan.parts)
    for part in plan.parts:
        ranges = plan.byte_ranges(part)
        assert sum(one.length_bytes for one in ranges) == layout.payload_bytes(part.common)
        for one, other in itertools.pairwise(ranges):
            assert one.source_offset + one.length_bytes <= other.source_offset
            assert one.target_offset + one.length_bytes <= other.target_offset
            assert (
                one.source_offset + one.length_bytes < other.source_offset
                or one.target_offset + one.length_bytes < other.target_offset
            ), "ranges that follow one another on both sides are one"
    numbers = {part.number for part in plan.parts}
    assert covers(geometry, numbers, wanted)
    assert all(not covers(geometry, numbers - {number}, wanted) for number in numbers)


def random_chunk(layout: PageLayout) -> Bytes:
    return np.random.default_rng(7).integers(0, 256, layout.shape(layout.whole), dtype=np.uint8)


@pytest.mark.parametrize("attention", [Attention.GQA, Attention.MLA])
@pytest.mark.parametrize(("tp", "pp"), CUTS)
@settings(max_examples=12)
@given(data=st.data())
def test_every_pair_of_cuts(attention: Attention, tp: int, pp: int, data: st.DataObject) -> None:
    """Written with (tp, pp), read by every rank of every cut: the naive answer, each byte once."""
    layout = data.draw(layouts(attention))
    chunk = random_chunk(layout)
    geometry = Geometry.parallel(layout, tp=tp, pp=pp)
    stored = [cut(chunk, rectangle) for rectangle in geometry.rectangles]
    readers = {
        r for reader_tp, reader_pp in CUTS for r in Geometry.parallel(layout, tp=reader_tp, pp=reader_pp).rectangles
    }
    for wanted in sorted(readers):
        check_plan(layout, geometry, wanted, chunk, stored)


@st.composite
def tilings(draw: st.DrawFn, area: Rectangle, depth: int = 3) -> list[Rectangle]:
    """Any cut that halves rectangles again and again, evenly or not."""
    axis = draw(st.sampled_from(["none", "layers", "heads"])) if depth else "none"
    if axis == "layers" and area.layers > 1:
        at = draw(st.integers(area.layer_start + 1, area.layer_stop - 1))
        first = Rectangle(area.layer_start, at, area.head_start, area.head_stop)
        second = Rectangle(at, area.layer_stop, area.head_start, area.head_stop)
    elif axis == "heads" and area.heads > 1:
        at = draw(st.integers(area.head_start + 1, area.head_stop - 1))
        first = Rectangle(area.layer_start, area.layer_stop, area.head_start, at)
        second = Rectangle(area.layer_start, area.layer_stop, at, area.head_stop)
    else:
        return [area]
    return draw(tilings(first, depth - 1)) + draw(tilings(second, depth - 1))


@settings(max_examples=100)
@given(data=st.data())
def test_any_tiling_to_any_rectangle(data: st.DataObject) -> None:
    layout = data.draw(layouts(Attention.GQA))
    geometry = Geometry(tuple(sorted(data.draw(tilings(layout.whole)))))
    layers = sorted(data.draw(st.lists(st.integers(0, layout.layers), min_size=2, max_size=2, unique=True)))
    heads = sorted(data.draw(st.lists(st.integers(0, layout.kv_heads), min_size=2, max_size=2, unique=True)))
    chunk = random_chunk(layout)
    stored = [cut(chunk, rectangle) for rectangle in geometry.rectangles]
    check_plan(layout, geometry, Rectangle(*layers, *heads), chunk, stored)


LAYOUT = PageLayout(layers=4, kv_heads=8, head_dim=4, dtype=Dtype.BF16, page_tokens=2, pages_per_chunk=3)
HEAD_PAGE = 2 * 2 * 4 * 2


def test_the_same_rectangle_is_one_range() -> None:
    plan = plan_read(LAYOUT, Geometry.parallel(LAYOUT, tp=4), Rectangle(0, 4, 2, 4))
    (part,) = plan.parts
    assert part.number == 1 and part.is_whole_shard
    assert plan.byte_ranges(part) == (ByteRange(0, 0, 4 * 3 * 2 * HEAD_PAGE),)


def test_full_width_joins_over_pages_and_layers() -> None:
    plan = plan_read(LAYOUT, Geometry.parallel(LAYOUT, pp=2), Rectangle(1, 3, 0, 8))
    size = 3 * 8 * HEAD_PAGE
    assert [plan.byte_ranges(part) for part in plan.parts] == [
        (ByteRange(size, 0, size),),
        (ByteRange(0, size, size),),
    ]
    assert not any(part.is_whole_shard for part in plan.parts)


def test_a_head_range_is_one_run_a_layer_and_page() -> None:
    """TP 2 -> TP 8: rank 5 reads one of the four heads of shard 1."""
    plan = plan_read(LAYOUT, Geometry.parallel(LAYOUT, tp=2), Rectangle(0, 4, 5, 6))
    (part,) = plan.parts
    assert plan.byte_ranges(part) == tuple(
        ByteRange((row * 4 + 1) * HEAD_PAGE, row * HEAD_PAGE, HEAD_PAGE) for row in range(4 * 3)
    )


def test_checksum_entries_are_those_of_the_common_layers_and_heads() -> None:
    stored = Geometry.parallel(LAYOUT, tp=2, pp=2)
    parts = {part.number: part for part in plan_read(LAYOUT, stored, Rectangle(1, 4, 3, 6)).parts}
    table = np.arange(2 * 4).reshape(2, 4)
    assert {number: part.checksum_entries for number, part in parts.items()} == {
        0: (7,),
        1: (4, 5),
        2: (3, 7),
        3: (0, 1, 4, 5),
    }
    for part in parts.values():
        assert tuple(table[part.checksum_slices].reshape(-1)) == part.checksum_entries


def test_latent_heads_are_read_as_they_are() -> None:
    layout = PageLayout(
        layers=4,
        kv_heads=1,
        head_dim=576,
        dtype=Dtype.FP8_E4M3,
        page_tokens=64,
        pages_per_chunk=1,
        attention=Attention.MLA,
    )
    plan = plan_read(layout, Geometry.parallel(layout, tp=8, pp=2), layout.whole)
    assert [part.common for part in plan.parts] == [Rectangle(0, 2, 0, 1), Rectangle(2, 4, 0, 1)]
    assert [len(plan.byte_ranges(part)) for part in plan.parts] == [1, 1]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="4 layers x 8 KV heads"):
        plan_read(LAYOUT, Geometry.whole(LAYOUT), Rectangle(0, 5, 0, 8))
    with pytest.raises(LayoutMismatch, match="2 layers x 8 KV heads does not fit a layout of 4 layers"):
        plan_read(LAYOUT, Geometry((Rectangle(0, 2, 0, 8),)), Rectangle(0, 1, 0, 1))
    big = PageLayout(layers=64, kv_heads=8, head_dim=128, dtype=Dtype.FP32, page_tokens=64, pages_per_chunk=16)
    with pytest.raises(LimitExceeded):
        plan_read(big, Geometry.whole(big), big.whole)


def test_slices_of_a_part_that_lies_elsewhere_are_refused() -> None:
    (part,) = plan_read(LAYOUT, Geometry.whole(LAYOUT), Rectangle(0, 2, 0, 4)).parts
    with pytest.raises(LayoutMismatch, match="does not lie in"):
        part.wanted_slices(Rectangle(2, 4, 0, 4))


def test_covers() -> None:
    geometry = Geometry.parallel(LAYOUT, tp=4)
    assert covers(geometry, [0, 1, 2, 3], LAYOUT.whole)
    assert covers(geometry, iter((1, 2)), Rectangle(0, 4, 3, 5))
    assert not covers(geometry, [0, 1, 3], LAYOUT.whole)
    assert not covers(geometry, [], Rectangle(0, 1, 0, 1))
    assert covers(geometry, [0, 200], Rectangle(0, 1, 0, 1)), "numbers of no rectangle do no harm"
    assert not covers(geometry, range(4), Rectangle(0, 5, 0, 8)), "reaches beyond the geometry"


def test_plans_are_cached_values() -> None:
    first = plan_read(LAYOUT, Geometry.whole(LAYOUT), Rectangle(0, 1, 0, 1))
    assert plan_read(LAYOUT, Geometry.whole(LAYOUT), Rectangle(0, 1, 0, 1)) is first
