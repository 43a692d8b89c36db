"""What every driver shares: one JSON line in, one out; only the store's own call is inside the measured time.

The first line of a driver says that it is ready, with its versions. Then it takes one command a line:

    {"verb": "write"}                  store all pieces under fresh keys             -> {"seconds"}
    {"verb": "read"}                   read them back, compare every byte            -> also "path", "received_bytes"
    {"verb": "forget"}                 remove them                                   -> {}
    {"verb": "lookup", "keys", "calls"}  ask so often for so many leading pieces     -> {"seconds": [...]}
    {"verb": "match", "keys", "calls"}   the same with keys that are made already, where that is another call
    {"verb": "copy"}                   memcpy of the same pieces                     -> {"seconds"}

Before a read the destination is poisoned; a driver that got wrong bytes ends with that word. What the store's library
prints goes to stderr. Needs the standard library and numpy, nothing of ours.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

SEED = 7
POISON = 0xA5
WAIT_S = 30.0
Answer = TypeVar("Answer")


class Store(Protocol):
    """One store with memory to write from and to read into. Each verb raises if it did not do all of its work."""

    def write(self) -> None:
        """Store all pieces under fresh keys."""

    def read(self) -> str:
        """Read what was written last into the destination; how the bytes came: `shm`, `tcp`, …."""

    def forget(self) -> None:
        """Remove what was written last."""

    def lookup(self, keys: int) -> None:
        """Ask whether the first so many of what was written last are there."""

    def settle(self) -> None:
        """End what a look-up holds in the store; not measured."""

    def poison(self) -> None:
        """Make the destination something that no read delivers, and do what the store wants before a read."""

    def check(self) -> bool:
        """Whether every byte of the destination is what was written."""

    def copy(self) -> None:
        """What a read does, by memcpy."""


class Pieces:
    """`count` pieces in private memory: a source with random bytes and a destination, each in an order of its own."""

    def __init__(self, count: int, piece_bytes: int) -> None:
        rng = np.random.default_rng(SEED)
        self.count, self.piece_bytes = count, piece_bytes
        self.source, self.target = (private((count, piece_bytes)) for _ in range(2))
        self.source.reshape(-1).view(np.uint64)[:] = rng.integers(0, 1 << 63, count * piece_bytes // 8, np.uint64)
        self.out, self.back = rng.permutation(count).tolist(), rng.permutation(count).tolist()

    def sources(self) -> list[npt.NDArray[np.uint8]]:
        """Where piece i of the keys comes from."""
        return [self.source[place] for place in self.out]

    def targets(self) -> list[npt.NDArray[np.uint8]]:
        """Where it goes to."""
        return [self.target[place] for place in self.back]

    def poison(self) -> None:
        """Fill the destination."""
        self.target[:] = POISON

    def check(self) -> bool:
        """Compare all bytes."""
        pairs = zip(self.back, self.out, strict=True)
        return all(np.array_equal(self.target[back], self.source[out]) for back, out in pairs)

    def copy(self) -> None:
        """One memcpy a piece."""
        for back, out in zip(self.back, self.out, strict=True):
            self.target[back][:] = self.source[out]


class PiecesStore:
    """The half of a store that has its bytes in `Pieces`."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.poison, self.check, self.copy = pieces.poison, pieces.check, pieces.copy
        self._generation = 0

    def fresh_names(self, kind: str) -> list[str]:
        """Names that were never used before."""
        self._generation += 1
        return [f"{kind}-{self._generation}-{index}" for index in range(self.pieces.count)]

    def settle(self) -> None:
        """A look-up holds nothing."""


def private(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Page-aligned private memory, touched, with 4 KiB pages on every machine."""
    size = int(np.prod(shape))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8).reshape(shape)
    array[:] = POISON
    return array


def received_bytes() -> int:
    """Bytes that came in over all links of this network namespace, loopback not counted."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    links = (line.split(":", 1) for line in lines)
    return sum(int(figures.split()[0]) for name, figures in links if name.strip() != "lo")


def serve(make: Callable[[], Store], versions: Mapping[str, str]) -> None:
    """Say that the store is ready, then obey until standard input ends.

    Ends without the interpreter's own end, which some libraries crash in.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = make()
    print(json.dumps({"ready": True, "versions": dict(versions)}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(store, json.loads(line))), file=answers, flush=True)
    os._exit(0)


def obey(store: Store, command: Mapping[str, Any]) -> dict[str, Any]:
    """Carry one command out."""
    verb = command["verb"]
    if verb == "forget":
        store.forget()
        return {}
    if verb in ("lookup", "match"):
        return {"seconds": [asked(store, verb, command["keys"]) for _ in range(command["calls"])]}
    if verb != "read":
        return {"seconds": timed({"write": store.write, "copy": store.copy}[verb])[1]}
    store.poison()
    before = received_bytes()
    path, seconds = timed(store.read)
    received = received_bytes() - before
    if not store.check():
        raise SystemExit("wrong bytes")
    return {"seconds": seconds, "path": path, "received_bytes": received}


def asked(store: Store, verb: str, keys: int) -> float:
    """Seconds of one look-up."""
    ask = getattr(store, verb)
    _, seconds = timed(lambda: ask(keys))
    store.settle()
    return seconds


def timed(call: Callable[[], Answer]) -> tuple[Answer, float]:
    """The answer of a call and its seconds."""
    began = time.perf_counter()
    answer = call()
    return answer, time.perf_counter() - began


# --- servers of a store ---


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, for servers that cannot take port 0."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def wait_port(host: str, port: int, server: subprocess.Popen[bytes]) -> None:
    """Until `server` listens there; SystemExit if it ends before, or does not within 30 s."""
    ends_at_s = time.monotonic() + WAIT_S
    while server.poll() is None and time.monotonic() < ends_at_s:
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{server.args} does not listen on {host}:{port} (exit status {server.poll()})")


def keep(servers: Sequence[subprocess.Popen[bytes]], **facts: Any) -> None:
    """Say that the servers are ready and keep them until standard input ends; then end them."""
    print(json.dumps({"ready": True, **facts}), flush=True)
    sys.stdin.read()
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait(WAIT_S)
