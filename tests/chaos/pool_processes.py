"""Node, metadata and client processes for tests that kill, stop and restart them; talked to in JSON lines.

Run as a script this file is such a process: `pool_processes.py ROLE ARGUMENTS`, with a JSON object of arguments. What
is in `patches` (dotted name -> value) is set before the role starts: shorter lifetimes, smaller limits. A client does
one step a line, so that a test can do something to it between any two steps.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kvstore.errors import Unreachable

T = TypeVar("T")
WAIT_S = 20.0
ROOT = Path(__file__).resolve().parents[2]


def until(condition: Callable[[], T], deadline_s: float = WAIT_S) -> T:
    """The first true result of `condition`, asked again and again."""
    end, pause = time.monotonic() + deadline_s, threading.Event()
    while not (result := condition()):
        assert time.monotonic() < end, f"it did not come true within {deadline_s} s"
        pause.wait(0.005)
    return result


class Process:
    """A role in a process of its own. `said` is its last line."""

    def __init__(self, role: str, **arguments: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, role, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._pending = b""
        self.said: dict[str, Any] = {}
        self.remote: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, deadline_s: float = WAIT_S) -> dict[str, Any]:
        """Its next line; AssertionError if it ends or says nothing."""
        assert self._process.stdout is not None
        descriptor, end = self._process.stdout.fileno(), time.monotonic() + deadline_s
        while b"\n" not in self._pending:
            ready = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]
            data = os.read(descriptor, 1 << 16) if ready else b""
            assert data, f"process {self.pid} said nothing more (exit status {self._process.poll()})"
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        self.said = json.loads(line)
        return self.said

    def do(self, step: str, **arguments: Any) -> dict[str, Any]:
        """One step of a client, and its answer."""
        self.tell(step=step, **arguments)
        return self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self) -> int:
        return self._process.wait(WAIT_S)

    def terminate(self) -> int:
        self._process.terminate()
        return self.wait()

    def end(self) -> None:
        """However it stands: it is gone afterwards."""
        self._process.kill()
        self._process.wait(WAIT_S)
        if self.remote is not None:
            self.remote.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Processes:
    """Starts processes and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[Process] = []

    def start(self, role: str, **arguments: Any) -> Process:
        process = Process(role, **arguments)
        self._all.append(process)
        return process

    def node(self, name: str = "node", *, dram: int = 1 << 20, patches: Any = None, **settings: Any) -> Process:
        """A node with all its memory open. The same name again is the same node, restarted."""
        places = self.folder / name
        places.mkdir(exist_ok=True)
        values = {
            "control_address": "127.0.0.1:0",
            "metrics_address": "",
            "dram": dram,
            "slots": dram // 4096,
            "host_id": name,
            "socket_dir": str(places),
            "data_dir": str(places),
            **settings,
        }
        process = self.start("node", settings=values, patches=patches or {})
        process.hear()
        until(lambda: stats_of(process)["open_bytes"] == dram)
        return process

    def metadata(self, address: str = "127.0.0.1:0") -> Process:
        process = self.start("metadata", address=address)
        process.hear()
        return process

    def client(self, node: Process | None, **arguments: Any) -> Process:
        """A client that has said hello; `ready` is what `Client.node` says."""
        address = node.said["socket_path"] if node is not None else None
        process = self.start("client", node=address, **arguments)
        process.hear()
        return process

    def end(self) -> None:
        for process in reversed(self._all):
            process.end()


def stats_of(node: Process) -> dict[str, Any]:
    """The node's figures."""
    if node.remote is None:
        from kvstore.node.remote import RemoteNode

        node.remote = RemoteNode(node.said["control_address"], session=1)
    try:
        stats: dict[str, Any] = json.loads(node.remote.stats(WAIT_S))
    except Unreachable:  # the first connection of a busy machine may be given up after a tenth of a second
        stats = json.loads(node.remote.stats(WAIT_S))
    return stats


