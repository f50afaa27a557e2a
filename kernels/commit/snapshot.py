"""The commit of a serial tree: the snapshot of the accepted path's last node becomes the state, all layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import pointwise
from ..overlap import let_next_start, overlaps
from ..precision import INTERPRET, device_function
from ..topology import Forest
from .conv import commit_conv
from .factor import check_commit
from .layers import TL_DTYPE, LayerTable, load_pointer

round_to = device_function(pointwise.round_to)


@triton.jit
def commit_snapshot_kernel(
    p_ssm_table,
    p_layer_group,
    p_snapshots,
    p_node_offset,
    p_path,
    p_path_len,
    p_dst_slot,
    p_dst_len,
    stride_snapshot_layer,
    stride_path,
    stride_slot,
    stride_head,
    stride_k,
    stride_v,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        let_next_start()
    i_vh, i_r, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_v, i_hv = i_vh % (DV // BV), i_vh // (DV // BV)
    path_len = tl.load(p_path_len + i_r)
    node_start = tl.load(p_node_offset + i_r)
    i_slot = tl.load(p_layer_group + i_l) * tl.num_programs(1) + i_r
    o_d = tl.arange(0, DK)
    o_v = i_v * BV + tl.arange(0, BV)
    p_state = load_pointer(p_ssm_table, i_l, DTYPE, ALIGN) + i_hv.to(tl.int64) * stride_head
    for i_dst in tl.static_range(2):
        dst = tl.load(p_dst_slot + i_slot * 2 + i_dst).to(tl.int64)
        num_tokens = tl.minimum(tl.load(p_dst_len + i_r * 2 + i_dst), path_len)
        # slot 0 is the null block
        if (num_tokens > 0) & (dst > 0):
            node = (node_start + tl.load(p_path + i_r * stride_path + num_tokens - 1)).to(tl.int64)
            # [BV, DK]
            p_from = p_snapshots + i_l.to(tl.int64) * stride_snapshot_layer + (node * HV + i_hv) * (DV * DK)
            b_s = tl.load(p_from + o_v[:, None] * DK + o_d[None, :])
            tl.store(p_state + dst * stride_slot + o_v[:, None] * stride_v + o_d[None, :] * stride_k, round_to(b_s, DTYPE))


def commit_snapshot(
    layers: LayerTable,
    snapshots: torch.Tensor,
    x: torch.Tensor,
    forest: Forest,
    path: torch.Tensor,
    path_len: torch.Tensor,
    src_slot: torch.Tensor,
    dst_slot: torch.Tensor,
    dst_len: torch.Tensor,
) -> None:
    """Writes every layer's state and conv state after the accepted path, in place.

    Args:
        snapshots: [L, capacity, HV, DV, DK] fp32, the state after every node, as `serial.serial_tree` leaves them; any stride of the first
            dimension, contiguous behind it.
        layers, x, forest, path, path_len, src_slot, dst_slot, dst_len: as `commit_factor`; src_slot is read for the conv states only.

    Two launches (states, conv states) for all layers, requests and heads. Raises ValueError on wrong shapes or dtypes.
    """
    heads, dim_k, dim_v = layers.num_value_heads, layers.head_k_dim, layers.head_v_dim
    check_commit(layers, x, path, path_len, src_slot, dst_slot, dst_len, snapshots=(snapshots, (heads, dim_v, dim_k)))
    tile = dim_v if INTERPRET else min(dim_v, 8)
    commit_snapshot_kernel[(heads * (dim_v // tile), path_len.shape[0], layers.num_layers)](
        layers.ssm_ptr,
        layers.layer_group,
        snapshots,
        forest.node_offset,
        path,
        path_len,
        dst_slot,
        dst_len,
        snapshots.stride(0),
        path.stride(0),
        *layers.ssm_stride,
        HV=heads,
        DK=dim_k,
        DV=dim_v,
        BV=tile,
        DTYPE=TL_DTYPE[layers.ssm_dtype],
        ALIGN=layers.align_bytes,
        OVERLAP=overlaps(x.device),
        num_warps=1,
    )
    commit_conv(layers, x, forest.node_offset, path, path_len, src_slot, dst_slot, dst_len)
