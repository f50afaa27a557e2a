"""What the tree attention backends share: which rows see what, and the calls of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_vllm.kernels.attention import merge_tree_attention, tree_attention
from bole_vllm.kernels.topology import Forest


@dataclass(frozen=True)
class TreeRows:
    """Rows of a batch that attend under an ancestor mask (or causally, where `mask_start` is negative)."""

    token_start: torch.Tensor  # [R] request -> its first row
    num_rows: torch.Tensor  # [R] rows of the request that are served here; 0: none
    prefix_len: torch.Tensor  # [R] cache positions that every row sees
    row_mask: torch.Tensor  # [mask rows, words] bit j: the row sees position prefix_len + j
    mask_start: torch.Tensor  # [R] request -> its first mask row; negative: causal rows
    num_slots: int  # static bound on j
    max_rows: int  # static bound on num_rows
    covers_batch: bool  # no row of the batch is left to another kernel
    verify: bool = False  # the target's rows (not the drafter's): row i of request r is the i-th row that the batch holds for r

    @classmethod
    def of_forest(cls, forest: Forest, num_rows: torch.Tensor, num_computed: torch.Tensor, covers_batch: bool) -> TreeRows:
        """The verify rows of a batch. num_rows [R]: nodes of each tree; num_computed [R]: tokens before its root."""
        return cls(
            token_start=forest.token_start,
            num_rows=num_rows,
            prefix_len=num_computed,
            row_mask=forest.ancestors,
            mask_start=forest.node_offset[:-1],
            num_slots=forest.max_nodes,
            max_rows=forest.max_nodes,
            covers_batch=covers_batch,
            verify=True,
        )


def attend(
    rows: TreeRows, query: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, scale: float, out: torch.Tensor, **options
) -> None:
    """Write the attention output of `rows` into `out` in place; other rows are left as they are.

    query, out [token rows, heads, head size]; kv_cache [blocks, KV heads, block size, 2 * head size]; options: `q_scale`, `k_scale`,
    `v_scale`, `config`, `num_splits` of `kernels.attention.tree_attention`.
    """
    tree_attention(
        query, kv_cache, block_table, rows.token_start, rows.num_rows, rows.prefix_len, rows.row_mask, rows.mask_start,
        scale, out, num_slots=rows.num_slots, max_rows=rows.max_rows, **options,
    )  # fmt: skip


def attend_to_tree(
    rows: TreeRows,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    **options,
) -> None:
    """`attend` where `out` and `lse` [heads, token rows] (fp32, natural log) hold the rows' attention over their prefixes already.

    options: `q_scale`, `k_scale`, `v_scale`, `block_m` of `kernels.attention.merge_tree_attention`.
    """
    merge_tree_attention(
        query, kv_cache, block_table, rows.token_start, rows.num_rows, rows.prefix_len, rows.row_mask, rows.mask_start,
        scale, out, lse, num_slots=rows.num_slots, max_rows=rows.max_rows, **options,
    )  # fmt: skip
