"""The supervisor: a worker that dies is replaced, with what its node held."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from half_writer import LAYOUT, NAMESPACE
from supervised_node import SupervisedNode, eventually, is_alive, supervised

import kvstore
from kvstore.client.cache import Cache
from kvstore.errors import KvStoreError
from kvstore.model.prefix import Keys
from kvstore.node.slots import slot_bytes

pytestmark = pytest.mark.slow
DRAM = "2MiB"
CHUNK_SLOT_BYTES = slot_bytes(LAYOUT, LAYOUT.whole)
SLOTS = (2 << 20) // CHUNK_SLOT_BYTES
PACKAGE = Path(kvstore.__file__).parent


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SupervisedNode]:
    with supervised(tmp_path, "node", "--dram", DRAM, "--slots", "1024") as node:
        node.wait_open()
        yield node


def prompt_keys(cache: Cache, prompt: int, chunks: int) -> Keys:
    return cache.keys([prompt] * (chunks * LAYOUT.chunk_tokens))


def pages_of(keys: Keys) -> npt.NDArray[np.uint8]:
    """Bytes that only these keys have."""
    shape = LAYOUT.shape(LAYOUT.whole)
    return np.stack([np.random.default_rng(list(key)).integers(0, 256, shape, dtype=np.uint8) for key in keys])


def store(cache: Cache, prompt: int, chunks: int) -> Keys:
    keys = prompt_keys(cache, prompt, chunks)
    assert cache.write(keys, pages_of(keys)).visible == chunks
    return keys


def read(cache: Cache, keys: Keys) -> Any:
    """Read into poisoned memory; what is delivered must be right."""
    pages = np.full((len(keys), *LAYOUT.shape(LAYOUT.whole)), 0xAA, dtype=np.uint8)
    result = cache.read(keys, pages)
    assert (pages[: result.chunks] == pages_of(keys)[: result.chunks]).all(), "wrong bytes"
    return result


def half_writer(node: SupervisedNode, prompt: int, chunks: int) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("half_writer.py")
    command = [sys.executable, program, node.facts["node"]["socket_path"], str(prompt), str(chunks)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == f"{chunks}\n"
    return process


def test_a_killed_worker_comes_back_with_what_it_held(tmp_path: Path) -> None:
    meta_folder, folder = tmp_path / "m", tmp_path / "n"
    meta_folder.mkdir()
    folder.mkdir()
    with supervised(meta_folder, "up", "--dram", DRAM, *_free_ports(), roles=3) as first:
        index = first.facts["metadata"]["control_address"]
        with supervised(folder, "node", "--dram", DRAM, "--metadata-address", index, "--host-id", "other") as node:
            node.wait_open()
            with (
                kvstore.connect(node.control_address, index) as local,
                kvstore.connect(node.control_address, index, transport="tcp") as remote,
                kvstore.connect(metadata=index) as stranger,
            ):
                here, there, anywhere = (client.bind(NAMESPACE) for client in (local, remote, stranger))
                kept, removed = store(here, 1, 8), store(here, 2, 3)
                assert here.remove(removed) == 3
                assert read(there, kept).remote_chunks == 8
                eventually(lambda: read(anywhere, kept).chunks == 8)
                before = node.facts["node"]["epoch"]
                stats = node.kill_worker()
                assert (stats["recovered_chunks"], stats["dropped_shards"]) == (8, 0)
                eventually(lambda: read(here, kept).local_chunks == 8)
                eventually(lambda: read(there, kept).remote_chunks == 8)
                eventually(lambda: read(anywhere, kept).remote_chunks == 8)
                assert read(here, removed).chunks == read(there, removed).chunks == 0
                assert local.node is not None and local.node.epoch > before
                assert local.node.node_id == node.facts["node"]["node_id"]
                assert here.match(kept).pool_chunks == 8
                more = store(here, 3, 4)
                eventually(lambda: read(anywhere, more).chunks == 4)
            assert node.stop() == (0, "")
            log = node.errors.read_text()
            assert log.count("killed by SIGKILL") == 1 and "on the same memory" in log
        assert first.stop() == (0, "")


def _free_ports() -> tuple[str, ...]:
    return "--metadata-address", "127.0.0.1:0", "--metadata-metrics-address", "", "--router-address", "127.0.0.1:0"


def test_a_whole_pool_in_one_worker_comes_back_at_its_addresses(tmp_path: Path) -> None:
    with supervised(tmp_path, "up", "--dram", DRAM, *_free_ports(), roles=3) as pool:
        pool.wait_open()
        index = pool.facts["metadata"]["control_address"]
        with kvstore.connect(pool.control_address, index) as client, kvstore.connect(metadata=index) as stranger:
            cache, anywhere = client.bind(NAMESPACE), stranger.bind(NAMESPACE)
            keys = store(cache, 1, 5)
            assert pool.kill_worker()["recovered_chunks"] == 5
            eventually(lambda: read(cache, keys).local_chunks == 5)
            eventually(lambda: read(anywhere, keys).remote_chunks == 5)
        assert pool.stop() == (0, "")


def test_acknowledged_writes_survive_kills_under_load(node: SupervisedNode) -> None:
    with kvstore.connect(node.control_address) as client:
        cache = client.bind(NAMESPACE)
        stored: list[Keys] = []
        for kill in range(4):
            victim = node.worker
            for prompt in range(4):
                if prompt == 2:
                    os.kill(victim, signal.SIGKILL)
                keys = prompt_keys(cache, 10 * kill + prompt, 2)
                eventually(lambda keys=keys: cache.write(keys, pages_of(keys)).visible == 2)  # type: ignore[misc]
                stored.append(keys)
        eventually(lambda: all(read(cache, keys).chunks == 2 for keys in stored))
        assert eventually(node.stats)["worker_start"] == 5


def test_what_a_living_client_was_writing_is_not_handed_out(node: SupervisedNode) -> None:
    writer = half_writer(node, 7, 10)
    try:
        with kvstore.connect(node.control_address) as client:
            cache = client.bind(NAMESPACE)
            assert node.kill_worker()["quarantined_bytes"] == 10 * CHUNK_SLOT_BYTES
            node.wait_open()
            kept = [store_eventually(cache, 100 + i) for i in range(3 * SLOTS)]
            assert writer.stdin is not None and writer.stdout is not None
            print("scribble", file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "scribbled\n"
            assert sum(read(cache, keys).chunks for keys in kept) == SLOTS - 10
            node.kill_worker()
            assert node.stats()["former_writers"] == 1
            writer.kill()
            writer.wait()
            eventually(lambda: node.stats()["quarantined_bytes"] == 0)
            kept = [store_eventually(cache, 500 + i) for i in range(3 * SLOTS)]
            assert sum(read(cache, keys).chunks for keys in kept) == SLOTS
    finally:
        _end(writer)


def store_eventually(cache: Cache, prompt: int) -> Keys:
    keys = prompt_keys(cache, prompt, 1)
    eventually(lambda: cache.write(keys, pages_of(keys)).visible == 1)
    return keys


def test_what_a_dead_client_was_writing_is_free(node: SupervisedNode) -> None:
    writer = half_writer(node, 7, 10)
    os.kill(node.process.pid, signal.SIGSTOP)  # so that nobody can tidy up between the two kills
    os.kill(worker := node.worker, signal.SIGKILL)
    _end(writer)
    os.kill(node.process.pid, signal.SIGCONT)
    eventually(lambda: node.worker != worker and node.stats()["worker_start"] == 2)
    eventually(lambda: (stats := node.stats())["quarantined_bytes"] == 0 and stats["used_bytes"] == 0)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def test_a_worker_that_dies_again_and_again_is_given_up(node: SupervisedNode) -> None:
    killed: set[int] = set()
    while len(killed) < 20 and node.process.poll() is None:
        eventually(lambda: node.process.poll() is not None or set(node.workers) - killed)
        for worker in set(node.workers) - killed:
            os.kill(worker, signal.SIGKILL)
            killed.add(worker)
    assert node.process.wait(10.0) == 1
    assert len(killed) == 8
    assert "its 8th death within 60 s: giving up" in node.errors.read_text()


def test_the_worker_dies_with_its_supervisor(node: SupervisedNode) -> None:
    worker = node.worker
    assert is_alive(worker)
    node.process.kill()
    eventually(lambda: not is_alive(worker))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_the_worker_first(node: SupervisedNode, number: signal.Signals) -> None:
    worker, socket_path = node.worker, Path(node.facts["node"]["socket_path"])
    assert socket_path.exists()
    node.process.send_signal(number)
    assert node.process.wait(20.0) == 0
    assert not is_alive(worker) and not socket_path.exists()
    assert node.errors.read_text() == ""


def test_a_worker_that_is_stopped_alone_is_replaced(node: SupervisedNode) -> None:
    with kvstore.connect(node.control_address) as client:
        cache = client.bind(NAMESPACE)
        keys = store(cache, 1, 4)
        assert node.kill_worker(signal.SIGTERM)["recovered_chunks"] == 4
        eventually(lambda: read(cache, keys).local_chunks == 4)


def test_the_supervisor_has_the_standard_library_only(node: SupervisedNode) -> None:
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (node.process.pid, node.worker)}
    assert [name for name in ("numpy", "grpc", "pydantic") if name in maps[node.worker]] == [
        "numpy",
        "grpc",
        "pydantic",
    ]
    assert "site-packages" not in maps[node.process.pid]
    code = "import sys, json, kvstore.node.supervisor; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(ended.stdout))
    ours = {name for name in loaded if name.partition(".")[0] == "kvstore"}
    assert ours == {
        "kvstore",
        "kvstore.errors",
        "kvstore.node",
        "kvstore.node.arena",
        "kvstore.node.arena.dram",
        "kvstore.node.handover",
        "kvstore.node.memory",
        "kvstore.node.supervisor",
    }
    assert not loaded & {"numpy", "grpc", "pydantic", "typer", "xxhash"}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("memory.py", "LAYOUT_VERSION: Final = 1", "LAYOUT_VERSION: Final = 2"),
        ("handover.py", "VERSION: Final = 1", "VERSION: Final = 2"),
    ],
)
def test_other_code_on_the_disk_means_a_full_restart(tmp_path: Path, file: str, old: str, new: str) -> None:
    home, folder = tmp_path / "code", tmp_path / "node"
    folder.mkdir()
    shutil.copytree(PACKAGE, home / "kvstore", ignore=shutil.ignore_patterns("__pycache__"))
    with supervised(folder, "node", "--dram", DRAM, environment={"PYTHONPATH": str(home)}) as node:
        node.wait_open()
        with kvstore.connect(node.control_address) as client:
            store(client.bind(NAMESPACE), 1, 4)
        source = home / "kvstore" / "node" / file
        text = source.read_text()
        assert text.count(old) == 1
        source.write_text(text.replace(old, new))
        supervisor, worker = node.process.pid, node.worker
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: node.worker != worker and node.stats()["chunks"] == 0)
        assert node.process.pid == supervisor and node.stats()["worker_start"] == 1
        log = node.errors.read_text()
        assert "full restart: the contents of the DRAM tier are lost" in log
        assert node.stop() == (0, "")


def test_new_code_on_the_disk_is_what_the_next_worker_runs(tmp_path: Path) -> None:
    home, folder = tmp_path / "code", tmp_path / "node"
    folder.mkdir()
    shutil.copytree(PACKAGE, home / "kvstore", ignore=shutil.ignore_patterns("__pycache__"))
    with supervised(folder, "node", "--dram", DRAM, environment={"PYTHONPATH": str(home)}) as node:
        source = home / "kvstore" / "node" / "daemon.py"
        source.write_text(source.read_text().replace('"recovered_chunks"', '"recovered_by_new_code"'))
        assert "recovered_by_new_code" in node.kill_worker()


def test_a_node_that_cannot_start_says_why_and_ends(node: SupervisedNode, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("kvstore")
    for arguments, reason in (
        (("--control-address", node.control_address), "port is taken"),
        (("--dram", "100TiB"), "use a smaller --dram"),
    ):
        places = ("--data-dir", str(tmp_path / "other"), "--socket-dir", str(tmp_path), "--metrics-address", "")
        ended = subprocess.run([script, "node", *places, *arguments], capture_output=True, text=True, timeout=30)
        assert (ended.returncode, ended.stdout) == (2, "")
        told = ended.stderr.splitlines()[-1]  # gRPC has its say before
        assert told.startswith("error: ") and reason in told and "Traceback" not in ended.stderr


def test_reads_while_the_node_is_away_are_misses(node: SupervisedNode) -> None:
    with kvstore.connect(node.control_address) as client:
        cache = client.bind(NAMESPACE)
        keys = store(cache, 1, 2)
        node.process.kill()
        eventually(lambda: read(cache, keys).chunks == 0)
        for _ in range(3):
            client._bad_until.clear()
            assert read(cache, keys).chunks == 0
        with pytest.raises(KvStoreError):
            cache.write(keys, pages_of(keys))
