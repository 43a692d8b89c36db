"""KV tensors of engines in every form, filled and compared by plain torch indexing."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from engine_adapter.views import Order, Vectors

POISON = 0xA5
FORMS = [*itertools.product(Order, Vectors)]


def make_engine(form, layers, blocks, block_tokens, heads, dim, dtype=torch.bfloat16, poison=POISON):
    """One tensor a layer, or a pair, filled with poison. A form of None is MLA's [block][token][latent]."""

    def poisoned(*shape):
        return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), poison, dtype=torch.uint8).view(dtype)

    if form is None:
        return [poisoned(blocks, block_tokens, dim) for _ in range(layers)]
    order, vectors = form
    inner = (heads, block_tokens) if order is Order.HND else (block_tokens, heads)
    shape = {
        Vectors.JOINED: (blocks, *inner, 2 * dim),
        Vectors.OUTERMOST: (2, blocks, *inner, dim),
        Vectors.IN_BLOCK: (blocks, 2, *inner, dim),
        Vectors.PAIR: (blocks, *inner, dim),
    }[vectors]
    if vectors is Vectors.PAIR:
        return [(poisoned(*shape), poisoned(*shape)) for _ in range(layers)]
    return [poisoned(*shape) for _ in range(layers)]


def fill(engine, form, block_ids, tokens):
    """Put `tokens` (layers, tokens, heads, vectors, dim) of one chunk into the blocks, by naive indexing."""
    for layer, kv in zip(engine, tokens, strict=True):
        for block, rows in zip(block_ids, kv.chunk(len(block_ids)), strict=True):
            if form is None:
                layer[block] = rows[:, 0, 0]
                continue
            order, vectors = form
            turned = rows if order is Order.NHD else rows.transpose(0, 1)
            if vectors is Vectors.JOINED:
                layer[block] = turned.flatten(-2)
            elif vectors is Vectors.OUTERMOST:
                layer[0, block], layer[1, block] = turned[..., 0, :], turned[..., 1, :]
            elif vectors is Vectors.IN_BLOCK:
                layer[block, 0], layer[block, 1] = turned[..., 0, :], turned[..., 1, :]
            else:
                layer[0][block], layer[1][block] = turned[..., 0, :], turned[..., 1, :]


def raw(engine):
    """All bytes, layer by layer."""
    flat = [tensor for layer in engine for tensor in (layer if isinstance(layer, tuple) else (layer,))]
    return np.concatenate([tensor.contiguous().view(torch.uint8).numpy().ravel() for tensor in flat])
