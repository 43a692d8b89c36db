"""Layer by layer against all at once: how long an engine waits for KV that is not there yet, or not stored yet.

Read: a node process holds a prompt, the reader gets it over tcp through a relay process whose link carries a layer
in t ms (its rate follows from `--layer-ms`). The engine is a clock: layer i takes c ms, begins when layer
i - 1 has ended and its pages are there. Visible tail = end of the last layer - layers x c: what the pool costs. Layer
by layer it should be about t, serialized layers x t. With c = t nothing makes up for the exchange between two groups.

Write: the engine computes c ms a layer; a thread stores each layer behind it, against storing all at the end. The tail
is the time from the end of the last layer until the commit is answered. Every byte read is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from local import private
from measure import report
from servers import Node

import kvstore
from kvstore.client import Cache, Client
from kvstore.client.buffers import ChunkArray
from kvstore.client.transports import Way
from kvstore.model.prefix import Keys

LAYERS = 32
STEP_BYTES = 16 << 10
"""What the relay sends at a time; much less than a layer, so that the link looks like a steady one."""
QUEUED_PIECES = 1024
ROUNDS = 5
LAYOUT = kvstore.PageLayout(LAYERS, 2, 128, kvstore.Dtype.BF16, 16, 4)
"""64 tokens a chunk, 64 KiB of it a layer, 2 MiB in all."""
SPACE = kvstore.Namespace("bench", "layerwise", LAYOUT)


class Relay:
    """A process between reader and node: what the reader sends passes at once, what the node sends at a set rate."""

    def __init__(self, target: str, bytes_per_second: float) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_relay, args=(listener, target, bytes_per_second), daemon=True)
        self._process.start()
        listener.close()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join(10)


def _relay(listener: socket.socket, target: str, bytes_per_second: float) -> None:
    host, _, port = target.rpartition(":")
    while True:
        reader = listener.accept()[0]
        node = socket.create_connection((host, int(port)))
        for end in (reader, node):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pass_on, args=(reader, node), daemon=True).start()
        threading.Thread(target=_limited, args=(node, reader, bytes_per_second), daemon=True).start()


def _pass_on(of: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):  # a reader that has finished resets its connection
        while piece := of.recv(STEP_BYTES):
            to.sendall(piece)
    _shut(to)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # that side has gone already
        end.shutdown(socket.SHUT_RDWR)


def _limited(of: socket.socket, to: socket.socket, bytes_per_second: float) -> None:
    """Like `_pass_on`, but each piece arrives when the link has carried it.

    An idle link saves nothing up. Pieces are taken in and passed on by two threads: a delay by this machine's
    scheduler is made up for by the next pieces, because they came to the link in time.
    """
    came: queue.Queue[tuple[float, bytes]] = queue.Queue(maxsize=QUEUED_PIECES)

    def take() -> None:
        with contextlib.suppress(ConnectionError):
            while piece := of.recv(STEP_BYTES):
                came.put((time.perf_counter(), piece))
        came.put((0.0, b""))

    threading.Thread(target=take, daemon=True).start()
    arrives = 0.0
    with contextlib.suppress(ConnectionError):
        while (item := came.get())[1]:
            arrives = max(arrives, item[0]) + len(item[1]) / bytes_per_second
            if (left := arrives - time.perf_counter()) > 0:
                time.sleep(left)
            to.sendall(item[1])
    _shut(to)


class Reader:
    """A client that reaches the node's memory through the relay only, and the engine's clock behind it."""

    def __init__(self, client: Client, source: np.ndarray, layer_ms: float) -> None:
        self.cache = client.bind(SPACE)
        self._source = source
        self._target = private(source.shape)
        self._chunk_s = layer_ms / 1000 / len(source)

    def tail_s(self, keys: Keys, mode: str, compute_s: float) -> tuple[float, int]:
        """(seconds that the computation ended later than with all KV there, how often layers were told of)."""
        count = len(keys)
        target = self._target[:count]
        target[:] = 0xA5
        free = began = time.perf_counter()
        told = 0
        with self.cache.read_layers(keys, target, mode=mode, deadline_s=60.0) as read:
            for ready in read:
                there, told = time.perf_counter(), told + 1
                for _ in range(ready.layer_start, ready.layer_stop):
                    free = max(free, there) + compute_s
            result = read.result()
        if result.chunks != count or not np.array_equal(target, self._source[:count]):
            raise SystemExit(f"wrong: {result}")
        return free - began - LAYERS * compute_s, told

    def measure(self, keys: Keys, mode: str, compute: float, rounds: int) -> None:
        """One row. `compute`: c in parts of t, the time that the link needs for a layer of these keys."""
        link_s = self._chunk_s * len(keys)
        runs = [self.tail_s(keys, mode, compute * link_s) for _ in range(rounds)]
        _report("read", "tcp", keys, mode, [tail for tail, _ in runs], link_s, f"c={compute:g}t", told=runs[0][1])


def _report(
    op: str, transport: str, keys: Keys, mode: str, tails: list[float], layer_s: float, condition: str, **more: Any
) -> None:
    """`ratio`: the median tail in times of one layer, t."""
    report(
        bench="layerwise",
        op=op,
        transport=transport,
        chunk_bytes=LAYOUT.chunk_bytes,
        count=len(keys),
        tokens=keys.token_count,
        checksum=True,
        against="one_layer",
        condition=condition,
        mode=mode,
        layers=LAYERS,
        layer_ms=round(layer_s * 1000, 3),
        tail_ms=round(statistics.median(tails) * 1000, 3),
        tail_ms_all=[round(tail * 1000, 3) for tail in tails],
        ratio=statistics.median(tails) / layer_s,
        **more,
    )


def write_tail_s(cache: Cache, keys: Keys, source: ChunkArray, compute_s: float, layerwise: bool) -> float:
    """Seconds from the end of the last layer's computation until the commit is answered."""
    with cache.begin_write(keys) as pending, ThreadPoolExecutor(1) as behind:
        ends = time.perf_counter()
        for layer in range(LAYERS):
            ends += compute_s
            time.sleep(max(0.0, ends - time.perf_counter()))
            if layerwise:
                behind.submit(pending.put_layers, layer, layer + 1, source)
        if not layerwise:
            behind.submit(pending.put_layers, 0, LAYERS, source)
        stored = behind.submit(pending.commit).result().stored
        tail = time.perf_counter() - ends
    if stored != len(keys):
        raise SystemExit(f"only {stored} of {len(keys)} chunks were stored")
    cache.remove(keys.slice(0, 1))
    return tail


