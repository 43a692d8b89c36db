"""Our pool beside other stores, in the same minutes on the same machine: a store process and a client process each.

The client writes pieces under fresh keys, reads them back in random order and compares every byte. Rounds go ours,
peer, ours, peer, and a memcpy of the same pieces. `ratio` is the median over the rounds of (their time / our time);
all rounds are in `runs` (seconds). `memcpy_ratio` is the same for the memcpy, about the most that a copy can get (in
paged tensors it goes page by page from Python, which is slower). What is compared with what:

    mooncake      Mooncake Store over TCP, put and get; ours through shared memory, which is another way
    lmcache       LMCache's server, which copies by POSIX shared memory between its memory and an engine's paged
                  tensors; ours through shared memory out of and into such tensors. Look-ups of 64 chunks: `lookup` goes
                  from tokens to the answer on both sides, `match` starts from keys on ours
    redis         SET and GET over TCP and an MGET, for information; ours through shared memory
    --namespaces  Mooncake Store over TCP on a veth link (root); ours on the same link by the transport that our client
                  picks itself

Our side verifies as it does by default: a read checks its fence, and over a network every checksum; a write makes
checksums. The peers make and check none. `make peers` makes their environments. A row whose peer is not there is not
run and the exit status is 3; it is 1 if a row failed. Every round re-uses memory that all have used before: the first
round, which does not count, is the slow one of a store that does not touch its memory ahead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from measure import percentile, ratio, report
from peers.environments import LMCACHE, MOONCAKE, PEERS, REDIS, Peer
from peers.hosts import missing, two_hosts
from peers.sides import Place, Side, start_ours, start_peer

from kvstore.analytics.processes import Children
from kvstore.errors import KvStoreError, Unreachable

CALLS = 20
FAILED, NOT_RUN = 1, 3
VERBS = ("write", "read")


@dataclass(frozen=True, slots=True)
class Row:
    """One workload against one peer. `targets`: the ratio wanted, by verb. `asks`: keys of a look-up, by verb."""

    peer: Peer
    count: int
    piece_bytes: int
    targets: Mapping[str, float] = field(default_factory=dict)
    asks: Mapping[str, int] = field(default_factory=dict)
    paged: bool = False


LARGE, SMALL = (256, 2 << 20), (1024, 128 << 10)
SAME_HOST = (
    Row(MOONCAKE, *LARGE, {"read": 6.0, "write": 5.0}, {"match": 64}),
    Row(MOONCAKE, *SMALL, {"read": 6.0, "write": 5.0}, {"match": 1000}),
    Row(LMCACHE, *LARGE, {"read": 4.0, "write": 3.0, "lookup": 20.0}, {"lookup": 64, "match": 64}, paged=True),
    Row(LMCACHE, *SMALL, {"read": 4.0, "write": 3.0, "lookup": 20.0}, {"lookup": 64, "match": 64}, paged=True),
    Row(REDIS, 64, 2 << 20),
    Row(REDIS, *SMALL, {}, {"match": 1000}),
)
TWO_HOSTS = (Row(MOONCAKE, *LARGE, {"read": 1.0}), Row(MOONCAKE, *SMALL, {"read": 1.0}))


class Rounds:
    """Seconds of each side and of the memcpy, by verb, round by round; medians of the round for look-ups."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.paths: set[str] = set()
        self.worst: dict[str, dict[str, list[float]]] = {}

    def add(self, verb: str, side: str, seconds: float) -> None:
        """One run."""
        self.seconds.setdefault(verb, {}).setdefault(side, []).append(seconds)

    def add_calls(self, verb: str, side: str, seconds: list[float]) -> None:
        """One round of look-ups."""
        self.add(verb, side, statistics.median(seconds))
        self.worst.setdefault(verb, {}).setdefault(side, []).append(percentile(seconds, 0.99))


def run_round(row: Row, both: Mapping[str, Side], rounds: Rounds, *, linked: bool) -> None:
    """Each verb once a side, ours first; `linked`: what was read must have come over the link."""
    for verb in VERBS:
        for name, side in both.items():
            answer = side.ask(verb)
            rounds.add(verb, name, answer["seconds"])
            if verb == "read" and name == "ours":
                rounds.paths.add(answer["path"])
            if verb == "read" and linked and answer["received_bytes"] < row.count * row.piece_bytes:
                raise Unreachable(f"{name} read less over the link than it delivered: {answer['received_bytes']}")
        rounds.add(verb, "memcpy", both["ours"].ask("copy")["seconds"])
    for verb, keys in row.asks.items():
        for name, side in both.items():
            theirs = "lookup" if name == "peer" else verb
            rounds.add_calls(verb, name, side.ask(theirs, keys=keys, calls=CALLS)["seconds"])
    for side in both.values():
        side.ask("forget")


