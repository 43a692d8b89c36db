"""The longest cached prefix wins.

In this order: most leading chunks on the node of the worker's own host (read without a network); most on any
node (pulled instead of computed; it differs between workers only where their rectangles do); fewest queued
prompt tokens; least recently picked. The size of a cache is never a criterion: a prompt that nobody has goes to
the worker with the least to do. Its known weakness is that a popular prefix draws all its requests to one node.
"""

from __future__ import annotations

from kvstore.scheduler import ClusterView, Decision, Request
from kvstore.scheduler.policies import Criterion, rank

_CRITERIA = (
    Criterion("longest prefix on its own node", lambda candidate: -candidate.local_run),
    Criterion("longest prefix in the pool", lambda candidate: -candidate.pool_run),
    Criterion("fewest queued tokens", lambda candidate: candidate.queued_tokens),
    Criterion("least recently picked", lambda candidate: candidate.last_picked),
)


class LongestPrefix:
    """Stateless."""

    name = "longest_prefix"

    def pick(self, request: Request, view: ClusterView) -> Decision:
        """See the module's docstring."""
        return rank(self.name, view, _CRITERIA)
