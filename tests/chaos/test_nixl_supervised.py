"""A node's worker that ends while its memory is read over NIXL: the next one offers it anew (B02), and many of them."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from supervised_node import SupervisedNode, supervised

from kvstore.client import Client, connect
from kvstore.model.values import MissReason
from kvstore.transport import ReadStatus
from kvstore.transport.nixl_agent import Agent
from kvstore.transport.nixl_process import NixlProcess
from tests.chaos.nixl_nodes import Held, Once, nixl_processes, only_tcp, state_of
from tests.chaos.pool_processes import Processes, until
from tests.unit.client.pages import MIB, POISON, namespace, pages_of, prompt

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the nixl package"),
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.xdist_group("nixl"),
]

CHUNKS = 8
DEADLINE_S = 2.0
BACK_S = 5.0
OWNERS = 16
PAGE_BYTES = 4096


@dataclass
class Watched:
    """A supervised node, and a client that reads it over NIXL and checks what comes."""

    node: SupervisedNode
    client: Client

    def read(self) -> tuple[int, MissReason | None]:
        cache = self.client.bind(namespace(layout=MIB))
        keys, target = cache.keys(prompt(1, 64 * CHUNKS)), cache.empty(CHUNKS)
        target[:] = POISON
        started = time.monotonic()
        result = cache.read(keys, target, deadline_s=DEADLINE_S)
        assert time.monotonic() - started < DEADLINE_S + 1.0
        assert np.array_equal(target[: result.chunks], pages_of(keys, MIB)[: result.chunks])
        return result.chunks, result.reason

    def is_whole(self) -> bool:
        return self.read() == (CHUNKS, None)

    def end_worker_inside_a_payload(self, number: signal.Signals) -> None:
        """Right bytes are there again within the time, from the memory that the worker left."""
        worker = self.node.worker
        serving = nixl_processes(worker)
        assert len(serving) == 2
        ended = Once(lambda: os.kill(worker, number))
        for place in list(self.client._peers):
            self.client.drop_peer(*place)
        self.client._transports._nixl.hold_for_tests(before_payload=ended)  # type: ignore[union-attr]
        chunks, reason = self.read()
        assert ended.happened and (chunks == CHUNKS) is (reason is None)
        until(self.is_whole, BACK_S)
        assert self.node.worker != worker
        until(lambda: not any(state_of(pid) for pid in serving))


@pytest.fixture
def watched(tmp_path: Path, processes: Processes) -> Iterator[Watched]:
    before = Held.now()
    with only_tcp():
        metadata = str(processes.metadata().said["control_address"])
        arguments = ("--dram", "32MiB", "--transport", "nixl", "--data-address", "127.0.0.1:0", "--host-id", "far")
        with supervised(tmp_path, "node", *arguments, "--metadata-address", metadata) as node:
            node.wait_open()
            with connect(node.facts["node"]["socket_path"]) as writer:
                cache = writer.bind(namespace(layout=MIB))
                keys = cache.keys(prompt(1, 64 * CHUNKS))
                assert cache.write(keys, pages_of(keys, MIB)).stored == CHUNKS
            with connect(metadata=metadata, transport="nixl", staging="32MiB") as client:
                watched = Watched(node, client)
                until(watched.is_whole)
                yield watched
                until(lambda: client.staging.usage().free_bytes == client.staging.total_bytes)
                client.staging.check()
            worker = node.workers
            serving = [pid for each in worker for pid in nixl_processes(each)]
        until(lambda: not any(state_of(pid) for pid in (*worker, *serving)))
    until(lambda: (now := Held.now()).agents <= before.agents and now.threads <= before.threads)


def test_b02_a_worker_is_killed_and_the_next_one_offers_its_memory_over_nixl(watched: Watched) -> None:
    for kill in range(1, 4):
        watched.end_worker_inside_a_payload(signal.SIGKILL)
        stats = watched.node.stats()
        assert (stats["recovered_chunks"], stats["dropped_shards"], stats["worker_start"]) == (CHUNKS, 0, kill + 1)
        assert "commits" not in stats, "the chunks are those of the first worker"


def test_b02_a_worker_is_told_to_end_and_the_next_one_offers_its_memory_over_nixl(watched: Watched) -> None:
    """As in an upgrade."""
    watched.end_worker_inside_a_payload(signal.SIGTERM)
    assert watched.node.stats()["recovered_chunks"] == CHUNKS


def test_b01_a_supervisor_is_killed_and_leaves_no_process_of_nixl(watched: Watched) -> None:
    worker = watched.node.worker
    left = [worker, *nixl_processes(worker)]
    assert len(left) == 3
    watched.node.process.kill()
    until(lambda: not any(state_of(pid) for pid in left))
    chunks, reason = watched.read()
    assert chunks == 0 and reason is not None


def test_b11_owners_started_at_once_are_read_each_by_itself() -> None:
    """One is killed and serves again; nobody's bytes come under another's name."""
    before = Held.now()
    with ExitStack() as stack, only_tcp():

        def start(number: int) -> NixlProcess:
            arena_fd = os.memfd_create("owner")
            stack.callback(os.close, arena_fd)
            os.pwrite(arena_fd, page_of(number).tobytes(), 0)
            return NixlProcess(f"owner-{number % 2}", 1, arena_fd, PAGE_BYTES)

        with ThreadPoolExecutor(OWNERS) as pool:
            owners = list(pool.map(start, range(OWNERS)))
        for owner in owners:
            stack.callback(owner.stop)
        assert len({owner.plane().agent_metadata for owner in owners}) == OWNERS
        for number, owner in enumerate(owners):
            assert np.array_equal(read_of(owner), page_of(number))
        os.kill(owners[3].pid, signal.SIGKILL)
        until(lambda: owners[3].restarts == 1 and owners[3].is_serving)
        for number in (2, 3, 4):
            assert np.array_equal(read_of(owners[number]), page_of(number))
    assert not nixl_processes(os.getpid())
    until(lambda: (now := Held.now()).agents <= before.agents and now.threads <= before.threads)


def page_of(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def read_of(owner: NixlProcess) -> Any:
    into = np.full(PAGE_BYTES, POISON, dtype=np.uint8)
    plane = owner.plane()
    with closing(Agent(f"reader-{plane.agent_metadata[-8:].hex()}-{owner.pid}")) as agent:
        agent.register(into.ctypes.data, into.nbytes)
        local = np.array([[into.ctypes.data, into.nbytes, 0]], dtype=np.uint64)
        remote = np.array([[plane.arena_address, into.nbytes, 0]], dtype=np.uint64)
        transfer = agent.read(agent.add_peer(plane.agent_metadata), local, remote, "DRAM")

        def moved() -> Any:
            owner.wake()
            return transfer.poll()

        assert until(moved) is ReadStatus.DONE
        transfer.end()
    return into
