"""An engine's KV tensors seen as the pool sees pages: views (blocks, heads, *head page), whatever the engine's order.

Stored bytes are always HND: head outermost, inside it what the namespace's `interior` names. Engines keep other
orders. Permuting a tensor costs nothing, so each form is brought into stored order by a strided view, without a
copy; moving bytes is `copy`'s business. Nothing here asks where the tensors lie: CPU and device are the same.

    engine, one layer                                     stored head page
    [block][head][token][K||V]         HND, joined        kv_per_token   [token][K||V]
    [block][token][head][K||V]         NHD, joined        k_then_v       [K,V][token][dim]
    [2][block][head or token]..[dim]   outermost          MLA            [token][latent]
    [block][2][head or token]..[dim]   in the block
    (K, V), each [block]..[dim]        pair
    [block][token][latent]             MLA

The order is that of the tensor's dimensions. Some engines permute a tensor that lies in another order in memory:
what counts is what the dimensions mean, and the strides do the rest.

An engine's own block may hold more or fewer tokens than a stored page. Where tokens are outermost in the head page,
pages of both sizes are the same bytes end to end, and the pool's chunk is re-tiled: so for `kv_per_token`, and for
an MLA namespace, whose interior has that name and one latent in the place of K||V. In any other interior the page
size is part of the order of bytes, and another size is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

from kvstore.errors import LayoutMismatch
from kvstore.model.layout import Attention, PageLayout

Layer = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The KV of one layer: a tensor, or K and V."""


class Order(enum.StrEnum):
    """Which of a block's dimensions comes first: its KV heads or its tokens."""

    HND = "hnd"
    NHD = "nhd"


class Vectors(enum.StrEnum):
    """Where an engine tells K from V. Means nothing for MLA, which has one latent.

    JOINED: in the last dimension, K||V, or in one of two before it.
    """

    JOINED = "joined"
    OUTERMOST = "outermost"
    IN_BLOCK = "in_block"
    PAIR = "pair"


_DIMENSIONS = {
    Vectors.JOINED: ("bhtvd", "bthvd"),
    Vectors.OUTERMOST: ("vbhtd", "vbthd"),
    Vectors.IN_BLOCK: ("bvhtd", "bvthd"),
    Vectors.PAIR: ("bhtd", "bthd"),
}
"""block, head, token, vector (K or V), dim: in HND and in NHD."""

_STORED = {"kv_per_token": "bhtvd", "k_then_v": "bhvtd"}


@dataclass(frozen=True, slots=True)
class HeadPages:
    """The head pages of an engine's blocks, layer by layer, as strided views of its tensors. Holds references.

    `layers[i]` is one view (blocks, heads, *dims) whose dims in C order are the stored head page; or two, of K and of
    V, where these lie in memory of their own: then dims lack the dimension `vector_axis` of the stored head page, in
    which view j is place j. One block is `units_per_block` units and one stored page `units_per_page`, a unit being
    the largest run of tokens that divides both; where they differ, dims begin with the tokens of a block.
    """

    layers: tuple[tuple[torch.Tensor, ...], ...]
    pages_per_chunk: int
    vector_axis: int = 0
    units_per_block: int = 1
    units_per_page: int = 1

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of the engine that one chunk fills."""
        return self.pages_per_chunk * self.units_per_page // self.units_per_block

    @property
    def head_page_bytes(self) -> int:
        """Bytes of one stored head page."""
        elements = sum(view[0, 0].numel() for view in self.layers[0])
        return elements // self.units_per_block * self.units_per_page * self.layers[0][0].element_size()

    @classmethod
    def opaque(cls, tensors: Sequence[torch.Tensor], pages_per_chunk: int) -> HeadPages:
        """Tensors (blocks, heads, ...) whose inside is stored as it is: an engine's private packing."""
        return cls(tuple((tensor,) for tensor in tensors), pages_per_chunk)


