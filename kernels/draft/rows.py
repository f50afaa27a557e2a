"""Where the draft rows of a whole tree lie, for all depths at once: what depends on the requests' lengths alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAD_SLOT = -1


@triton.jit(do_not_specialize=["num_requests"])
def place_rows_kernel(
    p_lengths,
    p_request_slot,
    p_positions,
    p_cache_pos,
    p_num_rows,
    p_room,
    num_requests,
    max_len,
    W: tl.constexpr,
    EXPANDED: tl.constexpr,
    BE: tl.constexpr,
):
    # one program a request
    i_r = tl.program_id(0)
    length = tl.load(p_lengths + i_r)
    # [BE] the request's rows, depth by depth
    o_e = tl.arange(0, BE)
    m_e = o_e < EXPANDED
    b_depth, b_beam = o_e // W, o_e % W
    # RoPE: the MTP layer's row for the token at L + d sits at L + d - 1
    b_position = tl.minimum(length + b_depth, max_len - 1).to(tl.int64)
    tl.store(p_positions + b_depth.to(tl.int64) * (num_requests * W) + i_r * W + b_beam, b_position, mask=m_e)
    b_cache = length + o_e
    tl.store(p_cache_pos + i_r.to(tl.int64) * EXPANDED + o_e, tl.where(b_cache < max_len, b_cache, 0).to(tl.int64), mask=m_e)
    tl.store(p_num_rows + i_r, tl.where(tl.load(p_request_slot + i_r) >= 0, W, 0))
    tl.store(p_room + i_r, tl.minimum(tl.maximum(max_len - length, 0), EXPANDED))


def place_rows(
    lengths: torch.Tensor, request_slot: torch.Tensor, shape, max_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(positions, cache_pos, num_rows, room) of the frontier rows that run through the draft model, `shape.beam` a request and depth.

    lengths       [R] int32  L, tokens in the cache before the rows
    request_slot  [R] int32 or int64  -1: the row of the batch stands for no request
    max_len       positions that exist

    positions  [D - 1, R * w] int64  RoPE positions L, L + 1, ... by depth, below `max_len`
    cache_pos  [R, E] int64  L + e, where expanded row e keeps its KV; 0 where that is outside
    num_rows   [R] int32  w, 0 without a request
    room       [R] int32  expanded rows that are inside

    One launch, no host sync. Raises ValueError on dtypes.
    """
    for name, t in (("lengths", lengths), ("request_slot", request_slot)):
        if t.dtype not in (torch.int32, torch.int64) or t.stride(0) != 1:
            raise ValueError(f"{name} must be contiguous integers, got {t.dtype}")
    num_requests, device = lengths.shape[0], lengths.device
    positions = torch.empty(shape.max_depth - 1, num_requests * shape.beam, dtype=torch.int64, device=device)
    cache_pos = torch.empty(num_requests, shape.num_expanded, dtype=torch.int64, device=device)
    num_rows, room = (torch.empty(num_requests, dtype=torch.int32, device=device) for _ in range(2))
    if num_requests:
        place_rows_kernel[(num_requests,)](
            lengths,
            request_slot,
            positions,
            cache_pos,
            num_rows,
            room,
            num_requests,
            max_len,
            W=shape.beam,
            EXPANDED=shape.num_expanded,
            BE=triton.next_power_of_2(shape.num_expanded),
            num_warps=1,
        )
    return positions, cache_pos, num_rows, room


@triton.jit(do_not_specialize=["num_requests"])
def slots_by_depth_kernel(
    p_slots,
    p_room,
    p_out,
    num_requests,
    num_groups,
    stride_slots,
    PAD: tl.constexpr,
    W: tl.constexpr,
    EXPANDED: tl.constexpr,
    BE: tl.constexpr,
):
    # one program a request and cache group
    i_r, i_g = tl.program_id(0), tl.program_id(1)
    o_e = tl.arange(0, BE)
    m_e = o_e < EXPANDED
    b_slot = tl.load(p_slots + i_g.to(tl.int64) * stride_slots + i_r * EXPANDED + o_e, mask=m_e, other=0)
    b_slot = tl.where(o_e < tl.load(p_room + i_r), b_slot, PAD)
    o_d = (o_e // W).to(tl.int64) * num_groups + i_g
    tl.store(p_out + o_d * (num_requests * W) + i_r * W + o_e % W, b_slot, mask=m_e)


def slots_by_depth(slots: torch.Tensor, room: torch.Tensor, shape) -> torch.Tensor:
    """[D - 1, G, R * w] KV slots of every depth's rows, from [G, >= R * E] slots of every request's rows; PAD_SLOT from `room` [R] on.

    One launch, no host sync. Raises ValueError on shapes.
    """
    num_groups, num_requests, expanded = slots.shape[0], room.shape[0], shape.num_expanded
    if slots.dim() != 2 or slots.shape[1] < num_requests * expanded or slots.stride(1) != 1:
        raise ValueError(f"slots must be [groups, >= {num_requests * expanded}] with unit inner stride, got {tuple(slots.shape)}")
    out = torch.empty(shape.max_depth - 1, num_groups, num_requests * shape.beam, dtype=slots.dtype, device=slots.device)
    if num_requests:
        slots_by_depth_kernel[(num_requests, num_groups)](
            slots,
            room,
            out,
            num_requests,
            num_groups,
            slots.stride(0),
            PAD=PAD_SLOT,
            W=shape.beam,
            EXPANDED=expanded,
            BE=triton.next_power_of_2(expanded),
            num_warps=1,
        )
    return out
