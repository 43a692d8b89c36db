"""The owner's side of the `nixl` transport: a process of its own that maps the arena and serves peers' READs.

    python -m kvstore.transport.nixl_owner JOB        started and watched by `nixl_process.py`

Why a process: where READs are not one-sided (TCP), UCX ends the process that serves them with a fatal error when a
peer goes away in the middle of one; a node must outlive its readers. It also keeps the library, which is slow to load
and large, out of the node, and its calls away from the node's interpreter lock.

READs are one-sided where the network is (RDMA, or a process of the same host). Over TCP this side sends the bytes, from
within its calls into the library. So it must call, or its peers wait: often while told that peers read, seldom else.
NIXL's own thread would spin.

JOB is a JSON object: `name`, `epoch`, `arena_fd`, `arena_bytes`, `backend`, `devices`. It answers on standard output
with one line, the data plane (JSON, metadata in base64), or `{"error": text}`. Each byte on standard input says that
peers read; its end, and the parent's, end the process.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import resource
import select
import signal
import sys
import time
from typing import Any, Final

from kvstore.errors import KvStoreError
from kvstore.transport.data_plane import DataPlane
from kvstore.transport.nixl_agent import Agent, rdma_devices

BUSY_PAUSE_S: Final = 0.0005
"""Between two calls while peers read; socket buffers hold what moves meanwhile."""
IDLE_PAUSE_S: Final = 0.1
BUSY_S: Final = 0.3
"""So long after a byte from the parent peers are taken to read; it sends one every 100 ms while they do."""
_PR_SET_PDEATHSIG: Final = 1


def plane_to_json(plane: DataPlane) -> str:
    """One line."""
    return json.dumps(
        {
            "epoch": plane.epoch,
            "backend": plane.backend,
            "agent_metadata": base64.b64encode(plane.agent_metadata).decode(),
            "arena_address": plane.arena_address,
            "arena_bytes": plane.arena_bytes,
            "rdma_devices": list(plane.rdma_devices),
        }
    )


def plane_from_json(fields: dict[str, Any]) -> DataPlane:
    """The inverse."""
    return DataPlane(
        fields["epoch"],
        fields["backend"],
        base64.b64decode(fields["agent_metadata"]),
        fields["arena_address"],
        fields["arena_bytes"],
        tuple(fields["rdma_devices"]),
    )


def serve(agent: Agent, wishes: int) -> None:
    """Serve peers until `wishes` (a descriptor) ends."""
    busy_until_s = time.monotonic() + BUSY_S
    while True:
        agent.progress()
        busy = time.monotonic() < busy_until_s
        if select.select([wishes], [], [], BUSY_PAUSE_S if busy else IDLE_PAUSE_S)[0]:
            if not os.read(wishes, 4096):
                return
            busy_until_s = time.monotonic() + BUSY_S


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """See the module."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it maps the whole arena
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    job = json.loads(sys.argv[1])
    arena = mmap.mmap(job["arena_fd"], job["arena_bytes"])
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    try:
        agent = Agent(f"{job['name']}-{job['epoch']}-{os.getpid()}", job["backend"], job["devices"])
        registration = agent.register(address, job["arena_bytes"])
        plane = DataPlane(job["epoch"], job["backend"], agent.metadata(), address, job["arena_bytes"], rdma_devices())
    except KvStoreError as exc:
        _say(json.dumps({"error": str(exc)}))
        return 1
    _say(plane_to_json(plane))
    serve(agent, sys.stdin.fileno())
    agent.deregister(registration)  # before the memory goes: the library would touch it, and crash
    agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
