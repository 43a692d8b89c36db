"""Memory that a forked child must not have: transfers and pool slots of its parent.

MADV_DONTFORK alone leaves a hole in the child's address space. What the child maps next may lie there, and is unmapped
when the child lets go of its parent's mapping, at its end at the latest: its own objects vanish. So the hole is closed
at once in the child, with pages that nobody can read or write. Where something lies there already, the child keeps the
mapping object for ever besides.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

import numpy as np

_MAP_FIXED_NOREPLACE: Final = 0x100000
_PROT_NONE: Final = 0
_STEP_BYTES: Final = 1 << 20
_LEFT_OUT: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)


def leave_out_of_children(mapping: mmap.mmap) -> None:
    """Children forked from now on have no access to `mapping`; they may drop it, but not read, write or close it."""
    _LEFT_OUT.add(mapping)  # first: another thread may fork
    mapping.madvise(mmap.MADV_DONTFORK)


def _close_holes() -> None:
    for mapping in [each for each in _LEFT_OUT if not each.closed]:
        address, size = np.frombuffer(mapping, dtype=np.uint8).ctypes.data, len(mapping)
        if not _close(address, size):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
            for start in range(0, size, _STEP_BYTES):
                _close(address + start, min(_STEP_BYTES, size - start))


def _close(address: int, length: int) -> bool:
    """Map pages there that nobody can use; False where something lies there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    return bool(_libc.mmap(address, length, _PROT_NONE, flags, -1, 0) == address)


os.register_at_fork(after_in_child=_close_holes)
