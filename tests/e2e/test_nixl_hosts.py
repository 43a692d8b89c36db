"""Two hosts, two nodes, two workers, a metadata service in network namespaces: what NIXL reads comes over the link."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lone_hosts import Host, two_hosts

SCRIPT = Path(sys.executable).parent / "kvstore"
WORKER = Path(__file__).with_name("nixl_worker.py")
CHUNKS = 24
PAYLOAD_BYTES = CHUNKS << 20
CALLS_BYTES = 256 << 10

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the nixl package"),
    pytest.mark.slow,
    pytest.mark.netns,
    pytest.mark.nixl,
    pytest.mark.xdist_group("nixl"),
    pytest.mark.skipif(not SCRIPT.is_file(), reason="the package is not installed"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as (a, b):
        for host in (a, b):
            host.environment["UCX_TLS"] = "tcp"  # two namespaces of one kernel would still share memory through it
        a.start("metadata", "kvstore metadata --address $HOST_A:7410 --metrics-address '' --insecure --json").receive(
            20.0
        )
        for host, name in ((a, "$HOST_A"), (b, "$HOST_B")):
            node = host.start(
                "node",
                f"kvstore node --control-address {name}:7420 --data-address {name}:7422 --metrics-address '' "
                "--insecure --metadata-address $HOST_A:7410 --dram 128MiB --transport nixl --json",
            )
            announced = node.receive(60.0)
            assert announced["data_paths"] == ["tcp", "nixl UCX (tcp)"]
        yield a, b


def work(host: Host, verb: str, node: str, transport: str = "auto") -> dict[str, Any]:
    command = f"python {WORKER} {verb} {node} $HOST_A:7410 {CHUNKS} {transport}"
    answer: dict[str, Any] = json.loads(host.run(command, 120.0).splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def stored(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    assert work(a, "write", "$HOST_A:7420") == {"stored": CHUNKS}
    ends_at_s = time.monotonic() + 30
    while work(b, "read", "$HOST_B:7420", "tcp")["chunks"] < CHUNKS:
        assert time.monotonic() < ends_at_s, "the index does not hear of the chunks"


def test_nixl_pulls_over_the_link(hosts: tuple[Host, Host], stored: None) -> None:
    _, b = hosts
    before = b.received_bytes()
    answer = work(b, "read", "$HOST_B:7420", "nixl")
    received = b.received_bytes() - before
    assert (answer["chunks"], answer["right"], answer["reason"]) == (CHUNKS, CHUNKS, None)
    assert set(answer["bytes_by_path"]) == {"nixl"}
    assert received >= answer["bytes_by_path"]["nixl"] >= PAYLOAD_BYTES, "not all that was read came over the link"
    assert answer["path"] == "nixl UCX (tcp)"


def test_without_rdma_a_client_picks_tcp_by_itself(hosts: tuple[Host, Host], stored: None) -> None:
    _, b = hosts
    before = b.received_bytes()
    answer = work(b, "read", "$HOST_B:7420", "auto")
    assert (answer["chunks"], answer["right"]) == (CHUNKS, CHUNKS)
    assert set(answer["bytes_by_path"]) == {"tcp"}
    assert b.received_bytes() - before >= PAYLOAD_BYTES


def test_on_its_own_host_nothing_comes_over_the_link(hosts: tuple[Host, Host], stored: None) -> None:
    a, b = hosts
    before = a.received_bytes() + b.received_bytes()
    answer = work(a, "read", "$HOST_A:7420")
    assert (answer["right"], set(answer["bytes_by_path"])) == (CHUNKS, {"shm"})
    assert a.received_bytes() + b.received_bytes() - before < CALLS_BYTES
