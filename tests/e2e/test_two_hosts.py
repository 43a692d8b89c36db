"""The README's commands for two hosts, as they stand there, on two hosts that share no socket, folder or network."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lone_hosts import Host, two_hosts

from kvstore.analytics.processes import Child

pytest.importorskip("torch", reason="the reference engine needs torch")

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = Path(sys.executable).parent / "kvstore"
CHUNK_TOKENS = 64
DEADLINE_S = 60.0
CHUNK_BYTES = 128 << 10
PROMPT_BYTES = 4 * CHUNK_BYTES
"""Of the README's prompt: three full chunks and a shorter one, which takes as much room."""
CALLS_BYTES = 128 << 10
"""What calls and heartbeats may take on the link meanwhile."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.netns,
    pytest.mark.skipif(not SCRIPT.is_file(), reason="the package is not installed"),
]


def readme_commands() -> dict[str, str]:
    """Commands of the section by what they start: `metadata`, `router`, `node A`, `prefill A`, …."""
    section = (ROOT / "README.md").read_text().split("\n## Two hosts\n", 1)[1].split("\n## ", 1)[0]
    found = {}
    for place, command in re.findall(r"```bash\n# (host A|host B|any host)\b[^\n]*\n(.*?)```", section, re.DOTALL):
        host = place.removeprefix("host ")
        what = re.search(r"kvstore (\w+)|\"cmd\\\": \\\"(\w+)\\\"", command)
        assert what is not None, command
        found[f"{what[1] or what[2]} {host}"] = command.strip()
    return found


COMMANDS = readme_commands()


def test_the_readme_has_every_part() -> None:
    servers = {"metadata A", "router A", "node A", "node B", "status any host"}
    assert set(COMMANDS) == servers | {"prefill A", "decode B", "cold any host"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """Both hosts with the README's servers; two nodes are live."""
    with two_hosts(tmp_path_factory.mktemp("hosts")) as (a, b):
        for name, host in (("metadata", a), ("router", a), ("node", a), ("node", b)):
            host.start(name, COMMANDS[f"{name} {host.name[-1].upper()}"])
        wait_for_nodes(b, 2)
        yield a, b


def nodes_of(host: Host) -> list[dict[str, Any]]:
    """What the README's status command says on this host; nobody, while the service does not answer."""
    answer = json.loads(host.run(f"{COMMANDS['status any host']} --json || echo '{{\"nodes\": []}}'"))
    return [node for node in answer["nodes"] if node["state"] == "live"]


def wait_for_nodes(host: Host, count: int) -> None:
    ends_at_s = time.monotonic() + DEADLINE_S
    while len(nodes_of(host)) < count:
        assert time.monotonic() < ends_at_s, f"there are not {count} live nodes after {DEADLINE_S:g} s"


def answer_of(host: Host, command: str) -> dict[str, Any]:
    """The last line that a worker of the README prints: its answer."""
    answer: dict[str, Any] = json.loads(host.run(command).splitlines()[-1])
    assert "error" not in answer, answer
    return answer


