"""How the side environment is made: once, by one builder at a time, and a failed download is named as one.

These do not need the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import side_environment

SCRIPT = Path(side_environment.__file__)
DEADLINE_S = 120.0


def begin(folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Start the script for that folder."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", SCRIPT],
        env={**os.environ, "KVSTORE_VLLM": str(folder), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where everything seems to be made."""
    monkeypatch.setenv("KVSTORE_VLLM", str(tmp_path))
    for place, stamp in (
        (side_environment.home(), side_environment.wanted_stamp()),
        (side_environment.models(), side_environment.models_stamp()),
    ):
        place.mkdir()
        (place / side_environment.STAMP).write_text(stamp)
    return tmp_path


def test_what_is_made_is_left_alone(made: Path) -> None:
    script = begin(made)
    out, complaints = script.communicate(timeout=DEADLINE_S)
    assert (script.returncode, complaints) == (0, "")
    assert Path(out.strip()) == made / "vllm" / "bin" / "python"


@pytest.mark.parametrize("left_behind", ["", "another version"])
def test_an_unfinished_or_other_environment_is_not_taken(made: Path, left_behind: str) -> None:
    stamp = side_environment.home() / side_environment.STAMP
    assert side_environment.is_made(stamp.parent, side_environment.wanted_stamp())
    stamp.write_text(left_behind)
    assert not side_environment.is_made(stamp.parent, side_environment.wanted_stamp())
    stamp.unlink()
    assert not side_environment.is_made(stamp.parent, side_environment.wanted_stamp())


def test_a_second_builder_waits_for_the_first(made: Path) -> None:
    with side_environment.only_builder():
        script = begin(made)
        end, pause = time.monotonic() + DEADLINE_S, threading.Event()
        # The kernel lists who waits for a lock: "1: -> FLOCK ADVISORY WRITE pid ...".
        while not any(
            f" {script.pid} " in line for line in Path("/proc/locks").read_text().splitlines() if "->" in line
        ):
            assert script.poll() is None, "it did not wait"
            assert time.monotonic() < end
            pause.wait(0.01)
    assert script.communicate(timeout=DEADLINE_S)[1] == ""
    assert script.returncode == 0


@pytest.mark.slow
def test_a_failed_download_is_named_and_has_a_status_of_its_own(tmp_path: Path) -> None:
    script = begin(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path), PIP_CONFIG_FILE=os.devnull)
    out, complaints = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == side_environment.DOWNLOAD_FAILED
    assert "download of the engine failed: ERROR: No matching distribution found" in complaints
    assert out == ""
