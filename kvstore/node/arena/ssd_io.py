"""How payloads go to and from the SSD file: by system calls of the tier's threads, or by NIXL. `open_ssd_io` chooses.

`auto` is threads. Measured with `bench/ssd.py` and `bench/ssd_node.py` (`--io threads,nixl`, alternated rounds, two
shared cores, ext4 on a virtual disk), threads : nixl (io_uring), processor seconds of the whole process per GiB:

    slots of                64 KiB        256 KiB       2 MiB         8 MiB
    read, GB/s              0.77 : 0.90   2.14 : 1.41   0.81 : 0.78   1.09 : 1.02
    read, CPU s/GiB         0.55 : 0.57   0.22 : 0.50   0.12 : 0.35   0.09 : 0.19
    write, GB/s             1.56 : 1.79   2.44 : 1.55   1.57 : 1.61   1.66 : 1.70
    write, CPU s/GiB        0.67 : 0.57   0.21 : 0.45   0.13 : 0.25   0.11 : 0.17
    read back, CPU s/GiB                  0.63 : 0.71   0.28 : 0.35   0.21 : 0.26
    save, CPU s/GiB                       0.31 : 0.46   0.16 : 0.22   0.11 : 0.15

Where the disk is the bound both are as fast as it, and where it is not NIXL is slower: somebody has to ask how far it
is, and its work goes through one more thread. It gains where small slots lie scattered, because a job's slots are under
way together. A disk that needs a longer queue than eight threads give it may decide otherwise: measure there, and name
the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigurationError, KvStoreError
from kvstore.node.arena import Buffer, Run, SsdIo
from kvstore.node.arena.ssd import SsdArena

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

WAYS: Final = ("threads", "nixl")
"""Names of what moves payloads."""
AUTO: Final = "threads"
CHOICES: Final = ("auto", *WAYS, "gds")


class ThreadedIo:
    """preadv and pwritev in the caller's thread, a run a call: what overlaps is what several threads ask for."""

    name = detail = "threads"

    def __init__(self, arena: SsdArena) -> None:
        self._arena = arena

    def read(self, runs: Sequence[Run]) -> list[KvStoreError | None]:
        """See `SsdIo`."""
        return [_error(self._arena.read_all, run) for run in runs]

    def write(self, runs: Sequence[Run]) -> list[KvStoreError | None]:
        """See `SsdIo`."""
        return [_error(self._arena.write_all, run) for run in runs]

    def close(self) -> None:
        """Nothing is held."""


def _error(call: Callable[[int, Sequence[Buffer]], None], run: Run) -> KvStoreError | None:
    try:
        call(run.offset, run.pieces)
    except KvStoreError as exc:
        return exc
    return None


def check_choice(choice: str) -> None:
    """Raises ConfigurationError for what is no choice, or none that can be had here."""
    if choice not in CHOICES:
        raise ConfigurationError(f"unknown ssd_io {choice!r}; known: {', '.join(CHOICES)}")
    if choice == "gds":
        raise ConfigurationError(
            "ssd_io gds moves pages between the SSD and GPU memory, and this node has no GPU arena: "
            "use auto, threads or nixl"
        )


def open_ssd_io(choice: str, arena: SsdArena, memory: npt.NDArray[np.uint8]) -> SsdIo:
    """`choice`: one of `CHOICES`; `memory`: the DRAM arena, where payloads come from and go to.

    Raises ConfigurationError for what cannot be had: nobody gets another way than the one that was named.
    """
    check_choice(choice)
    if choice == "nixl":
        from kvstore.node.arena.ssd_nixl import NixlIo  # only here: it is not needed without NIXL

        return NixlIo.open(arena, memory)
    return ThreadedIo(arena)
