"""Which pool an engine of vLLM uses: that of a node, or one inside its only process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_adapter.pool_access import PoolAccess, embedded, to_node
from engine_adapter.vllm_options import Options
from kvstore.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def open_pool(config: VllmConfig, options: Options, role: str) -> PoolAccess:
    """The way to the pool; connects to nothing yet.

    ConfigurationError where several processes would each have a pool of their own.
    """
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if options.node or options.metadata:
        return to_node(
            options.node,
            options.metadata,
            transport=options.transport,
            staging=options.staging,
            name=f"vllm {role}",
            host_id=options.host_id,
        )
    if parallel.world_size > 1 or parallel.distributed_executor_backend not in (None, "uni"):
        raise ConfigurationError(
            f"a pool inside the process serves engines of one process, this one has {parallel.world_size} worker(s) "
            f"run by {parallel.distributed_executor_backend}; start `kvstore up` and give its node by `node`"
        )
    return embedded(str(transfer.engine_id), options.dram)
