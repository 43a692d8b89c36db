"""Pages of another process's node over NIXL and over tcp, against the bare library and a bare loop below them.

    stage   payload of COUNT chunks (random order) into staging, with the fence      against: bare_nixl, raw
    read    everything: Acquire, payload and tables, fence, xxh3 of every head, scatter into private memory, Release

`bare_nixl` reads the same bytes out of the same arena with NIXL alone, in one transfer, looking at it without a pause.
`raw` is sendfile into recv_into from another process. All ways alternate within one run.

    python bench/transfer.py [--namespaces] [--count 64]

On one host NIXL copies out of the other process (CMA). With `--namespaces` (root) the node is in another network
namespace, joined by a veth pair, UCX is told to use TCP, and the bytes on the link are counted. On a host with RDMA
devices it measures what is there.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from local import bind, private
from measure import alternated, ratio, report

import kvstore
from kvstore.analytics.processes import Children, console_script
from kvstore.model.values import NodeInfo
from kvstore.node.remote import RemoteNode, ask_info
from kvstore.transport import ReadDescriptor, ReadStatus
from kvstore.transport.data_plane import ask
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.nixl_agent import Agent
from kvstore.transport.staging import Staging
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_server import SAME_HOST_SEND_BUFFER_BYTES

DEADLINE_S = 60.0
ROUNDS = 9
SLOT_BYTES = (2 << 20) + 4096


def main() -> None:
    """Start a node, then measure here or on the other host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--namespaces", action="store_true", help="the node on another host (root)")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--condition", default="one_host", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.address:
        return measure(options.address, options.count, options.condition)
    if options.namespaces:
        os.environ["UCX_TLS"] = "tcp"  # two namespaces of one kernel would still copy out of each other
    with Children() as children:
        start_and_measure(children, options)


def start_and_measure(children: Children, options: argparse.Namespace) -> None:
    """The node holds the chunks before the client starts."""
    address = "127.0.0.1"
    inside: tuple[str, ...] = ()
    client_inside: tuple[str, ...] = ()
    if options.namespaces:
        from peers.hosts import missing, two_hosts

        if missing():
            raise SystemExit(missing())
        place = two_hosts(children)
        address, inside, client_inside = place.store_address, place.store_inside, place.client_inside
    run = str(children.folder / "node")
    flags = {"--control-address": f"{address}:0", "--data-address": f"{address}:0", "--metrics-address": ""}
    flags |= {"--dram": f"{options.count * 5}MiB", "--slots": "4096", "--socket-dir": run, "--data-dir": run}
    flags |= {"--transport": "nixl"}
    command = [console_script(), "node", *(part for pair in flags.items() for part in pair), "--insecure", "--json"]
    node = children.start("node", [*inside, *command])
    control = node.receive(DEADLINE_S)["control_address"]
    script = [sys.executable, __file__, "--address", control, "--count", str(options.count)]
    condition = "namespaces" if options.namespaces else "one_host"
    subprocess.run([*client_inside, *script, "--condition", condition], check=True)


