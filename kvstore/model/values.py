"""Small values that cross the seams of the project: outcomes, reasons, what a node is."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Tier(enum.IntEnum):
    """Where bytes lie. The number is stored in catalog entries and events."""

    DRAM = 1
    SSD = 2
    GPU = 3
    ENGINE_HBM = 4


class MissReason(enum.StrEnum):
    """Why a chunk, or a side object, was not delivered. Every miss has exactly one reason and is counted under it."""

    ABSENT = "absent"
    """No node that was asked holds it."""
    NOT_COVERED = "not_covered"
    """Some shards are there, but not all that the wanted rectangle needs."""
    IN_PROGRESS = "in_progress"
    """A writer has reserved it and did not commit in time."""
    FENCE = "fence"
    """Its slot was reused during the read, also after retries."""
    EXPIRED = "expired"
    """The lease or ticket had ended."""
    CHECKSUM = "checksum"
    """The bytes differ from what the writer stored."""
    COLLISION = "collision"
    """Same key, other tokens or other parent."""
    DEADLINE = "deadline"
    """The deadline passed first."""
    STAGING_FULL = "staging_full"
    """No staging slot became free before the deadline."""
    UNREACHABLE = "unreachable"
    """The node that has it did not answer."""
    SESSION_LOST = "session_lost"
    """The node's session ended during the read."""
    TIER_FAILED = "tier_failed"
    """It was on a tier that is out of service."""
    PARENT_MISS = "parent_miss"
    """A chunk before it was a miss; later chunks are of no use."""
    CHUNK_MISSING = "chunk_missing"
    """Of side objects: a chunk that they belong to was removed, evicted or never came."""
    DROPPED = "dropped"
    """Of side objects: their writer gave the handoff up."""


class Outcome(enum.IntEnum):
    """Answer of Reserve and Commit for one key."""

    GRANTED = 1
    """A slot is reserved for the caller."""
    PRESENT = 2
    """Committed shards already cover the asked rectangle."""
    IN_PROGRESS = 3
    """Another writer has it reserved; keep the source until your own Commit."""
    COMMITTED = 4
    """Only from Commit: your bytes are visible."""
    LEFT_TO_OTHERS = 5
    """The caller did not want it, and nobody has stored it yet."""
    REFUSED_FULL = 16
    """No slot could be freed (everything is leased, pinned or reserved)."""
    REFUSED_CATALOG_FULL = 17
    """Both catalog buckets are full."""
    REFUSED_PARENT_MISSING = 18
    """The chunk before it is neither stored nor granted."""
    REFUSED_SESSION_LIMIT = 19
    """Reserved plus quarantined bytes of the session would pass its bound."""
    REFUSED_STALE = 20
    """Only from Commit: the reservation had ended."""
    REFUSED_COLLISION = 21
    """The key is stored for other tokens or another parent."""
    REFUSED_QUOTA = 22
    """The namespace has as many bytes as it may have, and all of them are held."""
    REFUSED_DRAINING = 23
    """The node is being emptied and takes nothing new."""

    @property
    def refused(self) -> bool:
        """True for every REFUSED outcome."""
        return self >= Outcome.REFUSED_FULL


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself; `epoch` is new at every start."""

    node_id: str
    epoch: int
    host_id: str
    control_address: str
    """gRPC, host:port."""
    data_address: str
    """tcp transport, host:port."""
    socket_path: str = ""
    """Unix socket of the session hand-shake, empty where there is none."""
