"""Slots reused while their bytes travel over tcp (A15, A25): the fence tells, and only as a message of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.transport import SLOT_UNIT_BYTES, ReadDescriptor, ReadResult, ReadStatus
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_server import SENDFILE_FROM_BYTES
from tests.contract.transport_owner import EPOCH, at, descriptor, poisoned
from tests.unit.transport.tcp_owner import LocalOwner

SLOT = 16
PROMISED, REUSED = 2000, 2002
NEW_BYTE = 0xEE


@pytest.fixture
def owner() -> Iterator[LocalOwner]:
    owner = LocalOwner()
    yield owner
    owner.stop()
    owner.close()


def read_while_the_slot_is_reused(
    owner: LocalOwner, length: int, words_with_payload: bool
) -> tuple[ReadResult, np.ndarray]:
    """One read; between sendfile's return on the owner and the reader's first byte the slot gets a new use.

    `words_with_payload` is the fault: the owner answers the words as they were when it had sent the payload.
    """
    reused = threading.Event()
    owner.words[SLOT] = PROMISED

    def reuse() -> None:
        if words_with_payload:
            early = owner.words.copy()
            owner.words_of = lambda slots: early[slots].tolist()
        owner.words[SLOT] = REUSED
        owner.arena[SLOT * SLOT_UNIT_BYTES :][:length] = NEW_BYTE
        reused.set()

    def wait() -> None:
        assert reused.wait(10)

    owner.after_payload(reuse)
    transport = TcpTransport()
    transport.hold_for_tests(wait)
    connection = transport.connect(at(owner.address, EPOCH), 5.0)
    staging = poisoned(length)
    result = connection.read([descriptor(SLOT * SLOT_UNIT_BYTES, length, 0)], staging, 10.0)
    connection.close()
    assert result.status is ReadStatus.DONE, result.detail
    return result, staging


@pytest.mark.parametrize("length", [4096, SENDFILE_FROM_BYTES - 4096, SENDFILE_FROM_BYTES])
def test_a_slot_reused_between_sendfile_and_recv_is_told(owner: LocalOwner, length: int) -> None:
    old = owner.arena[SLOT * SLOT_UNIT_BYTES :][:length].copy()
    result, staging = read_while_the_slot_is_reused(owner, length, words_with_payload=False)
    assert result.generations == (REUSED,)
    if length >= SENDFILE_FROM_BYTES:
        assert not np.array_equal(staging, old), "the queued pages did not change: this test has lost its point"


def test_words_behind_the_payload_would_pass_new_bytes_under_the_old_generation(owner: LocalOwner) -> None:
    """Why the fence is a second message: sendfile queues pages, not bytes."""
    result, staging = read_while_the_slot_is_reused(owner, SENDFILE_FROM_BYTES, words_with_payload=True)
    assert result.generations == (PROMISED,)
    assert (staging == NEW_BYTE).any()


@pytest.mark.slow
def test_raced_reads_never_pass_a_wrong_byte(owner: LocalOwner) -> None:
    """A writer reuses few slots without pause: raises the word, writes bytes that name it, publishes the word."""
    length, slots = SENDFILE_FROM_BYTES, [0, 64, 128, 192]
    published = dict.fromkeys(slots, 0)
    over = threading.Event()

    def reuse(slot: int, generation: int) -> None:
        owner.words[slot] = generation
        owner.arena[slot * SLOT_UNIT_BYTES :][:length].view(np.uint64)[:] = generation
        published[slot] = generation

    def write() -> None:
        rng, generation = np.random.default_rng(8), 2
        while not over.is_set():
            generation += 2
            reuse(int(rng.choice(slots)), generation)
            over.wait(0.0002)

    for slot in slots:
        reuse(slot, 2)
    writer = threading.Thread(target=write)
    writer.start()
    connection = TcpTransport().connect(at(owner.address, EPOCH), 5.0)
    staging = poisoned(len(slots) * length)
    descriptors = [ReadDescriptor(slot, slot * SLOT_UNIT_BYTES, length, i * length) for i, slot in enumerate(slots)]
    passed = fenced = wrong = 0
    for _ in range(2000):
        promised = [published[slot] for slot in slots]
        result = connection.read(descriptors, staging, 10.0)
        assert result.status is ReadStatus.DONE
        for index, (was, word) in enumerate(zip(promised, result.generations, strict=True)):
            if was != word:
                fenced += 1
                continue
            passed += 1
            wrong += not (staging[index * length :][:length].view(np.uint64) == was).all()
    over.set()
    writer.join(10)
    connection.close()
    print(f"passed {passed}, fenced {fenced}, wrong {wrong}")
    assert wrong == 0
    assert passed and fenced
