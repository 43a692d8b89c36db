"""All settings: names, defaults, units and what changing one does. Defaults live here and nowhere else.

A setting comes from, weakest first: its default, one TOML file (tables `[node]`, `[metadata]`, `[router]`), the
environment (`KVSTORE_NODE_DRAM`), the command line (`--dram`). The file is `--config`, else `./kvstore.toml`,
else `/etc/kvstore.toml`. A name that is not known is refused with the nearest known one, in the file and in the
environment alike, whichever program reads it: a misspelt setting never passes for a default.

Settings built in code (`NodeSettings(slots=100)`) see neither file nor environment; `load` does.
`docs/settings.md` is made from this module (`kvstore settings-table`).
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kvstore.errors import ConfigurationError
from kvstore.setting_types import (
    Count,
    File,
    Folder,
    Host,
    ListenAddress,
    Name,
    NodeId,
    OptionalListenAddress,
    OptionalPeerAddress,
    PeerAddress,
    QuotaTexts,
    Size,
    SsdPlace,
    is_loopback,
    is_node_id,
    is_wildcard,
    size_text,
    split_address,
    split_ssd,
)

DEFAULT_FILES = (Path("kvstore.toml"), Path("/etc/kvstore.toml"))
ENVIRONMENT_PREFIX = "KVSTORE_"
OTHER_ENVIRONMENT = ("KVSTORE_DEBUG", "KVSTORE_PEERS", "KVSTORE_TRACES", "KVSTORE_VLLM", "KVSTORE_VLLM_PYTHON")
"""Variables of ours that are not settings: tracebacks of the CLI; peers for benches; traces and vLLM for tests."""

_SOCKET_PATH_LIMIT_BYTES = 107
_INJECTED = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
"""Kubernetes puts these into every container when a service's name starts with `kvstore`; they are not ours."""


class Settings(BaseSettings):
    """Base of the three tables. Frozen; values given in code are validated like all others."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)
    table: ClassVar[str]
    """Name of the TOML table and, in capitals, of the environment's part."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the constructor is given: `load` merges the sources, so that their order is in one place."""
        return (init_settings,)

    @classmethod
    def environment_name(cls, name: str) -> str:
        """The variable of a setting: `KVSTORE_NODE_DRAM`."""
        return f"{ENVIRONMENT_PREFIX}{cls.table}_{name}".upper()


