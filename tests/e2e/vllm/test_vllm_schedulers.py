"""Right answers under vLLM's own schedulers, whatever ends when: see `replayed_scheduler`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from engines import model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]
HERE = Path(__file__).resolve().parent
FIRST_SEED, SEEDS = "9", 6


@pytest.mark.parametrize(
    "case",
    [
        "plain async full keep",
        "plain sync full keep",
        "plain layerwise full keep",
        "plain async hybrid keep",
        "overlapping async full keep",
        "overlapping async hybrid keep",
        "plain async full reset",
        "overlapping async full reset",
    ],
)
def test_a13_b10_answers_are_right_and_nothing_is_kept(case: str) -> None:
    scheduler, load, kind, weights = case.split()
    command = [os.environ["KVSTORE_VLLM_PYTHON"], str(HERE / "replayed_scheduler.py")]
    command += [scheduler, load, kind, FIRST_SEED, str(SEEDS), weights, model("llama")]
    variables = {"PYTHONPATH": str(HERE.parents[2]), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **variables})
    assert not ended.returncode, ended.stderr[-4000:]
    counts = json.loads(ended.stdout.splitlines()[-1])
    assert counts["broken"] and counts["preempted"] and counts["overlaps"], "else this shows nothing"
    assert scheduler == "overlapping" or counts["preempted_by_chance"]
    assert counts["resets"] if weights == "reset" else counts["told"]
