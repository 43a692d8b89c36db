"""The DRAM arena: a memfd, so that it has no name, leaves nothing behind and can be handed to other processes.

The node populates it itself, in the background and in steps: first touch is slow, and the kernel charges pages
to whoever touches first. Huge pages are asked for; whether the host gives them is its setting
(`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

from kvstore.errors import ConfigurationError
from kvstore.node.arena import Buffer
from kvstore.node.memory import UNIT_BYTES

POPULATE_STEP_BYTES = 16 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


class DramArena:
    """`size_bytes` of shared memory, new or that of `fd`. `fd` and `read_only_fd` are handed to clients."""

    def __init__(self, size_bytes: int, fd: int | None = None) -> None:
        self.size_bytes = size_bytes
        self.fd = create_arena(size_bytes) if fd is None else fd
        self.memory = mmap.mmap(self.fd, size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        _libc.madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(size_bytes), _MADV_HUGEPAGE)
        self.populated_bytes = 0

    @property
    def read_only_fd(self) -> int:
        """A new descriptor that cannot be mapped for writing; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def populate_step(self) -> int:
        """Touch the next step of the arena. Blocks (without the interpreter lock); returns bytes ready so far."""
        start = self.populated_bytes
        length = min(POPULATE_STEP_BYTES, self.size_bytes - start)
        if length <= 0:
            return start
        populate(self._address + start, length)
        self.populated_bytes = start + length
        return self.populated_bytes

    def read(self, offset: int, into: Buffer) -> None:
        """Fill `into` from `offset`; see Arena."""
        with memoryview(into) as view:
            view[:] = self._at(offset, len(view))

    def write(self, offset: int, data: Buffer) -> None:
        """Put `data` at `offset`; see Arena."""
        with memoryview(data) as view:
            self._at(offset, len(view))[:] = view

    def _at(self, offset: int, length: int) -> memoryview:
        assert offset % UNIT_BYTES == 0 and length % UNIT_BYTES == 0
        assert offset >= 0 and offset + length <= self.size_bytes
        return memoryview(self.memory)[offset : offset + length]

    def close(self) -> None:
        """Give the descriptor back; mappings of others keep the memory alive."""
        os.close(self.fd)


def create_arena(size_bytes: int) -> int:
    """A sealed memfd; raises ConfigurationError if there is not that much memory."""
    available = available_bytes()
    if size_bytes > available:
        raise ConfigurationError(
            f"the DRAM tier wants {size_bytes} bytes but only {available} are available to this process "
            "(container limit or free memory); use a smaller --dram"
        )
    fd = os.memfd_create("kvstore-dram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def populate(address: int, length: int) -> None:
    """Make the pages present and writable, without changing their contents."""
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0:
        return
    error = ctypes.get_errno()
    if error == errno.EINVAL:  # a kernel before 5.14: the first touch does it later
        return
    raise ConfigurationError(
        f"the memory of the DRAM tier cannot be populated: {os.strerror(error)}; use a smaller --dram"
    )


def available_bytes() -> int:
    """Memory that this process may still use: what the kernel calls available, cut by the container's limit."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit).exists() and (text := Path(limit).read_text().strip()) != "max":
            available = min(available, int(text) - int(Path(used).read_text()))
    return available
