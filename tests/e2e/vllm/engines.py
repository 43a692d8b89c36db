"""What the engine tests drive: engines in processes of their own, their servers, and a node each of the pool.

Engines run under the side environment's Python (`KVSTORE_VLLM_PYTHON`) with this source tree on their path; nodes run
under the tests' own Python. Everything that a test starts belongs to its `Workplace` and ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import process_groups
import side_environment

from kvstore.analytics.processes import Child, Children, console_script
from kvstore.node.remote import RemoteNode

HERE = Path(__file__).resolve().parent
ENGINE_DEADLINE_S = 240.0
CHUNK_TOKENS = 64
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
LOCAL_HITS = "vllm:prefix_cache_hits"
PREEMPTIONS = "vllm:num_preemptions"
SERVER_FLAGS = {
    "--host": "127.0.0.1",
    "--served-model-name": "tiny",
    "--dtype": "float32",
    "--max-model-len": "1024",
    "--max-num-seqs": "8",
    "--kv-cache-memory-bytes": str(64 << 20),
    "--block-size": "32",
}

TO_LOG = ("sh", "-c", 'exec "$@" >&2', "sh")
"""Before a server's command: its stdout goes to its log, nobody reads it."""

Prompt = list[int]
Cold = Callable[..., list[list[int]]]
"""What the fixture `cold` is: prompts to the ids of an engine without a pool."""


def prompt(seed: int, tokens: int = 300, prefix: Sequence[int] = ()) -> Prompt:
    """A prompt of that many tokens, always the same for a seed; it begins with `prefix`."""
    numbers = random.Random(seed)
    return [*prefix, *(numbers.randrange(3, 800) for _ in range(tokens - len(prefix)))]


