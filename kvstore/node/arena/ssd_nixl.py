"""Payloads to and from the SSD file by NIXL's POSIX plug-in: io_uring, or libaio where the kernel refuses that.

    caller's thread      descriptors of all its runs -> order -> waits
    owner's thread       posts orders, looks after what is under way, tells callers

One agent, used by the owner's thread alone: the plug-in moves on when it is asked how far it is. Between two looks the
owner sleeps, the longer the longer nothing ends, so that no core is spent on waiting.

What NIXL fails is done once more by system calls. They say why it fails, go on after a transfer that was cut short, and
move memory that is not of the DRAM arena; so all errors are theirs. Where they succeed, NIXL is at fault, and it is
not used any more.

An operation ends when the plug-in says so and never for want of time: until then the disk may still write into the
memory. A handle in flight is never released, because the plug-in would forget an operation that goes on. After an error
that nobody thought of, the owner takes no orders any more and sees out what is under way. Where it cannot even do that
it ends, and what was under way fails: the kernel lets a thread go only when what it gave to io_uring is over.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigurationError, ForkedProcess, KvStoreError, StorageFailed
from kvstore.nixl_library import NixlLibrary, load_nixl
from kvstore.node.arena import Buffer, Run
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_io import ThreadedIo

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

QUEUES: Final = MappingProxyType({"use_uring": "io_uring", "use_aio": "libaio"})
"""Parameters of the plug-in, the better one first, and what they mean."""
_PLUGIN: Final = "POSIX"
_LEAST_PAUSE_S: Final = 50e-6
_MOST_PAUSE_S: Final = 1e-3
_STILL_S: Final = 1.0
"""After so long without an end the disk stands still, and"""
_STILL_PAUSE_S: Final = 20e-3
"""is looked at so often."""
_WARN_S: Final = 30.0
_END_S: Final = 10.0
_numbers = itertools.count(1)


@dataclass(slots=True, eq=False)
class _Transfer:
    """An order: rows of (address or offset, bytes, 0 or descriptor). `ended`: no byte of it moves any more."""

    operation: str
    memory: npt.NDArray[np.uint64]
    file: npt.NDArray[np.uint64]
    ended: threading.Event = field(default_factory=threading.Event)
    state: str = "ERR"
    """DONE, PROC (under way) or ERR, as NIXL has it; or LOST: nobody can ask how it stands."""
    handle: Any = None
    began_s: float = 0.0


class NixlIo:
    """See `SsdIo`. `memory`: what is registered, the whole DRAM arena."""

    def __init__(self, arena: SsdArena, memory: Bytes, library: NixlLibrary, agent: Any, queue_name: str) -> None:
        self._arena = arena
        self._calls = ThreadedIo(arena)
        self._errors = library.errors
        self._agent: Any = agent
        self._queue_name = queue_name
        self._pid = os.getpid()
        self._start = _address(memory)
        self._stop = self._start + len(memory)
        self._is_retired = False
        self._registered = [
            agent.register_memory([(self._start, len(memory), 0, "")], "DRAM", [_PLUGIN]),
            agent.register_memory([(0, arena.size_bytes, arena.descriptor, "")], "FILE", [_PLUGIN]),
        ]
        self._unposted: list[Any] = []
        """Handles whose posting failed: the plug-in may hold on to them. Its queue is never full: it has room for
        65,536 pieces, and a tier's 16 threads have at most 1,024 under way each."""
        self._lock = threading.Lock()
        self._orders: deque[_Transfer | None] = deque()
        self._under_way: list[_Transfer] = []
        self._has_orders = threading.Event()
        self._owner = threading.Thread(target=self._own, name="kvstore-ssd-nixl", daemon=True)
        self._owner.start()

    @classmethod
    def open(cls, arena: SsdArena, memory: Bytes) -> NixlIo:
        """Raises ConfigurationError where NIXL, its plug-in or both kinds of queue are missing."""
        library = load_nixl()
        agent, queue_name = make_agent(library)
        try:
            return cls(arena, memory, library, agent, queue_name)
        except library.errors as exc:
            raise ConfigurationError(
                f"NIXL does not take the SSD file {arena.path}: {exc}; use ssd_io threads"
            ) from exc

    @property
    def name(self) -> str:
        """See `SsdIo`."""
        return "threads" if self._is_retired else "nixl"

    @property
    def detail(self) -> str:
        """See `SsdIo`."""
        return "threads (NIXL failed)" if self._is_retired else f"nixl ({self._queue_name})"

    def read(self, runs: Sequence[Run]) -> list[KvStoreError | None]:
        """See `SsdIo`."""
        return self._move("READ", runs, self._calls.read)

    def write(self, runs: Sequence[Run]) -> list[KvStoreError | None]:
        """See `SsdIo`."""
        return self._move("WRITE", runs, self._calls.write)

    def _move(
        self, operation: str, runs: Sequence[Run], again: Callable[[Sequence[Run]], list[KvStoreError | None]]
    ) -> list[KvStoreError | None]:
        if os.getpid() != self._pid:
            raise ForkedProcess(f"{self._arena.path} was opened by process {self._pid}: open it in this one, or spawn")
        transfer = self._transfer(operation, runs)
        if transfer is None or not self._order(transfer):
            return again(runs)
        if not transfer.ended.wait(_WARN_S):
            logger.warning("%s: a %s has not ended in %g s", self._arena.path, operation.lower(), _WARN_S)
            transfer.ended.wait()  # without a bound: the memory is in use until then
        if transfer.state == "DONE":
            return [None] * len(runs)
        if transfer.state == "LOST":
            return [self._lost(operation)] * len(runs)
        errors = again(runs)
        if not any(errors):
            self._retire(operation)
        return errors

    def _transfer(self, operation: str, runs: Sequence[Run]) -> _Transfer | None:
        """The order for these runs; None where there are none, or a piece of memory is not registered."""
        pieces = [(_address(piece), len(piece)) for run in runs for piece in run.pieces]
        if not pieces or not all(self._start <= address and address + size <= self._stop for address, size in pieces):
            return None
        memory = np.zeros((len(pieces), 3), dtype=np.uint64)
        file = np.zeros((len(pieces), 3), dtype=np.uint64)
        memory[:, :2] = pieces
        file[:, 0] = [
            run.offset + before for run in runs for before in itertools.accumulate(map(len, run.pieces[:-1]), initial=0)
        ]
        file[:, 1] = memory[:, 1]
        file[:, 2] = self._arena.descriptor
        ends = file[:, 0] + file[:, 1]
        assert self._arena.slots_start <= file[:, 0].min() and ends.max() <= self._arena.size_bytes
        return _Transfer(operation, memory, file)

    def _order(self, transfer: _Transfer) -> bool:
        """False where nobody takes orders any more."""
        with self._lock:
            if self._is_retired:
                return False
            self._tell(transfer)
            return True

    def _tell(self, order: _Transfer | None) -> None:
        """`order` None: end when nothing is under way."""
        self._orders.append(order)
        self._has_orders.set()

    def _retire(self, operation: str) -> None:
        with self._lock:
            is_first, self._is_retired = not self._is_retired, True
        if is_first:
            logger.warning(
                "%s: NIXL failed a %s that system calls did: pages go by threads from now on",
                self._arena.path,
                operation.lower(),
            )

    def _lost(self, operation: str) -> StorageFailed:
        """What a transfer is told that the owner left behind; not before the owner's thread is gone."""
        task, ends_s = Path(f"/proc/self/task/{self._owner.native_id}"), time.monotonic() + _WARN_S
        while task.exists() and time.monotonic() < ends_s:
            time.sleep(_STILL_PAUSE_S)
        return StorageFailed(
            f"{self._arena.path}: a {operation.lower()} was lost, because NIXL failed in a way that nobody thought of "
            "(see the log): restart the node, and use ssd_io threads if it happens again"
        )

    def close(self) -> None:
        """See `SsdIo`."""
        self._is_retired = True
        self._tell(None)
        self._owner.join(_END_S)
        if self._owner.is_alive():
            logger.warning("%s: NIXL is still busy; it is left alone", self._arena.path)
            return
        self._unposted.clear()
        for registered in self._registered:
            self._agent.deregister_memory(registered, [_PLUGIN])
        self._registered.clear()
        self._agent = None

    # --- the owner's thread ------------------------------------------------------------------------------

    def _own(self) -> None:
        try:
            self._serve()
        finally:  # also after an error that nobody thought of: what was not posted goes by system calls
            with self._lock:
                self._is_retired = True
            while self._orders:
                if (order := self._orders.popleft()) is not None:
                    order.ended.set()
            self._see_out()

    def _serve(self) -> None:
        is_closing = False
        while self._under_way or not is_closing:
            self._wait()
            while self._orders:
                order = self._orders.popleft()
                if order is None:
                    is_closing = True
                else:
                    self._under_way.append(order)
                    self._post(order)
            self._look_at_all()

    def _see_out(self) -> None:
        """End what is under way, however that can be done."""
        try:
            while self._under_way:
                time.sleep(_pause_s(self._under_way) or 0.0)
                self._look_at_all()
        finally:
            for transfer in self._under_way:
                if not transfer.ended.is_set():
                    transfer.state = "LOST"
                    transfer.ended.set()

    def _look_at_all(self) -> None:
        for transfer in self._under_way:
            if transfer.state == "PROC":
                self._look(transfer)
            if transfer.state != "PROC":
                self._end(transfer)
        self._under_way = [each for each in self._under_way if each.state == "PROC"]

    def _wait(self) -> None:
        """For orders, or until it is time for a look at what is under way.

        Not `SimpleQueue.get(timeout=…)`: io_uring wakes this thread by signals, and a get that is woken at the end of
        its time waits for ever (CPython 3.11).
        """
        self._has_orders.wait(_pause_s(self._under_way))
        self._has_orders.clear()

    def _post(self, transfer: _Transfer) -> None:
        agent = self._agent
        transfer.began_s = time.monotonic()
        try:
            memory, file = agent.get_xfer_descs(transfer.memory, "DRAM"), agent.get_xfer_descs(transfer.file, "FILE")
            transfer.handle = agent.initialize_xfer(transfer.operation, memory, file, agent.name, b"", [_PLUGIN])
            transfer.state = "PROC"  # also where this call fails as nobody expects
            transfer.state = agent.transfer(transfer.handle)
        except self._errors as exc:
            transfer.state = "ERR"
            self._unposted.append(transfer.handle)
            transfer.handle = None
            logger.debug("%s: NIXL: %r", self._arena.path, exc)

    def _look(self, transfer: _Transfer) -> None:
        try:
            transfer.state = self._agent.check_xfer_state(transfer.handle)
        except self._errors as exc:
            transfer.state = "ERR"
            logger.debug("%s: NIXL: %r", self._arena.path, exc)

    def _end(self, transfer: _Transfer) -> None:
        handle, transfer.handle = transfer.handle, None
        if handle is not None:
            try:
                handle.release()
            except self._errors as exc:  # the library keeps it then; whoever waits must not wait for that
                self._unposted.append(handle)
                logger.debug("%s: NIXL: %r", self._arena.path, exc)
        transfer.ended.set()


