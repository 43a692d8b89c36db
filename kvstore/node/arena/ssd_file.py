"""One file on a disk: opened once, locked, read and written in whole pages, its errors mapped. Blocking.

O_DIRECT where the file system takes it, so that a cache of its own does not eat the memory that the DRAM tier counts
on. All system calls go through `Calls`, which tests replace. The lock (flock) belongs to the open file and ends with
the process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore.errors import CapacityExhausted, ConfigurationError, KvStoreError, StorageFailed
from kvstore.node.arena import Buffer
from kvstore.node.memory import UNIT_BYTES

_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""EFBIG is the process's own limit of file sizes: as with the others, what was written before stays usable."""
_NOT_DIRECT: Final = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_REMEDIES: Final = {
    errno.EROFS: "mount it writable",
    errno.ENOTCONN: "the file system is gone: mount it again and restart the node",
    errno.ENODEV: "the device is gone: mount it again and restart the node",
    errno.ENXIO: "the device is gone: mount it again and restart the node",
    errno.ESTALE: "the file system is gone: mount it again and restart the node",
}
_REMEDY: Final = "look at the kernel log and the health of the disk, then restart the node or give it another --ssd"


@dataclass(slots=True)
class Calls:
    """The system calls, so that tests can record, delay, fail or stop at each one."""

    preadv: Callable[[int, Sequence[Buffer], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[Buffer], int], int] = os.pwritev
    fdatasync: Callable[[int], None] = os.fdatasync
    ftruncate: Callable[[int, int], None] = os.ftruncate


