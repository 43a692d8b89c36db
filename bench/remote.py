"""Reading another node's chunks over the `tcp` transport, verified and scattered, against bare sendfile/recv_into.

A real node process holds 2 MiB chunks (32 layers x 4 pages x 2 KV heads x 8 KiB head pages). The client is told to
use tcp. A read is everything: Acquire, payload and tables into staging, the fence, xxh3 of every head, scatter
into private memory, Release. The bare loop moves the same bytes from another process's memfd into one buffer.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics

import numpy as np
from local import bind, private
from measure import alternated, ratio, report
from servers import Node

import kvstore
from kvstore.transport.tcp_server import SAME_HOST_SEND_BUFFER_BYTES

SLOT_BYTES = (2 << 20) + 4096


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


def main() -> None:
    """Start, store, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=128)
    count = parser.parse_args().count
    bare = BareSender(count, 2 << 20)
    with Node(dram=f"{count * 5}MiB", slots=4096) as node, kvstore.connect(node.control_address) as writer:
        node.wait_populated()
        cache = bind(writer, 8192, 4, checksums=True, revision="remote")
        source = private((count, *cache.layout.shape(cache.rectangle)))
        np.random.default_rng(1).random(out=source.reshape(-1).view(np.float64))
        keys = cache.keys(np.arange(count * cache.layout.chunk_tokens))
        cache.write(keys, source)
        with kvstore.connect(node.control_address, transport="tcp") as client:
            reader = bind(client, 8192, 4, checksums=True, revision="remote")
            target = private(source.shape)
            flat = private((source.size,))

            def read() -> None:
                result = reader.read(keys, target, deadline_s=60)
                if result.chunks != count or result.bytes_by_path.get("tcp", 0) < source.size:
                    raise SystemExit(f"read {result}")

            read()
            if not np.array_equal(source, target):
                raise SystemExit("wrong bytes")
            took = alternated({"read": read, "raw": lambda: bare.read(flat)})
            report(
                bench="remote",
                op="read",
                transport="tcp",
                chunk_bytes=cache.layout.chunk_bytes,
                count=count,
                checksum=True,
                condition="warm",
                against="raw",
                bytes_per_second=source.size / statistics.median(took["read"]),
                against_bytes_per_second=source.size / statistics.median(took["raw"]),
                misses={name: value for name, value in client.stats().items() if name.startswith("misses")},
                ratio=ratio(took["read"], took["raw"]),
            )
    bare.close()


if __name__ == "__main__":
    main()
