"""The solve for trees of at most 32 nodes: the state is the left operand, as it lies in memory.

Few nodes leave little to compute beside reading the state, so a program takes several tiles of it that share a key head, one after the
other, and reads the next while it works on the last (where the batch is large enough to keep the card full). Everything is transposed:
R^T = beta (V^T - exp(P) S^T K^T), O^T = exp(P) S^T Q^T + R^T Y^T.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..conv import pointwise
from ..overlap import after_previous, wait_for_previous
from ..precision import device_function, dot, finite_or_zero, state_dot, to_fp32
from .dense import ancestor_mask, dense_block, keys_and_queries

round_to = device_function(pointwise.round_to)

MAX_NODES = 32


@triton.jit
def small_solve_kernel(
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
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_U: tl.constexpr,
    STATE: tl.constexpr,
    FACTORS: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    # one program: a request and TILES tiles of BV values, of heads that share a key head
    i_g, i_r = tl.program_id(0), tl.program_id(1)
    node_start = tl.load(p_node_offset + i_r)
    num_nodes = tl.load(p_node_offset + i_r + 1) - node_start
    if num_nodes <= 0:
        if OVERLAP:
            wait_for_previous()
        return
    row_start = tl.load(p_token_start + i_r).to(tl.int64)
    node_start = node_start.to(tl.int64)
    p_s = p_state + tl.load(p_state_slot + i_r).to(tl.int64) * stride_s_slot
    TILES_PER_HEAD: tl.constexpr = DV // BV
    i_hk = i_g * TILES // (TILES_PER_HEAD * (HV // HK))
    HALF: tl.constexpr = DK // 2
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, HALF)
    m_t = o_t < num_nodes
    # a request's own part of every array, so that offsets within fit 32 bits
    p_q += node_start * (HK * DK)
    p_k += node_start * (HK * DK)
    p_v += node_start * (HV * DV)
    p_q_scale += node_start * HK
    p_k_scale += node_start * HK
    p_beta += node_start * HV
    p_p += node_start * HV
    p_depth += node_start
    p_ancestors += node_start * W
    p_z += node_start * (HV * D)
    p_y += node_start * (HV * D)
    p_o += row_start * stride_o_row
    p_u += node_start * (HV * DV)
    o_key = o_t * HK + i_hk
    if TILES == 1:
        # [DK / 2, 2 BT] halves of K^T beside Q^T
        p_kq, m_kq = keys_and_queries(p_k, p_q, 0, num_nodes, i_hk, o_d, HK, DK, BT)
        b_kq0 = tl.trans(tl.load(p_kq, mask=m_kq, other=0.0))
        b_kq1 = tl.trans(tl.load(p_kq + HALF, mask=m_kq, other=0.0))
    else:
        # [DK / 2, BT] halves apart: in a loop the one product's way back into two blocks costs more than its barrier
        o_kq = o_key[:, None] * DK + o_d[None, :]
        b_k0 = tl.trans(tl.load(p_k + o_kq, mask=m_t[:, None], other=0.0))
        b_k1 = tl.trans(tl.load(p_k + HALF + o_kq, mask=m_t[:, None], other=0.0))
        b_q0 = tl.trans(tl.load(p_q + o_kq, mask=m_t[:, None], other=0.0))
        b_q1 = tl.trans(tl.load(p_q + HALF + o_kq, mask=m_t[:, None], other=0.0))
    b_k_scale = tl.load(p_k_scale + o_key, mask=m_t, other=0.0)
    b_q_scale = tl.load(p_q_scale + o_key, mask=m_t, other=0.0)
    b_level = tl.load(p_depth + o_t, mask=m_t, other=0)
    m_ancestor = ancestor_mask(p_ancestors, o_t, m_t, 0, W, BT)

    for i in tl.range(0, TILES, num_stages=STAGES):
        i_tile = i_g * TILES + i
        i_hv = i_tile // TILES_PER_HEAD
        o_v = (i_tile % TILES_PER_HEAD) * BV + tl.arange(0, BV)
        o_head = o_t * HV + i_hv
        # [BV, DK / 2], the order in which vLLM stores it
        p_tile = p_s + i_hv.to(tl.int64) * stride_s_head + o_v[:, None] * stride_s_v + o_d[None, :] * stride_s_k
        b_s0 = to_fp32(tl.load(p_tile), INTERPRET)
        b_s1 = to_fp32(tl.load(p_tile + HALF * stride_s_k), INTERPRET)
        # [BV, BT]
        o_tv = o_head[None, :] * DV + o_v[:, None]
        b_v = tl.load(p_v + o_tv, mask=m_t[None, :], other=0.0)
        b_beta = tl.load(p_beta + o_head, mask=m_t, other=0.0)[None, :]
        b_decay = tl.exp(tl.load(p_p + o_head, mask=m_t, other=0.0))
        if TILES > 1 or not OVERLAP:
            o_rows = o_head
            if OVERLAP:
                o_rows = o_t * HV + after_previous(i_hv)
            b_y = dense_block(p_y, b_level, m_ancestor, o_rows, D)
            if HAS_U:
                b_z = dense_block(p_z, b_level, m_ancestor, o_rows, D)
        # (K S)^T and (Q S)^T [BV, BT]
        if TILES == 1:
            b_kqs = state_dot(b_s0, b_kq0, tl.full([BV, 2 * BT], 0.0, tl.float32), True, STATE)
            b_kqs = state_dot(b_s1, b_kq1, b_kqs, True, STATE)
            b_ks, b_qs = tl.split(tl.permute(tl.reshape(b_kqs, (BV, 2, BT)), (0, 2, 1)))
        else:
            b_ks = state_dot(b_s0, b_k0, tl.full([BV, BT], 0.0, tl.float32), True, STATE)
            b_qs = state_dot(b_s0, b_q0, tl.full([BV, BT], 0.0, tl.float32), True, STATE)
            b_ks = state_dot(b_s1, b_k1, b_ks, True, STATE)
            b_qs = state_dot(b_s1, b_q1, b_qs, True, STATE)
        # what is not finite becomes 0 (0 * NaN would reach every row): the node's and its descendants' rows of Z and Y are NaN
        # an explicit fma: whether the compiler makes one of * and - differs with TILES, which would let the batch size change bits
        b_r = finite_or_zero(b_beta * tl.fma(-(b_decay * b_k_scale)[None, :], b_ks, to_fp32(b_v, INTERPRET)))
        b_o = (b_decay * b_q_scale)[None, :] * b_qs
        if TILES == 1 and OVERLAP:
            wait_for_previous()
            b_y = dense_block(p_y, b_level, m_ancestor, o_head, D)
            if HAS_U:
                b_z = dense_block(p_z, b_level, m_ancestor, o_head, D)
        b_o += dot(b_r, tl.trans(b_y), FACTORS)
        p_out = p_o + o_t[None, :] * stride_o_row + i_hv * DV + o_v[:, None]
        tl.store(p_out, round_to(b_o, p_o.dtype.element_ty), mask=m_t[None, :])
        if HAS_U:
            tl.store(p_u + o_tv, dot(b_r, tl.trans(b_z), FACTORS), mask=m_t[None, :])
