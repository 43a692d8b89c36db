"""A writer in a process of its own that stands still in the middle of a copy: `stopped_writer.py SOCKET VERSION`.

It reserves one prompt, fills half of the first chunk, prints the slots that it was granted, waits for a line on its
standard input, writes the rest, commits, and prints the outcomes.
"""

from __future__ import annotations

import json
import sys

import kvstore
from kvstore.client.values import Bytes
from tests.chaos.raced_node import NAMESPACE, pages_of, prompt_keys

PROMPT, CHUNKS = 1, 3


class HalfThenWait:
    """A source that stops within the first chunk."""

    def __init__(self, pages: Bytes, slots: list[int]) -> None:
        self._pages = pages
        self._slots: list[int] | None = slots

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        page, place = self._pages[index], slot.reshape(-1)
        half = len(page) // 2
        place[:half] = page[:half]
        slots, self._slots = self._slots, None
        if slots is not None:
            print(json.dumps(slots), flush=True)
            sys.stdin.readline()
        place[half:] = page[half:]


def main(socket_path: str, version: int) -> None:
    keys = prompt_keys(PROMPT, CHUNKS)
    with kvstore.connect(socket_path) as client:
        with client.bind(NAMESPACE).begin_write(keys, deadline_s=60.0) as pending:
            pending.put_layers(0, 1, HalfThenWait(pages_of(keys, version), pending.answer.slots))
            result = pending.commit()
        print(json.dumps([outcome.name for outcome in result.outcomes]), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
