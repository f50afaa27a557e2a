"""Log decay, write gate and cumulative log decay of every node."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..topology import Forest
from ..topology.locate import locate_nodes, node_bound, request_block
from .pointwise import log_decay


@triton.jit
def tree_gates_kernel(
    a,  # [num token rows, HV]
    b,  # [num token rows, HV]
    A_log,  # [HV]
    dt_bias,  # [HV]
    node_offset,  # [R + 1]
    token_start,  # [R]
    parent,  # [capacity]
    depth,  # [capacity]
    out_g,  # [capacity, HV]
    out_beta,  # [capacity, HV]
    out_p,  # [capacity, HV]
    R,
    stride_a,
    stride_b,
    HV: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
):
    i_n = tl.program_id(0)
    num_nodes = tl.load(node_offset + R)
    if i_n * BN >= num_nodes:
        return
    # [BN]
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < num_nodes
    b_req, b_base = locate_nodes(node_offset, o_n, R, BR)
    b_row0 = tl.load(token_start + b_req).to(tl.int64)
    b_row = b_row0 + tl.where(m_n, o_n - b_base, 0)
    # [1, BH]
    o_h = tl.arange(0, BH)[None, :]
    m_h = o_h < HV
    m_nh = m_n[:, None] & m_h
    b_rate = -tl.exp(tl.load(A_log + o_h, mask=m_h, other=0.0).to(tl.float32))
    b_bias = tl.load(dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)

    # [BN, BH]
    b_g = log_decay(tl.load(a + (b_row * stride_a)[:, None] + o_h, mask=m_nh, other=0.0), b_rate, b_bias)
    b_beta = tl.sigmoid(tl.load(b + (b_row * stride_b)[:, None] + o_h, mask=m_nh, other=0.0).to(tl.float32))
    p_out = o_n.to(tl.int64)[:, None] * HV + o_h
    tl.store(out_g + p_out, b_g, mask=m_nh)
    tl.store(out_beta + p_out, b_beta, mask=m_nh)

    # all nodes climb to the root together; a gate is recomputed rather than read from another program's output
    b_p = b_g
    b_at = tl.load(parent + o_n, mask=m_n, other=-1)
    for _ in range(tl.max(tl.load(depth + o_n, mask=m_n, other=0), axis=0)):
        m_at = b_at >= 0
        b_a = tl.load(a + ((b_row0 + b_at) * stride_a)[:, None] + o_h, mask=m_at[:, None] & m_h, other=0.0)
        b_p = tl.where(m_at[:, None], b_p + log_decay(b_a, b_rate, b_bias), b_p)
        b_at = tl.load(parent + b_base + b_at, mask=m_at, other=-1)
    tl.store(out_p + p_out, b_p, mask=m_nh)


def tree_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    forest: Forest,
    out_g: torch.Tensor,
    out_beta: torch.Tensor,
    out_p: torch.Tensor,
) -> None:
    """Gates of every node, in fp32, written in place into the compact outputs (ALGORITHM.md sections 1 and 2).

        g = -exp(A_log) softplus(a + dt_bias)      log space; softplus(x) = x above 20
        beta = sigmoid(b)
        P_i = g_i + g_parent(i) + ... + g_root     log space

    P is summed from the node up, so its bits depend on the node's path alone. Entries behind the last node are not written.

    Args:
        a, b: [num token rows, HV], any float dtype, any row stride.
        A_log, dt_bias: [HV].
        out_g, out_beta, out_p: [capacity, HV] fp32.

    Raises:
        ValueError: a shape, dtype or stride is wrong.
    """
    HV = A_log.shape[0]
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2 or tensor.shape[1] != HV or (HV > 1 and tensor.stride(1) != 1):
            raise ValueError(f"{name} must be [num token rows, {HV}] with unit inner stride, got {list(tensor.shape)}")
    if dt_bias.shape[0] != HV or not (A_log.is_contiguous() and dt_bias.is_contiguous()):
        raise ValueError(f"A_log and dt_bias must be contiguous [{HV}], got {list(A_log.shape)}, {list(dt_bias.shape)}")
    for name, out in (("out_g", out_g), ("out_beta", out_beta), ("out_p", out_p)):
        if out.shape[0] < forest.capacity or tuple(out.shape[1:]) != (HV,) or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"{name} must be contiguous fp32 [{forest.capacity}, {HV}], got {out.dtype} {list(out.shape)}")
    if forest.max_requests == 0:
        return
    BN = 16 if a.is_cuda else 256
    tree_gates_kernel[(triton.cdiv(node_bound(forest), BN),)](
        a,
        b,
        A_log,
        dt_bias,
        forest.node_offset,
        forest.token_start,
        forest.parent,
        forest.depth,
        out_g,
        out_beta,
        out_p,
        forest.max_requests,
        a.stride(0),
        b.stride(0),
        HV=HV,
        BN=BN,
        BH=triton.next_power_of_2(HV),
        BR=request_block(forest),
    )
