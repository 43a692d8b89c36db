"""Running a command as a user types it, inside this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main


class Console:
    """Runs commands with a clean environment, in an empty folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys = capsys
        for name in [name for name in os.environ if name.upper().startswith("KVSTORE_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("COLUMNS", "250")
        monkeypatch.chdir(folder)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        captured = self._capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    def ok(self, *arguments: str) -> str:
        """Standard output of a command that succeeds and has nothing to complain of."""
        code, out, err = self.run(*arguments)
        assert (code, err) == (0, ""), err
        return out

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The document that it prints with --json."""
        found, out, err = self.run(*arguments, "--json")
        assert found == code, err
        assert out.count("\n") == 1
        return json.loads(out)

    def refused(self, code: int, *arguments: str) -> str:
        """The one line of error."""
        found, _, err = self.run(*arguments)
        assert found == code and err.startswith("error: ") and err.count("\n") == 1, err
        return err
