"""A model as vLLM runs it, as namespaces and geometries of the pool: one `KvGroup` for each of its KV cache groups.

vLLM 0.32 shows each layer's KV as (blocks, heads, tokens, content). On CUDA and alike the content of a token and head
is K||V, so stored pages have the interior `kv_per_token`. The CPU backend packs a block of a head by instruction set:
such an interior is named after backend and instruction set, and nothing is ever cut inside it. Either way a stored page
is one of the engine's blocks.

Ranks: tensor parallel ranks hold heads (or copies of them), pipeline ranks layers; a chunk is cut the same way, so that
an engine with other sizes reads it. What this does not know it refuses by name, at start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from engine_adapter.copy import PagedKv
from engine_adapter.cuts import Cut
from engine_adapter.device_copy import DeviceCopier, DevicePagedKv
from engine_adapter.engine_chunks import Endpoint, MakeEndpoint
from engine_adapter.identity import weights_digest
from engine_adapter.movers import Blocks
from engine_adapter.plans import KvGroup
from engine_adapter.views import HeadPages
from engine_adapter.vllm.options import Options
from engine_adapter.vllm.support import changes_of, check_supported
from kvstore.errors import ConfigurationError, LayoutMismatch
from kvstore.model.layout import Attention, Dtype, PageLayout, Rectangle
from kvstore.model.namespace import Namespace

_DTYPES = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}
_CACHE_DTYPES = {"fp8": Dtype.FP8_E4M3, "fp8_e4m3": Dtype.FP8_E4M3, "fp8_e5m2": Dtype.FP8_E5M2}
_PLAIN = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


def revision_of(config: VllmConfig, options: Options) -> tuple[str, str]:
    """(model, revision) of the namespace: what the user says, or architecture and digest of the weights."""
    model = config.model_config
    name = options.model or (model.architectures or ["unknown"])[0]
    if options.revision:
        return name, options.revision
    also = [str(model.dtype), str(model.quantization), str(config.load_config.load_format), *changes_of(model)]
    if config.load_config.load_format == "dummy":
        return name, blake2b(repr((also, model.seed, model.hf_config)).encode(), digest_size=16).hexdigest()
    return name, weights_digest(weights_folder(model.model, model.revision), also)


def weights_folder(model: str, revision: str | None) -> Path:
    """Where the weights of a model lie: its folder, or the one that a hub's cache has."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"the weights of {model} are not found on this host ({exc}); give `revision`") from exc


