"""Prometheus metrics of a server process: every instrument once, here, with its unit in the name.

Instruments are process-wide, as the library intends: two nodes inside one process (tests, `open_local`) add up in
the counters, and the last one shows in the gauges. Labels take values from closed sets only (service, method, code,
reason, tier, path, state), and of namespaces the first 64: an unbounded label would make the process grow.

Who counts what: `rpc.counting` sets `REQUESTS` and `REQUEST_SECONDS`, for every service; a node's exporter sets the
rest, from figures that the node keeps in plain integers and tallies. docs/metrics.md documents each name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvstore.errors import ConfigurationError
from kvstore.setting_types import split_address
from kvstore.tally import AGE_EDGES_S, LATENCY_EDGES_S, Tally

REGISTRY: Final = CollectorRegistry()
"""Ours alone, so that an engine's own registry in the same process stays as it is."""
NAMESPACES: Final = 64
OTHER: Final = "other"
"""Label of namespaces beyond so many."""


class TallyHistogram(Collector):
    """A histogram with one label that takes whole tallies. One thread adds; another may collect meanwhile."""

    def __init__(self, name: str, documentation: str, label: str, edges: tuple[float, ...]) -> None:
        self.name, self.label = name, label
        self._documentation = documentation
        self._edges = edges
        self._tallies: dict[str, Tally] = {}
        REGISTRY.register(self)

    def add(self, value: str, tally: Tally) -> None:
        """Take up what was counted under this value of the label."""
        if tally.count:
            merged = Tally(self._edges)
            if value in self._tallies:
                merged.merge(self._tallies[value])
            merged.merge(tally)
            self._tallies[value] = merged  # as a whole: a scrape sees the old one or the new one

    def count(self, value: str) -> int:
        """Values added under this value of the label."""
        return self._tallies[value].count if value in self._tallies else 0

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The name, for the registry."""
        yield HistogramMetricFamily(self.name, self._documentation, labels=[self.label])

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Buckets add up from the smallest edge on, as Prometheus wants them."""
        family = HistogramMetricFamily(self.name, self._documentation, labels=[self.label])
        for value, tally in list(self._tallies.items()):
            total, buckets = 0, []
            for edge, count in zip((*map(str, self._edges), "+Inf"), tally.counts, strict=True):
                total += count
                buckets.append((edge, float(total)))
            family.add_metric([value], buckets, tally.sum)
        yield family


def _counter(name: str, documentation: str, *labels: str) -> Counter:
    return Counter(f"kvstore_{name}", documentation, labels, registry=REGISTRY)


def _gauge(name: str, documentation: str, *labels: str) -> Gauge:
    return Gauge(f"kvstore_{name}", documentation, labels, registry=REGISTRY)


# --- calls ---------------------------------------------------------------------------------------------------

REQUESTS: Final = _counter("requests", "Calls answered.", "service", "method", "via", "code")
REQUEST_SECONDS: Final = Histogram(
    "kvstore_request_seconds",
    "Time from a call's arrival to its answer, of a stream to its end.",
    ["service", "method", "via"],
    buckets=LATENCY_EDGES_S,
    registry=REGISTRY,
)

# --- reads and writes ----------------------------------------------------------------------------------------

HIT_TOKENS: Final = _counter("hit_tokens", "Tokens resolved for readers that asked.", "tier", "namespace")
TOUCHED_TOKENS: Final = _counter("touched_tokens", "Tokens that same-host readers told to have used.", "namespace")
MISS_TOKENS: Final = _counter("miss_tokens", "Tokens that such readers did not get, by MissReason.", "reason")
MISSES: Final = _counter("misses", "Reads that ended early, by MissReason.", "reason")
OUTCOMES: Final = _counter("reserve_outcomes", "Answers of Reserve, by Outcome.", "outcome")
PATH_BYTES: Final = _counter("path_bytes", "Bytes moved, by path.", "path")
TRANSFER_SECONDS: Final = TallyHistogram("kvstore_transfer_seconds", "Time of transfers.", "path", LATENCY_EDGES_S)

# --- tiers ---------------------------------------------------------------------------------------------------

