"""vLLM stores to and loads from the pool: `KVStoreConnector`, for `--kv-transfer-config`.

    {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "engine_adapter.vllm", "kv_role": "kv_both",
     "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"node": "127.0.0.1:7420"}}

The class that vLLM makes twice is only a switch: in the engine core it is a `SchedulerHalf`, in each worker a
`WorkerHalf`. Both translate between vLLM's calls and the engine-neutral halves (`requests`, `transfers`); what happens
when is decided there. Tested with vLLM 0.32.x, which is checked at start.

Not here: Mamba and other states, context parallelism, draft models' KV; such models are refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as vllm_version

from engine_adapter.vllm.options import Mode, Options, check_policy, check_release

check_release(vllm_version)

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

from engine_adapter.plans import StepPlan, StepReport  # noqa: E402
from engine_adapter.vllm.metrics import PoolMetrics, PoolStats  # noqa: E402
from engine_adapter.vllm.model import kv_groups  # noqa: E402
from engine_adapter.vllm.scheduler import SchedulerHalf  # noqa: E402
from engine_adapter.vllm.worker import WorkerHalf  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class PlanMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A rank's report on its way to the scheduler."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join another rank's."""
        return ReportMetadata(self.report.add(other.report))


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector that vLLM loads; see the module."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """ConfigurationError for options, models and policies that are not supported."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        check_policy(transfer.kv_load_failure_policy)
        options = Options.parse(transfer.kv_connector_extra_config)
        groups, cuts = kv_groups(vllm_config, kv_cache_config, options)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, groups, options)
            for group in groups:
                logger.info("KV of %s, %d tokens a chunk", group.namespace.title, group.chunk_tokens)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, groups, cuts, options)

    @property
    def requires_kv_delivery(self) -> bool:
        """A chunk that was not stored is a miss later, no more."""
        return False

    def shutdown(self) -> None:
        """End threads and sessions."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    # --- scheduler ---------------------------------------------------------------------------------------

    def _planner(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler's call on a worker's connector"
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        """See KVConnectorBase_V1."""
        self._planner().begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See KVConnectorBase_V1."""
        return self._planner().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See KVConnectorBase_V1."""
        self._planner().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See KVConnectorBase_V1."""
        return PlanMetadata(self._planner().step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See KVConnectorBase_V1."""
        if connector_output.invalid_block_ids:
            self._planner().evict(connector_output.invalid_block_ids, self._kv_cache_manager)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            self._planner().reported(meta.report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See KVConnectorBase_V1."""
        return self._planner().finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SupportsHMA."""
        return self._planner().finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        """See KVConnectorBase_V1."""
        return self._planner().take_events()

    def reset_cache(self) -> bool | None:
        """See KVConnectorBase_V1; what is in the pool is not removed, this engine only does not find it any more."""
        self._planner().reset()
        return True

    # --- worker ------------------------------------------------------------------------------------------

    def _mover(self) -> WorkerHalf:
        assert self._worker is not None, "a worker's call on a scheduler's connector"
        return self._worker

    def _plan(self) -> StepPlan:
        meta = self._get_connector_metadata()
        return meta.plan if isinstance(meta, PlanMetadata) else StepPlan()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See KVConnectorBase_V1."""
        self._mover().register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See KVConnectorBase_V1."""
        if isinstance(kv_connector_metadata, PlanMetadata):
            self._mover().transfers.before_step(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See KVConnectorBase_V1."""
        self._mover().transfers.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See KVConnectorBase_V1."""
        self._mover().transfers.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """See KVConnectorBase_V1."""
        self._mover().transfers.save_layer(self._plan(), layer_name)

    def wait_for_save(self) -> None:
        """See KVConnectorBase_V1."""
        self._mover().transfers.after_step(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See KVConnectorBase_V1."""
        ended = self._mover().ended()
        return KVConnectorTransferResults(set(ended.sent), set(ended.received), set(ended.failed & ended.received))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See KVConnectorBase_V1; `get_transfer_results` says the same and more."""
        ended = self._mover().ended()
        return set(ended.sent) or None, set(ended.received) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See KVConnectorBase_V1."""
        return self._mover().take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See KVConnectorBase_V1."""
        report = self._mover().transfers.report()
        return ReportMetadata(report) if report else None

    # --- figures -----------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PoolStats | None:
        """See KVConnectorBase_V1."""
        half = self._scheduler or self._worker
        counts = half.take_counts() if half is not None else {}
        return PoolStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        """See KVConnectorBase_V1."""
        return PoolStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolMetrics:
        """See KVConnectorBase_V1."""
        return PoolMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Calls from within the model are needed only where loads or stores go layer by layer."""
        return Mode.LAYERWISE in (extra_config.get("load"), extra_config.get("store"))


if KVStoreConnector.__name__ not in KVConnectorFactory._registry:
    # MultiConnector finds the figures of its children by name in vLLM's registry.
    KVConnectorFactory.register_connector(KVStoreConnector.__name__, __name__, KVStoreConnector.__name__)

__all__ = ["KVStoreConnector"]
