"""Whom a transport reads in tests, and what a read asks for and should bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.values import NodeInfo
from kvstore.transport import SLOT_UNIT_BYTES, ReadDescriptor

EPOCH = 11
ARENA_BYTES = 16 << 20
POISON = 0xA5


class Owner(Protocol):
    """An owner of ARENA_BYTES under EPOCH. `arena` (uint8) and `words` (u64 a 4096-byte slot) are its live memory."""

    address: str
    """Of its tcp port."""
    control_address: str
    """Of its gRPC, where it has one."""
    arena: npt.NDArray[np.uint8]
    words: npt.NDArray[np.uint64]

    def after_payload(self, callback: Callable[[], None]) -> None:
        """Have the owner call back when it has sent a payload, before it can see the fence (own process only)."""

    def pause(self) -> None:
        """Stop the owner's process; returns when it stands still."""

    def resume(self) -> None:
        """Let it run again."""

    def kill(self) -> None:
        """End it at once."""

    def stop(self) -> None:
        """End it in order. Idempotent, also after `kill`."""


def at(address: str, epoch: int = EPOCH, control_address: str = "") -> NodeInfo:
    """A node as the transports see it."""
    return NodeInfo(f"node-{address}", epoch, "host", control_address, address)


def poisoned(length_bytes: int) -> npt.NDArray[np.uint8]:
    return np.full(length_bytes, POISON, dtype=np.uint8)


def descriptor(offset: int, length: int, staging_offset: int) -> ReadDescriptor:
    return ReadDescriptor(offset // SLOT_UNIT_BYTES, offset, length, staging_offset)


def expected_staging(
    arena: npt.NDArray[np.uint8], descriptors: Sequence[ReadDescriptor], length_bytes: int
) -> npt.NDArray[np.uint8]:
    """Poison, with the descriptors' bytes where they belong."""
    result = poisoned(length_bytes)
    for one in descriptors:
        result[one.staging_offset : one.staging_offset + one.length] = arena[one.offset : one.offset + one.length]
    return result
