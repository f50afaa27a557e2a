"""Attention of tree rows (ancestor mask) and causal rows over a paged KV cache, online softmax, split over the keys.

Lanes: the rows of a request and the query heads of one KV head are packed, lane = row * GROUP + head of the group, so that one
program reads the keys once for all of them. Tiles that lie in the prefix need no mask; the tiles after it read the row masks.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..conv.pointwise import round_to
from ..precision import INTERPRET, to_fp32

LOG2E = 1.4426950408889634


@triton.jit
def _online_softmax(b_s, b_v, b_acc, b_max, b_sum, PRECISION: tl.constexpr):
    """One step over a tile: b_s [BLOCK_M, BLOCK_N] scores in log2 units (-inf: not visible), b_v [BLOCK_N, D]."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    # a lane that has seen nothing yet: -inf - -inf would be NaN
    b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_ref[:, None])
    b_alpha = tl.exp2(b_max - b_ref)
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
    return b_acc, b_new, b_sum


@triton.jit
def tree_attention_kernel(
    p_q,
    p_kv,
    p_block_table,
    p_token_start,
    p_num_rows,
    p_prefix_len,
    p_row_mask,
    p_mask_start,
    p_out,
    p_part,
    p_lse,
    scale_log2,
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
    stride_split,
    HQ: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_tile, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if NUM_SPLITS > 1:
        i_split = i_tile % NUM_SPLITS
        i_tile = i_tile // NUM_SPLITS
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
    # [BLOCK_M, D]; what a masked load returns stays in its lane (q) or is masked in the scores and in V
    b_q = tl.load(p_q + (o_token * stride_q + o_head * stride_qh)[:, None] + o_d[None, :], mask=m_row[:, None])
    if INTERPRET:
        b_q = to_fp32(b_q, INTERPRET)

    # keys after the prefix: up to the tile's last row, or the tree's width
    n_causal = tl.minimum(n_rows, (i_tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    n_tail = tl.where(n_mask < 0, n_causal, num_slots)
    n_tiles = (n_prefix + n_tail + BLOCK_N - 1) // BLOCK_N
    n_full = n_prefix // BLOCK_N
    # tiles full_from..full_to lie in the prefix, tail_from..tail_to hold its rest and the keys after it
    full_from, full_to, tail_from, tail_to = 0, n_full, n_full, n_tiles
    if NUM_SPLITS > 1:
        n_per_split = (n_tiles + NUM_SPLITS - 1) // NUM_SPLITS
        full_from = i_split * n_per_split
        tail_to = tl.minimum(full_from + n_per_split, n_tiles)
        full_to = tl.minimum(tail_to, n_full)
        tail_from = tl.maximum(full_from, n_full)

    b_acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    p_head = p_kv + i_h.to(tl.int64) * stride_kvh + o_d[None, :] * stride_dim
    p_table = p_block_table + i_r.to(tl.int64) * stride_table

    # tiles of the prefix only: everything is visible
    for i_t in range(full_from, full_to):
        o_pos = i_t * BLOCK_N + tl.arange(0, BLOCK_N)
        o_block = tl.load(p_table + o_pos // BLOCK_SIZE).to(tl.int64)
        p_k = p_head + (o_block * stride_block + (o_pos % BLOCK_SIZE) * stride_pos)[:, None]
        b_k = tl.load(p_k)
        b_v = tl.load(p_k + D * stride_dim)
        if INTERPRET:
            b_k = to_fp32(b_k, INTERPRET)
            b_v = to_fp32(b_v, INTERPRET)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        b_acc, b_max, b_sum = _online_softmax(b_s, b_v, b_acc, b_max, b_sum, PRECISION)

    # the prefix's rest and the keys after it
    for i_t in range(tail_from, tail_to):
        o_pos = i_t * BLOCK_N + tl.arange(0, BLOCK_N)
        # [BLOCK_N] slot of the tree, or index of the causal row; negative in the prefix
        o_j = o_pos - n_prefix
        m_tail = (o_j >= 0) & (o_j < n_tail)
        if n_mask < 0:
            m_see = m_tail[None, :] & (o_j[None, :] <= o_row[:, None])
        else:
            p_word = p_row_mask + (n_mask + o_row).to(tl.int64)[:, None] * stride_mask + (o_j // 32)[None, :]
            b_word = tl.load(p_word, mask=m_row[:, None] & m_tail[None, :], other=0)
            m_see = ((b_word >> (o_j & 31)[None, :]) & 1) != 0
        m_see = (m_see | (o_j < 0)[None, :]) & m_row[:, None]
        # a key that no lane sees is not read: neither it nor its block table entry need be valid
        m_key = tl.max(m_see.to(tl.int32), 0) > 0
        o_block = tl.load(p_table + o_pos // BLOCK_SIZE, mask=m_key, other=0).to(tl.int64)
        p_k = p_head + (o_block * stride_block + (o_pos % BLOCK_SIZE) * stride_pos)[:, None]
        b_k = tl.load(p_k, mask=m_key[:, None])
        b_v = tl.load(p_k + D * stride_dim, mask=m_key[:, None])
        if INTERPRET:
            b_k = to_fp32(b_k, INTERPRET)
            b_v = to_fp32(b_v, INTERPRET)
        # 0 * NaN: a non-finite V row leaves the product and poisons the scores of the lanes that see it instead
        b_poison = tl.sum(b_v.to(tl.float32) * 0.0, 1)
        b_v = tl.where((b_poison == 0.0)[:, None], b_v, 0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2 + b_poison[None, :]
        b_s = tl.where(m_see, b_s, float("-inf"))
        b_acc, b_max, b_sum = _online_softmax(b_s, b_v, b_acc, b_max, b_sum, PRECISION)

    # a lane without a visible key has sum 0: output 0
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    if NUM_SPLITS == 1:
        p_o = p_out + (o_token * stride_out + o_head * stride_outh)[:, None] + o_d[None, :]
        tl.store(p_o, round_to(b_out, p_out.dtype.element_ty), mask=m_row[:, None])
    else:
        o_part = i_split * stride_split + o_token * HQ + o_head
        # a split that holds no visible key has log-sum-exp -inf; its output is never read
        b_lse = tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_sum))
        tl.store(p_lse + o_part, b_lse, mask=m_row)
        tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_out, mask=m_row[:, None])


@triton.jit
def combine_splits_kernel(
    p_part,
    p_lse,
    p_out,
    p_token_start,
    p_num_rows,
    stride_split,
    stride_out,
    stride_outh,
    HQ: tl.constexpr,
    D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    i_row, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i_row >= tl.load(p_num_rows + i_r):
        return
    i_token = tl.load(p_token_start + i_r).to(tl.int64) + i_row
    o_split = tl.arange(0, NUM_SPLITS)
    o_d = tl.arange(0, D)
    # [NUM_SPLITS]
    o_part = o_split.to(tl.int64) * stride_split + i_token * HQ + i_h
    b_lse = tl.load(p_lse + o_part)
    m_split = b_lse != float("-inf")
    b_max = tl.max(b_lse, 0)
    b_w = tl.where(m_split, tl.exp2(b_lse - tl.where(b_max == float("-inf"), 0.0, b_max)), 0.0)
    b_w = b_w / tl.maximum(tl.sum(b_w, 0), 1e-30)
    # [NUM_SPLITS, D]
    b_part = tl.load(p_part + o_part[:, None] * D + o_d[None, :], mask=m_split[:, None], other=0.0)
    b_out = tl.sum(b_part * b_w[:, None], 0)
    p_o = p_out + i_token * stride_out + i_h * stride_outh + o_d
    tl.store(p_o, b_out.to(p_out.dtype.element_ty))


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile_sizes(num_lanes: int, dim: int, itemsize: int) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages). The interpreter pays per operation, not per element: large tiles."""
    if INTERPRET:
        return min(128, max(16, triton.next_power_of_2(num_lanes))), 256, 4, 1
    block_m = min(64, max(16, triton.next_power_of_2(num_lanes)))
    if itemsize == 4:
        return 16, 16, 4, 1
    # compiled for sm_90 these keep (nearly) everything in registers; BLOCK_N 128 spills
    return block_m, 64, 8 if dim >= 256 or (dim == 128 and block_m == 64) else 4, 2


def _num_splits(num_programs: int, max_keys: int, block_n: int, device: torch.device) -> int:
    """Splits of the keys that fill the device twice over, at least 4 tiles each; a static choice (from shapes only)."""
    if INTERPRET:
        return 1
    wanted = min(2 * _num_sms(device) // num_programs, max_keys // (4 * block_n), 32)
    return 1 << (max(1, wanted).bit_length() - 1)


def _check(q, kv_cache, block_table, token_start, num_rows, prefix_len, row_mask, mask_start, out, num_slots) -> None:
    dim, num_requests = q.shape[-1], token_start.shape[0]
    if q.dim() != 3 or out.shape != q.shape or q.stride(2) != 1 or out.stride(2) != 1 or out.dtype != q.dtype:
        raise ValueError(f"q and out must be alike [token rows, HQ, D], inner stride 1: {q.shape} {q.dtype}, {out.shape} {out.dtype}")
    if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * dim or q.shape[1] % kv_cache.shape[1] or kv_cache.dtype != q.dtype:
        raise ValueError(f"kv_cache must be [num_blocks, HKV, block_size, {2 * dim}] {q.dtype}, got {kv_cache.shape} {kv_cache.dtype}")
    if dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head size must be a power of two in 16..256, got {dim}")
    for name, t in (("token_start", token_start), ("num_rows", num_rows), ("prefix_len", prefix_len), ("mask_start", mask_start)):
        if t.shape != (num_requests,) or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{num_requests}], got {t.shape}")
    if block_table.dim() != 2 or block_table.shape[0] < num_requests or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be [>= {num_requests}, max_blocks], inner stride 1, got {block_table.shape}")
    if row_mask.dim() != 2 or row_mask.dtype != torch.int32 or row_mask.stride(1) != 1 or row_mask.shape[1] * 32 < num_slots:
        raise ValueError(f"row_mask must be int32 [rows, >= {num_slots} / 32 words], got {row_mask.shape} {row_mask.dtype}")


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
) -> torch.Tensor:
    """softmax(scale * q K^T) V for every row of every request, over the request's prefix and the visible keys after it.

    Row i of request r is token row `token_start[r] + i`. It sees the positions below `prefix_len[r]`, and position
    `prefix_len[r] + j` iff bit `j % 32` of `row_mask[mask_start[r] + i, j // 32]` is set (j < `num_slots`); where
    `mask_start[r] < 0` the rows are causal instead: j <= i. Softmax in fp32, products in the cache's dtype. A key that no
    row of a tile sees is not read; a non-finite K or V makes the rows that see it NaN and leaves the others' bits alone.

    q            [token rows, HQ, D] fp32/fp16/bf16, inner stride 1; query head h reads KV head h // (HQ // HKV)
    kv_cache     [num_blocks, HKV, block_size, 2 * D] q's dtype, any strides: K in [..., :D], V in [..., D:]
    block_table  [R, max_blocks] int32  position p lies in block block_table[r, p // block_size]
    token_start, num_rows, prefix_len, mask_start  [R] int; num_rows 0: the request is skipped
    row_mask     [mask rows, words] int32
    num_slots    static bound on j for masked rows (the tree's width)
    max_rows     static bound on num_rows (sizes the grid)
    out          [token rows, HQ, D] q's dtype, written in place for the rows of the requests only; a row that sees
                 nothing gets 0. Returned.

    Raises ValueError on shapes, strides or dtypes. No host sync; the grid depends on shapes and static bounds only.
    """
    _check(q, kv_cache, block_table, token_start, num_rows, prefix_len, row_mask, mask_start, out, num_slots)
    num_requests, (num_tokens, hq, dim), hkv, block_size = token_start.shape[0], q.shape, kv_cache.shape[1], kv_cache.shape[2]
    if num_requests == 0 or max_rows == 0 or num_tokens == 0:
        return out
    group = hq // hkv
    block_m, block_n, warps, stages = _tile_sizes(max_rows * group, dim, q.element_size())
    tiles = triton.cdiv(max_rows * group, block_m)
    splits = _num_splits(tiles * hkv * num_requests, block_table.shape[1] * block_size, block_n, q.device)
    part, lse = out, out
    if splits > 1:
        # [splits, token rows, HQ, D], [splits, token rows, HQ] log2 units
        part = torch.empty(splits, num_tokens, hq, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, num_tokens, hq, dtype=torch.float32, device=q.device)
    tree_attention_kernel[(tiles * splits, hkv, num_requests)](
        q,
        kv_cache,
        block_table,
        token_start,
        num_rows,
        prefix_len,
        row_mask,
        mask_start,
        out,
        part,
        lse,
        scale * LOG2E,
        num_slots,
        q.stride(0),
        q.stride(1),
        *kv_cache.stride(),
        block_table.stride(0),
        row_mask.stride(0),
        out.stride(0),
        out.stride(1),
        num_tokens * hq,
        HQ=hq,
        GROUP=group,
        D=dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        NUM_SPLITS=splits,
        PRECISION="ieee",
        INTERPRET=INTERPRET,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        combine_splits_kernel[(max_rows, hq, num_requests)](
            part,
            lse,
            out,
            token_start,
            num_rows,
            num_tokens * hq,
            out.stride(0),
            out.stride(1),
            HQ=hq,
            D=dim,
            NUM_SPLITS=splits,
            num_warps=2,
        )
    return out
