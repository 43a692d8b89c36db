"""What a client counts: hits in tokens by place, misses by reason, bytes by path. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter

from kvstore.model.values import MissReason


class Counters:
    """Parts add up: hit tokens local + remote + miss tokens = tokens asked for, and so do hit tokens dram + ssd + miss
    tokens. The tier is the one on which the node had them when they were asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def read(
        self, *, local_tokens: int, remote_tokens: int, ssd_tokens: int, missed_tokens: int, reason: MissReason | None
    ) -> None:
        """One read ended."""
        with self._lock:
            self._counts["reads"] += 1
            self._counts["asked_tokens"] += local_tokens + remote_tokens + missed_tokens
            self._counts["hit_tokens_dram"] += local_tokens + remote_tokens - ssd_tokens
            self._counts["hit_tokens_local"] += local_tokens
            self._counts["hit_tokens_remote"] += remote_tokens
            self._counts["hit_tokens_ssd"] += ssd_tokens
            if reason is not None:
                self._counts[f"miss_tokens_{reason.value}"] += missed_tokens
                self._counts[f"misses_{reason.value}"] += 1

    def add(self, name: str, count: int = 1) -> None:
        """Count something else."""
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(sorted(self._counts.items()))