def measure_writes(cache: Cache, source: np.ndarray, compute_s: float) -> None:
    """The way back: layers stored behind the computation, against all of them after it. t = a layer's share of that."""
    keys = cache.keys(np.arange(1 << 20, (1 << 20) + len(source) * LAYOUT.chunk_tokens))
    pages = ChunkArray(source, LAYOUT.whole)
    ways: dict[str, list[float]] = {"serialized": [], "layerwise": []}
    for number in range(ROUNDS + 1):
        for mode, tails in ways.items():
            tail = write_tail_s(cache, keys, pages, compute_s, mode == "layerwise")
            if number:  # the first round touches fresh memory
                tails.append(tail)
    layer_s = statistics.median(ways["serialized"]) / LAYERS
    for mode, tails in ways.items():
        _report("write", "shm", keys, mode, tails, layer_s, f"c={compute_s / layer_s:.3g}t")


def main() -> None:
    """Start, store, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--layer-ms", type=float, default=20.0)
    given = parser.parse_args()
    count, layer_ms = given.count, given.layer_ms
    with Node(dram=f"{count * 10}MiB", slots=4096) as node, kvstore.connect(node.control_address) as writer:
        node.wait_populated()
        cache = writer.bind(SPACE)
        source = private((count, *LAYOUT.shape(LAYOUT.whole)))
        np.random.default_rng(1).random(out=source.reshape(-1).view(np.float64))
        tokens = np.arange(count * LAYOUT.chunk_tokens)
        prompts = {length: cache.keys(tokens[:length]) for length in (len(tokens), 511, 512)}
        for keys in prompts.values():
            cache.write(keys, source[: len(keys)])
        measure_writes(cache, source, layer_ms / 1000)
        assert writer.node is not None
        layer_bytes = count * LAYOUT.chunk_bytes // LAYERS
        relay = Relay(writer.node.data_address, layer_bytes / (layer_ms / 1000))
        far = replace(writer.node, data_address=relay.address)
        with Client(None, far, None, way=Way("tcp")) as client:
            reader = Reader(client, source, layer_ms)
            whole = prompts[len(tokens)]
            reader.tail_s(whole, "serialized", 0.0)  # connects
            for compute in (1.0, 1.25, 2.0):
                reader.measure(whole, "layerwise", compute, ROUNDS)
            reader.measure(whole, "serialized", 1.25, 3)
            for length in (511, 512):
                reader.measure(prompts[length], "auto", 2.0, 3)
        relay.close()


if __name__ == "__main__":
    main()
