"""An engine's paged KV tensors, for stores that copy out of and into them: one tensor a layer, blocks in any order.

Half of the blocks, at random places, are the source, the others the destination. Needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from drive import POISON, SEED


class Paged:
    """`chunks` x `blocks_per_chunk` source blocks and as many destination blocks in `tensors` along `axis`."""

    def __init__(self, tensors: Sequence[torch.Tensor], axis: int, blocks_per_chunk: int) -> None:
        torch.set_num_threads(1)
        self._axis = axis
        # Bytes, because random bits are no numbers: NaN is not equal to itself.
        self._tensors = [tensor.view(torch.uint8) for tensor in tensors]
        rng = np.random.default_rng(SEED)
        for tensor in self._tensors:
            tensor.copy_(torch.from_numpy(rng.integers(0, 256, tuple(tensor.shape), dtype=np.uint8)))
        places = rng.permutation(tensors[0].shape[axis]).reshape(2, -1, blocks_per_chunk)
        self.source, self.target = places[0].tolist(), places[1].tolist()
        self._blocks = [tensor.movedim(axis, 0).numpy() for tensor in self._tensors]
        self._out, self._back = (torch.from_numpy(half.reshape(-1)) for half in places)

    def poison(self) -> None:
        """Fill the destination blocks."""
        for tensor in self._tensors:
            tensor.index_fill_(self._axis, self._back, POISON)

    def check(self) -> bool:
        """Compare all bytes."""
        return all(
            torch.equal(tensor.index_select(self._axis, self._out), tensor.index_select(self._axis, self._back))
            for tensor in self._tensors
        )

    def copy(self) -> None:
        """Block by block and layer by layer."""
        for blocks in self._blocks:
            for out, back in zip(self._out.tolist(), self._back.tolist(), strict=True):
                blocks[back][...] = blocks[out]
