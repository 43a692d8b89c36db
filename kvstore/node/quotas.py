"""Quotas: how many bytes of each tier a tenant or a model keeps at least, and takes at most. Pure.

All namespaces that one quota names share it. What has no quota shares the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigurationError
from kvstore.model.namespace import Namespace
from kvstore.model.values import Tier as TierName
from kvstore.node.tier import Bounds, Tier
from kvstore.setting_types import QuotaBytes


@dataclass(frozen=True, slots=True)
class Quota:
    """`name`: a tenant, or the model of namespaces without a tenant."""

    name: str
    dram: Bounds
    ssd: Bounds


def quotas_of(settings: Sequence[QuotaBytes]) -> tuple[Quota, ...]:
    """Quotas as they stand in the settings."""
    return tuple(
        Quota(name, Bounds(*spans.get("dram", (0, 0))), Bounds(*spans.get("ssd", (0, 0)))) for name, spans in settings
    )


class Quotas:
    """Gives each namespace its group (0: no quota) and each tier the bounds of its groups.

    Raises ConfigurationError for names that occur twice and minima that do not fit into a tier together.
    """

    def __init__(self, quotas: Sequence[Quota], tiers: Sequence[Tier]) -> None:
        self._groups = {quota.name: number for number, quota in enumerate(quotas, 1)}
        if len(self._groups) < len(quotas):
            raise ConfigurationError("quotas: a name occurs twice; write its tiers in one entry")
        for tier in tiers:
            bounds = {
                number: quota.dram if tier.name is TierName.DRAM else quota.ssd
                for number, quota in enumerate(quotas, 1)
            }
            least = sum(each.min_bytes for each in bounds.values())
            if least > tier.allocator.arena_bytes:
                raise ConfigurationError(
                    f"quotas: the minima of {tier.name.name} are {least} bytes together, "
                    f"but it has {tier.allocator.arena_bytes}"
                )
            tier.bounds = bounds

    def group_of(self, namespace: Namespace) -> int:
        """Number of the namespace's quota group."""
        return self._groups.get(namespace.tenant or namespace.model, 0)
