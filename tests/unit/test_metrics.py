"""The metrics endpoint, and instruments of our own."""

from __future__ import annotations

import math
import socket
import urllib.request

import pytest

from kvstore import metrics
from kvstore.errors import ConfigurationError
from kvstore.tally import Tally
from tests.unit.samples import Samples, sample


def test_serves_what_was_counted_on_a_free_port() -> None:
    bound = metrics.serve_metrics("127.0.0.1:0")
    metrics.MISSES.labels(reason="absent").inc()
    metrics.REQUEST_SECONDS.labels(service="NodeService", method="Acquire", via="grpc").observe(0.001)
    metrics.TRANSFER_SECONDS.add("tcp", _tally(0.0002))
    with urllib.request.urlopen(f"http://{bound}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert 'kvstore_misses_total{reason="absent"}' in text
    assert 'kvstore_request_seconds_count{method="Acquire",service="NodeService",via="grpc"}' in text
    assert 'kvstore_transfer_seconds_bucket{le="0.00025",path="tcp"}' in text
    assert "# TYPE kvstore_transfer_seconds histogram" in text
    assert "kvstore_quarantined_bytes 0.0" in text
    assert "process_resident_memory_bytes" in text


def _tally(*values: float) -> Tally:
    tally = Tally()
    for value in values:
        tally.add(value)
    return tally


def test_whole_tallies_become_a_histogram() -> None:
    before = Samples()
    metrics.TRANSFER_SECONDS.add("test", _tally(0.0001, 0.003, 0.004))
    metrics.TRANSFER_SECONDS.add("test", _tally(77.0))
    metrics.TRANSFER_SECONDS.add("never", _tally())
    buckets = {
        le: before.gained("transfer_seconds_bucket", path="test", le=le) for le in ("0.0001", "0.0025", "0.005", "30.0")
    }
    assert buckets == {"0.0001": 1, "0.0025": 1, "0.005": 3, "30.0": 3}
    assert before.gained("transfer_seconds_bucket", path="test", le="+Inf") == 4
    assert before.gained("transfer_seconds_count", path="test") == metrics.TRANSFER_SECONDS.count("test") == 4
    assert math.isclose(before.gained("transfer_seconds_sum", path="test"), 77.0071)
    assert sample("transfer_seconds_count", path="never") == metrics.TRANSFER_SECONDS.count("never") == 0


def test_namespaces_beyond_64_share_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_labels", set())
    titles = [f"model-{number}@main full [0]" for number in range(70)]
    assert [metrics.namespace_label(title) for title in titles] == titles[:64] + ["other"] * 6
    assert metrics.namespace_label(titles[3]) == titles[3]


def test_empty_address_is_off() -> None:
    assert metrics.serve_metrics("") == ""


def test_taken_port_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"metrics_address {address}"):
            metrics.serve_metrics(address)
