"""Side objects: small named tensors of a handoff that are no KV pages. Pure values.

The hidden state or the logits of the last token, a few KB of a draft model: what a decode worker needs once, beside
the chunks. They belong to a ticket and live no longer. The node that keeps them knows them as bytes with a
description; the writer's checksum covers both and the ticket, so that a reader notices whatever went wrong on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequest, LayoutMismatch, LimitExceeded
from kvstore.model.layout import Rectangle

SIDE_OBJECTS_A_TICKET: Final = 16
SIDE_BYTES_A_TICKET: Final = 16 << 20
NAME_LIMIT_BYTES: Final = 64
DTYPE_LIMIT_BYTES: Final = 32
DIMENSIONS_LIMIT: Final = 8

_NUMPY_KINDS: Final = frozenset("biufc")


@dataclass(frozen=True, slots=True)
class NeededChunks:
    """The prefix that ends with `last_key`, one rectangle of it: without it side objects are of no use."""

    namespace_id: bytes
    last_key: bytes
    rectangle: Rectangle

    def __post_init__(self) -> None:
        if len(self.namespace_id) != 16 or len(self.last_key) != 16:
            raise InvalidRequest("namespace_id and last_key of side objects have 16 bytes")


@dataclass(frozen=True, slots=True)
class SideObject:
    """A named tensor: `data` holds its elements in row-major order, little-endian, without gaps.

    `dtype` is a name that numpy or torch uses (`float32`, `bfloat16`). `checksum`: see `checksum_of`. Raises
    InvalidRequest or LimitExceeded where name, dtype, shape and bytes cannot be right.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    checksum: int

    def __post_init__(self) -> None:
        _check_text("name", self.name, NAME_LIMIT_BYTES)
        _check_text("dtype", self.dtype, DTYPE_LIMIT_BYTES)
        if len(self.shape) > DIMENSIONS_LIMIT:
            raise LimitExceeded(
                f"side object {self.name!r} has {len(self.shape)} dimensions; the limit is {DIMENSIONS_LIMIT}"
            )
        if len(self.data) > SIDE_BYTES_A_TICKET:
            raise LimitExceeded(
                f"side object {self.name!r} has {len(self.data)} bytes; the limit is {SIDE_BYTES_A_TICKET} a ticket"
            )
        if any(size < 0 for size in self.shape):
            raise InvalidRequest(f"side object {self.name!r} has a negative size in its shape {self.shape}")
        elements, size_bytes = math.prod(self.shape), len(self.data)
        if bool(elements) != bool(size_bytes) or (elements and size_bytes % elements):
            raise InvalidRequest(f"side object {self.name!r}: {size_bytes} bytes cannot be a tensor {self.shape}")

    @classmethod
    def made_for(cls, ticket_id: bytes, name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> SideObject:
        """The object with its checksum, for this ticket only."""
        return cls(name, dtype, shape, data, checksum_of(ticket_id, name, dtype, shape, data))

    def holds_for(self, ticket_id: bytes) -> bool:
        """True if ticket, description and bytes are those of which the writer took the checksum."""
        return checksum_of(ticket_id, self.name, self.dtype, self.shape, self.data) == self.checksum

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """The bytes, read-only, one-dimensional: for dtypes that numpy does not have."""
        return np.frombuffer(self.data, dtype=np.uint8)

    def as_numpy(self) -> npt.NDArray[Any]:
        """A new array of this shape; bfloat16 comes as float32, which has all its values.

        Raises LayoutMismatch for other dtypes that numpy does not have (take `raw`), and where the bytes do not fit.
        """
        if self.dtype == "bfloat16":
            stored = self._elements(np.dtype("<u2"))
            return (stored.astype("<u4") << 16).view("<f4").reshape(self.shape)
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as exc:
            raise LayoutMismatch(f"numpy has no type {self.dtype}; take the bytes of {self.name!r} by .raw") from exc
        if dtype.kind not in _NUMPY_KINDS:
            raise LayoutMismatch(f"{self.dtype} is no type of numbers; take the bytes of {self.name!r} by .raw")
        return self._elements(dtype.newbyteorder("<")).reshape(self.shape).copy()

    def _elements(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if len(self.data) != math.prod(self.shape) * dtype.itemsize:
            raise LayoutMismatch(f"{len(self.data)} bytes of {self.name!r} are not {self.shape} of {self.dtype}")
        return np.frombuffer(self.data, dtype=dtype)


def checksum_of(ticket_id: bytes, name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> int:
    """xxh3-64, seed 0, of the ticket id, then `name`, `dtype`, `shape` (sizes joined by "x") with a newline each
    (ASCII), then the bytes."""
    digest = xxhash.xxh3_64(ticket_id)
    digest.update(f"{name}\n{dtype}\n{'x'.join(map(str, shape))}\n".encode())
    digest.update(data)
    return digest.intdigest()


def _check_text(what: str, value: str, limit_bytes: int) -> None:
    if not value or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"the {what} of a side object is printable ASCII, not {value!r}")
    if len(value) > limit_bytes:
        raise LimitExceeded(f"the {what} of a side object has {len(value)} bytes; the limit is {limit_bytes}")
