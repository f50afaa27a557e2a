"""Rows of Z and Y for trees of one block: one product of all keys, gathered along the paths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import NodeInputs
from ..overlap import launch_options, let_next_start, wait_for_previous
from ..precision import INTERPRET, finite_or_zero, is_finite
from ..topology import Forest
from .gates import path_gates
from .gram import activation_dot

# nodes of the largest tree one program takes
MAX_BLOCK = 64


@triton.jit
def block_rows_kernel(
    p_q,
    p_k,
    p_q_scale,
    p_k_scale,
    p_p,
    p_beta,
    p_z,
    p_y,
    p_node_offset,
    p_depth,
    p_path,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    D: tl.constexpr,
    LEVELS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_Z: tl.constexpr,
    OVERLAP: tl.constexpr,
    BT: tl.constexpr,
):
    # one program: a request and HEADS value heads that share a key head
    i_h, i_r = tl.program_id(0), tl.program_id(1)
    node_start = tl.load(p_node_offset + i_r)
    num_nodes = tl.load(p_node_offset + i_r + 1) - node_start
    if num_nodes <= 0:
        if OVERLAP:
            wait_for_previous()
        return
    i_hk = i_h * HEADS // (HV // HK)
    o_t = tl.arange(0, BT)
    o_m = tl.arange(0, D)[None, :]
    m_i = o_t < num_nodes
    # [BT] rows behind the last node compute with it and store nothing
    o_own = (node_start + tl.minimum(o_t, num_nodes - 1)).to(tl.int64)
    b_depth = tl.load(p_depth + o_own)
    # [BT, D]
    b_path = tl.load(p_path + o_own[:, None] * D + o_m)
    m_path = b_path >= 0
    b_at = tl.where(m_path, b_path, 0)
    o_row = node_start.to(tl.int64) + b_at
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    # [BT, DK]
    o_kq = (o_own * HK + i_hk)[:, None] * DK + tl.arange(0, DK)[None, :]
    b_k = tl.load(p_k + o_kq)
    b_q = tl.load(p_q + o_kq)
    b_ks = tl.load(p_k_scale + o_row * HK + i_hk, mask=m_path, other=0.0)
    b_bad_key = tl.max(tl.where(is_finite(b_ks), 0.0, 1.0), axis=1)
    b_ks = finite_or_zero(b_ks)
    b_own_ks = finite_or_zero(tl.load(p_k_scale + o_own * HK + i_hk))
    b_own_qs = tl.load(p_q_scale + o_own * HK + i_hk)
    b_beta, _, _, b_decay, b_bad = path_gates(p_beta, p_p, o_row, o_own, m_path, i_h * HEADS, HV)
    # [BT, BT], then [BT, D]
    b_kk = tl.gather(activation_dot(b_k, tl.trans(b_k)), b_at, 1) * b_ks * b_own_ks[:, None]
    b_qk = tl.gather(activation_dot(b_q, tl.trans(b_k)), b_at, 1) * b_ks
    m_strict = m_path & (o_m != b_depth[:, None])

    for i_g in tl.static_range(HEADS):
        i_hv = i_h * HEADS + i_g
        if i_g > 0:
            b_beta, _, _, b_decay, b_bad = path_gates(p_beta, p_p, o_row, o_own, m_path, i_hv, HV)
        b_g = tl.where(m_strict, b_beta[:, None] * b_decay * b_kk, 0.0)
        b_y = tl.where(m_path, b_decay * b_qk, 0.0)
        b_z = tl.where(o_m == b_depth[:, None], 1.0, 0.0)
        # from the node upward: an unknown is final when its row of G is applied
        for i_up in tl.static_range(1, LEVELS):
            b_up = tl.maximum(tl.load(p_path + o_own * D + (LEVELS - i_up)), 0)
            b_row = tl.gather(b_g, tl.broadcast_to(b_up[:, None], (BT, D)), 0)
            b_y -= tl.sum(tl.where(o_m == LEVELS - i_up, b_y, 0.0), axis=1)[:, None] * b_row
            if HAS_Z:
                b_z -= tl.sum(tl.where(o_m == LEVELS - i_up, b_z, 0.0), axis=1)[:, None] * b_row
        b_nan = tl.where((b_bad > 0) | (b_bad_key > 0), float("nan"), 0.0)[:, None]
        o_out = (o_own * HV + i_hv)[:, None] * D + o_m
        tl.store(p_y + o_out, b_y * b_own_qs[:, None] + b_nan, mask=m_i[:, None])
        if HAS_Z:
            tl.store(p_z + o_out, b_z + b_nan, mask=m_i[:, None])


def launch_block_rows(inputs: NodeInputs, forest: Forest, out_z: torch.Tensor | None, out_y: torch.Tensor, overlap: bool = False) -> None:
    """`rows.tree_factors` for trees of at most MAX_BLOCK nodes; arguments already checked."""
    _, num_key_heads, head_k_dim = inputs.k.shape
    num_value_heads, columns = inputs.v.shape[1], forest.path.shape[1]
    # a program per value head fills the card at small batches; one per key head makes the products once (deep trees would spill)
    group = num_value_heads // num_key_heads
    block = max(16, triton.next_power_of_2(forest.max_nodes))
    shared = INTERPRET or (block == MAX_BLOCK and forest.max_requests * num_key_heads >= 128 and columns == 16)
    heads = group if shared else 1
    block_rows_kernel[(num_value_heads // heads, forest.max_requests)](
        inputs.q,
        inputs.k,
        inputs.q_scale,
        inputs.k_scale,
        inputs.p,
        inputs.beta,
        out_y if out_z is None else out_z,
        out_y,
        forest.node_offset,
        forest.depth,
        forest.path,
        HK=num_key_heads,
        HV=num_value_heads,
        DK=head_k_dim,
        D=columns,
        LEVELS=min(forest.max_depth + 1, columns - 1),
        HEADS=heads,
        HAS_Z=out_z is not None,
        OVERLAP=overlap,
        BT=block,
        num_warps=block // 16,
        **launch_options(overlap),
    )
