"""What a node did between two looks at its Stats: counters become rates, the rest is shown as it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MISS = "acquire_miss_"
_MISS_TOKENS = "acquire_miss_tokens_"
_CLEANER = "cleaner_"
_PATHS = {
    "tcp": "tcp_payload_bytes_sent",
    "grpc_put": "put_bytes",
    "grpc_get": "get_bytes",
    "ssd_read": "ssd_read_bytes",
    "ssd_write": "ssd_write_bytes",
}
_SSD = ("chunks", "used_bytes", "free_bytes", "limit_bytes")
_SSD_RATES = ("demotions", "promotions", "saves", "evicted_unsaved")
_SSD_STATES = ("in service", "full", "failed")
_GAUGES = ("chunks", "sessions", "leases", "tickets", "pins", "draining")


@dataclass(frozen=True, slots=True)
class Look:
    """One answer of Stats. `at_s`: monotonic seconds; `epoch`: of the node's start, counters begin anew with it."""

    at_s: float
    node_id: str
    epoch: int
    figures: Mapping[str, Any]

    def count(self, name: str) -> float:
        """A figure; one that is still 0 may be missing."""
        return float(self.figures.get(name, 0))


def frame(title: str, address: str, before: Look | None, now: Look | None) -> dict[str, Any]:
    """One node's row. `now` None: it does not answer. Rates are None without an earlier look at the same start."""
    if now is None:
        return {"node": before.node_id if before else title, "address": address, "state": "away"}
    is_first = before is None or before.epoch != now.epoch or now.at_s <= before.at_s
    earlier = None if is_first else before
    lost = {name.removeprefix(_MISS_TOKENS): name for name in now.figures if name.startswith(_MISS_TOKENS)}
    misses = [name for name in now.figures if name.startswith(_MISS) and not name.startswith(_MISS_TOKENS)]
    paths = {path: name for path, name in _PATHS.items() if name in now.figures or path == "tcp"}
    return {
        "node": now.node_id,
        "address": address,
        "state": "draining" if now.count("draining") else "live",
        "bytes": _bytes(now),
        **{name: int(now.count(name)) for name in _GAUGES},
        "hit_tokens_per_s": _hits(earlier, now),
        "touched_tokens_per_s": _rate("touched_tokens", earlier, now),
        "miss_tokens_per_s": _rates(lost, earlier, now),
        "misses_per_s": _rates({name.removeprefix(_MISS): name for name in misses}, earlier, now),
        "bytes_per_s": _rates(paths, earlier, now),
        "evictions_per_s": _rate("evictions", earlier, now),
        "commits_per_s": _rate("commits", earlier, now),
        "ssd": _ssd(earlier, now),
        "cleaner": {n.removeprefix(_CLEANER): v for n, v in now.figures.items() if n.startswith(_CLEANER)},
        "loop_lag_ms": now.count("loop_lag_ms"),
    }


def _bytes(look: Look) -> dict[str, int]:
    """The arena by what its bytes are doing; the first four add up to it. Pinned ones are committed too."""
    used, reserved, quarantined = (int(look.count(f"{name}_bytes")) for name in ("used", "reserved", "quarantined"))
    return {
        "committed": used - reserved - quarantined,
        "reserved": reserved,
        "quarantined": quarantined,
        "free": int(look.count("free_bytes")),
        "largest_free": int(look.count("largest_free_bytes")),
        "pinned": int(look.count("pinned_bytes")),
    }


def _ssd(before: Look | None, now: Look) -> dict[str, Any]:
    """The SSD tier; nothing where the node has none."""
    if "ssd_state" not in now.figures:
        return {}
    return {
        "state": _SSD_STATES[int(now.count("ssd_state"))],
        **{name: int(now.count(f"ssd_{name}")) for name in _SSD},
        **{f"{name}_per_s": _rate(name, before, now) for name in _SSD_RATES},
    }


def _hits(before: Look | None, now: Look) -> dict[str, float | None]:
    """Tokens resolved for readers that asked, by the tier on which they were found; they add up to all of them."""
    both, ssd = _rate("acquired_tokens", before, now), _rate("acquired_ssd_tokens", before, now)
    if both is None or ssd is None:
        return {"dram": None, "ssd": None}
    return {"dram": round(both - ssd, 3), "ssd": ssd}


def _rates(names: Mapping[str, str], before: Look | None, now: Look) -> dict[str, float | None]:
    return {label: _rate(name, before, now) for label, name in sorted(names.items())}


def _rate(name: str, before: Look | None, now: Look) -> float | None:
    if before is None:
        return None
    return round((now.count(name) - before.count(name)) / (now.at_s - before.at_s), 3)
