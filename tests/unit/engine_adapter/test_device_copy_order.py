"""A14 and A13: copies run after the engine's own work on the device, and the engine's later work after them.

On the CPU with streams that run queued work as late as the events allow; on CUDA with real streams, 1,000 rounds each.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from engine_adapter.device_copy import LAUNCH_BYTES, DeviceCopier, DevicePagedKv
from engine_adapter.streams import CudaStream
from kvstore.errors import ForkedProcess
from tests.unit.engine_adapter.queued_streams import QueuedDevice, QueuedStream

LAYERS, HEADS, PAGES, HEAD_PAGE_BYTES = 2, 2, 2, 64
POISON = 0xA5
ROUNDS = 1000
BUSY_CYCLES = 2_000_000
"""About a millisecond: longer than the host takes from one call to the next."""


class Engine:
    """Blocks of one chunk on a queued device. What it is told to do runs on its compute stream, some time."""

    def __init__(self, *, copies_deaf: bool = False, compute_deaf: bool = False) -> None:
        self.device = QueuedDevice()
        self.compute = QueuedStream(self.device, deaf=compute_deaf)
        self.copies = QueuedStream(self.device, deaf=copies_deaf)
        self.tensors = [torch.full((4, HEADS, HEAD_PAGE_BYTES), POISON, dtype=torch.uint8) for _ in range(LAYERS)]
        self.seen: list[int] = []
        copier = DeviceCopier("cpu", compute=self.compute, copies=self.copies)
        self.kv = DevicePagedKv(self.tensors, PAGES, [[3, 1]], copier=copier)

    def fill(self, value: int) -> None:
        def work() -> None:
            for tensor in self.tensors:
                tensor[[3, 1]] = value

        self.compute.run(work)

    def use(self) -> None:
        self.compute.run(lambda: self.seen.append(only(self.tensors[1][[3, 1]].numpy())))


def only(values: np.ndarray) -> int:
    (value,) = np.unique(values)
    return int(value)


def chunk(value: int) -> np.ndarray:
    return np.full((LAYERS, PAGES, HEADS, HEAD_PAGE_BYTES), value, dtype=np.uint8)


# --- on the CPU ---


@pytest.mark.parametrize("deaf", [False, True])
def test_a14_a_store_reads_blocks_after_the_engine_wrote_them(deaf: bool) -> None:
    engine, slot = Engine(copies_deaf=deaf), chunk(0)
    engine.device.prefer = engine.copies
    engine.fill(1)
    engine.kv.gather(0, slot, 0, 0)
    engine.kv.synchronize()
    assert only(slot) == (POISON if deaf else 1)


@pytest.mark.parametrize("deaf", [False, True])
def test_a14_a_load_overwrites_blocks_after_the_engine_read_them(deaf: bool) -> None:
    engine = Engine(copies_deaf=deaf)
    engine.device.prefer = engine.copies
    engine.use()
    engine.kv.scatter(0, chunk(2), 0, 0)
    engine.kv.synchronize()
    engine.device.drain()
    assert engine.seen == [2 if deaf else POISON]
    assert only(engine.tensors[0][[3, 1]].numpy()) == 2


@pytest.mark.parametrize("deaf", [False, True])
def test_a13_stored_blocks_go_to_another_request_after_the_copy(deaf: bool) -> None:
    engine, slot = Engine(compute_deaf=deaf), chunk(0)
    engine.device.prefer = engine.compute
    engine.fill(1)
    engine.kv.gather(0, slot, 0, 0)
    engine.kv.hold_compute()
    engine.fill(2)
    engine.device.drain()
    assert only(slot) == (2 if deaf else 1)
    engine.kv.synchronize()


@pytest.mark.parametrize("deaf", [False, True])
def test_a14_loaded_blocks_are_used_after_the_copy(deaf: bool) -> None:
    engine = Engine(compute_deaf=deaf)
    engine.device.prefer = engine.compute
    engine.kv.scatter(0, chunk(2), 0, 0)
    engine.kv.hold_compute()
    engine.use()
    engine.device.drain()
    assert engine.seen == [POISON if deaf else 2]


def test_synchronize_waits_for_every_batch_in_both_directions() -> None:
    engine, slots = Engine(), [chunk(0) for _ in range(3)]
    engine.device.prefer = engine.compute
    for value, slot in enumerate(slots):
        engine.kv.scatter(0, chunk(value), 0, 0)
        engine.kv.launch()
        engine.kv.gather(0, slot, 0, 0)
    assert all(only(slot) == 0 for slot in slots), "nothing runs before somebody waits"
    engine.kv.synchronize()
    assert [only(slot) for slot in slots] == [0, 1, 2]


def test_what_is_large_is_given_to_the_device_before_anybody_waits() -> None:
    engine = Engine()
    piece = chunk(1)
    for _ in range(LAUNCH_BYTES // piece.nbytes):
        engine.kv.scatter(0, piece, 0, 0)
    engine.device.drain()
    assert only(engine.tensors[0][[3, 1]].numpy()) == 1


def test_while_a_copier_is_idle_nothing_is_under_way() -> None:
    engine = Engine()
    copier = DeviceCopier("cpu", compute=engine.compute, copies=engine.copies)
    kv = DevicePagedKv(engine.tensors, PAGES, [[3, 1]], copier=copier)
    kv.scatter(0, chunk(7), 0, 0)
    kv.launch()
    with copier.idle():
        assert only(engine.tensors[0][[3, 1]].numpy()) == 7


def test_b14_a_forked_child_is_told_so_and_the_parent_goes_on() -> None:
    engine, slot = Engine(), chunk(0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.kv.gather(0, slot, 0, 0)
        except ForkedProcess as exc:
            code = 0 if "spawn" in str(exc) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.fill(1)
    engine.kv.gather(0, slot, 0, 0)
    engine.kv.synchronize()
    assert only(slot) == 1


# --- on CUDA: written without a CUDA device at hand, this is their first run ---


class CudaEngine:
    """The same blocks on CUDA; `busy` keeps the compute stream occupied for a while."""

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        self.stream = torch.cuda.Stream(device)
        shape = 4, HEADS, HEAD_PAGE_BYTES
        self.tensors = [torch.full(shape, POISON, dtype=torch.uint8, device=device) for _ in range(LAYERS)]
        torch.cuda.synchronize(device)
        self.copier = DeviceCopier(device, compute=CudaStream(device, self.stream))
        self.kv = DevicePagedKv(self.tensors, PAGES, [[3, 1]], copier=self.copier)

    def fill(self, value: int) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(BUSY_CYCLES)
            for tensor in self.tensors:
                tensor.fill_(value)

    def use(self) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(BUSY_CYCLES)
            return self.tensors[1][1].clone()


def pinned(value: int) -> np.ndarray:
    shape = LAYERS, PAGES, HEADS, HEAD_PAGE_BYTES
    return torch.full(shape, value, dtype=torch.uint8, pin_memory=True).numpy()


@pytest.mark.gpu
@pytest.mark.slow
def test_a14_stores_and_their_blocks_next_request_on_cuda() -> None:
    engine, slot = CudaEngine(), pinned(0)
    for number in range(ROUNDS):
        value = number % 250
        engine.fill(value)
        engine.kv.gather(0, slot, 0, 0)
        engine.kv.hold_compute()
        engine.fill(255)
        engine.kv.synchronize()
        assert only(slot) == value


@pytest.mark.gpu
@pytest.mark.slow
def test_a14_loads_and_their_first_use_on_cuda() -> None:
    engine = CudaEngine()
    before = POISON
    pieces = [pinned(value) for value in range(2)]
    for number in range(ROUNDS):
        value = number % 2
        old = engine.use()
        engine.kv.scatter(0, pieces[value], 0, 0)
        engine.kv.hold_compute()
        new = engine.use()
        engine.kv.synchronize()
        engine.stream.synchronize()
        assert (only(old.cpu().numpy()), only(new.cpu().numpy())) == (before, value)
        before = value


@pytest.mark.gpu
@pytest.mark.slow
def test_a14_without_the_wait_a_store_on_cuda_reads_too_early() -> None:
    class Deaf(CudaStream):
        def wait(self, event: object) -> None:
            pass

    engine, slot = CudaEngine(), pinned(0)
    copier = DeviceCopier(
        engine.copier.device,
        compute=CudaStream(engine.copier.device, engine.stream),
        copies=Deaf(engine.copier.device),
    )
    kv = DevicePagedKv(engine.tensors, PAGES, [[3, 1]], copier=copier)
    kv.gather(0, slot, 0, 0)
    kv.synchronize()  # what has to be compiled or allocated is, so that the next copy is quick
    wrong = 0
    for number in range(100):
        for _ in range(5):
            engine.fill(number)
        kv.gather(0, slot, 0, 0)
        kv.synchronize()
        engine.stream.synchronize()
        wrong += (slot != number).any()
    assert wrong > 0
