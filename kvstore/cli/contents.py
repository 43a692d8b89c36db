"""`kvstore namespaces | remove`: what lies in the pool, and how it leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.asking import (
    AllOption,
    DeadlineOption,
    MetadataOption,
    NodeName,
    NodeOption,
    ask_operator,
    chosen_nodes,
    connected,
    node_address,
)
from kvstore.cli.choosing import (
    KeyOption,
    Known,
    NamespaceOption,
    SecretOption,
    TokensOption,
    choose_namespace,
    known_namespaces,
    prefix_key,
    read_key,
)
from kvstore.cli.flags import ConfigOption, JsonOption
from kvstore.cli.output import print_json, print_table
from kvstore.errors import ConfigurationError, KvStoreError, NotFound

_COLUMNS = (
    "chunks",
    "dram_bytes",
    "ssd_bytes",
    "evicted_chunks",
    "dram_hit_tokens",
    "ssd_hit_tokens",
    "dram_min_bytes",
    "dram_max_bytes",
    "ssd_min_bytes",
    "ssd_max_bytes",
)


def namespaces(
    node: NodeOption = "",
    deadline_s: DeadlineOption = 10.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces of one node with what they take."""
    address = node_address(node, config)
    facts = [_facts(known) for known in known_namespaces(address, deadline_s)]
    if as_json:
        print_json({"node": address, "namespaces": facts})
        return
    bounds = [column for column in _COLUMNS if column.endswith(("min_bytes", "max_bytes"))]
    shown = ["id", "title", *(c for c in _COLUMNS if c not in bounds or any(row[c] for row in facts))]
    rows = [[row[column][:8] if column == "id" else row[column] for column in shown] for row in facts]
    print_table(f"{len(facts)} namespaces of {address}", [column.replace("_", " ") for column in shown], rows)


def _facts(known: Known) -> dict[str, Any]:
    return {
        "id": known.namespace.id.hex(),
        "title": known.title,
        "tenant": known.namespace.tenant,
        "geometries": len(known.figures.geometries),
        **{column: getattr(known.figures, column) for column in _COLUMNS},
    }


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What `kvstore remove` was told to remove."""

    namespace: str
    tenant: str
    key: str
    tokens: Path | None
    secret_file: Path | None

    def __post_init__(self) -> None:
        ways = [bool(self.tenant), bool(self.key), self.tokens is not None]
        if sum(ways) > 1 or (self.tenant and self.namespace) or not (any(ways) or self.namespace):
            raise ConfigurationError(
                "say what to remove with one of --namespace, --tenant, --key, or --tokens with --namespace"
            )
        if self.key:
            read_key(self.key)

    @property
    def text(self) -> str:
        """For the question before it."""
        if self.tenant:
            return f"all namespaces of tenant {self.tenant!r}"
        if self.key or self.tokens is not None:
            return f"the chunk {self.key or f'of {self.tokens}'} and all prefixes that go on from it"
        return f"everything of namespace {self.namespace!r}"

    def spaces(self, known: list[Known], where: str) -> list[Known]:
        """The namespaces of a node that are meant. Raises NotFound if there is none."""
        if self.tenant:
            found = [one for one in known if one.namespace.tenant == self.tenant]
            if not found:
                listed = ", ".join(sorted({one.namespace.tenant for one in known} - {""})) or "none"
                raise NotFound(f"{where} has no namespace of tenant {self.tenant!r}; its tenants: {listed}")
            return found
        return [choose_namespace(known, self.namespace, where)] if self.namespace else known

    def remove(self, node: NodeName, deadline_s: float) -> int:
        """Remove it from one node; how many chunks went."""
        from kvstore.rpc.v1 import admin_pb2

        spaces = self.spaces(known_namespaces(node.address, deadline_s), node.title)
        if self.key or self.tokens is not None:
            return sum(self._remove_key(node.address, space, deadline_s) for space in spaces)
        requests = (admin_pb2.RemoveNamespaceRequest(namespace_id=space.namespace.id) for space in spaces)
        answers = (ask_operator(node.address, "RemoveNamespace", request, deadline_s) for request in requests)
        return sum(answer.removed_chunks for answer in answers)

    def _remove_key(self, address: str, space: Known, deadline_s: float) -> int:
        from kvstore.rpc.v1 import node_pb2
        from kvstore.rpc.v1.node_pb2_grpc import NodeServiceStub

        key = prefix_key(space.namespace, self.tokens, self.key, self.secret_file)
        with connected(address, deadline_s) as channel:
            stub = channel.stub(NodeServiceStub)
            opening = node_pb2.OpenSessionRequest(client_name="kvstore remove")
            session = channel.call(stub.OpenSession, opening, deadline_s).session
            request = node_pb2.RemoveRequest(session=session, namespace_id=space.namespace.id, keys=key)
            return int(channel.call(stub.Remove, request, deadline_s).removed_chunks)


def remove(
    namespace: NamespaceOption = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="All namespaces of this tenant.")] = "",
    key: KeyOption = "",
    tokens: TokensOption = None,
    secret_file: SecretOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    node: NodeOption = "",
    all_nodes: AllOption = False,
    metadata: MetadataOption = "",
    deadline_s: DeadlineOption = 60.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a namespace, a tenant, or a prefix with all that goes on from it. Readers miss from then on."""
    wanted = _Wanted(namespace, tenant, key, tokens, secret_file)
    if tokens is not None and not namespace:
        raise ConfigurationError("--tokens needs --namespace: the keys of tokens depend on it")
    if tokens is not None and str(tokens) == "-" and all_nodes:
        raise ConfigurationError("--tokens - can be read once only; with --all give a file")
    nodes = chosen_nodes(node, all_nodes, metadata, config, deadline_s)
    _confirm(wanted, nodes, yes)
    removed: dict[str, int] = {}
    failed: dict[str, KvStoreError] = {}
    for each in nodes:
        try:
            removed[each.title] = wanted.remove(each, deadline_s)
        except KvStoreError as exc:  # with --all the others are asked all the same
            failed[each.title] = exc
    _report(removed, failed, as_json)


def _confirm(wanted: _Wanted, nodes: Iterable[NodeName], yes: bool) -> None:
    if yes:
        return
    where = ", ".join(node.title for node in nodes)
    if not sys.stdin.isatty():
        raise ConfigurationError(f"this removes {wanted.text} on {where}; say --yes if that is meant")
    typer.confirm(f"Remove {wanted.text} on {where}?", abort=True, err=True)


def _report(removed: dict[str, int], failed: dict[str, KvStoreError], as_json: bool) -> None:
    """What went where. A node that knows nothing of it is no failure as long as another one did."""
    serious = {name: exc for name, exc in failed.items() if not (isinstance(exc, NotFound) and removed)}
    if as_json:
        print_json({"removed_chunks": removed, "failed": {name: str(exc) for name, exc in serious.items()}})
    else:
        for name, count in removed.items():
            print(f"{name}: {count:,} chunks removed")
    if len(serious) == 1:
        raise next(iter(serious.values()))
    if serious:
        raise KvStoreError("; ".join(f"{name}: {exc}" for name, exc in serious.items()))
