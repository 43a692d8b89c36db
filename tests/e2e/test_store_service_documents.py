"""docs/store-service.md against the code: example, limits, names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import foreign_store_client as foreign
import pytest
import xxhash

from kvstore.model.layout import CHUNK_BYTES_LIMIT, GEOMETRY_RECTANGLES_LIMIT, Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import SECRET_LIMIT_BYTES, Extra, ExtraKind, KeyChain
from kvstore.model.values import MissReason, Outcome
from kvstore.node import KEYS_LIMIT, LEASE_LIMIT_MS, TICKET_LIFETIME_MS, core, messages, server, side_objects, streams
from kvstore.node.catalog import NAMESPACE_LIMIT
from kvstore.rpc import serving, wire

ROOT = Path(__file__).resolve().parent.parent.parent
SERVICE = (ROOT / "docs" / "store-service.md").read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    block = re.search(r"```json\n(.*?)```", SERVICE, re.DOTALL)
    assert block is not None
    return dict(json.loads(block[1]))


def test_the_example_is_what_the_library_computes(example: dict[str, Any]) -> None:
    namespace = Namespace.from_canonical(example["description"].encode())
    chain = KeyChain(namespace, bytes.fromhex(example["secret"]))
    keys = chain.keys(example["tokens"])
    assert namespace.id.hex() == example["namespace_id"]
    assert [key.hex() for key in keys] == example["keys"]
    assert keys.fingerprints is not None
    assert [f"{int(value):016x}" for value in keys.fingerprints] == example["fingerprints"]
    assert keys.last_tokens == example["last_tokens"]
    salted = chain.keys(example["tokens"], [Extra(ExtraKind.SALT, bytes.fromhex(example["salt"]))])
    assert salted[0].hex() == example["first_key_with_salt"]
    whole, halves = Geometry.whole(namespace.layout), Geometry.parallel(namespace.layout, tp=2)
    assert whole.canonical.decode() == example["whole_geometry"]
    assert f"{whole.shard(0):08x}" == example["whole_shard"]
    assert halves.canonical.decode() == example["halves_geometry"]
    assert [f"{halves.shard(number):08x}" for number in range(2)] == example["halves_shards"]
    assert namespace.layout.chunk_bytes == example["chunk_bytes"]
    assert f"{xxhash.xxh3_64_intdigest(bytes(range(256))):016x}" == example["payload_hash"]


def test_a_client_that_follows_the_document_gets_the_example(example: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(foreign, "SECRET", bytes.fromhex(example["secret"]))
    monkeypatch.setattr(foreign, "CHUNK_TOKENS", 4)
    text = foreign.canonical(json.loads(example["description"]))
    assert text.decode() == example["description"]
    space = foreign.namespace_id(text)
    chain = foreign.chain_of(space, example["tokens"])
    assert space.hex() == example["namespace_id"]
    assert chain["keys"].hex() == "".join(example["keys"])
    assert [f"{value:016x}" for value in chain["fingerprints"]] == example["fingerprints"]
    assert chain["last_tokens"] == example["last_tokens"]
    halves = ((0, 2, 0, 1), (0, 2, 1, 2))
    assert [f"{foreign.shard_id(halves, number):08x}" for number in range(2)] == example["halves_shards"]


def test_non_ascii_descriptions_are_escaped_as_documented() -> None:
    layout = Namespace.from_canonical(foreign.canonical(foreign.DESCRIPTION)).layout
    namespace = Namespace("modèle 😀", "r", layout)
    assert b'"model":"mod\\u00e8le \\ud83d\\ude00"' in namespace.canonical
    assert foreign.canonical({**foreign.DESCRIPTION, "model": "modèle 😀", "revision": "r"}) == namespace.canonical


def test_limits() -> None:
    from kvstore.model import namespace, side_object

    found = {name: int(value.split()[0]) for name, value in rows(SERVICE, "Limits")}
    assert found == {
        "message, both ways": wire.MESSAGE_LIMIT_BYTES,
        "piece of a payload": messages.PIECE_BYTES,
        "payload of one shard": CHUNK_BYTES_LIMIT,
        "keys of one call": KEYS_LIMIT,
        "rectangles of a geometry": GEOMETRY_RECTANGLES_LIMIT,
        "tenant's secret": SECRET_LIMIT_BYTES,
        "client name": server.CLIENT_NAME_LIMIT_BYTES,
        "description of a namespace": namespace._CANONICAL_LIMIT_BYTES,
        "namespaces of a node": NAMESPACE_LIMIT,
        "sessions of a node": core.SESSIONS_LIMIT,
        "session without a call": core.REMOTE_IDLE_S,
        "Put and Get streams of a node at a time": streams.STREAMS_LIMIT,
        "deadline of a Put or Get": messages.STREAM_LIMIT_S,
        "time for one chunk of a Put": streams.CHUNK_LIMIT_S,
        "lease of an Acquire": LEASE_LIMIT_MS,
        "calls of a server at a time": serving.CONCURRENT_CALLS_LIMIT,
        "side objects of a ticket": side_object.SIDE_OBJECTS_A_TICKET,
        "their bytes": side_object.SIDE_BYTES_A_TICKET,
        "their lifetime": TICKET_LIFETIME_MS,
        "their names": side_object.NAME_LIMIT_BYTES,
        "side objects of a node": side_objects.SIDE_BYTES,
        "tickets with side objects of a node": side_objects.SIDE_TICKETS,
    }


def test_outcomes() -> None:
    named = set(re.findall(r"`([A-Z_]+)`", " ".join(row[0] for row in rows(SERVICE, "Put"))))
    # A Put wants all of its chunks, and is granted nothing to fill by itself.
    assert named == {outcome.name for outcome in Outcome} - {"GRANTED", "LEFT_TO_OTHERS"}


def test_end_reasons() -> None:
    section = SERVICE.split("## Get\n", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"`([a-z_]+)`", section)) & {reason.value for reason in MissReason}
    assert named == {"absent", "not_covered", "in_progress", "collision", "checksum", "fence"}
