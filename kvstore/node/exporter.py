"""Carries a node's own figures over into the Prometheus instruments, a few times a second.

The core counts in plain integers, without knowing of Prometheus; the difference since the last look is added.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore import metrics


class Exporter:
    """One node's figures as last exported."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def export(self, figures: Mapping[str, int], loop_lag_ms: float, sent_bytes: int) -> None:
        """`figures`: `NodeCore.stats()`. `sent_bytes`: payload bytes that left by tcp so far."""
        metrics.RESERVED_BYTES.set(figures["reserved_bytes"])
        metrics.QUARANTINED_BYTES.set(figures["quarantined_bytes"])
        metrics.CATALOG_ENTRIES.set(figures["catalog_entries"])
        metrics.LOOP_LAG_SECONDS.set(loop_lag_ms / 1000)
        metrics.EVICTED_CHUNKS.inc(self._more("evictions", figures["evictions"]))
        metrics.PATH_BYTES.labels("tcp").inc(self._more("sent_bytes", sent_bytes))
        for name, value in figures.items():
            if name.startswith("reserve_"):
                metrics.OUTCOMES.labels(name.removeprefix("reserve_")).inc(self._more(name, value))
            elif name.startswith("acquire_miss_"):
                metrics.MISSES.labels(name.removeprefix("acquire_miss_")).inc(self._more(name, value))
        metrics.HIT_TOKENS.labels("dram").inc(self._more("acquired_tokens", figures.get("acquired_tokens", 0)))

    def _more(self, name: str, value: int) -> int:
        """How much a count has grown since the last look."""
        more, self._last[name] = value - self._last.get(name, 0), value
        return more
