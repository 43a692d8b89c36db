"""What a user of vLLM sets: `kv_connector_extra_config` of the connector, checked before anything starts."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigurationError

TESTED = (0, 32)
"""The release of vLLM that the adapter ran with: any 0.32.x. Its interfaces move with each release."""


class Mode(enum.StrEnum):
    """When a load or a store happens."""

    ASYNC = "async"
    """Beside the engine's steps; a request that is loaded waits, others run."""
    SYNC = "sync"
    """Within the step."""
    LAYERWISE = "layerwise"
    """Layer by layer beside the computation. A load is over with the step, a store may outlive it."""


@dataclass(frozen=True, slots=True)
class Options:
    """The extra configuration. Each name is a key of it."""

    node: str = ""
    """gRPC address or Unix socket of this host's node; empty: the engine has a pool of its own."""
    metadata: str = ""
    """Address of the metadata service: with it other hosts' chunks are found."""
    dram: str = "1GiB"
    """Size of the engine's own pool, where no node is given."""
    transport: str = "auto"
    """auto, shm, tcp or nixl, as in `kvstore.connect`."""
    host_id: str = ""
    """Host of this process, where the node's hand-over of memory does not say it."""
    staging: str = "64MiB"
    """Memory for reads from other nodes, in each rank."""
    load: Mode = Mode.ASYNC
    """async, sync or layerwise. With several KV groups, and for handoffs, always async."""
    store: Mode = Mode.ASYNC
    """async, sync or layerwise."""
    save_decode: bool = True
    """Store what was generated too, so that the next turn finds it."""
    chunk_tokens: int = 64
    """Tokens of a chunk; made a multiple of the engine's block size. Engines that share have the same."""
    model: str = ""
    """Name of the model in the pool; empty: its architecture."""
    revision: str = ""
    """Name of the weights; empty: a digest of their files."""
    tenant: str = ""
    """Others do not share with this tenant."""
    secret_file: str = ""
    """File with the tenant's secret (at most 64 bytes), which goes into every key."""
    least_tokens: int = 1
    """A hit of fewer tokens than that is computed instead."""
    lookup_wait_ms: int = 200
    """So long a request waits for what other hosts have."""
    load_deadline_ms: int = 5000
    """A load that takes longer is given up, and the rest computed."""
    store_deadline_ms: int = 10000
    """A store that takes longer is given up."""
    verify: bool = False
    """Check the checksums of what is loaded from this host's node too, as those of other hosts always are."""
    checksums: bool = True
    """False stores without checksums: for tests and measurements."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], without: Collection[str] = ()) -> Options:
        """The options of an extra configuration; `without`: options that mean nothing there.

        ConfigurationError for an unknown key or a value of another kind.
        """
        kinds: dict[str, type] = {each.name: type(each.default) for each in fields(cls) if each.name not in without}
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigurationError(f"there is no option {name!r}{hint}")
            values[name] = _checked(name, value, kinds[name])
        return cls(**values)

    @property
    def secret(self) -> bytes:
        """The tenant's secret. ConfigurationError if its file cannot be read or is empty."""
        if not self.secret_file:
            return b""
        try:
            secret = Path(self.secret_file).read_bytes().strip()
        except OSError as exc:
            raise ConfigurationError(f"secret_file {self.secret_file} cannot be read: {exc}") from exc
        if not secret:
            raise ConfigurationError(f"secret_file {self.secret_file} is empty: it would keep nobody out")
        return secret


def _checked(name: str, value: Any, kind: type) -> Any:
    if kind is Mode:
        try:
            return Mode(value)
        except ValueError as exc:
            raise ConfigurationError(f"{name} is one of {', '.join(Mode)}, not {value!r}") from exc
    if type(value) is not kind:
        raise ConfigurationError(f"{name} is a {kind.__name__}, not {value!r}")
    if isinstance(value, int) and kind is int and value < 1:
        raise ConfigurationError(f"{name} is at least 1, not {value}")
    return value


def check_release(version: str) -> None:
    """ConfigurationError, with the tested range, for another release of vLLM."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers != TESTED:
        tested = ".".join(map(str, TESTED))
        raise ConfigurationError(
            f"this adapter is tested with vLLM {tested}.x and refuses {version}: KV connector interfaces change with "
            f"each release; install vllm=={tested}.* or a release of this package for {version}"
        )


def check_policy(policy: str) -> None:
    """ConfigurationError unless vLLM computes what could not be loaded."""
    if policy != "recompute":
        raise ConfigurationError(
            f"kv_load_failure_policy is {policy!r}: requests would fail whenever the pool lost a chunk; add "
            '"kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
