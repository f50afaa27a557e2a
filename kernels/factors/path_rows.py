"""Rows of Z and Y for trees of any size: every node multiplies the keys of its own path."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import NodeInputs
from ..overlap import launch_options, let_next_start, wait_for_previous
from ..precision import INTERPRET, device_function, exp_non_positive, finite_or_zero, is_finite
from ..topology import Forest
from ..topology.locate import node_bound
from .gates import path_gates
from .gram import activation_dot


@device_function
def path_products(p_q, p_k, o_row, o_n, i_hk, HK: tl.constexpr, DK: tl.constexpr, D: tl.constexpr):
    """[BN, D, D] products of the keys of paths o_row [BN, D] (activations, not normalised); row D - 1 those of the nodes' queries."""
    o_d = tl.arange(0, DK)[None, None, :]
    b_k = tl.load(p_k + ((o_row * HK + i_hk) * DK)[:, :, None] + o_d)
    b_q = tl.load(p_q + ((o_n * HK + i_hk) * DK)[:, None, None] + o_d)
    b_left = tl.where((tl.arange(0, D) == D - 1)[None, :, None], b_q, b_k)
    return activation_dot(b_left, tl.permute(b_k, (0, 2, 1)))


@triton.jit(do_not_specialize=["R"])
def path_rows_kernel(
    p_q,
    p_k,
    p_q_scale,
    p_k_scale,
    p_p,
    p_beta,
    p_z,
    p_y,
    p_node_offset,
    p_request,
    p_depth,
    p_path,
    R,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    D: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_Z: tl.constexpr,
    OVERLAP: tl.constexpr,
    BN: tl.constexpr,
):
    # one program: BN nodes, one key head and the value heads that share it
    i_n, i_hk = tl.program_id(0), tl.program_id(1)
    num_nodes = tl.load(p_node_offset + R)
    if i_n * BN >= num_nodes:
        if OVERLAP:
            wait_for_previous()
        return
    GROUP: tl.constexpr = HV // HK
    o_t = i_n * BN + tl.arange(0, BN)
    m_n = o_t < num_nodes
    # [BN] nodes behind the last one compute with it and store nothing
    o_n = tl.minimum(o_t, num_nodes - 1).to(tl.int64)
    b_base = tl.load(p_node_offset + tl.load(p_request + o_n))
    b_depth = tl.load(p_depth + o_n)
    # [BN, D] compact rows of the path; a level beyond the node's depth takes the node itself, masked later
    o_m = tl.arange(0, D)[None, :]
    b_path = tl.load(p_path + o_n[:, None] * D + o_m)
    m_path = b_path >= 0
    o_row = tl.where(m_path, b_base[:, None] + b_path, o_n[:, None]).to(tl.int64)
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    # [BN, D, D]
    b_kk = path_products(p_q, p_k, o_row, o_n, i_hk, HK, DK, D)
    b_ks = tl.load(p_k_scale + o_row * HK + i_hk, mask=m_path, other=0.0)
    b_bad_key = tl.max(tl.where(is_finite(b_ks), 0.0, 1.0), axis=1)
    b_ks = finite_or_zero(b_ks)
    b_qs = tl.load(p_q_scale + o_n * HK + i_hk)
    # [BN, D] q . k of the path, the query not yet scaled
    m_query = (tl.arange(0, D) == D - 1)[None, :, None]
    b_qk = tl.sum(tl.where(m_query, b_kk, 0.0), axis=1) * b_ks
    # strictly lower part; the query's row lies beyond every path
    o_l = tl.arange(0, D)[None, :, None]
    m_strict = (o_l > tl.arange(0, D)[None, None, :]) & m_path[:, :, None]
    b_kk = tl.where(m_strict, b_kk * b_ks[:, :, None] * b_ks[:, None, :], 0.0)

    for i_g in tl.static_range(GROUP):
        i_hv = i_hk * GROUP + i_g
        _, b_beta, b_p, b_decay, b_bad = path_gates(p_beta, p_p, o_row, o_n, m_path, i_hv, HV)
        b_factor = b_beta[:, :, None] * exp_non_positive(tl.where(m_strict, b_p[:, :, None] - b_p[:, None, :], 0.0)) * b_kk
        b_z = tl.where(o_m == b_depth[:, None], 1.0, 0.0)
        b_y = tl.where(m_path, b_decay * b_qk, 0.0)
        # from the node upward: an unknown is final when its row of G is applied
        for i_up in tl.static_range(1, LEVELS):
            b_row = tl.sum(tl.where(o_l == LEVELS - i_up, b_factor, 0.0), axis=1)
            b_y -= tl.sum(tl.where(o_m == LEVELS - i_up, b_y, 0.0), axis=1)[:, None] * b_row
            if HAS_Z:
                b_z -= tl.sum(tl.where(o_m == LEVELS - i_up, b_z, 0.0), axis=1)[:, None] * b_row
        b_nan = tl.where((b_bad > 0) | (b_bad_key > 0), float("nan"), 0.0)[:, None]
        o_out = (o_n * HV + i_hv)[:, None] * D + o_m
        tl.store(p_y + o_out, b_y * b_qs[:, None] + b_nan, mask=m_n[:, None])
        if HAS_Z:
            tl.store(p_z + o_out, b_z + b_nan, mask=m_n[:, None])


def launch_path_rows(inputs: NodeInputs, forest: Forest, out_z: torch.Tensor | None, out_y: torch.Tensor, overlap: bool = False) -> None:
    """`rows.tree_factors` for any tree; arguments already checked."""
    _, num_key_heads, head_k_dim = inputs.k.shape
    columns = forest.path.shape[1]
    # the interpreter pays per operation, not per element
    nodes = min(256, triton.next_power_of_2(node_bound(forest))) if INTERPRET else 4
    path_rows_kernel[(triton.cdiv(node_bound(forest), nodes), num_key_heads)](
        inputs.q,
        inputs.k,
        inputs.q_scale,
        inputs.k_scale,
        inputs.p,
        inputs.beta,
        out_y if out_z is None else out_z,
        out_y,
        forest.node_offset,
        forest.request,
        forest.depth,
        forest.path,
        forest.max_requests,
        HK=num_key_heads,
        HV=inputs.v.shape[1],
        DK=head_k_dim,
        D=columns,
        LEVELS=min(forest.max_depth + 1, columns - 1),
        HAS_Z=out_z is not None,
        OVERLAP=overlap,
        BN=nodes,
        num_warps=4,
        **launch_options(overlap),
    )
