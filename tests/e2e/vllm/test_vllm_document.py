"""The commands of docs/engines/vllm.md as they stand there, with the real engine.

Replaced are MODEL and the addresses. Added are ports and folders of our own, and what a machine without a GPU needs:
`CPU_FLAGS` for servers, `CPU_ARGUMENTS` for `LLM`. vLLM's offloading copies on CUDA and alike only: for it the name of
its specification is replaced too (`CPU_SPEC`), by that of one with the same configuration.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import pytest
from engines import Cold, Server, Workplace, prompt
from fenced_code import blocks

from kvstore.analytics.processes import Children

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "engines" / "vllm.md").read_text()
CPU_FLAGS = "--dtype float32 --kv-cache-memory-bytes 67108864 --enforce-eager"
CPU_ARGUMENTS = 'dtype="float32", kv_cache_memory_bytes=67108864, enforce_eager=True'
GPU_SPEC = '"spec_name": "TieringOffloadingSpec"'
CPU_SPEC = '"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_offloading"'
BLOCK_TOKENS = 128
"""vLLM's usual block on CPUs; a chunk is never less than a block."""
PROMPTS = [prompt(60), prompt(61), prompt(62)]
STORED, HANDED_ON, OFFLOADED = PROMPTS
WHOLE_CHUNKS = 300 // BLOCK_TOKENS
HITS = "vllm:external_prefix_cache_hits_total"
FREE_ADDRESSES = (
    "--control-address 127.0.0.1:0 --metadata-address 127.0.0.1:0 --router-address 127.0.0.1:0"
    " --metrics-address '' --metadata-metrics-address ''"
)
READ_FROM_TIER = "vllm:kv_offload_tiering_read_bytes_total"
STORED_DEADLINE_S = 30.0

Known = dict[str, list[int]]
"""What an engine without a pool answers, by prompt."""


def the(language: str, word: str) -> str:
    """The one block of that language with that word in it."""
    (found,) = [block for block in blocks(PAGE, language) if word in block]
    return found.rstrip()


def test_the_page_has_every_part() -> None:
    assert len(blocks(PAGE, "bash")) == 3 and len(blocks(PAGE, "python")) == 1 and len(blocks(PAGE, "json")) == 1
    assert len(re.findall(r"^```\w", PAGE, re.MULTILINE)) == 5
    assert the("bash", "kvstore up") and the("bash", "KVStoreConnector") and GPU_SPEC in the("bash", "KVStoreTier")


@dataclass(slots=True)
class Page:
    """The pool of the page and the servers over it. `addresses`: those of the page, and what they are here."""

    place: Workplace
    node: str
    addresses: dict[str, str]

    def here(self, text: str) -> str:
        """The page's text with this machine's model and addresses."""
        text = text.replace("MODEL", engines.model("llama"))
        for shown, bound in self.addresses.items():
            text = text.replace(shown, bound)
        return text

    def server(self, command: str, variables: Mapping[str, str]) -> Server:
        """Start a server by a command of the page."""
        port = engines.free_port()
        command = f"exec {self.here(command)} {CPU_FLAGS} --host 127.0.0.1 --port {port} >&2"
        return Server(self.place.command("server", command, variables), port)

    @property
    def chunks(self) -> int:
        """How many chunks the pool has."""
        return int(engines.node_statistics(self.node)["chunks"])

    def wait_stored(self, chunks: int) -> None:
        """Until the pool has so many chunks: an engine stores them beside its answer."""
        end, pause = time.monotonic() + STORED_DEADLINE_S, threading.Event()
        while (stored := self.chunks) < chunks:
            assert time.monotonic() < end, f"the pool has {stored} of {chunks} chunks after {STORED_DEADLINE_S:g} s"
            pause.wait(0.05)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """`kvstore up` of the page."""
    with Children() as children, contextlib.closing(Workplace(children)) as place:
        folders = f"--socket-dir {children.folder} --data-dir {children.folder}"
        pool = place.command("up", f"exec {the('bash', 'kvstore up')} {FREE_ADDRESSES} {folders} --json")
        said = [pool.receive(engines.ENGINE_DEADLINE_S) for _ in ("node", "metadata", "router")]
        bound = {str(facts["role"]): str(facts["control_address"]) for facts in said}
        yield Page(place, bound["node"], {"127.0.0.1:7420": bound["node"], "127.0.0.1:7410": bound["metadata"]})


@pytest.fixture(scope="module")
def servers(page: Page) -> tuple[Server, Server]:
    """The page's server twice, on a core each."""
    first, second = (page.server(the("bash", "KVStoreConnector"), engines.threads(1, core)) for core in (0, 1))
    first.wait_ready()
    second.wait_ready()
    return first, second


