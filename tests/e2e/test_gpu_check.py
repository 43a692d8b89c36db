"""`bench/gpu_check.sh`: its steps, their JSON and its exit status; on the CPU, where the benches run small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
STEPS = ["pytest", "gpu_copy", "gpu_ssd"]


def check(out: Path, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OUT": str(out), "PYTHON": python}
    command = [str(ROOT / "bench" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "gpu_check.jsonl").read_text().splitlines()]


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """A python that says what it was asked, in JSON and not, and fails where a file says so."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\necho "{{\\"bench\\": \\"stand_in\\"}}"\necho "asked: $*"\n'
        f'case "$*" in "$(cat {tmp_path}/fails 2>/dev/null)") exit 7 ;; esac\n'
    )
    script.chmod(0o755)
    return str(script)


def test_steps_run_in_order_and_their_json_is_kept_apart(tmp_path: Path, stand_in: str) -> None:
    done = check(tmp_path / "out", stand_in, "--device", "cpu", "--chunks", "5", "--tests", "some/tests")
    assert done.returncode == 0, done.stderr
    kept = lines(tmp_path / "out")
    assert [line["op"] for line in kept if line["bench"] == "gpu_check"] == STEPS
    assert sum(line["bench"] == "stand_in" for line in kept) == len(STEPS)
    assert sum(line.get("limit_s", 0) for line in kept) < 8 * 60
    log = (tmp_path / "out" / "gpu_check.log").read_text()
    assert "asked: -m pytest -m gpu -rs some/tests" in log
    assert "asked: bench/gpu_copy.py --device cpu --chunks 5" in log
    assert "asked: bench/gpu_ssd.py --device cpu --chunks 3" in log


def test_a_step_that_fails_does_not_stop_the_others(tmp_path: Path, stand_in: str) -> None:
    (tmp_path / "fails").write_text("bench/gpu_copy.py --device cpu --chunks 2")
    done = check(tmp_path / "out", stand_in, "--device", "cpu")
    assert done.returncode == 1
    status = {line["op"]: line["exit_status"] for line in lines(tmp_path / "out") if line["bench"] == "gpu_check"}
    assert status == {"pytest": 0, "gpu_copy": 7, "gpu_ssd": 0}


def test_without_the_device_it_ends_at_once(tmp_path: Path, stand_in: str) -> None:
    (tmp_path / "fails").write_text("-c import sys, torch; sys.exit(not torch.cuda.is_available())")
    done = check(tmp_path / "out", stand_in)
    assert done.returncode == 3 and "--device cpu" in done.stderr
    assert lines(tmp_path / "out") == []


@pytest.mark.parametrize("arguments", [("--devise", "cpu"), ("--device",)])
def test_wrong_arguments_are_refused(tmp_path: Path, stand_in: str, arguments: tuple[str, ...]) -> None:
    assert check(tmp_path / "out", stand_in, *arguments).returncode in (1, 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_bench_without_its_device_says_so() -> None:
    command = [sys.executable, ROOT / "bench" / "gpu_copy.py"]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 3 and "no CUDA device" in done.stderr and not done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_the_whole_of_it_on_the_cpu(tmp_path: Path) -> None:
    tests = "tests/unit/engine_adapter/test_pinned.py"
    done = check(tmp_path, sys.executable, "--device", "cpu", "--chunks", "1", "--tests", tests)
    assert done.returncode == 0, (tmp_path / "gpu_check.log").read_text()[-2000:]
    kept = lines(tmp_path)
    measured = {(line["bench"], line["op"]) for line in kept if line["bench"] != "gpu_check"}
    assert measured == {
        *(("gpu_copy", op) for op in ("gather", "scatter", "store", "load", "through_pool")),
        ("gpu_ssd", "load"),
    }
    assert all(line["device"] == "cpu" for line in kept)
