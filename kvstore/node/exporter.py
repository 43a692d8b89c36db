"""Carries a node's own figures over into the Prometheus instruments, ten times a second.

The node counts in plain integers and tallies, without knowing of Prometheus; the difference since the last look is
added. What a tick costs depends on the number of figures and of namespaces read from since, not on the contents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge

from kvstore import metrics
from kvstore.node.arena.ssd_io import WAYS
from kvstore.node.chunks import KnownNamespace
from kvstore.node.pool import Pool
from kvstore.tally import Tally

_GAUGES: Final[dict[str, Gauge]] = {
    "reserved_bytes": metrics.RESERVED_BYTES,
    "quarantined_bytes": metrics.QUARANTINED_BYTES,
    "catalog_entries": metrics.CATALOG_ENTRIES,
    "sessions": metrics.SESSIONS,
    "leases": metrics.LEASES,
    "tickets": metrics.TICKETS,
    "pins": metrics.PINS,
    "pinned_bytes": metrics.PINNED_BYTES,
    "side_bytes": metrics.SIDE_BYTES,
    "events_waiting": metrics.EVENTS_WAITING,
    "draining": metrics.DRAINING,
    "cleaner_waiting_chunks": metrics.CLEANER_WAITING_CHUNKS,
    "cleaner_unsaved_bytes": metrics.CLEANER_UNSAVED_BYTES,
    "ssd_state": metrics.SSD_STATE,
    **{f"data_path_{path}": metrics.DATA_PATH.labels(path) for path in ("tcp", "nixl")},
    "data_path_degraded_nixl": metrics.DATA_PATH_DEGRADED.labels("nixl"),
    **{f"ssd_io_{way}": metrics.SSD_IO.labels(way) for way in WAYS},
    "dram_free_slots": metrics.SLOTS.labels("dram", "free"),
    "dram_committed_slots": metrics.SLOTS.labels("dram", "committed"),
    "reserved_slots": metrics.SLOTS.labels("dram", "reserved"),
    "quarantined_slots": metrics.SLOTS.labels("dram", "quarantined"),
    "reading_slots": metrics.SLOTS.labels("dram", "reading"),
    "ssd_free_slots": metrics.SLOTS.labels("ssd", "free"),
    "ssd_committed_slots": metrics.SLOTS.labels("ssd", "committed"),
    "ssd_removed_slots": metrics.SLOTS.labels("ssd", "removed"),
    "ssd_other_slots": metrics.SLOTS.labels("ssd", "other"),
    **{f"{tier}_chunks": metrics.TIER_CHUNKS.labels(tier) for tier in ("dram", "ssd")},
    **{f"{tier}_used_bytes": metrics.TIER_USED_BYTES.labels(tier) for tier in ("dram", "ssd")},
    **{f"{tier}_limit_bytes": metrics.TIER_LIMIT_BYTES.labels(tier) for tier in ("dram", "ssd")},
}
_COUNTERS: Final[dict[str, PromCounter]] = {
    "quarantined": metrics.QUARANTINED_SLOTS,
    "dram_evictions": metrics.EVICTED_CHUNKS.labels("dram"),
    "ssd_evictions": metrics.EVICTED_CHUNKS.labels("ssd"),
    "demotions": metrics.DEMOTED_CHUNKS,
    "promotions": metrics.PROMOTED_SHARDS,
    "saves": metrics.SAVED_SHARDS,
    "evicted_unsaved": metrics.LOST_UNSAVED_CHUNKS,
    "tcp_payload_bytes_sent": metrics.PATH_BYTES.labels("tcp"),
    "nixl_restarts": metrics.NIXL_RESTARTS,
    "pulled_bytes_tcp": metrics.PATH_BYTES.labels("pulled_tcp"),
    "pulled_bytes_nixl": metrics.PATH_BYTES.labels("pulled_nixl"),
    "ssd_read_bytes": metrics.PATH_BYTES.labels("ssd_read"),
    "ssd_write_bytes": metrics.PATH_BYTES.labels("ssd_write"),
    "put_bytes": metrics.PATH_BYTES.labels("grpc_put"),
    "get_bytes": metrics.PATH_BYTES.labels("grpc_get"),
    "ssd_disk_full": metrics.SSD_ERRORS.labels("disk_full"),
    "ssd_no_room": metrics.SSD_ERRORS.labels("no_room"),
    "ssd_checksum_failures": metrics.CHECKSUM_FAILURES.labels("ssd"),
    "dram_checksum_failures": metrics.CHECKSUM_FAILURES.labels("dram"),
}
_FAMILIES: Final[dict[str, PromCounter]] = {
    "reserve_": metrics.OUTCOMES,
    "acquire_miss_tokens_": metrics.MISS_TOKENS,
    "acquire_miss_": metrics.MISSES,
    "side_miss_": metrics.SIDE_MISSES,
    "removed_": metrics.DEPARTED_CHUNKS,
    "ssd_errors_": metrics.SSD_ERRORS,
}
"""First part of a figure's name -> counter; the rest is the label. The first that fits counts."""


class Exporter:
    """One node's figures as last exported."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last: Counter[str] = Counter()
        self._counters: dict[str, PromCounter | None] = dict(_COUNTERS)
        self._tokens: dict[KnownNamespace, tuple[int, int, int]] = {}

    def export(self, figures: Mapping[str, float], loop_lag_s: float, tcp_seconds: Tally) -> None:
        """`figures`: of Stats. `tcp_seconds`: of the reads that were sent since the last call."""
        for name, value in figures.items():
            gauge = _GAUGES.get(name)
            if gauge is not None:
                gauge.set(value)
            elif value and (counter := self._counter(name)) is not None:
                counter.inc(value - self._last[name])
                self._last[name] = int(value)
        metrics.LOOP_LAG_SECONDS.set(loop_lag_s)
        metrics.LOOP_DELAY_SECONDS.observe(loop_lag_s)
        metrics.TRANSFER_SECONDS.add("tcp", tcp_seconds)
        for path, seconds in self._pool.seconds.items():
            metrics.TRANSFER_SECONDS.add(path, seconds.drain())
        for tier in self._pool.tiers:
            metrics.EVICTION_AGE_SECONDS.add(tier.name.name.lower(), tier.ages.drain())
        while self._pool.used_spaces:
            self._export_tokens(self._pool.used_spaces.pop())

    def _counter(self, name: str) -> PromCounter | None:
        """The counter behind a figure, None if it has none."""
        if name not in self._counters:
            prefix = next((each for each in _FAMILIES if name.startswith(each)), None)
            self._counters[name] = None if prefix is None else _FAMILIES[prefix].labels(name.removeprefix(prefix))
        return self._counters[name]

    def _export_tokens(self, space: KnownNamespace) -> None:
        label = metrics.namespace_label(space.namespace.title)
        now = space.dram_hit_tokens, space.ssd_hit_tokens, space.touched_tokens
        more = [value - before for value, before in zip(now, self._tokens.get(space, (0, 0, 0)), strict=True)]
        self._tokens[space] = now
        metrics.HIT_TOKENS.labels("dram", label).inc(more[0])
        metrics.HIT_TOKENS.labels("ssd", label).inc(more[1])
        metrics.TOUCHED_TOKENS.labels(label).inc(more[2])