class SsdFile:
    """An open, locked file. Thread-safe: every call names its place. `direct`: O_DIRECT is on."""

    def __init__(self, path: Path, fd: int, calls: Calls) -> None:
        self.path = path
        self.direct = False
        self._fd = fd
        self._calls = calls

    @classmethod
    def open(cls, path: Path, *, make: bool, writable: bool = True, calls: Calls | None = None) -> SsdFile:
        """Open `path`, or make it (mode 0600). Raises ConfigurationError where that cannot be or somebody has it."""
        flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if make else 0)
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError as exc:
            what = f"the folder {path.parent}" if make else str(path)
            raise ConfigurationError(f"{what} does not exist; make it or name another SSD file") from exc
        except OSError as exc:
            if exc.errno in _NO_ROOM:
                raise CapacityExhausted(f"{path}: cannot be made: {exc.strerror}; free some room there") from exc
            raise ConfigurationError(
                f"the SSD file {path} cannot be opened for {'writing' if writable else 'reading'}: {exc.strerror}; "
                "give this user access to file and folder, or name another SSD file"
            ) from exc
        file = cls(path, fd, calls or Calls())
        try:
            file._claim()
        except KvStoreError:
            file.close()
            raise
        return file

    def _claim(self) -> None:
        if not stat.S_ISREG(self._status().st_mode):
            raise ConfigurationError(
                f"{self.path} is no regular file; name a file on the disk's file system as SSD file"
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            why = "another process uses it" if exc.errno == errno.EWOULDBLOCK else exc.strerror
            raise ConfigurationError(
                f"the SSD file {self.path} cannot be locked: {why}; stop that node or check, or name another SSD file"
            ) from exc

    @property
    def descriptor(self) -> int:
        """The open file's number."""
        return self._fd

    @property
    def length_bytes(self) -> int:
        """Length now."""
        return self._status().st_size

    @property
    def missing_bytes(self) -> int:
        """How much of the file's length the disk could not give now (holes take room when they are written)."""
        status = self._status()
        try:
            room = os.fstatvfs(self._fd)
        except OSError as exc:
            raise self._failed("statvfs", exc) from exc
        return max(0, status.st_size - status.st_blocks * 512 - room.f_bavail * room.f_frsize)

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self._fd)
        except OSError as exc:
            raise self._failed("stat", exc) from exc

    def read(self, offset: int, into: Buffer) -> None:
        """Fill `into` from `offset`, both multiples of 4096 bytes. Raises StorageFailed, also past the end."""
        try:
            self._move(self._calls.preadv, offset, into)
        except OSError as exc:
            raise self._failed("read", exc) from exc

    def read_all(self, offset: int, into: Sequence[Buffer]) -> None:
        """As `read`, into several pieces (at most 1,024) that lie side by side in the file."""
        self._move_all(self._calls.preadv, "read", offset, into)

    def write_all(self, offset: int, data: Sequence[Buffer]) -> None:
        """As `write`, from several pieces (at most 1,024) that come to lie side by side."""
        self._move_all(self._calls.pwritev, "write", offset, data)

    def _move_all(
        self, call: Callable[[int, Sequence[Buffer], int], int], name: str, offset: int, pieces: Sequence[Buffer]
    ) -> None:
        try:
            moved = call(self._fd, pieces, offset) if len(pieces) > 1 else 0
            # What one call left over goes piece by piece; direct transfers go on at whole pages only.
            moved = moved // UNIT_BYTES * UNIT_BYTES if self.direct else moved
            for piece in pieces:
                with memoryview(piece) as view:
                    if moved < len(view):
                        with view[moved:] as rest:
                            self._move(call, offset + moved, rest)
                    offset += len(view)
                    moved = max(0, moved - len(view))
        except OSError as exc:
            raise self._failed(name, exc) from exc

    def first_bytes(self, limit_bytes: int) -> bytearray:
        """The file's first bytes, however long it is; not with O_DIRECT."""
        head = bytearray(min(limit_bytes, self.length_bytes))
        try:
            moved = self._calls.preadv(self._fd, [head], 0)
        except OSError as exc:
            raise self._failed("read", exc) from exc
        return head[:moved]

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at `offset`, both multiples of 4096. Raises CapacityExhausted or StorageFailed."""
        try:
            self._move(self._calls.pwritev, offset, data)
        except OSError as exc:
            raise self._failed("write", exc) from exc

    def _move(self, call: Callable[[int, Sequence[Buffer], int], int], offset: int, data: Buffer) -> None:
        with memoryview(data) as view:
            assert offset % UNIT_BYTES == 0 and len(view) % UNIT_BYTES == 0
            done = 0
            while done < len(view):
                with view[done:] as rest:
                    moved = call(self._fd, [rest], offset + done)
                # A direct transfer goes on at a whole page only.
                moved = moved // UNIT_BYTES * UNIT_BYTES if self.direct else moved
                if moved == 0:
                    raise OSError(errno.EIO, f"it ended after {done} of {len(view)} bytes at {offset}")
                done += moved

    def sync(self) -> None:
        """fdatasync: what was written before survives a loss of power."""
        try:
            self._calls.fdatasync(self._fd)
        except OSError as exc:
            raise self._failed("fdatasync", exc) from exc

    def set_length(self, length_bytes: int) -> None:
        """Cut or lengthen the file; new bytes are zero and take no room until they are written."""
        if self.length_bytes == length_bytes:
            return
        try:
            self._calls.ftruncate(self._fd, length_bytes)
        except OSError as exc:
            raise self._failed("ftruncate", exc) from exc

    def try_direct(self, offset: int, data: Buffer) -> str:
        """Turn O_DIRECT on, write `data` and read it back. Returns why not, "" if it is on now."""
        try:
            self._set_direct(True)
            self._move(self._calls.pwritev, offset, data)
            back = pages(len(data))
            self._move(self._calls.preadv, offset, back)
        except OSError as exc:
            if exc.errno not in _NOT_DIRECT:
                raise self._failed("first O_DIRECT write", exc) from exc
            reason = os.strerror(exc.errno)
        else:
            if back[:] == data[:]:
                return ""
            reason = "other bytes came back than were written"
        self._set_direct(False)
        return reason

    def _set_direct(self, wanted: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        self.direct = wanted

    def _failed(self, operation: str, exc: OSError) -> KvStoreError:
        if exc.errno in _NO_ROOM:
            return CapacityExhausted(
                f"{self.path}: {operation} failed: {exc.strerror}; the disk, quota or limit of file sizes has less "
                "room than --ssd names: free some or use a smaller --ssd"
            )
        remedy = _REMEDIES.get(exc.errno or 0, _REMEDY)
        return StorageFailed(f"{self.path}: {operation} failed: {exc.strerror}; {remedy}")

    def close(self) -> None:
        """Unlock and close; nothing may be under way. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # a disk that is gone says so once more; the lock ends all the same
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def pages(size_bytes: int) -> mmap.mmap:
    """Zeroed memory of at least `size_bytes`, whole pages, aligned for O_DIRECT."""
    return mmap.mmap(-1, -(-size_bytes // UNIT_BYTES) * UNIT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
