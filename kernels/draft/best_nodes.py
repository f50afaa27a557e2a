"""The selection of a tree's nodes in one launch: the spine, then the best other candidates in the order of their indices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..entries import NOTHING, entry_of
from ..precision import device_function

largest, running_total = device_function(tl.max), device_function(tl.cumsum)


@triton.jit
def select_kernel(
    p_token,
    p_parent,
    p_logprob,
    p_node_of,
    p_out_token,
    p_out_parent,
    p_out_logprob,
    num_others,
    num_selected,
    M: tl.constexpr,
    K: tl.constexpr,
    DEPTH_WIDTH: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    MP: tl.constexpr,
    TP: tl.constexpr,
):
    # one program a request
    i_r = tl.program_id(0).to(tl.int64)
    p_token += i_r * M
    p_parent += i_r * M
    p_logprob += i_r * M
    p_node_of += i_r * M
    p_out_token += i_r * T
    p_out_parent += i_r * T
    p_out_logprob += i_r * T
    # [MP] candidates; the spine's are the first of every depth
    o_c = tl.arange(0, MP)
    m_c = o_c < M
    b_depth = tl.where(o_c < K, 1, 2 + (o_c - K) // DEPTH_WIDTH)
    m_spine = m_c & ((o_c == 0) | ((o_c >= K) & ((o_c - K) % DEPTH_WIDTH == 0)))
    b_logprob = tl.load(p_logprob + o_c, mask=m_c, other=0.0)
    b_entry = tl.where(m_c & (m_spine == 0), entry_of(b_logprob, o_c), NOTHING)
    m_taken = o_c < 0
    for _ in range(num_others):
        m_best = (b_entry == largest(b_entry)) & (b_entry > NOTHING)
        m_taken = m_taken | m_best
        b_entry = tl.where(m_best, NOTHING, b_entry)
    # candidate -> node: the spine at its depth, the others behind it in order
    b_node = tl.where(m_spine, b_depth, D + running_total(m_taken.to(tl.int32), 0))
    tl.store(p_node_of + o_c, b_node, mask=m_c)
    # what the request has no candidate for, and the root
    o_t = tl.arange(0, TP)
    m_pad = (o_t < T) & ((o_t == 0) | (o_t >= num_selected))
    tl.store(p_out_token + o_t, tl.full([TP], -1, tl.int32), mask=m_pad)
    tl.store(p_out_parent + o_t, tl.where(o_t == 0, -1, 0), mask=m_pad)
    tl.store(p_out_logprob + o_t, tl.where(o_t == 0, 0.0, float("-inf")), mask=m_pad)
    # a parent's node was written by another thread
    tl.debug_barrier()
    m_node = m_spine | m_taken
    b_parent = tl.load(p_parent + o_c, mask=m_node, other=-1)
    b_parent_node = tl.load(p_node_of + b_parent, mask=m_node & (b_parent >= 0), other=0)
    tl.store(p_out_token + b_node, tl.load(p_token + o_c, mask=m_node, other=0).to(tl.int32), mask=m_node)
    tl.store(p_out_parent + b_node, b_parent_node, mask=m_node)
    tl.store(p_out_logprob + b_node, b_logprob, mask=m_node)


def launch(candidates, shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grow.select`: (token, parent, logprob) [R, T] of the candidates."""
    num_requests, device = candidates.token.shape[0], candidates.token.device
    token = torch.empty(num_requests, shape.num_nodes, dtype=torch.int32, device=device)
    parent, logprob = torch.empty_like(token), torch.empty_like(token, dtype=torch.float32)
    node_of = torch.empty(num_requests, shape.num_candidates, dtype=torch.int32, device=device)
    if num_requests:
        select_kernel[(num_requests,)](
            candidates.token,
            candidates.parent,
            candidates.logprob,
            node_of,
            token,
            parent,
            logprob,
            shape.num_selected - 1 - shape.max_depth,
            shape.num_selected,
            M=shape.num_candidates,
            K=shape.topk,
            DEPTH_WIDTH=shape.beam * shape.topk,
            D=shape.max_depth,
            T=shape.num_nodes,
            MP=triton.next_power_of_2(shape.num_candidates),
            TP=triton.next_power_of_2(shape.num_nodes),
            num_warps=1 if shape.num_candidates <= 512 else 4,
        )
    return token, parent, logprob
