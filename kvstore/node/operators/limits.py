"""What a node's settings amount to: its memory in all, and the bounds that follow from it. Checked before anything is
allocated; a bound that came out as nothing would refuse every write without saying why.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigurationError
from kvstore.model.side_object import SIDE_BYTES_A_TICKET, SIDE_OBJECTS_A_TICKET
from kvstore.node import KEYS_LIMIT
from kvstore.node.arena.dram import available_bytes
from kvstore.node.catalog import BUCKET_ENTRIES, UNIT_BYTES, CatalogShape
from kvstore.node.core import SESSIONS_LIMIT, CoreSettings
from kvstore.node.holds import LEASES, LEASES_PER_SESSION, NAMED_PINS, PINNED_SHARE, TICKETS
from kvstore.node.side_objects import SIDE_BYTES, SIDE_TICKETS
from kvstore.setting_types import size_text


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one node, of which a host has one, however many ranks use it. `ssd_bytes` 0 = no SSD tier."""

    dram_bytes: int
    catalog_bytes: int
    ssd_bytes: int = 0

    @classmethod
    def of(cls, dram_bytes: int, slots: int, ssd_bytes: int = 0) -> MemoryPlan:
        """`slots`: chunks that are expected on all tiers, which the catalog has room for."""
        return cls(dram_bytes, CatalogShape.make(dram_bytes, slots).total_bytes, ssd_bytes)

    @property
    def total_bytes(self) -> int:
        """What the node takes of the host's memory."""
        return self.dram_bytes + self.catalog_bytes

    def check(self, available: int | None = None) -> None:
        """Raise ConfigurationError if there is not that much memory. `available`: bytes, None = look."""
        available = available_bytes() if available is None else available
        if self.total_bytes > available:
            what = "its catalog, also of what lies on the SSD," if self.ssd_bytes else "its catalog"
            raise ConfigurationError(
                f"[node] dram is the memory of the whole node, not of one rank: pages {_text(self.dram_bytes)} + "
                f"{what} {_text(self.catalog_bytes)} = {_text(self.total_bytes)}, but only {_text(available)} are "
                "available to this process (free memory, or the container's limit); use a smaller --dram"
            )


def effective_limits(dram_bytes: int, slots: int, room_chunks: int, core: CoreSettings) -> dict[str, int | str]:
    """Every bound that is in force, by name; `none` where a setting of 0 means that there is none.

    Raises ConfigurationError where one came out too small for a single slot.
    """
    limits: dict[str, int | str] = {
        "pinned_bytes": int(dram_bytes * PINNED_SHARE),
        "session_bytes": int(dram_bytes * core.session_share),
    }
    for name, value in limits.items():
        if int(value) < UNIT_BYTES:
            raise ConfigurationError(
                f"[node] dram {dram_bytes}: the limit {name}, a part of it, comes out as {value} bytes, less than one "
                f"slot; use at least {int(UNIT_BYTES / PINNED_SHARE)}"
            )
    return limits | {
        "catalog_entries": CatalogShape.make(dram_bytes, slots).buckets * BUCKET_ENTRIES,
        "room_chunks": room_chunks or "none",
        "sessions": SESSIONS_LIMIT,
        "leases": LEASES,
        "leases_a_session": LEASES_PER_SESSION,
        "tickets": TICKETS,
        "pins": NAMED_PINS,
        "keys_a_call": KEYS_LIMIT,
        "side_objects_a_ticket": SIDE_OBJECTS_A_TICKET,
        "side_bytes_a_ticket": SIDE_BYTES_A_TICKET,
        "side_bytes": SIDE_BYTES,
        "side_tickets": SIDE_TICKETS,
    }


def _text(size_bytes: int) -> str:
    """Exact where it is a round size, otherwise in MiB, rounded up."""
    return size_text(size_bytes) if size_bytes % (1 << 20) == 0 else f"{-(-size_bytes // (1 << 20))}MiB"
