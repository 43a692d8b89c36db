"""Redis: SET and GET of the pieces one after the other; the look-up is an MGET of 16-byte values."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib.metadata import version

import redis
from drive import Pieces, PiecesStore, free_port, keep, serve, wait_port

KEYS = 1000


class Redis(PiecesStore):
    """One connection, hiredis parsing."""

    def __init__(self, pieces: Pieces, address: str) -> None:
        super().__init__(pieces)
        host, _, port = address.rpartition(":")
        self._client = redis.Redis(host=host, port=int(port))
        self._sources = [memoryview(piece) for piece in pieces.sources()]
        self._targets = pieces.targets()
        self._names: list[str] = []
        self._few = [f"few-{index}" for index in range(KEYS)]
        self._client.mset(dict.fromkeys(self._few, b"0123456789abcdef"))

    def write(self) -> None:
        """SET of every piece."""
        self._names = self.fresh_names("piece")
        for name, piece in zip(self._names, self._sources, strict=True):
            self._client.set(name, piece)

    def read(self) -> str:
        """GET of every piece, and one copy to its place, since the client library gives new memory."""
        for name, piece in zip(self._names, self._targets, strict=True):
            memoryview(piece)[:] = self._client.get(name)
        return "tcp"

    def forget(self) -> None:
        """DEL."""
        self._client.delete(*self._names)

    def lookup(self, keys: int) -> None:
        """MGET."""
        if None in self._client.mget(self._few[:keys]):
            raise SystemExit("not all keys are there")


def main() -> None:
    """Serve as what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("server", "client"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--address", default="")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--piece-bytes", type=int, default=0)
    parser.add_argument("--segment-bytes", type=int, default=3 << 30)
    options = parser.parse_args()
    if options.role == "client":
        pieces = Pieces(options.count, options.piece_bytes)
        serve(
            lambda: Redis(pieces, options.address),
            {name: version(name.replace("-py", "")) for name in ("redis-py", "hiredis")} | {"redis": server_version()},
        )
        return
    port = free_port(options.host)
    flags = ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    flags += ["--maxmemory", str(options.segment_bytes), "--maxmemory-policy", "allkeys-lru"]
    command = ["redis-server", "--bind", options.host, "--port", str(port), *flags]
    server = subprocess.Popen(command, stdout=sys.stderr)
    wait_port(options.host, port, server)
    keep([server], address=f"{options.host}:{port}")


def server_version() -> str:
    """`v=7.0.15` of the server's own line."""
    if shutil.which("redis-server") is None:
        raise SystemExit("there is no redis-server on the path")
    line = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    return line.split("v=", 1)[1].split()[0]


if __name__ == "__main__":
    main()
