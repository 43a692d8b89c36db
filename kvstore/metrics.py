"""Prometheus metrics of a server process: every instrument once, here, with its unit in the name.

Instruments are process-wide, as the library intends: two nodes inside one process (tests, `open_local`) add up in
the counters, and the last one shows in the gauges. Labels take values from closed sets only (method, code, reason,
tier, path): an unbounded label would make the process grow.

Who counts what: servers set `REQUESTS` and `REQUEST_SECONDS`; a node sets the rest; `LOOP_LAG_SECONDS` comes from
the heartbeat thread.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from kvstore.errors import ConfigurationError
from kvstore.setting_types import split_address

REGISTRY: Final = CollectorRegistry()
"""Ours alone, so that an engine's own registry in the same process stays as it is."""

_LATENCY_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

REQUESTS: Final = Counter("kvstore_requests", "Calls answered.", ["method", "code"], registry=REGISTRY)
REQUEST_SECONDS: Final = Histogram(
    "kvstore_request_seconds",
    "Time from a call's arrival to its answer.",
    ["method"],
    buckets=_LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
MISSES: Final = Counter(
    "kvstore_misses", "Reads by lease that ended early, by MissReason.", ["reason"], registry=REGISTRY
)
HIT_TOKENS: Final = Counter("kvstore_hit_tokens", "Tokens resolved for readers, by tier.", ["tier"], registry=REGISTRY)
PATH_BYTES: Final = Counter("kvstore_path_bytes", "Payload bytes sent, by path.", ["path"], registry=REGISTRY)
EVICTED_CHUNKS: Final = Counter("kvstore_evicted_chunks", "Chunks dropped under pressure.", registry=REGISTRY)
OUTCOMES: Final = Counter("kvstore_reserve_outcomes", "Answers of Reserve, by Outcome.", ["outcome"], registry=REGISTRY)
RESERVED_BYTES: Final = Gauge(
    "kvstore_reserved_bytes", "Bytes that writers hold and did not commit.", registry=REGISTRY
)
QUARANTINED_BYTES: Final = Gauge(
    "kvstore_quarantined_bytes", "Bytes kept from reuse until a lost writer is gone.", registry=REGISTRY
)
CATALOG_ENTRIES: Final = Gauge("kvstore_catalog_entries", "Shards that readers can find.", registry=REGISTRY)
LOOP_LAG_SECONDS: Final = Gauge("kvstore_loop_lag_seconds", "How late the event loop runs.", registry=REGISTRY)

for _collector in (ProcessCollector, PlatformCollector, GCCollector):
    _collector(registry=REGISTRY)


def serve_metrics(address: str) -> str:
    """Serve `/metrics` on `host:port` from a daemon thread; returns the bound address. Empty: off, returns "".

    Port 0 takes a free port. Raises ConfigurationError if the address cannot be bound.
    """
    if not address:
        return ""
    host, port = split_address(address)
    try:
        server, _ = start_http_server(port, addr=host, registry=REGISTRY)
    except OSError as exc:
        raise ConfigurationError(
            f"metrics_address {address}: {exc.strerror or exc}; give another one, or none"
        ) from exc
    return f"{f'[{host}]' if ':' in host else host}:{server.server_port}"
