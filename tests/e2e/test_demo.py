"""`kvstore demo`: the main job by real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the demo's engines need torch")

SCRIPT = Path(sys.executable).parent / "kvstore"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SCRIPT.is_file(), reason="the package is not installed")]


def run(*options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = subprocess.run([SCRIPT, "demo", "--json", *options], capture_output=True, text=True, timeout=180)
    return done, json.loads(done.stdout) if done.stdout else {}


def test_the_main_job_with_the_built_in_conversation() -> None:
    done, figures = run()
    assert done.returncode == 0, done.stderr
    assert figures["missing_outcomes"] == []
    assert figures["identical"] == figures["requests"] == 16
    for name in ("hit_tokens_local", "hit_tokens_remote", "hit_tokens_ssd", "bytes_by_tcp", "hits_beyond_prompt"):
        assert figures[name] > 0, name
    assert figures["evictions"] > 0 and figures["demotions"] > 0
    assert figures["ssd_hits_after_restart"] > 0 and figures["recovered_chunks"] > 0
    assert figures["hits_after_node_death"] is True
    assert {pick["prefill_worker_id"] for pick in figures["picks"]} == {"prefill-1", "prefill-2"}
    assert any(pick["local_run"] > 0 for pick in figures["picks"])


@pytest.mark.traces
def test_the_main_job_with_the_first_requests_of_a_trace(traces_folder: Path) -> None:
    done, figures = run("--trace", str(traces_folder / "conversation_trace.jsonl"), "--requests", "6")
    assert done.returncode == 0, done.stderr
    assert figures["identical"] == figures["requests"] == 6
    for name in ("hit_tokens_local", "hit_tokens_remote", "bytes_by_tcp", "evictions"):
        assert figures[name] > 0, name


@pytest.mark.traces
def test_an_outcome_that_does_not_occur_fails_and_is_named(traces_folder: Path) -> None:
    done, _ = run("--trace", str(traces_folder / "conversation_trace.jsonl"), "--requests", "2", "--dram", "64MiB")
    assert done.returncode == 1
    assert "error: did not occur: evictions" in done.stderr


def test_ctrl_c_ends_all_children() -> None:
    demo = subprocess.Popen([SCRIPT, "demo"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert demo.stderr is not None
    for line in demo.stderr:
        if "session-" in line:
            break
    children = children_of(demo.pid)
    assert len(children) >= 8
    descriptors = [os.pidfd_open(pid) for pid in children]
    demo.send_signal(signal.SIGINT)
    demo.stderr.close()
    assert demo.wait(30) == 130
    for descriptor in descriptors:
        # Ended children were reaped by the demo, so their pidfds refuse signals.
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, 0)
        os.close(descriptor)


def children_of(pid: int) -> list[int]:
    """Direct children, from the kernel's list for each thread."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        found.extend(int(child) for child in listing.read_text().split())
    return found
