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


def _scalar(scale: float | torch.Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)


def _attend(q, kv_cache, block_row, positions, scale, k_scale, v_scale, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One row over some positions: (output [HQ, D], log-sum-exp [HQ], natural log). q [HQ, D], scaled already; block_row [max_blocks]."""
    block_size, group, dim = kv_cache.shape[2], q.shape[0] // kv_cache.shape[1], q.shape[1]
    positions = torch.tensor(positions, dtype=torch.int64, device=q.device)
    stored = kv_cache.view(torch.float8_e4m3fn) if kv_cache.dtype == torch.uint8 else kv_cache
    # [visible, HKV, 2 * D], a KV head once for each query head that reads it
    kv = stored[block_row.long()[positions // block_size], :, positions % block_size].to(dtype).repeat_interleave(group, dim=1)
    k, v = kv[..., :dim] * k_scale, kv[..., dim:] * v_scale
    scores = torch.einsum("phd,hd->hp", k, q) * scale
    return torch.einsum("hp,phd->hd", torch.softmax(scores, dim=1), v), torch.logsumexp(scores, dim=1)


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
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """See `split_kv.tree_attention`; `dtype` is the dtype of the arithmetic."""
    factors = _scalar(k_scale), _scalar(v_scale)
    for r in range(token_start.shape[0]):
        for i in range(int(num_rows[r])):
            assert i < max_rows
            first = int(mask_start[r])
            words = None if first < 0 else [int(w) for w in row_mask[first + i]]
            positions = visible_positions(i, int(prefix_len[r]), words, num_slots)
            token = int(token_start[r]) + i
            out[token] = 0
            if positions:
                row = q[token].to(dtype) * _scalar(q_scale)
                out[token] = _attend(row, kv_cache, block_table[r], positions, scale, *factors, dtype)[0].to(out.dtype)
    return out


def prefix_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_start: torch.Tensor,
    num_rows: torch.Tensor,
    prefix_len: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """What `merge.merge_tree_attention` completes: `out` and `lse` of the rows whose request has a prefix; the rest is left alone."""
    factors = _scalar(k_scale), _scalar(v_scale)
    for r in range(token_start.shape[0]):
        positions = list(range(int(prefix_len[r])))
        for token in range(int(token_start[r]), int(token_start[r]) + int(num_rows[r]) if positions else 0):
            row = q[token].to(dtype) * _scalar(q_scale)
            part, row_lse = _attend(row, kv_cache, block_table[r], positions, scale, *factors, dtype)
            out[token], lse[:, token] = part.to(out.dtype), row_lse.float()
