"""What every transport promises. A transport's test module subclasses `TransportSuite` and gives it owners.

Arena bytes are random from a fixed seed; staging is poisoned before a read, so that a byte that nobody should
have written, or that is missing, is seen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.errors import DeadlineExceeded, InvalidRequest, StaleReference, Unreachable
from kvstore.model.values import NodeInfo
from kvstore.transport import SLOT_UNIT_BYTES, Connection, Exchange, ReadDescriptor, ReadStatus, Transport
from tests.contract.transport_owner import (
    ARENA_BYTES,
    EPOCH,
    POISON,
    Owner,
    at,
    descriptor,
    expected_staging,
    poisoned,
)


class TransportSuite:
    """Needs the fixtures `transport`, `owner` (this process) and `owner_process` (a process of its own).

    `needs_owner` False: the owner's process has no part in moving a payload, so that one which is stopped delays nobody
    before the fence.
    """

    needs_owner = True

    @pytest.fixture
    def transport(self) -> Transport:
        raise NotImplementedError

    @pytest.fixture
    def connect(self, transport: Transport) -> Iterator[Callable[[Owner], Connection]]:
        """Connects to an owner; what it made is closed after the test."""
        with contextlib.ExitStack() as made:

            def connect(owner: Owner) -> Connection:
                connection = transport.connect(self.node(owner), 5.0)
                made.callback(connection.close)
                return connection

            yield connect

    @pytest.fixture
    def connection(self, connect: Callable[[Owner], Connection], owner: Owner) -> Connection:
        return connect(owner)

    def node(self, owner: Owner, epoch: int = EPOCH) -> NodeInfo:
        return at(owner.address, epoch, owner.control_address)

    def check_read(self, connection: Connection, owner: Owner, descriptors: Sequence[ReadDescriptor]) -> None:
        staging = poisoned(max(d.staging_offset + d.length for d in descriptors) + 4096)
        result = connection.read(descriptors, staging, 10.0)
        assert result.status is ReadStatus.DONE, result.detail
        assert result.payload_bytes == sum(d.length for d in descriptors)
        assert result.generations == tuple(int(owner.words[d.slot]) for d in descriptors)
        np.testing.assert_array_equal(staging, expected_staging(owner.arena, descriptors, len(staging)))

    def reconnected(self, connect: Callable[[Owner], Connection], owner: Owner) -> Connection:
        """A connection that serves, to an owner that may need a moment, at most 20 s, to serve again."""
        pause, deadline = threading.Event(), time.monotonic() + 20
        while True:
            try:
                connection = connect(owner)
                if connection.read([descriptor(0, 1, 0)], poisoned(1), 5.0).status is ReadStatus.DONE:
                    return connection
            except Unreachable:
                pass
            assert time.monotonic() < deadline
            pause.wait(0.05)

    def check_closes(self, connection: Connection) -> None:
        """The owner's end is heard of within 10 s, without a read."""
        pause, deadline = threading.Event(), time.monotonic() + 10
        while connection.is_open:
            assert time.monotonic() < deadline
            pause.wait(0.01)

    def skip_if_one_sided(self) -> None:
        if not self.needs_owner:
            pytest.skip("this path reads a stopped owner's memory as well")

    # -- right bytes ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 65536, (3 << 20) + 1])
    @pytest.mark.parametrize("offset", [0, 1, 4096, 8191])
    def test_any_size_and_alignment(self, connection: Connection, owner: Owner, length: int, offset: int) -> None:
        self.check_read(connection, owner, [descriptor(offset, length, 64)])

    def test_the_last_byte_of_the_arena(self, connection: Connection, owner: Owner) -> None:
        self.check_read(connection, owner, [descriptor(ARENA_BYTES - 1, 1, 0)])
        self.check_read(connection, owner, [descriptor(0, ARENA_BYTES, 0)])

    @pytest.mark.parametrize("seed", range(5))
    def test_random_descriptors(self, connection: Connection, owner: Owner, seed: int) -> None:
        rng = np.random.default_rng(seed)
        descriptors, place = [], 0
        for _ in range(60):
            length = int(2 ** rng.uniform(0, 17))
            place += int(rng.integers(0, 3)) * 100
            descriptors.append(descriptor(int(rng.integers(0, ARENA_BYTES - length)), length, place))
            place += length
        order = rng.permutation(len(descriptors))
        self.check_read(connection, owner, [descriptors[index] for index in order])

    def test_many_small_descriptors(self, connection: Connection, owner: Owner) -> None:
        rng = np.random.default_rng(5)
        offsets = rng.integers(0, ARENA_BYTES - 256, 5000)
        self.check_read(connection, owner, [descriptor(int(at), 256, 300 * i) for i, at in enumerate(offsets)])

    def test_neighbours_on_one_or_both_sides(self, connection: Connection, owner: Owner) -> None:
        both = [descriptor(i * 8192, 8192, i * 8192) for i in range(20)]
        arena_only = [descriptor(i * 8192, 8192, i * 9000) for i in range(20)]
        staging_only = [descriptor(i * 9000, 8192, i * 8192) for i in range(20)]
        backwards = [descriptor(i * 8192, 8192, (19 - i) * 8192) for i in range(20)]
        for descriptors in (both, arena_only, staging_only, backwards, both[::-1], both[::2]):
            self.check_read(connection, owner, descriptors)

    def test_one_range_into_two_places(self, connection: Connection, owner: Owner) -> None:
        self.check_read(connection, owner, [descriptor(5000, 3000, 0), descriptor(5000, 3000, 3000)])

    def test_reads_follow_each_other(self, connection: Connection, owner: Owner) -> None:
        for index in range(20):
            self.check_read(connection, owner, [descriptor(index * 4096, 4096, 0)])

    def test_nothing_asked(self, connection: Connection) -> None:
        staging = poisoned(10)
        result = connection.read([], staging, 1.0)
        assert (result.status, result.generations, result.payload_bytes) == (ReadStatus.DONE, (), 0)
        assert (staging == POISON).all()

    def test_connections_side_by_side(self, connect: Callable[[Owner], Connection], owner: Owner) -> None:
        failures: list[BaseException] = []

        def work(start: int) -> None:
            try:
                mine = connect(owner)
                for index in range(10):
                    self.check_read(mine, owner, [descriptor(start + index * 4096, 100_000, 0)])
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(i << 20,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures

    # -- the fence --------------------------------------------------------------------------------------------

    def test_a_slot_reused_behind_the_payload_shows_its_new_generation(
        self, connection: Connection, owner: Owner
    ) -> None:
        """A15: whoever compares with the generation that he was promised rejects what he got."""

        def reuse() -> None:
            owner.words[16] = 2002
            owner.arena[16 * SLOT_UNIT_BYTES : 32 * SLOT_UNIT_BYTES] = 0xEE

        owner.words[16] = 2000
        owner.after_payload(reuse)
        result = connection.read([descriptor(16 * SLOT_UNIT_BYTES, 65536, 0)], poisoned(65536), 5.0)
        assert result.status is ReadStatus.DONE
        assert result.generations == (2002,)

    def test_words_come_in_the_order_of_the_descriptors(self, connection: Connection, owner: Owner) -> None:
        slots = [9, 3, 9, 0, 3]
        result = connection.read([ReadDescriptor(s, 0, 8, 8 * i) for i, s in enumerate(slots)], poisoned(64), 5.0)
        assert result.generations == tuple(int(owner.words[slot]) for slot in slots)

    # -- several under way ------------------------------------------------------------------------------------

    def started(
        self, connection: Connection, descriptors: Sequence[ReadDescriptor], deadline_s: float = 10.0
    ) -> tuple[Exchange, npt.NDArray[np.uint8]]:
        staging = poisoned(max(d.staging_offset + d.length for d in descriptors))
        exchange = connection.start(descriptors, staging, deadline_s)
        assert exchange is not None
        return exchange, staging

    def test_the_next_payload_is_asked_for_while_one_arrives(self, connection: Connection, owner: Owner) -> None:
        """Each has its own bytes and words, whenever its words are asked for."""
        plans = [[descriptor(i << 20, 1 << 20, 0), descriptor(i << 12, 4096, 1 << 20)] for i in range(6)]
        under_way = deque([self.started(connection, plans[0])])
        for number, plan in enumerate(plans):
            if number + 1 < len(plans):
                under_way.append(self.started(connection, plans[number + 1]))
            exchange, staging = under_way.popleft()
            result = exchange.payload()
            assert (result.status, result.generations) == (ReadStatus.DONE, ()), result.detail
            assert result.payload_bytes == (1 << 20) + 4096
            np.testing.assert_array_equal(staging, expected_staging(owner.arena, plan, len(staging)))
            result = exchange.fence()
            assert result.generations == tuple(int(owner.words[d.slot]) for d in plan), result.detail
        self.check_read(connection, owner, plans[0])
        assert connection.is_open

    def test_words_are_asked_for_by_another_thread_while_payloads_move(
        self, connection: Connection, owner: Owner
    ) -> None:
        answers = []
        with ThreadPoolExecutor(1) as other:
            exchange, _ = self.started(connection, [descriptor(0, 1 << 20, 0)])
            for number in range(1, 30):
                following, _ = self.started(connection, [descriptor(number << 12, 1 << 20, 0)])
                assert exchange.payload().status is ReadStatus.DONE
                answers.append(other.submit(exchange.fence))
                exchange = following
            assert exchange.payload().status is ReadStatus.DONE
            answers.append(other.submit(exchange.fence))
        assert [one.result().generations for one in answers] == [(int(owner.words[i]),) for i in range(30)]

    def test_words_are_those_of_the_moment_when_they_are_asked_for(self, connection: Connection, owner: Owner) -> None:
        """A15: also of an exchange that another one has followed."""
        first, _ = self.started(connection, [descriptor(0, 4096, 0)])
        second, _ = self.started(connection, [descriptor(4096, 4096, 0)])
        assert first.payload().status is second.payload().status is ReadStatus.DONE
        owner.words[0], owner.words[1] = 2002, 2004
        assert (first.fence().generations, second.fence().generations) == ((2002,), (2004,))

    def test_one_that_fails_takes_the_others_along(self, connect: Callable[[Owner], Connection], owner: Owner) -> None:
        """An owner refuses the second; the third never ends otherwise than refused or unreachable."""
        connection = connect(owner)
        good, staging = self.started(connection, [descriptor(0, 4096, 0)])
        bad = connection.start([ReadDescriptor(0, ARENA_BYTES, 1, 0)], poisoned(8), 5.0)
        later = connection.start([descriptor(0, 4096, 0)], untouched := poisoned(4096), 5.0)
        assert bad is not None and later is not None
        first = good.payload()  # a transport may refuse before it has taken anything
        if first.status is ReadStatus.DONE:
            assert (staging == owner.arena[:4096]).all()
        assert bad.payload().status in (ReadStatus.REFUSED, ReadStatus.UNREACHABLE)
        assert later.payload().status is ReadStatus.UNREACHABLE
        assert (untouched == POISON).all()
        assert not connection.is_open
        self.check_read(self.reconnected(connect, owner), owner, [descriptor(0, 4096, 0)])

    def test_cancel_ends_all_of_them(self, connect: Callable[[Owner], Connection], owner_process: Owner) -> None:
        """Nobody may wait for the others' deadlines, and no byte of any comes later."""
        self.skip_if_one_sided()
        connection = connect(owner_process)
        for exchange, _ in [self.started(connection, [descriptor(0, 4096, 0)]) for _ in range(2)]:
            assert exchange.payload().status is exchange.fence().status is ReadStatus.DONE
        owner_process.pause()
        under_way = [self.started(connection, [descriptor(0, 1 << 20, 0)], 20.0) for _ in range(2)]
        canceller = threading.Timer(0.1, connection.cancel)
        canceller.start()
        started = time.monotonic()
        results = [exchange.payload() for exchange, _ in under_way]
        canceller.join()
        assert time.monotonic() - started < 10.0
        assert results[0].status is ReadStatus.CANCELLED
        assert results[1].status in (ReadStatus.CANCELLED, ReadStatus.UNREACHABLE)
        for result, (_, staging) in zip(results, under_way, strict=True):
            assert result.ended is None or result.ended()
            staging[:] = 0x3C
        owner_process.resume()
        self.check_read(self.reconnected(connect, owner_process), owner_process, [descriptor(0, 4096, 0)])
        assert all((staging == 0x3C).all() for _, staging in under_way)

    def test_a_connection_that_is_closed_leaves_nothing_under_way(
        self, connect: Callable[[Owner], Connection], owner: Owner
    ) -> None:
        connection = connect(owner)
        under_way = [self.started(connection, [descriptor(0, 1 << 20, 0)]) for _ in range(2)]
        connection.close()
        for _, staging in under_way:
            staging[:] = 0x3C
        self.check_read(self.reconnected(connect, owner), owner, [descriptor(0, 4096, 0)])
        assert all((staging == 0x3C).all() for _, staging in under_way)

    # -- refused ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("slot", "offset", "length"),
        [
            (0, ARENA_BYTES, 1),
            (0, ARENA_BYTES - 1, 2),
            (0, 0, ARENA_BYTES + 1),
            (0, (1 << 63) - 1, 4096),
            (ARENA_BYTES // SLOT_UNIT_BYTES, 0, 4096),
            ((1 << 32) - 1, 0, 4096),
        ],
    )
    def test_outside_the_arena(
        self,
        connect: Callable[[Owner], Connection],
        connection: Connection,
        owner: Owner,
        slot: int,
        offset: int,
        length: int,
    ) -> None:
        """A15 (e). The owner refuses, ends this connection only, and gives no words."""
        result = connection.read([ReadDescriptor(slot, offset, length, 0)], poisoned(ARENA_BYTES + 4096), 5.0)
        assert (result.status, result.generations) == (ReadStatus.REFUSED, ())
        assert "arena" in result.detail
        assert connection.read([descriptor(0, 1, 0)], poisoned(1), 1.0).status is ReadStatus.UNREACHABLE
        self.check_read(connect(owner), owner, [descriptor(0, 4096, 0)])

    @pytest.mark.parametrize(("length", "place"), [(11, 0), (1, 10), (5, 6), (1, -1), (0, 0), (-1, 0)])
    def test_outside_staging(self, connection: Connection, owner: Owner, length: int, place: int) -> None:
        """The caller's mistake: raised before anything was sent, and the connection is as good as before."""
        staging = poisoned(10)
        with pytest.raises(InvalidRequest):
            connection.read([descriptor(0, 1, 0), ReadDescriptor(0, 0, length, place)], staging, 1.0)
        assert (staging == POISON).all()
        self.check_read(connection, owner, [descriptor(0, 10, 0)])

    # -- connecting -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1, 0])
    def test_another_epoch(self, transport: Transport, owner: Owner, epoch: int) -> None:
        with pytest.raises(StaleReference, match=str(EPOCH)):
            transport.connect(self.node(owner, epoch), 5.0)

    def test_nobody_there(self, transport: Transport, owner: Owner) -> None:
        owner.stop()
        with pytest.raises(Unreachable, match=owner.address):
            transport.connect(self.node(owner), 5.0)

    @pytest.mark.parametrize("address", ["", "7420", "localhost:", ":7420", "localhost:x", "localhost:0", "h:70000"])
    def test_not_an_address(self, transport: Transport, address: str) -> None:
        with pytest.raises(InvalidRequest, match="host:port"):
            transport.connect(at(address), 1.0)

    # -- ends -------------------------------------------------------------------------------------------------

    def test_closed_by_the_reader(self, connection: Connection) -> None:
        connection.close()
        connection.close()
        result = connection.read([descriptor(0, 1, 0)], poisoned(1), 1.0)
        assert (result.status, result.generations) == (ReadStatus.UNREACHABLE, ())

    def test_owner_ended_between_reads(self, connection: Connection, owner: Owner) -> None:
        self.check_read(connection, owner, [descriptor(0, 4096, 0)])
        owner.stop()
        assert connection.read([descriptor(0, 1, 0)], poisoned(1), 5.0).status is ReadStatus.UNREACHABLE

    def test_open_until_the_reader_closes(self, connection: Connection, owner: Owner) -> None:
        assert connection.is_open
        self.check_read(connection, owner, [descriptor(0, 4096, 0)])
        assert connection.is_open
        self.check_read(connection, owner, [descriptor(0, 4096, 0)])  # asking took nothing off the path
        connection.close()
        assert not connection.is_open

    def test_open_until_the_owner_ends(self, connection: Connection, owner: Owner) -> None:
        self.check_read(connection, owner, [descriptor(0, 4096, 0)])
        owner.stop()
        self.check_closes(connection)

    def test_open_until_the_owner_is_killed(self, connect: Callable[[Owner], Connection], owner_process: Owner) -> None:
        connection = connect(owner_process)
        owner_process.pause()
        started = time.monotonic()
        assert connection.is_open  # nobody can answer: it asks nobody
        assert time.monotonic() - started < 1.0
        owner_process.kill()
        self.check_closes(connection)

    def test_a_read_that_failed_closes(self, connection: Connection) -> None:
        assert connection.read([descriptor(0, 4096, 0)], poisoned(4096), 0.0).status is ReadStatus.DEADLINE
        assert not connection.is_open

    def test_cancel_ends_a_read_under_way(self, connect: Callable[[Owner], Connection], owner_process: Owner) -> None:
        """From another thread, against an owner that will never answer; no byte comes later."""
        self.skip_if_one_sided()
        connection = connect(owner_process)
        owner_process.pause()
        canceller = threading.Timer(0.1, connection.cancel)
        canceller.start()
        staging = poisoned(1 << 20)
        started = time.monotonic()
        result = connection.read([descriptor(0, 1 << 20, 0)], staging, 20.0)
        canceller.join()
        assert (result.status, result.generations) == (ReadStatus.CANCELLED, ())
        assert time.monotonic() - started < 10.0
        assert not connection.is_open
        owner_process.resume()
        self.check_read(connect(owner_process), owner_process, [descriptor(0, 4096, 0)])
        assert (staging == POISON).all()

    def test_cancel_between_reads(self, connection: Connection, owner: Owner) -> None:
        self.check_read(connection, owner, [descriptor(0, 4096, 0)])
        connection.cancel()
        connection.cancel()
        assert not connection.is_open
        staging = poisoned(4096)
        assert connection.read([descriptor(0, 4096, 0)], staging, 5.0).status is ReadStatus.CANCELLED
        assert (staging == POISON).all()

    def test_cancel_of_a_closed_connection(self, connection: Connection) -> None:
        connection.close()
        connection.cancel()
        assert not connection.is_open

    @pytest.mark.parametrize("deadline_s", [0.0, -1.0])
    def test_no_time_left(self, connection: Connection, deadline_s: float) -> None:
        staging = poisoned(4096)
        assert connection.read([descriptor(0, 4096, 0)], staging, deadline_s).status is ReadStatus.DEADLINE
        assert (staging == POISON).all()

    def test_stopped_owner_costs_the_deadline_and_writes_nothing_later(
        self, connect: Callable[[Owner], Connection], owner_process: Owner
    ) -> None:
        """Law 6, B01: late bytes of a read that was given up touch no memory that somebody may use by then."""
        self.skip_if_one_sided()
        connection = connect(owner_process)
        self.check_read(connection, owner_process, [descriptor(0, 1 << 20, 0)])
        staging = poisoned(8 << 20)
        owner_process.pause()
        started = time.monotonic()
        result = connection.read([descriptor(0, 8 << 20, 0)], staging, 0.3)
        assert result.status is ReadStatus.DEADLINE
        assert 0.25 < time.monotonic() - started < 2.0
        assert result.ended is None or result.ended()
        staging[:] = 0x3C  # the next user's bytes
        owner_process.resume()
        # The owner answers a new connection, so it has run again, with the old request in front of it.
        self.check_read(self.reconnected(connect, owner_process), owner_process, [descriptor(4096, 1 << 20, 0)])
        assert (staging == 0x3C).all()
        assert connection.read([descriptor(0, 1, 0)], staging, 1.0).status is ReadStatus.UNREACHABLE

    def test_stopped_owner_and_a_new_connection(self, transport: Transport, owner_process: Owner) -> None:
        owner_process.pause()
        with pytest.raises(DeadlineExceeded):
            transport.connect(self.node(owner_process), 0.2)

    def test_killed_owner(self, connect: Callable[[Owner], Connection], owner_process: Owner) -> None:
        """B01: a read that waits when the owner dies ends at once, not at its deadline."""
        self.skip_if_one_sided()
        connection = connect(owner_process)
        owner_process.pause()
        killer = threading.Timer(0.1, owner_process.kill)
        killer.start()
        started = time.monotonic()
        result = connection.read([descriptor(0, 1 << 20, 0)], poisoned(1 << 20), 20.0)
        killer.join()
        assert (result.status, result.generations) == (ReadStatus.UNREACHABLE, ())
        assert time.monotonic() - started < 10.0
