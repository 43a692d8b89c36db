"""`kvstore pin | unpin | pins | warm`: what stays, and what lies ready in DRAM."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kvstore.cli.asking import DeadlineOption, NodeOption, ask_operator, node_address
from kvstore.cli.choosing import (
    KeyOption,
    NamespaceOption,
    SecretOption,
    TokensOption,
    choose_namespace,
    known_namespaces,
    prefix_key,
)
from kvstore.cli.flags import ConfigOption, JsonOption
from kvstore.cli.output import print_json, print_table
from kvstore.errors import ConfigurationError, NotFound

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])", re.ASCII)


def duration_s(text: str) -> float:
    """Seconds of `90s`, `30m`, `1.5h`, `7d`; raises ConfigurationError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigurationError(f"--lifetime {text}: expected a number and s, m, h or d, for example 1h or 30d")
    return float(match[1]) * _UNIT_S[match[2]]


def pin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="By which it is listed and ended; the same one replaces.")
    ],
    namespace: NamespaceOption,
    tokens: TokensOption = None,
    key: KeyOption = "",
    lifetime: Annotated[
        str, typer.Option(metavar="TIME", help="After which it ends: 90s, 30m, 1h, 7d; at most 30d.")
    ] = "1h",
    secret_file: SecretOption = None,
    node: NodeOption = "",
    deadline_s: DeadlineOption = 10.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a prefix, for example a system prompt, from eviction on one node."""
    from kvstore.rpc.v1 import admin_pb2

    address = node_address(node, config)
    lifetime_ms = int(duration_s(lifetime) * 1000)
    chosen = choose_namespace(known_namespaces(address, deadline_s), namespace, address)
    last = prefix_key(chosen.namespace, tokens, key, secret_file)
    if not last:
        raise ConfigurationError("say what to pin, with --tokens FILE or --key HEX")
    request = admin_pb2.PinRequest(name=name, namespace_id=chosen.namespace.id, key=last, lifetime_ms=lifetime_ms)
    answer = ask_operator(address, "Pin", request, deadline_s)
    facts = {
        "name": name,
        "namespace": chosen.title,
        "key": last.hex(),
        "pinned_chunks": answer.pinned_chunks,
        "pinned_bytes": answer.pinned_bytes,
        "refused_chunks": answer.refused_chunks,
        "lifetime_s": lifetime_ms / 1000,
    }
    if as_json:
        print_json(facts)
        return
    print(f"pinned {answer.pinned_chunks} chunks ({answer.pinned_bytes:,} bytes) as {name!r} for {lifetime}")
    if answer.refused_chunks:
        print(
            f"not pinned: the last {answer.refused_chunks} chunks, because pins take at most a quarter of the DRAM; "
            "end others with `kvstore unpin` (`kvstore pins` lists them)"
        )


def unpin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `kvstore pins` lists it.")],
    node: NodeOption = "",
    deadline_s: DeadlineOption = 10.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a pin before its time."""
    from kvstore.rpc.v1 import admin_pb2

    address = node_address(node, config)
    answer = ask_operator(address, "Unpin", admin_pb2.UnpinRequest(name=name), deadline_s)
    if as_json:
        print_json({"name": name, "found": answer.found})
    elif answer.found:
        print(f"{name!r} is not pinned any more")
    if not answer.found:
        raise NotFound(f"{address} has no pin {name!r}; `kvstore pins` lists them")


def pins(
    node: NodeOption = "",
    deadline_s: DeadlineOption = 5.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the pins of one node."""
    from kvstore.rpc.v1 import admin_pb2

    address = node_address(node, config)
    titles = {one.namespace.id: one.title for one in known_namespaces(address, deadline_s)}
    answer = ask_operator(address, "ListPins", admin_pb2.ListPinsRequest(), deadline_s)
    listed = [
        {
            "name": each.name,
            "namespace": titles.get(each.namespace_id, each.namespace_id.hex()),
            "key": each.key.hex(),
            "chunks": each.chunks,
            "bytes": each.bytes,
            "left_s": each.left_ms / 1000,
        }
        for each in sorted(answer.pins, key=lambda each: each.name)
    ]
    if as_json:
        print_json({"node": address, "pins": listed})
        return
    columns = ["name", "namespace", "key", "chunks", "bytes", "left_s"]
    rows = [[each[column] for column in columns] for each in listed]
    print_table(f"{len(listed)} pins of {address}", [column.replace("_", " ") for column in columns], rows)
    if any(not each["chunks"] for each in listed):
        print("a pin of 0 chunks waits for its prefix to be stored again")


def warm(
    namespace: NamespaceOption,
    tokens: TokensOption = None,
    key: KeyOption = "",
    secret_file: SecretOption = None,
    node: NodeOption = "",
    deadline_s: DeadlineOption = 60.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a prefix, or what is newest of a namespace, from the node's slower tiers into its DRAM."""
    from kvstore.rpc.v1 import admin_pb2

    address = node_address(node, config)
    chosen = choose_namespace(known_namespaces(address, deadline_s), namespace, address)
    last = prefix_key(chosen.namespace, tokens, key, secret_file)
    request = admin_pb2.WarmRequest(namespace_id=chosen.namespace.id, key=last)
    answer = ask_operator(address, "Warm", request, deadline_s)
    facts = {
        "namespace": chosen.title,
        "asked_chunks": answer.asked_chunks,
        "dram_chunks": answer.dram_chunks,
        "promoted_chunks": answer.promoted_chunks,
    }
    if as_json:
        print_json(facts)
    else:
        print(
            f"{answer.dram_chunks} of {answer.asked_chunks} chunks lie in DRAM, "
            f"{answer.promoted_chunks} of them were read from the SSD just now"
        )
