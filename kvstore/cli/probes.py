"""Probes of the machine: kernel features, limits, memory, disk, clock. Each looks at one thing and leaves no trace.

A probe gets the `Subject` and gives one or more `Probed`. One that cannot look is a failure of its own and never ends
the others.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import platform
import re
import resource
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import NodeSettings
from kvstore.errors import ConfigurationError, KvStoreError
from kvstore.node.operators.limits import MemoryPlan
from kvstore.setting_types import parse_size, size_text

_F_SEAL_FUTURE_WRITE = 0x10
_PAGE_BYTES = 4096
_FILES_WANTED = 8192
"""Open files of a node with many clients: 4,096 sessions with a socket and a pidfd each."""
_SPARE_DISK_BYTES = 64 << 20
_FAST_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}
_YEAR_S = 31_556_952


class State(enum.StrEnum):
    """How bad it is. WARN: slower or less than it could be. FAIL: a node does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found; `remedy` says what to do where the state is not OK."""

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the machine is to run. `addresses`: setting -> host:port to listen on."""

    dram_bytes: int
    slots: int
    socket_dir: Path
    data_dir: Path
    addresses: dict[str, str]
    ssd_path: Path | None = None
    ssd_bytes: int = 0
    ssd_io: str = "auto"

    @classmethod
    def of(cls, settings: NodeSettings, other_addresses: dict[str, str]) -> Subject:
        """Of a node with these settings, and of the servers beside it."""
        planned = settings.planned()
        names = ("control_address", "metrics_address", "data_address")
        addresses = {f"node.{name}": getattr(planned, name) for name in names} | other_addresses
        path, _, size = str(getattr(planned, "ssd", "")).rpartition(":")
        return cls(
            dram_bytes=planned.dram,
            slots=planned.slots,
            socket_dir=Path(planned.socket_dir),
            data_dir=Path(planned.data_dir),
            addresses={name: address for name, address in addresses.items() if address},
            ssd_path=Path(path) if path else None,
            ssd_bytes=parse_size(size) if path else 0,
            ssd_io=planned.ssd_io,
        )

    @property
    def plan(self) -> MemoryPlan:
        """Its memory."""
        return MemoryPlan.of(self.dram_bytes, self.slots, self.ssd_bytes)


Probe = Callable[[Subject], Iterator[Probed]]


def run(probe: Probe, subject: Subject) -> list[Probed]:
    """What a probe found; if it could not look, that."""
    try:
        return list(probe(subject))
    except (OSError, ValueError, KvStoreError) as exc:
        name = probe.__name__.replace("_", " ")
        return [Probed(name, State.FAIL, f"could not be looked at: {exc}", "see the text of the error")]


# --- kernel ------------------------------------------------------------------------------------------------------


