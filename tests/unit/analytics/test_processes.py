from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

import pytest

from kvstore.analytics import processes
from kvstore.analytics.processes import Child, Children
from kvstore.errors import ConfigurationError, DeadlineExceeded, Unreachable

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"said": json.loads(line)}), flush=True)
"""


def start(children: Children, code: str, name: str = "child") -> Child:
    return children.start(name, [sys.executable, "-c", code])


def is_gone(pid: int) -> bool:
    """True if no process of that id exists; children of ours are reaped by then."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_child_announces_itself_and_answers_line_by_line() -> None:
    with Children() as children:
        child = children.announced(start(children, ECHO))
        assert child.announcement == {"ready": True}
        assert child.call({"a": "x" * 100_000}, 10.0) == {"said": {"a": "x" * 100_000}}
        assert children.folder.is_dir()
    assert is_gone(child.pid)
    assert not children.folder.exists()


def test_a_child_that_fails_is_quoted() -> None:
    with Children() as children:
        child = start(children, "import sys; sys.exit('the disk is on fire')")
        with pytest.raises(Unreachable, match=r"child ended \(exit status 1\)\n  the disk is on fire"):
            children.announced(child)
        with pytest.raises(Unreachable, match="does not take commands"):
            child.send({})


@pytest.mark.parametrize(
    ("code", "complaint"), [("print('hello', flush=True)", "not JSON"), ("print('[1]', flush=True)", "JSON object")]
)
def test_what_is_not_a_json_object_is_refused(code: str, complaint: str) -> None:
    with Children() as children:
        with pytest.raises(Unreachable, match=complaint):
            children.announced(start(children, code))


def test_a_silent_child_runs_into_the_deadline() -> None:
    with Children() as children:
        child = start(children, "import sys; sys.stdin.read()")
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
            child.receive(0.05)


def test_a_child_has_a_process_group_of_its_own_and_the_session_of_its_parent() -> None:
    """Ctrl-C does not reach it; the scheduler shares the CPU among sessions, and it is to share with its siblings."""
    with Children() as children:
        child = start(children, ECHO)
        assert os.getpgid(child.pid) == child.pid != os.getpgrp()
        assert os.getsid(child.pid) == os.getsid(0)


def test_a_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_DEADLINE_S", 0.1)
    ignoring = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{ECHO}"
    with Children() as children:
        child = children.announced(start(children, ignoring))
    assert is_gone(child.pid)


def test_kill_takes_the_whole_group_of_a_child() -> None:
    forking = """
import json, os, signal
pid = os.fork()
if pid:
    print(json.dumps({"worker": pid}), flush=True)
signal.pause()
"""
    with Children() as children:
        child = children.announced(start(children, forking))
        descriptor = os.pidfd_open(child.announcement["worker"])
        child.kill()
        # The grandchild is not ours to reap; its pidfd is readable once it has ended.
        assert select.select([descriptor], [], [], 10.0)[0]
        os.close(descriptor)


def test_children_end_on_an_error_and_on_sigterm() -> None:
    with pytest.raises(SystemExit) as ended:
        with Children() as children:
            child = children.announced(start(children, ECHO))
            signal.raise_signal(signal.SIGTERM)
            threading.Event().wait(10)
    assert ended.value.code == 128 + signal.SIGTERM
    assert is_gone(child.pid)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_settings_of_the_users_own_pool_do_not_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_NODE_DRAM", "7TiB")
    monkeypatch.setenv("UNRELATED", "kept")
    code = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
    with Children() as children:
        seen = children.announced(start(children, code)).announcement
    assert "KVSTORE_NODE_DRAM" not in seen
    assert seen["UNRELATED"] == "kept"


def test_a_missing_console_script_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="install the package"):
        processes.console_script()
