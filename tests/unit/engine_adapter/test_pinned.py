"""The pool's memory registered with a device: when that begins, in which order it ends, what a refusal says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import kvstore
from engine_adapter.device_copy import DeviceCopier, DevicePagedKv
from engine_adapter.pinned import PORTABLE, READ_ONLY, CudaRegistrar, PinnedMapping, pin_host
from kvstore.errors import ConfigurationError, DeadlineExceeded, SessionLost
from tests.chaos.node_thread import NodeThread
from tests.unit.client.fake_host import BreakableHost
from tests.unit.engine_adapter.queued_streams import QueuedDevice, QueuedStream


class Registry:
    """What is registered: address -> (size, flags). `refusal` refuses; `before_unregister` looks on."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, int]] = {}
        self.refusal = ""
        self.before_unregister: Callable[[], None] = lambda: None

    def register(self, address: int, size_bytes: int, flags: int) -> str:
        if not self.refusal:
            self.held[address] = size_bytes, flags
        return self.refusal

    def unregister(self, address: int) -> str:
        self.before_unregister()
        del self.held[address]
        return self.refusal


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_memory_is_registered_until_it_is_closed(registry: Registry) -> None:
    memory = np.zeros(8192, dtype=np.uint8)
    mapping = PinnedMapping(memory, [], registry)
    assert registry.held == {memory.ctypes.data: (8192, PORTABLE)} and mapping.is_pinned
    mapping.close()
    mapping.close()
    assert not registry.held and not mapping.is_pinned


def test_memory_that_may_not_be_written_is_registered_as_such(registry: Registry) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    memory.flags.writeable = False
    PinnedMapping(memory, [], registry)
    assert registry.held[memory.ctypes.data] == (4096, PORTABLE | READ_ONLY)


def test_b13_a_refusal_says_what_was_wanted_what_is_allowed_and_what_to_do(registry: Registry) -> None:
    registry.refusal = "CUDA error 2, out of memory"
    with pytest.raises(ConfigurationError) as refused:
        PinnedMapping(np.zeros(4096, dtype=np.uint8), [], registry)
    for part in ("4096 bytes", "CUDA error 2, out of memory", "locked memory", "ulimit -l", "--dram", "slower"):
        assert part in str(refused.value)


def test_a_failure_to_unregister_is_logged(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    mapping = PinnedMapping(np.zeros(4096, dtype=np.uint8), [], registry)
    registry.refusal = "CUDA error 4, driver shutting down"
    with caplog.at_level(logging.WARNING):
        mapping.close()
    assert "driver shutting down" in caplog.text and not mapping.is_pinned


def test_copies_under_way_end_before_memory_is_unregistered(registry: Registry) -> None:
    device = QueuedDevice()
    copier = DeviceCopier("cpu", compute=QueuedStream(device), copies=QueuedStream(device))
    memory = np.full(2 * 64, 7, dtype=np.uint8)
    tensor = torch.zeros((2, 1, 64), dtype=torch.uint8)
    kv = DevicePagedKv([tensor], 2, [[0, 1]], copier=copier)
    mapping = PinnedMapping(memory, [copier], registry)
    kv.scatter(0, memory.reshape(1, 2, 1, 64), 0, 0)
    kv.launch()
    done: list[bool] = []
    registry.before_unregister = lambda: done.append(bool((tensor == 7).all()))
    assert not tensor.any()
    mapping.close()
    assert done == [True]


def test_a_pool_in_this_process_is_unregistered_before_it_ends(registry: Registry) -> None:
    host = BreakableHost()
    pinned = pin_host(host, [], deadline_s=20.0, registrar=registry)
    assert registry.held == {host.arena.ctypes.data: (host.arena.nbytes, PORTABLE)}
    alive: list[bool] = []
    registry.before_unregister = lambda: alive.append(host.alive)
    host.close()
    assert alive == [False] and not pinned.is_pinned


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path)
    yield node
    node.stop()


def test_registration_ends_with_the_clients_session(node: NodeThread, registry: Registry) -> None:
    with kvstore.connect(node.info.socket_path) as client:
        host = client.host()
        assert host is not None
        pin_host(host, [], deadline_s=20.0, registrar=registry)
        assert registry.held == {host.arena.ctypes.data: (4 << 20, PORTABLE)}
        alive: list[bool] = []
        registry.before_unregister = lambda: alive.append(host.alive)
    assert not registry.held and alive == [False]


def test_registration_ends_when_the_node_goes(tmp_path: Path, registry: Registry) -> None:
    node = NodeThread(tmp_path)
    with kvstore.connect(node.info.socket_path) as client:
        host = client.host()
        assert host is not None
        ended = threading.Event()
        pinned = pin_host(host, [], deadline_s=20.0, registrar=registry)
        host.on_end(ended.set)
        node.stop()
        assert ended.wait(20.0)
        host.on_end(pinned.close)  # also called where the end has passed
        assert not pinned.is_pinned and not registry.held and not host.alive
        with pytest.raises((SessionLost, kvstore.errors.Unreachable)):
            pin_host(host, [], deadline_s=1.0, registrar=registry)
    assert not registry.held


def test_what_the_node_has_not_populated_is_not_registered(registry: Registry) -> None:
    host = BreakableHost()
    host.populated_bytes = lambda deadline_s: host.arena.nbytes - 1  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="populated"):
        pin_host(host, [], deadline_s=0.01, registrar=registry)
    assert not registry.held
    host.close()


@pytest.mark.gpu
def test_cuda_pins_a_nodes_memory_and_lets_it_go(node: NodeThread) -> None:
    with kvstore.connect(node.info.socket_path) as client:
        host = client.host()
        assert host is not None
        pinned = pin_host(host, [DeviceCopier("cuda")], deadline_s=20.0)
        assert torch.from_numpy(host.arena).is_pinned()
        assert CudaRegistrar().register(host.arena.ctypes.data, 4096, PORTABLE) != ""
        pinned.close()
        assert not torch.from_numpy(host.arena).is_pinned()
