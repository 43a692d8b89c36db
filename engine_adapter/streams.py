"""What copies need to know of a device's streams: order against the engine's work, and nothing else.

    compute   ── engine writes the blocks ──●                     ┌─► engine may use or refill the blocks
                                            │ event               │ event
    copy                                    └─► copies ──────────●┘
                                                                  │ event
    host                                                          └─► fence, checksums, commit

Host code that runs in this order says nothing about the order on the device. Two implementations: CUDA's streams, and
for devices without streams, where everything is done when the call returns. Tests have a third one that runs queued
work as late and in as bad an order as the events allow (`tests/unit/engine_adapter/queued_streams.py`).

`CudaStream` has never run on a CUDA device; the tests with the marker `gpu` are its first run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Return when the work before it has ended."""


class Stream(Protocol):
    """Work of a device that runs in the order in which it was given."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue what `work` gives to the device. It may be called at once or later, in order."""

    def record(self) -> Event:
        """An event behind everything given so far."""

    def wait(self, event: Event) -> None:
        """What is given from now on runs after the event. Does not wait itself."""


class CudaStream:
    """A CUDA stream, given or new."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]

    @classmethod
    def current(cls, device: torch.device) -> CudaStream:
        """The calling thread's current stream: in the engine's own thread the one that it computes on."""
        return cls(device, torch.cuda.current_stream(device))

    def run(self, work: Callable[[], None]) -> None:
        """See Stream."""
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        """See Stream. Waiting for the event sleeps, it does not spin: the engine needs the core."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        """See Stream."""
        if not isinstance(event, torch.cuda.Event):
            raise TypeError("a CUDA stream waits for events of CUDA streams only")
        self._stream.wait_event(event)


class _Past:
    """An event of a device that is never behind."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class ImmediateStream:
    """The stream of a device that has none, such as the CPU."""

    def run(self, work: Callable[[], None]) -> None:
        """See Stream."""
        work()

    def record(self) -> Event:
        """See Stream."""
        return _Past()

    def wait(self, event: Event) -> None:
        """See Stream."""


def copy_stream(device: torch.device) -> Stream:
    """A new stream for copies."""
    return CudaStream(device) if device.type == "cuda" else ImmediateStream()


def compute_stream(device: torch.device) -> Stream:
    """The stream on which the calling thread computes."""
    return CudaStream.current(device) if device.type == "cuda" else ImmediateStream()
