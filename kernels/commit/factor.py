"""The commit from factors, all layers in one launch: along the accepted path S <- exp(P_i - P_parent) S + k_i u_i^T, which is
S_new = exp(P_a) S_pre + sum_j exp(P_a - P_j) k_j u_j^T.

The states stream through registers: the few rank-one updates of a path cost less than a tile's detour to the layout of tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import pointwise
from ..overlap import let_next_start, overlaps
from ..precision import INTERPRET, device_function, exp_non_positive, to_fp32
from ..topology import Forest
from .conv import commit_conv, path_lengths
from .layers import TL_DTYPE, LayerTable, load_pointer

# values and warps of one program
TILE = (8, 1)

round_to = device_function(pointwise.round_to)


@device_function
def load_correction(p_p, p_k, p_k_scale, p_u, o_row, i_hv, i_hk, o_d, o_v, HK, HV, DK, DV, INTERPRET: tl.constexpr):
    """What a node adds: its P, k [DK] as fp32 activation and u [BV], the norm of k included."""
    o_key, o_head = o_row * HK + i_hk, o_row * HV + i_hv
    b_k = to_fp32(tl.load(p_k + o_key * DK + o_d), INTERPRET)
    b_u = tl.load(p_u + o_head * DV + o_v)
    return tl.load(p_p + o_head), b_k, b_u * tl.load(p_k_scale + o_key)


@triton.jit
def commit_factor_kernel(
    p_ssm_table,
    p_layer_group,
    p_p,
    p_k,
    p_k_scale,
    p_u,
    p_node_offset,
    p_path,
    p_path_len,
    p_src_slot,
    p_dst_slot,
    p_dst_len,
    stride_p_layer,
    stride_k_layer,
    stride_ks_layer,
    stride_u_layer,
    stride_path,
    stride_slot,
    stride_head,
    stride_k,
    stride_v,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    INTERPRET: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        let_next_start()
    i_vh, i_r, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_v, i_hv = i_vh % (DV // BV), i_vh // (DV // BV)
    len0, len1, num_tokens = path_lengths(p_path_len, p_dst_len, i_r)
    if num_tokens <= 0:
        return
    node_start = tl.load(p_node_offset + i_r)
    i_slot = tl.load(p_layer_group + i_l) * tl.num_programs(1) + i_r
    src = tl.load(p_src_slot + i_slot).to(tl.int64)
    dst0 = tl.load(p_dst_slot + i_slot * 2).to(tl.int64)
    dst1 = tl.load(p_dst_slot + i_slot * 2 + 1).to(tl.int64)
    layer = i_l.to(tl.int64)
    p_p += layer * stride_p_layer
    p_k += layer * stride_k_layer
    p_k_scale += layer * stride_ks_layer
    p_u += layer * stride_u_layer
    p_path += i_r * stride_path
    i_hk = i_hv // (HV // HK)
    o_d = tl.arange(0, DK)
    o_v = i_v * BV + tl.arange(0, BV)
    # [BV, DK]
    p_state = load_pointer(p_ssm_table, i_l, DTYPE, ALIGN) + i_hv.to(tl.int64) * stride_head
    o_state = o_v[:, None] * stride_v + o_d[None, :] * stride_k
    b_s = to_fp32(tl.load(p_state + src * stride_slot + o_state), INTERPRET)

    last = num_tokens - 1
    row = (node_start + tl.load(p_path)).to(tl.int64)
    next_row = (node_start + tl.load(p_path + tl.minimum(1, last))).to(tl.int64)
    b_p, b_k, b_u = load_correction(p_p, p_k, p_k_scale, p_u, row, i_hv, i_hk, o_d, o_v, HK, HV, DK, DV, INTERPRET)
    b_decay = b_p
    for i_t in range(num_tokens):
        b_s = b_s * exp_non_positive(b_decay) + b_u[:, None] * b_k[None, :]
        # read ahead; behind the last token the last one again
        b_last = b_p
        b_p, b_k, b_u = load_correction(p_p, p_k, p_k_scale, p_u, next_row, i_hv, i_hk, o_d, o_v, HK, HV, DK, DV, INTERPRET)
        b_decay = b_p - b_last
        next_row = (node_start + tl.load(p_path + tl.minimum(i_t + 2, last))).to(tl.int64)
        # slot 0 is the null block
        if (i_t + 1 == len0) & (dst0 > 0):
            tl.store(p_state + dst0 * stride_slot + o_state, round_to(b_s, DTYPE))
        if (i_t + 1 == len1) & (dst1 > 0):
            tl.store(p_state + dst1 * stride_slot + o_state, round_to(b_s, DTYPE))


def check_commit(layers: LayerTable, x, path, path_len, src_slot, dst_slot, dst_len, **per_node) -> None:
    """Shapes, dtypes and layouts shared by both commits; `per_node`: name -> (tensor, shape behind [L, capacity])."""
    num_layers, num_requests = layers.num_layers, path_len.shape[0]
    capacity = x.shape[1]
    for name, (tensor, shape) in per_node.items():
        dtype = layers.conv_dtype if name == "k" else torch.float32
        if tuple(tensor.shape) != (num_layers, capacity, *shape) or tensor.dtype != dtype or not tensor[0].is_contiguous():
            raise ValueError(f"{name}: expected {dtype} {(num_layers, capacity, *shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
    if tuple(x.shape) != (num_layers, capacity, layers.num_channels) or not x[0].is_contiguous() or x.dtype != layers.conv_dtype:
        wanted = f"{layers.conv_dtype} {(num_layers, capacity, layers.num_channels)}"
        raise ValueError(f"x: expected {wanted}, got {x.dtype} {tuple(x.shape)}")
    wanted = {"path": (path, (num_requests, path.shape[1])), "dst_len": (dst_len, (num_requests, 2))}
    wanted |= {"src_slot": (src_slot, (src_slot.shape[0], num_requests)), "dst_slot": (dst_slot, (src_slot.shape[0], num_requests, 2))}
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.stride(-1) != 1 or (name != "path" and not tensor.is_contiguous()):
            raise ValueError(f"{name}: expected contiguous {shape}, got {tuple(tensor.shape)} with strides {tensor.stride()}")
    if src_slot.shape[0] < layers.num_groups:
        raise ValueError(f"slots of {src_slot.shape[0]} groups, the layers use {layers.num_groups}")


def state_tile(head_v_dim: int) -> tuple[int, int]:
    """(values, warps) of one program of a commit. The interpreter pays per program."""
    return (head_v_dim, 4) if INTERPRET else (min(head_v_dim, TILE[0]), TILE[1])


def commit_factor(
    layers: LayerTable,
    p: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    u: torch.Tensor,
    x: torch.Tensor,
    forest: Forest,
    path: torch.Tensor,
    path_len: torch.Tensor,
    src_slot: torch.Tensor,
    dst_slot: torch.Tensor,
    dst_len: torch.Tensor,
) -> None:
    """Writes every layer's state and conv state after the accepted path, in place in the layers' caches.

    Args:
        layers: addresses of the caches.
        p: [L, capacity, HV] fp32, log. k: [L, capacity, HK, DK] activations and k_scale: [L, capacity, HK] fp32, as `tree_inputs` left
            them. u: [L, capacity, HV, DV] fp32. x: [L, capacity, C], conv inputs in the conv state's dtype. Any stride of the first
            dimension, contiguous behind it.
        forest: topology of the round (its first R = len(path_len) requests).
        path: [R, Dp] int32, node indices within the request, path[r, 0] = 0. path_len: [R] int32, 0: nothing is written for r.
        src_slot: [groups, R] int32, the slot with the state before node 0.
        dst_slot: [groups, R, 2] int32, dst_len: [R, 2] int32: the state after the first dst_len[r, j] path tokens (at most path_len)
            goes to dst_slot[g, r, j]. Length 0 or slot <= 0 (vLLM's null block): skipped. A destination may be the source.
    Products and sums are fp32. Two launches (states, conv states) for all layers, requests and heads. Raises ValueError on wrong
    shapes or dtypes.
    """
    heads, dim_v = layers.num_value_heads, layers.head_v_dim
    keys = layers.num_key_heads
    per_node = {"p": (p, (heads,)), "k": (k, (keys, layers.head_k_dim)), "k_scale": (k_scale, (keys,)), "u": (u, (heads, dim_v))}
    check_commit(layers, x, path, path_len, src_slot, dst_slot, dst_len, **per_node)
    tile, warps = state_tile(dim_v)
    grid = (heads * (dim_v // tile), path_len.shape[0], layers.num_layers)
    commit_factor_kernel[grid](
        layers.ssm_ptr,
        layers.layer_group,
        p,
        k,
        k_scale,
        u,
        forest.node_offset,
        path,
        path_len,
        src_slot,
        dst_slot,
        dst_len,
        p.stride(0),
        k.stride(0),
        k_scale.stride(0),
        u.stride(0),
        path.stride(0),
        *layers.ssm_stride,
        HK=layers.num_key_heads,
        HV=heads,
        DK=layers.head_k_dim,
        DV=dim_v,
        BV=tile,
        DTYPE=TL_DTYPE[layers.ssm_dtype],
        ALIGN=layers.align_bytes,
        INTERPRET=INTERPRET,
        OVERLAP=overlaps(x.device),
        num_warps=warps,
    )
    commit_conv(layers, x, forest.node_offset, path, path_len, src_slot, dst_slot, dst_len)
