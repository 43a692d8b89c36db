"""An engine of several processes has one node of its own, which ends with the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from replayed_engine import group, tokens

from engine_adapter.pool_access import embedded
from engine_adapter.private_node import private_node
from kvstore.errors import ConfigurationError


@pytest.fixture
def folder() -> Iterator[Path]:
    """The path of a Unix socket has at most 107 bytes; pytest's own folders can be too deep for it."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


def test_an_embedded_pool_is_shared_by_name_and_goes_with_its_last_user() -> None:
    one, two, other = embedded("a", "8MiB"), embedded("a", "8MiB"), embedded("b", "8MiB")
    assert one.client() is two.client() is not other.client()
    client = one.client()
    one.close()
    assert not client.closed
    two.close()
    assert client.closed
    other.close()


@pytest.mark.slow
def test_all_processes_of_an_engine_find_one_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    first, second = private_node("engine", "64MiB"), private_node("engine", "64MiB")
    namespace = group().namespace
    writer, reader = first.client().bind(namespace), second.client().bind(namespace)
    keys, pages = writer.keys(tokens(1, 16)), writer.empty(2)
    pages[...] = 7
    assert writer.write(keys, pages).stored == 2
    found = np.zeros_like(pages)
    assert reader.read(keys, found).chunks == 2 and np.array_equal(found, pages)
    second.close()
    assert writer.match(keys).local_chunks == 2
    first.close()
    third = private_node("engine", "64MiB")  # the old one is gone, and its socket no hindrance
    assert third.client().bind(namespace).match(keys).local_chunks == 0
    third.close()


@pytest.mark.slow
def test_b04_it_does_not_outlive_a_starter_that_is_killed(folder: Path) -> None:
    program = "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n" + (
        "from engine_adapter.private_node import private_node\n"
        "access = private_node('engine', '64MiB'); access.client()\n"
        "print(flush=True); sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdin is not None and starter.stdout is not None
    starter.stdout.readline()
    children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
    handles = [os.pidfd_open(int(child)) for child in children]
    assert handles
    starter.kill()
    starter.wait()
    import select

    for handle in handles:
        assert select.select([handle], [], [], 20.0)[0], "the node goes on without its engine"
        os.close(handle)
    starter.stdin.close()
    starter.stdout.close()


def test_a_folder_of_somebody_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    from engine_adapter.private_node import _own_folder

    _own_folder("engine").chmod(0o777)
    with pytest.raises(ConfigurationError, match="TMPDIR"):
        private_node("engine", "64MiB")
