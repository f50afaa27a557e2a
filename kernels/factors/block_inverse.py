"""The factors G and C of a tree's closed form, G's diagonal blocks already inverted.

The inverse of a unit lower triangular block is built by doubling: with Z the inverses of the diagonal SIZE-blocks, those of the
2 SIZE-blocks are Z - Z G21 Z. That takes as many products as squaring the nilpotent block, and every intermediate is an entry of a
true inverse: powers of G hold binomials (6435 at depth 15, 3e8 at depth 31 when keys repeat) that cancel in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..precision import DEFAULT, INTERPRET, device_function, dot, exp_non_positive, is_finite, resolve
from ..topology import Forest

BLOCKS = (16, 32)


def padded_nodes(max_nodes: int, block: int) -> int:
    """T_pad: columns of the factor buffers."""
    return (max_nodes + block - 1) // block * block


@device_function
def unit_lower_inverse(b_g, m_plus, b_bad, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + G)^-1 of a strictly lower block; rows with a bad ancestor (or bad themselves, `b_bad` > 0) become NaN.

    Operands are kept finite, 32 products of them too, so that an overflow reaches descendants only (0 * inf would reach every row).
    """
    LIMIT: tl.constexpr = 1e15
    o_t = tl.arange(0, BT)
    # the highest bit of it says at which level of the doubling the pair (row, column) is joined
    b_level = o_t[:, None] ^ o_t[None, :]
    b_g = tl.clamp(tl.where(is_finite(b_g), b_g, 0.0), -LIMIT, LIMIT)
    b_z = tl.where(b_level == 0, 1.0, tl.where(b_level == 1, -b_g, 0.0))
    for i_level in tl.static_range(1, 5):
        if (1 << i_level) < BT:
            b_y = dot(tl.where((b_level >> i_level) == 1, b_g, 0.0), b_z, PRECISION)
            b_y = dot(b_z, tl.clamp(b_y, -LIMIT, LIMIT), PRECISION)
            b_z = tl.clamp(b_z - b_y, -LIMIT, LIMIT)
    b_bad = tl.maximum(b_bad, tl.max(tl.where(tl.abs(b_z) < LIMIT, 0.0, 1.0), axis=1))
    b_poison = tl.max(tl.where(m_plus, b_bad[None, :], 0.0), axis=1)
    return tl.where(b_poison[:, None] > 0, float("nan"), b_z)


