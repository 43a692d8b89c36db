"""What the demo does with its cluster: requests, the death of a node, the comparison with cold runs, the verdict."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvstore.analytics.generator import Session, WorkloadShape, sessions
from kvstore.analytics.trace import Request
from kvstore.cli.demo_cluster import Served
from kvstore.model.namespace import Namespace

THINK_TIME_S: Final = 0.1
"""Between an answer and the next turn of its session; users think longer than the index needs to hear of chunks."""

SESSIONS: Final = 4
SESSIONS_AT_A_TIME: Final = 2
TURNS: Final = 3


class Cluster(Protocol):
    """What a job needs of the cluster."""

    namespace: Namespace

    def serve(self, request_id: str, prompt: Sequence[int], max_new_tokens: int) -> Served:
        """Answer a request through the pool."""

    def cold(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Answer a request without it."""

    def kill_prefill_node(self) -> None:
        """SIGKILL to the node of the prefill workers."""

    def restart_prefill_node(self) -> int:
        """The same, and a new start with its SSD; returns how many chunks were found there."""

    def moves(self) -> Counter[str]:
        """Chunks that left a node (`evictions`) or its DRAM only (`demotions`) for want of room."""


@dataclass(slots=True)
class Report:
    """What happened. `on_served` and `on_compared` are told of each request as it ends, from any thread."""

    on_served: Callable[[Served], None]
    on_compared: Callable[[], None]
    served: list[Served] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    cold_ttft_ms: dict[str, float] = field(default_factory=dict)
    later_turns: int = 0
    hits_beyond_prompt: int = 0
    """Later turns that hit all full chunks of the last prompt and answer."""
    survived: bool | None = None
    """The turn after the node's death hit prompt and answer; None where nobody died."""
    recovered_chunks: int = 0
    ssd_hits_after_restart: int | None = None
    """Tokens that the restarted node served from its SSD to the turn after its restart; None where it was not."""
    moves: Counter[str] = field(default_factory=Counter)

    def add(self, one: Served) -> None:
        """A request was answered."""
        self.served.append(one)
        self.on_served(one)

    @property
    def hit_tokens(self) -> tuple[int, int]:
        """(local, remote), of prefill and decode workers together."""
        answers = [answer for one in self.served for answer in (one.prefill, one.decode)]
        return sum(a["hit_tokens_local"] for a in answers), sum(a["hit_tokens_remote"] for a in answers)

    @property
    def ssd_hit_tokens(self) -> int:
        """Those of them that a node had on its SSD only."""
        return sum(answer["hit_tokens_ssd"] for one in self.served for answer in (one.prefill, one.decode))

    @property
    def bytes_by_path(self) -> Counter[str]:
        """Payload bytes that were read, by path."""
        total: Counter[str] = Counter()
        for one in self.served:
            total.update(one.prefill["bytes_by_path"])
            total.update(one.decode["bytes_by_path"])
        return total

    def missing_outcomes(self) -> list[str]:
        """Required outcomes that did not occur, in words."""
        local, remote = self.hit_tokens
        occurred = {
            "outputs identical to a cold run": not self.different and len(self.cold_ttft_ms) == len(self.served) > 0,
            "local hits": local > 0,
            "remote hits": remote > 0,
            "bytes moved by tcp": self.bytes_by_path["tcp"] > 0,
            "SSD hits": self.later_turns == 0 or self.ssd_hit_tokens > 0,
            "evictions": self.moves["evictions"] > 0,
            "hits of later turns beyond the prompt": self.later_turns == 0 or self.hits_beyond_prompt > 0,
            "SSD hits of a node that was killed and started again": self.ssd_hits_after_restart != 0,
            "hits of prompt and answer after the death of the prefill's node": self.survived is not False,
        }
        return [name for name, happened in occurred.items() if not happened]

    def figures(self) -> dict[str, Any]:
        """The result as one flat JSON object; times are medians in milliseconds."""
        local, remote = self.hit_tokens
        warm = [one for one in self.served if one.hit_tokens]
        return {
            "requests": len(self.served),
            "prompt_tokens": sum(len(one.prompt) for one in self.served),
            "computed_prompt_tokens": sum(one.prefill["computed_tokens"] for one in self.served),
            "hit_tokens_local": local,
            "hit_tokens_remote": remote,
            "hit_tokens_ssd": self.ssd_hit_tokens,
            "bytes_by_shm": self.bytes_by_path["shm"],
            "bytes_by_tcp": self.bytes_by_path["tcp"],
            "ttft_cold_ms": _median([self.cold_ttft_ms[one.request_id] for one in warm]),
            "ttft_warm_ms": _median([one.prefill["ttft_ms"] for one in warm]),
            "later_turns": self.later_turns,
            "hits_beyond_prompt": self.hits_beyond_prompt,
            "recovered_chunks": self.recovered_chunks,
            "ssd_hits_after_restart": self.ssd_hits_after_restart,
            "hits_after_node_death": self.survived,
            "evictions": self.moves["evictions"],
            "demotions": self.moves["demotions"],
            "identical": len(self.served) - len(self.different),
            "different_requests": self.different,
            "missing_outcomes": self.missing_outcomes(),
        }


