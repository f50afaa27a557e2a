"""Oracle of the tree attention: one softmax per row and head in fp64, gathering exactly the visible cache rows."""

from __future__ import annotations

import torch

WORD_BITS = 32


def visible_positions(row: int, prefix_len: int, mask_words: list[int] | None, num_slots: int) -> list[int]:
    """Cache positions that row `row` of a request sees. `mask_words` None: a causal row."""
    if mask_words is None:
        return list(range(prefix_len + row + 1))
    seen = [j for j in range(num_slots) if (mask_words[j // WORD_BITS] >> (j % WORD_BITS)) & 1]
    return list(range(prefix_len)) + [prefix_len + j for j in seen]


def tree_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_start: torch.Tensor,
    num_rows: torch.Tensor,
    prefix_len: torch.Tensor,
    row_mask: torch.Tensor,
    mask_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    num_slots: int,
    max_rows: int,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `split_kv.tree_attention`; `dtype` is the dtype of the arithmetic."""
    block_size, group, dim = kv_cache.shape[2], q.shape[1] // kv_cache.shape[1], q.shape[2]
    for r in range(token_start.shape[0]):
        for i in range(int(num_rows[r])):
            assert i < max_rows
            first = int(mask_start[r])
            words = None if first < 0 else [int(w) for w in row_mask[first + i]]
            positions = torch.tensor(visible_positions(i, int(prefix_len[r]), words, num_slots), dtype=torch.int64, device=q.device)
            token = int(token_start[r]) + i
            if positions.numel() == 0:
                out[token] = 0
                continue
            blocks = block_table[r].long()[positions // block_size]
            # [visible, HKV, 2 * D]
            kv = kv_cache[blocks, :, positions % block_size].to(dtype)
            for h in range(q.shape[1]):
                k, v = kv[:, h // group, :dim], kv[:, h // group, dim:]
                weights = torch.softmax(k @ q[token, h].to(dtype) * scale, dim=0)
                out[token, h] = (weights @ v).to(out.dtype)
    return out
