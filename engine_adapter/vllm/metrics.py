"""The connector's figures in vLLM's own statistics and on its `/metrics`: counts by name, summed over ranks."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from engine_adapter.counts import BY_REASON, NAMES


class PoolStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> PoolStats:
        """Add another rank's or another interval's counts."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """True if there is nothing to tell."""
        return not any(self.data.values())


class PoolMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvstore_*`: a counter for each of NAMES, and misses and errors with the label `reason`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._plain = {
            name: self._counter_cls(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            for name, text in NAMES.items()
        }
        self._by_reason = {
            prefix: self._counter_cls(
                name=f"vllm:kvstore_{name}", documentation=text, labelnames=[*labelnames, "reason"]
            )
            for prefix, (name, text) in BY_REASON.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in self._plain:
                self._plain[name].labels(*labels).inc(count)
                continue
            for prefix, counter in self._by_reason.items():
                if name.startswith(prefix):
                    counter.labels(*labels, name.removeprefix(prefix)).inc(count)
