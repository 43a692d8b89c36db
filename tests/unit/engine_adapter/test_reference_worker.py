import io
import json
import os
import random
import subprocess
import sys

import pytest

import kvstore
from engine_adapter.model import Engine, ModelConfig
from engine_adapter.reference import ReferenceWorker, serve
from engine_adapter.session import PoolSession
from kvstore.client import TransferMode
from kvstore.errors import DeadlineExceeded, InvalidRequest, Unreachable
from kvstore.model.layout import Rectangle
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.model.values import MissReason

CONFIG = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp_hidden=96, vocabulary=97, page_tokens=4)
CHUNK = CONFIG.chunk_tokens


def prompt(length, seed=5):
    return random.Random(seed).choices(range(CONFIG.vocabulary), k=length)


@pytest.fixture
def client():
    with kvstore.open_local(dram="8MiB") as client:
        yield client


class Stays:
    """One client for several sessions: closing a session must not close the pool of the test."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        return getattr(self._client, name)

    def close(self):
        pass


def worker(client, blocks=64):
    return ReferenceWorker(Engine(CONFIG, blocks), PoolSession(CONFIG.namespace, lambda: Stays(client)))


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_prefill_then_decode_by_another_worker_equals_a_cold_run(client, length):
    tokens, answer_tokens = prompt(length), 2 * CHUNK + 1
    cold = worker(client).cold(tokens, answer_tokens)
    first = worker(client).prefill(tokens, None)
    chunks = -(-length // CHUNK)
    assert (first["first_token"], first["digest"]) == (cold["tokens"][0], cold["first_digest"])
    assert (first["hit_tokens_local"], first["computed_tokens"]) == (0, length)
    assert first["stored_chunks"] == first["visible_chunks"] == chunks

    decoded = worker(client).decode(tokens, answer_tokens, None)
    assert (decoded["tokens"], decoded["digest"]) == (cold["tokens"], cold["digest"])
    assert (decoded["hit_tokens_local"], decoded["computed_tokens"]) == (length - 1, 1)
    assert decoded["bytes_by_path"] == {"shm": chunks * CONFIG.namespace.layout.chunk_bytes}
    assert decoded["stored_chunks"] == (length + answer_tokens - 1) // CHUNK - length // CHUNK

    # The next turn hits beyond the first prompt, and still gives what a cold run gives.
    longer = tokens + decoded["tokens"] + prompt(7, seed=6)
    turn = worker(client).prefill(longer, None)
    again = worker(client).cold(longer, 1)
    assert (turn["first_token"], turn["digest"]) == (again["tokens"][0], again["digest"])
    assert turn["hit_tokens_local"] == (length + answer_tokens - 1) // CHUNK * CHUNK > length


def test_a_prompt_seen_before_computes_only_its_last_chunk(client):
    tokens = prompt(3 * CHUNK)
    one = worker(client)
    one.prefill(tokens, None)
    warm = one.prefill(tokens, None)
    assert (warm["hit_tokens_local"], warm["computed_tokens"]) == (2 * CHUNK, CHUNK)
    assert (warm["stored_chunks"], warm["visible_chunks"]) == (0, 3)
    assert one.stats()["free_blocks"] == 64


def test_what_the_pool_lost_is_computed(client):
    tokens = prompt(4 * CHUNK + 3)
    one = worker(client)
    cold = one.cold(tokens, 5)
    one.prefill(tokens, None)
    cache = client.bind(CONFIG.namespace)
    cache.remove(cache.keys(tokens).slice(2, 3))
    decoded = one.decode(tokens, 5, None)
    assert (decoded["tokens"], decoded["digest"]) == (cold["tokens"], cold["digest"])
    assert decoded["hit_tokens_local"] == 2 * CHUNK
    assert decoded["miss_reason"] is not None


class Faulty:
    """A client whose cache fails at chosen verbs, after it has done half of the work."""

    def __init__(self, client, verb, error):
        self._client, self._verb, self._error = client, verb, error

    def bind(self, namespace):
        return FaultyVerbs(self._client.bind(namespace), self._verb, self._error)

    def stats(self):
        raise self._error

    node = None

    def close(self):
        raise self._error


class FaultyVerbs:
    def __init__(self, inner, verb, error):
        self._inner, self._verb, self._error = inner, verb, error

    @property
    def granted(self):
        return self._inner.granted

    @property
    def keys(self):
        return self._inner.keys

    def read(self, keys, into, **options):
        if self._verb == "read":
            self._inner.read(keys.slice(0, 1), into, **options)
            raise self._error
        return self._inner.read(keys, into, **options)

    def read_layers(self, keys, into, **options):
        if self._verb == "read":
            raise self._error
        return self._inner.read_layers(keys, into, **options)

    def begin_write(self, keys, **options):
        if self._verb == "begin_write":
            raise self._error
        return FaultyVerbs(self._inner.begin_write(keys, **options), self._verb, self._error)

    def put_layers(self, *arguments, **options):
        self._inner.put_layers(*arguments, **options)
        if self._verb == "put_layers":
            raise self._error

    def commit(self, upto=None):
        if self._verb == "commit":
            raise self._error
        return self._inner.commit(upto)

    def abort(self):
        self._inner.abort()
        raise self._error


@pytest.mark.parametrize("verb", ["read", "begin_write", "put_layers", "commit"])
@pytest.mark.parametrize("error", [Unreachable("gone"), OSError("no space left on device")], ids=["pool", "system"])
def test_b06_a_pool_that_fails_changes_no_answer(client, verb, error):
    tokens = prompt(3 * CHUNK + 2)
    healthy = worker(client)
    healthy.prefill(tokens[: 2 * CHUNK], None)
    session = PoolSession(CONFIG.namespace, lambda: Faulty(client, verb, error))
    engine = Engine(CONFIG, 64)
    for pages in engine.pages:
        pages.fill_(float("nan"))
    sick = ReferenceWorker(engine, session)
    cold = healthy.cold(tokens, CHUNK)
    for _ in range(3):
        assert sick.prefill(tokens, None)["digest"] == cold["first_digest"]
        assert sick.decode(tokens, CHUNK, None)["digest"] == cold["digest"]
    stats = sick.stats()
    assert stats["free_blocks"] == 64
    assert any(count >= 2 for count in stats["errors"].values())
    session.close()
    # Nothing that failed half way is left reserved: a healthy worker stores and hits all of it.
    assert healthy.prefill(tokens, None)["visible_chunks"] == 4
    assert healthy.decode(tokens, 1, None)["computed_tokens"] == 1


def test_b06_layers_are_told_as_they_come_and_errors_are_misses(client):
    """An error of the pool, and one of the engine in the middle of its layers."""
    cache = client.bind(CONFIG.namespace)
    keys, layout = cache.keys(prompt(2 * CHUNK)), CONFIG.namespace.layout
    pages = cache.empty(2)
    pages[:] = 7
    assert cache.write(keys, pages).visible == 2
    told, found = [], cache.empty(2)
    session = PoolSession(CONFIG.namespace, lambda: Stays(client))
    options = {"deadline_s": 5.0, "mode": TransferMode.LAYERWISE}
    assert session.load_layers(keys, found, told.append, **options).chunks == 2
    assert (found == 7).all() and told[0].layer_start == 0 and told[-1].layer_stop == layout.layers
    assert session.load_layers(keys.slice(0, 0), found, told.append, **options).chunks == 0

    def fail(ready):
        raise ValueError("no such layer")

    assert session.load_layers(keys, found, fail, **options).chunks == 0
    sick = PoolSession(CONFIG.namespace, lambda: Faulty(client, "read", DeadlineExceeded("late")))
    assert sick.load_layers(keys, found, told.append, **options).reason is MissReason.DEADLINE
    assert session.errors == {"read:ValueError": 1} and sick.errors == {"read:DeadlineExceeded": 1}


def test_b06_a_pool_that_cannot_be_reached_is_not_tried_at_every_call():
    attempts = []

    def open_client():
        attempts.append(1)
        raise Unreachable("nobody there")

    session = PoolSession(CONFIG.namespace, open_client)
    alone = ReferenceWorker(Engine(CONFIG, 64), session)
    tokens = prompt(2 * CHUNK)
    assert alone.decode(tokens, 3, None)["digest"] == alone.cold(tokens, 3)["digest"]
    assert alone.prefill(tokens, None)["miss_reason"] == "unreachable"
    assert len(attempts) == 1
    assert session.node_id == ""


def test_commands_are_answered_in_order_and_wrong_ones_change_nothing(client):
    tokens = prompt(CHUNK + 1)
    wrong = [
        "not json",
        "[]",
        "{}",
        json.dumps({"cmd": "bake"}),
        json.dumps({"cmd": "prefill", "request_id": "r1"}),
        json.dumps({"cmd": "prefill", "tokens": []}),
        json.dumps({"cmd": "cold", "tokens": [0.5], "max_new_tokens": 1}),
        json.dumps({"cmd": "prefill", "tokens": [CONFIG.vocabulary]}),
        json.dumps({"cmd": "decode", "tokens": tokens, "max_new_tokens": 0}),
        json.dumps({"cmd": "cold", "tokens": tokens * 50, "max_new_tokens": 1}),
        json.dumps({"cmd": "prefill", "tokens": tokens, "ticket": {"id": "00"}}),
    ]
    right = [
        json.dumps({"cmd": "prefill", "request_id": "r2", "tokens": tokens}),
        json.dumps({"cmd": "stats"}),
        json.dumps({"cmd": "stop"}),
        json.dumps({"cmd": "stats"}),
    ]
    out = io.StringIO()
    serve(worker(client), [*wrong, *right], out, None)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all("error" in answer for answer in answers[: len(wrong)])
    assert answers[4]["request_id"] == "r1"
    prefill, stats, stopped = answers[len(wrong) :]
    assert (prefill["request_id"], prefill["computed_tokens"], prefill["stored_chunks"]) == ("r2", CHUNK + 1, 2)
    assert (stats["free_blocks"], stats["errors"]) == (64, {})
    assert stopped == {"stopped": True}


def test_a_ticket_survives_json():
    rank = TicketRank("node-1", (1 << 63) + 5, Rectangle(0, 2, 0, 2))
    ticket = Ticket(bytes(range(16)), bytes(16), b"\xff" * 16, b"\x00" * 15 + b"\x01", 3, 7, (rank,))
    assert Ticket.from_json(json.loads(json.dumps(ticket.to_json()))) == ticket
    for bad in ({}, {"id": "zz"}, ticket.to_json() | {"chunk_count": 0}, ticket.to_json() | {"ranks": 5}):
        with pytest.raises(InvalidRequest):
            Ticket.from_json(bad)


@pytest.mark.slow
def test_the_process_works_without_any_pool():
    tokens = random.Random(3).choices(range(512), k=130)
    commands = [
        {"cmd": "cold", "tokens": tokens, "max_new_tokens": 3},
        {"cmd": "decode", "request_id": "r1", "tokens": tokens, "max_new_tokens": 3},
        {"cmd": "stop"},
    ]
    done = subprocess.run(
        [sys.executable, "-m", "engine_adapter.reference", "--role", "decode", "--worker-id", "d0"],
        input="".join(json.dumps(command) + "\n" for command in commands),
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    ready, cold, decoded, stopped = (json.loads(line) for line in done.stdout.splitlines())
    assert (ready["ready"], ready["node_id"]) == ("d0", "")
    assert (decoded["tokens"], decoded["digest"]) == (cold["tokens"], cold["digest"])
    assert (decoded["request_id"], decoded["computed_tokens"]) == ("r1", 130)
    assert stopped == {"stopped": True}
