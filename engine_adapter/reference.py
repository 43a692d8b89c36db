"""A worker process with the reference model: prefill or decode, fed with JSON lines.

    python -m engine_adapter.reference --role prefill --worker-id p0 --node 127.0.0.1:7420 --metadata 127.0.0.1:7410

One JSON object a line on stdin, one answer a line on stdout, in order; the first line out says that the worker is
ready and names its namespace and node. Commands (`cmd`):

    prefill  request_id, tokens, ticket?                  load what the pool has, compute and store the rest
    decode   request_id, tokens, max_new_tokens, ticket?  load the prompt, decode greedily, store what was generated
    cold     tokens, max_new_tokens                       the same without the pool: what the others must equal
    stats    stop

Tokens are ids. `hit_tokens_local` + `hit_tokens_remote` + `computed_tokens` = prompt tokens. `digest` is BLAKE2b of
the bytes of the logits that gave the last token of the answer, `first_digest` of those that gave the first. An
answer with `error` says that the command was wrong; the pool never causes one, what it lacks is computed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from torch import Tensor

import kvstore
from engine_adapter.copy import PagedKv
from engine_adapter.model import Context, Engine, ModelConfig
from engine_adapter.session import PoolSession, guarded
from kvstore.client import ReadResult
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.ticket import Ticket
from kvstore.scheduler import Worker, WorkerRole
from kvstore.scheduler.client import SchedulerClient

Answer = dict[str, Any]
REPORT_EVERY_S = 1.0
READ_DEADLINE_S = 5.0


@dataclass(slots=True)
class Loaded:
    """A prompt whose cached prefix is in the engine's pages. `prompt_tokens` - hits are left to compute."""

    keys: Keys
    context: Context
    kv: PagedKv
    result: ReadResult
    prompt_tokens: int
    begin_s: float
    wait_ms: float = 0.0

    def answer(self, first_token_s: float) -> Answer:
        """What prefill and decode both report. The last token is always computed, also if its chunk was loaded."""
        hits = min(self.result.tokens, self.prompt_tokens - 1)
        local = min(self.keys.tokens_of_first(self.result.local_chunks), hits)
        return {
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens_local": local,
            "hit_tokens_remote": hits - local,
            "hit_tokens_ssd": min(self.result.ssd_tokens, hits),
            "computed_tokens": self.prompt_tokens - hits,
            "bytes_by_path": dict(self.result.bytes_by_path),
            "miss_reason": self.result.reason.value if self.result.reason is not None else None,
            "wait_ms": round(self.wait_ms, 3),
            "ttft_ms": round((first_token_s - self.begin_s) * 1000, 3),
        }