def _pause_s(under_way: Sequence[_Transfer]) -> float | None:
    """Time until the next look; None: there is nothing to look at."""
    if not under_way:
        return None
    now_s = time.monotonic()
    moving_s = [age_s for each in under_way if (age_s := now_s - each.began_s) < _STILL_S]
    return min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, max(moving_s) / 4)) if moving_s else _STILL_PAUSE_S


def _address(memory: Bytes | Buffer) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])


def make_agent(library: NixlLibrary, queues: Mapping[str, str] = QUEUES) -> tuple[Any, str]:
    """An agent with the plug-in, and the kind of its queue. Raises ConfigurationError where the kernel refuses all."""
    for parameter, queue_name in queues.items():
        settings = library.api.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = library.api.nixl_agent(f"kvstore-ssd-{os.getpid()}-{next(_numbers)}", settings)
        try:
            agent.create_backend(_PLUGIN, {parameter: "true"})
        except library.errors as exc:
            logger.info("NIXL's plug-in %s has no %s here: %s", _PLUGIN, queue_name, exc)
        else:
            return agent, queue_name
    raise ConfigurationError(
        f"NIXL {library.version} has neither io_uring nor libaio here: allow io_uring_setup or io_setup in the "
        "container's seccomp profile (and see /proc/sys/kernel/io_uring_disabled), or use ssd_io threads"
    )
