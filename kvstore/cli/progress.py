"""What a node's start shows on standard error while it recovers and populates: a bar on a terminal, else a line at
times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from kvstore.setting_types import size_text

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.1
_BAR_WIDTH = 30


class StartProgress:
    """A node's `on_progress`. Nothing is drawn before `announced`, so that the announcement stays in one piece."""

    def __init__(self, stream: TextIO, *, announced: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._clock = clock
        self._open = announced
        self._next_s = clock() + (0.0 if self._is_terminal else LINE_EVERY_S)
        self._has_shown = False

    def announced(self) -> None:
        """The announcement was printed."""
        self._open = True

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See `kvstore.node.daemon.OnProgress`."""
        ended = total > 0 and done >= total
        if not self._open or (not ended and self._clock() < self._next_s) or (ended and not self._has_shown):
            return
        self._has_shown = not ended
        self._next_s = self._clock() + (BAR_EVERY_S if self._is_terminal else LINE_EVERY_S)
        if self._is_terminal:
            # The bar goes again when all is done.
            self._stream.write("\r\x1b[K" + ("" if ended else _bar(stage, done, total)))
        else:
            self._stream.write(f"{stage}: {_amount(stage, done, total)}\n")
        self._stream.flush()


def _bar(stage: str, done: int, total: int) -> str:
    filled = _BAR_WIDTH * done // total if total else 0
    return f"{stage} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {_amount(stage, done, total)}"


def _amount(stage: str, done: int, total: int) -> str:
    if not total:
        return "…"
    if stage == "populating":
        return f"{size_text(done >> 20 << 20)} of {size_text(total)} ({100 * done // total} %)"
    return f"{done:,} of {total:,}"
