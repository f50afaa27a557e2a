"""The k best tokens of every row of logits and their log-probabilities, in one read of the logits and without a softmax in memory.

Programs scan parts of a row and keep a running maximum, a sum of exponentials and the k best columns. A block of columns whose largest
value does not beat the k-th best so far costs no more than its exponentials; in another one the best column is taken out until it does
not. That is k times in the first block, and in a row in random order about k / n times in the n-th. A second launch merges the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..entries import EVERYTHING, NOTHING, column_in, entry_of, order_in, order_of, value_in
from ..overlap import launch_options, let_next_start, overlaps, wait_for_previous
from ..precision import INTERPRET, device_function, to_fp32

# bounds of a step's log-probability: see `grow`
MIN_STEP_LOGPROB = -100.0
MAX_STEP_LOGPROB = -1e-3

# about four programs on each of an H200's 132 multiprocessors: all are resident at once (four warps of at most 128 registers)
PROGRAMS, MAX_SPLITS = 512, 128

LOWEST, HIGHEST = tl.constexpr(MIN_STEP_LOGPROB), tl.constexpr(MAX_STEP_LOGPROB)
# the maximum of a part without finite values: exp(-inf - it) is 0, not NaN
NO_MAXIMUM = tl.constexpr(torch.finfo(torch.float32).min)

largest, smallest, total = device_function(tl.max), device_function(tl.min), device_function(tl.sum)


# what differs between batch sizes must not make new variants
@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def scan_kernel(
    p_logits,
    p_entry,
    p_part,
    num_rows,
    num_columns,
    stride_row,
    blocks_per_split,
    K: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if OVERLAP:
        let_next_start()
    i_r, i_s, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first = i_s * blocks_per_split * BV
    end = tl.minimum(first + blocks_per_split * BV, num_columns)
    # [BR, 1] rows, [1, BV] columns of a block, [1, KP] entries
    o_r = i_r * BR + tl.arange(0, BR)[:, None]
    o_v, o_k = tl.arange(0, BV)[None, :], tl.arange(0, KP)[None, :]
    m_r = o_r < num_rows
    o_part = o_r.to(tl.int64) * num_splits + i_s
    p_row = p_logits + o_r.to(tl.int64) * stride_row
    b_max = tl.full([BR, 1], NO_MAXIMUM, tl.float32)
    b_sum = tl.full([BR, BV], 0.0, tl.float32)
    # [BR, KP] the best entries in any order: at first K distinct ones below all others; places from K on never change
    b_list = tl.where(o_k < K, tl.full([BR, KP], NOTHING, tl.int64) + o_k, EVERYTHING)
    b_worst = smallest(b_list, 1, keep_dims=True)
    b_next = tl.load(p_row + first + o_v, mask=m_r & (first + o_v < end), other=float("-inf"))
    for start in range(first, end, BV):
        o_c = start + o_v
        b_x = to_fp32(b_next, INTERPRET)
        # in flight while this block is worked on
        b_next = tl.load(p_row + o_c + BV, mask=m_r & (o_c + BV < end), other=float("-inf"))
        # a NaN spoils the sum, and is chosen like -inf
        b_value = tl.where(b_x == b_x, b_x, float("-inf"))
        b_best = largest(b_value, 1, keep_dims=True)
        b_new = tl.maximum(b_max, b_best)
        b_sum = b_sum * tl.exp(b_max - b_new) + tl.exp(b_x - b_new)
        b_max = b_new
        if largest((order_of(b_best) > order_in(b_worst)).to(tl.int32)) > 0:
            b_entry = tl.where(o_c < end, entry_of(b_value, o_c), NOTHING)
            b_top = largest(b_entry, 1, keep_dims=True)
            while largest((b_top > b_worst).to(tl.int32)) > 0:
                b_list = tl.where(b_list == b_worst, tl.maximum(b_top, b_worst), b_list)
                b_worst = smallest(b_list, 1, keep_dims=True)
                b_entry = tl.where(b_entry == b_top, NOTHING, b_entry)
                b_top = largest(b_entry, 1, keep_dims=True)
    tl.store(p_part + o_part, b_max, mask=m_r)
    tl.store(p_part + num_rows.to(tl.int64) * num_splits + o_part, total(b_sum, 1, keep_dims=True), mask=m_r)
    tl.store(p_entry + o_part * K + o_k, b_list, mask=m_r & (o_k < K))


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_kernel(
    p_entry,
    p_part,
    p_token_ids,
    p_token,
    p_logprob,
    num_rows,
    num_splits,
    HAS_IDS: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    BE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # [BR, 1] rows, [1, .] splits, their entries, the ones to keep
    o_r = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None].to(tl.int64)
    o_s, o_e, o_k = tl.arange(0, BS)[None, :], tl.arange(0, BE)[None, :], tl.arange(0, KP)[None, :]
    m_r = o_r < num_rows
    m_s, m_k = m_r & (o_s < num_splits), m_r & (o_k < K)
    p_max = p_part + o_r * num_splits + o_s
    if OVERLAP:
        wait_for_previous()
    b_max = tl.load(p_max, mask=m_s, other=NO_MAXIMUM)
    b_sum = tl.load(p_max + num_rows.to(tl.int64) * num_splits, mask=m_s, other=0.0)
    b_entry = tl.load(p_entry + o_r * num_splits * K + o_e, mask=m_r & (o_e < num_splits * K), other=NOTHING)
    b_all_max = largest(b_max, 1, keep_dims=True)
    b_sum = total(b_sum * tl.exp(b_max - b_all_max), 1, keep_dims=True)
    b_chosen = tl.full([BR, KP], NOTHING, tl.int64)
    for i_k in range(K):
        b_top = largest(b_entry, 1, keep_dims=True)
        b_chosen = tl.where(o_k == i_k, b_top, b_chosen)
        b_entry = tl.where(b_entry == b_top, NOTHING, b_entry)
    b_token = column_in(b_chosen)
    if HAS_IDS:
        b_token = tl.load(p_token_ids + b_token, mask=m_k, other=0)
    # a sum of 0: all are -inf
    b_logprob = value_in(b_chosen) - b_all_max - tl.log(tl.where(b_sum > 0, b_sum, float("nan")))
    # a NaN is not above the lowest
    b_logprob = tl.where(b_logprob > LOWEST, b_logprob, LOWEST)
    tl.store(p_token + o_r * K + o_k, b_token, mask=m_k)
    tl.store(p_logprob + o_r * K + o_k, tl.minimum(b_logprob, HIGHEST), mask=m_k)


class Tiling(NamedTuple):
    """How the logits are divided: by static sizes only, so that a captured graph serves every content."""

    # rows of a program, columns of its steps (powers of two), parts of a row
    rows: int
    block: int
    splits: int


def tiling_of(num_rows: int, num_columns: int, topk: int, element_bytes: int) -> Tiling:
    """The default tiling. A step of 4 KiB; 2 KiB of 16-bit logits if k is above 8, where 4 KiB would spill registers."""
    if INTERPRET:
        # the interpreter pays per operation
        block = min(triton.next_power_of_2(num_columns), 2**16)
        return Tiling(min(triton.next_power_of_2(num_rows), 2**18 // block), block, 1)
    block = 1024 if element_bytes > 2 or topk > 8 else 2048
    return Tiling(1, block, max(1, min(triton.cdiv(num_columns, block), MAX_SPLITS, PROGRAMS // num_rows)))


def launch(
    logits: torch.Tensor, topk: int, token_ids: torch.Tensor | None, token: torch.Tensor, logprob: torch.Tensor, tiling: Tiling
) -> None:
    """`top_children` of logits [rows, V] into contiguous token and logprob [rows, k]."""
    (num_rows, num_columns), device = logits.shape, logits.device
    blocks = triton.cdiv(num_columns, tiling.block)
    blocks_per_split = triton.cdiv(blocks, tiling.splits)
    splits = triton.cdiv(blocks, blocks_per_split)
    # of every part: its k best entries; its maximum and its sum of exponentials below that
    entry = torch.empty(num_rows, splits, topk, dtype=torch.int64, device=device)
    part = torch.empty(2, num_rows, splits, dtype=torch.float32, device=device)
    grid, overlap = (triton.cdiv(num_rows, tiling.rows), splits), overlaps(device)
    common = {"K": topk, "KP": triton.next_power_of_2(topk), "BR": tiling.rows, "OVERLAP": overlap}
    scan_kernel[grid](
        logits, entry, part, num_rows, num_columns, logits.stride(0), blocks_per_split, BV=tiling.block, INTERPRET=INTERPRET, **common
    )
    merged = triton.next_power_of_2(splits * topk)
    common |= {"BS": triton.next_power_of_2(splits), "BE": merged, "num_warps": 1 if merged <= 256 else 4, **launch_options(overlap)}
    ids = entry if token_ids is None else token_ids
    merge_kernel[grid[:1]](entry, part, ids, token, logprob, num_rows, splits, HAS_IDS=token_ids is not None, **common)


def top_children(
    logits: torch.Tensor, topk: int, token_ids: torch.Tensor | None = None, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [..., V] -> tokens [..., k] int64 and clamped log-probabilities [..., k] fp32, best first, the lower column among equals.

    logits     bfloat16, float16 or float32, contiguous in V
    token_ids  [V] int64 column of the logits -> token id; None: they are the same
    out        where the tokens and log-probabilities go, contiguous; None: new tensors

    A row without a proper distribution (NaN, +inf, all -inf) still gives k distinct tokens, at the lowest score; a NaN is chosen like -inf.
    No host sync. Raises ValueError if the vocabulary is smaller than k, or on wrong shapes, strides or dtypes.
    """
    num_columns = logits.shape[-1]
    if not 1 <= topk <= num_columns:
        raise ValueError(f"topk={topk} distinct children cannot be drawn from a vocabulary of {num_columns}")
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32) or (num_columns > 1 and logits.stride(-1) != 1):
        raise ValueError(f"logits must be bfloat16, float16 or float32 and contiguous in V, got {logits.dtype}, strides {logits.stride()}")
    if token_ids is not None and (token_ids.shape != (num_columns,) or token_ids.dtype != torch.int64 or not token_ids.is_contiguous()):
        raise ValueError(f"token_ids must be contiguous int64 [{num_columns}], got {token_ids.dtype} {tuple(token_ids.shape)}")
    shape = (*logits.shape[:-1], topk)
    if out is None:
        out = tuple(torch.empty(shape, dtype=dtype, device=logits.device) for dtype in (torch.int64, torch.float32))
    token, logprob = out
    if any(t.shape != shape or not t.is_contiguous() for t in out) or (token.dtype, logprob.dtype) != (torch.int64, torch.float32):
        raise ValueError(f"out must be contiguous int64 and float32 {shape}")
    if token.numel():
        rows = logits.reshape(-1, num_columns)
        launch(rows, topk, token_ids, token, logprob, tiling_of(rows.shape[0], num_columns, topk, rows.element_size()))
    return token, logprob
