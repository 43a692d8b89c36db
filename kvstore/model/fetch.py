"""What to fetch over a network of one stored shard, and how it lies in staging. Pure values, no I/O.

A read plan says which bytes of a shard are wanted; this says which bytes to ask for, because a transport pays for
each descriptor and does long runs best. Behind a shard's payload lies its checksum table, which is fetched in full:
only a whole table can be compared with its hash. A read in groups of layers has it with the first and asks no more.

    stored    [layer][page][all heads of the shard]  | table      staged    [layer][page][staged heads] | table
                     +----------+                                           +-----+
                     |  ######  |  a run a row, or                 ->       |#####|  dense
                     |  ######  |  these layers with all heads              |#####|
                     +----------+                                           +-----+

Descriptors asked for, runs that follow one another being joined (so the table is none of its own behind a run that
ends with the payload):

    wanted of the shard               what is fetched                                      descriptors
    everything                        the shard with its table                             1
    some layers, all heads            these layers · the table                             2, 1 with the last layer
    some heads, a row's run is long   these heads of each (layer, page) row · the table    layers x pages + 1, one less
                                                                                           with the last layer and head
    some heads, a row's run is short  these layers with all heads · the table              2, 1 with the last layer

A plan never has more bytes than the shard with its table. Sending them and the check are the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from kvstore.model import checksum
from kvstore.model.layout import PageLayout, Rectangle
from kvstore.model.reshard import ByteRange, ShardPart, Slices, slices_of

LEAST_RUN_BYTES = 64 << 10
"""Below it a descriptor costs more than the bytes of the neighbouring heads that it saves."""

_PLANS_KEPT = 256
"""Few, because one plan has up to layers x pages runs."""


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """`runs` of the stored shard (payload and table) fill a staged block of `staged_bytes` densely.

    `staged` is the rectangle whose payload lies at the start of the block, `layout.shape(staged)`; it holds the
    wanted part and perhaps more heads. The shard's whole table follows at `table_offset`, or nothing.
    """

    part: ShardPart
    runs: tuple[ByteRange, ...]
    """Ascending in source and target; source = the shard's bytes, target = the staged block."""
    staged: Rectangle
    staged_bytes: int
    table_offset: int
    staged_shape: tuple[int, int, int, int]
    wanted_slices: Slices
    """Index of the wanted part in the staged payload, seen as `staged_shape`."""
    table_slices: tuple[slice, slice]
    """Index of the checksums of `staged` in the table, seen as (layers, heads) of the stored shard."""


@lru_cache(maxsize=_PLANS_KEPT)
def plan_fetch(
    layout: PageLayout, part: ShardPart, least_run_bytes: int = LEAST_RUN_BYTES, with_table: bool = True
) -> FetchPlan:
    """What to ask for to get `part`. A run of some heads shorter than `least_run_bytes` is never asked for.

    LayoutMismatch where the part does not lie in its shard, or the shard in the layout. Plans are cached values.
    """
    layout.check_rectangle(part.stored)
    stored, common = part.stored, part.common
    slices_of(stored, common)  # refuses a part that lies elsewhere
    staged = common
    if common.heads * layout.head_page_bytes < least_run_bytes:
        staged = Rectangle(common.layer_start, common.layer_stop, stored.head_start, stored.head_stop)
    table_bytes, table_offset = checksum.table_bytes(stored) if with_table else 0, layout.payload_bytes(staged)
    table = (ByteRange(layout.payload_bytes(stored), table_offset, table_bytes),) if with_table else ()
    runs = _joined((*ShardPart(part.number, stored, staged).byte_ranges(layout, staged), *table))
    layers, _, heads, _ = slices_of(stored, staged)
    return FetchPlan(
        part,
        runs,
        staged,
        table_offset + table_bytes,
        table_offset,
        layout.shape(staged),
        slices_of(staged, common),
        (layers, heads),
    )


def _joined(runs: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Ascending runs without a gap in the target: those that follow one another in the source too are one."""
    joined: list[ByteRange] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.source_stop == run.source_offset:
            joined[-1] = ByteRange(last.source_offset, last.target_offset, last.length_bytes + run.length_bytes)
        else:
            joined.append(run)
    return tuple(joined)
