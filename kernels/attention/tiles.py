"""What the attention kernels share: tile shapes, argument checks, 8-bit operands, one tile of keys, the running softmax.

Lanes: the rows of a request and the query heads of one KV head are packed, lane = row * GROUP + head of the group, so that one
program reads the keys once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..precision import INTERPRET, device_function, to_fp32

LOG2E = 1.4426950408889634
FP8 = torch.float8_e4m3fn
# GPUs from compute capability 8.9 on convert e4m3 in hardware
NATIVE_FP8 = (8, 9)


@dataclass(frozen=True)
class TileConfig:
    """Shape of one program. Shared memory at 16 bits: (BLOCK_M + 2 * stages * BLOCK_N) * head size * 2 bytes."""

    block_m: int  # lanes
    block_n: int  # keys of a step
    num_warps: int
    num_stages: int
    # programs that fit one multiprocessor: what the number of splits is chosen by
    per_sm: int = 1


@device_function
def dot_operand(b_x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """q, K or V as the dots take it: DTYPE, and fp32 under the interpreter. Bytes are e4m3 bits; every e4m3 value is exact in 16 bits."""
    if b_x.dtype == tl.uint8:
        b_bits = b_x.to(tl.uint32)
        b_magnitude = b_bits & 0x7F
        # exponent and mantissa moved to fp32's places (subnormals too), then the biases' difference: 2^(127 - 7)
        b_y = (((b_bits & 0x80) << 24) | (b_magnitude << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        b_y = tl.where(b_magnitude == 0x7F, float("nan"), b_y)
        if not INTERPRET:
            b_y = b_y.to(DTYPE)
    elif INTERPRET:
        b_y = to_fp32(b_x, INTERPRET)
    else:
        b_y = b_x.to(DTYPE)
    return b_y


@device_function
def scaled(value, p_scale):
    """value times the scalar at p_scale, if there is one."""
    if p_scale is not None:
        value = value * tl.load(p_scale)
    return value


@device_function
def online_softmax(b_s, b_v, b_acc, b_max, b_sum, PRECISION: tl.constexpr):
    """One step over a tile: b_s [BLOCK_M, BLOCK_N] scores in log2 units (-inf: not visible), b_v [BLOCK_N, D]."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    # a lane that has seen nothing yet: -inf - -inf would be NaN
    b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_ref[:, None])
    b_alpha = tl.exp2(b_max - b_ref)
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
    return b_acc, b_new, b_sum