def covered(tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """How many tokens of a prompt a step can load: whole chunks, but one token is always computed for the answer.

    A load beside the steps takes whole prompts too; the engine computes their last token once more.
    """
    return min(tokens // chunk_tokens * chunk_tokens, tokens - 1)


def model(name: str) -> str:
    """Folder of a tiny model or adapter."""
    return str(side_environment.models() / name)


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request ended."""

    ids: list[int]
    cached_tokens: int
    finish: str
    transfer: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The answers of requests that ran together, and by how much the engine's counters grew."""

    answers: list[Answer]
    counters: dict[str, float]
    seconds: float

    @property
    def ids(self) -> list[list[int]]:
        """The token ids of each answer."""
        return [answer.ids for answer in self.answers]

    @property
    def cached_tokens(self) -> list[int]:
        """How many prompt tokens of each were not computed."""
        return [answer.cached_tokens for answer in self.answers]

    @property
    def external_hits(self) -> int:
        """Tokens that came from the connector."""
        return int(self.counters.get(EXTERNAL_HITS, 0))

    @property
    def local_hits(self) -> int:
        """Tokens that the engine's own prefix cache had."""
        return int(self.counters.get(LOCAL_HITS, 0))


class Engine:
    """One engine process, see `engine_process.py`."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def generate(self, prompts: Sequence[Prompt], **options: Any) -> Batch:
        """Answer these prompts together."""
        return self._batch(self._child.call({"step": "generate", "prompts": prompts, **options}, ENGINE_DEADLINE_S))

    def generate_and_hold(self, prompts: Sequence[Prompt], steps: int, **options: Any) -> None:
        """Begin to answer them; returns when the engine holds still after that many steps."""
        message = {"step": "generate", "prompts": prompts, "hold_after": steps, **options}
        said = self._child.call(message, ENGINE_DEADLINE_S)
        assert said == {"held": True}, f"the engine ended before its step {steps}: {said}"

    def go_on(self) -> Batch:
        """Let an engine that holds still answer."""
        return self._batch(self._child.call({}, ENGINE_DEADLINE_S))

    def forget(self, *, offloaded: bool = False) -> None:
        """Drop the engine's own prefix cache. `offloaded`: what it has offloaded to its host memory too."""
        assert self._child.call({"step": "forget", "offloaded": offloaded}, ENGINE_DEADLINE_S) == {"forgotten": True}

    def page_digests(self) -> set[str]:
        """Digests of the blocks of the engine's KV cache that hold anything."""
        return set(self._child.call({"step": "page_digests"}, ENGINE_DEADLINE_S)["digests"])

    def take_events(self) -> list[tuple[str, list[str]]]:
        """Events of the pool since the last call: name and block hashes."""
        said = self._child.call({"step": "take_events"}, ENGINE_DEADLINE_S)
        return [(name, hashes) for name, hashes in said["events"]]

    def quit(self) -> None:
        """Shut it down in order."""
        with process_groups.ending(self._child):
            self._child.call({"step": "quit"}, ENGINE_DEADLINE_S)

    @staticmethod
    def _batch(said: Mapping[str, Any]) -> Batch:
        return Batch([Answer(**answer) for answer in said["answers"]], said["counters"], said["seconds"])


class Server:
    """An engine as an OpenAI server."""

    def __init__(self, child: Child, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._child = child
        self._port = port

    def wait_ready(self) -> None:
        """Until it answers; Unreachable with its last words when it ended, AssertionError after the deadline."""
        end, pause = time.monotonic() + ENGINE_DEADLINE_S, threading.Event()
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                if not process_groups.members(self._child.pid):
                    self._child.receive(1.0)
                pause.wait(0.2)
        raise AssertionError(f"{self._child.name} is not ready after {ENGINE_DEADLINE_S:g} s")

    def counters(self) -> dict[str, float]:
        """Its Prometheus counters, each with its labels as it is written."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def pool_counters(self) -> list[str]:
        """What the connector counted, for the message of a test that fails."""
        lines = ((name, value) for name, value in self.counters().items() if "vllm:kvstore_" in name and value)
        labels = re.compile(r'(engine|model_name)="[^"]*",?|vllm:kvstore_')
        return [f"{labels.sub('', name)} {value:g}" for name, value in lines if "_created" not in name]

    def computed_tokens(self) -> int:
        """Prompt tokens that this server's own model computed so far."""
        name = "vllm:prompt_tokens_by_source_total"
        return sum(
            int(value)
            for line, value in self.counters().items()
            if line.startswith(name) and 'source="local_compute"' in line
        )


def complete(url: str, question: Prompt | str, **more: Any) -> dict[str, Any]:
    """One greedy completion, `choices[0].token_ids` in it. `more`: further keys of the request."""
    body = {
        "model": "tiny",
        "prompt": question,
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=ENGINE_DEADLINE_S) as answer:
        said: dict[str, Any] = json.load(answer)
    return said


class Node:
    """A node of the pool with its own folders, in processes that a test may kill, stop and start again."""

    def __init__(self, children: Children, name: str, metadata: str, options: Sequence[str]) -> None:
        self.metadata = metadata
        self._children, self._options = children, options
        self.child = children.start_node(name, metadata, *options)
        self._wait_open()

    @property
    def socket_path(self) -> str:
        """Where clients on this host meet it."""
        path: str = self.child.announcement["socket_path"]
        return path

    @property
    def control_address(self) -> str:
        """Its gRPC address; the same after a restart."""
        address: str = self.child.announcement["control_address"]
        return address

    def kill(self) -> None:
        """SIGKILL to the supervisor and the worker."""
        self.child.kill()

    def stop(self) -> None:
        """SIGSTOP to both; `go_on` ends it."""
        os.killpg(self.child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT to both."""
        os.killpg(self.child.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Start it again, empty, at the same addresses."""
        self.child = self._children.restart_node(self.child, self.metadata, *self._options)
        self._wait_open()

    def statistics(self) -> dict[str, Any]:
        """Its figures."""
        return node_statistics(self.control_address)

    def zero_pages(self) -> None:
        """Overwrite every stored byte with zeros, behind the node's back."""
        for listing in process_groups.members(self.child.pid):
            for descriptor in (listing / "fd").iterdir():
                if descriptor.readlink().name.startswith("memfd:kvstore-dram"):
                    with descriptor.open("r+b") as arena:
                        arena.write(bytes(descriptor.stat().st_size))
                    return
        raise AssertionError("no process of the node has its arena")

    def _wait_open(self) -> None:
        """Until all of its memory takes chunks."""
        end, pause = time.monotonic() + 30.0, threading.Event()
        while (figures := self.statistics())["open_bytes"] != figures["arena_bytes"]:
            assert time.monotonic() < end, "the node did not prepare its memory within 30 s"
            pause.wait(0.02)


def node_statistics(control_address: str) -> dict[str, Any]:
    """The figures of the node at that gRPC address."""
    api = RemoteNode(control_address, name="test")
    try:
        figures: dict[str, Any] = json.loads(api.stats(20.0))
    finally:
        api.close()
    return figures


class Workplace:
    """Starts what a test needs."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._python = os.environ["KVSTORE_VLLM_PYTHON"]
        self._started = 0
        self._engines: list[Child] = []

    def close(self) -> None:
        """End all engines, in order, so that they leave nothing."""
        self._end(*self._engines)

    def node(self, metadata: str = "", dram: str = "64MiB", slots: int = 4096) -> Node:
        """A node as of a host of its own; without metadata it stands alone."""
        return Node(self._children, self._name("node"), metadata, ("--dram", dram, "--slots", str(slots)))

    def metadata(self) -> str:
        """Address of a metadata service."""
        address: str = self._children.start_metadata().announcement["control_address"]
        return address

    def begin_engine(
        self, name: str = "llama", *, variables: Mapping[str, str] | None = None, **arguments: Any
    ) -> Child:
        """Start an engine of that model without waiting for it; `ready` makes an `Engine` of it."""
        tp = int(arguments.get("tensor_parallel_size", 1))
        return self._start(
            "engine",
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **threads(tp), **(variables or {})},
            [self._python, str(HERE / "engine_process.py"), json.dumps({"model": model(name), **arguments})],
        )

    def ready(self, child: Child) -> Engine:
        """Wait until it can answer."""
        child.receive(ENGINE_DEADLINE_S)
        return Engine(child)

    def engine(self, name: str = "llama", **arguments: Any) -> Engine:
        """Start an engine of that model and wait until it can answer; `variables` are of its environment."""
        return self.ready(self.begin_engine(name, **arguments))

    def server(self, connector: Mapping[str, Any] | None = None, *, tp: int = 1, core: int = 0) -> Server:
        """Start an OpenAI server without waiting for it. `core`: where its one rank computes."""
        port = free_port()
        flags = {**SERVER_FLAGS, "--model": model("llama"), "--port": str(port), "--tensor-parallel-size": str(tp)}
        if connector is not None:
            flags["--kv-transfer-config"] = json.dumps(connector)
        switches = ["--enforce-eager", "--enable-prompt-tokens-details"]
        command = ["-m", "vllm.entrypoints.openai.api_server", *(part for pair in flags.items() for part in pair)]
        words = [*TO_LOG, self._python, *command, *switches]
        return Server(self._start("server", threads(tp, core), words), port)

    def command(self, kind: str, command: str, variables: Mapping[str, str] | None = None) -> Child:
        """Start a command as a document shows it; its `python` is the engine's, its `kvstore` the tests' own."""
        path = f"{Path(self._python).parent}:{Path(console_script()).parent}:{os.environ['PATH']}"
        return self._start(kind, {"PATH": path, **(variables or {})}, ["bash", "-c", command])

    def end(self, engine: Engine | Server) -> None:
        """End a process before the test does."""
        self._end(engine._child)

    @staticmethod
    def _end(*children: Child) -> None:
        with contextlib.ExitStack() as ends:
            for child in children:
                ends.enter_context(process_groups.ending(child))
            for child in children:
                child.terminate()

    def log(self, engine: Engine | Server) -> str:
        """What the engine has said so far."""
        return (self._children.folder / f"{engine._child.name}.log").read_text()

    def _name(self, kind: str) -> str:
        self._started += 1
        return f"{kind}-{self._started}"

    def _start(self, kind: str, variables: Mapping[str, str], words: Sequence[str]) -> Child:
        """Start something in the engine's environment."""
        settings = {
            "PYTHONPATH": f"{HERE.parents[2]}:{HERE}",
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": str(self._children.folder),
            "DO_NOT_TRACK": "1",
            **variables,
        }
        child = self._children.start(
            self._name(kind), ["env", *(f"{name}={value}" for name, value in settings.items()), *words]
        )
        self._engines.append(child)
        return child


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def threads(tp: int, core: int | None = None) -> dict[str, str]:
    """Which cores the ranks compute on: two ranks need one each, or vLLM looks for a second NUMA node."""
    if tp > 1:
        return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp))}
    return {} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}


