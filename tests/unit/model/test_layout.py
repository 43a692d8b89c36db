"""Sizes and shapes of pages, chunks and shards."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import LayoutMismatch, LimitExceeded
from kvstore.model.layout import CHUNK_BYTES_LIMIT, Attention, Dtype, Geometry, PageLayout, Rectangle, SideComponent


def layout_with(**changes: object) -> PageLayout:
    fields: dict[str, object] = {
        "layers": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "dtype": Dtype.BF16,
        "page_tokens": 16,
        "pages_per_chunk": 4,
    }
    return PageLayout(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "itemsize_bytes"),
    [(Dtype.FP32, 4), (Dtype.BF16, 2), (Dtype.FP16, 2), (Dtype.FP8_E4M3, 1), (Dtype.FP8_E5M2, 1)],
)
@pytest.mark.parametrize(
    ("attention", "kv_heads", "head_dim", "vectors"),
    [(Attention.MHA, 32, 128, 2), (Attention.GQA, 8, 128, 2), (Attention.MLA, 1, 576, 1)],
)
def test_sizes(
    dtype: Dtype, itemsize_bytes: int, attention: Attention, kv_heads: int, head_dim: int, vectors: int
) -> None:
    layout = layout_with(attention=attention, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    assert dtype.itemsize_bytes == itemsize_bytes
    assert layout.head_page_bytes == 16 * vectors * head_dim * itemsize_bytes
    assert layout.chunk_tokens == 64
    assert layout.chunk_bytes == 32 * 4 * kv_heads * layout.head_page_bytes
    assert layout.shape(layout.whole) == (32, 4, kv_heads, layout.head_page_bytes)


def test_every_dtype_has_a_size() -> None:
    assert all(dtype.itemsize_bytes in (1, 2, 4) for dtype in Dtype)


def test_side_components_lie_behind_k_and_v_of_each_head() -> None:
    plain = layout_with(dtype=Dtype.FP8_E4M3)
    scaled = layout_with(
        dtype=Dtype.FP8_E4M3, side_components=(SideComponent("k_scale", 64), SideComponent("v_scale", 64))
    )
    assert scaled.head_page_bytes == plain.head_page_bytes + 128
    assert scaled.chunk_bytes == plain.chunk_bytes + 32 * 4 * 8 * 128


def test_payload_and_shape_of_a_shard_agree() -> None:
    layout = layout_with()
    shard = Rectangle(8, 16, 2, 4)
    assert layout.payload_bytes(shard) == int(np.prod(layout.shape(shard))) == 8 * 4 * 2 * 8192


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "page_tokens", "pages_per_chunk"])
@pytest.mark.parametrize("value", [0, -1, 1 << 16, 8.0, True, "8", np.int64(8)])
def test_numbers_are_integers_in_range(name: str, value: object) -> None:
    with pytest.raises(LayoutMismatch, match=f"{name} is .*1..65535"):
        layout_with(**{name: value})


def test_a_latent_layout_has_one_head() -> None:
    with pytest.raises(LayoutMismatch, match="one latent head, but kv_heads is 8"):
        layout_with(attention=Attention.MLA)


@pytest.mark.parametrize("interior", ["", "größe", 5])
def test_interior_is_a_plain_name(interior: object) -> None:
    with pytest.raises(LayoutMismatch, match="interior"):
        layout_with(interior=interior)


@pytest.mark.parametrize(("name", "size"), [("", 8), (5, 8), ("scale", 0), ("scale", -8), ("scale", 8.0)])
def test_side_components_are_named_and_sized(name: str, size: int) -> None:
    with pytest.raises(LayoutMismatch):
        SideComponent(name, size)


def test_a_chunk_that_no_geometry_could_cut_is_refused() -> None:
    with pytest.raises(LimitExceeded, match=str(CHUNK_BYTES_LIMIT)):
        layout_with(layers=1 << 15, pages_per_chunk=1 << 13)


def test_a_shard_over_the_limit_is_refused_by_name() -> None:
    layout = layout_with(pages_per_chunk=1024)
    assert layout.chunk_bytes == 2 << 30
    with pytest.raises(LimitExceeded, match=f"a shard of {2 << 30} bytes is over the limit of {CHUNK_BYTES_LIMIT}"):
        Geometry.whole(layout).check_fits(layout)
    Geometry.parallel(layout, tp=8).check_fits(layout)


@pytest.mark.parametrize("bounds", [(0, 0, 0, 1), (0, 1, 1, 1), (2, 1, 0, 1), (-1, 1, 0, 1), (0, 1, -1, 1)])
def test_an_empty_or_negative_rectangle_is_refused(bounds: tuple[int, int, int, int]) -> None:
    with pytest.raises(LayoutMismatch, match="empty or negative"):
        Rectangle(*bounds)


def test_intersection() -> None:
    one = Rectangle(0, 4, 2, 6)
    assert one.intersection(Rectangle(2, 8, 0, 3)) == Rectangle(2, 4, 2, 3)
    assert one.intersection(Rectangle(4, 8, 2, 6)) is None
    assert one.intersection(Rectangle(0, 4, 6, 8)) is None
    assert one.contains(Rectangle(1, 3, 3, 5))
    assert not one.contains(Rectangle(1, 5, 3, 5))


def test_a_rectangle_outside_the_chunk_is_refused() -> None:
    layout = layout_with()
    layout.check_rectangle(layout.whole)
    for outside in (Rectangle(0, 33, 0, 8), Rectangle(0, 32, 0, 9)):
        with pytest.raises(LayoutMismatch, match="32 layers x 8 KV heads"):
            layout.check_rectangle(outside)
