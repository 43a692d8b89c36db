"""A client of the store as somebody in another language would write it: from the protos or from reflection alone.

Run as a script, in a process that never imports the library: `foreign_store_client.py generated FOLDER ADDRESS…` with
modules made by protoc in FOLDER, or `foreign_store_client.py reflection - ADDRESS…`. Namespace ids, shard ids, keys and
fingerprints are computed here from what docs/store-service.md says. Prints one JSON object: scenario -> result.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pickle
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
import xxhash

SECRET = b"tenant secret"
DEADLINE_S = 10.0
PIECE_BYTES = 1 << 20
LAYERS, KV_HEADS, HEAD_DIM, PAGE_TOKENS, PAGES_PER_CHUNK = 4, 2, 256, 16, 1
DESCRIPTION = {
    "attention": "gqa",
    "dtype": "fp32",
    "head_dim": HEAD_DIM,
    "interior": "kv_per_token",
    "kv_group": "full",
    "kv_heads": KV_HEADS,
    "layers": LAYERS,
    "model": "example",
    "page_tokens": PAGE_TOKENS,
    "pages_per_chunk": PAGES_PER_CHUNK,
    "revision": "r1",
    "side_components": [],
    "tenant": "",
}
HEAD_PAGE_BYTES = PAGE_TOKENS * 2 * HEAD_DIM * 4
CHUNK_TOKENS = PAGE_TOKENS * PAGES_PER_CHUNK
WHOLE = (0, LAYERS, 0, KV_HEADS)
SERVICES = {"NodeService": "node", "MetadataService": "metadata", "SchedulerService": "scheduler"}

OVER = threading.Event()
"""Set at the end, for requests that stall on purpose."""

Rectangle = tuple[int, int, int, int]


# --- what the documentation says, without any code of the store ----


def canonical(description: dict[str, Any]) -> bytes:
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def namespace_id(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, person=b"kvstore-ns").digest()


def shard_id(geometry: Sequence[Rectangle], number: int) -> int:
    text = ",".join(f"{a}-{b}x{c}-{d}" for a, b, c, d in geometry).encode()
    digest = hashlib.blake2b(text, digest_size=3, person=b"kvstore-geometry").digest()
    return (int.from_bytes(digest, "little") or 1) << 8 | number


def chain_of(space: bytes, tokens: Sequence[int]) -> dict[str, Any]:
    """Fields of a Chain message for the tokens of a whole prompt."""
    key, fingerprint = space, xxhash.xxh3_64_intdigest(space)
    keys, fingerprints = [], [fingerprint]
    for start in range(0, len(tokens), CHUNK_TOKENS):
        part = tokens[start : start + CHUNK_TOKENS]
        message = struct.pack(f"<I{len(part)}I", len(part), *part)
        key = hashlib.blake2b(key + message, digest_size=16, key=SECRET).digest()
        fingerprint = xxhash.xxh3_64_intdigest(message, fingerprint)
        keys.append(key)
        fingerprints.append(fingerprint)
    last_tokens = len(tokens) - (len(keys) - 1) * CHUNK_TOKENS
    return {
        "namespace_id": space,
        "parent_key": space,
        "keys": b"".join(keys),
        "fingerprints": fingerprints,
        "last_tokens": last_tokens,
    }


def corners(rectangle: Rectangle) -> dict[str, int]:
    return dict(zip(("layer_start", "layer_stop", "head_start", "head_stop"), rectangle, strict=True))


def cut(page_bytes: bytes, rectangle: Rectangle) -> bytes:
    """The bytes of a rectangle out of those of a whole chunk: [layer][page][head][head page]."""
    layer_start, layer_stop, head_start, head_stop = rectangle
    row = KV_HEADS * HEAD_PAGE_BYTES
    return b"".join(
        page_bytes[at + head_start * HEAD_PAGE_BYTES : at + head_stop * HEAD_PAGE_BYTES]
        for at in range(layer_start * PAGES_PER_CHUNK * row, layer_stop * PAGES_PER_CHUNK * row, row)
    )


# --- messages and calls, from generated modules or from reflection ----


class Store:
    """Calls by name. `message(name)` gives a message class, `methods` says which are streams."""

    def __init__(self, channel: grpc.Channel, message: Callable[[str], Any], service: Callable[[str], Any]) -> None:
        self._channel = channel
        self.message = message
        self._service = service

    def call(self, name: str, request: Any, deadline_s: float | None = DEADLINE_S, service: str = "NodeService") -> Any:
        """The answer, or an iterator of answers; raises grpc.RpcError."""
        method = self._service(service).methods_by_name[name]
        kind = ("stream" if method.client_streaming else "unary") + ("_stream" if method.server_streaming else "_unary")
        callable_ = getattr(self._channel, kind)(
            f"/kvstore.v1.{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.message(method.output_type.full_name).FromString,
        )
        return callable_(request, timeout=deadline_s)

    def new(self, name: str, **fields: Any) -> Any:
        return self.message(f"kvstore.v1.{name}")(**fields)


def from_generated(folder: str, channel: grpc.Channel) -> Store:
    sys.path.insert(0, folder)
    modules = {name: importlib.import_module(f"foreign.store.{name}_pb2") for name in SERVICES.values()}

    def message(full_name: str) -> Any:
        name = full_name.rpartition(".")[2]
        return next(getattr(module, name) for module in modules.values() if hasattr(module, name))

    def service(name: str) -> Any:
        return modules[SERVICES[name]].DESCRIPTOR.services_by_name[name]

    return Store(channel, message, service)


def from_reflection(channel: grpc.Channel) -> Store:
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    return Store(
        channel,
        lambda name: GetMessageClass(pool.FindMessageTypeByName(name)),
        lambda name: pool.FindServiceByName(f"kvstore.v1.{name}"),
    )


# --- the client ----


class Client:
    """One session with one namespace registered."""

    def __init__(self, store: Store, description: dict[str, Any], geometry: Sequence[Rectangle] = (WHOLE,)) -> None:
        self.store, self.geometry = store, tuple(geometry)
        opened = store.call("OpenSession", store.new("OpenSessionRequest", client_name="foreign"))
        self.session = opened.session
        self.idle_limit_ms = opened.idle_limit_ms
        self.text = canonical(description)
        self.space = namespace_id(self.text)
        answer = self.register(self.text, self.geometry)
        assert answer.namespace_id == self.space
        assert answer.geometry_digest == shard_id(self.geometry, 0) >> 8

    def register(self, text: bytes, geometry: Sequence[Rectangle]) -> Any:
        rectangles = [self.store.new("Rectangle", **corners(one)) for one in geometry]
        request = self.store.new("RegisterNamespaceRequest", session=self.session, namespace=text, geometry=rectangles)
        return self.store.call("RegisterNamespace", request)

    def chain(self, tokens: Sequence[int], **changed: Any) -> Any:
        return self.store.new("Chain", **{**chain_of(self.space, tokens), **changed})

    def header(self, chain: Any, number: int = 0, **changed: Any) -> Any:
        shard = shard_id(self.geometry, number)
        fields = {"session": self.session, "chain": chain, "shard": shard, **changed}
        return self.store.new("PutRequest", header=self.store.new("PutHeader", **fields))

    def pieces(self, payload: bytes, payload_hash: int | None = None) -> Iterator[Any]:
        for at in range(0, len(payload), PIECE_BYTES):
            yield self.store.new("PutRequest", data=payload[at : at + PIECE_BYTES])
        digest = xxhash.xxh3_64_intdigest(payload) if payload_hash is None else payload_hash
        yield self.store.new("PutRequest", payload_hash=digest)

    def put(
        self, chain: Any, payloads: Iterable[bytes], number: int = 0, deadline_s: float | None = DEADLINE_S
    ) -> list[int]:
        def requests() -> Iterator[Any]:
            yield self.header(chain, number)
            for payload in payloads:
                yield from self.pieces(payload)

        return self.send(requests(), deadline_s)

    def send(self, requests: Iterable[Any], deadline_s: float | None = DEADLINE_S) -> list[int]:
        return list(self.store.call("Put", iter(requests), deadline_s).outcomes)

    def get(self, chain: Any, rectangle: Rectangle | None = WHOLE, **changed: Any) -> tuple[list[bytes], str]:
        """Payloads whose length and hash are right, and the end reason."""
        fields = {"session": self.session, "chain": chain, **changed}
        if rectangle is not None:
            fields["rectangle"] = self.store.new("Rectangle", **corners(rectangle))
        heads, payloads, reason = [], [], "the stream has no last message"
        for message in self.store.call("Get", self.store.new("GetRequest", **fields)):
            kind = message.WhichOneof("part")
            if kind == "head":
                heads.append(message.head)
                payloads.append(b"")
            elif kind == "data":
                payloads[-1] += message.data
            else:
                reason = message.end_reason
        for index, (head, payload) in enumerate(zip(heads, payloads, strict=True)):
            assert head.index == index and len(payload) == head.payload_bytes
            assert xxhash.xxh3_64_intdigest(payload) == head.payload_hash
        return payloads, reason


def pages_of(seed: int, count: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(LAYERS * PAGES_PER_CHUNK * KV_HEADS * HEAD_PAGE_BYTES) for _ in range(count)]


def prompt(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1 << 32) for _ in range(length)]


# --- scenarios: each returns something that JSON can hold ----


def round_trip(store: Store, _: str) -> Any:
    """Whole chunks, the last one shorter; then a part of them."""
    client = Client(store, DESCRIPTION)
    chain, pages = client.chain(prompt(1, 5 * CHUNK_TOKENS + 3)), pages_of(1, 6)
    first, second = client.put(chain, pages), client.put(chain, pages)
    got, reason = client.get(chain)
    part = (1, 3, 1, 2)
    got_part, _ = client.get(chain, part)
    return {
        "outcomes": [first, second],
        "equal": got == pages,
        "part_equal": got_part == [cut(page, part) for page in pages],
        "reason": reason,
        "idle_limit_ms": client.idle_limit_ms,
    }


def shards(store: Store, _: str) -> Any:
    """Two writers with half of the heads each; one reader of everything."""
    halves = ((0, LAYERS, 0, 1), (0, LAYERS, 1, 2))
    client = Client(store, {**DESCRIPTION, "revision": "halves"}, halves)
    chain, pages = client.chain(prompt(2, 2 * CHUNK_TOKENS)), pages_of(2, 2)
    outcomes = [client.put(chain, [cut(page, halves[0]) for page in pages], 0)]
    before = client.get(chain)[1]
    outcomes.append(client.put(chain, [cut(page, halves[1]) for page in pages], 1))
    return {"outcomes": outcomes, "before": before, "equal": client.get(chain)[0] == pages}


def large(store: Store, _: str) -> Any:
    """A chunk of several pieces."""
    description = {**DESCRIPTION, "revision": "large", "layers": 64}
    client = Client(store, description, ((0, 64, 0, KV_HEADS),))
    payload = random.Random(3).randbytes(64 * KV_HEADS * HEAD_PAGE_BYTES)
    chain = client.chain(prompt(3, CHUNK_TOKENS))
    outcomes = client.put(chain, [payload])
    return {"outcomes": outcomes, "equal": client.get(chain, (0, 64, 0, KV_HEADS))[0] == [payload]}


def miss(store: Store, _: str) -> Any:
    client = Client(store, DESCRIPTION)
    tokens = prompt(4, 4 * CHUNK_TOKENS)
    client.put(client.chain(tokens[: 2 * CHUNK_TOKENS]), pages_of(4, 2))
    absent, reason = client.get(client.chain(prompt(5, CHUNK_TOKENS)))
    partly, partly_reason = client.get(client.chain(tokens))
    return {"absent": [len(absent), reason], "partly": [len(partly), partly_reason]}


def stored_without_tokens(store: Store, _: str) -> Any:
    """Writers must send fingerprints, readers may leave them out."""
    client = Client(store, DESCRIPTION)
    bare, full = client.chain(prompt(6, CHUNK_TOKENS), fingerprints=[]), client.chain(prompt(6, CHUNK_TOKENS))
    refused = status(lambda: client.put(bare, pages_of(6, 1)))
    client.put(full, pages_of(6, 1))
    return {"refused": refused, "found": [len(client.get(chain)[0]) for chain in (bare, full)]}


def full_pool(store: Store, small_node: str) -> Any:
    """Everything that the small node holds is leased; it has room for 3 chunks."""
    with grpc.insecure_channel(small_node) as channel:
        client = Client(Store(channel, store.message, store._service), DESCRIPTION)
        chain = client.chain(prompt(7, CHUNK_TOKENS * 3))
        outcomes = client.put(chain, pages_of(7, 3))
        request = store.new(
            "AcquireRequest",
            session=client.session,
            chain=chain,
            rectangle=store.new("Rectangle", **corners(WHOLE)),
            lease_ms=60_000,
        )
        lease = client.store.call("Acquire", request)
        assert lease.run == 3 and lease.lease
        other = client.chain(prompt(8, CHUNK_TOKENS))
        refused = status(lambda: client.put(other, pages_of(8, 1)))
        longer = client.chain(prompt(7, CHUNK_TOKENS * 3) + prompt(9, CHUNK_TOKENS))
        tail = client.put(longer, pages_of(7, 3) + pages_of(9, 1))
        client.store.call("Release", store.new("ReleaseRequest", session=client.session, leases=[lease.lease]))
        return {"outcomes": outcomes, "refused": refused, "tail": tail, "after": client.put(other, pages_of(8, 1))}


def health(store: Store, _: str) -> Any:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(store._channel)
    names = ("", "kvstore.v1.NodeService")
    answers = [stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S).status for name in names]
    return [health_pb2.HealthCheckResponse.ServingStatus.Name(answer) for answer in answers]


def status_codes(store: Store, _: str) -> dict[str, list[str]]:
    """Situation -> [status code, details]."""
    client = Client(store, DESCRIPTION)
    chain, page = client.chain(prompt(10, CHUNK_TOKENS)), pages_of(10, 1)[0]
    header, hash_ = client.header(chain), xxhash.xxh3_64_intdigest(page)
    data = [store.new("PutRequest", data=page[at : at + PIECE_BYTES]) for at in range(0, len(page), PIECE_BYTES)]
    end = store.new("PutRequest", payload_hash=hash_)
    short = (0, LAYERS - 1, 0, KV_HEADS)
    two = client.chain(prompt(10, 2 * CHUNK_TOKENS))
    other = {**DESCRIPTION, "revision": "never registered"}
    situations: dict[str, Callable[[], Any]] = {
        "no deadline": lambda: client.put(chain, [page], deadline_s=None),
        "no deadline, unary": lambda: store.call("Stats", store.new("StatsRequest"), None),
        "deadline over the limit": lambda: client.put(chain, [page], deadline_s=601.0),
        "passed deadline": lambda: client.send(stalled([header]), 0.3),
        "unknown namespace": lambda: client.get(
            client.chain(prompt(10, CHUNK_TOKENS), namespace_id=namespace_id(canonical(other)))
        ),
        "unknown shard": lambda: client.send([client.header(chain, shard=shard_id((short,), 0))]),
        "unknown session, Put": lambda: client.send([client.header(chain, session=12345)]),
        "unknown session, Get": lambda: client.get(chain, session=12345),
        "geometry that does not fit": lambda: client.register(client.text, (short,)),
        "geometry with a gap": lambda: client.register(client.text, (short, (LAYERS - 1, LAYERS, 0, 1))),
        "description that is not canonical": lambda: client.register(json.dumps(DESCRIPTION).encode(), ()),
        "description of an unknown dtype": lambda: client.register(canonical({**DESCRIPTION, "dtype": "int3"}), ()),
        "rectangle outside the layout": lambda: client.get(chain, (0, LAYERS + 1, 0, 1)),
        "rectangle missing": lambda: client.get(chain, rectangle=None),
        "keys of a wrong length": lambda: client.get(client.chain(prompt(10, CHUNK_TOKENS), keys=b"123")),
        "truncated stream": lambda: client.send([header, *data]),
        "truncated after the header": lambda: client.send([header]),
        "no header": lambda: client.send([*data, end]),
        "empty stream": lambda: client.send([]),
        "second header": lambda: client.send([header, header]),
        "wrong hash": lambda: client.send([header, *client.pieces(page, hash_ ^ 1)]),
        "too few bytes": lambda: client.send([header, *data[:-1], store.new("PutRequest", data=b"x"), end]),
        "too many bytes": lambda: client.send([header, *data, store.new("PutRequest", data=b"x"), end]),
        "more after the last chunk": lambda: client.send([header, *data, end, *data]),
        "fewer chunks than keys": lambda: client.send([client.header(two), *data, end]),
        "piece over the limit": lambda: client.send([header, store.new("PutRequest", data=bytes(PIECE_BYTES + 1))]),
        "message over the limit": lambda: client.send([header, store.new("PutRequest", data=bytes(17 << 20))]),
        "Reserve without shared memory": lambda: store.call(
            "Reserve", store.new("ReserveRequest", session=client.session, chain=chain, shard=shard_id((WHOLE,), 0))
        ),
        "Commit without shared memory": lambda: store.call(
            "Commit", store.new("CommitRequest", session=client.session, attempt=1, indices=[0], table_hashes=[0])
        ),
        "bytes that are no message": lambda: raw_call(store, pickle.dumps({"session": 1})),
        "unknown method": lambda: raw_call(store, b"", "/kvstore.v1.NodeService/Format"),
    }
    found = {situation: status(act) for situation, act in situations.items()}
    found["after all that"] = status(lambda: client.put(chain, [page]))
    found["duplicate keys"] = status(
        lambda: client.send(
            [
                client.header(client.chain(prompt(10, CHUNK_TOKENS), keys=chain.keys * 2, fingerprints=[1, 2, 3])),
                *data,
                end,
            ]
        )
    )
    return found


def status(act: Callable[[], Any]) -> list[str]:
    try:
        act()
    except grpc.RpcError as exc:
        return [exc.code().name, exc.details() or ""]  # type: ignore[attr-defined]
    return ["OK", ""]


def stalled(requests: Sequence[Any]) -> Iterator[Any]:
    """Some messages, then nothing until the call is over."""
    yield from requests
    OVER.wait(DEADLINE_S)


def raw_call(store: Store, data: bytes, method: str = "/kvstore.v1.NodeService/Acquire") -> Any:
    return store._channel.unary_unary(method, lambda value: value, lambda value: value)(data, timeout=DEADLINE_S)


def garbage(store: Store, address: str) -> Any:
    """Bytes that are no HTTP/2 on the port: the connection ends, the service goes on."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as peer:
        peer.sendall(pickle.dumps(["not", "HTTP/2"] * 1000))
        peer.settimeout(DEADLINE_S)
        try:
            while peer.recv(65536):
                pass
            closed = True
        except ConnectionError:
            closed = True
        except TimeoutError:
            closed = False
    return {"closed": closed, "after": status(lambda: store.call("Stats", store.new("StatsRequest")))}


