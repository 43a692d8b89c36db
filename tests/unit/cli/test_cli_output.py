"""What a started server says."""

from __future__ import annotations

import json

import pytest

from kvstore.cli.output import announcer, print_json, print_table

FACTS = {
    "role": "node",
    "node_id": "n[1]",
    "control_address": "127.0.0.1:41234",
    "metrics_address": "",
    "socket_path": "/run/kvstore/n[1].sock",
}


def test_json_announcement_is_one_line_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    announcer(as_json=True)(FACTS)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1
    assert json.loads(captured.out) == FACTS


def test_words_go_to_stderr_and_say_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    announcer(as_json=False)(FACTS)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "kvstore node is ready" in captured.err
    assert "n[1]" in captured.err
    assert "metrics" not in captured.err
    assert "kvstore stats --node 127.0.0.1:41234" in captured.err


@pytest.mark.parametrize("role", ["up", "metadata", "router", "something new", ""])
def test_every_role_can_be_announced_with_little_known(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    announcer(as_json=False)({"role": role})
    assert "is ready" in capsys.readouterr().err


def test_table_shows_brackets_and_thousands(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ["name", "count"], [["[bold]x", 1234567], ["y", 1]])
    out = capsys.readouterr().out
    assert "[bold]x" in out
    assert "1,234,567" in out
    print_table("empty", ["name"], [])


def test_json_is_compact(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, 2]})
    assert capsys.readouterr().out == '{"a":[1,2]}\n'
