"""Prefix hits of a trace without a pool: one node of so many blocks, the live nodes' own eviction policies.

Counted as the published figures are: contiguous hits from the head of each prompt over all blocks; a request's
blocks are touched from tail to head; room is made after each request. Only leaves leave, as on a node. Calls of a
policy follow the live node: hits are touched, what was missing is added, then the whole prompt is put in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.analytics.offline_tiers import SimulatedNode
from kvstore.analytics.trace import Request


@dataclass(slots=True)
class HitCounts:
    """What a replay counts, live or simulated. Tokens are prompt tokens; the last block may be partial.

    `hit_blocks` are those of both tiers, `ssd_hit_blocks` of them were on the SSD only. `evictions` are blocks that
    left the node, `lost_blocks` of them went from DRAM without ever having reached the SSD, or having left it.
    """

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    ssd_hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    lost_blocks: int = 0
    ssd_blocks_written: int = 0

    def add(self, request: Request, hit_blocks: int, ssd_hit_blocks: int = 0) -> None:
        """Count one request of which the first `hit_blocks` blocks were found, some of them on the SSD."""
        self.requests += 1
        self.blocks += len(request.hash_ids)
        self.hit_blocks += hit_blocks
        self.ssd_hit_blocks += ssd_hit_blocks
        self.tokens += request.input_length
        self.hit_tokens += request.tokens_of_first(hit_blocks)

    @property
    def dram_hit_blocks(self) -> int:
        """Hit blocks that were in DRAM."""
        return self.hit_blocks - self.ssd_hit_blocks

    @property
    def block_ratio(self) -> float:
        """Hit blocks over all blocks; 0 for an empty trace."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_ratio(self) -> float:
        """Hit tokens over all prompt tokens; 0 for an empty trace."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def simulate(
    requests: Iterable[Request],
    *,
    capacity_blocks: int | None = None,
    ssd_blocks: int | None = None,
    policy: str = "lru",
    admission: str = "always",
) -> HitCounts:
    """Run a trace through one node of `capacity_blocks` blocks of DRAM (None: room for everything).

    `ssd_blocks`: room of an SSD behind it (None: there is none), to which `admission` lets everything ("always") or
    only what was used twice ("second_touch").
    Raises ConfigurationError or InvalidRequest naming what is wrong.
    """
    node = SimulatedNode(policy, capacity_blocks, ssd_blocks, admission)
    counts = HitCounts()
    for request in requests:
        keys = [block_id.to_bytes(8, "little") for block_id in request.hash_ids]
        found = node.serve(keys, request.block_tokens)
        counts.add(request, found.blocks, found.ssd_blocks)
    counts.evictions = node.evictions
    counts.lost_blocks = node.lost_blocks
    counts.ssd_blocks_written = node.ssd_blocks_written
    return counts
