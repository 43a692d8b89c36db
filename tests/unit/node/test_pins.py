"""The file that keeps pins over a restart."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvstore.errors import CapacityExhausted
from kvstore.node.operators.pins import KeptPin, PinFile

A, B = KeptPin("a", b"n" * 16, b"k" * 16, 100.0), KeptPin("b ü", b"n" * 16, b"l" * 16, 10.0)


def test_the_rest_of_each_lifetime_is_kept(tmp_path: Path) -> None:
    PinFile(tmp_path, lambda: 5000.0).save([A, B])
    assert PinFile(tmp_path, lambda: 5000.0).load() == [A, B]
    assert PinFile(tmp_path, lambda: 5040.0).load() == [KeptPin("a", A.namespace_id, A.key, 60.0)]
    PinFile(tmp_path, lambda: 5000.0).save([])
    assert PinFile(tmp_path).load() == []
    assert [path.name for path in tmp_path.iterdir()] == ["pins.json"]


def test_no_file_is_no_pins(tmp_path: Path) -> None:
    assert PinFile(tmp_path).load() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2, "pins": []}', '{"version": 1, "pins": [{"name": 1}]}'])
def test_a_file_that_cannot_be_read_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / "pins.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert PinFile(tmp_path).load() == []
    assert "pins.json" in caplog.text


def test_a_folder_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CapacityExhausted, match="gone"):
        PinFile(tmp_path / "gone").save([A])


def test_a_crash_before_the_last_step_leaves_the_old_file(tmp_path: Path) -> None:
    PinFile(tmp_path, lambda: 0.0).save([A])
    (tmp_path / "pins.new").write_text("{ half")
    assert PinFile(tmp_path, lambda: 0.0).load() == [A]
    PinFile(tmp_path, lambda: 0.0).save([B])
    assert len(json.loads((tmp_path / "pins.json").read_text())["pins"]) == 1
