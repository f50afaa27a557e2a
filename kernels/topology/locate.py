"""Which rows are nodes, and which request a node of the flat forest belongs to: the search every node-parallel kernel starts with."""

from __future__ import annotations

import triton
import triton.language as tl

from .forest import Forest


@triton.jit
def locate_nodes(p_node_offset, o_n, R, BR: tl.constexpr):
    """Request of each compact node index, and the compact index of that request's node 0.

    A request without nodes ends where it starts, so the number of requests that end at or before a node is the
    node's own request. Only for `o_n` below `node_offset[R]`; other entries get request 0 and base 0.
    """
    o_r = tl.arange(0, BR)
    # [BR] first node behind each request; entries beyond R never count
    b_end = tl.load(p_node_offset + 1 + o_r, mask=o_r < R, other=2147483647)
    # [BN]
    b_req = tl.sum((b_end[None, :] <= o_n[:, None]).to(tl.int32), axis=1)
    b_req = tl.where(b_req < R, b_req, 0)
    b_base = tl.load(p_node_offset + b_req)
    return b_req, b_base


@triton.jit
def rows_and_nodes(p_query_start, p_is_tree, b_slot, o_r, m_r, T: tl.constexpr):
    """Token rows of each request, and how many of them are nodes: none without a tree or a slot (-1), at most T."""
    b_rows = tl.load(p_query_start + o_r + 1, mask=m_r, other=0) - tl.load(p_query_start + o_r, mask=m_r, other=0)
    b_tree = (tl.load(p_is_tree + o_r, mask=m_r, other=0) != 0) & (b_slot >= 0)
    return b_rows, tl.where(b_tree, tl.minimum(b_rows, T), 0)


def node_bound(forest: Forest) -> int:
    """Static bound on the number of nodes of this batch; sizes the grid of a node-parallel kernel."""
    return min(forest.capacity, forest.max_requests * forest.max_nodes)


def request_block(forest: Forest) -> int:
    """Power of two that holds all requests of this batch; one for all small batches, since every one is compiled."""
    return triton.next_power_of_2(max(32, forest.max_requests))
