"""Sums over a round: how many nodes were verified, drafts accepted, paths on the spine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..precision import device_function
from ..topology import Forest

COUNTS = ("steps", "rows", "nodes", "tree_rows", "tokens", "accepted", "branched", "spine_hits")
BLOCK = 32

total = device_function(tl.sum)


@triton.jit(do_not_specialize=["num_requests"])
def add_counts_kernel(
    p_node_offset,
    p_token,
    p_path,
    p_path_len,
    p_sums,
    p_token_counts,
    num_requests,
    steps,
    stride_path,
    COUNT_TOKENS: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
):
    o_s = tl.arange(0, BS)[None, :]
    b_requests = tl.full([BR], 0, tl.int32)
    b_nodes, b_drafted, b_tokens, b_branched, b_spine = b_requests, b_requests, b_requests, b_requests, b_requests
    for first in range(0, num_requests, BR):
        o_r = first + tl.arange(0, BR)
        m_r = o_r < num_requests
        b_first = tl.load(p_node_offset + o_r, mask=m_r, other=0)
        b_size = tl.load(p_node_offset + o_r + 1, mask=m_r, other=0) - b_first
        b_len = tl.load(p_path_len + o_r, mask=m_r, other=0)
        # the rows of a graph that stand for no request have no path, and offsets that mean nothing
        b_size = tl.where(b_len > 0, b_size, 0)
        m_on = (o_s < b_len[:, None]) & (o_s < steps)
        b_node = tl.load(p_path + o_r.to(tl.int64)[:, None] * stride_path + o_s, mask=m_on, other=0)
        b_off = total((m_on & (b_node != o_s)).to(tl.int32), 1)
        if COUNT_TOKENS:
            b_token = tl.load(p_token + b_first[:, None] + b_node, mask=m_on, other=-1)
            tl.atomic_add(p_token_counts + b_token, 1.0, mask=m_on & (b_token >= 0), sem="relaxed")
        b_has_drafts = (b_size > 1).to(tl.int32)
        b_branch = b_has_drafts * (b_len > 1).to(tl.int32)
        b_requests += (b_size > 0).to(tl.int32)
        b_nodes += b_size
        b_drafted += b_has_drafts
        b_tokens += b_has_drafts * b_len
        b_branched += b_branch
        b_spine += b_branch * (b_off == 0).to(tl.int32)
    requests, drafted, tokens = total(b_requests), total(b_drafted), total(b_tokens)
    tl.store(p_sums, tl.load(p_sums) + (requests > 0).to(tl.int64))
    tl.store(p_sums + 1, tl.load(p_sums + 1) + requests)
    tl.store(p_sums + 2, tl.load(p_sums + 2) + total(b_nodes))
    tl.store(p_sums + 3, tl.load(p_sums + 3) + drafted)
    tl.store(p_sums + 4, tl.load(p_sums + 4) + tokens)
    tl.store(p_sums + 5, tl.load(p_sums + 5) + tokens - drafted)
    tl.store(p_sums + 6, tl.load(p_sums + 6) + total(b_branched))
    tl.store(p_sums + 7, tl.load(p_sums + 7) + total(b_spine))


def add_counts(
    forest: Forest, path: torch.Tensor, path_len: torch.Tensor, sums: torch.Tensor, token_counts: torch.Tensor | None = None
) -> None:
    """Add a round's counts to sums [8] int64, in place and in the order of COUNTS; one launch, no host sync.

    path [R, >= D + 1] int32 accepted nodes, root first, path_len [R] int32 as `walk_tree` leaves them; a row without a path counts for
    nothing. steps: 1 if a request has a node; rows: requests that have one; tree_rows: those with more than the root. Of these: tokens,
    the lengths of their paths; accepted, without the roots; branched, paths beyond the root; spine_hits, those among them that are nodes
    0, 1, 2 ...
    token_counts [vocabulary] fp32, in place: one more for the token of every node on a path, the pending token included.
    Raises ValueError on shapes or dtypes.
    """
    num_requests, steps = path_len.shape[0], forest.max_depth + 1
    if sums.shape != (len(COUNTS),) or sums.dtype != torch.int64:
        raise ValueError(f"sums must be int64 [{len(COUNTS)}], got {sums.dtype} {tuple(sums.shape)}")
    if path.dtype != torch.int32 or path_len.dtype != torch.int32 or path.shape[1] < steps or forest.max_requests < num_requests:
        raise ValueError(f"path must be int32 [{num_requests}, >= {steps}], got {path.dtype} {tuple(path.shape)}")
    if token_counts is not None and (token_counts.dtype != torch.float32 or token_counts.dim() != 1):
        raise ValueError(f"token_counts must be float32 [vocabulary], got {token_counts.dtype} {tuple(token_counts.shape)}")
    add_counts_kernel[(1,)](
        forest.node_offset,
        forest.token,
        path,
        path_len,
        sums,
        sums if token_counts is None else token_counts,
        num_requests,
        steps,
        path.stride(0),
        COUNT_TOKENS=token_counts is not None,
        BR=BLOCK,
        BS=triton.next_power_of_2(steps),
        num_warps=1,
    )
