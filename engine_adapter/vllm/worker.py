"""The connector's half in each of vLLM's workers: one rank's tensors, and what moves between them and the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine_adapter.cuts import Cut
from engine_adapter.plans import KvGroup
from engine_adapter.session import Binding, PoolSession
from engine_adapter.transfers import Ended, How, RankGroup, Transfers
from engine_adapter.vllm.model import endpoints
from engine_adapter.vllm.options import Mode, Options
from engine_adapter.vllm.pool import open_pool
from kvstore.errors import LayoutMismatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class WorkerHalf:
    """One rank. `register` comes before all else."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        groups: Sequence[KvGroup],
        cuts: Sequence[Cut],
        options: Options,
    ) -> None:
        self._kv_cache = kv_cache
        self._groups = tuple(groups)
        self._cuts = tuple(cuts)
        self._options = options
        self._pool = open_pool(config, options, "worker")
        self._transfers: Transfers | None = None
        self._bad_blocks: frozenset[int] = frozenset()

    @property
    def transfers(self) -> Transfers:
        """What this rank moves."""
        assert self._transfers is not None, "register_kv_caches comes first"
        return self._transfers

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The rank's KV tensors by layer name. LayoutMismatch where they do not fit the model's description."""
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
        from vllm.model_executor.models.utils import extract_layer_index

        tp_rank, pp_rank = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
        ranks = []
        for group, cut, described in zip(self._groups, self._cuts, self._kv_cache.kv_cache_groups, strict=True):
            held, writes = cut.held(tp_rank, pp_rank)
            missing = [name for name in described.layer_names if name not in tensors]
            if missing:
                raise LayoutMismatch(f"vLLM registered no KV tensor for {', '.join(missing)}")
            names = sorted(described.layer_names, key=extract_layer_index)
            number = group.geometry.rectangles.index(held)
            binding = Binding(group.geometry, number, self._options.secret, self._options.checksums)
            session = PoolSession(group.namespace, self._pool.client, binding)
            session.open()
            own = {name: tensors[name] for name in names}
            make = endpoints(group, held, own)
            device = next(iter(own.values())).device
            ranks.append(RankGroup(group, session, held, writes, make, device, tuple(names)))
        self._transfers = Transfers(
            ranks,
            How(
                self._options.load_deadline_ms / 1000,
                self._options.store_deadline_ms / 1000,
                layerwise=self._options.load is Mode.LAYERWISE,
                async_stores=self._options.store is not Mode.SYNC,
                layerwise_stores=self._options.store is Mode.LAYERWISE,
            ),
        )

    def ended(self) -> Ended:
        """What ended since the last call; bad blocks are kept for `take_bad_blocks`.

        With several KV groups a block id says nothing of its group: then the whole request is told as failed, and no
        block. With one, blocks say it more precisely, and the request is not told.
        """
        ended = self.transfers.ended()
        if len(self._groups) > 1:
            return ended
        self._bad_blocks |= ended.bad_blocks
        return Ended(ended.received, frozenset(), ended.bad_blocks, ended.sent)

    def take_bad_blocks(self) -> set[int]:
        """Blocks that hold nothing although they were to be loaded."""
        blocks, self._bad_blocks = self._bad_blocks, frozenset()
        return set(blocks)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        return self._transfers.take_counts() if self._transfers is not None else {}

    def close(self) -> None:
        """End threads and the way to the pool."""
        if self._transfers is not None:
            self._transfers.close()
        self._pool.close()
