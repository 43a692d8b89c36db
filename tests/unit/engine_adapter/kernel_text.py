"""Executes the text of a Triton kernel, program by program, on plain memory: for machines without Triton or CUDA.

It knows what `engine_adapter.kernels` uses. It says whether the kernel's arithmetic is right; that Triton takes the
text, and what becomes of it on a device, only a CUDA machine can say.
"""

from __future__ import annotations

import ctypes
import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

WORD = 8


class Value(np.ndarray):
    """An int64 scalar or vector."""

    def to(self, kind: str) -> Any:
        return Pointer(self) if kind == "pointer" else self


def value(of: Any) -> Value:
    return np.asarray(of, dtype=np.int64).view(Value)


class Pointer:
    """Addresses of 8-byte words."""

    def __init__(self, addresses: Any) -> None:
        self.addresses = value(addresses)

    def __add__(self, words: Any) -> Pointer:
        return Pointer(self.addresses + value(words) * WORD)


class Language:
    """What stands for `triton.language` while one program runs."""

    int64 = "int64"
    constexpr = int

    def __init__(self) -> None:
        self.program = (0, 0, 0)

    def program_id(self, axis: int) -> Value:
        return value(self.program[axis])

    @staticmethod
    def arange(start: int, stop: int) -> Value:
        assert (stop - start).bit_count() == 1, "a range has a power of two of elements"
        return value(np.arange(start, stop))

    @staticmethod
    def pointer_type(kind: str) -> str:
        return "pointer"

    @staticmethod
    def multiple_of(hinted: Any, step: int) -> Any:
        numbers = hinted.addresses if isinstance(hinted, Pointer) else hinted
        assert not (numbers % step).any(), "a hint that is not true"
        return hinted

    @staticmethod
    def load(pointer: Pointer, mask: Any = True) -> Value:
        addresses, wanted = np.broadcast_arrays(pointer.addresses, mask)
        words = np.zeros(addresses.shape, dtype=np.int64)
        for place in _places(wanted):
            words[place] = ctypes.c_int64.from_address(int(addresses[place])).value
        return value(words)

    @staticmethod
    def store(pointer: Pointer, words: Any, mask: Any = True) -> None:
        addresses, written, wanted = np.broadcast_arrays(pointer.addresses, words, mask)
        for place in _places(wanted):
            ctypes.c_int64.from_address(int(addresses[place])).value = int(written[place])


def _places(wanted: np.ndarray) -> list[tuple[int, ...]]:
    return [place for place in np.ndindex(wanted.shape) if wanted[place]]


class TextKernel:
    """`kernel[grid](...)` as Triton has it."""

    def __init__(self, text: Callable[..., None]) -> None:
        self._language = Language()
        names = {**text.__globals__, "tl": self._language}
        self._text = types.FunctionType(text.__code__, names)
        self.launches = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(rows: torch.Tensor, dense: torch.Tensor, **sizes: int) -> None:
            assert rows.is_contiguous() and rows.dtype == dense.dtype == torch.int64
            self.launches += 1
            for self._language.program in itertools.product(*map(range, grid)):
                self._text(Pointer(rows.data_ptr()), Pointer(dense.data_ptr()), **sizes)

        return launch
