"""Probes of what runs on the machine: versions, ports, transports. See `probes`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

from kvstore.cli.probes import Probe, Probed, State, Subject
from kvstore.errors import KvStoreError
from kvstore.model import checksum
from kvstore.model.values import NodeInfo
from kvstore.setting_types import split_address

_PACKAGES = ("grpcio", "protobuf", "numpy", "xxhash")
_OPTIONAL_PACKAGES = ("torch", "nixl")
_REFUSED = {("nixl", "1.5.2")}
_OURS = "kvstore.v1"
_ANSWER_S = 1.0
_PROBE_S = 60.0


# --- versions ----------------------------------------------------------------------------------------------------


def python(_: Subject) -> Iterator[Probed]:
    """3.11 or newer."""
    state = State.OK if sys.version_info >= (3, 11) else State.FAIL
    yield Probed("python", state, platform.python_version(), "" if state is State.OK else "use Python 3.11 or newer")


def packages(_: Subject) -> Iterator[Probed]:
    """What must be there, in the versions that the package asks for; what may be there."""
    least = _least_versions()
    for name in (*_PACKAGES, *_OPTIONAL_PACKAGES):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _PACKAGES:
                yield Probed(name, State.FAIL, "not installed", f"pip install {name}")
            else:
                yield Probed(name, State.OK, f"not installed (optional: pip install 'kvstore[{name}]')")
            continue
        if (name, version) in _REFUSED:
            yield Probed(name, State.FAIL, f"{version} is refused", f"pip install '{name}!={version}'")
        elif name in least and _numbers(version) < _numbers(least[name]):
            yield Probed(name, State.FAIL, version, f"pip install '{name}>={least[name]}'")
        else:
            yield Probed(name, State.OK, version)


def compiled(_: Subject) -> Iterator[Probed]:
    """Whether checksums are taken by the compiled part of the package."""
    if checksum.NATIVE:
        yield Probed("checksums", State.OK, "compiled")
    else:
        advice = "install a C compiler and Python's headers, then pip install --force-reinstall --no-cache-dir kvstore"
        yield Probed("checksums", State.WARN, "in Python: right, but writes and remote reads are slower", advice)


def _least_versions() -> dict[str, str]:
    try:
        required = importlib.metadata.requires("kvstore") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    matches = (re.match(r"([\w-]+)>=([\d.]+)", each) for each in required)
    return {match[1]: match[2] for match in matches if match}


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)][:3]


# --- ports -------------------------------------------------------------------------------------------------------


def ports(subject: Subject) -> Iterator[Probed]:
    """Each address of the configuration: free, or served by us already."""
    for setting, address in subject.addresses.items():
        name = f"port ({setting})"
        host, port = split_address(address)
        if port == 0:
            yield Probed(name, State.OK, f"{address}: any free one")
            continue
        refusal = _cannot_bind(host, port)
        if not refusal:
            yield Probed(name, State.OK, f"{address} is free")
        elif "in use" in refusal and (by := _served_by(address)):
            yield Probed(name, State.OK, f"{address} is served by {by}")
        else:
            flag = setting.replace("node.", "").replace(".", "-").replace("_", "-")
            yield Probed(name, State.FAIL, f"{address}: {refusal}", f"give another one with --{flag}, or port 0")


def _cannot_bind(host: str, port: int) -> str:
    """Why a server cannot listen there; empty if it can."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as exc:
        return str(exc.strerror or exc).lower()
    return ""


def _served_by(address: str) -> str:
    """Which server of ours answers there; empty if none does."""
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    from kvstore.rpc.channel import Channel

    channel = Channel(address)
    try:
        method = channel.stub(reflection_pb2_grpc.ServerReflectionStub).ServerReflectionInfo
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answers = list(channel.stream(method, asked, _ANSWER_S))
        names = [service.name for answer in answers for service in answer.list_services_response.service]
        return ", ".join(name for name in names if name.startswith(_OURS))
    except KvStoreError:
        return _metrics_or_tcp(address)
    finally:
        channel.close()


def _metrics_or_tcp(address: str) -> str:
    """As `_served_by`, for the ports that do not speak gRPC."""
    from kvstore.errors import StaleReference
    from kvstore.transport.tcp import TcpTransport

    with contextlib.suppress(OSError), socket.create_connection(split_address(address), _ANSWER_S) as peer:
        peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with peer.makefile("rb") as answer:
            if b"kvstore_" in answer.read():
                return "a kvstore metrics page"
    try:
        TcpTransport().connect(NodeInfo("", 0, "", "", address), _ANSWER_S).close()
    except StaleReference:  # it knows its epoch, which is never 0
        return "the tcp transport of a kvstore node"
    except KvStoreError:
        return ""
    return ""


# --- transports --------------------------------------------------------------------------------------------------


