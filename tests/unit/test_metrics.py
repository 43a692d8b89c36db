"""The metrics endpoint."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from kvstore import metrics
from kvstore.errors import ConfigurationError


def test_serves_what_was_counted_on_a_free_port() -> None:
    bound = metrics.serve_metrics("127.0.0.1:0")
    metrics.MISSES.labels(reason="absent").inc()
    metrics.REQUEST_SECONDS.labels(method="Acquire").observe(0.001)
    with urllib.request.urlopen(f"http://{bound}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert 'kvstore_misses_total{reason="absent"}' in text
    assert 'kvstore_request_seconds_count{method="Acquire"}' in text
    assert "kvstore_quarantined_bytes 0.0" in text
    assert "process_resident_memory_bytes" in text


def test_empty_address_is_off() -> None:
    assert metrics.serve_metrics("") == ""


def test_taken_port_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"metrics_address {address}"):
            metrics.serve_metrics(address)
