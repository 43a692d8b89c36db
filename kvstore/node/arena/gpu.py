"""The GPU arena: one allocation on a device, cut in units of 4096 bytes like the other arenas. Blocking, thread-safe.

The memory is torch's, so that one process has one allocator on the device. `address` and `device_index` are what a
transport registers it by (as VRAM). Copies go over a stream of the arena's own and have ended when a call returns; from
and to pinned host memory several of one call run in one go.

On the device "cpu" it is the same code over host memory, which is how it is tested. On CUDA it has never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from kvstore.errors import ConfigurationError
from kvstore.node.arena import Buffer
from kvstore.node.arena.dram import available_bytes
from kvstore.node.memory import UNIT_BYTES


class GpuArena:
    """`size_bytes` (rounded down to 4096) of zeroed memory on a device.

    Raises ConfigurationError, before anything is allocated, where the device does not have so much free.
    """

    def __init__(
        self,
        size_bytes: int,
        device: torch.device | str,
        *,
        free_bytes: Callable[[torch.device], int] | None = None,
    ) -> None:
        self.device = _known(torch.device(device))
        self.size_bytes = size_bytes // UNIT_BYTES * UNIT_BYTES
        if not self.size_bytes:
            raise ConfigurationError(f"a GPU tier has at least {UNIT_BYTES} bytes, not {size_bytes}")
        wanted = self.size_bytes + UNIT_BYTES
        free = (device_free_bytes if free_bytes is None else free_bytes)(self.device)
        if wanted > free:
            raise ConfigurationError(_refused(size_bytes, self.device, free))
        try:
            memory = torch.zeros(wanted, dtype=torch.uint8, device=self.device)
        except RuntimeError as exc:  # somebody else was quicker, or the memory is in pieces
            raise ConfigurationError(_refused(size_bytes, self.device, free)) from exc
        start = -memory.data_ptr() % UNIT_BYTES
        self._memory: torch.Tensor | None = memory[start : start + self.size_bytes]
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.device)  # the zeros are written on another stream

    @property
    def memory(self) -> torch.Tensor:
        """All of it, uint8."""
        assert self._memory is not None, "the arena is closed"
        return self._memory

    @property
    def address(self) -> int:
        """Of its first byte, in the device's address space; a multiple of 4096."""
        return self.memory.data_ptr()

    @property
    def device_index(self) -> int:
        """Number of the device; 0 for the CPU."""
        return self.device.index or 0

    def read(self, offset: int, into: Buffer) -> None:
        """Fill `into` from `offset`, both multiples of 4096 bytes."""
        self.read_all(offset, [into])

    def write(self, offset: int, data: Buffer) -> None:
        """Put `data` at `offset`, likewise."""
        self.write_all(offset, [data])

    def read_all(self, offset: int, into: Sequence[Buffer]) -> None:
        """As `read`, into several pieces that lie side by side in the arena."""
        with self._copying():
            for host, stored in self._pairs(offset, into):
                host.copy_(stored, non_blocking=True)

    def write_all(self, offset: int, data: Sequence[Buffer]) -> None:
        """As `write`, from several pieces that come to lie side by side."""
        with self._copying():
            for host, stored in self._pairs(offset, data):
                stored.copy_(host, non_blocking=True)

    def _pairs(self, offset: int, pieces: Sequence[Buffer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        hosts = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces]
        total = sum(len(host) for host in hosts)
        assert not any(len(host) % UNIT_BYTES for host in hosts) and offset % UNIT_BYTES == 0
        assert offset >= 0 and offset + total <= self.size_bytes
        pairs, start = [], offset
        for host in hosts:
            pairs.append((host, self.memory[start : start + len(host)]))
            start += len(host)
        return pairs

    def _copying(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else _finished(self._stream)

    def close(self) -> None:
        """Give the memory back; nothing may be under way, and nothing may be registered any more. Idempotent."""
        self._memory = None
        if self._stream is not None:
            torch.cuda.empty_cache()  # else torch keeps it for this process


@contextmanager
def _finished(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within the block copies go to the stream; at its end they have ended, also when it raises."""
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def device_free_bytes(device: torch.device) -> int:
    """Memory that this process may still take on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()


def _known(device: torch.device) -> torch.device:
    """The device with its number. Raises ConfigurationError for one that is not there or not supported."""
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigurationError(f"a GPU tier lies on cuda:N (or cpu, for tests), not on {device}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else 0
    if index >= count:
        raise ConfigurationError(f"there is no {device} here: torch finds {count} CUDA devices; name another one")
    return torch.device("cuda", index)


def _refused(size_bytes: int, device: torch.device, free: int) -> str:
    return (
        f"the GPU tier wants {size_bytes} bytes on {device}, where {free} are free; the size is for the whole node, "
        "not for each rank, and an engine on that device takes its share too: use a smaller GPU tier or start it first"
    )
