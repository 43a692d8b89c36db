"""The `nixl` transport, reading side: batched one-sided READs into registered staging. The owner's is `nixl_owner.py`.

    connect   a tcp connection to the node, which proves epoch and secret and tells when the node is gone;
              then, once a peer, its metadata by gRPC and an agent of our own for it, with staging registered there
    payload   one transfer of all descriptors; the calling thread moves it on until it is done
    fence     over the tcp connection, when the transfer has reported its end: the owner reads the words then

The fence is the owner's own look at its words, so it needs no promise of a network card about the order in which
one-sided reads meet the owner's stores.

Connections to one peer share its agent. A read that is given up while bytes may still come takes that agent down
(see `nixl_agent.py`): other reads of that peer fail with it and connect anew, those of other peers do not notice.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import CapacityExhausted, DeadlineExceeded, ForkedProcess, KvStoreError, StaleReference, Unreachable
from kvstore.model.values import NodeInfo
from kvstore.transport import ReadDescriptor, ReadResult, ReadStatus, data_plane
from kvstore.transport.data_plane import Ask, DataPlane
from kvstore.transport.nixl_agent import Agent, Transfer, path_name
from kvstore.transport.read_table import ReadTable
from kvstore.transport.tcp import TcpConnection, TcpTransport

POLLS: Final = 64
"""Looks at a transfer between two looks at the clock."""
EAGER_S: Final = 0.002
EAGER_BYTES_PER_S: Final = 200e6
"""A transfer that keeps this pace is looked at without a pause; a slower one now and then."""
PAUSE_S: Final = 0.0002
END_WAIT_S: Final = 0.5
"""Longest wait for an agent to end after a read was given up."""


class NixlTransport:
    """`staging`: the memory that reads land in, registered with every agent; other memory is registered for each read.

    `credential` (at most 4096 bytes) is shown to each owner. Thread-safe. Raises ConfigurationError, when connecting,
    where NIXL, the back-end or a device is not there.
    """

    name = "nixl"

    def __init__(
        self,
        staging: npt.NDArray[np.uint8] | None = None,
        *,
        backend: str = "UCX",
        devices: Sequence[str] = (),
        credential: bytes = b"",
        ask: Ask = data_plane.ask,
    ) -> None:
        self._staging = staging
        self._backend = backend
        self._devices = tuple(devices)
        self._credential = credential
        self._ask = ask
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._paths: dict[tuple[str, int], _Path] = {}
        self._tcp = TcpTransport(credential)
        self._hooks = _Hooks()

    @property
    def path(self) -> str:
        """Back-end, and what UCX was told to use."""
        return f"nixl {path_name(self._backend)}"

    def prepare(self) -> None:
        """Load the library and try back-end and devices, so that no read waits for that. Raises ConfigurationError."""
        self._agent().close()

    def _agent(self) -> Agent:
        return Agent(f"kvstore-reader-{os.getpid()}-{uuid.uuid4().hex[:12]}", self._backend, self._devices)

    def connect(self, node: NodeInfo, deadline_s: float) -> NixlConnection:
        """See Transport. Raises NotFound where the node offers no NIXL."""
        if os.getpid() != self._pid:
            raise ForkedProcess("a NIXL agent does not survive a fork; open a client in the child, or use spawn")
        end_s = time.monotonic() + deadline_s
        tcp = self._tcp.connect(node, deadline_s)
        try:
            return NixlConnection(self._path_to(node, end_s), tcp, self._hooks)
        except BaseException:
            tcp.close()
            raise

    def _path_to(self, node: NodeInfo, end_s: float) -> _Path:
        """The open path to this incarnation, made by whoever comes first."""
        place = node.node_id, node.epoch
        while True:
            with self._lock:
                path = self._paths.get(place)
                if path is None:
                    path = self._paths[place] = _Path(self._gone)
            try:
                path.open(lambda: self._meet(node, end_s), end_s)
                return path
            except _PathEnded:  # another thread's read took it down meanwhile
                self._gone(path)
                if time.monotonic() >= end_s:
                    raise DeadlineExceeded(f"node {node.node_id} was not reached in time") from None
            except KvStoreError:
                self._gone(path)
                raise

    def close(self) -> None:
        """End all agents. Idempotent; no read may be under way."""
        with self._lock:
            paths, self._paths = list(self._paths.values()), {}
        for path in paths:
            path.fail("the transport is closed")

    def hold_for_tests(
        self, before_payload: Callable[[], None] | None = None, before_fence: Callable[[], None] | None = None
    ) -> None:
        """Call these when a payload transfer has begun, and when it is done, before the words are asked for."""
        self._hooks.before_payload, self._hooks.before_fence = before_payload, before_fence

    def _meet(self, node: NodeInfo, end_s: float) -> _Meeting:
        left_s = max(0.001, end_s - time.monotonic())
        plane = self._ask(node.control_address, node.epoch, self._credential, left_s)
        if plane.epoch != node.epoch:
            raise StaleReference(f"the node's epoch is {plane.epoch}, not {node.epoch}")
        if plane.backend != self._backend:
            raise Unreachable(f"node {node.node_id} offers NIXL over {plane.backend}, this client uses {self._backend}")
        agent = self._agent()
        try:
            if self._staging is not None:
                agent.register(self._staging.ctypes.data, self._staging.nbytes)
            return _Meeting(agent, agent.add_peer(plane.agent_metadata), plane, self._staging)
        except BaseException:
            agent.close()
            raise

    def _gone(self, path: _Path) -> None:
        with self._lock:
            for place, known in list(self._paths.items()):
                if known is path:
                    del self._paths[place]


class _Hooks:
    before_payload: Callable[[], None] | None = None
    before_fence: Callable[[], None] | None = None


class _PathEnded(Exception):
    """The path was taken down."""


class _Meeting:
    """An agent that knows its peer. It keeps alive what is registered with the agent."""

    def __init__(self, agent: Agent, peer: str, plane: DataPlane, staging: npt.NDArray[np.uint8] | None) -> None:
        self.agent = agent
        self.peer = peer
        self.plane = plane
        self._staging = (staging.ctypes.data, staging.ctypes.data + staging.nbytes) if staging is not None else (0, 0)

    def holds(self, memory: npt.NDArray[np.uint8]) -> bool:
        """True if this memory lies in the registered staging."""
        start, stop = self._staging
        return start <= memory.ctypes.data and memory.ctypes.data + memory.nbytes <= stop


class _Path:
    """The agent for one peer and how many reads are using it. `open` makes it; after `fail` it is of no use."""

    def __init__(self, gone: Callable[[_Path], None]) -> None:
        self._gone = gone
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._users = self._connections = 0
        self.meeting: _Meeting | None = None
        self.failed = ""
        self.ended = threading.Event()
        self.remains: list[npt.NDArray[np.uint8]] = []
        """What bytes of reads that were given up may still come to."""

    def open(self, meet: Callable[[], _Meeting], end_s: float) -> None:
        """Meet the peer unless that is done; counts one connection. Raises what `meet` does, DeadlineExceeded."""
        if not self._opening.acquire(timeout=max(0.0, end_s - time.monotonic())):
            raise DeadlineExceeded("another thread is still connecting to this peer")
        try:
            if self.meeting is None and not self.failed:
                self.meeting = meet()
            with self._lock:
                if self.failed:
                    raise _PathEnded
                self._connections += 1
        finally:
            self._opening.release()

    def leave(self) -> None:
        """A connection was closed; the last one ends the path."""
        with self._lock:
            self._connections -= 1
            last = not self._connections
        if last:
            self.fail("all its connections are closed")

    def enter(self) -> _Meeting | None:
        """Begin a read; None if the path has failed."""
        with self._lock:
            if self.failed or self.meeting is None:
                return None
            self._users += 1
            return self.meeting

    def exit(self) -> None:
        """End a read."""
        with self._lock:
            self._users -= 1
        self._end_if_left()

    def fail(self, why: str) -> None:
        """No read begins any more, those under way end at their next look; the last one out ends the agent."""
        with self._lock:
            self.failed = self.failed or why
        self._gone(self)
        self._end_if_left()

    def _end_if_left(self) -> None:
        with self._lock:
            if not self.failed or self._users or self.ended.is_set():
                return
            meeting, self.meeting = self.meeting, None
        if meeting is not None:
            meeting.agent.close()
            self.ended.set()


class NixlConnection:
    """A path to one node incarnation for one thread at a time; `cancel` may come from any other."""

    name = "nixl"

    def __init__(self, path: _Path, tcp: TcpConnection, hooks: _Hooks) -> None:
        self._path = path
        self._tcp = tcp
        self._hooks = hooks
        self._cancelled = self._closed = False
        self._under_way: list[_NixlExchange] = []
        """Posted, and not taken yet."""
        self._asking = threading.Lock()
        """Held by who asks for words, and to close what he asks over."""
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """False once either side has closed, or this side has seen the path fail; sends nothing."""
        return not (self._closed or self._cancelled or self._path.failed) and self._tcp.is_open

    def read(
        self, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8], deadline_s: float
    ) -> ReadResult:
        """See Connection."""
        exchange = self.start(descriptors, staging, deadline_s)
        result = exchange.payload()
        return exchange.fence() if result.status is ReadStatus.DONE else result

    def start(
        self, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8], deadline_s: float
    ) -> _NixlExchange:
        """See Connection; never None."""
        self._check_process()
        end_s = time.monotonic() + deadline_s
        exchange = _NixlExchange(self, ReadTable.of(descriptors, staging), staging, end_s)
        if self._cancelled:
            exchange.failure = ReadStatus.CANCELLED, "cancelled"
            return exchange
        if not len(exchange.table.lengths):
            return exchange
        meeting = self._path.enter() if not self._closed else None
        if meeting is None:
            exchange.failure = ReadStatus.UNREACHABLE, self._path.failed or "the connection is closed"
            return exchange
        self._under_way.append(exchange)
        exchange.begun = True
        exchange.failure = ReadStatus.UNREACHABLE, "the read was interrupted"
        try:
            exchange.failure = exchange.post(meeting)
        except (CapacityExhausted, Unreachable) as exc:  # of a registration
            exchange.failure = ReadStatus.UNREACHABLE, str(exc)
        finally:
            if exchange.failure is not None:
                self._path.fail(exchange.failure[1])
        return exchange

    def take(self, exchange: _NixlExchange) -> ReadResult:
        """Wait for an exchange's payload. If it fails, so do all others under way."""
        status, detail = exchange.failure or (ReadStatus.UNREACHABLE, self._path.failed)
        if exchange in self._under_way:
            try:
                status, detail = exchange.failure or self._arrival(exchange)
            finally:
                if status is ReadStatus.DONE:
                    self._ended(exchange)
                else:
                    self._give_up(detail or "the read was interrupted")
        if status is ReadStatus.DONE:
            return ReadResult(status, (), exchange.table.payload_bytes)
        ended = self._path.ended
        settled = not exchange.begun or ended.wait(END_WAIT_S)
        return ReadResult(status, detail=detail, ended=None if settled else ended.is_set)

    def words(self, exchange: _NixlExchange) -> ReadResult:
        """Ask for an exchange's words; a thread that takes payloads sees a failure at its next look."""
        if self._hooks.before_fence is not None:
            self._hooks.before_fence()
        with self._asking:
            result = self._tcp.fence(exchange.table, exchange.end_s)
        if result.status is not ReadStatus.DONE:
            self._path.fail(result.detail)
        return result

    def _arrival(self, exchange: _NixlExchange) -> tuple[ReadStatus, str]:
        transfer = exchange.transfer
        assert transfer is not None, "it has no failure, so it was posted"
        if self._hooks.before_payload is not None:
            self._hooks.before_payload()
        eager_until_s = time.monotonic() + EAGER_S + exchange.table.payload_bytes / EAGER_BYTES_PER_S
        while True:
            for _ in range(POLLS):
                status = transfer.poll()
                if status is not None:
                    return status, transfer.detail
            now = time.monotonic()
            if self._cancelled:
                return ReadStatus.CANCELLED, "cancelled"
            if self._path.failed:
                return ReadStatus.UNREACHABLE, self._path.failed
            if now >= exchange.end_s:
                return ReadStatus.DEADLINE, "the peer did not deliver in time"
            if now >= eager_until_s:
                if self._tcp.has_ended:
                    return ReadStatus.UNREACHABLE, "the node has gone"
                time.sleep(PAUSE_S)

    def _give_up(self, detail: str) -> None:
        """Nothing of this connection's is waited for any more: the path ends when nobody else uses it."""
        self._path.fail(detail)
        self._path.remains.extend(started.staging for started in self._under_way)
        for started in list(self._under_way):
            self._ended(started)
        self._tcp.cancel()
        self.close()

    def _ended(self, exchange: _NixlExchange) -> None:
        self._under_way.remove(exchange)
        exchange.finish()
        self._path.exit()

    def cancel(self) -> None:
        """End the read that is going on, from another thread: it returns CANCELLED, unless it was done. Idempotent."""
        self._check_process()
        self._cancelled = True
        self._tcp.cancel()

    def close(self) -> None:
        """End the path. Idempotent. Not while another thread reads: `cancel` ends its read, which closes."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._under_way:
            self._give_up("the connection was closed")
        with self._asking:
            self._tcp.close()
        self._path.leave()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("a connection belongs to the process that made it; connect again, or use spawn")


class _NixlExchange:
    """See Exchange. `failure`: it could not be posted. `begun`: something may have been."""

    def __init__(
        self, connection: NixlConnection, table: ReadTable, staging: npt.NDArray[np.uint8], end_s: float
    ) -> None:
        self.table = table
        self.staging = staging
        self.end_s = end_s
        self.failure: tuple[ReadStatus, str] | None = None
        self.begun = False
        self.transfer: Transfer | None = None
        self._connection = connection
        self._agent: Agent | None = None
        self._registration: Any = None

    def payload(self) -> ReadResult:
        """See Exchange."""
        if self.failure is None and not len(self.table.lengths):
            return ReadResult(ReadStatus.DONE)
        return self._connection.take(self)

    def fence(self) -> ReadResult:
        """See Exchange."""
        return self._connection.words(self) if len(self.table.lengths) else ReadResult(ReadStatus.DONE)

    def post(self, meeting: _Meeting) -> tuple[ReadStatus, str] | None:
        """Begin the transfer; None, or why that cannot be. Raises CapacityExhausted, Unreachable."""
        table, plane, staging = self.table, meeting.plane, self.staging
        if table.outside(plane.arena_bytes):
            return ReadStatus.REFUSED, f"a range or slot does not lie in the arena of {plane.arena_bytes} bytes"
        if time.monotonic() >= self.end_s:
            return ReadStatus.DEADLINE, "no time was left"
        if not meeting.holds(staging):
            self._agent = meeting.agent
            self._registration = meeting.agent.register(staging.ctypes.data, staging.nbytes)
        local = _columns(table.places + staging.ctypes.data, table.lengths)
        remote = _columns(table.offsets + plane.arena_address, table.lengths)
        self.transfer = meeting.agent.read(meeting.peer, local, remote, "DRAM")
        return None

    def finish(self) -> None:
        """Give back what the library keeps for it: it is over, or the agent ends next, which nothing here may keep."""
        transfer, agent, self.transfer, self._agent = self.transfer, self._agent, None, None
        if transfer is not None:
            transfer.end()
            if agent is not None and transfer.status is ReadStatus.DONE:
                agent.deregister(self._registration)
        self._registration = None


def _columns(addresses: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """(count, 3) of address, length, device 0: the library's form of descriptors."""
    return np.column_stack((addresses, lengths, np.zeros(len(lengths), dtype=np.int64))).astype(np.uint64)