def kernel(_: Subject) -> Iterator[Probed]:
    """Linux 5.14 or newer has all that is used."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    state = State.OK if version >= (5, 14) else State.WARN if version >= (5, 3) else State.FAIL
    remedy = "" if state is State.OK else "use Linux 5.14 or newer: older ones populate memory at the first touch"
    yield Probed("kernel", state, f"{platform.system()} {platform.release()}", remedy)


def sealed_memory(_: Subject) -> Iterator[Probed]:
    """A memfd whose later writable mappings the kernel refuses: the catalog."""
    remedy = "use Linux 5.1 or newer, and a container profile that allows memfd_create"
    try:
        descriptor = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        yield Probed("memfd", State.FAIL, f"memfd_create: {exc.strerror}", remedy)
        return
    try:
        os.ftruncate(descriptor, _PAGE_BYTES)
        with mmap.mmap(descriptor, _PAGE_BYTES):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
            with contextlib.suppress(PermissionError), mmap.mmap(descriptor, _PAGE_BYTES):
                yield Probed("memfd", State.FAIL, "the seal is taken, and writable maps are made all the same", remedy)
                return
        yield Probed("memfd", State.OK, "memfd with F_SEAL_FUTURE_WRITE")
    except OSError as exc:
        yield Probed("memfd", State.FAIL, f"F_SEAL_FUTURE_WRITE: {exc.strerror}", remedy)
    finally:
        os.close(descriptor)


def pidfd(_: Subject) -> Iterator[Probed]:
    """By which a node knows that a writing process has ended."""
    try:
        descriptor = os.pidfd_open(os.getpid())
    except OSError as exc:
        remedy = "use Linux 5.3 or newer, and a container profile that allows pidfd_open"
        yield Probed("pidfd", State.FAIL, f"pidfd_open: {exc.strerror}", remedy)
        return
    with os.fdopen(descriptor, "rb"):
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if poller.poll(0):
            yield Probed("pidfd", State.FAIL, "says that this process has ended", "use Linux 5.3 or newer")
        else:
            yield Probed("pidfd", State.OK, "pidfd_open")


def huge_pages(_: Subject) -> Iterator[Probed]:
    """Whether shared memory gets them."""
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    text = path.read_text() if path.exists() else ""
    chosen = re.search(r"\[(\w+)\]", text)
    mode = chosen[1] if chosen else "not there"
    if mode in ("always", "within_size", "advise", "force"):
        yield Probed("huge pages", State.OK, f"shmem_enabled is {mode}")
    else:
        remedy = f"as root: echo advise > {path} (large copies get faster)"
        yield Probed("huge pages", State.WARN, f"shmem_enabled is {mode}", remedy)


# --- limits ------------------------------------------------------------------------------------------------------


def locked_memory(subject: Subject) -> Iterator[Probed]:
    """RDMA registers the arena, which counts as locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= subject.dram_bytes:
        yield Probed("memlock", State.OK, "no limit" if soft == resource.RLIM_INFINITY else size_text(soft))
    else:
        remedy = "only RDMA needs it: ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1"
        yield Probed("memlock", State.WARN, f"{size_text(soft)}, dram has {size_text(subject.dram_bytes)}", remedy)


def open_files(_: Subject) -> Iterator[Probed]:
    """A socket and a pidfd a client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FILES_WANTED:
        yield Probed("open files", State.OK, "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    else:
        remedy = f"more than {soft // 2:,} clients need more: ulimit -n {_FILES_WANTED}, or LimitNOFILE= in the unit"
        yield Probed("open files", State.WARN if soft >= 256 else State.FAIL, f"{soft:,} (at most {hard:,})", remedy)


# --- memory ------------------------------------------------------------------------------------------------------


def container_limit() -> int:
    """Memory limit of this container in bytes, 0 = none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists():
            text = Path(path).read_text().strip()
            # Version 1 writes a number near 2**63 for no limit.
            return 0 if text == "max" or int(text) >= 1 << 62 else int(text)
    return 0


def container_memory(subject: Subject) -> Iterator[Probed]:
    """The container's limit against the whole node."""
    limit = container_limit()
    total = subject.plan.total_bytes
    if not limit or total <= limit:
        yield Probed("container memory", State.OK, f"limit {_mib(limit)}" if limit else "no limit")
    else:
        found = f"limit {_mib(limit)}; the node takes {_mib(total)}, pages and catalog"
        remedy = "use a smaller --dram (it is per node, not per rank), or raise the container's limit"
        yield Probed("container memory", State.FAIL, found, remedy)


def free_memory(subject: Subject) -> Iterator[Probed]:
    """What is available now against the whole node."""
    try:
        subject.plan.check()
        yield Probed("free memory", State.OK, f"enough for {_mib(subject.plan.total_bytes)}")
    except ConfigurationError as exc:
        yield Probed("free memory", State.FAIL, str(exc), "use a smaller --dram, or end what else takes memory")


# --- folders and disks -------------------------------------------------------------------------------------------


def socket_folder(subject: Subject) -> Iterator[Probed]:
    """Clients on this host come through it."""
    folder, there = _nearest(subject.socket_dir)
    remedy = "give another one with --socket-dir, or set XDG_RUNTIME_DIR"
    if not there:
        writable = os.access(folder, os.W_OK | os.X_OK)
        found = f"{subject.socket_dir} is not there and can{'' if writable else 'not'} be made"
        yield Probed("socket folder", State.OK if writable else State.FAIL, found, "" if writable else remedy)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        path = folder / f".kvstore-doctor-{os.getpid()}"
        try:
            probe.bind(str(path))
            path.unlink()
            yield Probed("socket folder", State.OK, str(folder))
        except OSError as exc:
            yield Probed("socket folder", State.FAIL, f"{folder}: {exc.strerror or exc}", remedy)