SLOTS: Final = _gauge("slots", "Slots by what they are doing.", "tier", "state")
TIER_CHUNKS: Final = _gauge("tier_chunks", "Chunks with a committed shard there.", "tier")
TIER_USED_BYTES: Final = _gauge("tier_used_bytes", "Bytes of slots that are not free.", "tier")
TIER_LIMIT_BYTES: Final = _gauge("tier_limit_bytes", "Size of the tier.", "tier")
RESERVED_BYTES: Final = _gauge("reserved_bytes", "Bytes that writers hold and did not commit.")
QUARANTINED_BYTES: Final = _gauge("quarantined_bytes", "Bytes kept from reuse until a lost writer is gone.")
QUARANTINED_SLOTS: Final = _counter("quarantined_slots", "Slots put in quarantine.")
EVICTED_CHUNKS: Final = _counter("evicted_chunks", "Chunks that left a tier to make room.", "tier")
EVICTION_AGE_SECONDS: Final = TallyHistogram(
    "kvstore_eviction_age_seconds", "Time since the last use of chunks that left a tier.", "tier", AGE_EDGES_S
)
DEPARTED_CHUNKS: Final = _counter("departed_chunks", "Chunks that left the node, by reason.", "reason")
DEMOTED_CHUNKS: Final = _counter("demoted_chunks", "Chunks that left DRAM and stayed on the SSD.")
PROMOTED_SHARDS: Final = _counter("promoted_shards", "Shards brought from the SSD into DRAM.")
SAVED_SHARDS: Final = _counter("saved_shards", "Shards written to the SSD.")
LOST_UNSAVED_CHUNKS: Final = _counter("lost_unsaved_chunks", "Chunks that left while they waited for the SSD.")
CLEANER_WAITING_CHUNKS: Final = _gauge("cleaner_waiting_chunks", "Chunks that are to be written to the SSD.")
CLEANER_UNSAVED_BYTES: Final = _gauge("cleaner_unsaved_bytes", "Bytes that are in DRAM only.")
SSD_STATE: Final = _gauge("ssd_state", "0 in service (or none), 1 full, 2 failed.")
DATA_PATH: Final = _gauge("data_path", "1 for each way in which other hosts can read this node's memory.", "path")
DATA_PATH_DEGRADED: Final = _gauge("data_path_degraded", "1 where such a way is down, or dies again and again.", "path")
NIXL_RESTARTS: Final = _counter("nixl_restarts", "NIXL processes that died and were replaced.")
SSD_IO: Final = _gauge("ssd_io", "1 for the way in which pages get to and from the SSD.", "way")
SSD_ERRORS: Final = _counter("ssd_errors", "What went wrong with the SSD.", "kind")
CHECKSUM_FAILURES: Final = _counter("checksum_failures", "Shards whose bytes differed from their checksums.", "tier")

# --- the node ------------------------------------------------------------------------------------------------

CATALOG_ENTRIES: Final = _gauge("catalog_entries", "Shards that readers can find.")
SESSIONS: Final = _gauge("sessions", "Sessions that are open or still hold slots.")
LEASES: Final = _gauge("leases", "Leases of readers.")
TICKETS: Final = _gauge("tickets", "Tickets that pin chunks.")
PINS: Final = _gauge("pins", "Pins that operators named.")
PINNED_BYTES: Final = _gauge("pinned_bytes", "Bytes kept by tickets and pins.")
SIDE_BYTES: Final = _gauge("side_bytes", "Side objects of handoffs that are kept.")
SIDE_MISSES: Final = _counter("side_misses", "Readers that got no side objects, by MissReason.", "reason")
EVENTS_WAITING: Final = _gauge("events_waiting", "Events that the index did not acknowledge yet.")
DRAINING: Final = _gauge("draining", "1 while new chunks are refused.")
LOOP_LAG_SECONDS: Final = _gauge("loop_lag_seconds", "How late the event loop ran last.")
LOOP_DELAY_SECONDS: Final = Histogram(
    "kvstore_loop_delay_seconds",
    "How late the event loop ran, ten times a second.",
    buckets=LATENCY_EDGES_S,
    registry=REGISTRY,
)

for _collector in (ProcessCollector, PlatformCollector, GCCollector):
    _collector(registry=REGISTRY)

_labels: set[str] = set()


def namespace_label(title: str) -> str:
    """The title for the first 64 of a process, "other" for the rest."""
    if title not in _labels:
        if len(_labels) >= NAMESPACES:
            return OTHER
        _labels.add(title)
    return title


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
