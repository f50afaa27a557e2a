"""Where a commit writes: a request's one state or, under prefix caching, the block its path ends in and the one that ends on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 32


@triton.jit(do_not_specialize=["num_requests"])
def in_place_targets_kernel(p_src_slot, p_path_len, p_dst_slot, p_dst_len, num_requests, num_groups, BR: tl.constexpr):
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    m_r = o_r < num_requests
    b_zero = tl.zeros([BR], dtype=tl.int32)
    for i_g in range(num_groups):
        o_g = i_g * num_requests + o_r
        tl.store(p_dst_slot + o_g * 2, tl.load(p_src_slot + o_g, mask=m_r, other=0), mask=m_r)
        tl.store(p_dst_slot + o_g * 2 + 1, b_zero, mask=m_r)
    tl.store(p_dst_len + o_r * 2, tl.load(p_path_len + o_r, mask=m_r, other=0), mask=m_r)
    tl.store(p_dst_len + o_r * 2 + 1, b_zero, mask=m_r)


def in_place_targets(src_slot: torch.Tensor, path_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Destinations of a commit where every request has one state: (dst_slot [groups, R, 2], dst_len [R, 2]), int32, the second ones empty.

    src_slot [groups, R] int32, path_len [R] int32, contiguous. One launch, no host sync. Raises ValueError on dtypes or shapes.
    """
    num_groups, num_requests = src_slot.shape
    if path_len.shape != (num_requests,) or any(t.dtype != torch.int32 or not t.is_contiguous() for t in (src_slot, path_len)):
        raise ValueError(f"src_slot and path_len must be contiguous int32 [groups, R] and [R], got {src_slot.shape} and {path_len.shape}")
    dst_slot = torch.empty(num_groups, num_requests, 2, dtype=torch.int32, device=path_len.device)
    dst_len = torch.empty(num_requests, 2, dtype=torch.int32, device=path_len.device)
    if num_requests:
        grid = (triton.cdiv(num_requests, BLOCK),)
        in_place_targets_kernel[grid](src_slot, path_len, dst_slot, dst_len, num_requests, num_groups, BR=BLOCK, num_warps=1)
    return dst_slot, dst_len


@triton.jit(do_not_specialize=["num_requests"])
def block_targets_kernel(
    p_table,
    p_num_computed,
    p_path_len,
    p_request_slot,
    p_dst_slot,
    p_dst_len,
    p_state_column,
    num_requests,
    block_size,
    stride_table,
    FIRST: tl.constexpr,
    BR: tl.constexpr,
):
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    m_r = o_r < num_requests
    b_before = tl.load(p_num_computed + o_r, mask=m_r, other=0)
    b_len = tl.load(p_path_len + o_r, mask=m_r, other=0)
    b_after = b_before + b_len
    b_last = tl.maximum(b_after - 1, 0) // block_size
    b_ended = b_after // block_size
    b_boundary = b_ended * block_size
    m_crossed = (b_boundary > b_before) & (b_boundary < b_after)
    p_row = p_table + o_r.to(tl.int64) * stride_table
    tl.store(p_dst_slot + o_r * 2, tl.load(p_row + b_last, mask=m_r, other=0), mask=m_r)
    tl.store(p_dst_slot + o_r * 2 + 1, tl.load(p_row + tl.maximum(b_ended - 1, 0), mask=m_r, other=0), mask=m_r)
    if FIRST:
        tl.store(p_dst_len + o_r * 2, b_len, mask=m_r)
        tl.store(p_dst_len + o_r * 2 + 1, tl.where(m_crossed, b_boundary - b_before, 0), mask=m_r)
        b_slot = tl.load(p_request_slot + o_r, mask=m_r, other=-1)
        tl.store(p_state_column + b_slot, b_last, mask=m_r & (b_slot >= 0) & (b_len > 0))


def block_targets(
    tables: list[torch.Tensor],
    num_computed: torch.Tensor,
    path_len: torch.Tensor,
    block_size: int,
    request_slot: torch.Tensor,
    state_column: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Destinations of a commit whose states belong to blocks of `block_size` tokens: (dst_slot [groups, R, 2], dst_len [R, 2]), int32.

    A state belongs to the block that its last token lies in: the first destination is the block of token L + n - 1. Where the path crosses
    a block's end, the exact state there goes to that block, which is the one a later prefix hit resumes from: the second destination.

    tables        per group [>= R, columns] int32  block column -> slot
    num_computed  [R] int32  L, tokens before the path; path_len [R] int32  n, at most block_size; 0: nothing to commit
    request_slot  [R] int32 or int64  request -> entry of `state_column`, -1: none
    state_column  [slots] int32  block column of every request's running state; set in place where n > 0

    One launch a group, no host sync. Raises ValueError on dtypes or shapes.
    """
    num_requests = path_len.shape[0]
    for name, t in (("num_computed", num_computed), ("path_len", path_len)):
        if t.shape != (num_requests,) or t.dtype != torch.int32 or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 [{num_requests}], got {t.dtype} {tuple(t.shape)}")
    for table in tables:
        if table.dim() != 2 or table.shape[0] < num_requests or table.stride(1) != 1 or table.dtype != torch.int32:
            raise ValueError(f"a block table must be int32 [>= {num_requests}, columns], got {table.dtype} {tuple(table.shape)}")
    dst_slot = torch.empty(len(tables), num_requests, 2, dtype=torch.int32, device=path_len.device)
    dst_len = torch.empty(num_requests, 2, dtype=torch.int32, device=path_len.device)
    if num_requests == 0:
        return dst_slot, dst_len
    for group, table in enumerate(tables):
        block_targets_kernel[(triton.cdiv(num_requests, BLOCK),)](
            table,
            num_computed,
            path_len,
            request_slot,
            dst_slot[group],
            dst_len,
            state_column,
            num_requests,
            block_size,
            table.stride(0),
            FIRST=group == 0,
            BR=BLOCK,
            num_warps=1,
        )
    return dst_slot, dst_len
