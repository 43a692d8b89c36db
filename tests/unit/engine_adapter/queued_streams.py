"""A device with streams, on the CPU: work is queued and runs when somebody waits, in as bad an order as events allow.

`QueuedDevice.prefer` is the stream whose work runs first whenever there is a choice, so that a missing wait shows
always and not once in a thousand rounds. `deaf` streams ignore `wait`: what a forgotten wait would do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class QueuedEvent:
    def __init__(self, device: QueuedDevice) -> None:
        self._device = device
        self.is_past = False

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.is_past)


class QueuedStream:
    def __init__(self, device: QueuedDevice, *, deaf: bool = False) -> None:
        self._device = device
        self._deaf = deaf
        self._queue: deque[Callable[[], bool]] = deque()
        device.streams.append(self)

    def run(self, work: Callable[[], None]) -> None:
        def step() -> bool:
            work()
            return True

        self._queue.append(step)

    def record(self) -> QueuedEvent:
        event = QueuedEvent(self._device)

        def step() -> bool:
            event.is_past = True
            return True

        self._queue.append(step)
        return event

    def wait(self, event: QueuedEvent) -> None:
        if not self._deaf:
            self._queue.append(lambda: event.is_past)

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def step(self) -> bool:
        """Do the oldest queued thing, if it can be done."""
        if self._queue and self._queue[0]():
            self._queue.popleft()
            return True
        return False


class QueuedDevice:
    def __init__(self) -> None:
        self.streams: list[QueuedStream] = []
        self.prefer: QueuedStream | None = None

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run queued work until this holds; AssertionError if it never will."""
        while not is_done():
            ordered = sorted(self.streams, key=lambda stream: stream is not self.prefer)
            assert any(stream.step() for stream in ordered), "the streams wait for each other"

    def drain(self) -> None:
        """Run everything."""
        while any(stream.step() for stream in sorted(self.streams, key=lambda stream: stream is not self.prefer)):
            pass
