"""Causal convolution, SiLU and L2 norm of every node, along its own path to the root."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..topology import Forest
from ..topology.locate import locate_nodes, node_bound, request_block
from .pointwise import CONV_WIDTH, NORM_EPS, add_tap, native_rounds_products, round_to, silu


@triton.jit
def previous_input(p_parent, b_base, b_at):
    """One step back from `b_at`: a node's parent, then -1, -2, ... for the columns of the conv state, newest first."""
    return tl.where(b_at >= 0, tl.load(p_parent + b_base + b_at, mask=b_at >= 0, other=-1), b_at - 1)


@triton.jit
def load_input(p_x, p_state, b_row0, b_at, o_c, m_c, stride_x, stride_state_tok, WIDTH: tl.constexpr):
    """Conv inputs [BN, BH, BD] at position `b_at` of each node's path: a token row, or a conv-state column if negative."""
    m_x = (b_at >= 0)[:, None, None] & m_c
    b_x = tl.load(p_x + ((b_row0 + b_at) * stride_x)[:, None, None] + o_c, mask=m_x)
    m_state = (b_at < 0)[:, None, None] & m_c
    b_state = tl.load(p_state + ((b_at + WIDTH - 1) * stride_state_tok)[:, None, None], mask=m_state)
    return tl.where(m_x, b_x, b_state)


@triton.jit
def tree_conv_kernel(
    x,  # [num token rows, C]
    weight,  # [C, WIDTH]
    bias,  # [C]
    conv_state,  # [S, C, WIDTH - 1]
    state_slot,  # [R]
    node_offset,  # [R + 1]
    token_start,  # [R]
    parent,  # [capacity]
    out_q,  # [capacity, HK, DK]
    out_k,  # [capacity, HK, DK]
    out_v,  # [capacity, HV, DV]
    out_x,  # [capacity, C]
    scale,
    eps,
    R,
    stride_x,
    stride_weight,
    stride_tap,
    stride_slot,
    stride_channel,
    stride_column,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_X: tl.constexpr,
    ROUND: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    tl.static_assert(WIDTH == 4)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    i_n = tl.program_id(0)
    num_nodes = tl.load(node_offset + R)
    if i_n * BN >= num_nodes:
        return
    # [BN] nodes; those behind the last one compute with request 0's root path and store nothing
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < num_nodes
    b_req, b_base = locate_nodes(node_offset, o_n, R, BR)
    b_row0 = tl.load(token_start + b_req).to(tl.int64)
    b_slot = tl.load(state_slot + b_req).to(tl.int64)
    # [BN] the node itself and the three inputs before it on its path
    b_at3 = tl.where(m_n, o_n - b_base, 0)
    b_at2 = previous_input(parent, b_base, b_at3)
    b_at1 = previous_input(parent, b_base, b_at2)
    b_at0 = previous_input(parent, b_base, b_at1)

    # [1, BH, BD] heads in the order q, k, v and their channels
    o_h = (tl.program_id(1) * BH + tl.arange(0, BH))[None, :, None]
    o_d = tl.arange(0, BD)[None, None, :]
    m_v = (o_h >= 2 * HK) & (o_h < 2 * HK + HV) & (o_d < DV)
    m_c = ((o_h < 2 * HK) & (o_d < DK)) | m_v
    o_c = tl.where(o_h < 2 * HK, o_h * DK, 2 * HK * DK + (o_h - 2 * HK) * DV) + o_d
    m_nc = m_n[:, None, None] & m_c

    # [BN, BH, BD] oldest to newest, as decode adds them
    p_state = conv_state + (b_slot * stride_slot)[:, None, None] + o_c.to(tl.int64) * stride_channel
    p_weight = weight + o_c * stride_weight
    b_acc = tl.zeros([BN, BH, BD], dtype=tl.float32)
    if HAS_BIAS:
        b_acc += tl.load(bias + o_c, mask=m_c).to(tl.float32)
    b_x = load_input(x, p_state, b_row0, b_at0, o_c, m_nc, stride_x, stride_column, WIDTH)
    b_acc = add_tap(b_acc, b_x, tl.load(p_weight, mask=m_c), ROUND)
    b_x = load_input(x, p_state, b_row0, b_at1, o_c, m_nc, stride_x, stride_column, WIDTH)
    b_acc = add_tap(b_acc, b_x, tl.load(p_weight + stride_tap, mask=m_c), ROUND)
    b_x = load_input(x, p_state, b_row0, b_at2, o_c, m_nc, stride_x, stride_column, WIDTH)
    b_acc = add_tap(b_acc, b_x, tl.load(p_weight + 2 * stride_tap, mask=m_c), ROUND)
    b_x = tl.load(x + ((b_row0 + b_at3) * stride_x)[:, None, None] + o_c, mask=m_nc)
    b_acc = add_tap(b_acc, b_x, tl.load(p_weight + 3 * stride_tap, mask=m_c), ROUND)

    b_n = o_n.to(tl.int64)[:, None, None]
    if KEEP_X:
        tl.store(out_x + b_n * C + o_c, b_x, mask=m_nc)
    b_y = round_to(silu(b_acc), x.dtype.element_ty)
    tl.store(out_v + b_n * (HV * DV) + (o_c - 2 * HK * DK), b_y, mask=m_n[:, None, None] & m_v)
    # masked lanes were loaded undefined: the norm sums only the channels a head has
    b_y = tl.where(m_c, b_y.to(tl.float32), 0.0)
    b_y = b_y * tl.rsqrt(tl.sum(b_y * b_y, axis=2) + eps)[:, :, None]
    tl.store(out_q + b_n * (HK * DK) + o_c, b_y * scale, mask=m_nc & (o_h < HK))
    tl.store(out_k + b_n * (HK * DK) + (o_c - HK * DK), b_y, mask=m_nc & (o_h >= HK) & (o_h < 2 * HK))


def tree_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    num_key_heads: int,
    head_k_dim: int,
    num_value_heads: int,
    head_v_dim: int,
    out_q: torch.Tensor,
    out_k: torch.Tensor,
    out_v: torch.Tensor,
    out_x: torch.Tensor | None,
    round_products: bool | None = None,
) -> None:
    """Query, key and value of every node (ALGORITHM.md section 3, step 1), written in place into the compact outputs.

    A node's conv inputs are its own row and the rows of its ancestors, then the request's conv state. Sum in fp32 from
    bias and oldest tap, SiLU, rounded to x.dtype; q and k then L2-normalised in fp32 (epsilon 1e-6 inside the root) and
    q scaled by head_k_dim^-0.5: the rounding points of vLLM's causal_conv1d_update and
    fused_sigmoid_gating_delta_rule_update. Entries behind the last node are not written, the conv state is only read.

    Args:
        x: [num token rows, C], C = 2 HK DK + HV DV, channels in the order q, k, v; any row stride.
        weight: [C, 4], tap 3 belongs to the node itself. bias: [C] or None.
        conv_state: [S, C, 3] in x.dtype, any strides, column 2 the newest input before the root.
        state_slot: [R] int32 request -> slot; not read for requests without nodes.
        out_q, out_k: [capacity, HK, DK] fp32. out_v: [capacity, HV, DV] in x.dtype.
        out_x: [capacity, C] in x.dtype, the conv inputs by node, kept for the commit; or None.
        round_products: round each product to x.dtype before it is added; None: as native decode on this device does.

    Raises:
        ValueError: a shape, dtype or stride is wrong.
    """
    HK, HV, DK, DV = num_key_heads, num_value_heads, head_k_dim, head_v_dim
    _check_conv_args(x, weight, bias, conv_state, state_slot, forest, HK, DK, HV, DV, out_q, out_k, out_v, out_x)
    if forest.max_requests == 0:
        return
    BN, BH = _conv_tile(x, 2 * HK + HV)
    grid = (triton.cdiv(node_bound(forest), BN), triton.cdiv(2 * HK + HV, BH))
    tree_conv_kernel[grid](
        x,
        weight,
        bias,
        conv_state,
        state_slot,
        forest.node_offset,
        forest.token_start,
        forest.parent,
        out_q,
        out_k,
        out_v,
        out_x,
        DK**-0.5,
        NORM_EPS,
        forest.max_requests,
        x.stride(0),
        *weight.stride(),
        *conv_state.stride(),
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        WIDTH=CONV_WIDTH,
        HAS_BIAS=bias is not None,
        KEEP_X=out_x is not None,
        ROUND=native_rounds_products(x, weight) if round_products is None else round_products,
        BN=BN,
        BH=BH,
        BD=triton.next_power_of_2(max(DK, DV)),
        BR=request_block(forest),
    )


