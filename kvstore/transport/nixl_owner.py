"""The owner's side of the `nixl` transport: processes of their own that map the arena and serve peers' READs.

    python -m kvstore.transport.nixl_owner JOB        started and watched by `nixl_process.py`
     └ loads the library, uses nothing of it, and forks (`forking.py`)
        └ the process that serves

Why a process: where READs are not one-sided (TCP), UCX ends the process that serves them with a fatal error when a
peer goes away in the middle of one; a node must outlive its readers, and the next process must serve at once. It also
keeps the library, which is large, out of the node, and its calls away from the node's interpreter lock.

READs are one-sided where the network is (RDMA, or a process of the same host). Over TCP this side sends the bytes, from
within its calls into the library. So it must call, or its peers wait: often while told that peers read, seldom else.
NIXL's own thread would spin.

JOB is a JSON object: `parent` (its process), `name`, `epoch`, `arena_fd`, `arena_bytes`, `backend`, `devices`. What
it says is a JSON object a line: `{"pid": number, "plane": data plane}` (metadata in base64) from each process
that serves, `{"refused": text}` from one that cannot, `{"down": text}` when one ended. Each byte on standard input says
that peers read; its end, and the parent's, end all of it.
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
from functools import partial
from typing import Any, Final

from kvstore.errors import KvStoreError
from kvstore.nixl_library import leave_out_torch
from kvstore.transport.data_plane import DataPlane
from kvstore.transport.forking import SAID_WHY, Beat, ForkingServer, die_with_parent, thread_count
from kvstore.transport.nixl_agent import Agent, preload, rdma_devices

BUSY_PAUSE_S: Final = 0.0005
"""Between two calls while peers read; socket buffers hold what moves meanwhile."""
IDLE_PAUSE_S: Final = 0.1
BUSY_S: Final = 0.3
"""So long after a byte from the parent peers are taken to read; it sends one every 100 ms while they do."""


def plane_to_json(plane: DataPlane) -> dict[str, Any]:
    """What JSON can hold."""
    return {
        "epoch": plane.epoch,
        "backend": plane.backend,
        "agent_metadata": base64.b64encode(plane.agent_metadata).decode(),
        "arena_address": plane.arena_address,
        "arena_bytes": plane.arena_bytes,
        "rdma_devices": list(plane.rdma_devices),
    }


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


def serve(agent: Agent, wishes: int, beat: Beat) -> None:
    """Serve peers until `wishes` (a descriptor) ends."""
    busy_until_s = time.monotonic() + BUSY_S
    while True:
        agent.progress()
        beat.strike()
        busy = time.monotonic() < busy_until_s
        if select.select([wishes], [], [], BUSY_PAUSE_S if busy else IDLE_PAUSE_S)[0]:
            if not os.read(wishes, 4096):
                return
            busy_until_s = time.monotonic() + BUSY_S


def say(**message: Any) -> None:
    """One line to the parent; begun anew, because a process that was killed may have left half of one."""
    sys.stdout.write("\n" + json.dumps(message) + "\n")
    sys.stdout.flush()


def serve_job(job: dict[str, Any], beat: Beat) -> int:
    """Offer the arena until standard input ends; returns the exit status."""
    arena = mmap.mmap(job["arena_fd"], job["arena_bytes"])
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    try:
        agent = Agent(f"{job['name']}-{job['epoch']}-{os.getpid()}", job["backend"], job["devices"])
        registration = agent.register(address, job["arena_bytes"])
        plane = DataPlane(job["epoch"], job["backend"], agent.metadata(), address, job["arena_bytes"], rdma_devices())
    except KvStoreError as exc:
        say(refused=str(exc))
        return SAID_WHY
    beat.strike()
    say(pid=os.getpid(), plane=plane_to_json(plane))
    serve(agent, sys.stdin.fileno(), beat)
    agent.deregister(registration)  # before the memory goes: the library would touch it, and crash
    agent.close()
    return 0


def main() -> int:
    """See the module."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it maps the whole arena
    job = json.loads(sys.argv[1])
    die_with_parent(job["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    leave_out_torch()
    try:
        preload(job["backend"])
    except KvStoreError as exc:
        say(refused=str(exc))
        return 1
    if thread_count() > 1:  # a fork would leave the locks of the others locked for good: serve here
        return serve_job(job, Beat())
    return ForkingServer(partial(serve_job, job), sys.stdin.fileno(), lambda how: say(down=how)).run()


if __name__ == "__main__":
    sys.exit(main())