def shm_transport(_: Subject) -> Iterator[Probed]:
    """Memory is handed over a Unix socket, and both ends see the same bytes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
    handed: list[int] = []
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        socket.send_fds(ours, [b"memory"], [descriptor])
        handed = socket.recv_fds(theirs, 16, 1)[1]
        with mmap.mmap(descriptor, mmap.PAGESIZE) as one, mmap.mmap(handed[0], mmap.PAGESIZE) as other:
            one[:8] = b"kvstore!"
            if other[:8] != b"kvstore!":
                yield Probed("transport shm", State.FAIL, "other bytes arrived", "report this as a bug")
                return
        yield Probed("transport shm", State.OK, "memory handed over a Unix socket")
    except OSError as exc:
        remedy = "the container's profile must allow memfd_create and passing descriptors"
        yield Probed("transport shm", State.FAIL, exc.strerror or str(exc), remedy)
    finally:
        for each in (descriptor, *handed):
            os.close(each)
        ours.close()
        theirs.close()


def tcp_transport(_: Subject) -> Iterator[Probed]:
    """One slot through loopback, with its fence."""
    import numpy as np

    from kvstore.transport import ReadDescriptor, ReadStatus
    from kvstore.transport.tcp import TcpTransport
    from kvstore.transport.tcp_server import TcpServer

    payload = os.urandom(mmap.PAGESIZE)
    descriptor = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, payload, 0)
        staging = np.zeros(len(payload), dtype=np.uint8)
        with TcpServer(descriptor, len(payload), lambda slots: [2] * len(slots), 1, "127.0.0.1", 0) as server:
            connection = TcpTransport().connect(NodeInfo("", 1, "", "", server.address), 5.0)
            with contextlib.closing(connection):
                result = connection.read([ReadDescriptor(0, 0, len(payload), 0)], staging, 5.0)
        if result.status is not ReadStatus.DONE or staging.tobytes() != payload:
            yield Probed("transport tcp", State.FAIL, result.detail or "other bytes arrived", "look at the firewall")
        else:
            yield Probed("transport tcp", State.OK, "one page over loopback")
    except (OSError, KvStoreError) as exc:
        yield Probed("transport tcp", State.FAIL, str(exc), "a firewall or the container forbids loopback connections")
    finally:
        os.close(descriptor)


def nixl_transport(_: Subject) -> Iterator[Probed]:
    """One page out of another process; in a process of its own, because native libraries may end it."""
    name = "transport nixl"
    if importlib.util.find_spec("nixl") is None:
        yield Probed(name, State.OK, "not installed: other hosts are read over tcp (pip install 'kvstore[nixl]')")
        return
    command = [sys.executable, "-m", "kvstore.transport.nixl_probe"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        yield Probed(name, State.WARN, f"no answer after {_PROBE_S:g} s", "tcp is used instead; see its own log")
        return
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        said = ended.stderr.strip().splitlines() or [f"ended with status {ended.returncode}"]
        yield Probed(name, State.WARN, said[-1], "tcp is used instead; install what it misses, or another version")
        return
    answer = json.loads(lines[-1])
    if not answer["ok"]:
        yield Probed(name, State.WARN, answer["detail"], "tcp is used instead; install what it misses")
    elif answer["rdma_devices"]:
        yield Probed(name, State.OK, f"one page over {answer['detail']}; RDMA: {', '.join(answer['rdma_devices'])}")
    else:
        yield Probed(name, State.OK, f"one page over {answer['detail']}; no RDMA device here, so auto reads over tcp")


def ssd_io(subject: Subject) -> Iterator[Probed]:
    """How pages would get to and from the SSD; NIXL in a process of its own."""
    from kvstore.node.arena.ssd_io import AUTO, check_choice

    name, choice = "ssd io", subject.ssd_io
    try:
        check_choice(choice)
    except KvStoreError as exc:
        yield Probed(name, State.FAIL, str(exc), "change --ssd-io")
        return
    if subject.ssd_path is None:
        return
    way = AUTO if choice == "auto" else choice
    if way != "nixl":
        yield Probed(name, State.OK, way)
        return
    code = "from kvstore.node.arena import ssd_nixl; print(ssd_nixl.make_agent(ssd_nixl.load_nixl())[1])"
    remedy = "install what it misses, or use --ssd-io threads"
    try:
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        yield Probed(name, State.FAIL, f"NIXL was not loaded after {_PROBE_S:g} s", remedy)
        return
    if ended.returncode == 0:
        yield Probed(name, State.OK, f"nixl ({ended.stdout.split()[-1]})")
    else:
        lines = ended.stderr.strip().splitlines() or [f"ended with status {ended.returncode}"]
        yield Probed(name, State.FAIL, lines[-1], remedy)


PROBES: tuple[Probe, ...] = (python, packages, compiled, ports, shm_transport, tcp_transport, nixl_transport, ssd_io)