def other_services(store: Store, addresses: Sequence[str]) -> Any:
    """Metadata service and scheduler, each by its own address."""
    node, metadata, router = addresses
    with grpc.insecure_channel(metadata) as channel, grpc.insecure_channel(router) as other:
        index = from_reflection(channel)
        scheduler = from_reflection(other)
        client = Client(store, DESCRIPTION)
        tokens = prompt(11, 3 * CHUNK_TOKENS)
        client.put(client.chain(tokens), pages_of(11, 3))
        chain = index.new("Chain", **chain_of(client.space, tokens))
        run = 0
        for _ in range(200):  # the index is told afterwards
            matches = index.call("Match", index.new("MatchRequest", chain=chain), service="MetadataService").nodes
            run = max([0, *(match.run for match in matches)])
            if run == 3:
                break
            threading.Event().wait(0.05)
        nodes = index.call("ListNodes", index.new("ListNodesRequest"), service="MetadataService").nodes
        worker = scheduler.new("WorkerStatus", worker_id="w", role=1, node_id=nodes[0].node.node_id)
        scheduler.call("Report", scheduler.new("ReportRequest", worker=worker), service="SchedulerService")
        request = scheduler.new(
            "PickRequest",
            request_id="r",
            chain=scheduler.new("Chain", **chain_of(client.space, tokens)),
            prompt_tokens=len(tokens),
        )
        pick = scheduler.call("Pick", request, service="SchedulerService")
        return {
            "run": run,
            "nodes": [status_.node.control_address for status_ in nodes],
            "node": node,
            "picked": pick.prefill_worker_id,
            "ticket_chunks": pick.ticket.chunk_count,
        }


def main() -> None:
    how, folder, node, *others = sys.argv[1:]
    with grpc.insecure_channel(node) as channel:
        store = from_generated(folder, channel) if how == "generated" else from_reflection(channel)
        results: dict[str, Any] = {
            "round_trip": round_trip(store, node),
            "shards": shards(store, node),
            "large": large(store, node),
            "miss": miss(store, node),
            "stored_without_tokens": stored_without_tokens(store, node),
            "full_pool": full_pool(store, others[0]),
            "health": health(store, node),
            "status_codes": status_codes(store, node),
            "garbage": garbage(store, node),
            "stats": sorted(json.loads(store.call("Stats", store.new("StatsRequest")).json)),
            "other_services": other_services(store, [node, *others[1:]]),
        }
    OVER.set()
    results["library_modules"] = sorted(name for name in sys.modules if name.partition(".")[0] == "kvstore")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
