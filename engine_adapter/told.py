"""Chunks that others were told of, so that they can be told again when these are gone.

    expect   chunks that a store did not make visible: another one may be storing the same ones
    add      chunks that are in the pool now: which of them nobody was told of yet
    sweep    now and then all of them are looked up, in a thread: what is not there any more is told as gone

A chunk's names are the engine's, of one or several of its blocks; a block is gone with the last chunk that has it. Only
so many chunks are kept; the oldest are told as gone before their time, since nobody would notice when they go. One
owner: the engine's scheduler, which never waits.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvstore.model.prefix import Keys

SWEEP_EVERY_S = 10.0
CHUNKS_LIMIT = 1 << 16
EXPECTED_S = 10.0
"""As long as a store may take; what does not come meanwhile is not told of."""
EXPECTED_LIMIT = 4096
"""Requests; chunks of a further one are not waited for."""
LOOKS_AT_ONCE = 8
"""For so many requests a step looks whether the next chunk has come, some 20 µs each: the time is the scheduler's."""

Look = Callable[[Sequence[Keys]], int | None]
"""Leading chunks of these that the own node has of all groups, without waiting; None = there is no node to ask."""
Name = Any
"""A block's name in the engine."""


@dataclass(slots=True)
class _Run:
    """Consecutive chunks of one prompt, the same ones of each group, and the names of their blocks in order."""

    groups: tuple[Keys, ...]
    names: list[Name]

    @property
    def names_per_chunk(self) -> int:
        return len(self.names) // len(self.groups[0])


@dataclass(slots=True)
class _Expected:
    """Chunks from the start of a prompt on, the same ones of each group; the first `present` are there."""

    groups: tuple[Keys, ...]
    present: int
    owner: Any
    until_s: float


class ToldChunks:
    """What one engine has told of. `submit` runs a call in a thread."""

    def __init__(
        self,
        look: Look,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        *,
        limit: int = CHUNKS_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._submit = submit
        self._limit = limit
        self._clock = clock
        self._runs: dict[int, _Run] = {}
        self._known: set[bytes] = set()
        """Keys of the first group's chunks in all runs."""
        self._names: Counter[Name] = Counter()
        """In how many chunks a block is: two prompts may part within a chunk."""
        self._expected: OrderedDict[str, _Expected] = OrderedDict()
        """By request; the one whose turn it is first."""
        self._numbers = itertools.count()
        self._gone: list[Name] = []
        self._sweep: Future[dict[int, int]] | None = None
        self._sweep_at_s = clock() + SWEEP_EVERY_S

    def __len__(self) -> int:
        return len(self._known)

    def expect(self, request_id: str, groups: Sequence[Keys], present: int, owner: Any) -> None:
        """Chunks of a request, from its start on, of which the first `present` are there: more may come.

        Of several such words on a request, in any order, the one counts that names the most chunks.
        """
        known = self._expected.pop(request_id, None)
        if known is not None and len(known.groups[0]) > len(groups[0]):
            self._expected[request_id] = known
        elif present < len(groups[0]) and len(self._expected) < EXPECTED_LIMIT:
            self._expected[request_id] = _Expected(tuple(groups), present, owner, self._clock() + EXPECTED_S)

    def arrived(self) -> Iterator[tuple[Any, tuple[Keys, ...]]]:
        """(owner, chunks from the start of its prompt on that are there) where there are more than the last time."""
        for _ in range(min(LOOKS_AT_ONCE, len(self._expected))):
            request_id, each = self._expected.popitem(last=False)
            present = each.present
            if self._look([keys.slice(present, present + 1) for keys in each.groups]):
                each.present = self._look(each.groups) or 0  # the first ones may have gone meanwhile
            if each.present < len(each.groups[0]) and self._clock() < each.until_s:
                self._expected[request_id] = each
            if each.present > present:
                yield each.owner, tuple(keys.slice(0, each.present) for keys in each.groups)

    def new(self, keys: Keys) -> int:
        """Place of the first chunk that nobody was told of; what lies behind it counts as not told either."""
        return next((place for place, key in enumerate(keys) if key not in self._known), len(keys))

    def add(self, groups: Sequence[Keys], names: Sequence[Name]) -> None:
        """These chunks are told of. `names`: of their blocks in order, as many a chunk."""
        if not len(groups[0]):
            return
        self._runs[next(self._numbers)] = _Run(tuple(groups), list(names))
        self._names.update(names)
        self._known.update(groups[0])
        while len(self._known) > self._limit and len(self._runs) > 1:
            self._cut(next(iter(self._runs)), 0)

    def clear(self) -> None:
        """None of it is of use any more, nor what is expected."""
        self._expected.clear()
        for number in list(self._runs):
            self._cut(number, 0)

    def take_gone(self) -> list[Name]:
        """Names of blocks that are gone, found since the last call. Begins a sweep where it is time for one."""
        if self._sweep is not None and self._sweep.done():
            for number, present in self._sweep.result().items():
                self._cut(number, present)
            self._sweep, self._sweep_at_s = None, self._clock() + SWEEP_EVERY_S
        if self._sweep is None and self._runs and self._clock() >= self._sweep_at_s:
            runs = {number: run.groups for number, run in self._runs.items()}
            self._sweep = self._submit(lambda: self._shortened(runs))
        gone, self._gone = self._gone, []
        return gone

    def _shortened(self, runs: Mapping[int, Sequence[Keys]]) -> dict[int, int]:
        """In a thread: runs that are not there whole, and how many chunks of each still are."""
        found: dict[int, int] = {}
        for number, groups in runs.items():
            present = self._look(groups)
            if present is None:  # nobody to ask: nothing is known to be gone
                break
            if present < len(groups[0]):
                found[number] = present
        return found

    def _cut(self, number: int, present: int) -> None:
        run = self._runs.pop(number, None)
        if run is None:
            return
        kept = present * run.names_per_chunk
        for name in run.names[kept:]:
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]
                self._gone.append(name)
        self._known.difference_update(run.groups[0].slice(present, len(run.groups[0])))
        if present:
            self._runs[number] = _Run(tuple(keys.slice(0, present) for keys in run.groups), run.names[:kept])
