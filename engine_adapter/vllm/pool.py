"""Which pool an engine of vLLM uses: that of a node, or one of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_adapter.pool_access import PoolAccess, embedded, to_node
from engine_adapter.private_node import private_node
from engine_adapter.vllm.options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def open_pool(config: VllmConfig, options: Options, role: str) -> PoolAccess:
    """The way to the pool. Without an address: a pool inside the engine, of its only process or of a node of its own.

    ConfigurationError where that has no memory or does not start.
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
            verify=options.verify,
        )
    if parallel.world_size == 1 and parallel.distributed_executor_backend in (None, "uni"):
        return embedded(str(transfer.engine_id), options.dram, verify=options.verify)
    return private_node(str(transfer.engine_id), options.dram, verify=options.verify)
