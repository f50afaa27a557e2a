"""The solve by blocks of nodes, for trees of any size.

A program takes the nodes in blocks beside its tile of S_pre. Of a tree larger than a block R goes through `scratch_r`, since
later blocks need it; but no block waits for another's result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..conv import pointwise
from ..overlap import wait_for_previous
from ..precision import device_function, dot, finite_or_zero, state_dot, to_fp32
from .dense import ancestor_mask, dense_block, keys_and_queries

round_to = device_function(pointwise.round_to)


@triton.jit
def block_solve_kernel(
    p_q,
    p_k,
    p_v,
    p_q_scale,
    p_k_scale,
    p_beta,
    p_p,
    p_z,
    p_y,
    p_state,
    p_state_slot,
    p_node_offset,
    p_token_start,
    p_depth,
    p_ancestors,
    p_o,
    p_u,
    p_r,
    stride_s_slot,
    stride_s_head,
    stride_s_k,
    stride_s_v,
    stride_o_row,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    MANY_BLOCKS: tl.constexpr,
    HAS_U: tl.constexpr,
    STATE: tl.constexpr,
    FACTORS: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    node_start = tl.load(p_node_offset + i_r)
    num_nodes = tl.load(p_node_offset + i_r + 1) - node_start
    if num_nodes <= 0:
        if OVERLAP:
            wait_for_previous()
        return
    row_start = tl.load(p_token_start + i_r).to(tl.int64)
    node_start = node_start.to(tl.int64)
    slot = tl.load(p_state_slot + i_r).to(tl.int64)
    i_hk = i_hv // (HV // HK)
    HALF: tl.constexpr = DK // 2
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, HALF)
    o_v = i_v * BV + tl.arange(0, BV)
    # [BV, DK / 2], the order in which vLLM stores it. In halves, so that the terms of one at a time are in shared memory
    p_s = p_state + slot * stride_s_slot + i_hv.to(tl.int64) * stride_s_head + o_v[:, None] * stride_s_v + o_d[None, :] * stride_s_k
    # a request's own part of every array, so that offsets within fit 32 bits
    p_q += node_start * (HK * DK)
    p_k += node_start * (HK * DK)
    p_v += node_start * (HV * DV)
    p_q_scale += node_start * HK
    p_k_scale += node_start * HK
    p_beta += node_start * HV
    p_p += node_start * HV
    p_z += node_start * (HV * D)
    p_y += node_start * (HV * D)
    p_depth += node_start
    p_ancestors += node_start * W
    p_o += row_start * stride_o_row
    p_u += node_start * (HV * DV)
    p_r += node_start * (HV * DV)
    num_blocks = 1
    if MANY_BLOCKS:
        num_blocks = (num_nodes + BT - 1) // BT

    for i_b in range(num_blocks):
        # read again for every block: what a loop keeps in registers would spill
        b_s0 = to_fp32(tl.load(p_s), INTERPRET)
        b_s1 = to_fp32(tl.load(p_s + HALF * stride_s_k), INTERPRET)
        o_i = i_b * BT + o_t
        m_i = o_i < num_nodes
        o_head = o_i * HV + i_hv
        o_key = o_i * HK + i_hk
        p_kq, m_kq = keys_and_queries(p_k, p_q, i_b * BT, num_nodes, i_hk, o_d, HK, DK, BT)
        b_kq0 = tl.load(p_kq, mask=m_kq, other=0.0)
        b_kq1 = tl.load(p_kq + HALF, mask=m_kq, other=0.0)
        o_tv = o_head[:, None] * DV + o_v[None, :]
        b_v = tl.load(p_v + o_tv, mask=m_i[:, None], other=0.0)
        b_beta = tl.load(p_beta + o_head, mask=m_i, other=0.0)
        b_decay = tl.exp(tl.load(p_p + o_head, mask=m_i, other=0.0))
        b_k_decay = b_decay * tl.load(p_k_scale + o_key, mask=m_i, other=0.0)
        b_q_decay = b_decay * tl.load(p_q_scale + o_key, mask=m_i, other=0.0)
        b_level = tl.load(p_depth + o_i, mask=m_i, other=0)
        m_ancestor = ancestor_mask(p_ancestors, o_i, m_i, i_b, W, BT)
        # [2 BT, BV], then K S and Q S [BT, BV]
        b_kqs = state_dot(tl.trans(b_s0), b_kq0, tl.full([2 * BT, BV], 0.0, tl.float32), False, STATE)
        b_kqs = state_dot(tl.trans(b_s1), b_kq1, b_kqs, False, STATE)
        b_ks, b_qs = tl.split(tl.permute(tl.reshape(b_kqs, (2, BT, BV)), (1, 2, 0)))
        # what is not finite becomes 0 (0 * NaN would reach every row): the node's and its descendants' rows of Z and Y are NaN
        b_r = finite_or_zero(b_beta[:, None] * (to_fp32(b_v, INTERPRET) - b_k_decay[:, None] * b_ks))
        b_o = b_q_decay[:, None] * b_qs
        if OVERLAP:
            # up to here only the inputs were needed
            wait_for_previous()
        b_o += dot(dense_block(p_y, b_level, m_ancestor, o_head, D), b_r, FACTORS)
        b_u = b_r
        if HAS_U:
            b_u = dot(dense_block(p_z, b_level, m_ancestor, o_head, D), b_r, FACTORS)
        if MANY_BLOCKS:
            tl.store(p_r + o_tv, b_r, mask=m_i[:, None])
            for i_s in range(i_b):
                # every column is a node: an earlier block is full
                o_j = i_s * BT + o_t
                b_r = tl.load(p_r + (o_j * HV + i_hv)[:, None] * DV + o_v[None, :])
                b_level = tl.load(p_depth + o_j)
                m_ancestor = ancestor_mask(p_ancestors, o_i, m_i, i_s, W, BT)
                b_o += dot(dense_block(p_y, b_level, m_ancestor, o_head, D), b_r, FACTORS)
                if HAS_U:
                    b_u += dot(dense_block(p_z, b_level, m_ancestor, o_head, D), b_r, FACTORS)
            # later blocks read this R, written by other threads of this program
            tl.debug_barrier()
        p_out = p_o + o_i[:, None] * stride_o_row + i_hv * DV + o_v[None, :]
        tl.store(p_out, round_to(b_o, p_o.dtype.element_ty), mask=m_i[:, None])
        if HAS_U:
            tl.store(p_u + o_tv, b_u, mask=m_i[:, None])
