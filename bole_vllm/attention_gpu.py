"""Tree attention on a GPU: FlashAttention for prefill and plain rows, the ancestor-mask kernel for tree rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from bole_vllm.attention import TreeRows, attend


@dataclass
class TreeFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata plus the tree rows of the batch."""

    tree: TreeRows | None = None

    def with_tree(self, tree: TreeRows | None) -> TreeFlashMetadata:
        """The same batch with other tree rows (None: all rows causal)."""
        return replace(self, tree=tree)


class TreeFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata; the model state and the drafter add the tree rows."""

    def build(self, *args, **kwargs) -> TreeFlashMetadata:
        return TreeFlashMetadata(**vars(super().build(*args, **kwargs)))


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
    """FlashAttention over the batch where it holds rows without a tree, then the tree rows over it."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        """query, output [tokens, heads, head size]; kv_cache [blocks, KV heads, block size, 2 * head size]."""
        tree = None if attn_metadata is None else attn_metadata.tree
        if tree is None or not tree.covers_batch:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if tree is not None:
            n = attn_metadata.num_actual_tokens
            attend(tree, query[:n], kv_cache, attn_metadata.block_table, self.scale, output[:n])
        return output
