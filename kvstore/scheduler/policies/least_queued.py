"""The worker with the least to do: fewest queued prompt tokens, then least recently picked.

The choice for decode workers, which are handed the pages wherever they lie.
"""

from __future__ import annotations

from kvstore.scheduler import ClusterView, Decision, Request
from kvstore.scheduler.policies import Criterion, rank

_CRITERIA = (
    Criterion("fewest queued tokens", lambda candidate: candidate.queued_tokens),
    Criterion("least recently picked", lambda candidate: candidate.last_picked),
)


class LeastQueued:
    """Stateless."""

    name = "least_queued"

    def pick(self, request: Request, view: ClusterView) -> Decision:
        """See the module's docstring."""
        return rank(self.name, view, _CRITERIA)
