"""Who writes what: each byte of a chunk by exactly one rank, whatever heads are copied."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvstore.errors import InvalidRequest, LayoutMismatch
from kvstore.model.layout import Attention, Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.parallel import Rank, share_of


def gqa(kv_heads: int = 8, layers: int = 8) -> PageLayout:
    return PageLayout(layers=layers, kv_heads=kv_heads, head_dim=4, dtype=Dtype.BF16, page_tokens=16, pages_per_chunk=1)


def mla(layers: int = 8) -> PageLayout:
    return PageLayout(
        layers=layers,
        kv_heads=1,
        head_dim=4,
        dtype=Dtype.BF16,
        page_tokens=16,
        pages_per_chunk=1,
        attention=Attention.MLA,
    )


def ranks(tp: int, pp: int, cp: int) -> list[Rank]:
    places = itertools.product(range(cp), range(pp), range(tp))
    return [Rank(tp_rank, tp, pp_rank, pp, cp_rank, cp) for cp_rank, pp_rank, tp_rank in places]


@pytest.mark.parametrize("split_copies", [False, True])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layout", [gqa(8), gqa(2), mla(), mla(layers=14)])
def test_each_byte_of_each_chunk_is_written_by_one_rank(
    layout: PageLayout, tp: int, pp: int, cp: int, split_copies: bool
) -> None:
    chunks, written = 7, Counter[tuple[int, int, int]]()
    shares = [share_of(layout, rank, split_copies=split_copies) for rank in ranks(tp, pp, cp)]
    assert len({share.geometry for share in shares}) == 1
    for share in shares:
        for number in share.written:
            area = share.geometry.rectangles[number]
            assert share.held.contains(area), "nobody writes what it does not hold"
            for chunk in share.written_chunks(0, chunks):
                layers, heads = range(area.layer_start, area.layer_stop), range(area.head_start, area.head_stop)
                written.update(itertools.product((chunk,), layers, heads))
    assert len(written) == chunks * layout.layers * layout.kv_heads
    assert set(written.values()) == {1}


def test_ranks_hold_what_engines_give_them() -> None:
    """Two heads on four ranks: neighbours have copies of one head."""
    shares = [share_of(gqa(kv_heads=2), rank) for rank in ranks(tp=4, pp=2, cp=1)]
    assert [share.held for share in shares[:4]] == [Rectangle(0, 4, h, h + 1) for h in (0, 0, 1, 1)]
    assert [share.written for share in shares] == [(0,), (), (1,), (), (2,), (), (3,), ()]
    assert shares[0].geometry == Geometry.parallel(gqa(kv_heads=2), tp=4, pp=2)


def test_copies_that_are_split_have_their_own_layers() -> None:
    shares = [share_of(mla(layers=61), rank, split_copies=True) for rank in ranks(tp=4, pp=1, cp=1)]
    rectangles = shares[0].geometry.rectangles
    assert [rectangles[number] for share in shares for number in share.written] == [
        Rectangle(0, 15, 0, 1),
        Rectangle(15, 30, 0, 1),
        Rectangle(30, 45, 0, 1),
        Rectangle(45, 61, 0, 1),
    ]
    assert {share.held for share in shares} == {Rectangle(0, 61, 0, 1)}


def test_more_copies_than_layers_leave_some_without_a_part() -> None:
    shares = [share_of(mla(layers=4), rank, split_copies=True) for rank in ranks(tp=4, pp=2, cp=1)]
    assert [share.written for share in shares] == [(0,), (1,), (), (), (2,), (3,), (), ()]


def test_nothing_to_split_where_no_head_is_copied() -> None:
    for rank in ranks(tp=8, pp=2, cp=1):
        assert share_of(gqa(), rank, split_copies=True) == share_of(gqa(), rank)


def test_chunks_are_counted_from_the_start_of_the_prompt() -> None:
    share = share_of(gqa(), Rank(cp_rank=1, cp=3))
    assert share.written_chunks(0, 6) == (1, 4)
    assert share.written_chunks(5, 6) == (2, 5), "chunks 7 and 10"
    assert share_of(mla(), Rank(tp_rank=1, tp=2, cp_rank=1, cp=3)).written_chunks(0, 6) == ()


def test_a12_the_writer_is_not_chosen_by_global_rank() -> None:
    """TP 4: one writer. Context parallel 2 x TP 2: one writer in each context group, also where global rank is 2."""
    assert [share_of(mla(), rank).written for rank in ranks(tp=4, pp=1, cp=1)] == [(0,), (), (), ()]
    shares = [share_of(mla(), rank) for rank in ranks(tp=2, pp=1, cp=2)]
    assert [share.written_chunks(0, 4) for share in shares] == [(0, 2), (), (1, 3), ()]


def test_uneven_cuts_are_refused_with_both_numbers() -> None:
    for layout, rank, message in (
        (gqa(8), Rank(tp=3), "8 KV heads cannot be cut evenly over tp=3"),
        (gqa(6), Rank(tp_rank=3, tp=4), "6 KV heads cannot be cut evenly over tp=4"),
        (gqa(2), Rank(tp=3), "2 KV heads cannot be cut evenly over tp=3"),
        (gqa(layers=7), Rank(pp=2), "7 layers cannot be cut evenly over pp=2"),
    ):
        for split_copies in (False, True):
            with pytest.raises(LayoutMismatch, match=message):
                share_of(layout, rank, split_copies=split_copies)
        with pytest.raises(LayoutMismatch, match=message):
            Geometry.parallel(layout, tp=rank.tp, pp=rank.pp)


@pytest.mark.parametrize("place", [{"tp_rank": 2, "tp": 2}, {"pp_rank": -1}, {"cp": 0}])
def test_ranks_lie_below_their_size(place: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="does not lie in 0"):
        Rank(**place)