@device_function
def factor_block(
    p_k,
    p_q,
    p_p,
    p_ancestors,
    b_pi,
    b_beta,
    o_row,
    m_i,
    i_b,
    i_s,
    node_start,
    num_nodes,
    i_hv,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """G and C of block row i_b, block column i_s, and the mask of ancestors and self."""
    o_t = tl.arange(0, BT)
    o_j = i_s * BT + o_t
    m_j = o_j < num_nodes
    o_col = (node_start + o_j).to(tl.int64)
    # [BT, BK], [BK, BT]
    o_d = tl.arange(0, BK)
    o_ki = (o_row * HK + i_hv // (HV // HK))[:, None] * DK + o_d[None, :]
    o_kj = (o_col * HK + i_hv // (HV // HK))[None, :] * DK + o_d[:, None]
    b_kk = tl.full([BT, BT], 0.0, tl.float32)
    b_qk = tl.full([BT, BT], 0.0, tl.float32)
    for i_d in range(0, DK, BK):
        b_kj = tl.load(p_k + o_kj + i_d, mask=m_j[None, :], other=0.0)
        b_kk += dot(tl.load(p_k + o_ki + i_d, mask=m_i[:, None], other=0.0), b_kj, PRECISION)
        b_qk += dot(tl.load(p_q + o_ki + i_d, mask=m_i[:, None], other=0.0), b_kj, PRECISION)
    b_pj = tl.load(p_p + o_col * HV + i_hv, mask=m_j, other=0.0)
    b_word = tl.load(p_ancestors + o_row * W + (i_s * BT) // 32, mask=m_i, other=0)
    m_plus = ((b_word[:, None] >> ((i_s * BT) % 32 + o_t)[None, :]) & 1) != 0
    m_strict = m_plus & ((i_b * BT + o_t)[:, None] != o_j[None, :])
    b_decay = exp_non_positive(tl.where(m_plus, b_pi[:, None] - b_pj[None, :], 0.0))
    b_g = tl.where(m_strict, b_beta[:, None] * b_decay * b_kk, 0.0)
    b_c = tl.where(m_plus, b_decay * b_qk, 0.0)
    return b_g, b_c, m_plus


@triton.jit
def tree_factors_kernel(
    p_k,
    p_q,
    p_beta,
    p_p,
    p_g,
    p_c,
    p_node_offset,
    p_ancestors,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    T_PAD: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GRAM: tl.constexpr,
    SOLVE: tl.constexpr,
):
    # one program: a block of BT rows of one value head, all block columns up to the diagonal
    i_b, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    node_start = tl.load(p_node_offset + i_r)
    num_nodes = tl.load(p_node_offset + i_r + 1) - node_start
    if i_b * BT >= num_nodes:
        return
    o_t = tl.arange(0, BT)
    o_i = i_b * BT + o_t
    m_i = o_i < num_nodes
    o_row = (node_start + o_i).to(tl.int64)
    # [BT]
    b_p = tl.load(p_p + o_row * HV + i_hv, mask=m_i, other=0.0)
    b_beta = tl.load(p_beta + o_row * HV + i_hv, mask=m_i, other=0.0)
    b_bad = tl.full([BT], 0.0, tl.float32)
    # [BT, BT]
    o_out = (o_row * HV + i_hv)[:, None] * T_PAD + o_t[None, :]
    for i_s in range(i_b):
        b_g, b_c, _ = factor_block(
            p_k, p_q, p_p, p_ancestors, b_p, b_beta, o_row, m_i, i_b, i_s, node_start, num_nodes, i_hv, HK, HV, DK, W, BT, BK, GRAM
        )
        b_bad = tl.maximum(b_bad, tl.max(tl.where(is_finite(b_g), 0.0, 1.0), axis=1))
        tl.store(p_g + o_out + i_s * BT, b_g, mask=m_i[:, None])
        tl.store(p_c + o_out + i_s * BT, b_c, mask=m_i[:, None])
    b_g, b_c, m_plus = factor_block(
        p_k, p_q, p_p, p_ancestors, b_p, b_beta, o_row, m_i, i_b, i_b, node_start, num_nodes, i_hv, HK, HV, DK, W, BT, BK, GRAM
    )
    b_bad = tl.maximum(b_bad, tl.max(tl.where(is_finite(b_g), 0.0, 1.0), axis=1))
    b_z = unit_lower_inverse(b_g, m_plus, b_bad, BT, SOLVE)
    tl.store(p_g + o_out + i_b * BT, b_z, mask=m_i[:, None])
    tl.store(p_c + o_out + i_b * BT, b_c, mask=m_i[:, None])


def tree_factors(
    k: torch.Tensor,
    q: torch.Tensor,
    beta: torch.Tensor,
    p: torch.Tensor,
    forest: Forest,
    out_g: torch.Tensor,
    out_c: torch.Tensor,
    block: int = 16,
    precision: str = DEFAULT,
) -> None:
    """Equations G and C of the closed form over a forest, one layer.

        G_ij = beta_i exp(P_i - P_j) (k_i . k_j)   j a strict ancestor of i, else 0
        C_ij = exp(P_i - P_j) (q_i . k_j)          j an ancestor of i or i, else 0

    Args:
        k, q: [capacity, HK, DK] fp32; k L2-normalised, q normalised and scaled.
        beta: [capacity, HV] fp32, linear. p: [capacity, HV] fp32, log: sum of log decays over a node's path.
        forest: topology; a request without nodes is skipped.
        out_g, out_c: [capacity, HV, T_pad] fp32, written in place, T_pad = `padded_nodes(forest.max_nodes, block)`. Row i of a
            request is written up to the end of its diagonal block (0 in columns without a node), rows without a node not at all.
            G's diagonal block holds (I + G_rr)^-1.
        block: 16 or 32. precision: a name of `precision.MODES`.

    A row whose path holds something not finite has NaN in its diagonal block of G (which the solve turns into NaN outputs of that row
    and of its descendants); no other row changes in any bit. Raises ValueError on wrong shapes, dtypes, block or precision.
    """
    capacity, num_key_heads, head_k_dim = k.shape
    num_value_heads = beta.shape[1]
    t_pad = padded_nodes(forest.max_nodes, block)
    dots = resolve(precision)
    if block not in BLOCKS:
        raise ValueError(f"block must be one of {BLOCKS}, got {block}")
    if num_value_heads % num_key_heads or head_k_dim & (head_k_dim - 1) or head_k_dim < 16:
        raise ValueError(f"unsupported heads: HK={num_key_heads}, HV={num_value_heads}, DK={head_k_dim}")
    shapes = {"q": (q, k.shape), "beta": (beta, (capacity, num_value_heads)), "p": (p, (capacity, num_value_heads))}
    shapes |= {name: (t, (capacity, num_value_heads, t_pad)) for name, t in (("out_g", out_g), ("out_c", out_c))}
    for name, (tensor, shape) in {"k": (k, k.shape), **shapes}.items():
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous fp32 {tuple(shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
    grid = (t_pad // block, num_value_heads, forest.max_requests)
    tree_factors_kernel[grid](
        k,
        q,
        beta,
        p,
        out_g,
        out_c,
        forest.node_offset,
        forest.ancestors,
        HK=num_key_heads,
        HV=num_value_heads,
        DK=head_k_dim,
        T_PAD=t_pad,
        W=forest.ancestors.shape[1],
        BT=block,
        # short chunks and few warps: operands of a 16 x 16 product are replicated in every warp, and spill
        BK=head_k_dim if INTERPRET else min(head_k_dim, 32),
        GRAM=dots.gram,
        SOLVE=dots.solve,
        num_warps=1 if block == 16 else 4,
        num_stages=2,
    )
