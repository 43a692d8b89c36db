"""A small real decoder-only transformer whose bytes do not depend on how a token was reached.

GQA, RoPE, RMSNorm, SwiGLU; fixed random weights in float32; KV in HND pages, one tensor a layer:

    pages[layer]  (blocks, kv_heads, page_tokens, K || V)      a head page is one contiguous run

Invariant: KV rows and logits of a token are the same bits whether it was computed in a prefill or in a decode
step, and whether earlier chunks were computed here or loaded. It holds because there is only one way to compute:
`step` works on a full chunk, (chunk_tokens, hidden), with every token at its own row and zeros in rows that are
not asked for, and attends over the pages of chunks 0..i under a causal mask. So every matrix product has a shape
that depends on i alone, a row of it is a function of that row, and what is masked adds exact zeros. One torch
thread, because the split of a product over threads may change its sums.

Pages that hold no token yet are zero: masked products need finite numbers, and the pool wants unused tokens zero.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.namespace import Namespace

OnLayer = Callable[[int, int], None]
"""Called with (chunk, layer) when that layer's KV of the step's tokens lies in the pages."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model and of its pages; `seed` draws the weights. Counts of elements, not bytes."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp_hidden: int = 256
    vocabulary: int = 512
    page_tokens: int = 16
    pages_per_chunk: int = 4
    seed: int = 20

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk."""
        return self.page_tokens * self.pages_per_chunk

    @property
    def namespace(self) -> Namespace:
        """Equal for engines whose bytes are interchangeable.

        The revision also names torch's version and instruction set: other kernels sum in another order.
        """
        layout = PageLayout(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=Dtype.FP32,
            page_tokens=self.page_tokens,
            pages_per_chunk=self.pages_per_chunk,
        )
        weights = hashlib.blake2b(repr(astuple(self)).encode(), digest_size=8).hexdigest()
        kernels = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
        return Namespace("kvstore/reference", f"{weights}-{kernels}", layout)


@dataclass(slots=True)
class Context:
    """One request's place in the engine: blocks by chunk, and how many leading tokens have their KV in them."""

    blocks: list[list[int]] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, (in, out)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Engine:
    """Weights, pages and a free list of blocks. One owner, one request at a time; sets torch to one thread."""

    def __init__(self, config: ModelConfig, blocks: int = 1024) -> None:
        torch.set_num_threads(1)
        self.config = config
        generator = torch.Generator().manual_seed(config.seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn((rows, columns), generator=generator) / math.sqrt(rows)

        hidden, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self._embedding = torch.randn((config.vocabulary, hidden), generator=generator)
        self._layers = [
            _Layer(
                query=matrix(hidden, query),
                key=matrix(hidden, key),
                value=matrix(hidden, key),
                output=matrix(query, hidden),
                gate=matrix(hidden, config.mlp_hidden),
                up=matrix(hidden, config.mlp_hidden),
                down=matrix(config.mlp_hidden, hidden),
            )
            for _ in range(config.layers)
        ]
        self._unembedding = matrix(hidden, config.vocabulary)
        self.pages = [
            torch.zeros((blocks, config.kv_heads, config.page_tokens, 2 * config.head_dim)) for _ in self._layers
        ]
        self._free = list(range(blocks))
        # Neighbouring pages of a chunk are not neighbours in memory, as in an engine that has run for a while.
        random.Random(config.seed).shuffle(self._free)

    @property
    def free_blocks(self) -> int:
        """Blocks that belong to no context."""
        return len(self._free)

    def grow(self, context: Context, tokens: int) -> None:
        """Give `context` zeroed blocks for `tokens` tokens in all, in whole chunks; InvalidRequest if too few."""
        missing = -(-tokens // self.config.chunk_tokens) - len(context.blocks)
        if missing * self.config.pages_per_chunk > len(self._free):
            raise InvalidRequest(f"{tokens} tokens need {missing} more chunks; {len(self._free)} blocks are free")
        for _ in range(missing):
            context.blocks.append([self._free.pop() for _ in range(self.config.pages_per_chunk)])
            self.clear(context, len(context.blocks) - 1)

    def clear(self, context: Context, first_chunk: int) -> None:
        """Zero the pages of the chunks from `first_chunk` on: a load that failed may have left anything there."""
        blocks = [block for chunk in context.blocks[first_chunk:] for block in chunk]
        for pages in self.pages:
            pages[blocks] = 0

    def free(self, context: Context) -> None:
        """Take the blocks back."""
        self._free.extend(block for chunk in context.blocks for block in chunk)
        context.blocks, context.length = [], 0

    def extend(self, context: Context, tokens: Sequence[int], on_layer: OnLayer | None = None) -> Tensor:
        """Compute `tokens` behind the context's, chunk by chunk; the logits (vocabulary,) of the last one."""
        if not tokens:
            raise InvalidRequest("there is no token to compute")
        if not all(0 <= token < self.config.vocabulary for token in tokens):
            raise InvalidRequest(f"token ids lie in 0..{self.config.vocabulary - 1}")
        self.grow(context, context.length + len(tokens))
        at = 0
        while at < len(tokens):
            room = self.config.chunk_tokens - context.length % self.config.chunk_tokens
            logits = self._step(context, tokens[at : at + room], on_layer)
            context.length += len(tokens[at : at + room])
            at += room
        return logits

    @torch.inference_mode()
    def _step(self, context: Context, tokens: Sequence[int], on_layer: OnLayer | None) -> Tensor:
        """Compute tokens of one chunk, from row `context.length % chunk_tokens` on."""
        config, size = self.config, self.config.chunk_tokens
        chunk, row = divmod(context.length, size)
        rows = torch.arange(row, row + len(tokens))
        blocks = torch.tensor(context.blocks[: chunk + 1])
        own_pages, own_places = blocks[chunk][rows // config.page_tokens], rows % config.page_tokens
        positions = torch.arange(chunk * size, (chunk + 1) * size)
        turn = _rotation(positions, config.head_dim)
        mask = torch.arange((chunk + 1) * size) > positions[:, None]
        state = torch.zeros((size, config.hidden))
        state[rows] = self._embedding[list(tokens)]
        for number, layer in enumerate(self._layers):
            normed = _normed(state)
            query = _rotated((normed @ layer.query).view(size, config.heads, -1), turn)
            key = _rotated((normed @ layer.key).view(size, config.kv_heads, -1), turn)
            value = (normed @ layer.value).view(size, config.kv_heads, -1)
            self.pages[number][own_pages, :, own_places] = torch.cat((key, value), -1)[rows]
            if on_layer is not None:
                on_layer(chunk, number)
            context_kv = self.pages[number][blocks.flatten()].transpose(0, 1).flatten(1, 2)
            state = state + _attention(query, context_kv, mask) @ layer.output
            normed = _normed(state)
            state = state + (functional.silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down
        return (_normed(state) @ self._unembedding)[rows[-1]].clone()


def _normed(state: Tensor) -> Tensor:
    """RMSNorm with unit weights."""
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-6)


def _rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """RoPE (Su et al., 2021): cosines and sines, (tokens, 1, head_dim / 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions[:, None, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def _rotated(vectors: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = vectors.chunk(2, -1)
    cosines, sines = turn
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def _attention(query: Tensor, context_kv: Tensor, mask: Tensor) -> Tensor:
    """query (rows, heads, dim), context_kv (kv_heads, tokens, K || V), mask true where hidden: (rows, heads * dim)."""
    rows, heads, dim = query.shape
    kv_heads = context_kv.shape[0]
    # The query heads of one KV head stand below each other: (kv_heads, heads / kv_heads * rows, dim).
    grouped = query.transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = (grouped @ context_kv[..., :dim].mT) / math.sqrt(dim)
    hidden = mask.repeat(heads // kv_heads, 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (weights @ context_kv[..., dim:]).view(heads, rows, dim).transpose(0, 1).reshape(rows, heads * dim)