def direct_io(subject: Subject) -> Iterator[Probed]:
    """One page to the disk and back, past the page cache."""
    for name, folder in _disk_folders(subject):
        yield _direct_io_in(f"O_DIRECT ({name})", _nearest(folder)[0])


def _direct_io_in(name: str, folder: Path) -> Probed:
    remedy = "the SSD tier then goes through the page cache: use ext4 or xfs on a local disk"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Probed(name, State.FAIL, f"{folder} is not writable", "give a folder that this user may write to")
    descriptor, path = tempfile.mkstemp(prefix=".kvstore-doctor-", dir=folder)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, _PAGE_BYTES) as page, mmap.mmap(-1, _PAGE_BYTES) as back:
            page[:] = os.urandom(_PAGE_BYTES)
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [back], 0)
            if page[:] != back[:]:
                return Probed(name, State.FAIL, f"{folder} gives other bytes back", "do not use this disk")
        return Probed(name, State.OK, str(folder))
    except OSError as exc:
        return Probed(name, State.WARN, f"{folder}: {exc.strerror or exc}", remedy)
    finally:
        os.close(descriptor)
        Path(path).unlink()


def free_disk(subject: Subject) -> Iterator[Probed]:
    """Room for the SSD tier, and for what a node keeps beside it."""
    free = shutil.disk_usage(_nearest(subject.data_dir)[0]).free
    state = State.OK if free >= _SPARE_DISK_BYTES else State.WARN
    remedy = "" if state is State.OK else "pins and the node's id are kept there: make room, or give another --data-dir"
    yield Probed("free disk (data_dir)", state, f"{_mib(free)} free on {subject.data_dir}", remedy)
    if subject.ssd_path is None:
        return
    taken = subject.ssd_path.stat().st_blocks * 512 if subject.ssd_path.is_file() else 0
    free = shutil.disk_usage(_nearest(subject.ssd_path.parent)[0]).free + taken
    state = State.OK if free >= subject.ssd_bytes else State.FAIL
    remedy = "" if state is State.OK else "use a smaller size in --ssd, or make room on that disk"
    yield Probed("free disk (ssd)", state, f"{_mib(free)} for {_mib(subject.ssd_bytes)}", remedy)


def _disk_folders(subject: Subject) -> Iterator[tuple[str, Path]]:
    yield "data_dir", subject.data_dir
    if subject.ssd_path is not None:
        yield "ssd", subject.ssd_path.parent


def _nearest(folder: Path) -> tuple[Path, bool]:
    """The folder, or the nearest one above it that is there; and whether it is itself there."""
    there = folder
    while not there.is_dir():
        there = there.parent
    return there, there == folder


# --- clock -------------------------------------------------------------------------------------------------------


def clock(_: Subject) -> Iterator[Probed]:
    """Lifetimes run on the monotonic clock; the wall clock is used for the file of the pins and for logs."""
    begin, wall_s = time.monotonic_ns(), time.time()
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else "unknown"
    year = 1970 + wall_s / _YEAR_S
    if time.monotonic_ns() <= begin:
        yield Probed("clock", State.FAIL, "the monotonic clock stands still", "report it to who runs this machine")
    elif not 2024 < year < 2100:
        yield Probed("clock", State.WARN, f"the wall clock says {int(year)}", "set it: pins end by it over a restart")
    elif name not in _FAST_CLOCKS:
        remedy = "reading it is slow; prefer tsc (boot parameter tsc=reliable, where that is true)"
        yield Probed("clock", State.WARN, f"clock source {name}", remedy)
    else:
        yield Probed("clock", State.OK, f"clock source {name}")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"


PROBES: tuple[Probe, ...] = (
    kernel,
    sealed_memory,
    pidfd,
    huge_pages,
    locked_memory,
    open_files,
    container_memory,
    free_memory,
    socket_folder,
    direct_io,
    free_disk,
    clock,
)
