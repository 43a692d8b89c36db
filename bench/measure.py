"""What all benches share: alternated rounds, one JSON object a measurement on stdout, progress on stderr."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

ROUNDS = 7


def alternated(
    ways: Mapping[str, Callable[[], None]], rounds: int = ROUNDS, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each way, `rounds` times, one after the other in turn, after `warm_up` rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            took = time.perf_counter() - began
            if number >= warm_up:
                seconds[name].append(took)
    return seconds


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio(ours: list[float], others: list[float]) -> float:
    """Median over the rounds of (their time / our time): 1 = as fast, below 1 = slower."""
    return statistics.median(other / our for our, other in zip(ours, others, strict=True))


def report(**fields: Any) -> None:
    """Print one measurement."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("numpy", "xxhash")}}
    print(json.dumps({**fields, "versions": versions | fields.get("versions", {})}), flush=True)
    shown = {
        k: v
        for k, v in fields.items()
        if k in ("op", "path", "against", "condition", "keys", "ratio", "bytes_per_second", "p50_us")
    }
    print(f"  {shown}", file=sys.stderr)
