"""Many nodes started at once, taken ports, restarts on the same port (B11)."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import connect
from tests.chaos.node_thread import NodeThread
from tests.chaos.pool_processes import ROOT, Processes
from tests.unit.client.pages import LAYOUT, namespace, pages_of, poisoned, prompt
from tests.unit.client.test_remote_read import reader_of

NODES = 16


def answers_at(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5.0):
        return True


@pytest.mark.slow
def test_b11_sixteen_nodes_started_at_once_serve_their_own_bytes(tmp_path: Path) -> None:
    """Every address told is a bound socket of the node that told it; each gets the pages of all the others."""
    started = threading.Barrier(NODES)
    nodes: dict[int, NodeThread] = {}
    failures: list[BaseException] = []

    def start(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        started.wait(20)
        try:
            nodes[number] = NodeThread(folder, dram_bytes=256 << 10, node_id=f"node-{number}")
        except BaseException as exc:
            failures.append(exc)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        threads = [threading.Thread(target=start, args=(number,)) for number in range(NODES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        infos = [nodes[number].info for number in range(NODES)]
        addresses = [address for info in infos for address in (info.control_address, info.data_address)]
        assert len(set(addresses)) == 2 * NODES
        assert f"127.0.0.1:{taken.getsockname()[1]}" not in addresses
        assert all(answers_at(address) for address in addresses)

    for number, info in enumerate(infos):
        with connect(info.socket_path) as client:
            cache = client.bind(namespace())
            keys = cache.keys(prompt(0, 32))
            assert cache.write(keys, pages_of(keys, version=number)).stored == 2, "the page names its owner"
    for number, info in enumerate(infos):
        with reader_of(info) as client:
            cache = client.bind(namespace())
            target = poisoned(cache, 2)
            result = cache.read(keys, target)
            assert (result.remote_chunks, result.bytes_by_path.get("shm")) == (2, None)
            assert np.array_equal(target, pages_of(keys, LAYOUT, number))
    for node in nodes.values():
        node.stop()


def start_in_vain(folder: Path, **settings: object) -> str:
    """What a node says on standard error that cannot start; it ends by itself, and announces nothing."""
    values = {
        "control_address": "127.0.0.1:0",
        "metrics_address": "",
        "dram": 1 << 20,
        "socket_dir": str(folder),
        "data_dir": str(folder),
        **settings,
    }
    code = (
        "from kvstore import assemble; from kvstore.config import NodeSettings;"
        f"assemble.run_node(NodeSettings(**{values!r}), print)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and done.stdout == ""
    assert "ConfigurationError" in done.stderr
    return done.stderr


@pytest.mark.slow
def test_b11_a_node_on_a_taken_port_says_so_and_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for option in ("control_address", "data_address"):
            assert address in start_in_vain(tmp_path, **{option: address})


@pytest.mark.slow
def test_b11_two_nodes_do_not_share_a_socket(tmp_path: Path) -> None:
    first = NodeThread(tmp_path, dram_bytes=256 << 10, node_id="same")
    assert "another node listens" in start_in_vain(tmp_path, node_id="same")
    first.stop()


@pytest.mark.slow
def test_b11_a_killed_node_comes_back_on_its_port_at_once(processes: Processes) -> None:
    """Old connections are in TIME_WAIT, the old socket file is still there."""
    node = processes.node()
    ports = {name: node.said[name] for name in ("control_address", "data_address")}
    client = processes.client(node)
    assert client.do("write", prompt=1, chunks=2)["stored"] == 2
    for _ in range(2):
        node.kill()
        again = processes.node(**ports)
        assert {name: again.said[name] for name in ports} == ports
        assert again.said["epoch"] == node.said["epoch"] + 1
        node = again
