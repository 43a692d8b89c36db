"""What the benches of device copies share: the device asked for, an engine's KV on it, and its name in the results."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import kvstore
from engine_adapter.device_copy import DeviceCopier, DevicePagedKv
from engine_adapter.movers import Blocks

LAYERS, HEADS, PAGES, TOKENS, HEAD_DIM = 32, 8, 4, 16, 128
LAYOUT = kvstore.PageLayout(LAYERS, HEADS, HEAD_DIM, kvstore.Dtype.BF16, TOKENS, PAGES)
"""Head pages of 8 KiB, chunks of 8 MiB."""
NO_DEVICE = 3
"""Exit status where the device is not there."""


def parsed(description: str | None, *, chunks: int) -> argparse.Namespace:
    """`device` (a torch.device that is there) and `chunks`; ends the bench with status 3 where there is no CUDA."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cuda", 0), help="cuda:N, or cpu for a trial"
    )
    parser.add_argument("--chunks", type=int, default=chunks, help="of 8 MiB")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no CUDA device here. On a machine that has one, install torch for CUDA; "
            "`--device cpu` runs the same code on the CPU, for a trial of the bench itself",
            file=sys.stderr,
        )
        raise SystemExit(NO_DEVICE)
    return given


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def facts(device: torch.device) -> dict[str, Any]:
    """For each result: which device, which torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": version("torch"), "head_page_bytes": LAYOUT.head_page_bytes}


class EngineKv:
    """KV tensors of an engine with room for `chunks`, whose blocks lie at random places."""

    def __init__(self, device: torch.device, chunks: int, seed: int) -> None:
        shape = chunks * PAGES, HEADS, TOKENS, 2 * HEAD_DIM
        self.tensors = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
        self.blocks = Blocks.of(self.tensors)
        self.block_ids = np.random.default_rng(seed).permutation(chunks * PAGES).reshape(chunks, PAGES)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        for number, tensor in enumerate(self.tensors):
            generator = torch.Generator(tensor.device).manual_seed(seed * LAYERS + number)
            tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)

    def kv(self, copier: DeviceCopier) -> DevicePagedKv:
        """All its chunks."""
        return DevicePagedKv(self.blocks, PAGES, self.block_ids.tolist(), copier=copier)

    def holds_what(self, other: EngineKv) -> bool:
        """True if chunk i is the same in both, for all i."""
        mine, theirs = (torch.from_numpy(each.block_ids.ravel()).to(self.blocks.device) for each in (self, other))
        # As integers: NaN is not equal to itself.
        pairs = zip(self.blocks.layers, other.blocks.layers, strict=True)
        return all(torch.equal(a[mine], b[theirs]) for a, b in pairs)
