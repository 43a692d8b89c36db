"""The processes of one row: a store and a client of each side, started, asked in turn, ended.

Each side's store and client are processes of their own; the prefixes say on which host they run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.analytics.processes import Child, Children, console_script
from kvstore.errors import DeadlineExceeded
from peers.environments import LMCACHE, MOONCAKE, REDIS, Peer

HERE = Path(__file__).parent
SCRIPTS = {MOONCAKE.name: "mooncake_store.py", LMCACHE.name: "lmcache_server.py", REDIS.name: "redis_server.py"}
ROOM_BYTES = 3 << 30
"""Memory of each store."""
DEADLINE_S = 90.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Where stores and clients run, and the addresses that they bind; `*_inside` go before their commands."""

    store_address: str = LOOPBACK
    client_address: str = LOOPBACK
    store_inside: tuple[str, ...] = ()
    client_inside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """One client that a row drives."""

    client: Child
    versions: dict[str, str]

    def ask(self, verb: str, **more: int) -> dict[str, Any]:
        """One command; raises DeadlineExceeded, or Unreachable with the end of its log if it gave up."""
        return self.client.call({"verb": verb, **more}, DEADLINE_S)


def start_ours(children: Children, place: Place, work: Sequence[str]) -> Side:
    """A node of ours, populated, and a client."""
    # On a host of its own the folders are there alone; without one they must be in the scratch folder.
    run, data = ("/run/kvstore", "/var/lib/kvstore") if place.store_inside else [str(children.folder / "node")] * 2
    flags = {"--control-address": f"{place.store_address}:0", "--data-address": f"{place.store_address}:0"}
    flags |= {"--metrics-address": "", "--dram": str(ROOM_BYTES), "--socket-dir": run, "--data-dir": data}
    insecure = [] if place.store_address == LOOPBACK else ["--insecure"]
    command = [console_script(), "node", *(part for pair in flags.items() for part in pair), *insecure, "--json"]
    node = children.start("our-node", [*place.store_inside, *command])
    address = node.receive(DEADLINE_S)["control_address"]
    wait_populated([*place.client_inside, console_script(), "stats", "--node", address, "--json"])
    driver = [sys.executable, str(HERE / "ours.py"), "--address", address, *work]
    return announced(children.start("ours", [*place.client_inside, *driver]))


def start_peer(children: Children, peer: Peer, place: Place, work: Sequence[str]) -> Side:
    """The peer's server and its client."""
    driver = [str(peer.python), str(HERE / SCRIPTS[peer.name])]
    memory = ["--host", place.store_address, "--segment-bytes", str(ROOM_BYTES)]
    server = children.start(f"{peer.name}-server", [*place.store_inside, *driver, "server", *memory])
    address = server.receive(DEADLINE_S)["address"]
    client = [*driver, "client", "--host", place.client_address, "--address", address, *work]
    return announced(children.start(peer.name, [*place.client_inside, *client]))


def announced(client: Child) -> Side:
    """Wait until it is ready."""
    return Side(client, client.receive(DEADLINE_S)["versions"])


def wait_populated(stats: Sequence[str]) -> None:
    """Until the node has touched its whole arena, so that no round pays for it."""
    ends_at_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends_at_s:
        figures = json.loads(subprocess.run(stats, capture_output=True, text=True, check=True).stdout)
        if figures["populated_bytes"] == figures["arena_bytes"]:
            return
        time.sleep(0.1)
    raise DeadlineExceeded("our node did not populate its memory in time")
