"""The serial tree: the recurrence node by node, one state snapshot per node in HBM. The baseline that the closed form is measured by.

This is how a chain verifier extends to trees: a node starts from its parent's snapshot instead of from the node before it. Each node costs
a state written and, where its parent is not the node just computed, a state read, and the nodes of a request wait for each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import NodeInputs, pointwise
from ..precision import INTERPRET, device_function, to_fp32
from ..topology import Forest

round_to = device_function(pointwise.round_to)


@triton.jit
def serial_tree_kernel(
    p_q,  # [capacity, HK, DK]
    p_k,  # [capacity, HK, DK]
    p_v,  # [capacity, HV, DV]
    p_q_scale,  # [capacity, HK]
    p_k_scale,  # [capacity, HK]
    p_g,  # [capacity, HV]
    p_beta,  # [capacity, HV]
    p_state,  # [S, HV, DK, DV]
    p_state_slot,  # [R]
    p_node_offset,  # [R + 1]
    p_token_start,  # [R]
    p_parent,  # [capacity]
    p_snapshots,  # [capacity, HV, DV, DK]
    p_o,  # [num token rows, HV, DV]
    stride_s_slot,
    stride_s_head,
    stride_s_k,
    stride_s_v,
    stride_o_row,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    node_start = tl.load(p_node_offset + i_r)
    num_nodes = tl.load(p_node_offset + i_r + 1) - node_start
    if num_nodes <= 0:
        return
    row_start = tl.load(p_token_start + i_r).to(tl.int64)
    slot = tl.load(p_state_slot + i_r).to(tl.int64)
    i_hk = i_hv // (HV // HK)
    o_d = tl.arange(0, DK)
    o_v = i_v * BV + tl.arange(0, BV)
    # [BV, DK] the tile and order of native decode
    p_s = p_state + slot * stride_s_slot + i_hv.to(tl.int64) * stride_s_head
    b_s = to_fp32(tl.load(p_s + o_v[:, None] * stride_s_v + o_d[None, :] * stride_s_k), INTERPRET)
    o_snapshot = i_hv * DV * DK + o_v[:, None] * DK + o_d[None, :]

    for i in range(num_nodes):
        node = (node_start + i).to(tl.int64)
        parent = tl.load(p_parent + node)
        # the root's parent is -1: the state is in registers for it as for every first child
        if parent != i - 1:
            # the snapshot was written by other threads of this program
            tl.debug_barrier()
            b_s = tl.load(p_snapshots + (node_start + parent).to(tl.int64) * (HV * DV * DK) + o_snapshot)
        b_k = to_fp32(tl.load(p_k + (node * HK + i_hk) * DK + o_d), INTERPRET) * tl.load(p_k_scale + node * HK + i_hk)
        b_q = to_fp32(tl.load(p_q + (node * HK + i_hk) * DK + o_d), INTERPRET) * tl.load(p_q_scale + node * HK + i_hk)
        b_v = to_fp32(tl.load(p_v + (node * HV + i_hv) * DV + o_v), INTERPRET)
        b_s = b_s * tl.exp(tl.load(p_g + node * HV + i_hv))
        b_v = (b_v - tl.sum(b_s * b_k[None, :], 1)) * tl.load(p_beta + node * HV + i_hv)
        b_s = b_s + b_v[:, None] * b_k[None, :]
        b_o = tl.sum(b_s * b_q[None, :], 1)
        tl.store(p_o + (row_start + i) * stride_o_row + i_hv * DV + o_v, round_to(b_o, p_o.dtype.element_ty))
        tl.store(p_snapshots + node * (HV * DV * DK) + o_snapshot, b_s)


def default_tile(head_v_dim: int) -> tuple[int, int]:
    """(value tile, warps). Small tiles win at batch 1 and 16 on an H200; `python -m benchmarks kernels` sweeps both."""
    if INTERPRET:
        return head_v_dim, 4
    return min(head_v_dim, 8), 1


def _check(inputs: NodeInputs, state, state_slot, forest: Forest, snapshots, out_o, value_tile: int) -> None:
    inputs.check()
    capacity, num_value_heads, head_v_dim = inputs.v.shape
    head_k_dim = inputs.k.shape[2]
    if capacity < forest.capacity:
        raise ValueError(f"inputs must hold {forest.capacity} nodes, got {capacity}")
    if tuple(state.shape[1:]) != (num_value_heads, head_k_dim, head_v_dim):
        raise ValueError(f"state: expected [slots, {num_value_heads}, {head_k_dim}, {head_v_dim}], got {tuple(state.shape)}")
    if state_slot.dim() != 1 or state_slot.shape[0] < forest.max_requests:
        raise ValueError(f"state_slot must cover {forest.max_requests} requests, got {tuple(state_slot.shape)}")
    shape = (num_value_heads, head_v_dim, head_k_dim)
    if snapshots.shape[0] < forest.capacity or tuple(snapshots.shape[1:]) != shape or snapshots.dtype != torch.float32:
        raise ValueError(f"snapshots: expected fp32 {(forest.capacity, *shape)}, got {snapshots.dtype} {tuple(snapshots.shape)}")
    if not snapshots.is_contiguous():
        raise ValueError("snapshots must be contiguous")
    if tuple(out_o.shape[1:]) != (num_value_heads, head_v_dim) or out_o.stride(2) != 1 or out_o.stride(1) != head_v_dim:
        raise ValueError(f"out_o: expected [rows, {num_value_heads}, {head_v_dim}] with contiguous rows, got {tuple(out_o.shape)}")
    if head_v_dim % value_tile or value_tile & (value_tile - 1):
        raise ValueError(f"value_tile must be a power of two that divides {head_v_dim}, got {value_tile}")


def serial_tree(
    inputs: NodeInputs,
    state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    snapshots: torch.Tensor,
    out_o: torch.Tensor,
    value_tile: int | None = None,
    num_warps: int | None = None,
) -> None:
    """The recurrence of every tree, parents before children, in the order and fp32 maths of native decode.

        S~ = exp(g) S_parent      u = beta (v - S~^T k)      S = S~ + k u^T      o = S^T q

    Args:
        inputs: of `forest.capacity` nodes at least, as `tree_inputs` wrote them.
        state: [slots, HV, DK, DV], any float dtype and strides, the state before node 0, read only. state_slot: [R] int32 request -> slot.
        forest: topology; a request without nodes is skipped.
        snapshots: [capacity, HV, DV, DK] fp32 contiguous, written in place: the state after every node (64 KiB a head at 128 x 128).
        out_o: [num token rows, HV, DV], any float dtype and row stride, written in place at a request's token rows.
        value_tile, num_warps: tile of DV per program and its warps; None: `default_tile`.

    Rows and snapshots without a node keep their contents. A node whose path holds something not finite gets NaN, no other does.

    Raises:
        ValueError: a shape, dtype or stride is wrong.
    """
    num_key_heads, head_k_dim = inputs.k.shape[1:]
    _, num_value_heads, head_v_dim = inputs.v.shape
    tile, warps = default_tile(head_v_dim)
    tile, warps = value_tile or tile, num_warps or warps
    _check(inputs, state, state_slot, forest, snapshots, out_o, tile)
    if forest.max_requests == 0:
        return
    serial_tree_kernel[(head_v_dim // tile, num_value_heads, forest.max_requests)](
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.q_scale,
        inputs.k_scale,
        inputs.g,
        inputs.beta,
        state,
        state_slot,
        forest.node_offset,
        forest.token_start,
        forest.parent,
        snapshots,
        out_o,
        *state.stride(),
        out_o.stride(0),
        HK=num_key_heads,
        HV=num_value_heads,
        DK=head_k_dim,
        DV=head_v_dim,
        BV=tile,
        INTERPRET=INTERPRET,
        num_warps=warps,
    )
