"""Engines' tensor layouts as views in stored order, and the copies over them, against plain torch indexing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from engine_forms import FORMS, POISON, make_engine, raw

from engine_adapter.copy import PagedKv
from engine_adapter.items import cut_items
from engine_adapter.views import HeadPages, Order, Vectors, head_pages
from kvstore.errors import LayoutMismatch
from kvstore.model.layout import Attention, Dtype, PageLayout, SideComponent

LAYERS, HEADS, DIM, BLOCKS, CHUNKS = 3, 4, 4, 24, 3


def layout_of(interior="kv_per_token", page_tokens=16, pages_per_chunk=2, attention=Attention.GQA, side=()):
    heads = 1 if attention is Attention.MLA else HEADS
    return PageLayout(
        LAYERS, heads, DIM, Dtype.BF16, page_tokens, pages_per_chunk, attention, interior, side_components=side
    )


def engine(order, vectors, block_tokens=16):
    return make_engine((order, vectors), LAYERS, BLOCKS, block_tokens, HEADS, DIM)


def vector(layer, order, vectors, which, block, head, token):
    """The naive way: K (0) or V (1) of one token and head, `DIM` elements."""
    inner = (head, token) if order is Order.HND else (token, head)
    if vectors is Vectors.JOINED:
        return layer[block][inner][which * DIM : (which + 1) * DIM]
    if vectors is Vectors.OUTERMOST:
        return layer[which, block][inner]
    if vectors is Vectors.IN_BLOCK:
        return layer[block, which][inner]
    return layer[which][block][inner]


def stored_vector(chunk, layout, layer, which, head, token):
    """Bytes of K or V of token `token` of a chunk (layers, pages, heads, head_page_bytes)."""
    page, row = divmod(token, layout.page_tokens)
    place = 2 * row + which if layout.interior == "kv_per_token" else which * layout.page_tokens + row
    return chunk[layer, page, head, place * DIM * 2 : (place + 1) * DIM * 2]


def random_blocks(blocks_per_chunk):
    order = np.random.default_rng(3).permutation(BLOCKS)
    return order[: CHUNKS * blocks_per_chunk].reshape(CHUNKS, blocks_per_chunk).tolist()


def pool_bytes(layout):
    return np.random.default_rng(7).integers(0, 256, (CHUNKS, *layout.shape(layout.whole)), dtype=np.uint8)


@pytest.mark.parametrize("interior", ["kv_per_token", "k_then_v"])
@pytest.mark.parametrize(("order", "vectors"), FORMS)
def test_every_form_to_stored_bytes_and_back(order, vectors, interior):
    layout, blocks = layout_of(interior), random_blocks(2)
    layers, pool = engine(order, vectors), pool_bytes(layout)
    kv = PagedKv(head_pages(layout, layers, order, vectors), 2, blocks)
    for index in range(CHUNKS):
        kv.scatter(index, pool[index], 0, 0)
    expected = engine(order, vectors)
    for index, layer, which, head, token in itertools.product(
        range(CHUNKS), range(LAYERS), range(2), range(HEADS), range(32)
    ):
        page, row = divmod(token, 16)
        source = stored_vector(pool[index], layout, layer, which, head, token)
        place = vector(expected[layer], order, vectors, which, blocks[index][page], head, row)
        place.copy_(torch.from_numpy(source.copy()).view(torch.bfloat16))
    assert np.array_equal(raw(layers), raw(expected))
    for index in range(CHUNKS):
        back = np.full_like(pool[index], POISON ^ 0xFF)
        kv.gather(index, back, 0, 0)
        assert np.array_equal(back, pool[index])


@pytest.mark.parametrize("interior", ["kv_per_token", "k_then_v"])
@pytest.mark.parametrize(("order", "vectors"), FORMS)
def test_some_layers_and_heads_leave_the_others_alone(order, vectors, interior):
    layout, layers = layout_of(interior), engine(order, vectors)
    pool, untouched = pool_bytes(layout), raw(engine(order, vectors))
    kv = PagedKv(head_pages(layout, layers, order, vectors), 2, random_blocks(2), layer_offset=4, head_offset=8)
    kv.scatter(1, pool[1, 1:3, :, 1:3], 5, 9)
    assert (raw(layers) != untouched).sum() <= pool[1, 1:3, :, 1:3].size
    slot = np.full(pool.shape[1:], POISON, dtype=np.uint8)
    kv.gather(1, slot, 4, 8)
    expected = np.full_like(slot, POISON)
    expected[1:3, :, 1:3] = pool[1, 1:3, :, 1:3]
    assert np.array_equal(slot, expected)
    part = np.full_like(slot, POISON)
    kv.gather(1, part[1:2, :, 1:3], 5, 9)  # a part of a slot, in no piece
    expected[2] = POISON
    assert np.array_equal(part, expected)


@pytest.mark.parametrize(("page_tokens", "pages_per_chunk", "block_tokens"), [(64, 1, 16), (16, 4, 64), (24, 4, 32)])
@pytest.mark.parametrize(("order", "vectors"), FORMS)
def test_blocks_of_another_size_than_pages(order, vectors, page_tokens, pages_per_chunk, block_tokens):
    layout, layers = layout_of("kv_per_token", page_tokens, pages_per_chunk), engine(order, vectors, block_tokens)
    pages = head_pages(layout, layers, order, vectors)
    assert pages.blocks_per_chunk == layout.chunk_tokens // block_tokens
    blocks, pool = random_blocks(pages.blocks_per_chunk), pool_bytes(layout)
    kv = PagedKv(pages, pages_per_chunk, blocks)
    for index in range(CHUNKS):
        kv.scatter(index, pool[index], 0, 0)
    for index, layer, which, head, token in itertools.product(
        range(CHUNKS), range(LAYERS), range(2), range(HEADS), range(layout.chunk_tokens)
    ):
        block, row = divmod(token, block_tokens)
        source = vector(layers[layer], order, vectors, which, blocks[index][block], head, row)
        stored = stored_vector(pool[index], layout, layer, which, head, token)
        assert np.array_equal(source.contiguous().view(torch.uint8).numpy(), stored)
    back = np.full_like(pool[2], POISON)
    kv.gather(2, back, 0, 0)
    assert np.array_equal(back, pool[2])


@pytest.mark.parametrize(("page_tokens", "pages_per_chunk", "block_tokens"), [(16, 2, 16), (64, 1, 16), (16, 4, 64)])
def test_latent_pages(page_tokens, pages_per_chunk, block_tokens):
    layout = layout_of("kv_per_token", page_tokens, pages_per_chunk, Attention.MLA)
    tensors = [torch.zeros((BLOCKS, block_tokens, DIM), dtype=torch.bfloat16) for _ in range(LAYERS)]
    pages = head_pages(layout, tensors, Order.NHD, Vectors.JOINED)
    blocks, pool = random_blocks(pages.blocks_per_chunk), pool_bytes(layout)
    kv = PagedKv(pages, pages_per_chunk, blocks)
    for index in range(CHUNKS):
        kv.scatter(index, pool[index], 0, 0)
        tokens = torch.stack([tensor[blocks[index]].reshape(-1, DIM) for tensor in tensors])
        assert np.array_equal(tokens.view(torch.uint8).numpy().ravel(), pool[index].ravel())
    back = np.zeros_like(pool[0])
    kv.gather(0, back, 0, 0)
    assert np.array_equal(back, pool[0])


def test_what_lies_in_one_piece_moves_in_one_piece():
    """Bytes of an item: a head page is 16 tokens of K and V, 4 elements of 2 bytes each."""
    expected = {
        (Order.HND, Vectors.JOINED, "kv_per_token"): 16 * 2 * 8,
        (Order.NHD, Vectors.JOINED, "kv_per_token"): 2 * 8,
        (Order.HND, Vectors.OUTERMOST, "k_then_v"): 16 * 8,
        (Order.HND, Vectors.IN_BLOCK, "k_then_v"): 16 * 8,
        (Order.HND, Vectors.PAIR, "k_then_v"): 16 * 8,
    }
    for (order, vectors), interior in itertools.product(FORMS, ("kv_per_token", "k_then_v")):
        pages = head_pages(layout_of(interior), engine(order, vectors), order, vectors)
        assert cut_items(pages, 0).item_bytes == expected.get((order, vectors, interior), 8)
    retiled = head_pages(
        layout_of(page_tokens=64, pages_per_chunk=1), engine(Order.HND, Vectors.JOINED), Order.HND, Vectors.JOINED
    )
    assert cut_items(retiled, 0).item_bytes == 16 * 2 * 8


def test_a_tensor_that_is_permuted_in_memory_counts_by_its_dimensions():
    """Some engines allocate HND and show NHD: the head page is in one piece all the same."""
    (tensor, *_) = engine(Order.HND, Vectors.JOINED)
    pages = head_pages(layout_of(), [tensor.permute(0, 2, 1, 3)], Order.NHD, Vectors.JOINED)
    assert pages.layers[0][0].data_ptr() == tensor.data_ptr()
    assert cut_items(pages, 0).item_bytes == 16 * 2 * 8


def test_views_ask_nothing_of_the_device():
    tensors = [torch.empty((BLOCKS, 16, HEADS, 2 * DIM), dtype=torch.bfloat16, device="meta")]
    (view,) = head_pages(layout_of(), tensors, Order.NHD, Vectors.JOINED).layers[0]
    assert view.device.type == "meta" and view.shape == (BLOCKS, HEADS, 16, 2, DIM)
    (view,) = head_pages(layout_of("k_then_v"), tensors, Order.NHD, Vectors.JOINED).layers[0]
    assert view.shape == (BLOCKS, HEADS, 2, 16, DIM)


def test_other_page_sizes_are_refused_where_they_are_part_of_the_order():
    for page_tokens, block_tokens in ((64, 16), (16, 64)):
        for attention in (Attention.GQA, Attention.MLA):
            layout = layout_of("k_then_v", page_tokens, 64 // page_tokens, attention)
            tensor = engine(Order.HND, Vectors.JOINED, block_tokens)[0]
            if attention is Attention.MLA:
                tensor = torch.zeros((BLOCKS, block_tokens, DIM), dtype=torch.bfloat16)
            with pytest.raises(LayoutMismatch, match=f"{block_tokens} tokens and the stored pages of {page_tokens}"):
                head_pages(layout, [tensor], Order.HND, Vectors.JOINED)
    with pytest.raises(
        LayoutMismatch, match="blocks of 64 tokens and the stored pages of 16 tokens differ, and a chunk"
    ):
        head_pages(layout_of(), engine(Order.HND, Vectors.JOINED, 64), Order.HND, Vectors.JOINED)


def test_tensors_of_another_form_are_refused():
    layout, form = layout_of(), (Order.HND, Vectors.JOINED)
    good = engine(*form)
    bad = [
        (layout, [good[0], engine(*form, block_tokens=8)[0]]),
        (layout, []),
        (layout, [good[0][..., : 2 * DIM - 2]]),
        (layout, [good[0][0]]),
        (layout, [good[0].float()]),
        (layout, [(good[0], good[1])]),
        (layout_of("vllm_cpu_amx"), good),
        (layout_of(side=(SideComponent("scale", 4),)), good),
    ]
    for described, layers in bad:
        with pytest.raises(LayoutMismatch):
            head_pages(described, layers, *form)
    with pytest.raises(LayoutMismatch, match="2 tensor"):
        head_pages(layout, good, Order.HND, Vectors.PAIR)
    with pytest.raises(LayoutMismatch, match=r"\[vbhtd\]"):
        head_pages(layout, [torch.zeros((3, 1, HEADS, 16, DIM), dtype=torch.bfloat16)], Order.HND, Vectors.OUTERMOST)
    keys, values = engine(Order.HND, Vectors.PAIR)[0]
    pages = head_pages(layout, [(keys, values[:-1])], Order.HND, Vectors.PAIR)
    with pytest.raises(LayoutMismatch, match="K and V have one shape"):
        PagedKv(pages, 2, [])
    with pytest.raises(LayoutMismatch, match="2 pages a chunk, not 3"):
        PagedKv(HeadPages.opaque(good, 2), 3, [])
