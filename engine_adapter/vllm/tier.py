"""The pool as a secondary tier of vLLM's own offloading: vLLM copies between GPU and host, we move its host chunks.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
       "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1073741824, "canonical_layout": true,
       "secondary_tiers": [
         {"type": "KVStoreTier", "module_path": "engine_adapter.vllm", "node": "127.0.0.1:7420"}]}}

It runs in vLLM's scheduler process and never blocks there. Chunks are named by vLLM's block hashes, so only hashes that
are the same in all processes and that nobody can forge are taken: sha256 ones. They name LoRA adapters by name and not
by content; who reloads adapters under one name uses `KVStoreConnector`. A tier is told the model's name only: what is
changed of it at the start (`hf_overrides`, `--quantization`) is told by `revision`. With `canonical_layout` engines of
other numbers of ranks read the same rows, else only equal ones.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm import __version__ as vllm_version

from engine_adapter.vllm.options import Options, check_release

check_release(vllm_version)

from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob  # noqa: E402
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

from engine_adapter.identity import weights_digest  # noqa: E402
from engine_adapter.looks import Looks  # noqa: E402
from engine_adapter.pool_access import embedded, to_node  # noqa: E402
from engine_adapter.rows import RowPool, row_layout  # noqa: E402
from engine_adapter.session import Binding, PoolSession  # noqa: E402
from kvstore.errors import ConfigurationError  # noqa: E402
from kvstore.model.namespace import Namespace  # noqa: E402

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger(__name__)
VLLM_DECIDES = ("load", "store", "save_decode", "chunk_tokens", "least_tokens")
"""Options of the connector that vLLM's offloading has of its own."""
NAME_BYTES = 32 + 4
"""A SHA-256 and the number of its KV group. Shorter hashes are seeded by the process, or can be forged."""


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """The tier that vLLM makes; its keys besides type and module_path are those of `options.Options`."""

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.HOST

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **extra: Any,
    ) -> None:
        """ConfigurationError for an unknown key, LayoutMismatch for rows that cannot be stored."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        options = Options.parse(extra, without=VLLM_DECIDES)
        self._refused: list[int] = []
        """Jobs that were not begun."""
        self._told = False
        rows = np.asarray(primary_kv_view).view(np.uint8)
        namespace = namespace_of(offloading_spec, int(rows.shape[1]), options)
        logger.info("host chunks of %s, %d bytes each", namespace.title, rows.shape[1])
        self._access = (
            to_node(
                options.node,
                options.metadata,
                transport=options.transport,
                staging=options.staging,
                name="vllm tier",
                host_id=options.host_id,
                verify=options.verify,
            )
            if options.node or options.metadata
            else embedded(f"tier of {offloading_spec.config.engine_id}", options.dram, verify=options.verify)
        )
        session = PoolSession(
            namespace, self._access.client, Binding(secret=options.secret, checksums=options.checksums)
        )
        session.open()
        self._looks = Looks([session], others=bool(options.metadata), wait_s=options.lookup_wait_ms / 1000)
        self._pool = RowPool(
            namespace,
            session,
            self._looks,
            rows,
            secret=options.secret,
            load_deadline_s=options.load_deadline_ms / 1000,
            store_deadline_s=options.store_deadline_ms / 1000,
        )

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See SecondaryTierManager."""
        if len(key) != NAME_BYTES:
            self._refuse()
            return LookupResult.MISS
        found = self._pool.find(bytes(key), req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """See SecondaryTierManager."""
        names, places = _named(job_metadata)
        if any(len(name) != NAME_BYTES for name in names):
            self._refuse()
            self._refused.append(job_metadata.job_id)
            return
        self._pool.store(job_metadata.job_id, names, places)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """See SecondaryTierManager."""
        self._pool.load(job_metadata.job_id, *_named(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See SecondaryTierManager."""
        refused, self._refused = self._refused, []
        return [JobResult(job, False) for job in refused] + [
            JobResult(
                end.job,
                end.whole,
                successful_keys=None if end.whole or not end.done else tuple(OffloadKey(name) for name in end.done),
                transfer_time=end.seconds,
                transfer_bytes=end.size_bytes,
            )
            for end in self._pool.ended()
        ]

    def has_pending_work(self) -> bool:
        """See SecondaryTierManager."""
        return self._pool.busy or bool(self._refused)

    def _refuse(self) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "nothing is stored or loaded: this tier needs --prefix-caching-hash-algo sha256 or sha256_cbor"
            )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See SecondaryTierManager."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """See SecondaryTierManager."""
        for request_id in context.new_req_ids:
            self._pool.settled(request_id)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See SecondaryTierManager."""
        self._pool.settled(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """See SecondaryTierManager. The node knows of reads by itself."""

    def drain_jobs(self) -> None:
        """See SecondaryTierManager."""
        self._pool.wait_idle()

    def shutdown(self) -> None:
        """See SecondaryTierManager."""
        self._pool.close()
        self._looks.close()
        self._access.close()


def namespace_of(spec: OffloadingSpec, row_bytes: int, options: Options) -> Namespace:
    """What must be equal for rows to be interchangeable."""
    config = spec.config
    parallel, model = config.parallel, config.model
    description = {
        "groups": [(group.tokens_per_block, group.layer_names) for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "dtype": model.dtype,
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "ranks": None
        if parallel.is_parallelism_agnostic or config.replicated_layout
        else (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
        "device": current_platform.device_type,
        "capability": torch.backends.cpu.get_cpu_capability() if current_platform.device_type == "cpu" else "",
    }
    digest = blake2b(repr(sorted(description.items())).encode(), digest_size=16).hexdigest()
    revision = options.revision or weights_digest(_folder_of(model.name))
    tokens = max(group.tokens_per_block for group in config.groups) * config.cache.blocks_per_chunk
    layout = row_layout(row_bytes, tokens)
    return Namespace(options.model or Path(model.name).name, revision, layout, f"rows/{digest}", options.tenant)


def _folder_of(model: str) -> Path:
    """Of the weights. ConfigurationError where there are several, because a tier is not told of the revision."""
    from engine_adapter.vllm.model import weights_folder

    folder = weights_folder(model, None)
    if not Path(model).exists() and len(list(folder.parent.iterdir())) > 1:
        raise ConfigurationError(
            f"this host has several revisions of {model}, and vLLM does not tell its tiers which one it runs; give "
            "`revision`"
        )
    return folder


def _named(job: TransferJob) -> tuple[list[bytes], list[int]]:
    return [bytes(key) for key in job.keys], [int(place) for place in job.chunk_ids]
