"""Mooncake Store over TCP: `server` is a master and a process that holds the memory, `client` puts and gets.

The client has no memory of its own in the pool, so that every byte crosses from one process to another, as in a pool
whose memory is another process's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from drive import Pieces, PiecesStore, free_port, keep, serve, wait_port
from mooncake.store import MooncakeDistributedStore

BUFFER_BYTES = 64 << 20
PACKAGE = "mooncake-transfer-engine-non-cuda"


def connected(host: str, master: str, segment_bytes: int) -> MooncakeDistributedStore:
    """A store that lends `segment_bytes` to the pool."""
    store = MooncakeDistributedStore()
    code = store.setup(f"{host}:{free_port(host)}", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master)
    if code:
        raise SystemExit(f"setup of a Mooncake store at {master} failed: {code}")
    return store


class Mooncake(PiecesStore):
    """Puts from and gets into registered memory, all pieces in one batch."""

    def __init__(self, pieces: Pieces, store: MooncakeDistributedStore) -> None:
        super().__init__(pieces)
        self._store = store
        for memory in (pieces.source, pieces.target):
            if store.register_buffer(memory.ctypes.data, memory.nbytes):
                raise SystemExit("register_buffer failed")
        self._sources = [piece.ctypes.data for piece in pieces.sources()]
        self._targets = [piece.ctypes.data for piece in pieces.targets()]
        self._sizes = [pieces.piece_bytes] * pieces.count
        self._names: list[str] = []

    def write(self) -> None:
        """batch_put_from."""
        self._names = self.fresh_names("piece")
        codes = self._store.batch_put_from(self._names, self._sources, self._sizes)
        if any(codes):
            raise SystemExit(f"put failed: {set(codes)}")

    def read(self) -> str:
        """batch_get_into."""
        sizes = self._store.batch_get_into(self._names, self._targets, self._sizes)
        if list(sizes) != self._sizes:
            raise SystemExit(f"get failed: {set(sizes)}")
        return "tcp"

    def forget(self) -> None:
        """Remove, leases or not."""
        self._store.batch_remove(self._names, True)

    def lookup(self, keys: int) -> None:
        """batch_is_exist."""
        if set(self._store.batch_is_exist(self._names[:keys])) != {1}:
            raise SystemExit("not all pieces are there")


def main() -> None:
    """Serve as what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("server", "holder", "client"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--address", default="")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--piece-bytes", type=int, default=0)
    parser.add_argument("--segment-bytes", type=int, default=3 << 30)
    options = parser.parse_args()
    if options.role == "client":
        pieces = Pieces(options.count, options.piece_bytes)
        serve(
            lambda: Mooncake(pieces, connected(options.host, options.address, 0)), {"mooncake-store": version(PACKAGE)}
        )
    elif options.role == "holder":
        store = connected(options.host, options.address, options.segment_bytes)
        print("ready", flush=True)
        sys.stdin.read()
        store.close()
    else:
        serve_pool(options.host, options.segment_bytes)


def serve_pool(host: str, segment_bytes: int) -> None:
    """Start the master, then the holder."""
    port = free_port(host)
    flags = ["--default_kv_lease_ttl=5000", "--enable_http_metadata_server=false"]
    flags += [f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_port={free_port(host)}"]
    master = subprocess.Popen([Path(sys.executable).with_name("mooncake_master"), *flags], stdout=sys.stderr)
    wait_port(host, port, master)
    command = [sys.executable, __file__, "holder", f"--host={host}", f"--address={host}:{port}"]
    holder = subprocess.Popen(
        [*command, f"--segment-bytes={segment_bytes}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    while (line := holder.stdout.readline()) != b"ready\n":
        if not line:
            raise SystemExit("the process that holds the memory ended")
    keep([holder, master], address=f"{host}:{port}")


if __name__ == "__main__":
    main()