def connector(node: Node, load: str = "sync", **more: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` takes to use the pool. `more`: further keys of its extra configuration."""
    if node.metadata:
        more = {"metadata": node.metadata, **more}
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "engine_adapter.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": node.socket_path, "load": load, **more},
    }


def tier(node: Node, **more: Any) -> dict[str, Any]:
    """What `--kv-transfer-config` takes to have the pool behind vLLM's offloading. `more`: further keys of the tier."""
    if node.metadata:
        more = {"metadata": node.metadata, **more}
    behind = {"type": "KVStoreTier", "module_path": "engine_adapter.vllm", "node": node.socket_path, **more}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_offloading",
            "cpu_bytes_to_use": 32 << 20,
            "canonical_layout": True,
            "secondary_tiers": [behind],
        },
    }


def until_hits(engine: Engine, tokens: Prompt, hits: int, deadline_s: float = 30.0, *, offloaded: bool = False) -> None:
    """Until the pool, that was away, serves this prompt again. `offloaded`: as of `Engine.forget`."""
    end, pause = time.monotonic() + deadline_s, threading.Event()
    while True:
        engine.generate([tokens])
        engine.forget(offloaded=offloaded)
        if engine.generate([tokens]).external_hits == hits:
            return
        assert time.monotonic() < end, f"the pool did not serve {hits} tokens within {deadline_s:g} s"
        engine.forget(offloaded=offloaded)
        pause.wait(0.5)
