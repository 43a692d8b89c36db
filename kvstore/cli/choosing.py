"""How a user names what lies in a pool: a namespace by its id or a part of its title, a prefix by tokens or by key."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.asking import ask_operator
from kvstore.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from kvstore.model.namespace import Namespace

NamespaceOption = Annotated[
    str,
    typer.Option("--namespace", metavar="NAMESPACE", help="First digits of its id, or a part of its title or tenant."),
]
TokensOption = Annotated[
    Path | None,
    typer.Option("--tokens", metavar="FILE", help="JSON array of token ids, for example [1, 15, 7]; `-`: input."),
]
KeyOption = Annotated[
    str, typer.Option("--key", metavar="HEX", help="Key of the last chunk of the prefix, 32 hexadecimal digits.")
]
SecretOption = Annotated[
    Path | None,
    typer.Option("--secret-file", metavar="FILE", help="The tenant's secret, which is part of the keys of its tokens."),
]
_KEY = re.compile(r"[0-9a-fA-F]{32}")
_ID_DIGITS = re.compile(r"[0-9a-f]{4,32}")


@dataclass(frozen=True, slots=True)
class Known:
    """A namespace that a node knows, with the node's figures of it (admin_pb2.NamespaceFigures)."""

    namespace: Namespace
    figures: Any

    @property
    def title(self) -> str:
        """For people: its title, with the tenant where there is one."""
        tenant = self.namespace.tenant
        return f"{self.namespace.title} of {tenant}" if tenant else self.namespace.title

    def matches(self, text: str) -> bool:
        """True if the user may mean this one."""
        as_id = text.lower()
        if _ID_DIGITS.fullmatch(as_id) and self.namespace.id.hex().startswith(as_id):
            return True
        return as_id in self.title.lower()


def known_namespaces(address: str, deadline_s: float) -> list[Known]:
    """All namespaces of a node."""
    from kvstore.model.namespace import Namespace
    from kvstore.rpc.v1 import admin_pb2

    answer = ask_operator(address, "ListNamespaces", admin_pb2.ListNamespacesRequest(), deadline_s)
    return [Known(Namespace.from_canonical(figures.namespace), figures) for figures in answer.namespaces]


def choose_namespace(known: list[Known], text: str, where: str) -> Known:
    """The one that is meant. Raises NotFound that lists what there is, or what it could be."""
    if not text:
        raise ConfigurationError("name the namespace with --namespace; `kvstore namespaces` lists them")
    found = [one for one in known if one.matches(text)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(one.title for one in found or known) or "none"
    if found:
        raise NotFound(f"{text!r} means {len(found)} namespaces of {where}: {listed}; give more of the title or the id")
    raise NotFound(f"{where} has no namespace {text!r}; it has: {listed}")


def prefix_key(namespace: Namespace, tokens: Path | None, key: str, secret_file: Path | None) -> bytes:
    """Key of the last chunk of what the user means; empty if neither tokens nor a key were given.

    Tokens that end within a chunk mean the full chunks before it: another prompt that begins with them has no chunk of
    just these tokens.
    """
    if tokens is not None and key:
        raise ConfigurationError("give --tokens or --key, not both")
    if key:
        return read_key(key)
    if tokens is None:
        return b""
    from kvstore.model.prefix import KeyChain

    values = read_tokens(tokens)
    chunk_tokens = namespace.layout.chunk_tokens
    full = len(values) // chunk_tokens * chunk_tokens or len(values)
    return KeyChain(namespace, _secret(secret_file)).keys(values[:full])[-1]


def read_key(text: str) -> bytes:
    """16 bytes of a key; raises ConfigurationError."""
    if not _KEY.fullmatch(text):
        raise ConfigurationError(f"--key {text}: a key has 32 hexadecimal digits")
    return bytes.fromhex(text)


def read_tokens(path: Path) -> list[int]:
    """Token ids of a file, at least one; raises ConfigurationError."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        values = json.loads(text)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"--tokens {path}: {exc}") from exc
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        raise ConfigurationError(f"--tokens {path}: expected a JSON array of token ids, for example [1, 15, 7]")
    return values


def _secret(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes().removesuffix(b"\n")
    except OSError as exc:
        raise ConfigurationError(f"--secret-file {path}: {exc.strerror}") from exc
