"""Does NIXL work on this host? Run as a process, because native libraries may end it: one JSON line.

python -m kvstore.transport.nixl_probe [BACKEND]      {"ok": bool, "detail": text, "rdma_devices": [names]}
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from contextlib import closing

import numpy as np

from kvstore.errors import KvStoreError
from kvstore.transport import ReadStatus
from kvstore.transport.nixl_agent import Agent, path_name, rdma_devices
from kvstore.transport.nixl_process import NixlProcess

READ_S = 10.0


def read_a_page(backend: str) -> str:
    """Read one page out of another process; empty if it arrived, else why not. Raises ConfigurationError."""
    arena_fd = os.memfd_create("kvstore-probe", os.MFD_CLOEXEC)
    payload = os.urandom(mmap.PAGESIZE)
    os.pwrite(arena_fd, payload, 0)
    into = np.zeros(len(payload), dtype=np.uint8)
    owner = NixlProcess("probe", 1, arena_fd, len(payload), backend=backend)
    try:
        with closing(Agent(f"probe-{os.getpid()}", backend)) as agent:
            agent.register(into.ctypes.data, into.nbytes)
            plane = owner.plane()
            local = np.array([[into.ctypes.data, into.nbytes, 0]], dtype=np.uint64)
            remote = np.array([[plane.arena_address, into.nbytes, 0]], dtype=np.uint64)
            transfer = agent.read(agent.add_peer(plane.agent_metadata), local, remote, "DRAM")
            ends_at_s = time.monotonic() + READ_S
            while transfer.poll() is None and time.monotonic() < ends_at_s:
                owner.wake()
            if transfer.status is not ReadStatus.DONE:
                return transfer.detail or f"nothing arrived within {READ_S:g} s"
            return "" if into.tobytes() == payload else "other bytes arrived"
    finally:
        owner.stop()
        os.close(arena_fd)


def main() -> None:
    """See the module."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "UCX"
    try:
        fault = read_a_page(backend)
    except KvStoreError as exc:
        fault = str(exc)
    answer = {"ok": not fault, "detail": fault or path_name(backend), "rdma_devices": rdma_devices()}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
