"""Tree attention on a GPU: FlashAttention for prefill, plain rows and the prefix of trees, own kernels for what the masks touch.

A batch of trees alone takes two steps a layer: FlashAttention over the prefixes, not causal, and a small kernel that adds the
tree's own keys in place. A batch that mixes trees with prefill runs FlashAttention over every row, causal, and then the split-KV
kernel over the tree rows, as the drafter's rows do: their prefixes are read a second time, which only such steps pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from vllm.utils.platform_utils import num_compute_units
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides, is_quantized_kv_cache
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from bole_vllm.attention import TreeRows, attend, attend_to_tree
from bole_vllm.kernels.attention.tiles import FP8

# FlashAttention versions whose prefix partial is known here: [heads, rows] log-sum-exp, in natural log
PARTIAL_VERSIONS = (2, 3)
# splits of the keys for every multiprocessor, over all requests and KV heads
SPLITS_EACH = 2


def bound_splits(most: int, requests: int, kv_heads: int, multiprocessors: int) -> int:
    """FlashAttention's splits of a request's keys, at most `most` (0: without a bound, which stays).

    A captured graph keeps a partial output of every row for every split that may be: at vLLM's 32, 256 MiB for 16 trees of 32 nodes. Many
    requests fill the card with few splits each. Depends on the number of requests alone, as a graph does.
    """
    return min(most, max(2, math.ceil(SPLITS_EACH * multiprocessors / (requests * kv_heads))))


def tree_flash_attention(
    rows: TreeRows,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    fa_version: int = 3,
    num_splits: int = 0,
    schedule: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    block_m: int | None = None,
) -> torch.Tensor:
    """Attention of tree rows that make up the whole batch: prefixes by FlashAttention, then the trees, in place in `out`.

    query, out       [token rows, heads, head size]; 16 bits, or a query of e4m3 beside an e4m3 cache and a bf16 `out`
    kv_cache         [blocks, KV heads, block size, 2 * head size], K in [..., :head size]
    block_table      [R, blocks] int32, exactly one row for each of the R requests of `rows`
    query_start_loc  [R + 1] int32 request -> its first token row; the rows of `rows` lie at the front of each request
    max_query_len, max_seq_len  host-side bounds on a request's rows and on its prefix
    num_splits       bound on FlashAttention's splits of the keys, 0: its own choice (which a graph must not capture)
    schedule         `TreeFlashMetadataBuilder.schedule_prefix` for these lengths; None: FlashAttention 3 plans in this call
    q_scale, k_scale, v_scale  one fp32 element each on the device, for an e4m3 query and cache
    block_m          see `kernels.attention.merge_tree_attention`

    Returns `out`. Rows of a request beyond its tree hold their attention over the prefix. No host sync; scratch (the log-sum-exp, and
    FlashAttention's partials per split) depends on shapes alone. Where the block size is a multiple of FlashAttention's key tile it
    multiplies V rows behind the prefix, up to the end of the tile, by 0: these have to be finite.
    """
    dim = query.shape[2]
    # [blocks, KV heads, block size, 2 D] -> two of [blocks, block size, KV heads, D]
    keys, values = (canonicalize_singleton_dim_strides(t) for t in kv_cache.transpose(1, 2).split(dim, dim=-1))
    descale: dict[str, torch.Tensor] = {}
    if query.dtype == FP8:
        shape = (block_table.shape[0], kv_cache.shape[1])
        keys, values = keys.view(FP8), values.view(FP8)
        descale = {"q_descale": q_scale.expand(shape), "k_descale": k_scale.expand(shape), "v_descale": v_scale.expand(shape)}
    _, lse = flash_attn.flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=max_query_len,
        seqused_k=rows.prefix_len,
        max_seqlen_k=max_seq_len,
        softmax_scale=scale,
        causal=False,
        block_table=block_table,
        return_softmax_lse=True,
        scheduler_metadata=schedule,
        fa_version=fa_version,
        num_splits=num_splits,
        **descale,
    )
    attend_to_tree(rows, query, kv_cache, block_table, scale, out, lse, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, block_m=block_m)
    return out


@dataclass
class TreeFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata plus the tree rows of the batch."""

    tree: TreeRows | None = None
    # FlashAttention 3's plan of the prefix pass, None: without one
    prefix_schedule: torch.Tensor | None = None
    # the builder's `schedule_prefix`
    scheduler: Callable[[TreeFlashMetadata, TreeRows], torch.Tensor | None] | None = None

    def with_tree(self, tree: TreeRows | None) -> TreeFlashMetadata:
        """The same batch with other tree rows (None: all rows causal). Called once a step, outside any graph."""
        planned = tree is not None and tree.verify and tree.covers_batch and self.scheduler is not None
        return replace(self, tree=tree, prefix_schedule=self.scheduler(self, tree) if planned else None)


class TreeFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata; the model state and the drafter add the tree rows."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's own plan has such a buffer where graphs are captured: replays read it at a fixed address
        causal_plan = getattr(self, "scheduler_metadata", None)
        self._prefix_plan = None if causal_plan is None else torch.zeros_like(causal_plan)
        self._most_splits, self._multiprocessors = self.max_num_splits, num_compute_units(self.device.index or 0)

    def build(self, common_prefix_len, common_attn_metadata, *args, **kwargs) -> TreeFlashMetadata:
        num_reqs = common_attn_metadata.num_reqs
        self.max_num_splits = bound_splits(self._most_splits, num_reqs, self.num_heads_kv, self._multiprocessors)
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        return TreeFlashMetadata(**vars(metadata), scheduler=self.schedule_prefix)

    def schedule_prefix(self, metadata: FlashAttentionMetadata, tree: TreeRows) -> torch.Tensor | None:
        """FlashAttention 3's plan for a pass over the prefixes of `tree`, made once for all layers; None where vLLM makes none."""
        if metadata.scheduler_metadata is None:
            return None
        plan = self._get_scheduler_metadata(
            aot_schedule=True,
            batch_size=tree.prefix_len.shape[0],
            cu_query_lens=metadata.query_start_loc,
            max_query_len=metadata.max_query_len,
            seqlens=tree.prefix_len,
            max_seq_len=metadata.max_seq_len,
            causal=False,
            max_num_splits=metadata.max_num_splits,
        )
        if plan is None or self._prefix_plan is None:
            return plan
        n = plan.shape[0]
        self._prefix_plan[:n] = plan
        # thread blocks of a captured graph that find more work there would write over the output
        self._prefix_plan[n:] = 0
        return self._prefix_plan[:n]


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """Registered as vLLM's CUSTOM backend."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashMetadataBuilder]:
        return TreeFlashMetadataBuilder


class TreeFlashAttentionImpl(FlashAttentionImpl):
    """FlashAttention for rows without a tree; tree rows as the module's docstring says."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        """query, output [tokens, heads, head size]; kv_cache [blocks, KV heads, block size, 2 * head size]."""
        metadata = attn_metadata
        tree = None if metadata is None else metadata.tree
        # One row a request sees the prefix and itself: what a causal row sees.
        if tree is None or not tree.covers_batch or (tree.verify and metadata.max_query_len == 1):
            super().forward(layer, query, key, value, kv_cache, metadata, output, output_scale, output_block_scale)
            if tree is None or tree.covers_batch:
                return output
        n = metadata.num_actual_tokens
        args = (tree, query[:n], kv_cache, metadata.block_table, self.scale, output[:n])
        if tree.verify and tree.covers_batch and self.vllm_flash_attn_version in PARTIAL_VERSIONS:
            tree_flash_attention(
                *args,
                query_start_loc=metadata.query_start_loc,
                max_query_len=metadata.max_query_len,
                max_seq_len=metadata.max_seq_len,
                fa_version=self.vllm_flash_attn_version,
                num_splits=metadata.max_num_splits,
                schedule=metadata.prefix_schedule,
                **self._scales(layer),
            )
        else:
            attend(*args, **self._scales(layer))
        return output

    def _scales(self, layer) -> dict[str, torch.Tensor]:
        """The factors of an 8-bit cache and of the query that the layer quantised for it."""
        if not is_quantized_kv_cache(self.kv_cache_dtype):
            return {}
        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        return {**scales, "q_scale": layer._q_scale} if self.supports_quant_query_input else scales