def run(row: Row, place: Place, children: Children, count: int) -> None:
    """Start both sides, do `count` rounds after one that does not count, print."""
    work = ["--count", str(row.count), "--piece-bytes", str(row.piece_bytes)]
    both = {
        "ours": start_ours(children, place, [*work, *(["--paged"] if row.paged else [])]),
        "peer": start_peer(children, row.peer, place, work),
    }
    linked = bool(place.client_inside)
    run_round(row, both, Rounds(), linked=linked)
    rounds = Rounds()
    for _ in range(count):
        run_round(row, both, rounds, linked=linked)
    versions = both["ours"].versions | both["peer"].versions
    tell(row, rounds, versions, linked)


def tell(row: Row, rounds: Rounds, versions: dict[str, str], linked: bool) -> None:
    """One line a verb."""
    for verb, seconds in rounds.seconds.items():
        ours, peer = seconds["ours"], seconds["peer"]
        common: dict[str, Any] = {
            "bench": "peers",
            "op": verb,
            "against": f"peer:{row.peer.label}",
            "condition": "warm",
            "hosts": "two network namespaces" if linked else "one",
            "transport": "+".join(sorted(rounds.paths)),
            "against_transport": row.peer.way,
            "chunk_bytes": row.piece_bytes,
            "paged": row.paged,
            "versions": versions,
            "runs": seconds,
            "ratio": ratio(ours, peer),
        }
        if verb in row.targets:
            common |= {"target_ratio": row.targets[verb], "met": common["ratio"] >= row.targets[verb]}
        if verb in row.asks:
            worst = {name: statistics.median(of) * 1e6 for name, of in rounds.worst[verb].items()}
            report(
                **common,
                keys=row.asks[verb],
                p50_us=statistics.median(ours) * 1e6,
                p99_us=worst["ours"],
                against_p50_us=statistics.median(peer) * 1e6,
                against_p99_us=worst["peer"],
            )
        else:
            total = row.count * row.piece_bytes
            report(
                **common,
                count=row.count,
                checksum=verb == "write" or linked,
                bytes_per_second=total / statistics.median(ours),
                against_bytes_per_second=total / statistics.median(peer),
                memcpy_bytes_per_second=total / statistics.median(seconds["memcpy"]),
                ratio_to_memcpy=ratio(ours, seconds["memcpy"]),
                memcpy_ratio=ratio(seconds["memcpy"], peer),
            )


def attempt(row: Row, options: argparse.Namespace) -> int:
    """Run one row; 0, or the exit status that it asks for."""
    reason = row.peer.missing() or (missing() if options.namespaces else "")
    if reason:
        report(
            bench="peers", op="not_run", against=f"peer:{row.peer.label}", chunk_bytes=row.piece_bytes, reason=reason
        )
        return NOT_RUN
    try:
        with Children() as children:
            place = two_hosts(children) if options.namespaces else Place()
            run(row, place, children, options.rounds)
    except KvStoreError as exc:
        report(
            bench="peers", op="failed", against=f"peer:{row.peer.label}", chunk_bytes=row.piece_bytes, reason=str(exc)
        )
        return FAILED
    return 0


def worst_status(statuses: Sequence[int]) -> int:
    """A row that failed outweighs one that was not run."""
    return FAILED if FAILED in statuses else max(statuses, default=0)


def main() -> None:
    """Parse and run all rows, or those of one peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespaces", action="store_true", help="two hosts instead of one")
    parser.add_argument("--only", choices=[peer.name for peer in PEERS])
    parser.add_argument("--rounds", type=int, default=5, choices=range(3, 100), metavar="N", help="at least 3")
    options = parser.parse_args()
    rows = TWO_HOSTS if options.namespaces else SAME_HOST
    sys.exit(worst_status([attempt(row, options) for row in rows if options.only in (None, row.peer.name)]))


if __name__ == "__main__":
    main()
