"""Tree attention on a CPU: one kernel serves every row, causal or masked, over an unpacked KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from bole_vllm.attention import TreeRows, attend


@dataclass
class TreeCPUMetadata:
    """Batch layout of one cache group, and the tree rows among it."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor  # [num_reqs + 1]
    seq_lens: torch.Tensor  # [num_reqs] computed and scheduled tokens
    block_table: torch.Tensor  # [num_reqs, blocks]
    slot_mapping: torch.Tensor  # [num_actual_tokens]
    tree: TreeRows | None = None

    def with_tree(self, tree: TreeRows | None) -> TreeCPUMetadata:
        """The same batch with other tree rows (None: all rows causal)."""
        return replace(self, tree=tree)

    def all_rows(self) -> TreeRows:
        """Every row of the batch: tree rows under their masks, the others causal. Lengths are not read where trees are all there is: a
        drafter's metadata is made once and its lengths mean nothing."""
        if self.tree is not None and self.tree.covers_batch:
            return self.tree
        num_rows = self.query_start_loc.diff()
        causal = torch.full_like(num_rows, -1)
        if self.tree is None:
            mask, mask_start, slots = num_rows.new_zeros(1, 1), causal, 1
        else:
            mask, slots = self.tree.row_mask, self.tree.num_slots
            mask_start = torch.where(self.tree.num_rows > 0, self.tree.mask_start, causal)
        prefix = self.seq_lens - num_rows
        if self.tree is not None:
            prefix = torch.where(self.tree.num_rows > 0, self.tree.prefix_len.to(prefix.dtype), prefix)
        return TreeRows(self.query_start_loc[:-1], num_rows, prefix, mask, mask_start, slots, self.max_query_len, True)


class TreeCPUMetadataBuilder(AttentionMetadataBuilder[TreeCPUMetadata]):
    """Takes the common metadata as it is."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> TreeCPUMetadata:
        m = common_attn_metadata
        return TreeCPUMetadata(m.num_actual_tokens, m.max_query_len, m.query_start_loc, m.seq_lens, m.block_table_tensor, m.slot_mapping)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Stands in for vLLM's CPU backend while Bole is on."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUMetadataBuilder]:
        return TreeCPUMetadataBuilder


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU implementation packs K for its own kernel; here K and V stay plain, [..., :D] and [..., D:]."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        """query, output [tokens, heads, head size]; kv_cache [blocks, KV heads, block size, 2 * head size]."""
        if attn_metadata is None:
            return output  # warm-up
        n = attn_metadata.num_actual_tokens
        attend(attn_metadata.all_rows(), query[:n], kv_cache, attn_metadata.block_table, self.scale, output[:n])
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write key and value [tokens, KV heads, head size] to their slots; slot -1: nowhere."""
        slots = slot_mapping[: key.shape[0]]
        rows = (slots >= 0).nonzero().squeeze(1)
        slots, block_size = slots[rows].long(), kv_cache.shape[2]
        kv_cache[slots // block_size, :, slots % block_size] = torch.cat([key[rows], value[rows]], dim=-1)
