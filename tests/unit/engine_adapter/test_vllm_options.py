"""What a user of vLLM sets is checked before anything starts, without vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_adapter.vllm.options import Mode, Options, check_policy, check_release
from kvstore.errors import ConfigurationError


def test_options_have_defaults_and_kinds() -> None:
    assert Options.parse({}) == Options()
    assert Options.parse({"node": "127.0.0.1:7420", "load": "layerwise", "save_decode": False}) == Options(
        node="127.0.0.1:7420", load=Mode.LAYERWISE, save_decode=False
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"nodes": "x"}, "did you mean 'node'"),
        ({"zzz": 1}, "no option 'zzz'"),
        ({"load": "later"}, "async, sync, layerwise"),
        ({"store": "later"}, "async, sync, layerwise"),
        ({"chunk_tokens": "64"}, "chunk_tokens is a int"),
        ({"chunk_tokens": True}, "chunk_tokens is a int"),
        ({"chunk_tokens": 0}, "at least 1"),
        ({"save_decode": 1}, "save_decode is a bool"),
    ],
)
def test_f13_a_wrong_option_is_refused_by_name(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Options.parse(extra)


def test_a_secret_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"tenant a\n")
    assert Options(secret_file=str(file)).secret == b"tenant a"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        _ = Options(secret_file=str(tmp_path / "none")).secret
    file.write_bytes(b"\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        _ = Options(secret_file=str(file)).secret


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1.dev3+gabc"])
def test_g04_the_tested_release_is_taken(version: str) -> None:
    check_release(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "dev", "0.3.2"])
def test_g04_another_release_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"0\.32\.x and refuses {version}"):
        check_release(version)


def test_requests_that_would_fail_with_the_pool_are_refused() -> None:
    check_policy("recompute")
    with pytest.raises(ConfigurationError, match='"kv_load_failure_policy": "recompute"'):
        check_policy("fail")


def test_f13_an_option_that_means_nothing_here_is_refused_too() -> None:
    assert Options.parse({"node": "x"}, without=("load",)).node == "x"
    with pytest.raises(ConfigurationError, match="no option 'load'"):
        Options.parse({"load": "sync"}, without=("load",))