class ReferenceWorker:
    """The commands. One request at a time; the engine's blocks are free again after each."""

    def __init__(self, engine: Engine, session: PoolSession, read_deadline_s: float = READ_DEADLINE_S) -> None:
        self._engine = engine
        self._session = session
        self._read_deadline_s = read_deadline_s
        self._chain = KeyChain(engine.config.namespace)

    def prefill(self, tokens: Sequence[int], ticket: Ticket | None) -> Answer:
        """Load the cached prefix, compute the rest, store all chunks; the answer is the first token."""
        chunk_tokens, layers = self._engine.config.chunk_tokens, self._engine.config.layers
        loaded = self._load(tokens, (len(tokens) - 1) // chunk_tokens, None)
        context, first_chunk = loaded.context, loaded.result.chunks
        try:
            with self._session.writer(loaded.keys, loaded.kv, ticket=ticket) as writer:
                # Chunks that came from elsewhere and that the own node lacks: presence there is a prefix.
                writer.put_chunks(0, first_chunk)
                writer.commit(first_chunk)

                def on_layer(chunk: int, layer: int) -> None:
                    writer.put_layer(layer, chunk, chunk + 1)
                    if layer == layers - 1:
                        writer.commit(chunk + 1)

                logits = self._engine.extend(context, tokens[context.length :], on_layer)
                first_token_s = time.monotonic()
                writer.finish()
        finally:
            self._engine.free(context)
        return loaded.answer(first_token_s) | {
            "first_token": int(logits.argmax()),
            "digest": _digest(logits),
            "stored_chunks": writer.stored_chunks,
            "visible_chunks": writer.visible_chunks,
        }

    def decode(self, tokens: Sequence[int], max_new_tokens: int, ticket: Ticket | None) -> Answer:
        """Load the whole prompt, compute what is missing, decode, store the chunks that became full."""
        _check_count(max_new_tokens)
        loaded = self._load(tokens, len(tokens), ticket)
        context = loaded.context
        try:
            if ticket is not None:
                self._session.release(ticket)
            # Logits exist only for computed tokens: of a prompt that was loaded whole the last one is done again.
            context.length = min(context.length, len(tokens) - 1)
            first = self._engine.extend(context, tokens[context.length :])
            first_token_s = time.monotonic()
            answer, last = self._greedy(context, first, max_new_tokens)
            stored = self._save_decode(tokens, answer, context)
        finally:
            self._engine.free(context)
        return loaded.answer(first_token_s) | {
            "tokens": answer,
            "first_digest": _digest(first),
            "digest": _digest(last),
            "stored_chunks": stored,
        }

    def cold(self, tokens: Sequence[int], max_new_tokens: int) -> Answer:
        """The answer of an engine that has no pool."""
        _check_count(max_new_tokens)
        context, begin_s = Context(), time.monotonic()
        try:
            first = self._engine.extend(context, tokens)
            first_token_s = time.monotonic()
            answer, last = self._greedy(context, first, max_new_tokens)
        finally:
            self._engine.free(context)
        return {
            "tokens": answer,
            "first_digest": _digest(first),
            "digest": _digest(last),
            "computed_tokens": len(tokens),
            "ttft_ms": round((first_token_s - begin_s) * 1000, 3),
        }

    def stats(self) -> Answer:
        """Figures of the client, errors of the pool that became misses, free blocks of the engine."""
        return {**self._session.stats(), "free_blocks": self._engine.free_blocks}

    def _load(self, tokens: Sequence[int], chunk_limit: int, ticket: Ticket | None) -> Loaded:
        """Read the longest cached prefix, at most `chunk_limit` chunks, into new blocks for all tokens."""
        begin_s, context, keys = time.monotonic(), Context(), self._chain.keys(tokens)
        self._engine.grow(context, len(tokens))
        kv = PagedKv(self._engine.pages, self._engine.config.pages_per_chunk, context.blocks)
        read_s = time.monotonic()
        result = self._session.read(keys.slice(0, chunk_limit), kv, deadline_s=self._read_deadline_s, ticket=ticket)
        wait_ms = (time.monotonic() - read_s) * 1000
        self._engine.clear(context, result.chunks)
        context.length = keys.tokens_of_first(result.chunks)
        return Loaded(keys, context, kv, result, len(tokens), begin_s, wait_ms)

    def _greedy(self, context: Context, logits: Tensor, count: int) -> tuple[list[int], Tensor]:
        """`count` tokens and the logits that gave the last one, whose own KV is not computed."""
        answer = [int(logits.argmax())]
        while len(answer) < count:
            logits = self._engine.extend(context, answer[-1:])
            answer.append(int(logits.argmax()))
        return answer, logits

    def _save_decode(self, tokens: Sequence[int], answer: Sequence[int], context: Context) -> int:
        """Store the chunks that the answer filled, with their ancestors where the own node lacks them.

        A last chunk that is not full is left out: no later prompt that goes on behind it would ask for its key.
        """
        full = context.length // self._engine.config.chunk_tokens
        if full <= len(tokens) // self._engine.config.chunk_tokens:
            return 0
        keys = self._chain.keys([*tokens, *answer][: full * self._engine.config.chunk_tokens])
        kv = PagedKv(self._engine.pages, self._engine.config.pages_per_chunk, context.blocks)
        with self._session.writer(keys, kv) as writer:
            writer.put_chunks(0, full)
            writer.finish()
        return writer.stored_chunks


def _digest(logits: Tensor) -> str:
    return hashlib.blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest()


def _check_count(max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise InvalidRequest("max_new_tokens is at least 1")


class Reporter:
    """Tells the scheduler that the worker lives and which requests have ended. Failures are counted, no more."""

    def __init__(self, client: SchedulerClient, worker_id: str, role: WorkerRole, session: PoolSession) -> None:
        self._client = client
        self._worker_id = worker_id
        self._role = role
        self._session = session
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="report", daemon=True)
        self.report()
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(REPORT_EVERY_S):
            self.report()

    def report(self, finished: Sequence[str] = (), *, leaving: bool = False) -> None:
        """One report now."""

        def call() -> None:
            # The node's id anew each time: the node may have come after the worker.
            worker = Worker(self._worker_id, self._role, self._session.node_id)
            lease_s = 3 * REPORT_EVERY_S
            self._client.report(worker, finished=finished, lease_s=lease_s, leaving=leaving, deadline_s=0.5)

        guarded(self._session.errors, "report", call, None)

    def close(self) -> None:
        """The worker leaves."""
        self._stop.set()
        self._thread.join()
        self.report(leaving=True)
        self._client.close()


def handle(worker: ReferenceWorker, command: Mapping[str, Any]) -> Answer:
    """One command but `stop`. Raises InvalidRequest, KeyError, TypeError or ValueError for one that is wrong."""
    ticket = Ticket.from_json(command["ticket"]) if command.get("ticket") else None
    match command["cmd"]:
        case "prefill":
            return worker.prefill(_tokens(command), ticket)
        case "decode":
            return worker.decode(_tokens(command), int(command["max_new_tokens"]), ticket)
        case "cold":
            return worker.cold(_tokens(command), int(command["max_new_tokens"]))
        case "stats":
            return worker.stats()
        case other:
            raise InvalidRequest(f"unknown command {other!r}")


def _tokens(command: Mapping[str, Any]) -> list[int]:
    tokens = command["tokens"]
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
        raise InvalidRequest("tokens is a list of at least one integer")
    return tokens


def serve(worker: ReferenceWorker, lines: Iterable[str], out: TextIO, reporter: Reporter | None) -> None:
    """Answer commands until `stop` or the end of the input."""
    for line in lines:
        request_id = None
        try:
            command = json.loads(line)
            request_id = command.get("request_id")
            if command.get("cmd") == "stop":
                _say(out, {"stopped": True})
                return
            answer = handle(worker, command)
        except (InvalidRequest, KeyError, TypeError, ValueError, AttributeError) as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        if request_id is not None:
            answer["request_id"] = request_id
            if reporter is not None:
                reporter.report([request_id])
        _say(out, answer)


def _say(out: TextIO, answer: Answer) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine_adapter.reference", description="A reference worker.")
    parser.add_argument("--role", choices=["prefill", "decode"], required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--node", help="gRPC address or Unix socket of the own host's node")
    parser.add_argument("--metadata", help="address of the metadata service")
    parser.add_argument("--scheduler", help="address of the scheduler")
    parser.add_argument("--host-id", default="", help="host of this process; nodes of another one are read over tcp")
    parser.add_argument("--transport", default="auto", help="auto, shm or tcp")
    parser.add_argument("--staging", default="64MiB", help="memory for reads from other nodes")
    parser.add_argument("--blocks", type=int, default=1024, help="pages of the engine, 16 tokens each")
    parser.add_argument("--read-deadline-s", type=float, default=READ_DEADLINE_S)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one worker."""
    options = _options(arguments)
    logging.basicConfig(stream=sys.stderr, format=f"{options.worker_id}: %(message)s")
    engine = Engine(ModelConfig(), options.blocks)
    namespace = engine.config.namespace

    def open_client() -> kvstore.Client:
        return kvstore.connect(
            options.node,
            options.metadata,
            transport=options.transport,
            staging=options.staging,
            name=options.worker_id,
            host_id=options.host_id,
            deadline_s=2.0,
        )

    session = PoolSession(namespace, open_client)
    role = WorkerRole[options.role.upper()]
    if options.node or options.metadata:
        session.open()
    reporter = None
    if options.scheduler:
        reporter = Reporter(SchedulerClient(options.scheduler), options.worker_id, role, session)
    ready = {"ready": options.worker_id, "node_id": session.node_id, "namespace": namespace.canonical.decode()}
    _say(sys.stdout, ready)
    try:
        serve(ReferenceWorker(engine, session, options.read_deadline_s), sys.stdin, sys.stdout, reporter)
    finally:
        if reporter is not None:
            reporter.close()
        session.close()


if __name__ == "__main__":
    main()
