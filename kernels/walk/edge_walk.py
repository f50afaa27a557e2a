"""The walk down the proposal tree after sampling: follow, from the root, the child that holds the token sampled at its parent.

First every node finds out whether it holds its parent's sample (one gather); the walk itself then stays in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..precision import INTERPRET
from ..topology import Forest


@triton.jit(do_not_specialize=["num_requests"])
def walk_tree_kernel(
    p_sampled,
    p_logits_start,
    p_node_offset,
    p_parent,
    p_token,
    p_acceptable,
    p_out_tokens,
    p_out_num_sampled,
    p_out_path,
    p_out_path_len,
    num_requests,
    max_steps,
    stride_tokens,
    stride_path,
    HAS_ACCEPTABLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # [BLOCK_R] requests of this program
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < num_requests
    b_first = tl.load(p_node_offset + o_r, mask=m_r, other=0)
    b_nodes = tl.load(p_node_offset + o_r + 1, mask=m_r, other=0) - b_first
    b_start = tl.load(p_logits_start + o_r, mask=m_r, other=0)
    b_end = tl.load(p_logits_start + o_r + 1, mask=m_r, other=0)
    m_forest = b_nodes > 0
    # a request outside the forest samples at its last logits row
    b_row = tl.where(m_forest, b_start, b_end - 1)

    # [BLOCK_R, BLOCK_T] nodes; the root is nobody's child
    o_t = tl.arange(0, BLOCK_T)
    m_node = (o_t[None, :] > 0) & (o_t[None, :] < b_nodes[:, None])
    o_node = b_first[:, None] + o_t[None, :]
    b_parent = tl.load(p_parent + o_node, mask=m_node, other=-1)
    b_token = tl.load(p_token + o_node, mask=m_node, other=-1)
    b_want = tl.load(p_sampled + b_start[:, None] + b_parent, mask=m_node & (b_parent >= 0), other=-1)
    # a pad's token is -1
    m_edge = m_node & (b_token >= 0) & (b_token == b_want)
    if HAS_ACCEPTABLE:
        m_edge = m_edge & (tl.load(p_acceptable + b_start[:, None] + o_t[None, :], mask=m_node, other=0) != 0)

    b_node = tl.zeros([BLOCK_R], dtype=tl.int32)
    b_count = tl.zeros([BLOCK_R], dtype=tl.int32)
    m_live = m_r & (b_end > b_start)
    for i_step in range(max_steps):
        b_out = tl.load(p_sampled + b_row + b_node, mask=m_live, other=-1)
        tl.store(p_out_tokens + o_r.to(tl.int64) * stride_tokens + i_step, b_out, mask=m_r)
        tl.store(p_out_path + o_r.to(tl.int64) * stride_path + i_step, tl.where(m_live & m_forest, b_node, 0), mask=m_r)
        b_count += m_live.to(tl.int32)
        # siblings hold distinct tokens: at most one child matches
        b_child = tl.min(tl.where(m_edge & (b_parent == b_node[:, None]), o_t[None, :], BLOCK_T), 1)
        m_live = m_live & (b_child < BLOCK_T)
        b_node = tl.where(m_live, b_child, 0)
    tl.store(p_out_num_sampled + o_r, b_count, mask=m_r)
    tl.store(p_out_path_len + o_r, tl.where(m_forest, b_count, 0), mask=m_r)


def walk_tree(
    sampled: torch.Tensor,
    logits_start: torch.Tensor,
    forest: Forest,
    acceptable: torch.Tensor | None,
    out_tokens: torch.Tensor,
    out_num_sampled: torch.Tensor,
    out_path: torch.Tensor,
    out_path_len: torch.Tensor,
) -> None:
    """Emit the sample at the root; while a child of the current node holds the emitted token, go there and emit its sample.

    The emitted tokens are the target's samples, whatever the tree holds, so the output is exact. A request of the forest has
    one logits row per node, in node order. A request outside the forest emits the sample of its last logits row, or nothing
    if it has none.

    sampled          [num_logits] int64  the target's sample at every logits row
    logits_start     [R + 1] int32  request -> its first logits row
    forest           R requests; a pad node (token -1) is never followed
    acceptable       [num_logits] bool or None  False: the node of this row must not be followed
    out_tokens       [R, >= max_depth + 1] int64  columns 0..max_depth written: emitted tokens, then -1
    out_num_sampled  [R] int32  number of emitted tokens
    out_path         [R, >= max_depth + 1] int32  columns 0..max_depth written: visited nodes, root first, then 0
    out_path_len     [R] int32  visited nodes; equals out_num_sampled in the forest, 0 outside it

    All outputs are written in place. Raises ValueError on shapes or dtypes. No host sync.
    """
    num_requests, steps = logits_start.shape[0] - 1, forest.max_depth + 1
    if forest.max_requests < num_requests:
        raise ValueError(f"logits_start names {num_requests} requests, the forest holds {forest.max_requests}")
    if sampled.dim() != 1 or sampled.stride(0) != 1 or (acceptable is not None and acceptable.shape != sampled.shape):
        raise ValueError("sampled and acceptable must be contiguous [num_logits]")
    if acceptable is not None and acceptable.dtype != torch.bool:
        raise ValueError(f"acceptable must be bool, got {acceptable.dtype}")
    for name, t, dtype in (("out_tokens", out_tokens, torch.int64), ("out_path", out_path, torch.int32)):
        if t.dim() != 2 or t.shape[0] < num_requests or t.shape[1] < steps or t.stride(1) != 1 or t.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} [>= {num_requests}, >= {steps}], got {tuple(t.shape)} {t.dtype}")
    for name, t in (("out_num_sampled", out_num_sampled), ("out_path_len", out_path_len)):
        if t.shape[0] < num_requests or t.dtype != torch.int32 or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 [>= {num_requests}], got {tuple(t.shape)} {t.dtype}")
    if num_requests == 0:
        return
    block_t = triton.next_power_of_2(forest.max_nodes)
    # the interpreter pays per operation: all requests in one program
    block_r = triton.next_power_of_2(num_requests) if INTERPRET else 1
    walk_tree_kernel[(triton.cdiv(num_requests, block_r),)](
        sampled,
        logits_start,
        forest.node_offset,
        forest.parent,
        forest.token,
        sampled if acceptable is None else acceptable,
        out_tokens,
        out_num_sampled,
        out_path,
        out_path_len,
        num_requests,
        steps,
        out_tokens.stride(0),
        out_path.stride(0),
        HAS_ACCEPTABLE=acceptable is not None,
        BLOCK_R=block_r,
        BLOCK_T=block_t,
        num_warps=1 if block_t <= 64 else 2,
    )
