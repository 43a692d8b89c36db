"""The `tcp` transport into staging against a bare sendfile/recv_into loop of the same bytes.

Two processes on loopback; the owner's arena is a memfd. A batch is COUNT slots of 2 MiB in random order. Read
and bare loop alternate in one run; a read includes its request, the fence and its generation words.

    python bench/stage_tcp.py [--count 64] [--chunk-bytes 2097152] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from kvstore.model.values import NodeInfo
from kvstore.transport import SLOT_UNIT_BYTES, ReadDescriptor, ReadStatus
from kvstore.transport.staging import Staging
from kvstore.transport.tcp import TcpConnection, TcpTransport
from kvstore.transport.tcp_server import SAME_HOST_SEND_BUFFER_BYTES, TcpServer

EPOCH = 7
DEADLINE_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--chunk-bytes", type=int, default=2 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    arena_bytes = 2 * options.count * options.chunk_bytes
    arena_fd = os.memfd_create("bench-arena")
    os.ftruncate(arena_fd, arena_bytes)
    arena = np.frombuffer(mmap.mmap(arena_fd, arena_bytes), dtype=np.uint8)
    arena[:] = np.resize(np.random.default_rng(1).integers(0, 256, (1 << 20) + 7, dtype=np.uint8), arena_bytes)
    order = np.random.default_rng(2).permutation(2 * options.count)[: options.count]
    offsets = [int(index) * options.chunk_bytes for index in order]

    ours, theirs = socket.socketpair()
    owner_pid = os.fork()
    if not owner_pid:
        own(theirs, arena_fd, arena_bytes, offsets, options.chunk_bytes)
        os._exit(0)
    theirs.close()
    try:
        served, bare = ours.recv(200).decode().split()
        measure(served, bare, arena, offsets, options)
    finally:
        ours.close()
        os.waitpid(owner_pid, 0)


def own(control: socket.socket, arena_fd: int, arena_bytes: int, offsets: list[int], chunk_bytes: int) -> None:
    """The other process: the real owner, and a bare loop that sends the batch for each byte it gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    with TcpServer(arena_fd, arena_bytes, lambda slots: slots, EPOCH) as server:
        control.send(f"{server.address} {listener.getsockname()[1]}".encode())
        peer = listener.accept()[0]
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # As the owner does for readers on its host: the loop must not lose by a worse setting.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SAME_HOST_SEND_BUFFER_BYTES)
        while peer.recv(1):
            for offset in offsets:
                end = offset + chunk_bytes
                while offset < end:
                    offset += os.sendfile(peer.fileno(), arena_fd, offset, end - offset)


def measure(served: str, bare: str, arena: np.ndarray, offsets: list[int], options: argparse.Namespace) -> None:
    chunk_bytes = options.chunk_bytes
    total_bytes = chunk_bytes * len(offsets)
    staging = Staging(2 * total_bytes)
    blocks = [staging.acquire(total_bytes, 0.0) for _ in range(2)]
    assert blocks[0] is not None and blocks[1] is not None
    read_into, bare_into = blocks[0].view, blocks[1].view
    connection = TcpTransport().connect(NodeInfo("owner", EPOCH, "", "", served), DEADLINE_S)
    bare_socket = socket.create_connection(("127.0.0.1", int(bare)))
    bare_socket.settimeout(None)
    descriptors = [
        ReadDescriptor(offset // SLOT_UNIT_BYTES, offset, chunk_bytes, index * chunk_bytes)
        for index, offset in enumerate(offsets)
    ]

    def read() -> None:
        read_once(connection, descriptors, read_into)

    def loop() -> None:
        bare_socket.send(b"x")
        view = bare_into.data
        for start in range(0, total_bytes, chunk_bytes):
            rest = view[start : start + chunk_bytes]
            while rest:
                rest = rest[bare_socket.recv_into(rest, 0, socket.MSG_WAITALL) :]

    for one in (read, loop):  # first touch of staging, TCP's slow start
        one()
    expected = np.concatenate([arena[offset : offset + chunk_bytes] for offset in offsets])
    assert np.array_equal(read_into, expected) and np.array_equal(bare_into, expected)
    read_s, bare_s = [], []
    for number in range(options.rounds):
        read_s.append(seconds(read))
        bare_s.append(seconds(loop))
        speeds = [total_bytes / one[-1] / 1e9 for one in (read_s, bare_s)]
        print(f"round {number}: read {speeds[0]:.2f} GB/s, bare {speeds[1]:.2f} GB/s", file=sys.stderr)
    connection.close()
    bare_socket.close()
    report(read_s, bare_s, total_bytes, options)


def read_once(connection: TcpConnection, descriptors: list[ReadDescriptor], into: np.ndarray) -> None:
    result = connection.read(descriptors, into, DEADLINE_S)
    if result.status is not ReadStatus.DONE:
        sys.exit(f"the read ended as {result.status}: {result.detail}")


def seconds(one: Callable[[], None]) -> float:
    started = time.perf_counter()
    one()
    return time.perf_counter() - started


def report(read_s: list[float], bare_s: list[float], total_bytes: int, options: argparse.Namespace) -> None:
    line = {
        "bench": "stage_tcp",
        "op": "stage",
        "transport": "tcp",
        "chunk_bytes": options.chunk_bytes,
        "count": options.count,
        "keys": options.count,
        "shards_per_key": 1,
        "checksum": False,
        "against": "raw",
        "condition": "quiet",
        "bytes_per_second": round(total_bytes / statistics.median(read_s)),
        "against_bytes_per_second": round(total_bytes / statistics.median(bare_s)),
        "p50_us": round(statistics.median(read_s) * 1e6),
        "p99_us": round(max(read_s) * 1e6),
        "ratio": round(statistics.median(bare_s) / statistics.median(read_s), 3),
        "versions": {"python": platform.python_version(), "linux": platform.release(), "numpy": np.__version__},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