# --- inside the processes ------------------------------------------------------------------------------------


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def heard() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def patch(patches: dict[str, Any]) -> None:
    """Set `module.NAME`; `module.Class.method: "as other"` switches a guard off: the method does what `other` does."""
    for name, value in patches.items():
        owner, _, attribute = name.rpartition(".")
        module, _, class_name = owner.rpartition(".")
        is_class = class_name[:1].isupper()
        target = getattr(importlib.import_module(module), class_name) if is_class else importlib.import_module(owner)
        assert hasattr(target, attribute), name
        other = value.removeprefix("as ") if isinstance(value, str) and is_class else ""
        setattr(target, attribute, getattr(target, other) if other else value)


class SteppedClient:
    """A client whose every step is a line. Prompts are numbers; pages are those of `tests.unit.client.pages`."""

    def __init__(
        self, node: str | None, metadata: str | None = None, transport: str = "auto", layout: str = "small"
    ) -> None:
        import kvstore
        from tests.unit.client import pages

        self.pages = pages
        self.client = kvstore.connect(node, metadata, transport=transport)
        self.cache = self.client.bind(pages.namespace(layout=pages.LAYOUTS[layout]))
        self.pending: Any = None
        self.held = False

    def _keys(self, prompt: int, chunks: int) -> Any:
        return self.cache.keys(self.pages.prompt(prompt, chunks * self.cache.layout.chunk_tokens))

    # What a source and a destination of a client are; they say where they stand and wait if the step asked for it.

    def gather(self, index: int, slot: Any, layer_start: int, head_start: int) -> None:
        half = slot.shape[0] // 2
        rows = self.whole[index, layer_start : layer_start + slot.shape[0]]
        slot[:half] = rows[:half]
        self._hold(index)
        slot[half:] = rows[half:]

    def scatter(self, index: int, piece: Any, layer_start: int, head_start: int) -> None:
        self._hold(index)
        self.target[index, layer_start : layer_start + piece.shape[0]] = piece

    def _hold(self, index: int) -> None:
        if self.held and index == 1:
            self.held = False
            say(held=index)
            while (message := json.loads(sys.stdin.readline()))["step"] == "fork":
                say(**self.fork(stay=message.get("stay", False)))

    # --- steps -------------------------------------------------------------------------------------------

    def reserve(self, prompt: int, chunks: int, version: int = 0) -> dict[str, Any]:
        keys = self._keys(prompt, chunks)
        self.whole = self.pages.pages_of(keys, self.cache.layout, version)
        self.pending = self.cache.begin_write(keys)
        return {"outcomes": [outcome.name for outcome in self.pending.outcomes]}

    def copy(self, hold: bool = False, chunks: list[int] | None = None) -> dict[str, Any]:
        self.held = hold
        self.pending.put_layers(0, self.cache.layout.layers, self, chunks)
        return {}

    def commit(self, upto: int | None = None) -> dict[str, Any]:
        result = self.pending.commit(upto)
        return {"outcomes": [outcome.name for outcome in result.outcomes], "stored": result.stored}

    def abort(self) -> dict[str, Any]:
        self.pending.abort()
        return {}

    def write(self, prompt: int, chunks: int, version: int = 0) -> dict[str, Any]:
        keys = self._keys(prompt, chunks)
        result = self.cache.write(keys, self.pages.pages_of(keys, self.cache.layout, version))
        return {"outcomes": [outcome.name for outcome in result.outcomes], "stored": result.stored}

    def read(
        self, prompt: int, chunks: int, hold: bool = False, version: int = 0, deadline_s: float = 5.0
    ) -> dict[str, Any]:
        """`wrong`: chunks delivered that are not the pages of their key."""
        keys = self._keys(prompt, chunks)
        self.target, self.held = self.pages.poisoned(self.cache, chunks), hold
        started = time.monotonic()
        result = self.cache.read(keys, self, deadline_s=deadline_s)
        right = self.pages.pages_of(keys, self.cache.layout, version)
        return {
            "chunks": result.chunks,
            "remote": result.remote_chunks,
            "reason": result.reason,
            "wrong": sum(not (self.target[i] == right[i]).all() for i in range(result.chunks)),
            "seconds": time.monotonic() - started,
        }

    def hold_payload(self) -> dict[str, Any]:
        """The next read says so when its payload is under way, and waits for a line."""

        def hold() -> None:
            transport.hold_for_tests(None)
            say(held="payload")
            sys.stdin.readline()

        transports = self.client._transports
        transport: Any = transports._nixl or transports._tcp
        transport.hold_for_tests(before_payload=hold)
        for place in list(self.client._peers):  # a connection over tcp is made with its hook
            self.client.drop_peer(*place)
        return {}

    def storm(self, prompts: int, layout: str) -> dict[str, Any]:
        """Write and read one chunk a prompt; what the writes said, and what was wrong with the reads."""
        self.cache = self.client.bind(self.pages.namespace(layout=self.pages.LAYOUTS[layout]))
        said: dict[str, int] = {}
        wrong = lost = 0
        for prompt in range(prompts):
            (outcome,) = self.write(prompt, 1)["outcomes"]
            said[outcome] = said.get(outcome, 0) + 1
            there = self.match(prompt, 1)["local"]
            answer = self.read(prompt, 1)
            wrong += answer["wrong"]
            lost += there and not answer["chunks"]
        return {"said": said, "wrong": wrong, "lost": lost}

    def match(self, prompt: int, chunks: int) -> dict[str, Any]:
        found = self.cache.match(self._keys(prompt, chunks))
        return {"local": found.local_chunks, "pool": found.pool_chunks}

    def remove(self, prompt: int, chunks: int) -> dict[str, Any]:
        return {"removed": self.cache.remove(self._keys(prompt, chunks))}

    def node(self) -> dict[str, Any]:
        info = self.client.node
        return {"node_id": info.node_id if info else "", "epoch": info.epoch if info else 0}

    def flush(self) -> dict[str, Any]:
        self.client.flush_touches()
        return {}

    def stats(self) -> dict[str, Any]:
        return dict(self.client.stats())

    def fork(self, stay: bool = False) -> dict[str, Any]:
        """A forked child uses the client; its answer comes back. With `stay` it lives on, with all descriptors."""
        read_end, write_end = os.pipe()
        child = os.fork()
        if child:
            os.close(write_end)
            with os.fdopen(read_end) as answer:
                return {"child": child, "error": answer.readline()}
        errors = []
        for step in (lambda: self.read(1, 1), lambda: self.write(9, 1), lambda: self.match(1, 1), self.client.close):
            try:
                step()
                errors.append("nothing")
            except Exception as exc:
                errors.append(type(exc).__name__)
        os.write(write_end, ",".join(errors).encode())
        os.close(write_end)
        os.close(read_end)
        if stay:
            signal.pause()
        os._exit(0)

    def quit(self) -> dict[str, Any]:
        self.client.close()
        return {}


def run_client(**arguments: Any) -> None:
    client = SteppedClient(**arguments)
    say(ready=client.node())
    for message in heard():
        step = message.pop("step")
        try:
            say(**getattr(client, step)(**message))
        except Exception as exc:
            say(error=type(exc).__name__, text=str(exc))


def main(role: str, arguments: dict[str, Any]) -> None:
    patch(arguments.pop("patches", {}))
    if role == "client":
        run_client(**arguments)
        return
    from kvstore import assemble
    from kvstore.config import MetadataSettings, NodeSettings

    if role == "node":
        assemble.run_node(NodeSettings(**arguments["settings"]), lambda facts: say(**facts))
    else:
        settings = MetadataSettings(address=arguments["address"], metrics_address="")
        assemble.run_metadata(settings, lambda facts: say(**facts))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
