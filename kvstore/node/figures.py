"""Figures of the tiers and the cleaner, for Stats and metrics. Each is at hand: nothing here walks through chunks."""

from __future__ import annotations

from kvstore.node.pool import Pool
from kvstore.node.tier import Tier


def tier_figures(pool: Pool) -> dict[str, int]:
    """`dram_…`, `ssd_…` (all 0 without an SSD, or after it failed) and `cleaner_…`."""
    ssd_used = pool.ssd.allocator.used_count - pool.ssd.slot_count if pool.ssd is not None else 0
    return {
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
