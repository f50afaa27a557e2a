"""The tokens that top_k, top_p and min_p leave of a row of logits, best first, in one read of the logits.

A row's k best columns lie in the k blocks of columns with the largest maxima (among equal maxima the earlier blocks): any column of another
block is preceded by those k maxima. So one launch writes every block's maximum, and a second one, a program a row, takes the k best blocks
out of them, reads those again and takes the k best columns out of what it read. What follows, min_p and top_p, concerns k values in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..entries import NOTHING, column_in, entry_of, value_in
from ..precision import INTERPRET, device_function, to_fp32

# the largest top_k that is served
MAX_CANDIDATES = 64
# columns of a block, and blocks of a program of the first launch
BLOCK, BLOCKS = 256, 16
# columns of the result at least: bounds below share their kernels
LEAST_WIDTH = 16

# for a logarithm that nothing looks at
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)

largest, total, summed = device_function(tl.max), device_function(tl.sum), device_function(tl.cumsum)


@triton.jit(do_not_specialize=["num_columns", "num_blocks"])
def maxima_kernel(
    p_logits, p_maximum, num_columns, num_blocks, stride_row, BV: tl.constexpr, BB: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    # [BB] blocks, [BB, BV] their columns
    o_b = tl.program_id(1) * BB + tl.arange(0, BB)
    o_c = o_b[:, None] * BV + tl.arange(0, BV)[None, :]
    b_x = to_fp32(tl.load(p_logits + i_r * stride_row + o_c, mask=o_c < num_columns, other=float("-inf")), INTERPRET)
    b_x = tl.where(b_x == b_x, b_x, float("-inf"))
    tl.store(p_maximum + i_r * num_blocks + o_b, largest(b_x, 1), mask=o_b < num_blocks)


@triton.jit(do_not_specialize=["num_columns", "num_blocks"])
def best_kernel(
    p_logits,
    p_maximum,
    p_slot,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_value,
    p_token,
    num_columns,
    num_blocks,
    stride_row,
    PROCESSED: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    i_s = tl.load(p_slot + i_r)
    temperature = tl.load(p_temperature + i_s)
    greedy = temperature == 0.0
    top_k = tl.where(greedy, 1, tl.minimum(tl.load(p_top_k + i_s), K))
    # [BN] blocks' maxima, [K] the best blocks
    o_n, o_k, o_v = tl.arange(0, BN), tl.arange(0, K), tl.arange(0, BV)
    b_maximum = tl.load(p_maximum + i_r * num_blocks + o_n, mask=o_n < num_blocks, other=float("-inf"))
    b_entry = tl.where(o_n < num_blocks, entry_of(b_maximum, o_n), NOTHING)
    b_block = tl.full([K], 0, tl.int64)
    for i_k in range(top_k):
        b_top = largest(b_entry, 0)
        b_block = tl.where(o_k == i_k, column_in(b_top), b_block)
        b_entry = tl.where(b_entry == b_top, NOTHING, b_entry)
    # [K, BV] their columns; there may be fewer blocks than k
    o_c = b_block[:, None] * BV + o_v[None, :]
    m_c = (o_k[:, None] < tl.minimum(top_k, num_blocks)) & (o_c < num_columns)
    b_x = to_fp32(tl.load(p_logits + i_r * stride_row + o_c, mask=m_c, other=float("-inf")), INTERPRET)
    b_x = tl.where(b_x == b_x, b_x, float("-inf"))
    if not PROCESSED:
        b_x = b_x / tl.where(greedy, 1.0, temperature)
    b_all = tl.where(m_c, entry_of(b_x, o_c.to(tl.int32)), NOTHING)
    # [K] the best columns
    b_best = tl.full([K], NOTHING, tl.int64)
    for i_k in range(top_k):
        b_top = largest(largest(b_all, 1), 0)
        b_best = tl.where(o_k == i_k, b_top, b_best)
        b_all = tl.where(b_all == b_top, NOTHING, b_all)
    m_k = b_best != NOTHING
    b_value = tl.where(m_k, value_in(b_best), float("-inf"))
    best = largest(b_value, 0)
    if not PROCESSED:
        min_p = tl.load(p_min_p + i_s)
        least = tl.where((min_p > 0.0) & (temperature != 0.0), best + tl.log(tl.maximum(min_p, SMALLEST)), float("-inf"))
        b_value = tl.where(b_value < least, float("-inf"), b_value)
    # a row without a finite logit has no probabilities: its best column stays
    b_weight = tl.where(b_value > float("-inf"), tl.exp(b_value - best), 0.0)
    top_p = tl.load(p_top_p + i_s)
    # kept as long as those before it do not make up top_p
    before = summed(b_weight, 0) - b_weight
    m_kept = (o_k == 0) | (before < tl.where(top_p < 1.0, top_p * total(b_weight, 0), float("inf")))
    tl.store(p_value + i_r * K + o_k, tl.where(m_kept, b_value, float("-inf")))
    tl.store(p_token + i_r * K + o_k, tl.where(m_k, column_in(b_best), 0))


def best_tokens(
    logits: torch.Tensor,
    slot: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    most: int,
    processed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, V] -> (values [N, K] fp32: logit / temperature, -inf for what is cut; tokens [N, K] int64), K a power of two.

    Best first, the lower token among equals. min_p cuts first, then top_k, then top_p of what is left: a token is kept while the tokens
    before it make up less than top_p. A request of temperature 0 has one candidate. A NaN counts as -inf.

    logits     bfloat16, float16 or float32, contiguous in V
    slot       [N] integers: row -> its request's place in the following [S]
    temperature, top_p, min_p [S] fp32; top_k [S] int32, 1 or more
    most       bound of top_k over the rows whose temperature is not 0, at most MAX_CANDIDATES; larger ones are cut to K
    processed  temperature and min_p are applied already; the temperatures only tell greedy rows

    No host sync. Raises ValueError on a bound out of range, wrong strides or dtypes.
    """
    num_rows, num_columns = logits.shape
    if not 1 <= most <= MAX_CANDIDATES:
        raise ValueError(f"most={most} must lie in 1..{MAX_CANDIDATES}: use a sampler of whole rows for more candidates")
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32) or (num_columns > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be bfloat16, float16 or float32 and contiguous in V, got {logits.dtype}, strides {logits.stride()}")
    device, num_blocks = logits.device, triton.cdiv(num_columns, BLOCK)
    width = max(LEAST_WIDTH, triton.next_power_of_2(most))
    maximum = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    value = torch.empty(num_rows, width, dtype=torch.float32, device=device)
    token = torch.empty(num_rows, width, dtype=torch.int64, device=device)
    # the interpreter pays per operation
    blocks = triton.next_power_of_2(num_blocks) if INTERPRET else BLOCKS
    maxima_kernel[(num_rows, triton.cdiv(num_blocks, blocks))](
        logits, maximum, num_columns, num_blocks, logits.stride(0), BV=BLOCK, BB=blocks, INTERPRET=INTERPRET
    )
    best_kernel[(num_rows,)](
        logits, maximum, slot, temperature, top_k, top_p, min_p, value, token, num_columns, num_blocks, logits.stride(0),
        PROCESSED=processed, BV=BLOCK, BN=triton.next_power_of_2(num_blocks), K=width, INTERPRET=INTERPRET,
        num_warps=16 if width > 32 else 8,
    )  # fmt: skip
    return value, token
