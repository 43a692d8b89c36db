"""A destination and source whose copies are made at the last moment that the client allows: in `synchronize`."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.client.buffers import ChunkArray
from kvstore.model.layout import Rectangle
from tests.unit.client.pages import Bytes


class LateCopies:
    """`before` is called when the client waits and copies are due; it may raise. `waits` counts the waits."""

    def __init__(self, array: Bytes, rectangle: Rectangle) -> None:
        self._array = ChunkArray(array, rectangle)
        self._due: list[Callable[[], None]] = []
        self.before: Callable[[], None] = lambda: None
        self.waits = self.launches = 0

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        self._due.append(lambda: self._array.scatter(index, piece, layer_start, head_start))

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        self._due.append(lambda: self._array.gather(index, slot, layer_start, head_start))

    def launch(self) -> None:
        self.launches += 1

    def synchronize(self) -> None:
        self.waits += 1
        due, self._due = self._due, []
        if due:
            self.before()
        for copy in due:
            copy()
