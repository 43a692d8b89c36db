"""Figures of the pool, its tiers and the cleaner, for Stats and metrics. Each is at hand: nothing walks the chunks."""

from __future__ import annotations

from kvstore.node.pool import Pool
from kvstore.node.tier import Tier


def pool_figures(pool: Pool) -> dict[str, int]:
    """What the node has and where, `dram_…`, `ssd_…` (all 0 without an SSD, or after it failed) and `cleaner_…`."""
    ssd_used = pool.ssd.allocator.used_count - pool.ssd.slot_count if pool.ssd is not None else 0
    return {
        "chunks": pool.chunk_count,
        "namespaces": len(pool.spaces),
        "arena_bytes": pool.allocator.arena_bytes,
        "open_bytes": pool.allocator.open_until,
        "used_bytes": pool.allocator.used_bytes,
        "free_bytes": pool.allocator.free_bytes,
        "largest_free_bytes": pool.allocator.largest_free_bytes,
        "catalog_entries": pool.catalog.claimed_count,
        "evictions": pool.counts["removed_evicted"],
        **_tier("dram", pool.dram),
        **_tier("ssd", pool.ssd),
        "ssd_removed_slots": len(pool.removed_slots),
        "ssd_other_slots": ssd_used - len(pool.removed_slots),
        "cleaner_waiting_chunks": len(pool.backlog.waiting),
        "cleaner_unsaved_chunks": len(pool.backlog.unsaved),
        "cleaner_unsaved_bytes": pool.backlog.unsaved_bytes,
        "cleaner_stale_slots": len(pool.stale_slots),
    }


def _tier(name: str, tier: Tier | None) -> dict[str, int]:
    slots = tier.allocator if tier is not None else None
    return {
        f"{name}_chunks": tier.chunk_count if tier is not None else 0,
        f"{name}_limit_bytes": slots.arena_bytes if slots is not None else 0,
        f"{name}_used_bytes": slots.used_bytes if slots is not None else 0,
        f"{name}_free_bytes": slots.free_bytes if slots is not None else 0,
        f"{name}_committed_slots": tier.slot_count if tier is not None else 0,
        f"{name}_free_slots": slots.free_slot_count if slots is not None else 0,
        f"{name}_evictions": tier.evicted_count if tier is not None else 0,
    }
