"""The pool's memory registered with CUDA, so that copies to and from a device run beside the host.

    session open    node has populated its memory ──► cudaHostRegister of the client's mapping
    session ends    new reads fail ──► copies under way end ──► cudaHostUnregister ──► the mapping goes

The mapping stays as long as it is registered, because `PinnedMapping` holds it. Memory is pinned by whoever registers
it, so registering waits for the node to populate it first: else its pages would be charged to the engine's container.
Without registration everything works, only slower. On CUDA this has never run; tests give it another `Registrar`.
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, Protocol

import torch

from engine_adapter.device_copy import DeviceCopier
from engine_adapter.pieces import Bytes
from kvstore.client.host import HostNode
from kvstore.errors import ConfigurationError, DeadlineExceeded, SessionLost

logger = logging.getLogger(__name__)

PORTABLE: Final = 0x01
"""cudaHostRegisterPortable: pinned for all devices of this process."""
READ_ONLY: Final = 0x08
"""cudaHostRegisterReadOnly: for memory that this process may not write."""
_POLL_S = 0.2


class Registrar(Protocol):
    """The two calls of the CUDA runtime."""

    def register(self, address: int, size_bytes: int, flags: int) -> str:
        """Pin memory; returns why not, "" if it is pinned now."""

    def unregister(self, address: int) -> str:
        """Unpin it; returns why not, "" if it is done."""


class CudaRegistrar:
    """The runtime that torch has loaded."""

    def __init__(self) -> None:
        """Raises ConfigurationError where torch has no CUDA device."""
        if not torch.cuda.is_available():
            raise ConfigurationError("memory is registered for CUDA devices only, and torch finds none here")
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, size_bytes: int, flags: int) -> str:
        """See Registrar."""
        return self._reason(self._runtime.cudaHostRegister(address, size_bytes, flags))

    def unregister(self, address: int) -> str:
        """See Registrar."""
        return self._reason(self._runtime.cudaHostUnregister(address))

    def _reason(self, code: object) -> str:
        number = int(code)  # type: ignore[call-overload]
        return f"CUDA error {number}, {self._runtime.cudaGetErrorString(code)}" if number else ""


class PinnedMapping:
    """Registered memory. `copiers`: all that copy from or to it."""

    def __init__(self, memory: Bytes, copiers: Sequence[DeviceCopier], registrar: Registrar | None = None) -> None:
        """Register `memory` (contiguous). Raises ConfigurationError that says what was wanted and what to change."""
        self._copiers = tuple(copiers)
        self._registrar = CudaRegistrar() if registrar is None else registrar
        self._lock = threading.Lock()
        self._memory: Bytes | None = memory
        flags = PORTABLE if memory.flags.writeable else PORTABLE | READ_ONLY
        reason = self._registrar.register(memory.ctypes.data, memory.nbytes, flags)
        if reason:
            self._memory = None
            raise ConfigurationError(_refused(memory, reason))

    @property
    def is_pinned(self) -> bool:
        """False after `close`."""
        return self._memory is not None

    def close(self) -> None:
        """Wait for copies under way, then unregister. Idempotent; a failure is logged and changes nothing."""
        with self._lock, ExitStack() as stack:
            memory, self._memory = self._memory, None
            if memory is None:
                return
            for copier in self._copiers:
                stack.enter_context(copier.idle())
            reason = self._registrar.unregister(memory.ctypes.data)
            if reason:
                logger.warning("the pool's memory (%d bytes) could not be unregistered: %s", memory.nbytes, reason)


def pin_host(
    host: HostNode, copiers: Sequence[DeviceCopier], *, deadline_s: float, registrar: Registrar | None = None
) -> PinnedMapping:
    """Register the memory of the own host's node as soon as the node has populated it; ends with the session.

    Takes seconds for a large node: call it in a thread of its own. Raises DeadlineExceeded while the node still
    populates, SessionLost, ConfigurationError where memory cannot be registered.
    """
    end_s = time.monotonic() + deadline_s
    while host.populated_bytes(max(0.001, end_s - time.monotonic())) < host.arena.nbytes:
        if time.monotonic() + _POLL_S >= end_s:
            raise DeadlineExceeded(f"node {host.info.node_id} has not populated its memory within {deadline_s} s")
        time.sleep(_POLL_S)
    if not host.alive:
        raise SessionLost(f"the session with node {host.info.node_id} ended")
    pinned = PinnedMapping(host.arena, copiers, registrar)
    host.on_end(pinned.close)
    return pinned


def _refused(memory: Bytes, reason: str) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    what = "" if memory.flags.writeable else " read-only, which not every device can;"
    return (
        f"{memory.nbytes} bytes of the pool's memory cannot be registered with CUDA ({reason});{what} the limit of "
        f"locked memory of this process is {limit}: raise it (`ulimit -l unlimited`, `--ulimit memlock=-1` for a "
        "container, LimitMEMLOCK=infinity for a service) or use a smaller --dram; without it copies work, only slower"
    )
