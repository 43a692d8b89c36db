"""The engine's own event stream tells what came into the pool, and what went."""

from __future__ import annotations

import threading
import time

import pytest
from engines import Workplace, connector, covered, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_what_was_stored_is_told_and_what_went_as_well(workplace: Workplace) -> None:
    node = workplace.node()
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    engine = workplace.engine(kv_transfer_config=connector(node, save_decode=False), kv_events_config=events)
    engine.generate([prompt(0), prompt(1, 300, prefix=prompt(0)[:128])])
    told: dict[str, list[str]] = {"BlockStored": [], "BlockRemoved": []}
    end, pause = time.monotonic() + 90.0, threading.Event()
    blocks = 2 * covered(300) // 32 - 128 // 32  # what both begin with is told once
    restarted = False
    while len(told["BlockRemoved"]) < blocks:
        for name, hashes in engine.take_events():
            told[name] += hashes
        if len(told["BlockStored"]) == blocks and not restarted:
            assert not told["BlockRemoved"]
            node.kill()
            node.restart()
            restarted = True
        assert time.monotonic() < end, {name: len(hashes) for name, hashes in told.items()}
        engine.generate([[3, 4, 5]], max_tokens=1)
        pause.wait(0.2)
    assert sorted(told["BlockRemoved"]) == sorted(told["BlockStored"]) == sorted(set(told["BlockStored"]))