def kv_groups(
    config: VllmConfig, kv_cache: KVCacheConfig, options: Options
) -> tuple[tuple[KvGroup, ...], tuple[Cut, ...]]:
    """The model's KV cache groups and how this engine's ranks share them. ConfigurationError for what is not known."""
    check_supported(config, options.load)
    parallel = config.parallel_config
    for kind in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, kind, 1) > 1:
            raise ConfigurationError(f"{kind} {getattr(parallel, kind)} is not supported by this connector")
    groups = kv_cache.kv_cache_groups
    if set(kv_cache.prefix_cacheable_group_ids) != set(range(len(groups))):
        raise ConfigurationError("this model has KV groups that hold no prefix (states, hidden states): not supported")
    block_tokens = math.lcm(*(group.kv_cache_spec.block_size for group in groups))
    chunk_tokens = -(-options.chunk_tokens // block_tokens) * block_tokens
    named = revision_of(config, options)
    made = [
        _kv_group(config, kv_cache, group, number, chunk_tokens, named, options) for number, group in enumerate(groups)
    ]
    return tuple(group for group, _ in made), tuple(cut for _, cut in made)


def _kv_group(
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    group: KVCacheGroupSpec,
    number: int,
    chunk_tokens: int,
    named: tuple[str, str],
    options: Options,
) -> tuple[KvGroup, Cut]:
    spec = group.kv_cache_spec
    if type(spec) not in _PLAIN:
        raise ConfigurationError(f"KV cache group {number} is a {type(spec).__name__}: not supported by this connector")
    several = len(kv_cache.kv_cache_groups) > 1
    layers = _stages(config, group, several)
    is_mla = isinstance(spec, MLAAttentionSpec)
    heads = _heads(config, spec, is_mla)
    window = spec.sliding_window or 0 if isinstance(spec, SlidingWindowSpec) else 0
    layout = PageLayout(
        layers=sum(layers),
        kv_heads=heads,
        head_dim=_head_dim(spec, is_mla),
        dtype=_dtype(spec, config.cache_config.cache_dtype),
        page_tokens=spec.block_size,
        pages_per_chunk=chunk_tokens // spec.block_size,
        attention=Attention.MLA if is_mla else Attention.GQA,
        interior=_interior(config, spec, is_mla),
    )
    kind = f"sliding:{window}" if window else "full"
    if several:
        places = ",".join(str(extract_layer_index(name)) for name in group.layer_names)
        kind += f"/layers:{places if len(places) < 400 else blake2b(places.encode(), digest_size=16).hexdigest()}"
    namespace = Namespace(*named, layout, kind, options.tenant)
    cut = Cut.of(layers, heads, config.parallel_config.tensor_parallel_size)
    return KvGroup(namespace, cut.geometry, spec.block_size, window), cut


def _stages(config: VllmConfig, group: KVCacheGroupSpec, several: bool) -> list[int]:
    """Layers of the group in each pipeline stage."""
    parallel, model = config.parallel_config, config.model_config
    if parallel.pipeline_parallel_size == 1:
        return [len(group.layer_names)]
    if several:
        raise ConfigurationError("pipeline parallel models with several KV groups are not supported by this connector")
    total = model.get_total_num_hidden_layers()
    edges = [
        get_pp_indices(total, rank, parallel.pipeline_parallel_size) for rank in range(parallel.pipeline_parallel_size)
    ]
    return [stop - start for start, stop in edges]


def _heads(config: VllmConfig, spec: Any, is_mla: bool) -> int:
    """KV heads of the model; where there are fewer than tensor parallel ranks, several ranks have copies of one."""
    if is_mla:
        return 1
    tp, total = config.parallel_config.tensor_parallel_size, int(config.model_config.get_total_num_kv_heads())
    if spec.num_kv_heads != max(1, total // tp):
        raise ConfigurationError(f"{total} KV heads over tp={tp} give {spec.num_kv_heads} a rank: not supported")
    return total


def _head_dim(spec: Any, is_mla: bool) -> int:
    content, itemsize = spec.state_content_size_bytes, spec.dtype.itemsize
    vectors = 1 if is_mla else 2
    if content % (vectors * itemsize) or spec.num_heads != spec.num_kv_heads or spec.tokens_per_state != 1:
        raise ConfigurationError(
            f"pages of {content} bytes a token and head are not K and V of one width: not supported"
        )
    return int(content // (vectors * itemsize))


def _dtype(spec: Any, cache_dtype: str) -> Dtype:
    dtype = _CACHE_DTYPES.get(cache_dtype) or _DTYPES.get(spec.dtype)
    if dtype is None or dtype.itemsize_bytes != spec.dtype.itemsize:
        raise ConfigurationError(f"a KV cache of {spec.dtype} ({cache_dtype}) is not supported by this connector")
    return dtype


def _interior(config: VllmConfig, spec: Any, is_mla: bool) -> str:
    """How the bytes of one head's block are ordered."""
    if current_platform.device_type != "cpu":
        return "kv_per_token"
    if is_mla:
        return "vllm-cpu-mla"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
    return f"vllm-cpu-{isa}"


def endpoints(group: KvGroup, held: Rectangle, tensors: Mapping[str, torch.Tensor]) -> MakeEndpoint:
    """What copies between the pool and a rank's tensors of one group, first layer to last.

    LayoutMismatch where the tensors are not what the model's description says.
    """
    layout, layers = group.namespace.layout, list(tensors.values())
    if len(layers) != held.layers:
        raise LayoutMismatch(f"{len(layers)} layers are registered, the rank holds {held.layers}")
    for name, tensor in tensors.items():
        expected = (held.heads, group.block_tokens)
        if tensor.dim() != 4 or tuple(tensor.shape[1:3]) != expected:
            raise LayoutMismatch(
                f"{name} is {tuple(tensor.shape)}, not (blocks, {held.heads}, {group.block_tokens}, content)"
            )
        if tensor[0, 0].numel() * tensor.element_size() != layout.head_page_bytes:
            raise LayoutMismatch(
                f"{name} has other head pages than the {layout.head_page_bytes} bytes of the namespace"
            )
    if layers[0].device.type == "cpu":

        def on_cpu(pages: int, blocks: Sequence[Sequence[int]]) -> Endpoint:
            return PagedKv(HeadPages.opaque(layers, pages), pages, blocks, held.layer_start, held.head_start)

        return on_cpu
    tables, copier = Blocks.of(layers), DeviceCopier(layers[0].device)

    def on_device(pages: int, blocks: Sequence[Sequence[int]]) -> Endpoint:
        return DevicePagedKv(tables, pages, blocks, held.layer_start, held.head_start, copier=copier)

    return on_device