def head_pages(layout: PageLayout, layers: Sequence[Layer], order: Order, vectors: Vectors) -> HeadPages:
    """The engine's `layers` in the stored order of `layout`. A rank's tensors may have fewer heads and layers.

    LayoutMismatch where the dimensions are not those of the form, where head_dim or the elements' size differ, where
    the namespace stores more than K and V or has an interior unknown here, and where blocks of another size than the
    stored pages cannot be re-tiled.
    """
    stored = _stored_order(layout)
    mla = layout.attention is Attention.MLA
    dimensions = "btd" if mla else _DIMENSIONS[vectors][order is Order.NHD]
    count = 2 if vectors is Vectors.PAIR and not mla else 1
    views, block_tokens = [], set()
    for layer in layers:
        tensors = layer if isinstance(layer, tuple) else (layer,)
        if len(tensors) != count:
            raise LayoutMismatch(f"a layer of KV kept as {vectors} is {count} tensor(s), not {len(tensors)}")
        named = [_named(layout, tensor, dimensions, vectors) for tensor in tensors]
        block_tokens |= {tensor.shape[dimensions.index("t")] for tensor in named}
        views.append(tuple(_permuted(tensor, dimensions, stored) for tensor in named))
    if len(block_tokens) != 1:
        raise LayoutMismatch(f"all layers have blocks of one size, not of {sorted(block_tokens)} tokens")
    tokens = block_tokens.pop()
    unit_tokens = _unit_tokens(layout, tokens)
    return HeadPages(
        tuple(views),
        layout.pages_per_chunk,
        max(0, stored.find("v") - 2),
        tokens // unit_tokens,
        layout.page_tokens // unit_tokens,
    )


def _stored_order(layout: PageLayout) -> str:
    """Dimensions of (blocks, heads, *stored head page)."""
    if layout.side_components:
        names = ", ".join(component.name for component in layout.side_components)
        raise LayoutMismatch(f"KV tensors hold K and V only, but the namespace also stores {names}")
    if layout.interior not in _STORED:
        raise LayoutMismatch(
            f"the interior {layout.interior!r} is an engine's own packing: only tensors that hold it as it is fit"
        )
    return "bhtd" if layout.attention is Attention.MLA else _STORED[layout.interior]


def _named(layout: PageLayout, tensor: torch.Tensor, dimensions: str, vectors: Vectors) -> torch.Tensor:
    """The tensor with one dimension for each letter of `dimensions`, checked against the layout."""
    sizes = {"v": 2, "d": layout.head_dim}
    shape = tuple(tensor.shape)
    if vectors is Vectors.JOINED and "v" in dimensions and shape[-1:] == (2 * layout.head_dim,):
        tensor = tensor.view(*shape[:-1], 2, layout.head_dim)
    fits = tensor.dim() == len(dimensions)
    if not fits or any(sizes.get(name, size) != size for name, size in zip(dimensions, tensor.shape, strict=True)):
        raise LayoutMismatch(
            f"a tensor of shape {shape} is not [{dimensions}] with {vectors} vectors and head_dim {layout.head_dim}"
        )
    if tensor.element_size() != layout.dtype.itemsize_bytes:
        raise LayoutMismatch(f"the namespace stores {layout.dtype}, the engine's tensors are {tensor.dtype}")
    return tensor


def _permuted(tensor: torch.Tensor, dimensions: str, stored: str) -> torch.Tensor:
    if "h" not in dimensions:
        tensor, dimensions = tensor.unsqueeze(1), "bhtd"
    return tensor.permute([dimensions.index(name) for name in stored if name in dimensions])


def _unit_tokens(layout: PageLayout, block_tokens: int) -> int:
    """Tokens of the largest run that is contiguous in stored pages and in blocks of this many tokens."""
    if block_tokens == layout.page_tokens:
        return block_tokens
    sizes = f"the engine's blocks of {block_tokens} tokens and the stored pages of {layout.page_tokens} tokens"
    if layout.interior != "kv_per_token":
        raise LayoutMismatch(f"{sizes} differ, and the interior {layout.interior} cannot be re-tiled")
    if not block_tokens or layout.chunk_tokens % block_tokens:
        raise LayoutMismatch(f"{sizes} differ, and a chunk of {layout.chunk_tokens} tokens is not whole blocks")
    return gcd(block_tokens, layout.page_tokens)
