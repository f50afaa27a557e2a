"""U = Z R and O = exp(P) Q S + Y R over a forest, tiled over the value dimension.

A program keeps its tile of S_pre on chip and takes the nodes in blocks of up to NODE_BLOCK. Z and Y come as rows over a node's
ancestors; the dense block is gathered by the ancestor's depth and masked by the ancestor bits, so no block waits for another's result.
Of a tree larger than a block R goes through `scratch_r`, since later blocks need it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import NodeInputs, pointwise
from ..precision import DEFAULT, INTERPRET, device_function, dot, finite_or_zero, resolve, split_bf16, state_dot, to_fp32
from ..topology import Forest

round_to = device_function(pointwise.round_to)

NODE_BLOCK = 64


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


@triton.jit
def tree_solve_kernel(
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
    KEY_STATE: tl.constexpr,
    QUERY_STATE: tl.constexpr,
    SOLVE: tl.constexpr,
    READOUT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    node_start = tl.load(p_node_offset + i_r)
    num_nodes = tl.load(p_node_offset + i_r + 1) - node_start
    if num_nodes <= 0:
        return
    row_start = tl.load(p_token_start + i_r)
    slot = tl.load(p_state_slot + i_r).to(tl.int64)
    i_hk = i_hv // (HV // HK)
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, DK)
    o_v = i_v * BV + tl.arange(0, BV)
    # [BV, DK], the order in which vLLM stores it; [DK, BV] its terms
    p_s = p_state + slot * stride_s_slot + i_hv.to(tl.int64) * stride_s_head
    b_s = tl.trans(tl.load(p_s + o_v[:, None] * stride_s_v + o_d[None, :] * stride_s_k).to(tl.float32))
    b_s1, b_s2, b_s3 = split_bf16(b_s)
    num_blocks = 1
    if MANY_BLOCKS:
        num_blocks = (num_nodes + BT - 1) // BT

    for i_b in range(num_blocks):
        o_i = i_b * BT + o_t
        m_i = o_i < num_nodes
        o_node = (node_start + o_i).to(tl.int64)
        o_head = o_node * HV + i_hv
        o_key = o_node * HK + i_hk
        o_kq = o_key[:, None] * DK + o_d[None, :]
        b_k = tl.load(p_k + o_kq, mask=m_i[:, None], other=0.0)
        b_q = tl.load(p_q + o_kq, mask=m_i[:, None], other=0.0)
        b_v = to_fp32(tl.load(p_v + o_head[:, None] * DV + o_v[None, :], mask=m_i[:, None], other=0.0), INTERPRET)
        b_beta = tl.load(p_beta + o_head, mask=m_i, other=0.0)
        b_decay = tl.exp(tl.load(p_p + o_head, mask=m_i, other=0.0))
        b_k_decay = b_decay * tl.load(p_k_scale + o_key, mask=m_i, other=0.0)
        b_q_decay = b_decay * tl.load(p_q_scale + o_key, mask=m_i, other=0.0)
        # [BT, BT] read before the products with the state, so that they cover its latency
        b_level = tl.load(p_depth + o_node, mask=m_i, other=0)
        m_ancestor = ancestor_mask(p_ancestors, o_node, m_i, i_b, W, BT)
        b_rows = dense_block(p_y, b_level, m_ancestor, o_head, D)
        # [BT, BV]; what is not finite becomes 0 (0 * NaN would reach every row): the node's and its descendants' rows of Z and Y are NaN
        b_r = b_beta[:, None] * (b_v - b_k_decay[:, None] * state_dot(b_k, b_s1, b_s2, b_s3, b_s, KEY_STATE))
        b_r = finite_or_zero(b_r)
        b_o = b_q_decay[:, None] * state_dot(b_q, b_s1, b_s2, b_s3, b_s, QUERY_STATE)
        b_o += dot(b_rows, b_r, READOUT)
        b_u = b_r
        if HAS_U:
            b_u = dot(dense_block(p_z, b_level, m_ancestor, o_head, D), b_r, SOLVE)
        if MANY_BLOCKS:
            tl.store(p_r + o_head[:, None] * DV + o_v[None, :], b_r, mask=m_i[:, None])
            for i_s in range(i_b):
                # every column is a node: an earlier block is full
                o_j = (node_start + i_s * BT + o_t).to(tl.int64)
                b_r = tl.load(p_r + (o_j * HV + i_hv)[:, None] * DV + o_v[None, :])
                b_level = tl.load(p_depth + o_j)
                m_ancestor = ancestor_mask(p_ancestors, o_node, m_i, i_s, W, BT)
                b_o += dot(dense_block(p_y, b_level, m_ancestor, o_head, D), b_r, READOUT)
                if HAS_U:
                    b_u += dot(dense_block(p_z, b_level, m_ancestor, o_head, D), b_r, SOLVE)
            # later blocks read this R, written by other threads of this program
            tl.debug_barrier()
        p_out = p_o + (row_start + o_i).to(tl.int64)[:, None] * stride_o_row + i_hv * DV + o_v[None, :]
        tl.store(p_out, round_to(b_o, p_o.dtype.element_ty), mask=m_i[:, None])
        if HAS_U:
            tl.store(p_u + o_head[:, None] * DV + o_v[None, :], b_u, mask=m_i[:, None])


def _tiles(max_nodes: int, head_v_dim: int, num_heads: int) -> tuple[int, int, int]:
    """(BT, BV, warps); num_heads: heads of all requests. The interpreter pays per program, so there one tile."""
    if INTERPRET:
        return min(NODE_BLOCK, max(16, triton.next_power_of_2(max_nodes))), head_v_dim, 4
    # blocks of 32 spill registers, those of 64 keep their operands in shared memory
    block = 16 if max_nodes <= 16 else NODE_BLOCK
    # 32 values a program fill the card at batch size 1; wider tiles make the factors less often
    return block, min(head_v_dim, 32 if num_heads * head_v_dim <= 64 * 128 else 64), 4


def _for_tile(name: str, block: int, tile: int) -> str:
    """The precision itself, or one that compiles correctly: on Hopper, Triton 3.6 gets products of bfloat16 wrong whose right operand has
    64 rows and fewer than 64 columns; in tf32 they are right."""
    return {"bf16x3": "tf32x3", "bf16": "tf32"}.get(name, name) if block >= 64 and tile < 64 else name


def _check(inputs, z, y, state, state_slot, forest, out_o, out_u, scratch_r) -> None:
    inputs.check()
    capacity, heads, dim_v = inputs.v.shape
    if tuple(state.shape[1:]) != (heads, inputs.k.shape[2], dim_v):
        raise ValueError(f"state: expected [slots, {heads}, {inputs.k.shape[2]}, {dim_v}], got {tuple(state.shape)}")
    if tuple(out_o.shape[1:]) != (heads, dim_v) or out_o.stride(2) != 1 or out_o.stride(1) != dim_v:
        raise ValueError(f"out_o: expected [rows, {heads}, {dim_v}] with contiguous rows, got {tuple(out_o.shape)}")
    if state_slot.dim() != 1 or state_slot.shape[0] < forest.max_requests:
        raise ValueError(f"state_slot must cover {forest.max_requests} requests, got {list(state_slot.shape)}")
    if (out_u is None) != (z is None):
        raise ValueError("z and out_u belong together: give both or neither")
    if scratch_r is None and forest.max_nodes > NODE_BLOCK:
        raise ValueError(f"scratch_r is needed for trees of more than {NODE_BLOCK} nodes")
    rows, values = (capacity, heads, forest.path.shape[1]), (capacity, heads, dim_v)
    wanted = {"y": (y, rows), "z": (z, rows), "out_u": (out_u, values), "scratch_r": (scratch_r, values)}
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous()):
            raise ValueError(f"{name}: expected contiguous fp32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}")


def tree_solve(
    inputs: NodeInputs,
    z: torch.Tensor | None,
    y: torch.Tensor,
    state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    out_o: torch.Tensor,
    out_u: torch.Tensor | None = None,
    scratch_r: torch.Tensor | None = None,
    precision: str = DEFAULT,
) -> None:
    """Equations R, U, O of the closed form over a forest, one layer.

        R = beta (V - exp(P) K S_pre)      U = Z R      O = exp(P) Q S_pre + Y R

    Args:
        inputs: of `tree_inputs`. z, y: of `tree_factors`; z None where no U is wanted.
        state: [slots, HV, DK, DV], any float dtype and strides, read only. state_slot: [R] int32 request -> slot.
        forest: topology; a request without nodes is skipped.
        out_o: [num token rows, HV, DV], any float dtype and row stride, written in place at a request's token rows.
        out_u: [capacity, HV, DV] fp32, written in place (the factor commit needs it), or None. Rows without a node keep their contents,
            in both.
        scratch_r: [capacity, HV, DV] fp32, overwritten; needed if `forest.max_nodes` is above NODE_BLOCK.
        precision: a name of `precision.MODES`.

    A node whose path holds something not finite (see `tree_inputs`) gets NaN; no other node's bits depend on it. A finite input whose
    products overflow fp32 counts as 0 for its descendants. Raises ValueError on wrong shapes, dtypes or precision.
    """
    dots = resolve(precision, inputs.k.dtype)
    _check(inputs, z, y, state, state_slot, forest, out_o, out_u, scratch_r)
    if forest.max_requests == 0:
        return
    _, heads, dim_v = inputs.v.shape
    block, tile, warps = _tiles(forest.max_nodes, dim_v, heads * forest.max_requests)
    tree_solve_kernel[(dim_v // tile, heads, forest.max_requests)](
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.q_scale,
        inputs.k_scale,
        inputs.beta,
        inputs.p,
        y if z is None else z,
        y,
        state,
        state_slot,
        forest.node_offset,
        forest.token_start,
        forest.depth,
        forest.ancestors,
        out_o,
        y if out_u is None else out_u,
        y if scratch_r is None else scratch_r,
        *state.stride(),
        out_o.stride(0),
        HK=inputs.k.shape[1],
        HV=heads,
        DK=inputs.k.shape[2],
        DV=dim_v,
        D=y.shape[2],
        W=forest.ancestors.shape[1],
        BT=block,
        BV=tile,
        MANY_BLOCKS=forest.max_nodes > block,
        HAS_U=out_u is not None,
        KEY_STATE=dots.key_state,
        QUERY_STATE=dots.query_state,
        SOLVE=_for_tile(dots.solve, block, tile),
        READOUT=_for_tile(dots.readout, block, tile),
        INTERPRET=INTERPRET,
        num_warps=warps,
        num_stages=1,
    )
