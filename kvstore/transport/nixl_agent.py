"""One NIXL agent with one back-end: the only file that calls the library. Foreign errors are mapped here.

The library is optional (`pip install kvstore[nixl]`) and slow to import, so it is imported by the first agent. Agents
run without NIXL's progress thread, which would spin: whoever waits for a transfer, or serves one, calls `state` or
`progress`, and only then does anything move.

How a transfer is given up (law 6). NIXL's own release returns at once, while the peer may still write into the buffer
later, and so does forgetting the peer. Only the end of the whole agent settles it: its worker takes its end points
along, and no byte arrives afterwards. So `close` is the one way to end a transfer that is not over, and an agent is
kept small enough to be lost: one for each peer.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import CapacityExhausted, ConfigurationError, ForkedProcess, Unreachable
from kvstore.nixl_library import load_nixl
from kvstore.transport import ReadStatus

logger = logging.getLogger(__name__)
BACKENDS: Final = ("UCX", "LIBFABRIC")
"""What moves bytes between hosts. UCX: RDMA, NVLink, shared memory, TCP. LIBFABRIC: EFA."""
_LOADING = threading.Lock()
_LIVING: weakref.WeakSet[Agent] = weakref.WeakSet()


def is_installed() -> bool:
    """True if the library is there; it is not imported for the answer."""
    return importlib.util.find_spec("nixl") is not None


def rdma_devices() -> tuple[str, ...]:
    """Names of this host's RDMA devices (InfiniBand, RoCE, EFA), as the kernel lists them."""
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def _device_options(backend: str, devices: Sequence[str]) -> dict[str, str]:
    """Back-end options for these devices. UCX gets names without their port, separated by comma AND blank; it passes
    over options that it does not know. Raises ConfigurationError for a port that it cannot be told.
    """
    if not devices:
        return {}
    if backend != "UCX":
        return {"device_list": ",".join(devices)}
    if others := [device for device in devices if device.partition(":")[2] not in ("", "1")]:
        raise ConfigurationError(
            f"NIXL uses port 1 of a device, not {', '.join(others)}: set UCX_NET_DEVICES in the environment instead"
        )
    return {"device_list": ", ".join(device.partition(":")[0] for device in devices)}


def path_name(backend: str) -> str:
    """What is in use, for logs, metrics and `kvstore doctor`: back-end, and what UCX was told to confine itself to."""
    told = os.environ.get("UCX_TLS", "")
    return f"{backend} ({told})" if backend == "UCX" and told else backend


