"""One vLLM engine without a server, driven in JSON lines; run by the side environment's Python.

`engine_process.py ARGUMENTS`: a JSON object of arguments of `vllm.LLM`. The first line on stdout announces the engine,
then each line on stdin is a step (`{"step": NAME, ...}`) and gets one line. Prompts are token ids and the answers are
greedy. `generate` can hold still after some engine steps, with `{"held": true}`, until a line comes: so that a test can
do something to the pool in the middle. Everything that vLLM prints goes to stderr.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

FORGET_DEADLINE_S = 60.0
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "disable_log_stats": False,
    "seed": 0,
}


class SteppedEngine:
    """The engine, and the counters as the last step left them."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**{**DEFAULTS, **arguments})
        self._engine: Any = self._llm.llm_engine
        self._requests = 0
        self._events: list[list[Any]] = []
        if self._llm.llm_engine.vllm_config.kv_events_config is not None:
            self._engine.engine_core.engine_core.scheduler.kv_event_publisher.publish = self._publish
        self._counters = self._read_counters()

    def _read_counters(self) -> dict[str, float]:
        """All counters and gauges of engine and connector, `NAME` or `NAME:REASON`, summed over other labels."""
        counters: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                name = ":".join([metric.name, *(text for label, text in metric.labels.items() if label == "reason")])
                counters[name] = counters.get(name, 0) + metric.value
        return counters

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 12,
        salts: Sequence[str | None] | None = None,
        adapters: Sequence[list[Any] | None] | None = None,
        hold_after: int | None = None,
        abort_after: int | None = None,
    ) -> dict[str, Any]:
        """Answer the prompts together. `adapters`: name, number and folder of a LoRA adapter a prompt.

        `hold_after`: hold still after that many engine steps. `abort_after`: abort the first request then. Counters are
        the difference to the step before.
        """
        started = time.monotonic()
        numbers = []
        for index, tokens in enumerate(prompts):
            salt = salts[index] if salts else None
            numbers.append(self._add(tokens, max_tokens, salt, adapters[index] if adapters else None))
        outputs: dict[str, Any] = {}
        steps = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                outputs[output.request_id] = output
            steps += 1
            if steps == abort_after:
                self._engine.abort_request(numbers[:1])
            if steps == hold_after:
                say(held=True)
                sys.stdin.readline()
        before, self._counters = self._counters, self._read_counters()
        changes = {name: value - before.get(name, 0) for name, value in self._counters.items()}
        return {
            "answers": [answer_of(outputs[number]) for number in numbers if number in outputs],
            "counters": {name: value for name, value in changes.items() if value},
            "steps": steps,
            "seconds": time.monotonic() - started,
        }

    def _add(self, tokens: Sequence[int], max_tokens: int, salt: str | None, adapter: list[Any] | None) -> str:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        prompt: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt is not None:
            prompt["cache_salt"] = salt
        self._requests += 1
        number = str(self._requests)
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(number, prompt, parameters, lora_request=LoRARequest(*adapter) if adapter else None)
        return number

    def forget(self, *, offloaded: bool = False) -> dict[str, Any]:
        """Drop the engine's own prefix cache, and what it has offloaded; the pool keeps what it has.

        Blocks that are still being stored cannot be dropped, and only a step tells the engine that they are not any
        more: a short request makes one.
        """
        end, pause = time.monotonic() + FORGET_DEADLINE_S, threading.Event()
        while not (forgotten := self._llm.reset_prefix_cache(reset_connector=offloaded)) and time.monotonic() < end:
            pause.wait(0.05)
            self.generate([[3, 4, 5]], max_tokens=1)
        return {"forgotten": forgotten}

    def page_digests(self) -> dict[str, Any]:
        """A digest of each block that holds anything but zeros, over all layers; ranks one after the other."""
        return {"digests": [digest for rank in self._llm.collective_rpc(block_digests) for digest in rank]}

    def take_events(self) -> dict[str, Any]:
        """KV cache events with the medium CPU since the last call: name and block hashes, in order."""
        events, self._events = self._events, []
        return {"events": events}

    def _publish(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", None) == "CPU":
                self._events.append([type(event).__name__, [str(each) for each in event.block_hashes]])

    def quit(self) -> dict[str, Any]:
        """Shut down in order, so that the connector ends its saves."""
        self._engine.engine_core.shutdown()
        return {"ended": True}


def answer_of(output: Any) -> dict[str, Any]:
    """What the tests compare of a request's output."""
    first = output.outputs[0]
    return {
        "ids": list(first.token_ids),
        "cached_tokens": output.num_cached_tokens,
        "finish": first.finish_reason,
        "transfer": output.kv_transfer_params,
    }


def block_digests(worker: Any) -> list[str]:
    """The blocks of one rank's KV cache; runs in the worker."""
    import torch

    layers = [layer.view(torch.uint8).numpy() for layer in worker.model_runner.kv_caches]
    blocks = ([layer[block].tobytes() for layer in layers] for block in range(len(layers[0])))
    return [hashlib.blake2b(b"".join(parts)).hexdigest() for parts in blocks if any(any(part) for part in parts)]


def say(**message: Any) -> None:
    """One line to the test."""
    _to_test.write(json.dumps(message) + "\n")
    _to_test.flush()


def exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """End in order, so that neither workers nor their shared memory stay."""
    raise SystemExit(128 + number)


def main() -> None:
    """Start, announce, and do the steps."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    started = time.monotonic()
    engine = SteppedEngine(json.loads(sys.argv[1]))
    say(pid=os.getpid(), start_seconds=time.monotonic() - started)
    try:
        for line in sys.stdin:
            message = json.loads(line)
            step = message.pop("step")
            say(**getattr(engine, step)(**message))
            if step == "quit":
                return
    except SystemExit:
        engine.quit()
        raise


if __name__ == "__main__":
    _to_test = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
