"""What an engine's scheduler half tells its worker half, and what it hears back. Plain values that pickle.

    scheduler half (`requests`)   StepPlan: loads, stores, saves that must let go of their blocks   ──►   every rank
    every rank (`transfers`)      StepReport: loads and stores that ended, and how                  ──►   scheduler half

A plan names each chunk by its key and each block of the engine by its id; None stands for a block that is not there
(outside a window, behind the end of the prompt) or must not be touched (the engine has its content already).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import LayoutMismatch
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers of a model that share one block table: a namespace of their own, with its own hits.

    `geometry`: how all ranks of this engine cut a chunk. `block_tokens`: of the engine's blocks; whole stored pages.
    `window_tokens`: how far back its attention reaches, 0 = to the start of the prompt.
    """

    namespace: Namespace
    geometry: Geometry
    block_tokens: int
    window_tokens: int = 0

    def __post_init__(self) -> None:
        layout = self.namespace.layout
        if self.block_tokens % layout.page_tokens or layout.chunk_tokens % self.block_tokens:
            raise LayoutMismatch(
                f"the engine's blocks of {self.block_tokens} tokens are not whole pages of {layout.page_tokens}, or "
                f"chunks of {layout.chunk_tokens} tokens not whole blocks"
            )

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk."""
        return self.namespace.layout.chunk_tokens

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks that a full chunk fills."""
        return self.chunk_tokens // self.block_tokens

    def needed_from(self, stop_tokens: int) -> int:
        """First token that the next one behind `stop_tokens` attends to."""
        return max(0, stop_tokens + 1 - self.window_tokens) if self.window_tokens else 0


@dataclass(frozen=True, slots=True)
class GroupChunks:
    """Consecutive chunks of one group and the engine's blocks from the first chunk's first token on.

    There may be fewer blocks than the chunks have room for: the last chunk of a prompt.
    """

    keys: Keys
    blocks: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Bring these chunks into these blocks. `is_async`: the engine does not compute on them before it was told."""

    number: int
    request_id: str
    groups: tuple[GroupChunks, ...]
    is_async: bool
    tickets: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Store the chunks from place `first_new` on, and those before it that the node lacks.

    The groups' chunks begin at the start of the prompt.
    """

    number: int
    request_id: str
    groups: tuple[GroupChunks, ...]
    first_new: int
    tickets: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine.

    `let_go`: numbers of store plans whose blocks get new content in this step. `ending`: requests that have ended,
    whose blocks the engine keeps until their stores were told.
    """

    loads: tuple[LoadPlan, ...] = ()
    stores: tuple[StorePlan, ...] = ()
    let_go: tuple[int, ...] = ()
    ending: tuple[str, ...] = ()


@dataclass(slots=True)
class StepReport:
    """What ended on one rank, or, after `add`, on all of them. Every plan is reported once by each rank.

    `stored`: store plan -> ranks that have ended it, `stored_chunks`: leading chunks that are visible after it (the
    least of all ranks, least of the groups). `loaded`: plan -> ranks that are done with it. `failed`: load plans of
    which something was missing.
    """

    stored: Counter[int] = field(default_factory=Counter)
    stored_chunks: dict[int, int] = field(default_factory=dict)
    loaded: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)

    def add(self, other: StepReport) -> StepReport:
        """Join another rank's report into this one."""
        self.stored += other.stored
        self.loaded += other.loaded
        self.failed |= other.failed
        for number, chunks in other.stored_chunks.items():
            self.stored_chunks[number] = min(chunks, self.stored_chunks.get(number, chunks))
        return self

    def __bool__(self) -> bool:
        return bool(self.stored or self.loaded or self.failed)


Figures = Mapping[str, int]
"""Counts by name, as they go into an engine's statistics."""
