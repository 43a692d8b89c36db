"""The processes of the demo, and the way of one request through them.

    node-a:  prefill-1, prefill-2        node-b:  decode-1        beside them: metadata service, scheduler, cold

`cold` is an engine without a pool: what it answers, the others must answer bit for bit.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from kvstore.analytics.processes import Child, Children
from kvstore.errors import ConfigurationError, KvStoreError
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain
from kvstore.scheduler.client import Pick, SchedulerClient

COMMAND_DEADLINE_S: Final = 120.0
"""Longest command of an engine: a whole prompt, computed cold on a busy machine."""

PICK_DEADLINE_S: Final = 5.0
SAVE_DEADLINE_S: Final = 10.0
"""Longest wait for a node to have written to its SSD what waits for it."""

PREFILL_NODE: Final = "node-a"
DECODE_NODE: Final = "node-b"
_ENGINES: Final = {
    "prefill-1": ("prefill", PREFILL_NODE),
    "prefill-2": ("prefill", PREFILL_NODE),
    "decode-1": ("decode", DECODE_NODE),
}


@dataclass(frozen=True, slots=True)
class Served:
    """One request that went through the pool. `prefill` and `decode` are the engines' own answers."""

    request_id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    pick: Pick
    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that the prefill worker did not have to compute."""
        return int(self.prefill["hit_tokens_local"] + self.prefill["hit_tokens_remote"])

    def agrees_with(self, cold: Mapping[str, Any]) -> bool:
        """True if tokens and logits (first and last, bit for bit) are those of an engine without a pool."""
        first, last = self.prefill["digest"], self.decode["digest"]
        said = list(self.answer), first, self.decode["first_digest"], last
        return said == (cold["tokens"], cold["first_digest"], cold["first_digest"], cold["digest"])


class Engine:
    """A worker process. One command at a time; callers on several threads queue."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._lock = threading.Lock()

    @property
    def announcement(self) -> Mapping[str, Any]:
        """What it said when it was ready."""
        return self._child.announcement

    def command(self, name: str, **fields: Any) -> dict[str, Any]:
        """Run one command; raises KvStoreError if the engine refuses it, Unreachable if it ended."""
        with self._lock:
            answer = self._child.call({"cmd": name, **fields}, COMMAND_DEADLINE_S)
        if "error" in answer:
            raise KvStoreError(f"{self._child.name}: {answer['error']}")
        return answer


class DemoCluster:
    """Metadata service, scheduler, two nodes of `dram` and `ssd` each, three engines and a cold one. A context manager.

    The SSDs are files in the scratch folder.
    """

    def __init__(self, dram: str, ssd: str) -> None:
        self._dram = dram
        self._ssd = ssd
        self._metadata = ""
        self._stack = ExitStack()
        self._nodes: dict[str, Child] = {}
        self._moves_of_the_dead: Counter[str] = Counter()

    def __enter__(self) -> DemoCluster:
        if importlib.util.find_spec("torch") is None:
            raise ConfigurationError("the demo's engines need torch: pip install 'kvstore[torch]'")
        with ExitStack() as stack:
            self._children = stack.enter_context(Children())
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        children = self._children
        # Engines take longest to start (they import torch), so the cold one, which needs nobody, starts first.
        cold = self._start_engine("cold", "prefill")
        self._metadata = metadata = children.start_metadata().announcement["control_address"]
        router = children.start_console(
            "router", ["router", "--address", "127.0.0.1:0", "--metadata-address", metadata]
        ).announcement["control_address"]
        for name in (PREFILL_NODE, DECODE_NODE):
            self._nodes[name] = children.start_node(name, metadata, *self._node_options(name))
        started = {"cold": cold}
        for name, (role, node) in _ENGINES.items():
            address = self._nodes[node].announcement["control_address"]
            options = ["--node", address, "--metadata", metadata, "--scheduler", router, "--host-id", node]
            started[name] = self._start_engine(name, role, *options)
        self._engines = {name: Engine(children.announced(child)) for name, child in started.items()}
        self._scheduler = stack.enter_context(SchedulerClient(router))
        self.namespace = Namespace.from_canonical(self._engines["cold"].announcement["namespace"].encode())
        self._chain = KeyChain(self.namespace)

    def _node_options(self, name: str) -> list[str]:
        return ["--dram", self._dram, "--ssd", f"{self._children.folder / name}.kvssd:{self._ssd}"]

    def _start_engine(self, name: str, role: str, *options: str) -> Child:
        command = [sys.executable, "-m", "engine_adapter.reference", "--role", role, "--worker-id", name, *options]
        return self._children.start(name, command)

    def serve(self, request_id: str, prompt: Sequence[int], max_new_tokens: int) -> Served:
        """Pick, prefill, hand over by ticket, decode. Thread-safe."""
        pick = self._scheduler.pick(request_id, self._chain.keys(prompt), len(prompt), deadline_s=PICK_DEADLINE_S)
        request = {"request_id": request_id, "tokens": list(prompt), "ticket": pick.ticket.to_json()}
        prefill = self._engines[pick.prefill_worker_id].command("prefill", **request)
        decode = self._engines[pick.decode_worker_id].command("decode", **request, max_new_tokens=max_new_tokens)
        return Served(request_id, tuple(prompt), tuple(decode["tokens"]), pick, prefill, decode)

    def cold(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """The same request on the engine without a pool."""
        return self._engines["cold"].command("cold", tokens=list(prompt), max_new_tokens=max_new_tokens)

    def kill_prefill_node(self) -> None:
        """SIGKILL to the node of the prefill workers, supervisor and all, so that its DRAM is lost. They live on."""
        node = self._nodes.pop(PREFILL_NODE)
        self._moves_of_the_dead.update(self._moves_of(node))
        node.kill()

    def restart_prefill_node(self) -> int:
        """The same once its SSD has what it is to have; then it is started again with that file, where it was.

        Returns how many chunks it found there.
        """
        dead = self._nodes[PREFILL_NODE]
        ends_at_s = time.monotonic() + SAVE_DEADLINE_S
        while self._children.node_statistics(dead)["cleaner_waiting_chunks"] and time.monotonic() < ends_at_s:
            continue
        self.kill_prefill_node()
        again = self._children.restart_node(dead, self._metadata, *self._node_options(PREFILL_NODE))
        self._nodes[PREFILL_NODE] = again
        return int(self._children.node_statistics(again)["recovered_ssd_chunks"])

    def moves(self) -> Counter[str]:
        """What the nodes did for want of room so far: `evictions` (chunks that left a node), `demotions` (those that
        left its DRAM and stayed on its SSD)."""
        total = Counter(self._moves_of_the_dead)
        for node in self._nodes.values():
            total.update(self._moves_of(node))
        return total

    def _moves_of(self, node: Child) -> dict[str, int]:
        figures = self._children.node_statistics(node)
        return {name: int(figures.get(name, 0)) for name in ("evictions", "demotions")}
