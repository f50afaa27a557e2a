"""The tree part of attention, merged into a prefix partial that another kernel made.

Every row of a request sees the whole prefix, so any fast attention can do that part (FlashAttention, not causal, over the first
prefix_len keys) as long as it returns the log-sum-exp of its scores. What is left are the few keys of the tree, under the mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import pointwise
from ..precision import INTERPRET, device_function, to_fp32
from .split_kv import num_sms
from .tiles import (
    LOG2E,
    check_arguments,
    dot_dtype,
    dot_operand,
    factor_and_pointer,
    masked_tile,
    online_softmax,
    operand_bits,
    power_of_two,
    scaled,
)

round_to = device_function(pointwise.round_to)


@triton.jit
def merge_tree_kernel(
    p_q,
    p_kv,
    p_block_table,
    p_token_start,
    p_num_rows,
    p_prefix_len,
    p_row_mask,
    p_mask_start,
    p_out,
    p_lse,
    p_q_scale,
    p_k_scale,
    p_v_scale,
    scale_log2,
    v_factor,
    num_slots,
    stride_q,
    stride_qh,
    stride_block,
    stride_kvh,
    stride_pos,
    stride_dim,
    stride_table,
    stride_mask,
    stride_out,
    stride_outh,
    stride_lseh,
    stride_lse,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_tile, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_rows = tl.load(p_num_rows + i_r)
    if i_tile * BLOCK_M >= n_rows * GROUP:
        return
    n_prefix = tl.load(p_prefix_len + i_r)
    n_mask = tl.load(p_mask_start + i_r)

    # [BLOCK_M] lane -> row of the request and its query head
    o_lane = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_row = o_lane // GROUP
    m_row = o_row < n_rows
    o_head = i_h * GROUP + o_lane % GROUP
    o_token = tl.load(p_token_start + i_r).to(tl.int64) + o_row
    o_d = tl.arange(0, D)
    # [BLOCK_M, D]
    b_q = tl.load(p_q + (o_token * stride_q + o_head * stride_qh)[:, None] + o_d[None, :], mask=m_row[:, None])
    b_q = dot_operand(b_q, DTYPE, INTERPRET)
    # the partial, asked for before the dots; whatever lies there means nothing where there is no prefix
    p_o = p_out + (o_token * stride_out + o_head * stride_outh)[:, None] + o_d[None, :]
    m_prefix = o_row < tl.where(n_prefix > 0, n_rows, 0)
    b_prefix = tl.load(p_o, mask=m_prefix[:, None], other=0.0)
    b_lse = tl.load(p_lse + o_head * stride_lseh + o_token * stride_lse, mask=m_prefix, other=float("-inf")) * 1.4426950408889634

    # keys after the prefix: up to the tile's last row, or the tree's width
    n_causal = tl.minimum(n_rows, (i_tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    n_tail = tl.where(n_mask < 0, n_causal, num_slots)
    scale_log2 = scaled(scaled(scale_log2, p_q_scale), p_k_scale)
    b_acc = tl.full([BLOCK_M, D], 0.0, dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    p_head = p_kv + i_h.to(tl.int64) * stride_kvh + o_d[None, :] * stride_dim
    p_table = p_block_table + i_r.to(tl.int64) * stride_table
    for i_t in tl.range(0, (n_tail + BLOCK_N - 1) // BLOCK_N, num_stages=1):
        b_s, b_v = masked_tile(
            b_q, p_head, p_table, p_row_mask, stride_block, stride_pos, stride_dim, stride_mask,
            n_prefix + i_t * BLOCK_N, n_prefix, n_tail, n_mask, o_row, n_rows, scale_log2,
            D, BLOCK_N, (BLOCK_N + 31) // 32, BLOCK_SIZE, PRECISION, INTERPRET,
        )  # fmt: skip
        b_acc, b_max, b_sum = online_softmax(b_s, b_v, b_acc, b_max, b_sum, PRECISION)

    # both parts relative to the larger of their maxima; a NaN in either stays
    b_top = tl.maximum(b_max, b_lse)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_tree, b_past = tl.exp2(b_max - b_top), tl.exp2(b_lse - b_top)
    b_total = b_sum * b_tree + b_past
    # a lane without a visible key: output 0
    b_total = tl.where(b_total == 0.0, 1.0, b_total)
    b_out = b_acc * (b_tree * scaled(v_factor, p_v_scale) / b_total)[:, None] + to_fp32(b_prefix, INTERPRET) * (b_past / b_total)[:, None]
    tl.store(p_o, round_to(b_out, p_out.dtype.element_ty), mask=m_row[:, None])


def choose_block_m(num_lanes: int, programs_per_tile: int, device: torch.device) -> int:
    """Lanes of a program: as many as leave half the device at work; at least 16. A static choice (from shapes only)."""
    if INTERPRET:
        return power_of_two(num_lanes, 16, 128)
    block_m = power_of_two(num_lanes, 16, 64)
    while block_m > 16 and triton.cdiv(num_lanes, block_m) * programs_per_tile < num_sms(device) // 2:
        block_m //= 2
    return block_m


def merge_tree_attention(
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
    lse: torch.Tensor,
    num_slots: int,
    max_rows: int,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    block_m: int | None = None,
) -> torch.Tensor:
    """Complete a prefix partial in place: `out` becomes what `tree_attention` computes for the same arguments.

    out          [token rows, HQ, D] on entry the attention of each row over its request's first `prefix_len` keys, already scaled
                 by v_scale; on return the attention over these and the keys after them that the row sees. Rows outside the
                 requests are left alone. Returned.
    lse          [HQ, token rows] fp32, any strides, natural log: log-sum-exp of the scaled scores over the prefix
    block_m      16, 32 or 64: lanes of a program to use instead of the default choice

    The other arguments, and what a non-finite key does, as in `split_kv.tree_attention`; a non-finite partial makes its row NaN.
    Where prefix_len is 0 neither `out` nor `lse` is read. The partial is in out's dtype, so that the result is rounded to it
    twice; everything between is fp32.

    Raises ValueError on shapes, strides or dtypes. No host sync, no scratch; the grid depends on static bounds only.
    """
    check_arguments(q, kv_cache, block_table, token_start, num_rows, prefix_len, row_mask, mask_start, out, num_slots)
    num_requests, (num_tokens, hq, dim), hkv = token_start.shape[0], q.shape, kv_cache.shape[1]
    if lse.shape != (hq, num_tokens) or lse.dtype != torch.float32:
        raise ValueError(f"lse must be fp32 [{hq}, {num_tokens}], got {tuple(lse.shape)} {lse.dtype}")
    if block_m not in (None, 16, 32, 64):
        raise ValueError(f"block_m must be 16, 32 or 64, got {block_m}")
    if num_requests == 0 or max_rows == 0 or num_tokens == 0:
        return out
    group = hq // hkv
    fp32 = q.element_size() == 4 and not INTERPRET
    block_m = block_m or (16 if fp32 else choose_block_m(max_rows * group, hkv * num_requests, q.device))
    (q_factor, p_q), (k_factor, p_k), (v_factor, p_v) = (factor_and_pointer(s) for s in (q_scale, k_scale, v_scale))
    merge_tree_kernel[(triton.cdiv(max_rows * group, block_m), hkv, num_requests)](
        operand_bits(q),
        operand_bits(kv_cache),
        block_table,
        token_start,
        num_rows,
        prefix_len,
        row_mask,
        mask_start,
        out,
        lse,
        p_q,
        p_k,
        p_v,
        scale * q_factor * k_factor * LOG2E,
        v_factor,
        num_slots,
        q.stride(0),
        q.stride(1),
        *kv_cache.stride(),
        block_table.stride(0),
        row_mask.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        GROUP=group,
        D=dim,
        BLOCK_SIZE=kv_cache.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=16 if fp32 else power_of_two(num_slots, 16, 256 if INTERPRET else 64),
        DTYPE=dot_dtype(q),
        PRECISION="ieee",
        INTERPRET=INTERPRET,
        num_warps=8 if block_m == 64 or dim == 256 else 4,
        num_stages=1,
    )
    return out