@device_function
def masked_tile(
    b_q,
    p_head,
    p_table,
    p_row_mask,
    stride_block,
    stride_pos,
    stride_dim,
    stride_mask,
    n_first,
    n_prefix,
    n_tail,
    n_mask,
    o_row,
    n_rows,
    scale_log2,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Scores [BLOCK_M, BLOCK_N] (log2 units, -inf: not visible) and V [BLOCK_N, D] of a tile that reaches behind the prefix.

    b_q [BLOCK_M, D]; p_head [1, D] the head's K at block 0, position 0; n_first the tile's first cache position; n_tail keys behind
    the prefix may be seen; o_row [BLOCK_M] lane -> row, of n_rows; NUM_WORDS mask words that the tile can touch.
    """
    # [BLOCK_N] slot of the tree, or index of the causal row; negative in the prefix
    o_pos = n_first + tl.arange(0, BLOCK_N)
    o_j = o_pos - n_prefix
    m_tail = (o_j >= 0) & (o_j < n_tail)
    # m_see [BLOCK_M, BLOCK_N]; m_key [BLOCK_N]: some lane sees the key. Lanes without a row are never stored: they may see anything
    if n_mask < 0:
        m_see = m_tail[None, :] & (o_j[None, :] <= o_row[:, None])
        m_key = m_tail
    else:
        # [BLOCK_M] a row's words that the tile can touch, a load each; a gather of a word per score costs a third of the kernel
        i_word = tl.maximum(n_first - n_prefix, 0) // 32
        p_word = p_row_mask + (n_mask + o_row).to(tl.int64) * stride_mask + i_word
        b_next = tl.load(p_word, mask=o_row < tl.where(i_word * 32 < n_tail, n_rows, 0), other=0)
        b_word = b_next[:, None]
        b_any = 0 * o_j if INTERPRET else tl.reduce_or(b_next, 0) + 0 * o_j
        for i_next in tl.static_range(1, NUM_WORDS):
            m_next = o_j // 32 == i_word + i_next
            b_next = tl.load(p_word + i_next, mask=o_row < tl.where((i_word + i_next) * 32 < n_tail, n_rows, 0), other=0)
            b_word = tl.where(m_next[None, :], b_next[:, None], b_word)
            if not INTERPRET:
                b_any = tl.where(m_next, tl.reduce_or(b_next, 0), b_any)
        m_see = m_tail[None, :] & (((b_word >> (o_j & 31)[None, :]) & 1) != 0)
        # the interpreter takes a reduction by "or" element by element
        m_key = tl.max(m_see.to(tl.int32), 0) > 0 if INTERPRET else m_tail & (((b_any >> (o_j & 31)) & 1) != 0)
    m_see = m_see | (o_j < 0)[None, :]
    m_key = m_key | (o_j < 0)
    # a key that no lane sees is not read: neither it nor its block table entry need be valid
    o_block = tl.load(p_table + o_pos // BLOCK_SIZE, mask=m_key, other=0).to(tl.int64)
    p_k = p_head + (o_block * stride_block + (o_pos % BLOCK_SIZE) * stride_pos)[:, None]
    b_k = dot_operand(tl.load(p_k, mask=m_key[:, None]), b_q.dtype, INTERPRET)
    b_v = dot_operand(tl.load(p_k + D * stride_dim, mask=m_key[:, None]), b_q.dtype, INTERPRET)
    # 0 * NaN: a non-finite V row leaves the product and poisons the scores of the lanes that see it instead
    b_poison = tl.sum(b_v.to(tl.float32) * 0.0, 1)
    b_v = tl.where((b_poison == 0.0)[:, None], b_v, 0.0)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2 + b_poison[None, :]
    return tl.where(m_see, b_s, float("-inf")), b_v


def operand_bits(x: torch.Tensor) -> torch.Tensor:
    """`x` as a kernel loads it: e4m3 stays where the device converts it, and is passed as bytes elsewhere."""
    if x.dtype not in (FP8, torch.uint8):
        return x
    decode = INTERPRET or torch.cuda.get_device_capability(x.device) < NATIVE_FP8
    return x.view(torch.uint8 if decode else FP8)


def dot_dtype(q: torch.Tensor) -> tl.dtype:
    """dtype of the dots' operands: q's, and bf16 for an 8-bit q."""
    return {torch.float32: tl.float32, torch.float16: tl.float16}.get(q.dtype, tl.bfloat16)


def factor_and_pointer(scale: float | torch.Tensor | None) -> tuple[float, torch.Tensor | None]:
    """A scale known to the host as a factor, one that lies on the device as a tensor for the kernel to read."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(f"a scale must be a float or one fp32 element, got {tuple(scale.shape)} {scale.dtype}")
        return 1.0, scale
    return 1.0 if scale is None else float(scale), None


def check_arguments(q, kv_cache, block_table, token_start, num_rows, prefix_len, row_mask, mask_start, out, num_slots) -> None:
    """ValueError on shapes, strides or dtypes; see `split_kv.tree_attention`."""
    dim, num_requests = q.shape[-1], token_start.shape[0]
    fp8_q, fp8_kv = q.dtype == FP8, kv_cache.dtype in (FP8, torch.uint8)
    if q.dim() != 3 or out.shape != q.shape or q.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"q and out must be alike [token rows, HQ, D], inner stride 1: {tuple(q.shape)}, {tuple(out.shape)}")
    if out.dtype not in ((torch.float32, torch.float16, torch.bfloat16) if fp8_q else (q.dtype,)):
        raise ValueError(f"out must have q's dtype, or 16 or 32 bits where q is e4m3: {q.dtype}, {out.dtype}")
    if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * dim or q.shape[1] % kv_cache.shape[1]:
        raise ValueError(
            f"kv_cache must be [num_blocks, HKV, block_size, {2 * dim}], HKV dividing {q.shape[1]}, got {tuple(kv_cache.shape)}"
        )
    if not fp8_kv and (fp8_q or kv_cache.dtype != q.dtype):
        raise ValueError(f"kv_cache must have q's dtype {q.dtype}, or e4m3 (uint8: its bits), got {kv_cache.dtype}")
    if dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head size must be a power of two in 16..256, got {dim}")
    for name, t in (("token_start", token_start), ("num_rows", num_rows), ("prefix_len", prefix_len), ("mask_start", mask_start)):
        if t.shape != (num_requests,) or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{num_requests}], got {tuple(t.shape)}")
    if block_table.dim() != 2 or block_table.shape[0] < num_requests or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be [>= {num_requests}, max_blocks], inner stride 1, got {tuple(block_table.shape)}")
    if row_mask.dim() != 2 or row_mask.dtype != torch.int32 or row_mask.stride(1) != 1 or row_mask.shape[1] * 32 < num_slots:
        raise ValueError(f"row_mask must be int32 [rows, >= {num_slots} / 32 words], got {tuple(row_mask.shape)} {row_mask.dtype}")


def power_of_two(n: int, smallest: int, largest: int) -> int:
    """The power of two that holds n, within bounds."""
    return min(largest, max(smallest, triton.next_power_of_2(n)))