def generated_shape(namespace: Namespace, vocabulary: int, seed: int) -> tuple[WorkloadShape, int]:
    """(workload, answer length in tokens) of the built-in generator: answers are longer than a chunk."""
    chunk_tokens = namespace.layout.chunk_tokens
    shape = WorkloadShape(
        sessions=SESSIONS,
        turns=TURNS,
        system_tokens=8 * chunk_tokens,
        user_tokens=chunk_tokens + chunk_tokens // 4,
        vocabulary=vocabulary,
        seed=seed,
    )
    return shape, chunk_tokens + chunk_tokens // 8


def generated_requests() -> int:
    """Requests of the generated job: all sessions, the one with a node's restart, the one that outlives a node."""
    return SESSIONS * TURNS + 4


def run_generated(
    cluster: Cluster, report: Report, *, vocabulary: int, seed: int, think_time_s: float = THINK_TIME_S
) -> None:
    """All sessions, a few at a time; in the middle the prefill node is killed and started again between two turns of
    one more session; in the end it is killed for good between two turns of another.

    After the restart the prefill workers hit what their node finds on its SSD; after its death, what lies on the
    decode's node.
    """
    shape, answer_tokens = generated_shape(cluster.namespace, vocabulary, seed)
    everybody = sessions(shape)
    for first in range(0, SESSIONS, SESSIONS_AT_A_TIME):
        if first == SESSIONS // 2:
            _restart_between_turns(cluster, report, Session(shape, SESSIONS), answer_tokens)
        group = everybody[first : first + SESSIONS_AT_A_TIME]
        _run_together(cluster, report, group, answer_tokens, think_time_s)
    survivor = Session(shape, SESSIONS + 1)
    before = _run_turn(cluster, report, survivor, answer_tokens, None)
    time.sleep(think_time_s)
    cluster.kill_prefill_node()
    after = _run_turn(cluster, report, survivor, answer_tokens, before)
    report.survived = _hits_all(cluster, before, after)
    report.moves = cluster.moves()


def _restart_between_turns(cluster: Cluster, report: Report, session: Session, answer_tokens: int) -> None:
    before = _run_turn(cluster, report, session, answer_tokens, None)
    report.recovered_chunks = cluster.restart_prefill_node()
    after = _run_turn(cluster, report, session, answer_tokens, before)
    report.ssd_hits_after_restart = int(after.prefill["hit_tokens_ssd"])


def run_trace(cluster: Cluster, report: Report, requests: Sequence[Request], *, vocabulary: int) -> None:
    """The requests of a trace, one after the other."""
    for number, request in enumerate(requests):
        prompt = request.tokens(vocabulary).tolist()
        report.add(cluster.serve(f"trace-{number}", prompt, max(1, request.output_length)))
    report.moves = cluster.moves()


def compare_with_cold(cluster: Cluster, report: Report) -> None:
    """Run every request again without the pool and note which differ."""
    for one in report.served:
        cold = cluster.cold(one.prompt, len(one.answer))
        report.cold_ttft_ms[one.request_id] = cold["ttft_ms"]
        if not one.agrees_with(cold):
            report.different.append(one.request_id)
        report.on_compared()


def _run_together(
    cluster: Cluster, report: Report, group: Sequence[Session], answer_tokens: int, think_time_s: float
) -> None:
    """Run sessions side by side; what ends one (an error, Ctrl-C) ends the others after their present turn."""
    stopping = threading.Event()
    with ThreadPoolExecutor(len(group)) as pool:

        def run(session: Session) -> None:
            last: Served | None = None
            while not session.ended and not stopping.is_set():
                last = _run_turn(cluster, report, session, answer_tokens, last)
                stopping.wait(think_time_s)

        try:
            for end in as_completed([pool.submit(run, session) for session in group]):
                end.result()
        finally:
            stopping.set()


def _run_turn(cluster: Cluster, report: Report, session: Session, answer_tokens: int, last: Served | None) -> Served:
    prompt = session.next_prompt(last.answer if last is not None else ())
    one = cluster.serve(f"session-{session.number}-turn-{session.turn}", prompt, answer_tokens)
    report.add(one)
    if last is not None:
        report.later_turns += 1
        report.hits_beyond_prompt += _hits_all(cluster, last, one)
    return one


def _hits_all(cluster: Cluster, last: Served, one: Served) -> bool:
    """True if the turn hit every full chunk of the last prompt and answer, and with that more than the prompt.

    The last token of an answer has no KV yet: nobody computed behind it.
    """
    chunk_tokens = cluster.namespace.layout.chunk_tokens
    stored = (len(last.prompt) + len(last.answer) - 1) // chunk_tokens * chunk_tokens
    return one.hit_tokens >= stored > len(last.prompt)


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
