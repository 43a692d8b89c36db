"""Policies, one a module. `rank` is what they share: an order made of named criteria gives the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import NotFound
from kvstore.scheduler import Candidate, ClusterView, Decision


@dataclass(frozen=True, slots=True)
class Criterion:
    """One step of an order: the candidate with the smallest `cost` wins; `title` says what that means."""

    title: str
    cost: Callable[[Candidate], int]


def rank(policy: str, view: ClusterView, criteria: Sequence[Criterion]) -> Decision:
    """The first candidate by the criteria in turn, then by worker id, so that equal views give equal answers.

    A reason names the first criterion that tells a candidate from the chosen one. Raises NotFound for an empty
    view.
    """
    if not view.candidates:
        raise NotFound("no live worker for this role; workers register with SchedulerService.Report")
    chosen = min(view.candidates, key=lambda one: (*(step.cost(one) for step in criteria), one.worker.worker_id))
    reasons = tuple(_reason(candidate, chosen, view, criteria) for candidate in view.candidates)
    return Decision(policy, chosen, reasons)


def _reason(candidate: Candidate, chosen: Candidate, view: ClusterView, criteria: Sequence[Criterion]) -> str:
    if candidate is chosen:
        if len(view.candidates) == 1:
            return "chosen: the only live worker"
        step = _deciding(view, chosen, criteria)
        return f"chosen: {step.title}" if step else "chosen: equal to the others, first by id"
    for step in criteria:
        if step.cost(candidate) != step.cost(chosen):
            return f"not the {step.title}"
    return "equal, later by id"


def _deciding(view: ClusterView, chosen: Candidate, criteria: Sequence[Criterion]) -> Criterion | None:
    """The criterion after which only the chosen one was left."""
    left = [candidate for candidate in view.candidates if candidate is not chosen]
    for step in criteria:
        left = [candidate for candidate in left if step.cost(candidate) == step.cost(chosen)]
        if not left:
            return step
    return None
