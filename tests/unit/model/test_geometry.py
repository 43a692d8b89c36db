"""How writers cut a chunk: tiling, even cuts, digests and shard ids."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.errors import LayoutMismatch, LimitExceeded
from kvstore.model.layout import Attention, Dtype, Geometry, PageLayout, Rectangle

GQA = PageLayout(layers=32, kv_heads=8, head_dim=128, dtype=Dtype.BF16, page_tokens=16, pages_per_chunk=4)
LATENT = PageLayout(
    layers=32,
    kv_heads=1,
    head_dim=576,
    dtype=Dtype.BF16,
    page_tokens=16,
    pages_per_chunk=4,
    attention=Attention.MLA,
)


@pytest.mark.parametrize("layout", [GQA, LATENT], ids=["gqa", "mla"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_an_even_cut_tiles_the_chunk(layout: PageLayout, tp: int, pp: int) -> None:
    geometry = Geometry.parallel(layout, tp=tp, pp=pp)
    painted = np.zeros((layout.layers, layout.kv_heads), dtype=int)
    for one in geometry.rectangles:
        painted[one.layer_start : one.layer_stop, one.head_start : one.head_stop] += 1
    assert (painted == 1).all()
    assert len(geometry.rectangles) == pp * min(tp, layout.kv_heads)
    geometry.check_fits(layout)


def test_a_rank_owns_the_rectangle_of_its_number() -> None:
    rectangles = Geometry.parallel(GQA, tp=4, pp=2).rectangles
    assert rectangles[1 * 4 + 3] == Rectangle(16, 32, 6, 8)


def test_replicated_heads_are_written_once() -> None:
    assert Geometry.parallel(GQA, tp=16).rectangles == Geometry.parallel(GQA, tp=8).rectangles
    assert Geometry.parallel(LATENT, tp=8) == Geometry.whole(LATENT)


@pytest.mark.parametrize(("tp", "pp", "named"), [(3, 1, ("8", "tp=3")), (12, 1, ("8", "tp=12")), (0, 1, ("8", "tp=0"))])
def test_an_uneven_split_of_heads_names_both_numbers(tp: int, pp: int, named: tuple[str, str]) -> None:
    with pytest.raises(LayoutMismatch, match=f"{named[0]} KV heads .* {named[1]}"):
        Geometry.parallel(GQA, tp=tp, pp=pp)


@pytest.mark.parametrize("pp", [3, 5, 64, 0, -1])
def test_an_uneven_split_of_layers_names_both_numbers(pp: int) -> None:
    with pytest.raises(LayoutMismatch, match=f"32 layers .* pp={pp}"):
        Geometry.parallel(GQA, pp=pp)


@pytest.mark.parametrize(
    ("rectangles", "reason"),
    [
        ((Rectangle(0, 2, 0, 4), Rectangle(0, 2, 3, 8)), "overlap"),
        ((Rectangle(0, 2, 0, 4), Rectangle(0, 2, 5, 8)), "gap"),
        ((Rectangle(0, 2, 4, 8), Rectangle(0, 2, 0, 4)), "sorted"),
        ((Rectangle(1, 2, 0, 8),), "gap"),
        ((Rectangle(0, 2, 0, 8), Rectangle(0, 2, 0, 8)), "overlap"),
    ],
)
def test_rectangles_must_tile(rectangles: tuple[Rectangle, ...], reason: str) -> None:
    with pytest.raises(LayoutMismatch, match=reason):
        Geometry(rectangles)


def test_the_number_of_rectangles_is_bounded() -> None:
    with pytest.raises(LimitExceeded, match=r"1..256 rectangles, not 0"):
        Geometry(())
    with pytest.raises(LimitExceeded, match=r"1..256 rectangles, not 257"):
        Geometry(tuple(Rectangle(layer, layer + 1, 0, 1) for layer in range(257)))


def test_uneven_tilings_are_allowed_when_spelled_out() -> None:
    geometry = Geometry((Rectangle(0, 10, 0, 8), Rectangle(10, 32, 0, 3), Rectangle(10, 32, 3, 8)))
    geometry.check_fits(GQA)


def test_a_geometry_of_another_model_is_refused_with_both_sizes() -> None:
    with pytest.raises(LayoutMismatch, match=r"32 layers x 1 KV heads .* 32 layers x 8 KV heads"):
        Geometry.whole(LATENT).check_fits(GQA)


@pytest.mark.parametrize(
    ("tp", "pp", "canonical", "digest"),
    [
        (1, 1, b"0-32x0-8", 0x2E161C),
        (2, 1, b"0-32x0-4,0-32x4-8", 0x23506E),
        (1, 2, b"0-16x0-8,16-32x0-8", 0xEC2A5F),
        (4, 2, b"0-16x0-2,0-16x2-4,0-16x4-6,0-16x6-8,16-32x0-2,16-32x2-4,16-32x4-6,16-32x6-8", 0xDA1572),
    ],
)
def test_digests_are_golden(tp: int, pp: int, canonical: bytes, digest: int) -> None:
    geometry = Geometry.parallel(GQA, tp=tp, pp=pp)
    assert geometry.canonical == canonical
    assert f"{geometry.digest:06x}" == f"{digest:06x}"


def test_a_shard_id_is_digest_and_number() -> None:
    geometry = Geometry.parallel(GQA, tp=4, pp=2)
    ids = [geometry.shard(number) for number in range(8)]
    assert [shard & 0xFF for shard in ids] == list(range(8))
    assert {shard >> 8 for shard in ids} == {geometry.digest}
    assert all(0 < shard < 1 << 32 for shard in ids)
    for number in (-1, 8):
        with pytest.raises(LayoutMismatch, match=f"rectangle {number} of a geometry with 8"):
            geometry.shard(number)


def test_different_cuts_have_different_digests() -> None:
    cuts = {Geometry.parallel(GQA, tp=tp, pp=pp) for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32))}
    assert len({cut.digest for cut in cuts}) == len(cuts) == 24


def test_equal_geometries_are_one_value() -> None:
    assert Geometry.parallel(GQA, tp=1) == Geometry.whole(GQA)
    assert hash(Geometry.parallel(GQA, tp=1)) == hash(Geometry.whole(GQA))
    assert "digest" not in repr(Geometry.whole(GQA))


def test_overlapping_names_stored_and_common_parts() -> None:
    geometry = Geometry.parallel(GQA, tp=4)
    assert list(geometry.overlapping(Rectangle(0, 32, 1, 3))) == [
        (0, Rectangle(0, 32, 0, 2), Rectangle(0, 32, 1, 2)),
        (1, Rectangle(0, 32, 2, 4), Rectangle(0, 32, 2, 3)),
    ]
