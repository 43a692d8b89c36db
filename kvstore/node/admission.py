"""Which chunks are worth a place on the SSD: all, or those that were used a second time. Pure.

Writing everything down wears the disk for prompts that nobody sends again. `second_touch` writes a chunk when it was
used again while it was in DRAM, or was stored again after it had to leave it unsaved: a ghost list remembers the last
million of those keys.
"""

from __future__ import annotations

from typing import Final

from kvstore.errors import ConfigurationError
from kvstore.node.chunks import Chunk
from kvstore.node.eviction.ghosts import GhostList

ADMISSIONS: Final = ("always", "second_touch")
GHOSTS: Final = 1 << 20


class Admission:
    """The rule of that name; raises ConfigurationError naming the known ones."""

    def __init__(self, name: str = "always") -> None:
        if name not in ADMISSIONS:
            raise ConfigurationError(f"unknown ssd_admission {name!r}; known: {', '.join(ADMISSIONS)}")
        self._always = name == "always"
        self._ghosts = GhostList(GHOSTS)

    def came(self, chunk: Chunk) -> None:
        """The chunk was stored in DRAM. One that had to leave has been used before."""
        if not self._always and self._ghosts.take(chunk.key):
            chunk.uses += 1

    def wants(self, chunk: Chunk) -> bool:
        """True if the chunk is to be saved now."""
        return self._always or chunk.uses > 1

    def left(self, chunk: Chunk) -> None:
        """The chunk left DRAM without having been saved."""
        if not self._always:
            self._ghosts.add(chunk.key)
