"""A host is cut off in the middle of a transfer, by every transport: its readers miss in time and go on later (B01)."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lone_hosts import LINK, Host, two_hosts

from kvstore.analytics.processes import Child
from tests.chaos.pool_processes import ROOT, until

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.xdist_group("nixl")]
CHUNKS = 8
PAYLOAD_BYTES = CHUNKS << 20
DEADLINE_S = 2.0
BACK_S = 5.0
"""So long after the link is up again a read is whole again."""
START_S = 30.0
NIXL = pytest.param("nixl", marks=[pytest.mark.nixl])


@dataclass
class Hosts:
    """Metadata service and node on `a`, readers on `b`."""

    a: Host
    b: Host
    metadata_address: str

    def start(self, host: Host, name: str, role: str, **arguments: Any) -> tuple[Child, Mapping[str, Any]]:
        path = ROOT / "tests" / "chaos" / "pool_processes.py"
        child = host.start(name, f"python -W error {path} {role} '{json.dumps(arguments)}'")
        return child, child.receive(START_S)

    def link(self, state: str) -> None:
        self.b.run(f"ip link set {LINK} {state}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as (a, b):
        for host in (a, b):
            host.environment |= {"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp"}
        hosts = Hosts(a, b, f"{a.address}:7410")
        a.start("metadata", f"kvstore metadata --address {hosts.metadata_address} --metrics-address= --insecure")
        folder = str(a._folder)
        settings = {
            "control_address": f"{a.address}:7420",
            "data_address": f"{a.address}:7421",
            "metrics_address": "",
            "insecure": True,
            "metadata_address": hosts.metadata_address,
            "dram": 32 << 20,
            "slots": 64,
            "socket_dir": folder,
            "data_dir": folder,
            "transport": "nixl" if importlib.util.find_spec("nixl") else "tcp",
        }
        _, facts = hosts.start(a, "node", "node", settings=settings)
        writer, _ = hosts.start(a, "writer", "client", node=facts["socket_path"], layout="mib")
        until(lambda: written(writer))
        yield hosts


def written(writer: Child) -> bool:
    """Not before the node's memory is open."""
    return bool(writer.call({"step": "write", "prompt": 1, "chunks": CHUNKS}, START_S)["outcomes"] == ["PRESENT"] * 8)


def read_of(reader: Child, deadline_s: float = DEADLINE_S) -> Mapping[str, Any]:
    answer = reader.call({"step": "read", "prompt": 1, "chunks": CHUNKS, "deadline_s": deadline_s}, START_S)
    assert not answer["wrong"] and answer["seconds"] < deadline_s + 1.0
    assert (answer["chunks"] == CHUNKS) is (answer["reason"] is None)
    return answer


@pytest.mark.parametrize("transport", ["tcp", NIXL])
def test_b01_the_link_goes_down_inside_a_payload(hosts: Hosts, transport: str) -> None:
    arguments = {"node": None, "metadata": hosts.metadata_address, "transport": transport, "layout": "mib"}
    reader, _ = hosts.start(hosts.b, f"reader-{transport}", "client", **arguments)
    before = hosts.b.received_bytes()
    until(lambda: read_of(reader)["chunks"] == CHUNKS)
    assert hosts.b.received_bytes() - before >= PAYLOAD_BYTES, "the bytes did not come over the link"
    held = held_of(reader)
    reader.call({"step": "hold_payload"}, START_S)
    reader.send({"step": "read", "prompt": 1, "chunks": CHUNKS, "deadline_s": DEADLINE_S})
    assert reader.receive(START_S) == {"held": "payload"}
    hosts.link("down")
    started = time.monotonic()
    reader.send({})
    answer = reader.receive(START_S)
    assert time.monotonic() - started < DEADLINE_S + 1.0 and answer["seconds"] < DEADLINE_S + 1.0
    assert answer["chunks"] == 0 and answer["reason"] is not None
    assert read_of(reader, 1.0)["chunks"] == 0
    hosts.link("up")
    until(lambda: read_of(reader)["chunks"] == CHUNKS, BACK_S)
    stats = reader.call({"step": "stats"}, START_S)
    assert stats["staging_in_use_bytes"] == stats["staging_quarantined_bytes"] == 0
    assert stats[f"read_bytes_{transport}"] >= 2 * PAYLOAD_BYTES
    until(lambda: held_of(reader) <= held)
    reader.terminate()


def held_of(reader: Child) -> int:
    """Open descriptors of a reader."""
    return sum(1 for _ in Path(f"/proc/{reader.pid}/fd").iterdir())
