"""What both solves read in the same way: keys with queries, and dense blocks of Z and Y from their rows over ancestors."""

from __future__ import annotations

import triton.language as tl

from ..precision import device_function


@device_function
def keys_and_queries(p_k, p_q, first, num_nodes, i_hk, o_d, HK: tl.constexpr, DK: tl.constexpr, BT: tl.constexpr):
    """Pointers [2 BT, len(o_d)] and mask [2 BT, 1] of the keys, then the queries, of BT nodes: both meet the state in one product."""
    o_row = tl.arange(0, 2 * BT)
    o_i = first + o_row % BT
    p_rows = tl.where(o_row < BT, p_k, p_q) + (o_i * HK + i_hk) * DK
    return p_rows[:, None] + o_d[None, :], (o_i < num_nodes)[:, None]


@device_function
def ancestor_mask(p_ancestors, o_node, m_i, i_s, W: tl.constexpr, BT: tl.constexpr):
    """[BT, BT] true where the column's node, in the i_s-th block, is an ancestor of the row's node or is it."""
    first = i_s * BT // 32
    b_word = tl.load(p_ancestors + o_node * W + first, mask=m_i, other=0)[:, None]
    o_j = tl.arange(0, BT)[None, :]
    if BT > 32:
        b_second = tl.load(p_ancestors + o_node * W + first + 1, mask=m_i & (first + 1 < W), other=0)[:, None]
        b_word = tl.where(o_j < 32, b_word, b_second)
    return ((b_word >> ((i_s * BT + o_j) & 31)) & 1) != 0


@device_function
def dense_block(p_rows, b_level, m_ancestor, o_head, D: tl.constexpr):
    """[BT, BT] block of Z or Y: rows of (node, head) o_head, columns of nodes at depths b_level, 0 off the mask."""
    return tl.load(p_rows + (o_head * D)[:, None] + b_level[None, :], mask=m_ancestor, other=0.0)
