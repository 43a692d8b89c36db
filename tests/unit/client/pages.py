"""Pages for tests: derived from their key, so that a wrong page is recognised; destinations are poisoned."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.client import Cache
from kvstore.model.layout import Dtype, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys

LAYOUT = PageLayout(layers=4, kv_heads=2, head_dim=8, dtype=Dtype.FP32, page_tokens=8, pages_per_chunk=2)
"""16 tokens and 8 KiB a chunk; a slot has 12 KiB."""
MIB = PageLayout(layers=8, kv_heads=4, head_dim=64, dtype=Dtype.FP32, page_tokens=16, pages_per_chunk=4)
"""64 tokens and 1 MiB a chunk."""
LAYOUTS = {"small": LAYOUT, "mib": MIB}
POISON = 0xA5

Bytes = npt.NDArray[np.uint8]


def namespace(revision: str = "r1", layout: PageLayout = LAYOUT) -> Namespace:
    return Namespace("pages", revision, layout)


def prompt(number: int, tokens: int) -> list[int]:
    """Token ids of a prompt; equal numbers give prompts that begin alike."""
    return [number * 1_000_003 + place for place in range(tokens)]


def pages_of(keys: Keys, layout: PageLayout = LAYOUT, version: int = 0) -> Bytes:
    """The pages of these keys, (chunks, layers, pages, heads, bytes): equal for equal keys and versions."""
    made = []
    for key in keys:
        seed = [version, *np.frombuffer(key, dtype="<u4").tolist()]
        made.append(np.random.default_rng(seed).integers(0, 256, layout.shape(layout.whole), dtype=np.uint8))
    return np.array(made, dtype=np.uint8).reshape(len(keys), *layout.shape(layout.whole))


def poisoned(cache: Cache, count: int, rectangle: Rectangle | None = None) -> Bytes:
    target = cache.empty(count, rectangle)
    target[:] = POISON
    return target
