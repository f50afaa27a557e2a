"""One depth of a proposal tree in one launch: the children's scores, the next frontier, what its rows may attend to, and their inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..entries import NOTHING, column_in, entry_of
from ..precision import device_function

# elements of an output that a program moves at a time
MOVED = 4096

largest = device_function(tl.max)


class RowInputs(NamedTuple):
    """Where the draft model reads a depth's rows, at the same place for every depth; see `grow.extend`."""

    # [R * w, H] a row's parent's output
    hidden: torch.Tensor
    # [R * w] int64 RoPE positions
    positions: torch.Tensor


class RowOutputs(NamedTuple):
    """What the next depth's inputs are made of; not the memory that they go to."""

    # [R * w, H] outputs of the depth's rows
    hidden: torch.Tensor
    # [R * w] int64 positions of the next depth's
    next_positions: torch.Tensor


@triton.jit(do_not_specialize=["first", "first_row"])
def extend_kernel(
    p_child,
    p_step,
    p_token,
    p_parent,
    p_logprob,
    p_frontier,
    p_mask,
    p_room,
    p_next_frontier,
    p_next_token,
    p_next_mask,
    p_source,
    p_hidden,
    p_position,
    p_next_hidden,
    p_next_position,
    first,
    first_row,
    stride_hidden,
    stride_next_hidden,
    M: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    CP: tl.constexpr,
    WORDS_P: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
):
    # one program a request and new frontier row
    i_r, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_child += i_r * (W * K)
    p_step += i_r * (W * K)
    p_token += i_r * M
    p_parent += i_r * M
    p_logprob += i_r * M
    p_frontier += i_r * W
    p_mask += i_r * (W * WORDS)
    o_row = i_r * W + i_b
    # [CP] children, row by row
    o_c = tl.arange(0, CP)
    m_c = o_c < W * K
    b_parent = tl.load(p_frontier + o_c // K, mask=m_c, other=0)
    b_logprob = tl.load(p_logprob + b_parent, mask=m_c, other=0.0) + tl.load(p_step + o_c, mask=m_c, other=0.0)
    # the frontier's entries, which are read above, lie before these
    m_first = o_c < tl.where(i_b == 0, W * K, 0)
    tl.store(p_token + first + o_c, tl.load(p_child + o_c, mask=m_first, other=0), mask=m_first)
    tl.store(p_parent + first + o_c, b_parent, mask=m_first)
    tl.store(p_logprob + first + o_c, b_logprob, mask=m_first)
    # child 0 is the spine's, kept whatever its score
    b_entry = tl.where(m_c & (o_c > 0), entry_of(b_logprob, o_c), NOTHING)
    child = tl.full([], 0, tl.int64)
    for _i in range(i_b):
        best = largest(b_entry)
        b_entry = tl.where(b_entry == best, NOTHING, b_entry)
        child = column_in(best)
    row = child // K
    tl.store(p_next_frontier + o_row, first + child)
    tl.store(p_next_token + o_row, tl.load(p_child + child))
    tl.store(p_source + o_row, i_r * W + row)
    own_row = first_row + i_b
    bit = tl.full([], 1, tl.int32) << (own_row % 32)
    o_w = tl.arange(0, WORDS_P)
    b_own = tl.where((o_w == own_row // 32) & (own_row < tl.load(p_room + i_r)), bit, 0)
    b_seen = tl.load(p_mask + row * WORDS + o_w, mask=o_w < WORDS, other=0)
    tl.store(p_next_mask + o_row * WORDS + o_w, b_seen | b_own, mask=o_w < WORDS)
    # no output: the depth is the last
    if H > 0:
        tl.store(p_next_position + o_row, tl.load(p_position + o_row))
        o_h = tl.arange(0, BH)
        for start in range(0, H, BH):
            m_h = start + o_h < H
            b_hidden = tl.load(p_hidden + (i_r * W + row) * stride_hidden + start + o_h, mask=m_h)
            tl.store(p_next_hidden + o_row * stride_next_hidden + start + o_h, b_hidden, mask=m_h)


def launch(
    candidates, child: torch.Tensor, step: torch.Tensor, depth: int, shape, outputs: RowOutputs | None, inputs: RowInputs | None
) -> torch.Tensor:
    """`grow.extend` from the children [R, w, k] and their log-probabilities; updates `candidates` in place and returns source_row."""
    num_requests, device = child.shape[0], child.device
    frontier = torch.empty(num_requests, shape.beam, dtype=torch.int64, device=device)
    source, mask = torch.empty_like(frontier), torch.empty_like(candidates.frontier_mask)
    moved = (child,) * 4 if outputs is None else (*outputs, *inputs)
    width = 0 if outputs is None else outputs.hidden.shape[1]
    if num_requests:
        extend_kernel[num_requests, shape.beam](
            child,
            step,
            candidates.token,
            candidates.parent,
            candidates.logprob,
            candidates.frontier,
            candidates.frontier_mask,
            candidates.room,
            frontier,
            candidates.frontier_token,
            mask,
            source,
            *moved,
            shape.first_candidate(depth),
            (depth - 1) * shape.beam,
            moved[0].stride(0),
            moved[2].stride(0),
            M=shape.num_candidates,
            W=shape.beam,
            K=shape.topk,
            WORDS=shape.num_words,
            CP=triton.next_power_of_2(shape.beam * shape.topk),
            WORDS_P=triton.next_power_of_2(shape.num_words),
            H=width,
            BH=min(MOVED, triton.next_power_of_2(max(width, 1))),
            num_warps=4 if width else 1,
        )
    candidates.frontier, candidates.frontier_mask = frontier, mask
    return source