def test_the_hosts_share_nothing(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    of_a, of_b = sorted(nodes_of(a), key=lambda node: str(node["control_address"]))
    assert of_a["host_id"] != of_b["host_id"]
    for mine, its, other in ((of_a, a, b), (of_b, b, a)):
        path = mine["socket_path"]
        its.run(f"test -S {path}")
        other.run(f"test ! -e {path}")


def test_a_prompt_by_copy_and_paste(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    before = b.received_bytes()
    prefill = answer_of(a, COMMANDS["prefill A"])
    decode = answer_of(b, COMMANDS["decode B"])
    received = b.received_bytes() - before
    cold = answer_of(b, COMMANDS["cold any host"])
    assert (prefill["computed_tokens"], prefill["visible_chunks"]) == (200, 4)
    assert (decode["hit_tokens_local"], decode["hit_tokens_remote"], decode["computed_tokens"]) == (0, 199, 1)
    assert set(decode["bytes_by_path"]) == {"tcp"}
    assert received >= decode["bytes_by_path"]["tcp"] >= PROMPT_BYTES, "not all that was read came over the link"
    for name in ("tokens", "first_digest", "digest"):
        assert decode[name] == cold[name], name
    assert len(cold["tokens"]) == 70


class Pool:
    """The main job on both hosts: workers that stay, a gateway on A, an engine without a pool on B."""

    def __init__(self, a: Host, b: Host) -> None:
        self.prefill = a.start("prefill", worker("prefill A"))
        self.decode = b.start("decode", worker("decode B"))
        self._cold = b.start("cold", worker("cold any host"))
        ready = [child.receive(DEADLINE_S) for child in (self.prefill, self.decode, self._cold)]
        path = Path(__file__).with_name("gateway.py")
        self._gateway = a.start("gateway", f"python {path} \"$HOST_A:7400\" '{ready[0]['namespace']}'")

    def pick(self, request_id: str, tokens: Sequence[int]) -> dict[str, Any]:
        return self._gateway.call({"request_id": request_id, "tokens": list(tokens)}, DEADLINE_S)

    def pick_with(self, request_id: str, tokens: Sequence[int], pool_run: int) -> dict[str, Any]:
        """The pick as soon as the index knows so many leading chunks."""
        ends_at_s, pause = time.monotonic() + DEADLINE_S, threading.Event()
        while (pick := self.pick(request_id, tokens))["pool_run"] < pool_run:
            assert time.monotonic() < ends_at_s, f"the index does not hear of {pool_run} chunks: {pick}"
            pause.wait(0.02)
        return pick

    def turn(self, request_id: str, tokens: Sequence[int], pick: Mapping[str, Any]) -> tuple[Any, Any]:
        """Answers of the prefill and the decode worker, which are those of an engine without a pool."""
        assert (pick["prefill"], pick["decode"]) == ("prefill-1", "decode-1")
        request = {"request_id": request_id, "tokens": list(tokens), "ticket": pick["ticket"]}
        prefill = call(self.prefill, cmd="prefill", **request)
        decode = call(self.decode, cmd="decode", max_new_tokens=CHUNK_TOKENS + 8, **request)
        cold = call(self._cold, cmd="cold", tokens=list(tokens), max_new_tokens=CHUNK_TOKENS + 8)
        assert decode["tokens"] == cold["tokens"]
        assert (prefill["digest"], decode["first_digest"]) == (cold["first_digest"], cold["first_digest"])
        assert decode["digest"] == cold["digest"]
        return prefill, decode


@pytest.fixture(scope="module")
def pool(hosts: tuple[Host, Host]) -> Pool:
    return Pool(*hosts)


def worker(name: str) -> str:
    """The README's worker without the line that is piped into it."""
    return COMMANDS[name].split("|\n", 1)[1].strip()


def call(child: Child, **command: Any) -> dict[str, Any]:
    answer = child.call(command, DEADLINE_S)
    assert "error" not in answer, answer
    return answer


def test_the_main_job_over_the_link(hosts: tuple[Host, Host], pool: Pool) -> None:
    """Prefill on A, decode on B by ticket, and a second turn on A that hits prompt and answer."""
    (a, b), rng = hosts, random.Random(3)
    prompt = [rng.randrange(512) for _ in range(5 * CHUNK_TOKENS + 17)]

    before = b.received_bytes()
    prefill, decode = pool.turn("turn-1", prompt, pool.pick("turn-1", prompt))
    assert prefill["hit_tokens_local"] + prefill["hit_tokens_remote"] == 0
    assert (decode["hit_tokens_local"], decode["hit_tokens_remote"]) == (0, len(prompt) - 1)
    assert set(decode["bytes_by_path"]) == {"tcp"}
    assert b.received_bytes() - before >= decode["bytes_by_path"]["tcp"] >= 6 * CHUNK_BYTES

    # What B generated lies on B alone. The last token of an answer has no KV yet.
    stored = (len(prompt) + len(decode["tokens"]) - 1) // CHUNK_TOKENS
    assert stored * CHUNK_TOKENS > len(prompt)
    longer = [*prompt, *decode["tokens"], *(rng.randrange(512) for _ in range(CHUNK_TOKENS))]
    before = a.received_bytes()
    prefill, decode = pool.turn("turn-2", longer, pool.pick_with("turn-2", longer, stored))
    hits = prefill["hit_tokens_local"], prefill["hit_tokens_remote"]
    assert sum(hits) >= stored * CHUNK_TOKENS > len(prompt)
    assert min(hits) > 0, "the prompt was on A, the answer was not"
    assert a.received_bytes() - before >= prefill["bytes_by_path"]["tcp"] > 0
    assert set(prefill["bytes_by_path"]) == {"shm", "tcp"}


def test_shared_memory_ends_at_the_host(hosts: tuple[Host, Host], pool: Pool) -> None:
    """The same command, naming A's node, reads over the link on B and moves nothing over it on A."""
    a, b = hosts
    call(pool.prefill, cmd="prefill", tokens=list(range(1, 201)))
    command = COMMANDS["decode B"].replace("$HOST_B:7420", "$HOST_A:7420")
    before = b.received_bytes()
    decode = answer_of(b, command)
    assert set(decode["bytes_by_path"]) == {"tcp"}
    assert b.received_bytes() - before >= decode["bytes_by_path"]["tcp"] >= PROMPT_BYTES

    before = a.received_bytes() + b.received_bytes()
    decode = answer_of(a, command)
    assert decode["bytes_by_path"] == {"shm": PROMPT_BYTES}
    assert a.received_bytes() + b.received_bytes() - before < CALLS_BYTES < PROMPT_BYTES
