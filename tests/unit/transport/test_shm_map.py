"""Mapping ahead: only what the node has populated, and nothing where the kernel cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.transport import shm
from kvstore.transport.shm import SharedNode
from tests.chaos.node_thread import NodeThread


class RecordingLibc:
    """Notes how many bytes from which address were asked for; answers `status`."""

    def __init__(self, status: int = 0) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self._status = status

    def madvise(self, address: object, length: object, advice: int) -> int:
        self.asked.append((address.value, length.value, advice))  # type: ignore[attr-defined]
        return self._status


def test_a_client_maps_ahead_what_is_populated_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeThread(tmp_path, 4 << 20)
    try:
        shared = SharedNode.connect(node.info.socket_path, "test", 5.0)
        monkeypatch.setattr(shm, "_MAP_STEP_BYTES", 1 << 20)
        for status, steps in ((0, 3), (-1, 1)):
            libc = RecordingLibc(status)
            monkeypatch.setattr(shm, "_libc", libc)
            shared._map_ahead((2 << 20) + 4096)
            first = shared.arena.ctypes.data
            assert [(at - first, size) for at, size, _ in libc.asked] == [
                (0, 1 << 20),
                (1 << 20, 1 << 20),
                (2 << 20, 4096),
            ][:steps]
        shared.close()
    finally:
        node.stop()