def preload(backend: str) -> None:
    """Load the library and the code of a back-end, which takes half a second, and use neither: a forked child has them.

    Raises ConfigurationError where the library is missing; what the back-end lacks an agent will say.
    """
    library = load_nixl()
    bare = library.api.nixl_agent("preload", library.api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    with suppress(*library.errors):
        bare.get_plugin_params(backend)


class Agent:
    """`name` must be unique among all agents that meet. `devices`: network devices to use, none = all.

    Calls may come from any thread, one at a time; of no use in a forked child. Raises ConfigurationError for a
    back-end or device that this host does not have.
    """

    def __init__(self, name: str, backend: str = "UCX", devices: Sequence[str] = ()) -> None:
        if backend not in BACKENDS:
            raise ConfigurationError(f"unknown NIXL back-end {backend!r}; known: {', '.join(BACKENDS)}")
        options = _device_options(backend, devices)
        with _LOADING:
            library = load_nixl()
        api, self._errors = library.api, library.errors
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self.name = name
        self.backend = backend
        _LIVING.add(self)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        try:
            self._agent: Any = api.nixl_agent(name, config)
            self._agent.create_backend(backend, options)
        except self._errors as exc:
            wanted = f" with devices {', '.join(devices)}" if devices else ""
            raise ConfigurationError(
                f"NIXL cannot use back-end {backend}{wanted} on this host ({exc}); RDMA devices here: "
                f"{', '.join(rdma_devices()) or 'none'}. Name others, or use transport tcp"
            ) from exc

    def register(self, address: int, length_bytes: int, kind: str = "DRAM", device: int = 0) -> Any:
        """Make [address, address + length_bytes) usable; the answer is for `deregister`. `kind`: DRAM or VRAM.

        Raises CapacityExhausted where the system does not allow it.
        """
        with self._calling() as agent:
            try:
                return agent.register_memory([(address, length_bytes, device, "")], kind, [self.backend])
            except self._errors as exc:
                raise CapacityExhausted(
                    f"{length_bytes} bytes could not be registered for the network ({exc}; {_lock_limit()}, RDMA "
                    f"devices: {len(rdma_devices())}, each counts): raise `ulimit -l`, name fewer devices, or make "
                    "the memory smaller"
                ) from exc

    def deregister(self, registration: Any) -> None:
        """End a registration; nothing may be moving there. Raises Unreachable where the library fails."""
        with self._calling() as agent:
            try:
                agent.deregister_memory(registration, [self.backend])
            except self._errors as exc:
                raise Unreachable(f"NIXL: {exc}") from exc

    def metadata(self) -> bytes:
        """What a peer needs to read what is registered now."""
        with self._calling() as agent:
            return bytes(agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """The peer's name. Raises Unreachable where the metadata is of no use here."""
        with self._calling() as agent:
            try:
                name = agent.add_remote_agent(metadata)
            except self._errors as exc:
                raise Unreachable(f"the peer's NIXL metadata does not fit this host ({exc})") from exc
        return name.decode() if isinstance(name, bytes) else str(name)

    def progress(self) -> None:
        """Serve peers for a moment."""
        with self._calling() as agent:
            agent.get_new_notifs()

    def read(self, peer: str, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64], kind: str) -> Transfer:
        """Begin to read. `local`, `remote`: (count, 3) of address, length in bytes, device; parallel.

        `local` is DRAM, `remote` of `kind`. Raises Unreachable where the peer is known to be gone.
        """
        with self._calling() as agent:
            try:
                here, there = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, kind)
                handle = agent.initialize_xfer("READ", here, there, peer, b"", [self.backend])
                transfer = Transfer(self, handle)
                transfer.note(agent.transfer(handle))
            except self._errors as exc:
                raise Unreachable(f"NIXL: {exc}") from exc
            return transfer

    def close(self) -> None:
        """End the agent with everything under way; afterwards no byte arrives any more. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._agent = None

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        if os.getpid() != self._pid:
            raise ForkedProcess("a NIXL agent does not survive a fork; open a client in the child, or use spawn")
        with self._lock:
            if self._agent is None:
                raise Unreachable("the NIXL agent is closed")
            yield self._agent


@atexit.register
def _close_all() -> None:
    """Agents that outlive the interpreter's clean-up crash the process."""
    for agent in list(_LIVING):
        agent.close()


def _leave_to_the_parent() -> None:
    """A forked child must not end its parent's agents, not even at its own end: both share the event sets of their
    sockets, and UCX aborts the process that misses an entry there. So the child never lets go of them.
    """
    for agent in list(_LIVING):
        if agent._agent is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent._agent))


os.register_at_fork(after_in_child=_leave_to_the_parent)


class Transfer:
    """A read under way. `status` None: not over yet."""

    def __init__(self, agent: Agent, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self.status: ReadStatus | None = None
        self.detail = ""

    def note(self, state: str) -> None:
        """Take over what the library says of it."""
        if state == "DONE":
            self.status = ReadStatus.DONE
        elif state != "PROC":
            self.status, self.detail = ReadStatus.UNREACHABLE, f"NIXL: the transfer ended with {state}"

    def poll(self) -> ReadStatus | None:
        """Move it on; what became of it."""
        if self.status is None:
            with self._agent._calling() as agent:
                try:
                    self.note(agent.check_xfer_state(self._handle))
                except self._agent._errors as exc:
                    self.status, self.detail = ReadStatus.UNREACHABLE, f"NIXL: {exc}"
        return self.status

    def end(self) -> None:
        """Give back what the library keeps for it; only when it is over, or its agent is to be closed next."""
        with self._agent._calling():
            try:
                self._handle.release()
            except self._agent._errors as exc:  # it could not be cancelled: the end of the agent settles it
                logger.debug("NIXL: %s", exc)


def _lock_limit() -> str:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "locked memory is not limited" if limit == resource.RLIM_INFINITY else f"locked memory: {limit} bytes"
