"""The conv state after the accepted path: the last width - 1 inputs along it, older ones from the old state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..overlap import launch_options, overlaps, wait_for_previous
from ..precision import INTERPRET, device_function
from .layers import TL_DTYPE, LayerTable, load_pointer


@device_function
def path_lengths(p_path_len, p_dst_len, i_r):
    """Tokens of both destinations of a request, at most the path's; 0: nothing to write."""
    path_len = tl.load(p_path_len + i_r)
    len0 = tl.minimum(tl.load(p_dst_len + i_r * 2), path_len)
    len1 = tl.minimum(tl.load(p_dst_len + i_r * 2 + 1), path_len)
    return len0, len1, tl.maximum(tl.maximum(len0, len1), 0)


@device_function
def conv_window(p_conv, p_x, p_path, slot, num_tokens, node_start, o_c, o_w, m_w, m_c, stride_slot, stride_c, stride_w, C, COLUMNS):
    """[columns, channels] state after `num_tokens` path tokens."""
    # column w holds the input `num_tokens - COLUMNS + w` tokens into the path; negative: an old column
    o_j = num_tokens - COLUMNS + o_w
    m_new = m_w & (o_j >= 0)
    m_old = m_w & (o_j < 0)
    o_node = tl.load(p_path + o_j, mask=m_new, other=0)
    o_row = (node_start + o_node).to(tl.int64)
    b_new = tl.load(p_x + o_row[:, None] * C + o_c[None, :], mask=m_new[:, None] & m_c[None, :], other=0.0)
    p_old = p_conv + slot * stride_slot + (o_j + COLUMNS)[:, None] * stride_w + o_c[None, :] * stride_c
    b_old = tl.load(p_old, mask=m_old[:, None] & m_c[None, :], other=0.0)
    return tl.where(m_new[:, None], b_new, b_old)


@triton.jit
def commit_conv_kernel(
    p_conv_table,
    p_layer_group,
    p_x,
    p_node_offset,
    p_path,
    p_path_len,
    p_src_slot,
    p_dst_slot,
    p_dst_len,
    stride_x_layer,
    stride_path,
    stride_slot,
    stride_c,
    stride_w,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_PAD: tl.constexpr,
    BC: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_c, i_r, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    len0, len1, num_tokens = path_lengths(p_path_len, p_dst_len, i_r)
    if num_tokens <= 0:
        if OVERLAP:
            wait_for_previous()
        return
    node_start = tl.load(p_node_offset + i_r)
    i_slot = tl.load(p_layer_group + i_l) * tl.num_programs(1) + i_r
    src = tl.load(p_src_slot + i_slot).to(tl.int64)
    dst0 = tl.load(p_dst_slot + i_slot * 2).to(tl.int64)
    dst1 = tl.load(p_dst_slot + i_slot * 2 + 1).to(tl.int64)
    p_conv = load_pointer(p_conv_table, i_l, DTYPE, ALIGN)
    p_xl = p_x + i_l.to(tl.int64) * stride_x_layer
    p_path_r = p_path + i_r * stride_path
    o_c = i_c * BC + tl.arange(0, BC)
    o_w = tl.arange(0, COLUMNS_PAD)
    m_c = o_c < C
    # Null slot 0 and length 0 are never written. Both windows are read before either is written: a destination may be the source.
    m_0 = o_w < tl.where((dst0 > 0) & (len0 > 0), COLUMNS, 0)
    m_1 = o_w < tl.where((dst1 > 0) & (len1 > 0), COLUMNS, 0)
    b_0 = conv_window(p_conv, p_xl, p_path_r, src, len0, node_start, o_c, o_w, m_0, m_c, stride_slot, stride_c, stride_w, C, COLUMNS)
    b_1 = b_0
    if (dst1 > 0) & (len1 > 0):
        b_1 = conv_window(p_conv, p_xl, p_path_r, src, len1, node_start, o_c, o_w, m_1, m_c, stride_slot, stride_c, stride_w, C, COLUMNS)
    tl.debug_barrier()
    o_out = o_w[:, None] * stride_w + o_c[None, :] * stride_c
    tl.store(p_conv + dst0 * stride_slot + o_out, b_0, mask=m_0[:, None] & m_c[None, :])
    tl.store(p_conv + dst1 * stride_slot + o_out, b_1, mask=m_1[:, None] & m_c[None, :])
    if OVERLAP:
        # nothing here needs the states; but whoever waits for this kernel means the whole commit
        wait_for_previous()


def commit_conv(
    layers: LayerTable,
    x: torch.Tensor,
    node_offset: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
    src_slot: torch.Tensor,
    dst_slot: torch.Tensor,
    dst_len: torch.Tensor,
) -> None:
    """Launches the conv half of a commit; arguments as `commit_factor`, already checked by the caller.

    It runs beside the launch before it, which must be the states' kernel."""
    overlap = overlaps(x.device)
    tile = min(triton.next_power_of_2(layers.num_channels), 8192 if INTERPRET else 512)
    grid = (triton.cdiv(layers.num_channels, tile), path_len.shape[0], layers.num_layers)
    commit_conv_kernel[grid](
        layers.conv_ptr,
        layers.layer_group,
        x,
        node_offset,
        path,
        path_len,
        src_slot,
        dst_slot,
        dst_len,
        x.stride(0),
        path.stride(0),
        *layers.conv_stride,
        C=layers.num_channels,
        COLUMNS=layers.conv_width - 1,
        COLUMNS_PAD=triton.next_power_of_2(layers.conv_width - 1),
        BC=tile,
        DTYPE=TL_DTYPE[layers.conv_dtype],
        ALIGN=layers.align_bytes,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
