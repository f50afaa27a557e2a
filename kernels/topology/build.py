"""Build the batch's forest from the trees the drafter stored per request slot, without leaving the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .forest import Forest
from .locate import locate_nodes, node_bound, request_block, rows_and_nodes

# requests one program can hold when it sums the node counts before its own
MAX_REQUESTS = 1024


@triton.jit
def parent_of(p_parent, b_node, b_stored):
    """Parent of stored nodes, -1 for the root and for nothing (-1). Pads hang below the root; a parent comes before its child."""
    b_up = tl.load(p_parent + b_node, mask=(b_node > 0) & (b_node < b_stored), other=-1)
    b_up = tl.where((b_node > 0) & (b_node >= b_stored), 0, b_up)
    return tl.where(b_up < b_node, b_up, -1)


@triton.jit(do_not_specialize=["R"])
def build_forest_kernel(
    slot_parent,  # [S, T]
    slot_token,  # [S, T]
    slot_logprob,  # [S, T]
    slot_num_nodes,  # [S]
    slot_of_request,  # [R]
    is_tree,  # [R]
    query_start,  # [R + 1]
    root_token,  # [num token rows]
    node_offset,  # [R + 1]
    token_start,  # [R]
    parent,  # [capacity]
    depth,  # [capacity]
    token,  # [capacity]
    logprob,  # [capacity]
    ancestors,  # [capacity, W]
    request,  # [capacity]
    path,  # [capacity, D]
    conv_source,  # [capacity, 4]
    stride_parent,
    stride_token,
    stride_logprob,
    R,
    CAPACITY,
    T: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BQ: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    # [BQ] this program's requests
    o_q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    m_q = o_q < R
    o_r = tl.arange(0, BR)
    m_r = o_r < R
    # [BR] node counts of all requests: every program sums those before its own
    b_of_request = tl.load(slot_of_request + o_r, mask=m_r, other=-1)
    _, b_len = rows_and_nodes(query_start, is_tree, b_of_request, o_r, m_r, T)
    # never past the arrays: a batch that does not fit is the caller's error, but must not corrupt memory
    b_end = tl.minimum(tl.sum(tl.where(o_r[None, :] <= o_q[:, None], b_len[None, :], 0), axis=1), CAPACITY)
    b_offset = tl.minimum(tl.sum(tl.where(o_r[None, :] < o_q[:, None], b_len[None, :], 0), axis=1), CAPACITY)
    b_row = tl.load(query_start + o_q, mask=m_q, other=0)
    tl.store(node_offset + o_q, b_offset, mask=m_q)
    tl.store(node_offset + o_q + 1, b_end, mask=o_q == R - 1)
    tl.store(token_start + o_q, b_row, mask=m_q)
    b_num = b_end - b_offset
    if tl.max(b_num, axis=0) <= 0:
        return

    m_q &= b_num > 0
    b_slot = tl.load(slot_of_request + o_q, mask=m_q, other=0).to(tl.int64)
    b_stored = tl.load(slot_num_nodes + b_slot, mask=m_q, other=0)
    b_root = tl.load(root_token + b_row, mask=m_q, other=0).to(tl.int32)
    # [BQ, BT]
    p_parent = slot_parent + (b_slot * stride_parent)[:, None]
    o_t = tl.arange(0, BT)[None, :]
    m_t = o_t < b_num[:, None]
    # nodes the drafter stored; the root exists in any case, the rest of the scheduled rows are pads
    m_draft = m_t & (o_t > 0)
    m_stored = m_draft & (o_t < b_stored[:, None])
    b_parent = tl.load(p_parent + o_t, mask=m_stored, other=0)
    # parents come before children, which also bounds the walk below whatever the slot holds
    b_parent = tl.where(m_draft & (b_parent < o_t), b_parent, -1)
    b_token = tl.load(slot_token + (b_slot * stride_token)[:, None] + o_t, mask=m_stored, other=-1)
    b_token = tl.where(o_t == 0, b_root[:, None], b_token)
    b_logprob = tl.load(slot_logprob + (b_slot * stride_logprob)[:, None] + o_t, mask=m_stored, other=float("-inf"))
    b_logprob = tl.where(o_t == 0, 0.0, b_logprob)

    # all nodes climb to the root together, one generation an iteration
    o_w = tl.arange(0, BW)[None, None, :]
    # [BQ, BT, BW]
    b_mask = tl.where((o_t >> 5)[:, :, None] == o_w, (1 << (o_t & 31))[:, :, None], 0)
    b_mask = tl.where(m_t[:, :, None], b_mask, 0)
    b_depth = tl.zeros([BQ, BT], dtype=tl.int32)
    b_cur = b_parent
    while tl.max(tl.max(b_cur, axis=1), axis=0) >= 0:
        b_depth += (b_cur >= 0).to(tl.int32)
        # a finished node has word -1, which matches none
        b_mask |= tl.where((b_cur >> 5)[:, :, None] == o_w, (1 << (b_cur & 31))[:, :, None], 0)
        b_cur = parent_of(p_parent, b_cur, b_stored[:, None])

    o_n = b_offset[:, None] + o_t
    tl.store(parent + o_n, b_parent, mask=m_t)
    tl.store(depth + o_n, b_depth, mask=m_t)
    tl.store(token + o_n, b_token, mask=m_t)
    tl.store(logprob + o_n, b_logprob, mask=m_t)
    p_mask = ancestors + o_n.to(tl.int64)[:, :, None] * W + o_w
    tl.store(p_mask, b_mask, mask=m_t[:, :, None] & (o_w < W))
    tl.store(request + o_n, o_q[:, None] + tl.zeros([BQ, BT], dtype=tl.int32), mask=m_t)

    # the path again, now that each ancestor's depth is known, and the inputs of the convolution along it
    o_d = tl.arange(0, D)[None, None, :]
    p_path = path + o_n.to(tl.int64)[:, :, None] * D + o_d
    tl.store(p_path, tl.full([BQ, BT, D], -1, dtype=tl.int32), mask=m_t[:, :, None] & (o_d > b_depth[:, :, None]))
    p_source = conv_source + o_n.to(tl.int64) * 4
    b_cur = tl.where(m_t, o_t + tl.zeros([BQ, BT], dtype=tl.int32), -1)
    for i_up in range(tl.maximum(tl.max(tl.max(b_depth, axis=1), axis=0) + 1, 4)):
        m_cur = m_t & (i_up <= b_depth)
        tl.store(path + o_n.to(tl.int64) * D + b_depth - i_up, b_cur, mask=m_cur & (b_depth - i_up < D))
        # above the root: -1, -2, ... columns of the conv state, newest first
        tl.store(p_source + 3 - i_up, tl.where(m_cur, b_row[:, None] + b_cur, b_depth - i_up), mask=m_t & (i_up < 4))
        b_cur = parent_of(p_parent, b_cur, b_stored[:, None])


def build_forest(
    forest: Forest,
    slot_parent: torch.Tensor,
    slot_token: torch.Tensor,
    slot_logprob: torch.Tensor,
    slot_num_nodes: torch.Tensor,
    slot_of_request: torch.Tensor,
    is_tree: torch.Tensor,
    query_start: torch.Tensor,
    root_token: torch.Tensor,
) -> None:
    """Write all arrays of `forest`, in place, from the trees stored per request slot.

    A request has `query_start[r + 1] - query_start[r]` nodes if `is_tree[r]` and its slot is not -1, else none. Its
    first nodes are those of the slot's tree; where more rows are scheduled than the slot has nodes, the rest are pads:
    parent 0, depth 1, token -1, log-probability -inf. Array entries behind the last node are left as they are.

    Args:
        forest: for R requests (`forest.for_requests`); T = `forest.max_nodes`.
        slot_parent: [S, T] int32, parent's index in the tree, below its own; entry 0 (the root) is not read.
        slot_token: [S, T] int32 token ids; entry 0 is not read. -1 makes a node a pad in place.
        slot_logprob: [S, T] fp32 cumulative natural log-probability; entry 0 is not read.
        slot_num_nodes: [S] int32, stored nodes, root included.
        slot_of_request: [R] int64, -1: a padded request.
        is_tree: [R] bool, False: a prefill or padded row.
        query_start: [R + 1] int32, first token row of each request.
        root_token: [num token rows] int32 or int64 input ids; node 0's token is the one on the request's first row.

    The nodes of a batch have to fit the forest: at most T per request and `capacity` in all. Rows beyond get no node.

    Raises:
        ValueError: a shape or dtype is wrong, or R > 1024.
    """
    num_requests, T = forest.max_requests, forest.max_nodes
    _check_build_args(forest, slot_parent, slot_token, slot_logprob, slot_of_request, is_tree, query_start)
    if num_requests == 0:
        return
    W = forest.ancestors.shape[1]
    # one request a program on a GPU; few programs under the interpreter, where each operation costs a Python call
    BQ = 1 if slot_parent.is_cuda else min(16, triton.next_power_of_2(num_requests))
    build_forest_kernel[(triton.cdiv(num_requests, BQ),)](
        slot_parent,
        slot_token,
        slot_logprob,
        slot_num_nodes,
        slot_of_request,
        is_tree.view(torch.uint8),
        query_start,
        root_token,
        forest.node_offset,
        forest.token_start,
        forest.parent,
        forest.depth,
        forest.token,
        forest.logprob,
        forest.ancestors,
        forest.request,
        forest.path,
        forest.conv_source,
        slot_parent.stride(0),
        slot_token.stride(0),
        slot_logprob.stride(0),
        num_requests,
        forest.capacity,
        T=T,
        W=W,
        D=forest.path.shape[1],
        BR=request_block(forest),
        BQ=BQ,
        BT=triton.next_power_of_2(T),
        BW=triton.next_power_of_2(W),
    )


def _check_build_args(forest, slot_parent, slot_token, slot_logprob, slot_of_request, is_tree, query_start) -> None:
    num_requests, T = forest.max_requests, forest.max_nodes
    if num_requests > MAX_REQUESTS:
        raise ValueError(f"at most {MAX_REQUESTS} requests, got {num_requests}")
    for name, tensor, dtype in (
        ("slot_parent", slot_parent, torch.int32),
        ("slot_token", slot_token, torch.int32),
        ("slot_logprob", slot_logprob, torch.float32),
    ):
        if tensor.dtype != dtype or tensor.dim() != 2 or tensor.shape[1] < T or tensor.stride(1) != 1:
            raise ValueError(f"{name} must be {dtype} [S, >= {T}] with unit inner stride, got {tensor.dtype} {list(tensor.shape)}")
    if slot_of_request.shape[0] < num_requests or is_tree.shape[0] < num_requests or query_start.shape[0] < num_requests + 1:
        raise ValueError(f"slot_of_request, is_tree and query_start must cover {num_requests} requests")
    if is_tree.dtype != torch.bool:
        raise ValueError(f"is_tree must be bool, got {is_tree.dtype}")


@triton.jit(do_not_specialize=["R"])
def tree_positions_kernel(
    num_computed,  # [R]
    node_offset,  # [R + 1]
    token_start,  # [R]
    depth,  # [capacity]
    positions,  # [num token rows]
    token_ids,  # [num token rows]
    R,
    HAS_TOKENS: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    num_nodes = tl.load(node_offset + R)
    i_n = tl.program_id(0)
    if i_n * BN >= num_nodes:
        return
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < num_nodes
    b_req, b_base = locate_nodes(node_offset, o_n, R, BR)
    b_row = tl.load(token_start + b_req).to(tl.int64) + (o_n - b_base)
    b_position = tl.load(num_computed + b_req).to(tl.int64) + tl.load(depth + o_n, mask=m_n, other=0)
    tl.store(positions + b_row, b_position, mask=m_n)
    if HAS_TOKENS:
        b_token = tl.load(token_ids + b_row, mask=m_n, other=0)
        tl.store(token_ids + b_row, tl.maximum(b_token, 0), mask=m_n & (b_token < 0))


def tree_positions(forest: Forest, num_computed: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | None = None) -> None:
    """Positions of tree rows, in place: row `token_start + i` gets `num_computed + depth(i)`; other rows are untouched.

    Args:
        num_computed: [R] int32 or int64, tokens before node 0.
        positions: [num token rows] int64.
        token_ids: [num token rows] int32 or int64 input ids: those of tree rows that are negative (pads) become 0, which can be embedded.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    if num_computed.shape[0] < forest.max_requests:
        raise ValueError(f"num_computed must cover {forest.max_requests} requests, got {num_computed.shape[0]}")
    if positions.dtype != torch.int64 or positions.dim() != 1 or positions.stride(0) != 1:
        raise ValueError(f"positions must be contiguous int64 [num token rows], got {positions.dtype} {list(positions.shape)}")
    if forest.max_requests == 0:
        return
    BN = 64 if positions.is_cuda else 256
    tree_positions_kernel[(triton.cdiv(node_bound(forest), BN),)](
        num_computed,
        forest.node_offset,
        forest.token_start,
        forest.depth,
        positions,
        positions if token_ids is None else token_ids,
        forest.max_requests,
        HAS_TOKENS=token_ids is not None,
        BN=BN,
        BR=request_block(forest),
    )
