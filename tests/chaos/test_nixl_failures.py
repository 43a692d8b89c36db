"""Nodes that are killed, stopped or lose what serves NIXL while a client reads from them (B01, B02, B15).

Two nodes and a metadata service in processes of their own; the client is in this process. `near` is asked first. One
prompt is on both nodes, two more are on one of them each.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import connect
from kvstore.client import nodes as nodes_module
from kvstore.metadata import NodeMatch
from kvstore.model.values import MissReason
from tests.chaos.nixl_nodes import Held, NixlNode, Once, nixl_node, nixl_processes, only_tcp, state_of
from tests.chaos.pool_processes import Process, Processes, until
from tests.unit.client.pages import MIB, POISON, namespace, pages_of, prompt

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the nixl package"),
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.xdist_group("nixl"),
]

SHARED, NEAR, FAR = 1, 2, 3
"""Prompts, by where their chunks are."""
CHUNKS = 8
DEADLINE_S = 3.0
BACK_S = 5.0
"""So long after a node is back all reads are whole again."""


@dataclass
class Pool:
    processes: Processes
    metadata: Process
    near: NixlNode
    far: NixlNode

    @property
    def metadata_address(self) -> str:
        return str(self.metadata.said["control_address"])

    def start(self, name: str, prompts: tuple[int, ...], **more: Any) -> NixlNode:
        node = nixl_node(
            self.processes, name, dram=32 << 20, metadata_address=self.metadata_address, node_id=name, **more
        )
        write(node, prompts)
        return node

    def start_near_again(self, version: int = 0, chunks: int = CHUNKS) -> None:
        """On the same ports."""
        info = self.near.info
        ports = {"control_address": info.control_address, "data_address": info.data_address}
        self.near = self.start("near", (), **ports)
        assert self.near.info.epoch > info.epoch
        write(self.near, (SHARED, NEAR), version, chunks)


def write(node: NixlNode, prompts: tuple[int, ...], version: int = 0, chunks: int = CHUNKS) -> None:
    with connect(node.socket_path) as writer:
        cache = writer.bind(namespace(layout=MIB))
        for number in prompts:
            keys = cache.keys(prompt(number, 64 * CHUNKS)).slice(0, chunks)
            assert cache.write(keys, pages_of(keys, MIB, version)).stored == chunks


@pytest.fixture(scope="module")
def pool(shared_processes: Processes) -> Iterator[Pool]:
    with only_tcp():
        metadata = shared_processes.metadata()
        pool = Pool(shared_processes, metadata, None, None)  # type: ignore[arg-type]
        pool.near, pool.far = pool.start("near", (SHARED, NEAR)), pool.start("far", (SHARED, FAR))
        yield pool


class Reader:
    """A client whose reads are checked: right bytes within the deadline, or a miss with a reason."""

    def __init__(self, pool: Pool, transport: str) -> None:
        self.client = connect(metadata=pool.metadata_address, transport=transport, staging="32MiB")
        self.cache = self.client.bind(namespace(layout=MIB))
        self.pages = {(number, 0): pages_of(self._keys(number), MIB) for number in (SHARED, NEAR, FAR)}

    def _keys(self, number: int) -> Any:
        return self.cache.keys(prompt(number, 64 * CHUNKS))

    def read(
        self, number: int, deadline_s: float = DEADLINE_S, version: int = 0, chunks: int = CHUNKS
    ) -> tuple[int, MissReason | None]:
        keys, target = self._keys(number).slice(0, chunks), self.cache.empty(chunks)
        target[:] = POISON
        started = time.monotonic()
        result = self.cache.read(keys, target, deadline_s=deadline_s)
        assert time.monotonic() - started < deadline_s + 1.0
        if (number, version) not in self.pages:
            self.pages[number, version] = pages_of(self._keys(number).slice(0, chunks), MIB, version)
        assert np.array_equal(target[: result.chunks], self.pages[number, version][: result.chunks])
        assert (target[result.chunks :] == POISON).all()
        assert (result.chunks == chunks) is (result.reason is None)
        return result.chunks, result.reason

    def whole(self, number: int, version: int = 0) -> bool:
        return self.read(number, version=version) == (CHUNKS, None)

    def at_payload(self, action: Callable[[], object]) -> Once:
        """Do it when the next payload of `near` is under way."""
        once = Once(action)
        transports = self.client._transports
        for place in list(self.client._peers):  # a connection is made with its hook
            self.client.drop_peer(*place)
        for transport in (transports._tcp, transports._nixl):
            if transport is not None:
                transport.hold_for_tests(before_payload=once)  # type: ignore[attr-defined]
        return once


@pytest.fixture(params=["nixl", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reader(pool: Pool, transport: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """One that has read from both nodes. Nothing of it is left at the end."""
    monkeypatch.setattr(nodes_module.random, "choice", near_first)
    before = Held.now()
    with only_tcp():
        reader = Reader(pool, transport)
        for number in (SHARED, NEAR, FAR):
            until(lambda number=number: reader.whole(number))  # type: ignore[misc]
        assert reader.client.stats()[f"read_bytes_{transport}"] > 3 * CHUNKS * MIB.chunk_bytes
        connected = Held.now()
        yield reader
        until(lambda: Held.now().agents <= connected.agents)
        until(lambda: reader.client.staging.usage().free_bytes == reader.client.staging.total_bytes)
        reader.client.staging.check()
        reader.client.close()
    until(lambda: (now := Held.now()).agents <= before.agents and now.threads <= before.threads)
    # The library keeps a few descriptors from its first agent on, and gRPC its poller's.
    assert Held.now().descriptors <= before.descriptors + 16


def near_first(matches: list[NodeMatch]) -> NodeMatch:
    return min(matches, key=lambda match: match.node.node_id != "near")


def kill(pool: Pool) -> None:
    """Node and supervisor in one: all of it is gone."""
    serving = nixl_processes(pool.near.process.pid)
    pool.near.process.end()
    for pid in serving:
        until(lambda pid=pid: state_of(pid) in ("", "Z"))  # type: ignore[misc]


def test_b01_a_node_is_killed_inside_a_payload(pool: Pool, reader: Reader) -> None:
    killed = reader.at_payload(lambda: kill(pool))
    assert reader.whole(SHARED), "the other node has the same chunks"
    assert killed.happened
    chunks, reason = reader.read(NEAR)
    assert chunks == 0 and reason is not None
    assert reader.whole(FAR)
    pool.start_near_again()
    until(lambda: reader.whole(NEAR), BACK_S)
    assert reader.whole(SHARED) and reader.whole(FAR)


def test_b01_a_node_is_stopped_inside_a_payload(pool: Pool, reader: Reader) -> None:
    stopped = reader.at_payload(pool.near.stop)
    assert reader.whole(SHARED), "the other node has the same chunks"
    assert stopped.happened
    chunks, reason = reader.read(NEAR, 1.0)
    assert chunks == 0 and reason is not None
    assert reader.whole(FAR)
    pool.near.go_on()
    until(lambda: reader.whole(NEAR), BACK_S)
    assert reader.whole(SHARED) and reader.whole(FAR)


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_b01_what_serves_nixl_is_killed_inside_a_payload_ten_times(pool: Pool, reader: Reader, transport: str) -> None:
    restarts, old = pool.near.stats()["nixl_restarts"], set()
    for kill_number in range(1, 11):
        serving = pool.near.nixl
        killed = reader.at_payload(lambda serving=serving: os.kill(serving, signal.SIGKILL))  # type: ignore[misc]
        assert reader.whole(SHARED), "the other node has the same chunks"
        assert killed.happened
        assert reader.whole(FAR)
        until(lambda: reader.whole(NEAR), BACK_S)
        assert reader.whole(SHARED) and pool.near.nixl != serving
        until(lambda kill_number=kill_number: pool.near.stats()["nixl_restarts"] == restarts + kill_number)  # type: ignore[misc]
        old.add(serving)
    assert len(old) == 10 and not any(state_of(pid) for pid in old)
    assert len(nixl_processes(pool.near.process.pid)) == 2
    stats = pool.near.stats()
    assert (stats["data_path_nixl"], stats["data_path_degraded_nixl"]) == (1, 1), (
        "it serves, but who knows for how long"
    )
    assert stats["data_path_trouble"] == "nixl: died 3 times within 60 s, last because it was ended by SIGKILL"
    assert pool.far.stats()["data_path_degraded_nixl"] == 0 and pool.far.stats()["data_path_trouble"] == ""


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_b01_what_serves_nixl_is_stopped_and_goes_on_or_not(pool: Pool, reader: Reader, transport: str) -> None:
    """Alone: the node beats on. One that never goes on is replaced."""
    for goes_on in (True, False):
        serving = pool.near.nixl
        stopped = reader.at_payload(lambda serving=serving: stop(serving))  # type: ignore[misc]
        assert reader.whole(SHARED) and stopped.happened
        if goes_on:
            os.kill(serving, signal.SIGCONT)
            until(lambda: reader.whole(NEAR), BACK_S)
        else:
            until(lambda serving=serving: pool.near.nixl != serving)  # type: ignore[misc]
            until(lambda: reader.whole(NEAR), BACK_S)
            assert state_of(serving) == ""


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T")


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_b02_a_reader_is_killed_inside_a_payload_again_and_again(pool: Pool, reader: Reader, transport: str) -> None:
    """What serves NIXL may go with it; another reader goes on with what serves next, and the node does not notice."""
    near = pool.near.process.pid
    for _ in range(3):
        victim = pool.processes.client(None, metadata=pool.metadata_address, transport="nixl", layout="mib")
        until(lambda victim=victim: victim.do("read", prompt=NEAR, chunks=CHUNKS)["chunks"] == CHUNKS)  # type: ignore[misc]
        victim.do("hold_payload")
        victim.tell(step="read", prompt=NEAR, chunks=CHUNKS)
        assert victim.hear() == {"held": "payload"}
        victim.kill()
        until(lambda: reader.whole(NEAR), BACK_S)
        assert reader.whole(SHARED) and reader.whole(FAR)
    assert pool.near.process.pid == near and state_of(near) not in ("", "Z")
    until(lambda: pool.near.stats()["leases"] == 0, 30.0)


def test_f08_on_loopback_nixl_listens_nowhere_else(pool: Pool) -> None:
    """It listened on all interfaces of the host."""
    descriptors = [str(entry.readlink()) for entry in Path(f"/proc/{pool.far.nixl}/fd").iterdir()]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in descriptors]
    assert listening and {address.partition(":")[0] for address in listening} == {"0100007F"}
    assert not any(line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in descriptors for line in _tcp6())


def _tcp6() -> list[str]:
    listed = Path("/proc/net/tcp6")
    return listed.read_text().splitlines()[1:] if listed.exists() else []


def test_b01_the_metadata_service_is_killed_inside_a_payload(pool: Pool, reader: Reader) -> None:
    """Reads under way do not need it; later ones miss at once, with a reason, until it is back with all it knew."""
    killed = reader.at_payload(pool.metadata.kill)
    assert reader.whole(SHARED) and killed.happened
    chunks, reason = reader.read(NEAR)
    assert (chunks == CHUNKS) is (reason is None)
    pool.metadata = pool.processes.metadata(pool.metadata_address)
    for number in (SHARED, NEAR, FAR):
        until(lambda number=number: reader.whole(number), BACK_S)  # type: ignore[misc]


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_b02_a_node_comes_back_on_its_ports_ten_times(pool: Pool, reader: Reader, transport: str) -> None:
    """Eight threads of two clients read all the time, so several connect anew at once; bytes differ with each start."""
    other = Reader(pool, "tcp")
    version, stop = [0], threading.Event()
    failures: list[BaseException] = []
    whole_since: dict[int, int] = {}

    def work(number: int) -> None:
        mine = (reader, other)[number % 2]
        try:
            while not stop.is_set():
                now = version[0]
                if mine.read(NEAR, 2.0, now, 1)[0]:
                    whole_since[number] = now
                assert number < 6 or mine.read(FAR, chunks=1)[0], "a reader of the other node must not notice"
                stop.wait(0.05)  # the node has to start beside these threads
        except BaseException as exc:
            failures.append(exc)

    for start in range(1, 11):
        stop.clear()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: len([v for v in whole_since.values() if v == version[0]]) == 8)
        kill(pool)
        version[0] = start
        pool.start_near_again(start, chunks=1)
        until(lambda: failures or len([v for v in whole_since.values() if v == version[0]]) == 8, BACK_S)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not failures
    other.client.close()
    kill(pool)
    pool.start_near_again()
