"""vLLM's tiered offloading on a machine without a GPU: all of it is vLLM's own but the copies of blocks.

vLLM copies between its blocks and its host chunks on CUDA and alike only. On CPUs both are plain memory, so here a copy
is an assignment, done when it is asked for. An engine takes it by `"spec_name": "CpuTieringSpec", "spec_module_path":
"cpu_offloading"` in its extra configuration, with this folder on its path.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CopyRun, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Assignments(OffloadingWorker):  # type: ignore[misc]
    """The copies of one rank. `region`: the host chunks, one row each."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, *, canonical: bool) -> None:
        self._groups = caches.group_data_refs
        self._blocks = [each.tensor for each in caches.tensors]
        self._region = region
        self._canonical = canonical
        self._ended: list[TransferResult] = []
        self._rows = [
            region.create_next_canonical_view(size) if canonical else region.create_next_worker_view(size)
            for size in map(self._row_bytes, range(len(caches.tensors)))
        ]

    def _row_bytes(self, tensor: int) -> int:
        """How many bytes of a row belong to that tensor."""
        refs = [ref for group in self._groups for ref in group if ref.tensor_idx == tensor]
        if self._canonical:
            return max(ref.mapping.canonical_page_size_bytes for ref in refs)
        return max(ref.page_size_bytes for ref in refs)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See OffloadingWorker."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See OffloadingWorker."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, device: Any, host: Any, *, store: bool) -> bool:
        start_s, size_bytes, at = time.monotonic(), 0, 0
        for refs, count in zip(self._groups, device.group_sizes, strict=True):
            places = list(zip(device.block_ids[at : at + count], host.block_ids[at : at + count], strict=True))
            at += count
            for ref in refs:
                for block, chunk in places:
                    if not store or self._writes(ref, int(chunk)):
                        size_bytes += self._copy_page(ref, int(block), int(chunk), store=store)
        self._ended.append(TransferResult(job_id, True, size_bytes, time.monotonic() - start_s))
        return True

    def _copy_page(self, ref: CanonicalKVCacheRef, block: int, chunk: int, *, store: bool) -> int:
        """One block of one layer; returns its bytes."""
        block_page, row, size_bytes = self._blocks[ref.tensor_idx][block], self._rows[ref.tensor_idx][chunk], 0
        for run in self._runs(ref):
            ours = fragments(block_page, run, run.local_offset, run.local_stride)
            theirs = fragments(row, run, run.canonical_offset, run.canonical_stride)
            target, source = (theirs, ours) if store else (ours, theirs)
            target.copy_(source)
            size_bytes += source.numel()
        return size_bytes

    def _runs(self, ref: CanonicalKVCacheRef) -> Iterator[CopyRun]:
        if self._canonical:
            yield from ref.mapping.runs
        else:
            yield CopyRun(0, 0, ref.page_size_bytes, 1, ref.page_size_bytes, ref.page_size_bytes)

    def _writes(self, ref: CanonicalKVCacheRef, chunk: int) -> bool:
        """Ranks with the same heads take turns, by the chunk's number as in vLLM's own worker."""
        return not self._canonical or bool(ref.mapping.is_writer(chunk))

    def get_finished(self) -> list[TransferResult]:
        """See OffloadingWorker."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """See OffloadingWorker. A job has ended when it was submitted."""

    def shutdown(self) -> None:
        """See OffloadingWorker."""
        self._rows.clear()
        self._region.cleanup()


def fragments(page: Tensor, run: CopyRun, offset: int, stride: int) -> Tensor:
    """The bytes of a run in that page, a view: (fragments, bytes of one)."""
    return page.as_strided((run.num_fragments, run.fragment_size), (stride, 1), page.storage_offset() + offset)


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """`TieringOffloadingSpec` with these copies; one block a chunk."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """See OffloadingSpec."""
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """See CPUOffloadingSpec. ValueError for chunks of several blocks."""
        if self.blocks_per_chunk != 1:
            raise ValueError(f"{self.blocks_per_chunk} blocks a chunk are not copied here, only one")
        canonical = self.config.canonical_layout
        if canonical:
            self._validate_canonical_refs(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return Assignments(kv_caches, region, canonical=canonical)