def received_bytes() -> int:
    """Bytes that came into this host so far, over all links but loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if not line.strip().startswith("lo:"))


def measure(address: str, count: int, condition: str) -> None:
    """All ways, one transport after the other."""
    info = ask_info(address, 5.0)
    with ExitStack() as stack:
        client = stack.enter_context(kvstore.connect(address, transport="tcp"))
        cache = bind(client, 8192, 4, checksums=True, revision="transfer")
        source = private((count, *cache.layout.shape(cache.rectangle)))
        np.random.default_rng(1).random(out=source.reshape(-1).view(np.float64))
        keys = cache.keys(np.arange(count * cache.layout.chunk_tokens))
        cache.write(keys, source, deadline_s=DEADLINE_S)
        staging = Staging(count * (3 << 20))
        block = staging.acquire(count * (cache.layout.chunk_bytes + 4096), 0.0)
        assert block is not None
        descriptors = places_of(address, keys, cache)
        bare = Bare(info, staging.memory, descriptors)
        stack.callback(bare.close)
        sender = BareSender(count, cache.layout.chunk_bytes) if condition == "one_host" else None
        flat = private((source.size,))
        for name, transport in (("nixl", NixlTransport(staging.memory)), ("tcp", TcpTransport())):
            stack.callback(transport.close)
            connection = transport.connect(info, 5.0)
            reader_client = stack.enter_context(kvstore.connect(address, transport=name, staging="64MiB"))
            reader = bind(reader_client, 8192, 4, checksums=True, revision="transfer")
            target = private(source.shape)

            def stage(connection: Any = connection) -> None:
                result = connection.read(descriptors, block.view, DEADLINE_S)
                if result.status is not ReadStatus.DONE:
                    raise SystemExit(f"stage: {result}")

            def read(reader: Any = reader, target: Any = target, name: str = name) -> None:
                result = reader.read(keys, target, deadline_s=DEADLINE_S)
                if result.chunks != count or set(result.bytes_by_path) != {name}:
                    raise SystemExit(f"read: {result}")

            before = received_bytes()
            read()
            moved = received_bytes() - before
            if not np.array_equal(source, target):
                raise SystemExit("wrong bytes")
            if condition == "namespaces" and moved < source.size:
                raise SystemExit(f"only {moved} bytes came over the link")
            below: dict[str, Callable[[], None]] = {"bare_nixl": bare.read}
            if name == "tcp" and sender is not None:
                below["raw"] = lambda: sender.read(flat)
            took = alternated({"stage": stage, "read": read, **below}, rounds=ROUNDS, warm_up=2)
            for op in ("stage", "read"):
                for against in below:
                    report(
                        bench="transfer",
                        op=op,
                        transport=name,
                        chunk_bytes=cache.layout.chunk_bytes,
                        count=count,
                        keys=count,
                        shards_per_key=1,
                        checksum=op == "read",
                        against=against,
                        condition=condition,
                        bytes_per_second=round(source.size / statistics.median(took[op])),
                        against_bytes_per_second=round(source.size / statistics.median(took[against])),
                        p50_us=round(statistics.median(took[op]) * 1e6),
                        ratio=round(ratio(took[op], took[against]), 3),
                        link_bytes=moved if condition == "namespaces" else 0,
                    )
            connection.close()
        if sender is not None:
            sender.close()


def places_of(address: str, keys: Any, cache: Any) -> list[ReadDescriptor]:
    """Where the chunks lie, in random order, and where each goes."""
    api = RemoteNode(address, name="bench")
    answer = api.acquire(keys, cache.rectangle, 0, b"", 0, 5.0)
    api.close()
    size = cache.layout.chunk_bytes
    order = np.random.default_rng(3).permutation(len(answer.places)).tolist()
    return [
        ReadDescriptor(answer.places[at].slot, answer.places[at].slot * 4096, size, number * (size + 4096))
        for number, at in enumerate(order)
    ]


class BareSender:
    """A child that sends the batch, chunk by chunk in random order, for each byte it gets."""

    def __init__(self, count: int, chunk_bytes: int) -> None:
        self._chunk_bytes, self._count = chunk_bytes, count
        fd = os.memfd_create("bare")
        os.ftruncate(fd, count * SLOT_BYTES)
        os.pwrite(fd, b"x" * chunk_bytes, 0)
        for place in range(count):
            os.pwrite(fd, os.urandom(1 << 16) * (chunk_bytes >> 16), place * SLOT_BYTES)
        listener = socket.create_server(("127.0.0.1", 0))
        self._child = os.fork()
        if not self._child:
            self._serve(listener, fd)
            os._exit(0)
        self._socket = socket.create_connection(listener.getsockname())
        listener.close()
        os.close(fd)

    def _serve(self, listener: socket.socket, fd: int) -> None:
        peer = listener.accept()[0]
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SAME_HOST_SEND_BUFFER_BYTES)
        order = np.random.default_rng(3).permutation(self._count).tolist()
        while peer.recv(1):
            for place in order:
                offset = place * SLOT_BYTES
                end = offset + self._chunk_bytes
                while offset < end:
                    offset += os.sendfile(peer.fileno(), fd, offset, end - offset)

    def read(self, into: np.ndarray) -> None:
        """Receive one batch into a flat buffer."""
        self._socket.send(b"x")
        view = into.data
        for start in range(0, self._count * self._chunk_bytes, self._chunk_bytes):
            rest = view[start : start + self._chunk_bytes]
            while rest:
                rest = rest[self._socket.recv_into(rest, 0, socket.MSG_WAITALL) :]

    def close(self) -> None:
        """End the child."""
        self._socket.close()
        os.waitpid(self._child, 0)


class Bare:
    """The library alone: the same descriptors, one transfer, looked at until it is done."""

    def __init__(self, info: NodeInfo, memory: np.ndarray, descriptors: list[ReadDescriptor]) -> None:
        plane = ask(info.control_address, info.epoch, b"", 5.0)
        self._wrapped = Agent(f"bare-{os.getpid()}")
        self._wrapped.register(memory.ctypes.data, memory.nbytes)
        self._peer = self._wrapped.add_peer(plane.agent_metadata)
        self._agent = self._wrapped._agent
        self._keep_awake = lambda: ask(info.control_address, info.epoch, b"", 5.0)
        rows = [(memory.ctypes.data + d.staging_offset, d.length, 0) for d in descriptors]
        self._local = np.array(rows, dtype=np.uint64)
        self._remote = np.array([(plane.arena_address + d.offset, d.length, 0) for d in descriptors], dtype=np.uint64)

    def read(self) -> None:
        """One batch."""
        agent = self._agent
        here, there = agent.get_xfer_descs(self._local, "DRAM"), agent.get_xfer_descs(self._remote, "DRAM")
        handle = agent.initialize_xfer("READ", here, there, self._peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"bare NIXL ended with {state}")
        handle.release()

    def close(self) -> None:
        """End the agent."""
        self._agent = None
        self._wrapped.close()


if __name__ == "__main__":
    main()
