"""Moves the KV rows of the accepted path to the positions that the path's tokens take: one launch over layers and requests.

Node i of a tree was written at the slot of position L + i; the path's j-th node belongs at L + j. A program holds the whole path of
its requests (for its part of the heads), so that everything is read before anything is written: the ranges overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..precision import INTERPRET
from ..topology import Forest

# rows are copied as raw bits: exact for any dtype
_BITS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


@dataclass(frozen=True)
class KVTable:
    """The KV caches of several layers that share shape, strides and dtype."""

    # [L] int64 address of each layer's cache
    address: torch.Tensor
    # [L] int32 layer -> KV-cache group: the row of `slot_mapping` that holds its slots
    group: torch.Tensor
    # per-layer views [num_blocks, H, block_size, 2 * D]; kept so that the addresses stay valid
    caches: tuple[torch.Tensor, ...]

    @classmethod
    def build(cls, kv_caches: list[torch.Tensor], groups: list[int]) -> KVTable:
        """A table over `kv_caches` [num_blocks, H, block_size, 2 * D] each (any strides). Copies to the device: call it at start."""
        if not kv_caches or len(kv_caches) != len(groups):
            raise ValueError(f"one group per layer and at least one layer are needed, got {len(kv_caches)} caches, {len(groups)} groups")
        first = kv_caches[0]
        if first.dim() != 4 or first.element_size() not in _BITS:
            raise ValueError(f"a cache must be [num_blocks, H, block_size, 2 * D] of 1, 2 or 4 bytes, got {first.shape} {first.dtype}")
        for cache in kv_caches:
            if cache.shape[1:] != first.shape[1:] or cache.stride() != first.stride() or cache.dtype != first.dtype:
                raise ValueError(
                    f"caches must be alike: {first.shape} {first.stride()} {first.dtype}, {cache.shape} {cache.stride()} {cache.dtype}"
                )
        address = torch.tensor([cache.data_ptr() for cache in kv_caches], dtype=torch.int64, device=first.device)
        return cls(address, torch.tensor(groups, dtype=torch.int32, device=first.device), tuple(kv_caches))


@triton.jit(do_not_specialize=["num_requests"])
def move_kv_kernel(
    p_address,
    p_group,
    p_slot_mapping,
    p_token_start,
    p_path,
    p_path_len,
    num_requests,
    stride_slots,
    stride_path,
    stride_block,
    stride_head,
    stride_pos,
    stride_dim,
    NUM_ELEMENTS: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    i_e, i_r, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # [BLOCK_R * BLOCK_P] (request, place in its path)
    o_row = tl.arange(0, BLOCK_R * BLOCK_P)
    o_r = i_r * BLOCK_R + o_row // BLOCK_P
    o_j = o_row % BLOCK_P
    m_r = o_r < num_requests
    m_row = o_j < tl.load(p_path_len + o_r, mask=m_r, other=0)
    b_node = tl.load(p_path + o_r.to(tl.int64) * stride_path + o_j, mask=m_row, other=0)
    p_slots = p_slot_mapping + tl.load(p_group + i_l).to(tl.int64) * stride_slots
    b_start = tl.load(p_token_start + o_r, mask=m_row, other=0)
    b_from = tl.load(p_slots + b_start + b_node, mask=m_row, other=-1)
    b_to = tl.load(p_slots + b_start + o_j, mask=m_row, other=-1)
    m_move = (b_from >= 0) & (b_to >= 0) & (b_from != b_to)
    # the accepted path is the spine: nothing to move
    if tl.max(m_move.to(tl.int32), 0) == 0:
        return

    p_cache = tl.load(p_address + i_l).to(tl.pointer_type(BITS))
    # [BLOCK_E] elements of a cache row over all heads
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    p_e = p_cache + (o_e // ROW_WIDTH).to(tl.int64) * stride_head + (o_e % ROW_WIDTH) * stride_dim
    m_e = m_move[:, None] & (o_e < NUM_ELEMENTS)[None, :]
    o_from = (b_from // BLOCK_SIZE) * stride_block + (b_from % BLOCK_SIZE) * stride_pos
    o_to = (b_to // BLOCK_SIZE) * stride_block + (b_to % BLOCK_SIZE) * stride_pos
    b_kv = tl.load(p_e[None, :] + o_from[:, None], mask=m_e)
    # a row may be one thread's target and another's source
    tl.debug_barrier()
    tl.store(p_e[None, :] + o_to[:, None], b_kv, mask=m_e)


def move_kv(
    caches: KVTable,
    slot_mapping: torch.Tensor,
    forest: Forest,
    path: torch.Tensor,
    path_len: torch.Tensor,
) -> None:
    """In every layer, copy the KV row of the j-th node of each request's path to the slot of its j-th token row.

    Row `path[r, j]` of the request goes to row j: slot_mapping[g, token_start + path[r, j]] -> slot_mapping[g, token_start + j],
    g the layer's group. All of a request's rows are read before any is written. A row that stays where it is, or one of whose
    slots is negative, is skipped.

    caches        the layers' caches, written in place
    slot_mapping  [NG, num token rows] int64  token row -> block * block_size + offset in the block, -1: none
    forest        R requests: only token_start is read
    path          [>= R, Dp] int32  node indices, path[r, 0] = 0
    path_len      [R] int32  0: nothing to move. R is taken from here

    Raises ValueError on shapes or dtypes. No host sync.
    """
    num_requests, cache = path_len.shape[0], caches.caches[0]
    if slot_mapping.dim() != 2 or slot_mapping.dtype != torch.int64 or slot_mapping.stride(1) != 1:
        raise ValueError(f"slot_mapping must be int64 [groups, token rows], got {tuple(slot_mapping.shape)} {slot_mapping.dtype}")
    if path.dim() != 2 or path.shape[0] < num_requests or path.dtype != torch.int32 or path.stride(1) != 1:
        raise ValueError(f"path must be int32 [>= {num_requests}, Dp], got {tuple(path.shape)} {path.dtype}")
    if path_len.dtype != torch.int32 or not path_len.is_contiguous() or forest.max_requests < num_requests:
        raise ValueError(f"path_len must be contiguous int32 [<= {forest.max_requests}], got {tuple(path_len.shape)} {path_len.dtype}")
    if num_requests == 0:
        return
    block_p = triton.next_power_of_2(path.shape[1])
    num_elements = cache.shape[1] * cache.shape[3]
    # the interpreter pays per operation: all requests and heads in one program
    block_r = triton.next_power_of_2(num_requests) if INTERPRET else 1
    block_e = triton.next_power_of_2(num_elements) if INTERPRET else min(triton.next_power_of_2(num_elements), max(32, 4096 // block_p))
    grid = (triton.cdiv(num_elements, block_e), triton.cdiv(num_requests, block_r), len(caches.caches))
    move_kv_kernel[grid](
        caches.address,
        caches.group,
        slot_mapping,
        forest.token_start,
        path,
        path_len,
        num_requests,
        slot_mapping.stride(0),
        path.stride(0),
        *cache.stride(),
        NUM_ELEMENTS=num_elements,
        ROW_WIDTH=cache.shape[3],
        BLOCK_SIZE=cache.shape[2],
        BITS=_BITS[cache.element_size()],
        BLOCK_R=block_r,
        BLOCK_P=block_p,
        BLOCK_E=block_e,
    )
