"""The store service as clients in other languages meet it: two of them, one made from the protos, one by reflection.

Both run in processes that never import the library (`foreign_store_client.py`) against real servers, and compute
ids and keys from the documentation alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import store_service_processes as processes
from test_metrics_documents import documented

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CLIENT = HERE / "foreign_store_client.py"
COMMITTED, PRESENT, REFUSED_FULL = 4, 2, 16

# Situation -> (status code, what the details must name).
STATUS = {
    "no deadline": ("INVALID_ARGUMENT", "deadline"),
    "no deadline, unary": ("INVALID_ARGUMENT", "deadline"),
    "deadline over the limit": ("INVALID_ARGUMENT", "600 s"),
    "passed deadline": ("DEADLINE_EXCEEDED", ""),
    "unknown namespace": ("NOT_FOUND", "not registered"),
    "unknown shard": ("NOT_FOUND", "no geometry"),
    "unknown session, Put": ("ABORTED", "session"),
    "unknown session, Get": ("ABORTED", "session"),
    "geometry that does not fit": ("FAILED_PRECONDITION", "3 layers x 2 KV heads does not fit a layout of 4 layers"),
    "geometry with a gap": ("FAILED_PRECONDITION", "gap"),
    "description that is not canonical": ("INVALID_ARGUMENT", "canonical"),
    "description of an unknown dtype": ("INVALID_ARGUMENT", "int3"),
    "rectangle outside the layout": ("FAILED_PRECONDITION", "4 layers x 2 KV heads"),
    "rectangle missing": ("INVALID_ARGUMENT", "rectangle"),
    "keys of a wrong length": ("INVALID_ARGUMENT", "chain.keys has 3 bytes"),
    "duplicate keys": ("INVALID_ARGUMENT", "once"),
    "truncated stream": ("INVALID_ARGUMENT", "ended before"),
    "truncated after the header": ("INVALID_ARGUMENT", "ended before"),
    "fewer chunks than keys": ("INVALID_ARGUMENT", "ended before"),
    "no header": ("INVALID_ARGUMENT", "header"),
    "empty stream": ("INVALID_ARGUMENT", "header"),
    "second header": ("INVALID_ARGUMENT", "expected data"),
    "wrong hash": ("INVALID_ARGUMENT", "hash"),
    "too few bytes": ("FAILED_PRECONDITION", "has 262144 bytes, not 1"),
    "too many bytes": ("FAILED_PRECONDITION", "has 262144 bytes, more were sent"),
    "more after the last chunk": ("INVALID_ARGUMENT", "after the last of 1 chunks"),
    "piece over the limit": ("INVALID_ARGUMENT", "1048576"),
    "message over the limit": ("RESOURCE_EXHAUSTED", "17825792"),
    "Reserve without shared memory": ("PERMISSION_DENIED", "Put"),
    "Commit without shared memory": ("PERMISSION_DENIED", "Put"),
    "bytes that are no message": ("UNKNOWN", ""),
    "unknown method": ("UNIMPLEMENTED", ""),
    "after all that": ("OK", ""),
}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A node with an index and a scheduler, and a second node that has room for 3 chunks."""
    folder = tmp_path_factory.mktemp("s")
    with contextlib.ExitStack() as stack:
        index = stack.enter_context(processes.metadata())["control_address"]
        node = stack.enter_context(processes.node(folder / "a", "64MiB", "--metadata-address", index))
        small = stack.enter_context(processes.node(folder / "b", "1MiB"))
        router = stack.enter_context(processes.router(index))
        yield [node["control_address"], small["control_address"], index, router["control_address"]]


@pytest.fixture(scope="module", params=["generated", "reflection"])
def results(request: pytest.FixtureRequest, addresses: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the client found."""
    folder = "-"
    if request.param == "generated":
        folder = str(tmp_path_factory.mktemp("generated"))
        _generate(Path(folder))
    command = [sys.executable, str(CLIENT), request.param, folder, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=HERE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _generate(folder: Path) -> None:
    """Client modules from the protos, under a package path of their own."""
    sources = folder / "protos" / "foreign" / "store"
    sources.mkdir(parents=True)
    for proto in (ROOT / "protos" / "kvstore" / "v1").glob("*.proto"):
        text = proto.read_text().replace('import "kvstore/v1/', 'import "foreign/store/')
        (sources / proto.name).write_text(text)
    paths = sorted(str(path) for path in sources.glob("*.proto"))
    tool = [sys.executable, "-m", "grpc_tools.protoc"]
    subprocess.run([*tool, f"-I{folder / 'protos'}", f"--python_out={folder}", *paths], check=True)


def test_the_library_is_not_involved(results: Any) -> None:
    assert results["library_modules"] == []


def test_chunks_come_back_as_they_were_put(results: Any) -> None:
    trip = results["round_trip"]
    first, second = trip["outcomes"]
    assert set(first) <= {COMMITTED, PRESENT} and second == [PRESENT] * 6
    assert trip["equal"] and trip["part_equal"] and trip["reason"] == ""


def test_shards_of_two_writers_make_whole_chunks(results: Any) -> None:
    shards = results["shards"]
    assert shards["equal"]
    if shards["outcomes"][0] == [COMMITTED] * 2:  # the first client; the second finds them present
        assert shards["before"] == "not_covered"


def test_a_chunk_of_several_pieces(results: Any) -> None:
    assert results["large"]["equal"]


def test_a_miss_is_ok_with_a_reason(results: Any) -> None:
    assert results["miss"] == {"absent": [0, "absent"], "partly": [2, "absent"]}


def test_writers_must_send_fingerprints_and_readers_need_not(results: Any) -> None:
    assert results["stored_without_tokens"]["refused"][0] == "INVALID_ARGUMENT"
    assert results["stored_without_tokens"]["found"] == [1, 1]


def test_a_full_pool_is_resource_exhausted_and_a_full_tail_an_outcome(results: Any) -> None:
    full = results["full_pool"]
    assert full["refused"][0] == "RESOURCE_EXHAUSTED" and "refused_full" in full["refused"][1]
    assert full["tail"] == [PRESENT] * 3 + [REFUSED_FULL]
    assert full["after"] == [COMMITTED]


@pytest.mark.parametrize("situation", STATUS)
def test_status_code(results: Any, situation: str) -> None:
    code, named = STATUS[situation]
    found_code, details = results["status_codes"][situation]
    assert found_code == code, details
    assert named in details


def test_every_situation_is_expected_and_every_code_documented(results: Any) -> None:
    assert set(results["status_codes"]) == set(STATUS)
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs" / "store-service.md").read_text(), re.MULTILINE))
    assert {code for code, _ in STATUS.values()} <= documented


def test_health_says_serving(results: Any) -> None:
    assert results["health"] == ["SERVING", "SERVING"]


def test_garbage_on_the_port_ends_that_connection_only(results: Any) -> None:
    assert results["garbage"] == {"closed": True, "after": ["OK", ""]}


def test_every_figure_of_a_node_is_documented(results: Any) -> None:
    assert len(results["stats"]) > 20
    assert [name for name in results["stats"] if not documented(name)] == []


def test_metadata_and_scheduler_by_reflection(results: Any) -> None:
    other = results["other_services"]
    assert other["run"] == 3 and other["nodes"] == [other["node"]]
    assert other["picked"] == "w" and other["ticket_chunks"] == 3
