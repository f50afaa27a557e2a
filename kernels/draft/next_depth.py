"""One depth of a proposal tree in one launch: the children's scores, the next frontier and what its rows may attend to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..precision import device_function
from .entries import NOTHING, column_in, entry_of

largest = device_function(tl.max)


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
    first,
    first_row,
    M: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    CP: tl.constexpr,
    WORDS_P: tl.constexpr,
):
    # one program a request
    i_r = tl.program_id(0).to(tl.int64)
    p_child += i_r * (W * K)
    p_step += i_r * (W * K)
    p_token += i_r * M
    p_parent += i_r * M
    p_logprob += i_r * M
    p_frontier += i_r * W
    p_mask += i_r * (W * WORDS)
    p_next_frontier += i_r * W
    p_next_token += i_r * W
    p_next_mask += i_r * (W * WORDS)
    # [CP] children, row by row
    o_c = tl.arange(0, CP)
    m_c = o_c < W * K
    b_parent = tl.load(p_frontier + o_c // K, mask=m_c, other=0)
    b_logprob = tl.load(p_logprob + b_parent, mask=m_c, other=0.0) + tl.load(p_step + o_c, mask=m_c, other=0.0)
    tl.store(p_token + first + o_c, tl.load(p_child + o_c, mask=m_c, other=0), mask=m_c)
    tl.store(p_parent + first + o_c, b_parent, mask=m_c)
    tl.store(p_logprob + first + o_c, b_logprob, mask=m_c)
    # child 0 is the spine's, kept whatever its score
    b_entry = tl.where(m_c & (o_c > 0), entry_of(b_logprob, o_c), NOTHING)
    o_w = tl.arange(0, WORDS_P)
    room = tl.load(p_room + i_r)
    for i_b in range(W):
        child = tl.full([], 0, tl.int64)
        if i_b > 0:
            best = largest(b_entry)
            b_entry = tl.where(b_entry == best, NOTHING, b_entry)
            child = column_in(best)
        row = child // K
        tl.store(p_next_frontier + i_b, first + child)
        tl.store(p_next_token + i_b, tl.load(p_child + child))
        tl.store(p_source + i_r * W + i_b, i_r * W + row)
        own_row = first_row + i_b
        bit = tl.full([], 1, tl.int32) << (own_row % 32)
        b_own = tl.where((o_w == own_row // 32) & (own_row < room), bit, 0)
        b_seen = tl.load(p_mask + row * WORDS + o_w, mask=o_w < WORDS, other=0)
        tl.store(p_next_mask + i_b * WORDS + o_w, b_seen | b_own, mask=o_w < WORDS)


def launch(candidates, child: torch.Tensor, step: torch.Tensor, depth: int, shape) -> torch.Tensor:
    """`grow.extend` from the children [R, w, k] and their log-probabilities; updates `candidates` in place and returns source_row."""
    num_requests, device = child.shape[0], child.device
    frontier = torch.empty(num_requests, shape.beam, dtype=torch.int64, device=device)
    source, mask = torch.empty_like(frontier), torch.empty_like(candidates.frontier_mask)
    if num_requests:
        extend_kernel[(num_requests,)](
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
            shape.first_candidate(depth),
            (depth - 1) * shape.beam,
            M=shape.num_candidates,
            W=shape.beam,
            K=shape.topk,
            WORDS=shape.num_words,
            CP=triton.next_power_of_2(shape.beam * shape.topk),
            WORDS_P=triton.next_power_of_2(shape.num_words),
            num_warps=1,
        )
    candidates.frontier, candidates.frontier_mask = frontier, mask
    return source