class NodeSettings(Settings):
    """One node: the daemon that owns this host's share of the pool."""

    model_config = SettingsConfigDict(env_prefix="KVSTORE_NODE_")
    table: ClassVar[str] = "node"

    control_address: ListenAddress = Field(
        default="127.0.0.1:7420",
        description="gRPC address to listen on. Port 0 takes a free one, which is printed at the start.",
    )
    metrics_address: OptionalListenAddress = Field(
        default="127.0.0.1:7421",
        description="Prometheus address to listen on, plain HTTP. Empty switches metrics off; port 0 takes a free one.",
    )
    data_address: ListenAddress = Field(
        default="127.0.0.1:0",
        description="Address of the tcp transport, from which other hosts read pages. Give a fixed port to open it in "
        "a firewall.",
    )
    transport: Name = Field(
        default="auto",
        description="What other hosts read pages with, besides tcp, which is always there. `auto`: NIXL where this "
        "host has an RDMA device and the nixl package. `nixl`: NIXL, or the node does not start. `tcp`: nothing else.",
    )
    nixl_backend: Name = Field(
        default="UCX",
        description="NIXL's back-end: `UCX` (RDMA, NVLink, TCP) or `LIBFABRIC` (EFA). Readers must use the same.",
    )
    nixl_devices: Name = Field(
        default="",
        description="Network devices for NIXL, separated by commas, for example `mlx5_0:1,mlx5_1:1`; one that is not "
        "there is an error. Empty: all.",
    )
    peer_secret_file: File = Field(
        default="",
        description="File with a secret that readers on other hosts, and other nodes, must show before they may read "
        "this node's memory. It travels in plain. Empty: everybody may who reaches data_address.",
    )
    advertise: Host = Field(
        default="",
        description="Host name or IP at which other hosts reach this node. Empty: the host that the addresses name.",
    )
    metadata_address: OptionalPeerAddress = Field(
        default="",
        description="Metadata service to tell what this node holds. Empty: the node stands alone, other hosts do not "
        "find its pages.",
    )
    dram: Size = Field(
        default=1 << 30,
        description="Memory for pages, in bytes or with KiB, MiB, GiB, TiB. All of it gets used; the catalog comes on "
        "top (64 bytes an entry).",
    )
    ssd: SsdPlace = Field(
        default="",
        description="File on an SSD for what does not fit into dram and for what outlives a restart of the host; in a "
        "folder the node makes its own file. The file never gets longer than SIZE, headers included. Empty: no SSD.",
    )
    ssd_admission: Name = Field(
        default="always",
        description="What is written to the SSD before it has to leave dram. `always`: everything. `second_touch`: "
        "what was used at least twice, which wears the disk less and keeps less.",
    )
    ssd_io: Name = Field(
        default="auto",
        description="How pages get to and from the SSD. `auto`: what takes the least processor time, today `threads`: "
        "system calls of 16 threads. `nixl`: io_uring (libaio where the kernel refuses that) through the library NIXL, "
        "which takes 200 MB; without it the start is refused. `gds` (straight to GPU memory): refused, no GPU arena.",
    )
    quotas: QuotaTexts = Field(
        default="",
        description="Bytes that a tenant (or the model of namespaces without one) keeps at least and takes at most, "
        "for example `acme:dram=1GiB..4GiB,ssd=..100GiB; gamma:dram=2GiB..`. Others share the rest.",
    )
    slots: Count = Field(
        default=0,
        description="Chunks that are expected to fit, on both tiers; the catalog gets twice as many entries. Too few: "
        "writes are refused with catalog_full while memory is free. 0: one for every 64 KiB of dram and every MiB of "
        "ssd.",
    )
    room_chunks: Count = Field(
        default=0,
        description="Keep at most this many chunks, however much memory there is; for measurements. 0: no such cap.",
    )
    eviction: Name = Field(
        default="lru",
        description="Which chunks go first when memory is full. `lru`: tails of the prefixes that were longest unused. "
        "Others: `s3fifo`, `sieve`, `arc`, `gdsf` (also weighs what computing again costs).",
    )
    host_id: Name = Field(
        default="",
        description="Name of this host. A client that names another one reads over the network, even where it could "
        "open the socket. Empty: boot id and host name of this machine.",
    )
    socket_dir: Folder = Field(
        default="",
        description="Folder of the Unix socket where clients on this host get the shared memory; who may open the "
        "socket may write pages. Empty: $XDG_RUNTIME_DIR, else /run/kvstore.",
    )
    data_dir: Folder = Field(
        default="",
        description="Folder for what outlives the process (the node id). One node a folder. Empty: /var/lib/kvstore "
        "for root, else ~/.local/share/kvstore.",
    )
    node_id: NodeId = Field(
        default="",
        description="Name of the node in the pool; two nodes with one name push each other out. Empty: made once and "
        "kept in data_dir.",
    )
    insecure: bool = Field(
        default=False,
        description="Allow addresses that other machines reach, although nothing is encrypted or authenticated: "
        "everybody on that network can read and write the pool.",
    )

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        _check_listen(self, ("control_address", "metrics_address", "data_address"))
        hosts = {split_address(address)[0] for address in (self.control_address, self.data_address)}
        for name, known in (("transport", ("auto", "tcp", "nixl")), ("nixl_backend", ("UCX", "LIBFABRIC"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")
        if not self.advertise and any(is_wildcard(host) for host in hosts):
            raise ValueError("advertise must name this host when an address listens everywhere (0.0.0.0 or ::)")
        return self

    def resolved(self) -> NodeSettings:
        """A copy in which host_id, socket_dir, data_dir, node_id, ssd and slots are filled in.

        Makes both folders and, once, the node id. Raises ConfigurationError naming the folder it cannot use.
        """
        data_dir = _made_folder("data_dir", self.data_dir or _default_data_dir(), 0o700)
        socket_dir = _made_folder("socket_dir", self.socket_dir or _default_socket_dir(), 0o755)
        return self._filled(data_dir, socket_dir, self.node_id or _kept_node_id(data_dir))

    def planned(self) -> NodeSettings:
        """As `resolved`, but nothing is made: a node id that is not there yet stays empty."""
        data_dir = Path(self.data_dir or _default_data_dir()).expanduser().absolute()
        socket_dir = Path(self.socket_dir or _default_socket_dir()).expanduser().absolute()
        kept = _kept_node_id(data_dir) if not self.node_id and (data_dir / "node_id").exists() else ""
        return self._filled(data_dir, socket_dir, self.node_id or kept)

    def _filled(self, data_dir: Path, socket_dir: Path, node_id: str) -> NodeSettings:
        path = socket_dir / f"{node_id}.sock"
        if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT_BYTES:
            raise ConfigurationError(
                f"{path} is longer than {_SOCKET_PATH_LIMIT_BYTES} bytes; use a shorter socket_dir"
            )
        found = {
            "host_id": self.host_id or _machine_host_id(),
            "socket_dir": str(socket_dir),
            "data_dir": str(data_dir),
            "node_id": node_id,
            "slots": self.slots or max(1, (self.dram >> 16) + (self._ssd_bytes() >> 20)),
            "ssd": self._ssd_file(node_id),
        }
        return self.model_copy(update=found)

    def _ssd_bytes(self) -> int:
        return split_ssd(self.ssd)[1] if self.ssd else 0

    def _ssd_file(self, node_id: str) -> str:
        """The file itself, absolute, where a folder was named."""
        if not self.ssd:
            return ""
        path, size = split_ssd(self.ssd)
        place = Path(path).expanduser().absolute()
        file = place / f"{node_id or 'NODE_ID'}.kvssd" if place.is_dir() else place
        return f"{file}:{size}"


class MetadataSettings(Settings):
    """The metadata service: which node holds which prefix."""

    model_config = SettingsConfigDict(env_prefix="KVSTORE_METADATA_")
    table: ClassVar[str] = "metadata"

    address: ListenAddress = Field(
        default="127.0.0.1:7410",
        description="gRPC address to listen on. Port 0 takes a free one, which is printed at the start.",
    )
    metrics_address: OptionalListenAddress = Field(
        default="127.0.0.1:7411",
        description="Prometheus address to listen on, plain HTTP. Empty switches metrics off; port 0 takes a free one.",
    )
    insecure: bool = Field(
        default=False,
        description="Allow addresses that other machines reach, although nothing is encrypted or authenticated: "
        "everybody on that network can change the index.",
    )

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        _check_listen(self, ("address", "metrics_address"))
        return self


class RouterSettings(Settings):
    """The scheduler: sends each request to the worker that can start first."""

    model_config = SettingsConfigDict(env_prefix="KVSTORE_ROUTER_")
    table: ClassVar[str] = "router"

    address: ListenAddress = Field(
        default="127.0.0.1:7400",
        description="gRPC address to listen on. Port 0 takes a free one, which is printed at the start.",
    )
    metrics_address: OptionalListenAddress = Field(
        default="",
        description="Prometheus address to listen on, plain HTTP; `up` serves the scheduler's figures with the node's. "
        "Empty switches metrics off; port 0 takes a free one.",
    )
    metadata_address: PeerAddress = Field(
        default="127.0.0.1:7410",
        description="Metadata service whose index the scheduler follows. Unreachable: it picks without hits.",
    )
    policy: Name = Field(
        default="longest_prefix",
        description="Who gets a request that names no policy. `longest_prefix`: the prefill worker with most of the "
        "prompt cached.",
    )
    insecure: bool = Field(
        default=False,
        description="Allow an address that other machines reach, although nothing is encrypted or authenticated: "
        "everybody on that network can ask and report.",
    )

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        _check_listen(self, ("address", "metrics_address"))
        return self


TABLES: tuple[type[Settings], ...] = (NodeSettings, MetadataSettings, RouterSettings)
_Settings = TypeVar("_Settings", bound=Settings)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One line of the settings' documentation. `environment` is the variable's name."""

    table: str
    name: str
    default: str
    environment: str
    text: str


def describe() -> Iterator[SettingRow]:
    """Every setting, table by table, in the order in which they are declared."""
    for kind in TABLES:
        for name, field in kind.model_fields.items():
            yield SettingRow(
                kind.table, name, _default_text(field), kind.environment_name(name), field.description or ""
            )


def _default_text(field: FieldInfo) -> str:
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return size_text(field.default) if field.title == "SIZE" else str(field.default)


def load(
    kind: type[_Settings], flags: Mapping[str, object] = MappingProxyType({}), *, config: Path | None = None
) -> _Settings:
    """The settings of one table from file, environment and `flags` (only those given on the command line).

    `config`: a file that must exist; None searches the default places. Raises ConfigurationError that names
    setting, source and what to write instead.
    """
    path = _find_file(config)
    file = _read_tables(path).get(kind.table, {}) if path else {}
    _check_environment(os.environ)
    environment = EnvSettingsSource(kind)()
    merged = {**file, **environment, **flags}
    try:
        return kind(**merged)
    except ValidationError as exc:
        problems = []
        for error in exc.errors():
            text = str(error.get("ctx", {}).get("error", error["msg"]))
            name = str(error["loc"][0]) if error["loc"] else ""
            origin = (
                "command line" if name in flags else kind.environment_name(name) if name in environment else str(path)
            )
            problems.append(f"[{kind.table}] {name} ({origin}): {text}" if name else f"[{kind.table}] {text}")
        raise ConfigurationError("; ".join(problems)) from exc


def _find_file(config: Path | None) -> Path | None:
    if config is not None:
        if not config.is_file():
            raise ConfigurationError(f"--config {config}: there is no such file")
        return config
    return next((path for path in DEFAULT_FILES if path.is_file()), None)


def _read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """Parse a file and refuse every table and key that is not known."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigurationError(f"cannot read {path}: {exc}") from exc
    tables = {kind.table: kind for kind in TABLES}
    for table, values in content.items():
        if table not in tables:
            homes = [f"[{kind.table}] {table}" for kind in TABLES if table in kind.model_fields]
            hint = f"; did you mean {homes[0]}?" if homes else _nearest(table, tables)
            raise ConfigurationError(f"{path}: unknown table or key {table!r}{hint}")
        if not isinstance(values, dict):
            raise ConfigurationError(f"{path}: {table} must be a table: write [{table}] on a line of its own")
        for key in values:
            if key not in tables[table].model_fields:
                raise ConfigurationError(
                    f"{path}: unknown setting [{table}] {key}{_nearest(key, tables[table].model_fields)}"
                )
    return content


def _check_environment(environment: Mapping[str, str]) -> None:
    known = {row.environment for row in describe()} | set(OTHER_ENVIRONMENT)
    for name in sorted(environment):
        # The environment's names are matched in any case, as pydantic-settings does.
        if name.upper().startswith(ENVIRONMENT_PREFIX) and name.upper() not in known and not _INJECTED.search(name):
            raise ConfigurationError(f"unknown environment variable {name}{_nearest(name.upper(), known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or the list of all known names where none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"


def _check_listen(settings: Settings, names: Iterable[str]) -> None:
    """Refuse addresses that other machines reach unless that was asked for."""
    for name in names:
        address = getattr(settings, name)
        if address and not getattr(settings, "insecure", False) and not is_loopback(split_address(address)[0]):
            raise ValueError(
                f"{name} {address} can be reached from other machines and nothing is encrypted yet; "
                f"use 127.0.0.1, or --insecure (insecure = true) in a network that you trust"
            )


def _made_folder(name: str, folder: str, mode: int) -> Path:
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigurationError(
            f"{name}: cannot make {path} ({exc.strerror}); give --{name.replace('_', '-')}"
        ) from exc
    return path


def _default_data_dir() -> str:
    return "/var/lib/kvstore" if os.geteuid() == 0 else "~/.local/share/kvstore"


def _default_socket_dir() -> str:
    return os.environ.get("XDG_RUNTIME_DIR") or "/run/kvstore"


def _machine_host_id() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}-{socket.gethostname()}"


def _kept_node_id(data_dir: Path) -> str:
    """The id in `data_dir/node_id`, made on the first start. Two starts at once agree on one."""
    path = data_dir / "node_id"
    try:
        if not path.exists():
            draft = path.with_name(f"node_id.{os.getpid()}")
            draft.write_text(f"node-{uuid.uuid4().hex[:12]}\n")
            try:
                # A link either makes the whole file or fails: nobody can read half an id.
                path.hardlink_to(draft)
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        node_id = path.read_text().strip()
    except OSError as exc:
        raise ConfigurationError(
            f"data_dir: cannot keep the node id in {path} ({exc.strerror}); give --node-id"
        ) from exc
    if not is_node_id(node_id):
        raise ConfigurationError(f"{path} does not hold a node id; remove the file to get a new one, or give --node-id")
    return node_id
