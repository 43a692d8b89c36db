"""Which addresses NIXL uses where hosts have more of them: one for containers, with the same address on both (B12).

Over TCP it uses the interface of the data address alone; one that is named (UCX_NET_DEVICES) goes over that.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lone_hosts import LINK, Host, two_hosts

from tests.chaos.pool_processes import ROOT, until

SCRIPT = Path(sys.executable).parent / "kvstore"
WORKER = Path(__file__).with_name("nixl_worker.py")
CHUNKS = 8
PAYLOAD_BYTES = CHUNKS << 20
INNER, ADDRESS = "inner0", "172.17.0.1"

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
            host.environment |= {"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp"}
            host.run(
                f"ip link add {INNER} type veth peer name container && ip address add {ADDRESS}/16 dev {INNER} && "
                f"ip link set {INNER} up && ip link set container up"
            )
        a.start("metadata", "kvstore metadata --address $HOST_A:7410 --metrics-address '' --insecure --json").receive(
            20.0
        )
        yield a, b


def work(host: Host, verb: str, node: str, transport: str = "auto") -> dict[str, Any]:
    command = f"python {WORKER} {verb} {node} $HOST_A:7410 {CHUNKS} {transport}"
    answer: dict[str, Any] = json.loads(host.run(command, 120.0).splitlines()[-1])
    return answer


def read_over_nixl(
    hosts: tuple[Host, Host], number: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> dict[str, Any]:
    """What a reader on the other host gets from a node that was told to use this device; empty: nothing was said."""
    a, b = hosts
    if device:
        monkeypatch.setitem(a.environment, "UCX_NET_DEVICES", device)
    port = 7420 + 10 * number
    node = a.start(
        f"node-{number}",
        f"kvstore node --control-address $HOST_A:{port} --data-address $HOST_A:{port + 1} --metrics-address '' "
        f"--node-id node-{number} --socket-dir /run/{number} --data-dir /var/lib/{number} "
        "--insecure --metadata-address $HOST_A:7410 --dram 64MiB --transport nixl --json",
    )
    address = node.receive(60.0)["control_address"]
    until(lambda: work(a, "write", address) == {"stored": CHUNKS})
    before = b.received_bytes()
    answer = work(b, "read", address, "nixl")
    answer["received"] = b.received_bytes() - before
    node.terminate()
    node.wait_end(10.0)
    return answer


@pytest.mark.parametrize(("number", "device"), [(0, ""), (1, LINK)])
def test_b12_the_link_is_found_among_interfaces_that_lead_nowhere(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch, number: int, device: str
) -> None:
    answer = read_over_nixl(hosts, number, monkeypatch, device)
    assert (answer["chunks"], answer["right"], answer["reason"]) == (CHUNKS, CHUNKS, None)
    assert answer["received"] >= PAYLOAD_BYTES


def test_b12_what_is_named_is_used_even_where_it_leads_nowhere(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = read_over_nixl(hosts, 2, monkeypatch, INNER)
    assert (answer["chunks"], answer["reason"]) == (0, "unreachable")
    assert answer["received"] < PAYLOAD_BYTES
