"""What the process-wide metrics gained since a moment: tests in one process add up in them."""

from __future__ import annotations

from kvstore import metrics


def sample(name: str, **labels: str) -> float:
    """A sample of /metrics now; 0 where there is none yet. `kvstore_` is left out of names."""
    return metrics.REGISTRY.get_sample_value(f"kvstore_{name}", labels) or 0.0


class Samples:
    """All samples as they were when it was made."""

    def __init__(self) -> None:
        self._before = self._all()

    @staticmethod
    def _all() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (each.name, frozenset(each.labels.items())): each.value
            for family in metrics.REGISTRY.collect()
            for each in family.samples
        }

    def gained(self, name: str, **labels: str) -> float:
        """How much a counter has grown."""
        return sample(name, **labels) - self._before.get((f"kvstore_{name}", frozenset(labels.items())), 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        """What grew of a counter with one label, by its values."""
        grown: dict[str, float] = {}
        for (each, labels), value in self._all().items():
            if each == f"kvstore_{name}" and value != self._before.get((each, labels), 0.0):
                grown[dict(labels)[label]] = value - self._before.get((each, labels), 0.0)
        return grown
