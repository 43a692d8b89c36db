"""docs/shared-memory.md is enough: a reader made from that page alone finds what a node wrote, and its example holds.

`PageReader` stands for a program in another language: it knows the page and the standard library (and xxh3-64), and
nothing of this package.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import kvstore
from kvstore.model.prefix import KeyChain
from kvstore.node import catalog as catalog_module
from kvstore.node import memory as memory_module
from kvstore.node.catalog import CatalogShape, CatalogWriter, EntryValue, Header
from kvstore.rpc import handshake
from tests.chaos.node_thread import NodeThread

PAGE = Path(__file__).resolve().parents[3] / "docs/shared-memory.md"
DESCRIPTION: dict[str, Any] = {
    "attention": "gqa",
    "dtype": "fp32",
    "head_dim": 4,
    "interior": "kv_per_token",
    "kv_group": "full",
    "kv_heads": 4,
    "layers": 2,
    "model": "page-reader",
    "page_tokens": 4,
    "pages_per_chunk": 2,
    "revision": "r1",
    "side_components": [],
    "tenant": "",
}
SECRET = b"tenant"

# --- the page, written down as a program ----------------------------------------------------------------------

M0, M1, U64 = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 1 << 64
Rectangle = tuple[int, int, int, int]


def namespace_id(description: bytes) -> bytes:
    return hashlib.blake2b(description, digest_size=16, person=b"kvstore-ns").digest()


def geometry_digest(rectangles: list[Rectangle]) -> int:
    text = ",".join(f"{a}-{b}x{c}-{d}" for a, b, c, d in rectangles).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=3, person=b"kvstore-geometry").digest(), "little") or 1


def chain(namespace: bytes, secret: bytes, tokens: list[int], chunk_tokens: int) -> list[tuple[bytes, int, int]]:
    """(key, parent's fingerprint, own fingerprint) of each chunk."""
    key, print_, chunks = namespace, xxhash.xxh3_64_intdigest(namespace), []
    for at in range(0, len(tokens), chunk_tokens):
        part = tokens[at : at + chunk_tokens]
        message = struct.pack(f"<I{len(part)}I", len(part), *part)
        key = hashlib.blake2b(key + message, digest_size=16, key=secret).digest()
        parent, print_ = print_, xxhash.xxh3_64_intdigest(message, print_)
        chunks.append((key, parent, print_))
    return chunks


def place_of(key: bytes, shard: int, buckets: int) -> tuple[int, int, int]:
    """(bucket 0, bucket 1, tag)."""
    first, second = struct.unpack("<QQ", key)
    h0, h1 = first ^ shard * M0 % U64, second ^ shard * M1 % U64
    return h0 % buckets, h1 % buckets, h0 >> 48 | 1


@dataclass
class PageReader:
    """Catalog and arena as mapped buffers."""

    catalog: mmap.mmap
    arena: mmap.mmap
    description: dict[str, Any]

    def __post_init__(self) -> None:
        assert self.catalog[:8] == b"KVSTCAT1" and self._word(1) == 1
        self.epoch, self.buckets = self._word(2), self._word(4)

    def _word(self, index: int, offset: int = 0) -> int:
        return int(struct.unpack_from("<Q", self.catalog, offset + 8 * index)[0])

    @property
    def alive(self) -> bool:
        return self._word(17) == 1 and self._word(2) == self.epoch

    def namespace_number(self, wanted: bytes) -> int | None:
        for place in range(self._word(14)):
            at = self._word(10) + 16 * place
            if self.catalog[at : at + 16] == wanted:
                return place + 1
        return None

    def geometries(self, namespace_number: int) -> Iterator[tuple[int, list[Rectangle]]]:
        for place in range(self._word(15)):
            at = self._word(11) + 2064 * place
            first, count = self._word(0, at), self._word(1, at)
            if first & 0xFFFFFFFF == namespace_number:
                yield first >> 32, [struct.unpack_from("<4H", self.catalog, at + 16 + 8 * i) for i in range(count)]

    def find(self, key: bytes, shard: int, number: int, prints: tuple[int, int]) -> tuple[int, tuple[int, ...]] | None:
        """(entry number, its words)."""
        *buckets, tag = place_of(key, shard, self.buckets)
        for bucket in buckets:
            for place in range(4):
                at = self._word(6) + 8 * bucket + 2 * place
                if struct.unpack_from("<H", self.catalog, at)[0] != tag:
                    continue
                words = self._gather(4 * bucket + place)
                if (
                    words[3] % 2 == 0
                    and struct.pack("<QQ", *words[:2]) == key
                    and words[6] == shard | number << 32 | 1 << 56
                    and words[2] == prints[0]
                    and words[7] & (1 << 48) - 1 == prints[1] & (1 << 48) - 1
                ):
                    return 4 * bucket + place, words
        return None

    def _gather(self, entry: int) -> tuple[int, ...]:
        return struct.unpack_from("<8Q", self.catalog, self._word(7) + 64 * entry)

    def confirm(self, entry: int, words: tuple[int, ...]) -> bool:
        again = self._gather(entry)
        return again == words and self._word(words[5] & 0xFFFFFFFF, self._word(8)) == words[3]

    def chunk(self, key: bytes, prints: tuple[int, int], namespace: bytes) -> bytes | None:
        """The whole chunk, [layer][page][KV head][head page], put together from its shards and verified."""
        number = self.namespace_number(namespace)
        if number is None:
            return None
        for digest, rectangles in self.geometries(number):
            assert digest == geometry_digest(rectangles)
            pieces = [self._shard(key, digest << 8 | i, r, number, prints) for i, r in enumerate(rectangles)]
            whole = [piece for piece in pieces if piece is not None]
            if len(whole) == len(rectangles):
                return self._join(list(zip(rectangles, whole, strict=True)))
        return None

    def _shard(
        self, key: bytes, shard: int, rectangle: Rectangle, number: int, prints: tuple[int, int]
    ) -> bytes | None:
        found = self.find(key, shard, number, prints)
        if found is None:
            return None
        entry, words = found
        at, length = 4096 * (words[5] & 0xFFFFFFFF), words[5] >> 32
        layers, heads = rectangle[1] - rectangle[0], rectangle[3] - rectangle[2]
        payload = self.arena[at : at + length]
        table = self.arena[at + length : at + length + 8 * layers * heads]
        if not self.confirm(entry, words):
            return None
        assert xxhash.xxh3_64_intdigest(table) == words[4]
        pages = self._pages(payload, layers, heads)
        for place, (layer, head) in enumerate((a, b) for a in range(layers) for b in range(heads)):
            of_head = b"".join(pages[layer, page, head] for page in range(self.description["pages_per_chunk"]))
            assert xxhash.xxh3_64_intdigest(of_head) == struct.unpack_from("<Q", table, 8 * place)[0]
        return payload

    def _pages(self, payload: bytes, layers: int, heads: int) -> dict[tuple[int, int, int], bytes]:
        size = self.description["page_tokens"] * 2 * self.description["head_dim"] * 4
        places = [
            (a, p, h) for a in range(layers) for p in range(self.description["pages_per_chunk"]) for h in range(heads)
        ]
        assert len(payload) == size * len(places)
        return {place: payload[size * i : size * (i + 1)] for i, place in enumerate(places)}

    def _join(self, shards: list[tuple[Rectangle, bytes]]) -> bytes:
        pages = {}
        for (first_layer, stop_layer, first_head, stop_head), payload in shards:
            for (layer, page, head), held in self._pages(
                payload, stop_layer - first_layer, stop_head - first_head
            ).items():
                pages[first_layer + layer, page, first_head + head] = held
        return b"".join(pages[place] for place in sorted(pages))


def shake_hands(path: str) -> tuple[socket.socket, dict[str, Any], mmap.mmap, mmap.mmap]:
    """A reader's session: hello without a pidfd. Returns socket, welcome, catalog, arena."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(10)
    peer.connect(path)
    peer.send(b"H" + json.dumps({"version": 1, "name": "page reader", "pid": os.getpid(), "start_time": 0}).encode())
    packet, (catalog_fd, arena_fd), _, _ = socket.recv_fds(peer, 131072, 2)
    assert packet[:1] == b"W"
    welcome = json.loads(packet[1:])
    catalog = mmap.mmap(catalog_fd, welcome["catalog_bytes"], prot=mmap.PROT_READ)
    arena = mmap.mmap(arena_fd, welcome["arena_bytes"], prot=mmap.PROT_READ)
    os.close(catalog_fd)
    os.close(arena_fd)
    return peer, welcome, catalog, arena


def _varint(value: int) -> bytes:
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def _field(number: int, value: bytes) -> bytes:
    """A bytes field of a protobuf message."""
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


# --- against a node ---------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path)
    yield node
    node.stop()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_reader_made_from_the_page_finds_what_the_library_wrote(node: NodeThread, tp: int) -> None:
    description = json.dumps(DESCRIPTION, sort_keys=True, separators=(",", ":")).encode()
    space = kvstore.Namespace.from_canonical(description)
    geometry = kvstore.Geometry.parallel(space.layout, tp=tp)
    tokens = list(range(100, 121))  # two chunks and five tokens
    pages = np.random.default_rng(3).integers(0, 256, (3, *space.layout.shape(space.layout.whole)), dtype=np.uint8)
    with kvstore.connect(node.info.socket_path) as client:
        for rank in range(tp):
            cache = client.bind(space, secret=SECRET, geometry=geometry, rank=rank)
            mine = cache.rectangle
            part = np.ascontiguousarray(
                pages[:, mine.layer_start : mine.layer_stop, :, mine.head_start : mine.head_stop]
            )
            assert cache.write(cache.keys(tokens), part).stored == 3

        peer, welcome, catalog, arena = shake_hands(node.info.socket_path)
        assert not welcome["writable"] and welcome["epoch"] == node.info.epoch
        reader = PageReader(catalog, arena, DESCRIPTION)
        identity = namespace_id(description)
        chunks = chain(identity, SECRET, tokens, 8)
        for index, (key, parent, own) in enumerate(chunks):
            assert reader.chunk(key, (parent, own), identity) == pages[index].tobytes()
            assert reader.chunk(key, (parent ^ 1, own), identity) is None
        assert reader.chunk(chunks[0][0], (chunks[1][1], chunks[1][2]), identity) is None

        peer.send(b"T" + struct.pack("<H", 1) + chunks[0][0])
        peer.send(b"R")
        peer.send(b"P" + struct.pack("<Q", 77))
        assert peer.recv(131072) == b"p" + struct.pack("<Q", 77)

        assert reader.alive
        first = b"".join(_field(number, value) for number, value in ((2, identity), (3, chunks[0][0])))
        request = b"\x09" + struct.pack("<Q", welcome["session"]) + first
        peer.send(b"C" + struct.pack("<BI", 5, 99) + request)
        assert peer.recv(131072) == b"A" + struct.pack("<BI", 0, 99) + b"\x08\x03"  # three chunks removed
        peer.send(b"C" + struct.pack("<BI", 5, 100) + b"\x09" + struct.pack("<Q", 1) + first)
        answer = peer.recv(131072)
        assert answer.startswith(b"A" + struct.pack("<BI", 1, 100) + b"Unauthorized\n")
        assert all(reader.chunk(key, (parent, own), identity) is None for key, parent, own in chunks)
        peer.close()
    node.daemon.core.pool.catalog.stop_serving()
    assert not reader.alive


# --- the example of the page ------------------------------------------------------------------------------------


def example() -> dict[str, str]:
    block = re.search(r"```example\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    return {name.strip(): value.strip() for name, value in (line.split(":", 1) for line in block[1].splitlines())}


def number(text: str) -> int:
    return int(text, 0)


def test_the_example_follows_from_the_page() -> None:
    told = example()
    identity = namespace_id(told["description"].encode())
    assert identity.hex() == told["namespace id"]
    digest = geometry_digest([(0, 2, 0, 2)])
    assert (hex(digest), hex(digest << 8)) == (told["geometry digest"], told["shard id"])
    ((key, parent, own),) = chain(identity, told["secret"].encode(), [int(t) for t in told["tokens"].split()], 8)
    assert (key.hex(), hex(parent), hex(own)) == (told["key"], told["parent fingerprint"], told["fingerprint"])
    shard = number(told["shard id"])
    first, second = struct.unpack("<QQ", key)
    assert (hex(first ^ shard * M0 % U64), hex(second ^ shard * M1 % U64)) == (told["h0"], told["h1"])
    *buckets, tag = place_of(key, shard, 16)
    assert (buckets, hex(tag)) == ([int(b) for b in told["buckets"].split()], told["tag"])
    payload = bytes(7 * i % 251 for i in range(int(told["payload length"])))
    size, table = 128, b""
    for layer in range(2):
        for head in range(2):
            pages = [payload[size * (4 * layer + 2 * page + head) :][:size] for page in range(2)]
            table += struct.pack("<Q", xxhash.xxh3_64_intdigest(b"".join(pages)))
    assert [hex(word) for word in struct.unpack("<4Q", table)] == told["checksum table"].split()
    assert hex(xxhash.xxh3_64_intdigest(table)) == told["table hash"]
    generation = number(told["epoch"]) << 44 | number(told["counter"]) << 1
    assert generation == number(told["generation"])
    words = (
        first,
        second,
        parent,
        generation,
        number(told["table hash"]),
        number(told["slot"]) | len(payload) << 32,
        shard | number(told["namespace number"]) << 32 | 1 << 56,
        own & (1 << 48) - 1 | 8 << 48,
    )
    assert struct.pack("<8Q", *words).hex(" ", -8) == told["entry"]


def test_the_library_stores_the_example() -> None:
    told = example()
    shape = CatalogShape.make(1 << 20, 32)
    memory = mmap.mmap(-1, shape.total_bytes)
    writer = CatalogWriter(memory, shape, number(told["epoch"]))
    space = kvstore.Namespace.from_canonical(told["description"].encode())
    assert writer.add_namespace(space) == number(told["namespace number"])
    writer.add_geometry(1, kvstore.Geometry.whole(space.layout))
    keys = KeyChain(space, told["secret"].encode()).keys([int(t) for t in told["tokens"].split()])
    assert shape.buckets == 16 and keys.fingerprints is not None
    slot, shard = number(told["slot"]), number(told["shard id"])
    for _ in range(number(told["counter"])):
        writer.raise_generation(slot)
    entry = writer.claim(keys[0], shard)
    assert entry is not None and entry // 4 in [int(b) for b in told["buckets"].split()]
    value = EntryValue(
        key=keys[0],
        shard=shard,
        namespace_number=1,
        tier=1,
        slot=slot,
        length=space.layout.chunk_bytes,
        generation=writer.generation(slot) & ~1,
        parent_fingerprint=int(keys.fingerprints[0]),
        fingerprint=int(keys.fingerprints[1]),
        token_count=8,
        table_hash=number(told["table hash"]),
    )
    writer.publish(entry, value)
    at = shape.entries_offset + 64 * entry
    assert memory[at : at + 64].hex(" ", -8) == told["entry"]
    at = shape.tags_offset + 2 * entry
    assert memory[at : at + 2] == struct.pack("<H", number(told["tag"]))
    assert writer.generation(slot) == number(told["generation"])


def test_the_numbers_of_the_page_are_those_of_the_library() -> None:
    text = PAGE.read_text()
    for value in (f"{catalog_module.SHARD_MIX_0:X}h", f"{catalog_module.SHARD_MIX_1:X}h"):
        assert value in text
    sizes = dict(
        re.findall(r"^\| (namespaces|geometries|descriptions|written here) \| (\d+ \S \d+) \|", text, re.MULTILINE)
    )
    assert sizes["namespaces"].split()[::2] == [str(catalog_module.NAMESPACE_LIMIT), "16"]
    assert sizes["geometries"].split()[::2] == [
        str(catalog_module.GEOMETRY_LIMIT),
        str(catalog_module.GEOMETRY_WORDS * 8),
    ]
    assert sizes["descriptions"].split()[2] == str(memory_module.DESCRIPTION_BYTES)
    assert sizes["written here"].split()[2] == str(memory_module.WRITTEN_HERE_BYTES)
    verbs = re.search(r"Verbs by number: (.*?)\.", text, re.DOTALL)
    assert verbs is not None
    assert tuple(verb.split()[1] for verb in verbs[1].split(",")) == handshake.VERBS
    assert {chr(kind) for kind in handshake.Kind} == set(re.findall(r"^\| `(\w)` ", text, re.MULTILINE))
    header = dict(re.findall(r"^\| (\d+) \| ([a-z ]+)", text[text.index("### Header") :], re.MULTILINE))
    assert header[str(Header.SERVING)].startswith("serving") and header[str(Header.COUNTER)].startswith("counter")
    assert header[str(Header.DIRECTORY_VERSION)].startswith("directory")