def ask(server: Server, question: Any, **more: Any) -> dict[str, Any]:
    return engines.complete(server.url, question, model=engines.model("llama"), **more)


def ids(server: Server, question: Any, **more: Any) -> list[int]:
    found: list[int] = ask(server, question, **more)["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def known(cold: Cold) -> Known:
    """The answers that are right."""
    answers = cold(PROMPTS, block_size=BLOCK_TOKENS)
    return {str(tokens): ids for tokens, ids in zip(PROMPTS, answers, strict=True)}


def counted(server: Server, name: str) -> float:
    """That counter, over all its labels."""
    return sum(value for line, value in server.counters().items() if line.partition("{")[0] == name)


def test_a_second_server_loads_what_the_first_stored(page: Page, servers: tuple[Server, Server], known: Known) -> None:
    first, second = servers
    before = page.chunks
    assert ids(first, STORED) == known[str(STORED)]
    page.wait_stored(before + WHOLE_CHUNKS)
    assert ids(second, STORED) == known[str(STORED)]
    assert counted(second, HITS) == WHOLE_CHUNKS * BLOCK_TOKENS


def test_the_figures_have_the_names_of_the_page(servers: tuple[Server, Server]) -> None:
    with urllib.request.urlopen(f"{servers[1].url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    names = re.findall(r"`(vllm:\w+)(?:\{\w+\})?`", PAGE)
    assert names
    assert [name for name in names if f"# TYPE {name} counter" not in text] == []


def test_prefill_and_decode(servers: tuple[Server, Server], known: Known) -> None:
    """The decode server has the tail of the prompt too, behind the whole chunks, and computes its last token only."""
    prefill, decode = servers
    computed, hits = decode.computed_tokens(), counted(decode, HITS)
    request = json.loads(the("json", "do_remote_decode"))
    ticket = ask(prefill, HANDED_ON, max_tokens=1, **request)["kv_transfer_params"]
    assert ids(decode, HANDED_ON, kv_transfer_params=ticket) == known[str(HANDED_ON)]
    assert decode.computed_tokens() - computed <= 1
    assert counted(decode, HITS) - hits == len(HANDED_ON)


def test_the_example_in_python(page: Page, servers: tuple[Server, Server], tmp_path: Path) -> None:
    """What a server stored it loads: it tells so."""
    example = the("python", "LLM(")
    text = eval(re.search(r"^PROMPT = (.*)$", example, re.MULTILINE)[1])
    before = page.chunks
    asked = ask(servers[0], text)["usage"]["prompt_tokens"]
    page.wait_stored(before + asked // BLOCK_TOKENS)
    script, output = tmp_path / "example.py", tmp_path / "output"
    assert "LLM(\n" in example
    script.write_text(page.here(example).replace("LLM(\n", f"LLM({CPU_ARGUMENTS},\n", 1))
    run = page.place.command("example", f"python {script} >{output}; echo '{{\"status\": '$?'}}'")
    assert run.receive(engines.ENGINE_DEADLINE_S) == {"status": 0}
    assert str(asked // BLOCK_TOKENS * BLOCK_TOKENS) in output.read_text().splitlines()


def test_the_tier(page: Page, known: Known) -> None:
    """The server drops what it has in blocks and host memory, as one in development mode can be asked to, and loads."""
    server = page.server(the("bash", "KVStoreTier").replace(GPU_SPEC, CPU_SPEC), {"VLLM_SERVER_DEV_MODE": "1"})
    server.wait_ready()
    before = page.chunks
    assert ids(server, OFFLOADED) == known[str(OFFLOADED)]
    page.wait_stored(before + WHOLE_CHUNKS)
    forget(server)
    assert ids(server, OFFLOADED) == known[str(OFFLOADED)]
    assert counted(server, HITS) == WHOLE_CHUNKS * BLOCK_TOKENS
    assert counted(server, READ_FROM_TIER) > 0
    # vLLM ignores keys that it does not know: that it took this one is seen here only.
    assert "Canonical KV layout enabled (all_layers_portable=True)" in page.place.log(server)


def forget(server: Server) -> None:
    """Until it has dropped its own caches: it cannot while blocks are being copied."""
    end, pause = time.monotonic() + STORED_DEADLINE_S, threading.Event()
    request = urllib.request.Request(f"{server.url}/reset_prefix_cache?reset_external=true", method="POST")
    while True:
        with urllib.request.urlopen(request, timeout=30) as answer:
            if json.load(answer)["success"]:
                return
        assert time.monotonic() < end, f"the server did not drop its caches within {STORED_DEADLINE_S:g} s"
        pause.wait(0.05)
