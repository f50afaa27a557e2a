"""Ends reasoning where the drafts on a node's own path use the request's budget up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..precision import device_function
from .rows import PathRows, row_of, token_at

# vLLM's own
FORCED = tl.constexpr(1.0e9)


@device_function
def last_match(p_committed, p_path, p_token, total, length, p_marker, known, LEN: tl.constexpr):
    """Where the marker begins for the last time, `known` if it does not end among the drafts."""
    found = known
    for start in range(tl.maximum(total - LEN + 1, 0), length - LEN + 1):
        match = start >= 0
        for j in range(LEN):
            match = match & (token_at(p_committed, p_path, p_token, total, start + j) == tl.load(p_marker + j))
        found = tl.where(match, start, found)
    return found


@triton.jit(do_not_specialize=["first_row"])
def path_budget_kernel(
    p_logits,
    p_node_offset,
    p_row_start,
    p_slot,
    p_token,
    p_path,
    p_depth,
    p_budget,
    p_committed,
    p_total_len,
    p_last_start,
    p_last_end,
    p_start_marker,
    p_natural_end,
    p_end_marker,
    first_row,
    stride_path,
    stride_logits,
    stride_committed,
    START_LEN: tl.constexpr,
    NATURAL_LEN: tl.constexpr,
    END_LEN: tl.constexpr,
):
    # one program a node
    i_r, i_n = tl.program_id(0), tl.program_id(1)
    row, first, is_node, _ = row_of(p_node_offset, p_row_start, first_row, i_r, i_n)
    slot = tl.load(p_slot + i_r).to(tl.int64)
    depth = tl.load(p_depth + first + i_n, mask=is_node, other=0)
    budget = tl.load(p_budget + slot)
    if (depth > 0) & (budget >= 0):
        p_committed += slot * stride_committed
        p_path += (first + i_n) * stride_path
        p_token += first
        total = tl.load(p_total_len + slot)
        length = total + depth
        start = last_match(p_committed, p_path, p_token, total, length, p_start_marker, tl.load(p_last_start + slot), START_LEN)
        end = last_match(p_committed, p_path, p_token, total, length, p_natural_end, tl.load(p_last_end + slot), NATURAL_LEN)
        if (start >= 0) & (start > end) & (length - start - START_LEN >= budget):
            # a forced end marker that has begun goes on
            begun = tl.full([], 0, tl.int32)
            for size in range(1, END_LEN):
                match = size <= length
                for j in range(size):
                    match = match & (token_at(p_committed, p_path, p_token, total, length - size + j) == tl.load(p_end_marker + j))
                begun = tl.where(match, size, begun)
            tl.store(p_logits + row * stride_logits + tl.load(p_end_marker + begun), FORCED)


def force_end(
    logits: torch.Tensor,
    rows: PathRows,
    budget: torch.Tensor,
    committed: torch.Tensor,
    total_len: torch.Tensor,
    last_start: torch.Tensor,
    last_end: torch.Tensor,
    start_marker: torch.Tensor,
    natural_end: torch.Tensor,
    end_marker: torch.Tensor,
) -> None:
    """Force the next token of the end marker, in place, in the rows of nodes below the root whose path uses the budget up.

    logits      [rows, V] fp32, contiguous in V
    budget      [slots] int32 reasoning tokens, -1: no limit
    committed   [slots, positions] int32 all tokens of a request, of which total_len [slots] exist
    last_start, last_end  [slots] int32 where the committed tokens' last start marker and last natural end begin, -1: nowhere
    start_marker, natural_end, end_marker  [tokens] int32; the last one is what is forced

    One launch, no host sync. The rule is vllm.v1.worker.gpu.sample.thinking_budget's.
    """
    path_budget_kernel[rows.grid](
        p_logits=logits, p_budget=budget, p_committed=committed, p_total_len=total_len, p_last_start=last_start, p_last_end=last_end,
        p_start_marker=start_marker, p_natural_end=natural_end, p_end_marker=end_marker, stride_logits=logits.stride(0),
        stride_committed=committed.stride(0), START_LEN=start_marker.shape[0], NATURAL_LEN=natural_end.shape[0],
        END_LEN=end_marker.shape[0], num_warps=1, **rows.kernel_arguments,
    )  # fmt: skip
