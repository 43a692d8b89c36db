"""A disk that fails on demand: a child process serves one file over FUSE and does to its operations what it is told.

    with FuseDisk(folder) as disk:
        disk.path            the file, empty at first
        disk.tell("fail read")

What can be told: `ok`, `slow SECONDS` (every operation), `fail read`, `fail write`, `full` (no space for writes; an
fsync has nothing to lose then), `stop write` (writes stand still until something else is told; `wait_stopped` returns
when one does). `vanish` kills the child, as if the disk was pulled out. Needs /dev/fuse, libfuse (apt: fuse3) and the
package mfusepy.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import select
import subprocess
import sys
import threading
import time
from ctypes.util import find_library
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

DEADLINE_S = 20.0
NAME = "ssd"
FREE_BLOCKS = 1 << 20


def missing() -> str:
    """Why this machine cannot run it, "" if it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no access to /dev/fuse"
    if find_library("fuse3") is None and find_library("fuse") is None:
        return "no libfuse (apt: fuse3)"
    return "" if importlib.util.find_spec("mfusepy") else "mfusepy is not installed"


class FuseDisk:
    """The parent's side."""

    def __init__(self, folder: Path) -> None:
        self._mount, store, self._log = folder / "mount", folder / "store", folder / "fuse.log"
        self._mount.mkdir()
        store.touch()
        self.path = self._mount / NAME
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, __file__, self._mount, store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
        try:
            self._expect(b"mounted\n")
        except AssertionError as exc:
            self.close()
            if "not permitted" in str(exc):
                pytest.skip(f"this process may not mount: {exc}")
            raise

    def _expect(self, line: bytes) -> None:
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], DEADLINE_S)
        said = self._child.stdout.readline() if ready else b"nothing"
        assert said == line, f"the FUSE process said {said!r}, not {line!r}: {self._log.read_text()}"

    def tell(self, command: str) -> None:
        """Returns when it is in force."""
        assert self._child.stdin is not None
        self._child.stdin.write(command.encode() + b"\n")
        self._expect(b"done\n")

    def wait_stopped(self) -> None:
        """Wait until an operation stands still."""
        self._expect(b"stopped\n")

    def vanish(self) -> None:
        """Pull the disk out."""
        self._child.kill()
        self._child.wait(DEADLINE_S)

    def close(self) -> None:
        """Unmount and end the child; what stands still gets an error."""
        self.vanish()
        umount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
        subprocess.run([*umount, self._mount], check=False, capture_output=True, timeout=DEADLINE_S)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


# --- the child -----------------------------------------------------------------------------------------------


class Switches:
    """What is to be done to operations; set by the lines on stdin."""

    def __init__(self) -> None:
        self._command = ["ok"]
        self._changed = threading.Condition()

    def listen(self) -> None:
        for line in sys.stdin.buffer:
            with self._changed:
                self._command = line.decode().split()
                self._changed.notify_all()
            say(b"done\n")

    def pass_through(self, operation: str, *, needs_room: bool = False) -> None:
        """Wait or raise, as told."""
        with self._changed:
            command = self._command
            if command == ["stop", operation]:
                say(b"stopped\n")
                self._changed.wait_for(lambda: self._command is not command)
        match command:
            case ["slow", seconds]:
                time.sleep(float(seconds))
            case ["fail", which] if which == operation:
                raise OSError(errno.EIO, "told so")
            case ["full"] if needs_room:
                raise OSError(errno.ENOSPC, "told so")


def say(line: bytes) -> None:
    os.write(sys.stdout.fileno(), line)


def serve(mount: str, store: str) -> None:
    """Mount and serve until killed."""
    import mfusepy

    switches = Switches()
    fd = os.open(store, os.O_RDWR)

    class Disk(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def init(self, path: str) -> None:
            say(b"mounted\n")
            threading.Thread(target=switches.listen, daemon=True).start()

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            if path == "/":
                return {"st_mode": 0o40755, "st_nlink": 2}
            if path != f"/{NAME}":
                raise OSError(errno.ENOENT, path)
            status = os.fstat(fd)
            return {"st_mode": 0o100600, "st_nlink": 1, "st_size": status.st_size, "st_blocks": status.st_blocks}

        def open(self, path: str, flags: int) -> int:
            return 1

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            switches.pass_through("read")
            return os.pread(fd, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            switches.pass_through("write", needs_room=True)
            return os.pwrite(fd, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.ftruncate(fd, length)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            switches.pass_through("write")
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": FREE_BLOCKS, "f_bavail": FREE_BLOCKS}

    mfusepy.FUSE(Disk(), mount, foreground=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
