"""LMCache's server with the transfer mode in which it copies itself, over POSIX shared memory (`lmcache_driven`).

The client does what `lmcache bench server` does, with the same calls of the same library, but keeps its tensors from
round to round and stores from and retrieves into blocks at random places. 64 tokens a chunk; 16 layers of 4 KV heads of
128 in bf16 make 2 MiB, one layer 128 KiB.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from drive import free_port, keep, serve, wait_port

os.environ |= {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}

CHUNK_TOKENS, BLOCK_TOKENS, HEADS, HEAD_DIM = 64, 16, 4, 128
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
LAYER_BYTES = CHUNK_TOKENS * HEADS * HEAD_DIM * 2 * 2
DEADLINE_S = 30.0


class LmCache:
    """One worker with its KV tensors registered at the server."""

    def __init__(self, address: str, count: int, layers: int) -> None:
        import torch
        import zmq
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
        from paged import Paged

        self._count, self._generation, self._requests = count, 0, 0
        self._model = f"bench-{layers}"  # the server keeps one shape a model
        self._client = RequestClientFactory.create(address, context=zmq.Context())
        shape = (2, 2 * count * BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
        self._caches = {f"layer.{layer}": torch.zeros(shape, dtype=torch.bfloat16) for layer in range(layers)}
        self._context = create_transfer_context(
            self._caches, mode="lmcache_driven", instance_id=os.getpid(), req_client=self._client
        )
        group = EngineGroupInfo(engine_group_id=0, layer_indices=tuple(range(layers)), tokens_per_block=BLOCK_TOKENS)
        self._context.register(
            self._caches,
            self._model,
            1,
            BLOCKS,
            DEADLINE_S,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )
        memory = Paged(list(self._caches.values()), 1, BLOCKS)
        self._memory, self.check, self.copy = memory, memory.check, memory.copy
        self._source, self._target = ([*itertools.chain(*chunks)] for chunks in (memory.source, memory.target))

    def write(self) -> None:
        """STORE under fresh tokens."""
        self._generation += 1
        length = self._count * CHUNK_TOKENS
        self._tokens = tuple(range(self._generation * length, (self._generation + 1) * length))
        self._begin(self._count)
        self._move(self._context.submit_store, self._source)
        self._client.end_session(self._request).result(timeout=DEADLINE_S)

    def poison(self) -> None:
        """The look-up, which RETRIEVE wants before, is not part of its time."""
        self._memory.poison()
        self.lookup(self._count)

    def read(self) -> str:
        """RETRIEVE."""
        self._move(self._context.submit_retrieve, self._target, skip_first_n_tokens=0)
        self._client.end_session(self._request).result(timeout=DEADLINE_S)
        return "shm"

    def lookup(self, keys: int) -> None:
        """LOOKUP, and wait until the server knows the answer."""
        self._begin(keys)
        self._client.lookup(self._key(None), 1).result(timeout=DEADLINE_S)
        found = self._client.wait_prefetch_status(self._request, DEADLINE_S).result(timeout=DEADLINE_S)
        if found != keys:
            raise SystemExit(f"found {found} of {keys} chunks")

    def settle(self) -> None:
        """Give the look-up's locks back and end the request."""
        self._client.free_lookup_locks(self._key(None), 1).result(timeout=DEADLINE_S)
        self._client.end_session(self._request).result(timeout=DEADLINE_S)

    def forget(self) -> None:
        """The server evicts what is oldest."""

    def _begin(self, chunks: int) -> None:
        """A request of its own for the first so many chunks: the server keeps sessions by its id."""
        self._requests += 1
        self._request, self._chunks = f"request-{self._requests}", chunks

    def _key(self, worker: int | None) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=self._tokens[: self._chunks * CHUNK_TOKENS],
            start=0,
            end=self._chunks * CHUNK_TOKENS,
            request_id=self._request,
            num_kv_readers=1,
        )

    def _move(self, submit: Any, blocks: list[int], **more: int) -> None:
        event = self._context.create_recorded_event()
        done = submit(self._request, self._key(0), self._caches, [blocks], event, BLOCKS, **more)
        if not done.result(timeout=DEADLINE_S):
            raise SystemExit(f"{submit.__name__} failed")


def leave_no_memory(*_: object) -> None:
    """End on SIGTERM: the library leaves the worker's shared tensors behind, 1 GiB a run, until nothing starts."""
    for path in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
        path.unlink()
    os._exit(0)


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
        signal.signal(signal.SIGTERM, leave_no_memory)
        layers = options.piece_bytes // LAYER_BYTES
        serve(lambda: LmCache(f"tcp://{options.address}", options.count, layers), {"lmcache": version("lmcache")})
        return
    port = free_port(options.host)
    flags = {
        "--host": options.host,
        "--port": port,
        "--http-host": options.host,
        "--http-port": free_port(options.host),
        "--prometheus-port": free_port(options.host),
        "--l1-size-gb": options.segment_bytes / (1 << 30),
        "--eviction-policy": "LRU",
        "--chunk-size": CHUNK_TOKENS,
        "--hash-algorithm": "blake3",
        "--supported-transfer-mode": "lmcache_driven",
    }
    pairs = [str(part) for pair in flags.items() for part in pair]
    command = [Path(sys.executable).with_name("lmcache"), "server", "--no-l1-use-lazy", *pairs]
    server = subprocess.Popen(command, stdout=sys.stderr)
    wait_port(options.host, port, server)
    keep([server], address=f"{options.host}:{port}")


if __name__ == "__main__":
    main()
