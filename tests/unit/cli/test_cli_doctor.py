"""Every probe on a machine that has what it looks for, and on one that has not."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import mmap
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from console_run import Console

from kvstore.cli import probes, probes_software
from kvstore.cli.probes import Probed, State, Subject
from kvstore.config import NodeSettings
from kvstore.metrics import serve_metrics
from kvstore.model import checksum
from kvstore.node.operators import limits
from tests.chaos.node_thread import NodeThread

OK, WARN, FAIL = State.OK, State.WARN, State.FAIL
MIB = 1 << 20
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return Subject(MIB, 16, tmp_path / "run", tmp_path / "data", {})


def one(probe: probes.Probe, subject: Subject) -> Probed:
    (found,) = probes.run(probe, subject)
    assert found.state is OK or found.remedy, "what is not right has a remedy"
    return found


def raising(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_the_subject_is_what_the_settings_say(tmp_path: Path) -> None:
    settings = NodeSettings(dram=MIB, socket_dir=str(tmp_path), data_dir=str(tmp_path / "d"), metrics_address="")
    subject = Subject.of(settings, {"router.address": "127.0.0.1:7400"})
    assert subject == Subject(
        MIB,
        16,
        tmp_path,
        tmp_path / "d",
        {
            "node.control_address": "127.0.0.1:7420",
            "node.data_address": "127.0.0.1:0",
            "router.address": "127.0.0.1:7400",
        },
    )
    assert not (tmp_path / "d").exists()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- kernel and limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("release", "state"), [("6.1.0-x", OK), ("5.14.0", OK), ("5.4.1", WARN), ("4.18", FAIL)])
def test_kernel(subject: Subject, monkeypatch: pytest.MonkeyPatch, release: str, state: State) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert one(probes.kernel, subject).state is state


def test_memfd(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = open_descriptors()
    assert one(probes.sealed_memory, subject).state is OK
    with monkeypatch.context() as patch:
        patch.setattr(probes.fcntl, "fcntl", raising(errno.EINVAL))
        assert "Invalid argument" in one(probes.sealed_memory, subject).found
    with monkeypatch.context() as patch:
        patch.setattr(probes, "_F_SEAL_FUTURE_WRITE", 2)  # another seal: the later map is possible
        found = one(probes.sealed_memory, subject)
        assert found.state is FAIL and "all the same" in found.found
    monkeypatch.setattr(os, "memfd_create", raising(errno.EPERM))
    assert one(probes.sealed_memory, subject).state is FAIL
    assert open_descriptors() == descriptors, "nothing stays open"


def test_pidfd(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(probes.pidfd, subject).state is OK
    monkeypatch.setattr(os, "pidfd_open", raising(errno.ENOSYS))
    assert one(probes.pidfd, subject).state is FAIL


@pytest.mark.parametrize(("limit", "state"), [(MIB - 1, WARN), (MIB, OK), (resource.RLIM_INFINITY, OK)])
def test_memlock(subject: Subject, monkeypatch: pytest.MonkeyPatch, limit: int, state: State) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert one(probes.locked_memory, subject).state is state


@pytest.mark.parametrize(("limit", "state"), [(100, FAIL), (1024, WARN), (8192, OK), (resource.RLIM_INFINITY, OK)])
def test_open_files(subject: Subject, monkeypatch: pytest.MonkeyPatch, limit: int, state: State) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert one(probes.open_files, subject).state is state


@pytest.mark.parametrize(("text", "state"), [("always [never]", WARN), ("always [advise] never", OK), ("", WARN)])
def test_huge_pages(subject: Subject, monkeypatch: pytest.MonkeyPatch, text: str, state: State) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert one(probes.huge_pages, subject).state is state


# --- memory --------------------------------------------------------------------------------------------------


def test_c07_the_containers_limit_is_compared_with_the_whole_node(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = subject.plan.total_bytes
    for limit, state in ((0, OK), (total, OK), (total - 1, FAIL)):
        monkeypatch.setattr(probes, "container_limit", lambda limit=limit: limit)
        found = one(probes.container_memory, subject)
        assert found.state is state
    assert "per node, not per rank" in found.remedy


def test_limits_of_both_kinds_of_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, text, expected in (
        ("memory.max", "max\n", 0),
        ("memory.max", "1048576\n", MIB),
        ("limit_in_bytes", "9223372036854771712\n", 0),
        ("limit_in_bytes", "1048576\n", MIB),
        ("nothing", "", 0),
    ):
        monkeypatch.setattr(Path, "exists", lambda self, there=there: str(self).endswith(there))
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert probes.container_limit() == expected


def test_free_memory(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: subject.plan.total_bytes)
    assert one(probes.free_memory, subject).state is OK
    monkeypatch.setattr(limits, "available_bytes", lambda: subject.plan.total_bytes - 1)
    assert one(probes.free_memory, subject).state is FAIL


# --- folders and disks ---------------------------------------------------------------------------------------


def test_socket_folder(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    found = one(probes.socket_folder, subject)
    assert found.state is OK and "can be made" in found.found and not subject.socket_dir.exists()
    subject.socket_dir.mkdir()
    assert one(probes.socket_folder, subject) == Probed("socket folder", OK, str(subject.socket_dir))
    assert not list(subject.socket_dir.iterdir())
    long = replace(subject, socket_dir=subject.socket_dir / ("x" * 100))
    long.socket_dir.mkdir()
    assert one(probes.socket_folder, long).state is FAIL
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert one(probes.socket_folder, replace(subject, socket_dir=Path("/proc/no/such"))).state is FAIL


def test_g06_direct_io_is_tried_with_a_page(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    subject.data_dir.mkdir()
    found = probes.run(probes.direct_io, replace(subject, ssd_path=subject.data_dir / "ssd", ssd_bytes=MIB))
    assert [each.name for each in found] == ["O_DIRECT (data_dir)", "O_DIRECT (ssd)"]
    assert all(each.state in (OK, WARN) for each in found), "some file systems do not take it"

    def forget(descriptor: int, buffers: list[mmap.mmap], offset: int) -> int:
        buffers[0][:] = bytes(4096)
        return 4096

    with monkeypatch.context() as patch:
        patch.setattr(os, "O_DIRECT", 0)
        assert one(probes.direct_io, subject).state is OK
        patch.setattr(os, "preadv", forget)
        assert "other bytes" in one(probes.direct_io, subject).found
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", raising(errno.EINVAL))
        found_one = one(probes.direct_io, subject)
        assert found_one.state is WARN and "page cache" in found_one.remedy
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert one(probes.direct_io, subject).state is FAIL
    assert not list(subject.data_dir.iterdir())


def test_free_disk(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda _: Usage(0, 0, 100 * MIB))
    assert one(probes.free_disk, subject).state is OK
    for size, state in ((100 * MIB, OK), (101 * MIB, FAIL)):
        with_ssd = replace(subject, ssd_path=subject.data_dir / "ssd", ssd_bytes=size)
        assert [each.state for each in probes.run(probes.free_disk, with_ssd)] == [OK, state]
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda _: Usage(0, 0, MIB))
    assert one(probes.free_disk, subject).state is WARN


def test_clock(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: True)
    for source, state in (("tsc\n", OK), ("hpet\n", WARN)):
        monkeypatch.setattr(Path, "read_text", lambda self, source=source: source)
        assert one(probes.clock, subject).state is state
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 0.0)
        assert "1970" in one(probes.clock, subject).found
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    assert one(probes.clock, subject).state is FAIL


# --- software ------------------------------------------------------------------------------------------------


def test_python(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(probes_software.python, subject).state is OK
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert one(probes_software.python, subject).state is FAIL


def test_packages(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"grpcio": "1.80.0", "protobuf": "6.40.1", "numpy": "2.1.0", "xxhash": "3.6.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["grpcio>=1.78", "numpy>=2.0", "rich"])
    found = probes.run(probes_software.packages, subject)
    assert [each.state for each in found] == [OK] * 6 and "optional" in found[5].found
    versions |= {"grpcio": "1.8.0", "nixl": "1.5.2", "torch": "2.9.0+cpu"}
    del versions["xxhash"]
    states = {each.name: each.state for each in probes.run(probes_software.packages, subject)}
    assert states == {"grpcio": FAIL, "protobuf": OK, "numpy": OK, "xxhash": FAIL, "torch": OK, "nixl": FAIL}
    versions["nixl"] = "1.5.3"
    assert {each.name: each.state for each in probes.run(probes_software.packages, subject)}["nixl"] is OK


def test_what_takes_checksums(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "NATIVE", True)
    assert one(probes_software.compiled, subject).state is OK
    monkeypatch.setattr(checksum, "NATIVE", False)
    found = one(probes_software.compiled, subject)
    assert found.state is WARN and "compiler" in found.remedy


def test_ports(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_software, "_ANSWER_S", 0.2)
    node = NodeThread(tmp_path, dram_bytes=MIB, node_id="doctored")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        addresses = {
            "node.control_address": node.info.control_address,
            "node.data_address": node.info.data_address,
            "node.metrics_address": serve_metrics("127.0.0.1:0"),
            "node.other_address": "127.0.0.1:0",
            "metadata.address": taken,
            "router.address": "192.0.2.1:7400",
        }
        found = probes.run(probes_software.ports, replace(subject, addresses=addresses))
    free = one(probes_software.ports, replace(subject, addresses={"metadata.address": taken}))
    node.stop()
    assert [each.state for each in found] == [OK, OK, OK, OK, FAIL, FAIL]
    assert "kvstore.v1.NodeService" in found[0].found and "tcp transport" in found[1].found
    assert "metrics page" in found[2].found and "any free one" in found[3].found
    assert "--metadata-address" in found[4].remedy and "--router-address" in found[5].remedy
    assert free.state is OK and "free" in free.found


def test_transports_that_work(subject: Subject) -> None:
    descriptors = open_descriptors()
    assert one(probes_software.shm_transport, subject).state is OK
    assert one(probes_software.tcp_transport, subject).state is OK
    assert open_descriptors() == descriptors


def test_transports_that_do_not(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", raising(errno.EPERM))
        assert one(probes_software.shm_transport, subject).state is FAIL
    monkeypatch.setattr(socket, "create_connection", raising(errno.ECONNREFUSED))
    monkeypatch.setattr("kvstore.transport.tcp.dial", raising(errno.ECONNREFUSED))
    assert one(probes_software.tcp_transport, subject).state is FAIL


def test_nixl_is_optional_and_tried_in_a_process_of_its_own(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_software.importlib.util, "find_spec", lambda _: None)
    assert one(probes_software.nixl_transport, subject).state is OK
    monkeypatch.setattr(probes_software.importlib.util, "find_spec", lambda _: object())

    def ended(code: int, text: str, answer: str = "") -> Callable[..., Any]:
        return lambda *_, **__: subprocess.CompletedProcess([], code, answer, text)

    page = '{"ok": true, "detail": "UCX", "rdma_devices": %s}'
    monkeypatch.setattr(subprocess, "run", ended(0, "", page % "[]"))
    assert "auto reads over tcp" in one(probes_software.nixl_transport, subject).found
    monkeypatch.setattr(subprocess, "run", ended(0, "", page % '["mlx5_0"]'))
    assert "RDMA: mlx5_0" in one(probes_software.nixl_transport, subject).found
    monkeypatch.setattr(subprocess, "run", ended(0, "", '{"ok": false, "detail": "no UCX", "rdma_devices": []}'))
    refused = one(probes_software.nixl_transport, subject)
    assert (refused.state, refused.found) == (State.WARN, "no UCX")
    monkeypatch.setattr(subprocess, "run", ended(1, "Traceback\nImportError: libucp.so.0 not found\n"))
    assert "libucp.so.0" in one(probes_software.nixl_transport, subject).found
    monkeypatch.setattr(subprocess, "run", ended(-11, ""))
    assert "-11" in one(probes_software.nixl_transport, subject).found


def test_ssd_io_is_tried_where_a_node_would_use_nixl(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.run(probes_software.ssd_io, subject) == [], "there is no SSD"
    subject = replace(subject, ssd_path=Path("/somewhere"), ssd_bytes=MIB)
    assert one(probes_software.ssd_io, subject) == Probed("ssd io", OK, "threads")
    wrong = one(probes_software.ssd_io, replace(subject, ssd_path=None, ssd_io="gds"))
    assert wrong.state is FAIL and "no GPU arena" in wrong.found

    def ended(code: int, said: str, errors: str) -> Callable[..., Any]:
        return lambda *_, **__: subprocess.CompletedProcess([], code, said, errors)

    subject = replace(subject, ssd_io="nixl")
    monkeypatch.setattr(subprocess, "run", ended(0, "libaio\n", "E1130 io_uring refused"))
    assert one(probes_software.ssd_io, subject) == Probed("ssd io", OK, "nixl (libaio)")
    monkeypatch.setattr(subprocess, "run", ended(1, "", "Traceback\nConfigurationError: NIXL is not installed\n"))
    found = one(probes_software.ssd_io, subject)
    assert found.state is FAIL and "NIXL is not installed" in found.found and "--ssd-io threads" in found.remedy
    monkeypatch.setattr(subprocess, "run", ended(-11, "", ""))
    assert "-11" in one(probes_software.ssd_io, subject).found


# --- the command ---------------------------------------------------------------------------------------------


def test_a_probe_that_cannot_look_does_not_end_the_others(subject: Subject) -> None:
    def odd_probe(_: Subject) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", "/sys/x")

    (found,) = probes.run(odd_probe, subject)
    assert (found.name, found.state) == ("odd probe", FAIL) and "/sys/x" in found.found


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    console = Console(capsys, monkeypatch, tmp_path)
    monkeypatch.setattr(probes, "PROBES", (probes.kernel, probes.free_memory))
    monkeypatch.setattr(probes_software, "PROBES", (probes_software.python,))
    folders = ["--socket-dir", str(tmp_path), "--data-dir", str(tmp_path)]
    facts = console.json("doctor", "--dram", "1MiB", *folders)
    assert facts["failed"] == 0 and [probe["name"] for probe in facts["probes"]] == ["kernel", "free memory", "python"]
    code, out, err = console.run("doctor", "--dram", "100TiB", *folders, "--json")
    assert (code, err, json.loads(out)["failed"]) == (1, "", 1)
    code, out, _ = console.run("doctor", "--dram", "100TiB", *folders)
    assert code == 1 and "1 of 3 probes failed" in out and "use a smaller --dram" in out
    assert not list(tmp_path.iterdir())


def test_doctor_with_all_probes_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    console = Console(capsys, monkeypatch, tmp_path)
    ports = [part for name in ("control-address", "metrics-address") for part in (f"--{name}", "127.0.0.1:0")]
    ports += ["--metadata-address", "127.0.0.1:0", "--router-address", "127.0.0.1:0"]
    monkeypatch.setattr(probes_software.importlib.util, "find_spec", lambda _: None)
    folders = ["--socket-dir", str(tmp_path), "--data-dir", str(tmp_path)]
    facts = console.json("doctor", "--dram", "1MiB", *folders, *ports)
    assert facts["failed"] == 0 and len(facts["probes"]) > 20
    assert not list(tmp_path.iterdir())
