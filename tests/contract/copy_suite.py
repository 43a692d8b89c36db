"""What every copy between pool memory and an engine's paged KV promises.

A test module subclasses `CopySuite` and says how its kind is made, on which device. Expected bytes come from naive
indexing. Every head page of the pool differs from all others, and what must not change is poisoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvstore.client.values import synchronize
from kvstore.errors import InvalidRequest, LayoutMismatch

LAYERS, HEADS, PAGES, CHUNKS, BLOCKS, HEAD_PAGE_BYTES = 3, 4, 2, 5, 16, 64
POISON = 0xA5
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]

Bytes = npt.NDArray[np.uint8]


class Kv(Protocol):
    """A Destination and Source with a length."""

    def __len__(self) -> int: ...

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None: ...

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None: ...


def pool_bytes(chunks: int = CHUNKS, heads: int = HEADS) -> Bytes:
    rng = np.random.default_rng(7)
    return rng.integers(0, 256, (chunks, LAYERS, PAGES, heads, HEAD_PAGE_BYTES), dtype=np.uint8)


def random_blocks(seed: int = 3) -> list[list[int]]:
    places = np.random.default_rng(seed).permutation(BLOCKS)[: CHUNKS * PAGES]
    return [list(map(int, chunk)) for chunk in places.reshape(CHUNKS, PAGES)]


def raw(tensor: torch.Tensor) -> Bytes:
    """All bytes of a tensor as (blocks, heads, head_page_bytes)."""
    flat = tensor.contiguous().cpu().view(torch.uint8)
    return flat.numpy().reshape(tensor.shape[0], tensor.shape[1], -1)


class CopySuite:
    device = torch.device("cpu")

    def make(
        self,
        tensors: Sequence[torch.Tensor],
        pages: int,
        block_ids: Sequence[Sequence[int]],
        layer_offset: int = 0,
        head_offset: int = 0,
    ) -> Kv:
        raise NotImplementedError

    def poisoned(self, dtype: torch.dtype = torch.bfloat16, heads: int = HEADS) -> list[torch.Tensor]:
        """Per layer (blocks, heads, 4, width), 64 bytes a head page."""
        return [
            torch.full((BLOCKS, heads, HEAD_PAGE_BYTES), POISON, dtype=torch.uint8, device=self.device)
            .view(dtype)
            .reshape(BLOCKS, heads, 4, -1)
            for _ in range(LAYERS)
        ]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_scatter_then_gather_moves_every_byte_and_no_other(self, dtype: torch.dtype) -> None:
        tensors, blocks, pool = self.poisoned(dtype), random_blocks(), pool_bytes()
        kv = self.make(tensors, PAGES, blocks)
        assert len(kv) == CHUNKS
        for index in range(CHUNKS):
            kv.scatter(index, pool[index], 0, 0)
        synchronize(kv)
        for layer, tensor in enumerate(tensors):
            expected = np.full((BLOCKS, HEADS, HEAD_PAGE_BYTES), POISON, dtype=np.uint8)
            for index, ids in enumerate(blocks):
                expected[ids] = pool[index, layer]
            assert np.array_equal(raw(tensor), expected)
        back = np.full_like(pool, POISON ^ 0xFF)
        for index in range(CHUNKS):
            kv.gather(index, back[index], 0, 0)
        synchronize(kv)
        assert np.array_equal(back, pool)

    def test_gather_is_naive_indexing_of_the_engines_tensors(self) -> None:
        blocks = random_blocks()
        rng = np.random.default_rng(5)
        values = rng.integers(0, 256, (LAYERS, BLOCKS, HEADS, HEAD_PAGE_BYTES), dtype=np.uint8)
        kv = self.make([torch.from_numpy(layer).to(self.device) for layer in values], PAGES, blocks)
        slot = np.full((LAYERS, PAGES, HEADS, HEAD_PAGE_BYTES), POISON, dtype=np.uint8)
        for index in range(CHUNKS):
            kv.gather(index, slot, 0, 0)
            synchronize(kv)
            assert np.array_equal(slot, values[:, blocks[index]])

    def test_a_rank_gets_its_layers_and_heads_of_the_model(self) -> None:
        # The engine's rank holds layers 4..6 and heads 8..11; pieces arrive cut by another geometry.
        tensors, blocks, pool = self.poisoned(), random_blocks(), pool_bytes()
        kv = self.make(tensors, PAGES, blocks, layer_offset=4, head_offset=8)
        kv.scatter(1, pool[1, 0:2, :, 1:4], 4, 9)
        kv.scatter(1, pool[1, 2:3, :, 2:4], 6, 10)
        synchronize(kv)
        for layer, heads in ((0, slice(1, 4)), (1, slice(1, 4)), (2, slice(2, 4))):
            expected = np.full((BLOCKS, HEADS, HEAD_PAGE_BYTES), POISON, dtype=np.uint8)
            expected[blocks[1], heads] = pool[1, layer, :, heads]
            assert np.array_equal(raw(tensors[layer]), expected)
        slot = np.full((1, PAGES, HEADS, HEAD_PAGE_BYTES), POISON ^ 0xFF, dtype=np.uint8)
        kv.gather(1, slot[:, :, 1:3], 5, 9)  # a slot view that is not contiguous over heads
        synchronize(kv)
        assert np.array_equal(slot[:, :, 1:3], pool[1, 1:2, :, 1:3])
        assert (slot[:, :, [0, 3]] == POISON ^ 0xFF).all()

    def test_layers_one_by_one_are_the_whole(self) -> None:
        tensors, blocks, pool = self.poisoned(), random_blocks(), pool_bytes()
        kv = self.make(tensors, PAGES, blocks)
        for layer in range(LAYERS):
            for index in range(CHUNKS):
                kv.scatter(index, pool[index, layer : layer + 1], layer, 0)
        synchronize(kv)
        slot = np.full_like(pool[0], POISON)
        for index in range(CHUNKS):
            for layer in reversed(range(LAYERS)):
                kv.gather(index, slot[layer : layer + 1], layer, 0)
            synchronize(kv)
            assert np.array_equal(slot, pool[index])

    def test_blocks_that_lie_apart_in_one_allocation_of_all_layers(self) -> None:
        shape = BLOCKS, LAYERS, HEADS, HEAD_PAGE_BYTES
        storage = torch.full(shape, POISON, dtype=torch.uint8, device=self.device)
        blocks, pool = random_blocks(), pool_bytes()
        kv = self.make([storage[:, layer] for layer in range(LAYERS)], PAGES, blocks)
        for index in range(CHUNKS):
            kv.scatter(index, pool[index], 0, 0)
        synchronize(kv)
        expected = np.full(shape, POISON, dtype=np.uint8)
        for index, ids in enumerate(blocks):
            expected[ids] = pool[index].swapaxes(0, 1)
        assert np.array_equal(storage.cpu().numpy(), expected)

    def test_one_latent_head(self) -> None:
        tensors, pool = self.poisoned(heads=1), pool_bytes(heads=1)
        kv = self.make(tensors, PAGES, [[9, 2]])
        kv.scatter(0, pool[0, 1:2], 1, 0)
        synchronize(kv)
        assert np.array_equal(raw(tensors[1])[[9, 2]], pool[0, 1])
        assert all((raw(tensors[layer]) == POISON).all() for layer in (0, 2))

    def test_the_last_delivery_of_a_chunk_counts(self) -> None:
        tensors, blocks, pool = self.poisoned(), random_blocks(), pool_bytes()
        kv = self.make(tensors, PAGES, blocks)
        kv.scatter(2, pool[0], 0, 0)
        synchronize(kv)
        kv.scatter(2, pool[2], 0, 0)
        synchronize(kv)
        assert np.array_equal(raw(tensors[0])[blocks[2]], pool[2, 0])

    def test_read_only_pool_memory_can_be_loaded_and_not_stored_into(self) -> None:
        tensors, blocks, pool = self.poisoned(), random_blocks(), pool_bytes()
        pool.flags.writeable = False
        kv = self.make(tensors, PAGES, blocks)
        kv.scatter(0, pool[0], 0, 0)
        synchronize(kv)
        assert np.array_equal(raw(tensors[2])[blocks[0]], pool[0, 2])
        with pytest.raises(InvalidRequest, match="read-only"):
            kv.gather(0, pool[0], 0, 0)

    def test_shapes_that_do_not_fit_are_refused_before_a_byte_moves(self) -> None:
        tensors, pool = self.poisoned(), pool_bytes()
        kv = self.make(tensors, PAGES, random_blocks())
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
                kv.scatter(0, piece, layer, head)  # type: ignore[arg-type]
            with pytest.raises(LayoutMismatch):
                kv.gather(0, piece.copy(), layer, head)  # type: ignore[arg-type]
        for index in (-1, CHUNKS):
            with pytest.raises(InvalidRequest, match="chunk"):
                kv.scatter(index, pool[0], 0, 0)
        synchronize(kv)
        assert all((raw(tensor) == POISON).all() for tensor in tensors)

    def test_engine_side_mistakes_are_refused_at_the_start(self) -> None:
        good = torch.zeros((BLOCKS, HEADS, HEAD_PAGE_BYTES), dtype=torch.uint8, device=self.device)
        for ids in ([[0, BLOCKS]], [[-1, 0]]):
            with pytest.raises(InvalidRequest, match="block ids"):
                self.make([good], PAGES, ids)
        flat = torch.zeros((BLOCKS, HEADS), device=self.device)
        for tensors in ([], [good, good[:8]], [good, good.view(torch.int8)], [flat]):
            with pytest.raises(LayoutMismatch):
                self.make(tensors, PAGES, [[0, 1]])
        with pytest.raises(LayoutMismatch, match="blocks"):
            self.make([good], PAGES, [[0]])

    def test_no_chunks_at_all(self) -> None:
        tensors = self.poisoned()
        kv = self.make(tensors, PAGES, [])
        assert len(kv) == 0
        synchronize(kv)
        with pytest.raises(InvalidRequest, match="chunk 0 of 0"):
            kv.scatter(0, pool_bytes()[0], 0, 0)
        assert all((raw(tensor) == POISON).all() for tensor in tensors)


class StridedCopySuite(CopySuite):
    """What copies of a device promise besides: any strided view (blocks, heads, *interior)."""

    def test_blocks_with_tokens_outside_heads(self) -> None:
        # (K or V, block, token, head, head_dim) in one allocation: a head page is K then V of 4 tokens.
        blocks, pool = random_blocks(), pool_bytes()
        shape = 2, BLOCKS, 4, HEADS, 4
        storage = [torch.full(shape, -7.0, dtype=torch.bfloat16, device=self.device) for _ in range(LAYERS)]
        kv = self.make([each.permute(1, 3, 0, 2, 4) for each in storage], PAGES, blocks)
        for index in range(CHUNKS):
            kv.scatter(index, pool[index], 0, 0)
        synchronize(kv)
        for layer in range(LAYERS):
            expected = torch.full(shape, -7.0, dtype=torch.bfloat16).view(torch.int16).numpy()
            for index, ids in enumerate(blocks):
                for page, block in enumerate(ids):
                    # [head][K, V][token][head_dim] -> [K, V][token][head][head_dim]
                    part = pool[index, layer, page].view(np.int16).reshape(HEADS, 2, 4, 4)
                    expected[:, block] = part.transpose(1, 2, 0, 3)
            assert np.array_equal(storage[layer].cpu().view(torch.int16).numpy(), expected)
        back = np.full_like(pool, POISON)
        for index in range(CHUNKS):
            kv.gather(index, back[index], 0, 0)
        synchronize(kv)
        assert np.array_equal(back, pool)

    def test_heads_outside_blocks(self) -> None:
        blocks, pool = random_blocks(), pool_bytes()
        shape = HEADS, BLOCKS, HEAD_PAGE_BYTES
        storage = [torch.full(shape, POISON, dtype=torch.uint8, device=self.device) for _ in range(LAYERS)]
        kv = self.make([each.transpose(0, 1) for each in storage], PAGES, blocks)
        for index in range(CHUNKS):
            kv.scatter(index, pool[index, :, :, 1:3], 0, 1)
        synchronize(kv)
        for layer in range(LAYERS):
            expected = np.full(shape, POISON, dtype=np.uint8)
            for index, ids in enumerate(blocks):
                expected[1:3, ids] = pool[index, layer, :, 1:3].swapaxes(0, 1)
            assert np.array_equal(storage[layer].cpu().numpy(), expected)

    def test_pieces_of_many_shapes_in_one_batch(self) -> None:
        tensors, blocks, pool = self.poisoned(), random_blocks(), pool_bytes()
        kv = self.make(tensors, PAGES, blocks)
        for index in range(CHUNKS):
            cut = index % (HEADS - 1) + 1
            kv.scatter(index, pool[index, :1], 0, 0)
            kv.scatter(index, pool[index, 1:, :, :cut], 1, 0)
            kv.scatter(index, pool[index, 1:, :, cut:], 1, cut)
        back = np.full_like(pool, POISON)
        for index in range(CHUNKS):
            cut = index % (HEADS - 1) + 1
            kv.gather(index, back[index, :2], 0, 0)
            kv.gather(index, back[index, 2:, :, cut:], 2, cut)
            kv.gather(index, back[index, 2:, :, :cut], 2, 0)
        synchronize(kv)
        assert np.array_equal(back, pool)
