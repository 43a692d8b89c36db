"""The demo's verdict, on a cluster that makes its answers up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.analytics.trace import Request
from kvstore.cli.demo_cluster import Served
from kvstore.cli.demo_job import (
    SESSIONS,
    TURNS,
    Report,
    compare_with_cold,
    generated_requests,
    run_generated,
    run_trace,
)
from kvstore.errors import KvStoreError
from kvstore.model.layout import Dtype, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.scheduler.client import Pick

TICKET = Ticket(b"i" * 16, b"n" * 16, b"f" * 16, b"l" * 16, 3, 5, (TicketRank("a", 7, Rectangle(0, 2, 1, 3)),))
PICK = Pick("prefill-1", "decode-1", 0, 0, "longest_prefix", (), TICKET)


class FakeCluster:
    """Answers follow from the prompt's length; a prompt's hits are what the longest known history covers."""

    def __init__(
        self,
        *,
        forgets_on_death: bool = False,
        wrong_cold: bool = False,
        evicts: int = 3,
        forgets_on_restart: bool = False,
        ssd_hits: int = 2,
    ) -> None:
        layout = PageLayout(layers=1, kv_heads=1, head_dim=1, dtype=Dtype.FP32, page_tokens=4, pages_per_chunk=1)
        self.namespace = Namespace("m", "r", layout)
        self.killed = False
        self._forgets_on_death = forgets_on_death
        self._wrong_cold = wrong_cold
        self._evicts = evicts
        self._forgets_on_restart = forgets_on_restart
        self._ssd_hits = ssd_hits
        self.restarts = 0
        self._stored: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()

    def serve(self, request_id: str, prompt: Sequence[int], max_new_tokens: int) -> Served:
        answer = [len(prompt) % 7] * max_new_tokens
        with self._lock:
            run = 0
            while run + 4 < len(prompt) and tuple(prompt[: run + 4]) in self._stored:
                run += 4
            stored = [*prompt, *answer][:-1]
            self._stored |= {tuple(stored[:end]) for end in range(4, len(stored) + 1, 4)}
        prefill = {
            "hit_tokens_local": 0,
            "hit_tokens_remote": run,
            "hit_tokens_ssd": 0 if self._forgets_on_restart and self.restarts else self._ssd_hits,
            "computed_tokens": len(prompt) - run,
            "bytes_by_path": {"tcp": run},
            "ttft_ms": 1.0,
            "digest": "first",
        }
        decode = {
            "hit_tokens_local": len(prompt),
            "hit_tokens_remote": 0,
            "hit_tokens_ssd": 0,
            "bytes_by_path": {"shm": 9},
            "first_digest": "first",
            "digest": "last",
        }
        return Served(request_id, tuple(prompt), tuple(answer), PICK, prefill, decode)

    def cold(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        tokens = [len(prompt) % 7] * max_new_tokens
        last = "other" if self._wrong_cold else "last"
        return {"tokens": tokens, "first_digest": "first", "digest": last, "ttft_ms": 2.0}

    def kill_prefill_node(self) -> None:
        self.killed = True
        if self._forgets_on_death:
            self._stored.clear()

    def restart_prefill_node(self) -> int:
        self.restarts += 1
        return 11

    def moves(self) -> Counter[str]:
        return Counter(evictions=self._evicts, demotions=5)


def new_report() -> Report:
    return Report(lambda one: None, lambda: None)


def run(cluster: FakeCluster) -> Report:
    report = new_report()
    run_generated(cluster, report, vocabulary=50, seed=1, think_time_s=0.0)
    compare_with_cold(cluster, report)
    return report


def test_a_good_run_misses_nothing() -> None:
    cluster = FakeCluster()
    report = run(cluster)
    assert cluster.killed and cluster.restarts == 1
    assert report.missing_outcomes() == []
    figures = report.figures()
    assert figures["requests"] == figures["identical"] == generated_requests() == SESSIONS * TURNS + 4
    assert figures["later_turns"] == figures["hits_beyond_prompt"] == SESSIONS * (TURNS - 1) + 2
    assert figures["hits_after_node_death"] is True
    assert (figures["recovered_chunks"], figures["ssd_hits_after_restart"]) == (11, 2)
    assert figures["hit_tokens_ssd"] == 2 * figures["requests"]
    assert (figures["evictions"], figures["demotions"]) == (3, 5)
    assert (figures["ttft_cold_ms"], figures["ttft_warm_ms"]) == (2.0, 1.0)
    assert figures["bytes_by_tcp"] == figures["hit_tokens_remote"] > 0


def test_what_did_not_occur_is_named() -> None:
    assert run(FakeCluster(evicts=0)).missing_outcomes() == ["evictions"]
    assert run(FakeCluster(forgets_on_death=True)).missing_outcomes() == [
        "hits of prompt and answer after the death of the prefill's node"
    ]
    restarted = "SSD hits of a node that was killed and started again"
    assert run(FakeCluster(forgets_on_restart=True)).missing_outcomes() == [restarted]
    assert run(FakeCluster(ssd_hits=0)).missing_outcomes() == ["SSD hits", restarted]
    different = run(FakeCluster(wrong_cold=True))
    assert different.missing_outcomes() == ["outputs identical to a cold run"]
    assert len(different.different) == generated_requests()


def test_a_job_that_was_not_compared_is_no_success() -> None:
    report = new_report()
    assert "outputs identical to a cold run" in report.missing_outcomes()
    run_generated(FakeCluster(), report, vocabulary=50, seed=1, think_time_s=0.0)
    assert report.missing_outcomes() == ["outputs identical to a cold run"]


def test_a_trace_has_no_later_turns_to_judge() -> None:
    cluster, report = FakeCluster(), new_report()
    run_trace(cluster, report, [Request(0, 8, 2, (1, 2), 4), Request(0, 9, 0, (1, 2, 3), 4)], vocabulary=50)
    compare_with_cold(cluster, report)
    assert report.missing_outcomes() == []
    assert [len(one.answer) for one in report.served] == [2, 1], "at least one token is decoded"
    assert report.figures()["hits_after_node_death"] is None


def test_an_engine_that_fails_ends_the_job() -> None:
    class Failing(FakeCluster):
        def serve(self, request_id: str, prompt: Sequence[int], max_new_tokens: int) -> Served:
            if request_id.endswith("turn-2"):
                raise KvStoreError("prefill-1 ended")
            return super().serve(request_id, prompt, max_new_tokens)

    with pytest.raises(KvStoreError, match="prefill-1 ended"):
        run(Failing())


def test_tickets_travel_as_the_engines_read_them() -> None:

    assert Ticket.from_json(TICKET.to_json()) == TICKET
