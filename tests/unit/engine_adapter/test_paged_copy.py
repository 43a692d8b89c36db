import numpy as np
import pytest
import torch

from engine_adapter.copy import PagedKv
from kvstore.client.copiers import Copiers
from kvstore.errors import InvalidRequest, LayoutMismatch
from kvstore.model import checksum

LAYERS, HEADS, PAGES, CHUNKS, BLOCKS = 3, 4, 2, 5, 16
POISON = 0xA5


def pool_bytes(chunks=CHUNKS, heads=HEADS, head_page_bytes=64):
    """Every head page of every chunk differs from all others."""
    rng = np.random.default_rng(7)
    return rng.integers(0, 256, (chunks, LAYERS, PAGES, heads, head_page_bytes), dtype=np.uint8)


def random_blocks(seed=3):
    return np.random.default_rng(seed).permutation(BLOCKS)[: CHUNKS * PAGES].reshape(CHUNKS, PAGES).tolist()


def poisoned(dtype):
    """Per layer (blocks, heads, 4, width): 64 bytes a head page."""
    width = 16 // dtype.itemsize
    return [
        torch.full((BLOCKS, HEADS, 64), POISON, dtype=torch.uint8).view(dtype).reshape(BLOCKS, HEADS, 4, width)
        for _ in range(LAYERS)
    ]


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().reshape(tensor.shape[0], tensor.shape[1], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_scatter_then_gather_moves_every_byte_and_no_other(dtype):
    tensors, blocks, pool = poisoned(dtype), random_blocks(), pool_bytes()
    kv = PagedKv(tensors, PAGES, blocks)
    for index in range(CHUNKS):
        kv.scatter(index, pool[index], 0, 0)
    for layer, tensor in enumerate(tensors):
        expected = np.full((BLOCKS, HEADS, 64), POISON, dtype=np.uint8)
        for index, ids in enumerate(blocks):
            expected[ids] = pool[index, layer]
        assert np.array_equal(raw(tensor), expected)
    back = np.full_like(pool, POISON ^ 0xFF)
    for index in range(CHUNKS):
        kv.gather(index, back[index], 0, 0)
    assert np.array_equal(back, pool)


def test_a_rank_gets_its_layers_and_heads_of_the_model():
    # The engine's rank holds layers 4..6 and heads 8..11; pieces arrive cut by another geometry.
    tensors, blocks, pool = poisoned(torch.bfloat16), random_blocks(), pool_bytes()
    kv = PagedKv(tensors, PAGES, blocks, layer_offset=4, head_offset=8)
    kv.scatter(1, pool[1, 0:2, :, 1:4], 4, 9)
    kv.scatter(1, pool[1, 2:3, :, 2:4], 6, 10)
    for layer, heads in ((0, slice(1, 4)), (1, slice(1, 4)), (2, slice(2, 4))):
        expected = np.full((BLOCKS, HEADS, 64), POISON, dtype=np.uint8)
        expected[blocks[1], heads] = pool[1, layer, :, heads]
        assert np.array_equal(raw(tensors[layer]), expected)
    slot = np.full((1, PAGES, HEADS, 64), POISON ^ 0xFF, dtype=np.uint8)
    kv.gather(1, slot[:, :, 1:3], 5, 9)  # a slot view that is not contiguous over heads
    assert np.array_equal(slot[:, :, 1:3], pool[1, 1:2, :, 1:3])
    assert (slot[:, :, [0, 3]] == POISON ^ 0xFF).all()


def test_blocks_that_lie_apart_in_one_allocation_of_all_layers():
    storage = torch.full((BLOCKS, LAYERS, HEADS, 64), POISON, dtype=torch.uint8)
    blocks, pool = random_blocks(), pool_bytes()
    kv = PagedKv([storage[:, layer] for layer in range(LAYERS)], PAGES, blocks)
    for index in range(CHUNKS):
        kv.scatter(index, pool[index], 0, 0)
    expected = np.full(storage.shape, POISON, dtype=np.uint8)
    for index, ids in enumerate(blocks):
        expected[ids] = pool[index].swapaxes(0, 1)
    assert np.array_equal(storage.numpy(), expected)
    slot = np.empty(pool.shape[1:], dtype=np.uint8)
    kv.gather(4, slot, 0, 0)
    assert np.array_equal(slot, pool[4])


def test_blocks_at_any_distance_and_heads_that_are_not_in_one_piece():
    """A slice of a wider tensor, with blocks that are no multiple of a head page apart; heads inside tokens."""
    wide = torch.full((BLOCKS, HEADS * 64 + 8), POISON, dtype=torch.uint8)
    padded = wide[:, : HEADS * 64].unflatten(1, (HEADS, 64))
    inside = torch.full((BLOCKS, 4, HEADS, 16), POISON, dtype=torch.uint8)
    blocks, pool = random_blocks(), pool_bytes()
    expected = np.full((BLOCKS, HEADS, 64), POISON, dtype=np.uint8)
    for index, ids in enumerate(blocks):
        expected[ids] = pool[index, 0]
    for tensor in (padded, inside.transpose(1, 2)):
        kv = PagedKv([tensor], PAGES, blocks)
        for index in range(CHUNKS):
            kv.scatter(index, pool[index, :1], 0, 0)
            slot = np.full((1, PAGES, HEADS, 64), POISON ^ 0xFF, dtype=np.uint8)
            kv.gather(index, slot, 0, 0)
            assert np.array_equal(slot[0], pool[index, 0])
        assert np.array_equal(raw(tensor), expected)
    assert (wide[:, HEADS * 64 :] == POISON).all(), "what lies between the blocks belongs to somebody else"


@pytest.mark.parametrize(
    ("head_page_bytes", "gaps", "joined", "in_rows"),
    [
        (4096, (0, 0), True, True),
        (4096, (4096, 2048), True, True),  # an item is two rows
        (4096, (2048, 64), False, True),  # no row divides the distances of the layers
        (1024, (0, 0), False, False),
        (4096 + 64, (0, 0), True, True),
        (4096 + 64, (4096, 4096), False, True),
    ],
)
def test_long_items_as_rows_of_one_layer_or_of_all(head_page_bytes, gaps, joined, in_rows):
    """Layers in any order in memory, with and without gaps between them that belong to somebody else."""
    layer_bytes = BLOCKS * HEADS * head_page_bytes
    memory = torch.full((3 * layer_bytes + sum(gaps),), POISON, dtype=torch.uint8)
    starts = [layer_bytes + gaps[0], 0, 2 * layer_bytes + sum(gaps)]
    shape = BLOCKS, HEADS, head_page_bytes
    tensors = [memory[start : start + layer_bytes].view(shape) for start in starts]
    blocks, pool = random_blocks(), pool_bytes(head_page_bytes=head_page_bytes)
    kv = PagedKv(tensors, PAGES, blocks)
    assert (kv.gathers_at_once, kv.scatters_at_once) == (joined, in_rows)
    expected = torch.full_like(memory, POISON)
    for layer, start in enumerate(starts):
        view = expected[start : start + layer_bytes].view(shape).numpy()
        for index, ids in enumerate(blocks):
            view[ids] = pool[index, layer]
    copiers = Copiers(3)
    assert copiers.each(range(CHUNKS), 1 << 30, lambda index: kv.scatter(index, pool[index], 0, 0)) == (CHUNKS, None)
    assert torch.equal(memory, expected), "every byte in its place, and no other touched"
    back = np.full_like(pool, POISON ^ 0xFF)
    copiers.each(range(CHUNKS), 1 << 30, lambda index: kv.gather(index, back[index], 0, 0))
    assert np.array_equal(back, pool)
    kv.gather(1, back[0, 1:3, :, 1:3], 1, 1)  # some layers and heads
    assert np.array_equal(back[0, 1:3, :, 1:3], pool[1, 1:3, :, 1:3]) and np.array_equal(back[0, 0], pool[0, 0])
    copiers.close()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("head_page_bytes", [64, 1024, 4096, 4096 + 64])
def test_checksums_are_taken_and_checked_on_the_way(head_page_bytes, native, monkeypatch):
    if not native:
        monkeypatch.setattr(checksum, "_native", None)
    storage = torch.full((LAYERS, BLOCKS, HEADS, head_page_bytes), POISON, dtype=torch.uint8)
    blocks, pool = random_blocks(), pool_bytes(head_page_bytes=head_page_bytes)
    kv = PagedKv(list(storage), PAGES, blocks)
    tables = [checksum.table_of_layers(chunk) for chunk in pool]
    for index in range(CHUNKS):
        assert kv.scatter_checked(index, pool[index], 0, 0, tables[index])
    expected = np.full(storage.shape, POISON, dtype=np.uint8)
    for index, ids in enumerate(blocks):
        expected[:, ids] = pool[index]
    assert np.array_equal(storage.numpy(), expected)
    back = np.full_like(pool, POISON ^ 0xFF)
    for index in range(CHUNKS):
        assert np.array_equal(kv.gather_summed(index, back[index], 0, 0), tables[index])
    assert np.array_equal(back, pool)
    wrong = pool[1].copy()
    wrong[1, 0, 2, 5] ^= 1
    storage.fill_(POISON)
    assert not kv.scatter_checked(1, wrong, 0, 0, tables[1])
    assert (storage[1:] == POISON).all(), "no layer from the one that differs on"
    # some layers and heads of a rank that begins at layer 4 and head 8
    kv = PagedKv(list(storage), PAGES, blocks, layer_offset=4, head_offset=8)
    piece = np.ascontiguousarray(pool[2, 1:3, :, 1:3])
    assert kv.scatter_checked(2, piece, 5, 9, tables[2][1:3, 1:3])
    assert np.array_equal(storage[1:3, blocks[2], 1:3].numpy(), piece)
    slot = np.empty_like(piece)
    assert np.array_equal(kv.gather_summed(2, slot, 5, 9), tables[2][1:3, 1:3]) and np.array_equal(slot, piece)
    with pytest.raises(LayoutMismatch):
        kv.scatter_checked(0, pool[0], 5, 8, tables[0])
    read_only = pool[0].copy()
    read_only.flags.writeable = False
    with pytest.raises(InvalidRequest, match="read-only"):
        kv.gather_summed(0, read_only, 4, 8)


def test_one_latent_head_and_one_layer_at_a_time():
    tensor, pool = torch.zeros((BLOCKS, 1, 64), dtype=torch.uint8), pool_bytes(heads=1)
    kv = PagedKv([tensor] * LAYERS, PAGES, [[9, 2]])
    kv.scatter(0, pool[0, 1:2], 1, 0)
    assert np.array_equal(tensor[[9, 2]].numpy(), pool[0, 1])


def test_shapes_that_do_not_fit_are_refused_before_a_byte_moves():
    tensors, pool = poisoned(torch.bfloat16), pool_bytes()
    kv = PagedKv(tensors, PAGES, random_blocks())
    bad = [
        (pool[0, :, :1], 0, 0),
        (pool[0, :, :, :, :32], 0, 0),
        (pool[0], 1, 0),
        (pool[0], 0, 1),
        (pool[0], -1, 0),
        (pool[0].reshape(-1), 0, 0),
        (pool[0].view(np.int8), 0, 0),
    ]
    for piece, layer, head in bad:
        with pytest.raises(LayoutMismatch):
            kv.scatter(0, piece, layer, head)
        with pytest.raises(LayoutMismatch):
            kv.gather(0, piece.copy(), layer, head)
    for index in (-1, CHUNKS):
        with pytest.raises(InvalidRequest, match="chunk"):
            kv.scatter(index, pool[0], 0, 0)
    read_only = pool[0].copy()
    read_only.flags.writeable = False
    with pytest.raises(InvalidRequest, match="read-only"):
        kv.gather(0, read_only, 0, 0)
    assert all((raw(tensor) == POISON).all() for tensor in tensors)


def test_engine_side_mistakes_are_refused_at_the_start():
    good = torch.zeros((BLOCKS, HEADS, 64), dtype=torch.uint8)
    for ids in ([[0, BLOCKS]], [[-1, 0]]):
        with pytest.raises(InvalidRequest, match="block ids"):
            PagedKv([good], PAGES, ids)
    for tensors in (
        [],
        [good, good[:8]],
        [torch.zeros((BLOCKS, HEADS))],
        [good, good.transpose(1, 2).contiguous().transpose(1, 2)],
        [good, good.to(torch.int8)],
        [good[:1].expand(BLOCKS, HEADS, 64)],
        [good.as_strided((BLOCKS, HEADS, 64), (HEADS * 60, 60, 1))],
        [good[:0]],
    ):
        with pytest.raises(LayoutMismatch):
            PagedKv(tensors, PAGES, [[0, 1]])
    with pytest.raises(LayoutMismatch, match="blocks"):
        PagedKv([good], PAGES, [[0]])
    with pytest.raises(InvalidRequest, match="meta"):
        PagedKv([good.to("meta")], PAGES, [[0, 1]])
    assert len(PagedKv([good], PAGES, [])) == 0
