"""U = (I + G)^-1 R and O = exp(P) Q S + C U over a forest, tiled over the value dimension.

A program keeps its tile of S_pre on chip and takes the block rows in order: R of the block, minus G times the blocks of U already
solved (read back from `out_u`, this program wrote them), then one product with the inverted diagonal block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import pointwise
from ..factors.block_inverse import BLOCKS, padded_nodes
from ..precision import DEFAULT, INTERPRET, device_function, dot, is_finite, resolve, to_fp32
from ..topology import Forest

round_to = device_function(pointwise.round_to)


@triton.jit
def tree_solve_kernel(
    p_q,
    p_k,
    p_v,
    p_beta,
    p_p,
    p_g,
    p_c,
    p_state,
    p_state_slot,
    p_node_offset,
    p_token_start,
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
    T_PAD: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    KEY_STATE: tl.constexpr,
    QUERY_STATE: tl.constexpr,
    SOLVE: tl.constexpr,
    READOUT: tl.constexpr,
    MASK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    node_start = tl.load(p_node_offset + i_r)
    num_nodes = tl.load(p_node_offset + i_r + 1) - node_start
    if num_nodes <= 0:
        return
    row_start = tl.load(p_token_start + i_r)
    slot = tl.load(p_state_slot + i_r).to(tl.int64)
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, DK)
    o_v = i_v * BV + tl.arange(0, BV)
    # [DK, BV]
    p_s = p_state + slot * stride_s_slot + i_hv.to(tl.int64) * stride_s_head
    b_s = tl.load(p_s + o_d[:, None] * stride_s_k + o_v[None, :] * stride_s_v).to(tl.float32)

    for i_b in range((num_nodes + BT - 1) // BT):
        o_i = i_b * BT + o_t
        m_i = o_i < num_nodes
        o_node = (node_start + o_i).to(tl.int64)
        o_head = o_node * HV + i_hv
        o_kq = (o_node * HK + i_hv // (HV // HK))[:, None] * DK + o_d[None, :]
        b_k = tl.load(p_k + o_kq, mask=m_i[:, None], other=0.0)
        b_q = tl.load(p_q + o_kq, mask=m_i[:, None], other=0.0)
        b_v = to_fp32(tl.load(p_v + o_head[:, None] * DV + o_v[None, :], mask=m_i[:, None], other=0.0), INTERPRET)
        b_beta = tl.load(p_beta + o_head, mask=m_i, other=0.0)
        b_decay = tl.exp(tl.load(p_p + o_head, mask=m_i, other=0.0))
        # [BT, BV]
        b_r = b_beta[:, None] * (b_v - b_decay[:, None] * dot(b_k, b_s, KEY_STATE))
        b_o = b_decay[:, None] * dot(b_q, b_s, QUERY_STATE)
        # A right operand is made finite first (0 * NaN would reach every row); b_bad counts a node's ancestors that were not.
        b_bad = tl.full([BT, BV], 0.0, tl.float32)
        for i_s in range(i_b):
            o_j = i_s * BT + o_t
            p_us = p_u + ((node_start + o_j).to(tl.int64) * HV + i_hv)[:, None] * DV + o_v[None, :]
            # [BT, BT]
            o_factor = o_head[:, None] * T_PAD + o_j[None, :]
            b_g = tl.load(p_g + o_factor, mask=m_i[:, None], other=0.0)
            b_c = tl.load(p_c + o_factor, mask=m_i[:, None], other=0.0)
            b_word = tl.load(p_ancestors + o_node * W + (i_s * BT) // 32, mask=m_i, other=0)
            b_m = ((b_word[:, None] >> ((i_s * BT) % 32 + o_t)[None, :]) & 1).to(tl.float32)
            b_u = tl.load(p_us)
            m_finite = is_finite(b_u)
            b_u = tl.where(m_finite, b_u, 0.0)
            b_r -= dot(b_g, b_u, SOLVE)
            b_o += dot(b_c, b_u, READOUT)
            b_bad += dot(b_m, tl.where(m_finite, 0.0, 1.0), MASK)
        o_factor = o_head[:, None] * T_PAD + (i_b * BT + o_t)[None, :]
        b_z = tl.load(p_g + o_factor, mask=m_i[:, None], other=0.0)
        b_c = tl.load(p_c + o_factor, mask=m_i[:, None], other=0.0)
        b_word = tl.load(p_ancestors + o_node * W + (i_b * BT) // 32, mask=m_i, other=0)
        b_m = ((b_word[:, None] >> ((i_b * BT) % 32 + o_t)[None, :]) & 1).to(tl.float32)
        m_finite = is_finite(b_r)
        b_u = dot(b_z, tl.where(m_finite, b_r, 0.0), SOLVE)
        m_finite = m_finite & is_finite(b_u)
        b_bad += dot(b_m, tl.where(m_finite, 0.0, 1.0), MASK)
        b_o += dot(b_c, tl.where(m_finite, b_u, 0.0), READOUT)
        tl.store(p_u + o_head[:, None] * DV + o_v[None, :], tl.where(b_bad > 0, float("nan"), b_u), mask=m_i[:, None])
        p_out = p_o + (row_start + o_i).to(tl.int64)[:, None] * stride_o_row + i_hv * DV + o_v[None, :]
        tl.store(p_out, round_to(tl.where(b_bad > 0, float("nan"), b_o), p_o.dtype.element_ty), mask=m_i[:, None])
        # later blocks read this U, written by other threads of this program
        tl.debug_barrier()


def value_tile(head_v_dim: int) -> int:
    """BV: 32 fills the card at batch size 1 (4 tiles x 32 heads); the interpreter pays per program, so there one tile."""
    return head_v_dim if INTERPRET else min(head_v_dim, 32)


def _check(q, k, v, beta, p, g, c, state, forest, out_o, out_u, block) -> None:
    capacity, num_value_heads, head_v_dim = v.shape
    num_key_heads, head_k_dim = k.shape[1:]
    per_head = (capacity, num_value_heads)
    t_pad = padded_nodes(forest.max_nodes, block)
    if block not in BLOCKS:
        raise ValueError(f"block must be one of {BLOCKS}, got {block}")
    if (
        num_value_heads % num_key_heads
        or head_k_dim & (head_k_dim - 1)
        or head_v_dim & (head_v_dim - 1)
        or min(head_k_dim, head_v_dim) < 16
    ):
        raise ValueError(f"unsupported heads: HK={num_key_heads}, HV={num_value_heads}, DK={head_k_dim}, DV={head_v_dim}")
    if tuple(state.shape[1:]) != (num_value_heads, head_k_dim, head_v_dim):
        raise ValueError(f"state: expected [slots, {num_value_heads}, {head_k_dim}, {head_v_dim}], got {tuple(state.shape)}")
    if tuple(out_o.shape[1:]) != (num_value_heads, head_v_dim) or out_o.stride(2) != 1 or out_o.stride(1) != head_v_dim:
        raise ValueError(f"out_o: expected [rows, {num_value_heads}, {head_v_dim}] with contiguous rows, got {tuple(out_o.shape)}")
    if not v.is_contiguous():
        raise ValueError("v must be contiguous")
    wanted = {"q": (q, (capacity, num_key_heads, head_k_dim)), "k": (k, (capacity, num_key_heads, head_k_dim))}
    wanted |= {"beta": (beta, per_head), "p": (p, per_head), "out_u": (out_u, (*per_head, head_v_dim))}
    wanted |= {"g": (g, (*per_head, t_pad)), "c": (c, (*per_head, t_pad))}
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous fp32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}")


def tree_solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    p: torch.Tensor,
    g: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    out_o: torch.Tensor,
    out_u: torch.Tensor,
    block: int = 16,
    precision: str = DEFAULT,
) -> None:
    """Equations R, U, O of the closed form over a forest, one layer.

        R = beta (V - exp(P) K S_pre)      U = (I + G)^-1 R      O = exp(P) Q S_pre + C U

    Args:
        q, k: [capacity, HK, DK] fp32; k L2-normalised, q normalised and scaled. v: [capacity, HV, DV], any float dtype.
        beta, p: [capacity, HV] fp32, linear and log (sum of log decays over the path).
        g, c: [capacity, HV, T_pad] fp32, as `tree_factors` wrote them with the same `block`.
        state: [slots, HV, DK, DV] fp32, any strides, read only. state_slot: [R] int32 request -> slot.
        forest: topology; a request without nodes is skipped.
        out_o: [num token rows, HV, DV], any float dtype and row stride, written in place at a request's token rows.
        out_u: [capacity, HV, DV] fp32, written in place. Rows without a node keep their contents, in both.
        block: 16 or 32. precision: a name of `precision.MODES`.

    A node whose path holds something not finite gets NaN; no other node's bits depend on it. Raises ValueError on wrong shapes,
    dtypes, block or precision.
    """
    dots = resolve(precision)
    _check(q, k, v, beta, p, g, c, state, forest, out_o, out_u, block)
    _, num_value_heads, head_v_dim = v.shape
    tile = value_tile(head_v_dim)
    grid = (head_v_dim // tile, num_value_heads, forest.max_requests)
    tree_solve_kernel[grid](
        q,
        k,
        v,
        beta,
        p,
        g,
        c,
        state,
        state_slot,
        forest.node_offset,
        forest.token_start,
        forest.ancestors,
        out_o,
        out_u,
        *state.stride(),
        out_o.stride(0),
        HK=k.shape[1],
        HV=num_value_heads,
        DK=k.shape[2],
        DV=head_v_dim,
        T_PAD=g.shape[2],
        W=forest.ancestors.shape[1],
        BT=block,
        BV=tile,
        KEY_STATE=dots.key_state,
        QUERY_STATE=dots.query_state,
        SOLVE=dots.solve,
        READOUT=dots.readout,
        MASK=dots.mask,
        INTERPRET=INTERPRET,
        num_warps=4,
        num_stages=1,
    )
