"""The descriptors of one read as arrays, checked: what every transport builds its own form from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.transport import SLOT_UNIT_BYTES, ReadDescriptor

SLOT_DTYPE = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class ReadTable:
    """Parallel columns, one entry a descriptor: `offsets` and `lengths` (bytes of the arena), `places` (bytes of
    staging). Every slot is asked for once: `slots` are unique, `word_indices[i]` is the place of descriptor i's word.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    slots: npt.NDArray[np.uint32]
    word_indices: npt.NDArray[np.intp]
    payload_bytes: int

    @classmethod
    def of(cls, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8]) -> ReadTable:
        """Raises InvalidRequest for places that are not in `staging` and for numbers that no arena can have."""
        if staging.dtype != np.uint8 or staging.ndim != 1 or not staging.flags.carray:
            raise InvalidRequest("staging must be a writable, contiguous, one-dimensional uint8 array")
        rows = [(d.slot, d.offset, d.length, d.staging_offset) for d in descriptors]
        try:
            table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        except OverflowError as exc:
            raise InvalidRequest("a descriptor holds a number above 2**63") from exc
        slot, offset, length, place = table.T
        inside = (place >= 0) & (length > 0) & (place <= len(staging) - length)
        if not (inside & (offset >= 0) & (slot >= 0) & (slot < 1 << 32)).all():
            raise InvalidRequest(f"a descriptor is empty, negative or not inside staging of {len(staging)} bytes")
        slots, word_indices = np.unique(slot.astype(SLOT_DTYPE), return_inverse=True)
        return cls(offset, length, place, slots, word_indices, int(length.sum()))

    def outside(self, arena_bytes: int) -> bool:
        """True if a range or slot does not lie in an arena of this size; in an order in which nothing wraps around."""
        if not len(self.lengths):
            return False
        beyond = (self.lengths > arena_bytes).any() or (self.offsets > arena_bytes - self.lengths).any()
        return bool(beyond) or int(self.slots.max()) * SLOT_UNIT_BYTES >= arena_bytes
