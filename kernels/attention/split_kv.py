"""Attention of tree rows (ancestor mask) and causal rows over a paged KV cache, online softmax, split over the keys.

Tiles that lie in the prefix need no mask; the tiles after it read the row masks.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..conv import pointwise
from ..precision import INTERPRET, device_function
from .tiles import (
    LOG2E,
    TileConfig,
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

# Tiles for many lanes, by name. At 256 lanes per KV head (64 nodes, 4 heads a group) a key is read 256 / block_m times. Compiled for
# sm_90 at head size 256, the loop over the prefix spills nothing in any of them.
CONFIGS = {
    # two warp groups of 64 lanes each; 192 KiB of shared memory at head size 256
    "wide": TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2),
    # half the keys a step, one more step in flight; 160 KiB
    "deep": TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=3),
    # two warp groups share 64 lanes; 160 KiB
    "narrow": TileConfig(block_m=64, block_n=64, num_warps=8, num_stages=2),
    # one warp group and half the keys: two programs share a multiprocessor, one's softmax beside the other's dots; 96 KiB
    "pair": TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2, per_sm=2),
}
MAX_SPLITS = 32


@triton.jit(do_not_specialize=["num_slots", "num_splits", "stride_split"])
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
    p_q_scale,
    p_k_scale,
    p_v_scale,
    scale_log2,
    v_factor,
    num_slots,
    num_splits,
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
    SPLIT: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_tile, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SPLIT:
        i_split = i_tile % num_splits
        i_tile = i_tile // num_splits
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

    # keys after the prefix: up to the tile's last row, or the tree's width
    n_causal = tl.minimum(n_rows, (i_tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    n_tail = tl.where(n_mask < 0, n_causal, num_slots)
    n_tiles = (n_prefix + n_tail + BLOCK_N - 1) // BLOCK_N
    n_full = n_prefix // BLOCK_N
    # tiles full_from..full_to lie in the prefix, tail_from..tail_to hold its rest and the keys after it
    full_from, full_to, tail_from, tail_to = 0, n_full, n_full, n_tiles
    if SPLIT:
        o_part = i_split * stride_split + o_token * HQ + o_head
        n_per_split = (n_tiles + num_splits - 1) // num_splits
        full_from = i_split * n_per_split
        # a split that holds no visible key has log-sum-exp -inf; its output is never read
        if full_from >= n_tiles:
            tl.store(p_lse + o_part, tl.full([BLOCK_M], float("-inf"), dtype=tl.float32), mask=m_row)
            return
        tail_to = tl.minimum(full_from + n_per_split, n_tiles)
        full_to = tl.minimum(tail_to, n_full)
        tail_from = tl.maximum(full_from, n_full)

    # [BLOCK_M, D]; what a masked load returns stays in its lane (q) or is masked in the scores and in V
    b_q = tl.load(p_q + (o_token * stride_q + o_head * stride_qh)[:, None] + o_d[None, :], mask=m_row[:, None])
    b_q = dot_operand(b_q, DTYPE, INTERPRET)
    scale_log2 = scaled(scaled(scale_log2, p_q_scale), p_k_scale)
    b_acc = tl.full([BLOCK_M, D], 0.0, dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    p_head = p_kv + i_h.to(tl.int64) * stride_kvh + o_d[None, :] * stride_dim
    p_table = p_block_table + i_r.to(tl.int64) * stride_table
    o_n = tl.arange(0, BLOCK_N)

    # tiles of the prefix only: everything is visible. A step reads the next one's block ids, so that no address waits for them
    b_next = tl.load(p_table + (full_from * BLOCK_N + o_n) // BLOCK_SIZE, mask=o_n < (full_to - full_from) * BLOCK_N, other=0)
    for i_t in range(full_from, full_to):
        o_pos = i_t * BLOCK_N + o_n
        o_block = b_next.to(tl.int64)
        b_next = tl.load(p_table + (o_pos + BLOCK_N) // BLOCK_SIZE, mask=o_n < (full_to - i_t - 1) * BLOCK_N, other=0)
        p_k = p_head + (o_block * stride_block + (o_pos % BLOCK_SIZE) * stride_pos)[:, None]
        b_k = dot_operand(tl.load(p_k), DTYPE, INTERPRET)
        b_v = dot_operand(tl.load(p_k + D * stride_dim), DTYPE, INTERPRET)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        b_acc, b_max, b_sum = online_softmax(b_s, b_v, b_acc, b_max, b_sum, PRECISION)

    # the prefix's rest and the keys after it
    for i_t in tl.range(tail_from, tail_to, num_stages=1):
        b_s, b_v = masked_tile(
            b_q, p_head, p_table, p_row_mask, stride_block, stride_pos, stride_dim, stride_mask,
            i_t * BLOCK_N, n_prefix, n_tail, n_mask, o_row, n_rows, scale_log2,
            D, BLOCK_N, (BLOCK_N + 30) // 32 + 1, BLOCK_SIZE, PRECISION, INTERPRET,
        )  # fmt: skip
        b_acc, b_max, b_sum = online_softmax(b_s, b_v, b_acc, b_max, b_sum, PRECISION)

    # a lane without a visible key has sum 0: output 0
    b_out = b_acc * (scaled(v_factor, p_v_scale) / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
    if not SPLIT:
        p_o = p_out + (o_token * stride_out + o_head * stride_outh)[:, None] + o_d[None, :]
        tl.store(p_o, round_to(b_out, p_out.dtype.element_ty), mask=m_row[:, None])
    else:
        b_lse = tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_sum))
        tl.store(p_lse + o_part, b_lse, mask=m_row)
        tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_out, mask=m_row[:, None])


@triton.jit(do_not_specialize=["stride_split"])
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
    b_total = tl.sum(b_w, 0)
    # written so that a NaN stays one; 0: the row sees nothing
    b_w = b_w / tl.where(b_total == 0.0, 1.0, b_total)
    # [NUM_SPLITS, D]
    b_part = tl.load(p_part + o_part[:, None] * D + o_d[None, :], mask=m_split[:, None], other=0.0)
    b_out = tl.sum(b_part * b_w[:, None], 0)
    p_o = p_out + i_token * stride_out + i_h * stride_outh + o_d
    tl.store(p_o, round_to(b_out, p_out.dtype.element_ty))


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_config(num_lanes: int, dim: int, itemsize: int) -> TileConfig:
    """The default tile. The interpreter pays per operation, not per element: large tiles."""
    block_m = power_of_two(num_lanes, 16, 128)
    if INTERPRET:
        return TileConfig(block_m, 256, 4, 1)
    if itemsize == 4:
        return TileConfig(16, 16, 4, 1)
    if block_m == 128:
        return CONFIGS["wide"]
    if block_m == 64:
        return CONFIGS["narrow"]
    return TileConfig(block_m, 64, 4, 2, per_sm=2)


def choose_splits(config: TileConfig, num_programs: int, max_keys: int, device: torch.device) -> int:
    """Splits of the keys, a power of two, that fill the device once, at least 4 tiles each; a static choice (from shapes only)."""
    wanted = min(config.per_sm * num_sms(device) // num_programs, max_keys // (4 * config.block_n), MAX_SPLITS)
    return 1 << (max(1, wanted).bit_length() - 1)


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
    config: str | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """softmax(scale * q K^T) V for every row of every request, over the request's prefix and the visible keys after it.

    Row i of request r is token row `token_start[r] + i`. It sees the positions below `prefix_len[r]`, and position
    `prefix_len[r] + j` iff bit `j % 32` of `row_mask[mask_start[r] + i, j // 32]` is set (j < `num_slots`); where
    `mask_start[r] < 0` the rows are causal instead: j <= i. Softmax in fp32, products in q's dtype (bf16 for an 8-bit q). A key
    that no row of a tile sees is not read; a non-finite K or V makes the rows that see it NaN and leaves the others' bits alone.

    q            [token rows, HQ, D] fp32/fp16/bf16, or e4m3 beside an e4m3 cache; inner stride 1; query head h reads KV head
                 h // (HQ // HKV)
    kv_cache     [num_blocks, HKV, block_size, 2 * D] q's dtype or e4m3 (uint8: its bits), any strides: K in [..., :D], V in [..., D:]
    block_table  [R, max_blocks] int32  position p lies in block block_table[r, p // block_size]
    token_start, num_rows, prefix_len, mask_start  [R] int; num_rows 0: the request is skipped
    row_mask     [mask rows, words] int32
    num_slots    static bound on j for masked rows (the tree's width)
    max_rows     static bound on num_rows (sizes the grid)
    out          [token rows, HQ, D] q's dtype (16 or 32 bits where q is e4m3), written in place for the rows of the requests only;
                 a row that sees nothing gets 0. Returned.
    q_scale, k_scale, v_scale  factors of the stored values: a float, or one fp32 element on the device; None: 1
    config       name of a tile of CONFIGS to use instead of the default choice
    num_splits   a power of two up to 32: splits of the keys to use instead of the default choice

    Raises ValueError on shapes, strides or dtypes. No host sync; grid and scratch depend on shapes and static bounds only.
    """
    check_arguments(q, kv_cache, block_table, token_start, num_rows, prefix_len, row_mask, mask_start, out, num_slots)
    if config is not None and config not in CONFIGS:
        raise ValueError(f"unknown config {config!r}, known: {', '.join(CONFIGS)}")
    if num_splits is not None and num_splits not in (1, 2, 4, 8, 16, MAX_SPLITS):
        raise ValueError(f"num_splits must be a power of two up to {MAX_SPLITS}, got {num_splits}")
    num_requests, (num_tokens, hq, dim), hkv, block_size = token_start.shape[0], q.shape, kv_cache.shape[1], kv_cache.shape[2]
    if num_requests == 0 or max_rows == 0 or num_tokens == 0:
        return out
    group = hq // hkv
    tile = choose_config(max_rows * group, dim, q.element_size()) if config is None else CONFIGS[config]
    tiles = triton.cdiv(max_rows * group, tile.block_m)
    if num_splits is None:
        num_splits = choose_splits(tile, tiles * hkv * num_requests, block_table.shape[1] * block_size, q.device)
    part, lse = out, out
    if num_splits > 1:
        # [splits, token rows, HQ, D], [splits, token rows, HQ] log2 units
        part = torch.empty(num_splits, num_tokens, hq, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_splits, num_tokens, hq, dtype=torch.float32, device=q.device)
    (q_factor, p_q), (k_factor, p_k), (v_factor, p_v) = (factor_and_pointer(s) for s in (q_scale, k_scale, v_scale))
    tree_attention_kernel[(tiles * num_splits, hkv, num_requests)](
        operand_bits(q),
        operand_bits(kv_cache),
        block_table,
        token_start,
        num_rows,
        prefix_len,
        row_mask,
        mask_start,
        out,
        part,
        lse,
        p_q,
        p_k,
        p_v,
        scale * q_factor * k_factor * LOG2E,
        v_factor,
        num_slots,
        num_splits,
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
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SPLIT=num_splits > 1,
        DTYPE=dot_dtype(q),
        PRECISION="ieee",
        INTERPRET=INTERPRET,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
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
            NUM_SPLITS=num_splits,
            num_warps=2,
        )
    return out