def _conv_tile(x: torch.Tensor, num_heads: int) -> tuple[int, int]:
    """Nodes and heads of one program. Never from the batch: the order of the norm's sum must not depend on it."""
    if x.is_cuda:
        return 16, 1
    # the interpreter pays per operation, not per element
    return 64, min(16, triton.next_power_of_2(num_heads))


def _check_conv_args(x, weight, bias, conv_state, state_slot, forest, HK, DK, HV, DV, out_q, out_k, out_v, out_x) -> None:
    C = 2 * HK * DK + HV * DV
    if x.dim() != 2 or x.shape[1] != C or x.stride(1) != 1:
        raise ValueError(f"x must be [num token rows, {C}] with unit inner stride, got {list(x.shape)}, strides {x.stride()}")
    if tuple(weight.shape) != (C, CONV_WIDTH):
        raise ValueError(f"weight must be [{C}, {CONV_WIDTH}], got {list(weight.shape)}")
    if bias is not None and (tuple(bias.shape) != (C,) or bias.stride(0) != 1):
        raise ValueError(f"bias must be contiguous [{C}], got {list(bias.shape)}")
    if tuple(conv_state.shape[1:]) != (C, CONV_WIDTH - 1) or conv_state.dtype != x.dtype:
        raise ValueError(f"conv_state must be {x.dtype} [S, {C}, {CONV_WIDTH - 1}], got {conv_state.dtype} {list(conv_state.shape)}")
    if state_slot.dim() != 1 or state_slot.shape[0] < forest.max_requests:
        raise ValueError(f"state_slot must cover {forest.max_requests} requests, got {list(state_slot.shape)}")
    for name, out, shape, dtype in (
        ("out_q", out_q, (HK, DK), torch.float32),
        ("out_k", out_k, (HK, DK), torch.float32),
        ("out_v", out_v, (HV, DV), x.dtype),
        ("out_x", out_x, (C,), x.dtype),
    ):
        if out is None and name == "out_x":
            continue
        if out.shape[0] < forest.capacity or tuple(out.shape[1:]) != shape or out.dtype != dtype or not out.is_contiguous():
            expected = f"contiguous {dtype} [{forest.capacity}, {', '.join(map(str, shape))}]"
            raise ValueError(f"{name} must be {expected}, got {out.dtype} {list(out.shape)}")
