"""The commit by replay: the exact recurrence over the accepted path, with native decode's rounding points.

Needs only the conv inputs, g and beta of a node: k and v come again from x (convolution, SiLU, rounding to the activation dtype, L2
norm of k), so the committed state is the one that decoding the path token by token would have left. They come for the whole path at
once, into a small work area of the request; the recurrence then reads them token by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import node_inputs, pointwise
from ..conv.pointwise import CONV_WIDTH, NORM_EPS
from ..overlap import launch_options, let_next_start, overlaps, wait_for_previous
from ..precision import INTERPRET, device_function, to_fp32
from ..topology import Forest
from .conv import commit_conv, path_lengths
from .factor import check_commit, state_tile
from .layers import TL_DTYPE, LayerTable, load_pointer
from .work import ReplayWork

round_to, silu, add_tap = (device_function(f) for f in (pointwise.round_to, pointwise.silu, pointwise.add_tap))
load_input, load_taps = device_function(node_inputs.load_input), device_function(node_inputs.load_taps)


@device_function
def path_source(p_path, o_t, m_t, back):
    """[BN] conv input `back` tokens before path token o_t: a node of the request, or -1, -2, -3 for the conv state's columns."""
    b_node = tl.load(p_path + o_t - back, mask=m_t & (o_t >= back), other=0)
    return tl.where(o_t >= back, b_node, o_t - back)


@triton.jit
def replay_inputs_kernel(
    p_conv_table,
    p_weight_table,
    p_bias_table,
    p_layer_group,
    p_g,
    p_beta,
    p_x,
    p_node_offset,
    p_path,
    p_path_len,
    p_src_slot,
    p_dst_len,
    p_work_k,
    p_work_scale,
    p_work_v,
    p_work_g,
    p_work_beta,
    eps,
    MAX_R,
    P,
    stride_g_layer,
    stride_beta_layer,
    stride_x_layer,
    stride_path,
    stride_conv_slot,
    stride_conv_c,
    stride_conv_w,
    stride_weight,
    stride_tap,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CONV_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    BIAS_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DENSE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROUND: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        let_next_start()
    i_h, i_r, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, num_tokens = path_lengths(p_path_len, p_dst_len, i_r)
    if num_tokens <= 0:
        return
    layer = i_l.to(tl.int64)
    node_start = tl.load(p_node_offset + i_r).to(tl.int64)
    slot = tl.load(p_src_slot + tl.load(p_layer_group + i_l) * tl.num_programs(1) + i_r).to(tl.int64)
    # [1, BH] heads in the order k, v; [1, BH, BD] their channels
    o_h = (i_h * BH + tl.arange(0, BH))[None, :]
    o_d = tl.arange(0, BD)[None, None, :]
    m_k, m_v = o_h < HK, (o_h >= HK) & (o_h < HK + HV)
    if DK == DV:
        o_c = (HK + o_h)[:, :, None] * DK + o_d
    else:
        o_c = tl.where(o_h < HK, (HK + o_h) * DK, 2 * HK * DK + (o_h - HK) * DV)[:, :, None] + o_d
    m_c = (m_k[:, :, None] & (o_d < DK)) | (m_v[:, :, None] & (o_d < DV))
    p_conv = load_pointer(p_conv_table, i_l, CONV_DTYPE, ALIGN) + slot * stride_conv_slot
    p_weight = load_pointer(p_weight_table, i_l, WEIGHT_DTYPE, ALIGN)
    p_xr = p_x + layer * stride_x_layer + node_start * (2 * HK * DK + HV * DV)
    p_path_r = p_path + i_r * stride_path
    b_w0, b_w1, b_w2, b_w3 = load_taps(p_weight, o_c, m_c, stride_weight, stride_tap, BH, BD)
    b_bias = tl.full([1, BH, BD], 0.0, tl.float32)
    if HAS_BIAS:
        b_bias += tl.load(load_pointer(p_bias_table, i_l, BIAS_DTYPE, ALIGN) + o_c, mask=m_c, other=0.0).to(tl.float32)

    for i_t in range(0, num_tokens, BN):
        o_t = i_t + tl.arange(0, BN)
        m_t = o_t < num_tokens
        m_tc = m_t[:, None, None] & m_c
        C: tl.constexpr = 2 * HK * DK + HV * DV
        b_node = path_source(p_path_r, o_t, m_t, 0)
        # [BN, BH, BD] oldest to newest, as decode adds them
        b_acc = tl.full([BN, BH, BD], 0.0, tl.float32) + b_bias
        b_source = path_source(p_path_r, o_t, m_t, 3)
        b_x = load_input(p_xr, p_conv, b_source, 0, o_c, m_tc, C, 0, stride_conv_c, stride_conv_w, 4, DENSE)
        b_acc = add_tap(b_acc, b_x, b_w0, ROUND)
        b_source = path_source(p_path_r, o_t, m_t, 2)
        b_x = load_input(p_xr, p_conv, b_source, 0, o_c, m_tc, C, 0, stride_conv_c, stride_conv_w, 4, DENSE)
        b_acc = add_tap(b_acc, b_x, b_w1, ROUND)
        b_source = path_source(p_path_r, o_t, m_t, 1)
        b_x = load_input(p_xr, p_conv, b_source, 0, o_c, m_tc, C, 0, stride_conv_c, stride_conv_w, 4, DENSE)
        b_acc = add_tap(b_acc, b_x, b_w2, ROUND)
        b_x = load_input(p_xr, p_conv, b_node, 0, o_c, m_tc, C, 0, stride_conv_c, stride_conv_w, 4, DENSE)
        b_acc = add_tap(b_acc, b_x, b_w3, ROUND)
        b_y = round_to(silu(b_acc), CONV_DTYPE)
        b_f = tl.where(m_c, b_y.to(tl.float32), 0.0)
        b_scale = tl.rsqrt(tl.sum(b_f * b_f, axis=2) + eps)
        # [BN] rows of the work area
        o_w = (layer * MAX_R + i_r) * P + o_t
        m_th = m_t[:, None]
        tl.store(p_work_k + (o_w * HK)[:, None, None] * DK + (o_h[:, :, None] * DK + o_d), b_y, mask=m_tc & m_k[:, :, None])
        tl.store(p_work_v + (o_w * HV)[:, None, None] * DV + ((o_h - HK)[:, :, None] * DV + o_d), b_y, mask=m_tc & m_v[:, :, None])
        tl.store(p_work_scale + (o_w * HK)[:, None] + o_h, b_scale, mask=m_th & m_k)
        o_gate = ((node_start + b_node) * HV)[:, None] + (o_h - HK)
        o_work = (o_w * HV)[:, None] + (o_h - HK)
        tl.store(p_work_g + o_work, tl.load(p_g + layer * stride_g_layer + o_gate, mask=m_th & m_v), mask=m_th & m_v)
        tl.store(p_work_beta + o_work, tl.load(p_beta + layer * stride_beta_layer + o_gate, mask=m_th & m_v), mask=m_th & m_v)


@device_function
def load_quarters(p, o, stride, INTERPRET: tl.constexpr):
    """The four quarters, `stride` elements apart, of something as long as a key, fp32.

    A quarter's row of 32 keys lies in 8 lanes, so its sum takes 3 shuffles instead of the 5 of a whole row, for 4 rows at once.
    """
    b_0 = to_fp32(tl.load(p + o), INTERPRET)
    b_1 = to_fp32(tl.load(p + stride + o), INTERPRET)
    b_2 = to_fp32(tl.load(p + 2 * stride + o), INTERPRET)
    return b_0, b_1, b_2, to_fp32(tl.load(p + 3 * stride + o), INTERPRET)


@device_function
def load_gates(
    p_v, p_k_scale, p_g, p_beta, row, i_hk, i_hv, o_v, HK: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr, INTERPRET: tl.constexpr
):
    """A path token's value, norm factor of its key, decay and write gate, all linear fp32."""
    o_head = row * HV + i_hv
    b_v = to_fp32(tl.load(p_v + o_head * DV + o_v), INTERPRET)
    return b_v, tl.load(p_k_scale + row * HK + i_hk), tl.exp(tl.load(p_g + o_head)), tl.load(p_beta + o_head)


@device_function
def store_quarters(p, o, stride, b_0, b_1, b_2, b_3, DTYPE: tl.constexpr):
    tl.store(p + o, round_to(b_0, DTYPE))
    tl.store(p + stride + o, round_to(b_1, DTYPE))
    tl.store(p + 2 * stride + o, round_to(b_2, DTYPE))
    tl.store(p + 3 * stride + o, round_to(b_3, DTYPE))


@triton.jit
def commit_replay_kernel(
    p_ssm_table,
    p_layer_group,
    p_k,
    p_k_scale,
    p_v,
    p_g,
    p_beta,
    p_path_len,
    p_src_slot,
    p_dst_slot,
    p_dst_len,
    MAX_R,
    P,
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
    i_vh, i_r, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_v, i_hv = i_vh % (DV // BV), i_vh // (DV // BV)
    len0, len1, num_tokens = path_lengths(p_path_len, p_dst_len, i_r)
    if num_tokens <= 0:
        if OVERLAP:
            wait_for_previous()
        return
    i_slot = tl.load(p_layer_group + i_l) * tl.num_programs(1) + i_r
    src = tl.load(p_src_slot + i_slot).to(tl.int64)
    dst0 = tl.load(p_dst_slot + i_slot * 2).to(tl.int64)
    dst1 = tl.load(p_dst_slot + i_slot * 2 + 1).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    # [BV, DK / 4], the tile and order of native decode in four parts
    QUARTER: tl.constexpr = DK // 4
    o_k = tl.arange(0, QUARTER)
    o_state = o_v[:, None] * stride_v + o_k[None, :] * stride_k
    p_state = load_pointer(p_ssm_table, i_l, DTYPE, ALIGN) + i_hv.to(tl.int64) * stride_head
    b_s0, b_s1, b_s2, b_s3 = load_quarters(p_state + src * stride_slot, o_state, QUARTER * stride_k, INTERPRET)
    if OVERLAP:
        # the inputs of the path; the conv states, written next, have been read then
        wait_for_previous()
        let_next_start()
    i_hk = i_hv // (HV // HK)
    first = (i_l.to(tl.int64) * MAX_R + i_r) * P
    last = first + num_tokens - 1
    b_k0, b_k1, b_k2, b_k3 = load_quarters(p_k + (first * HK + i_hk) * DK, o_k, QUARTER, INTERPRET)
    b_v, scale, decay, beta = load_gates(p_v, p_k_scale, p_g, p_beta, first, i_hk, i_hv, o_v, HK, HV, DV, INTERPRET)

    for i_t in range(num_tokens):
        # [1, DK / 4] normalised as native decode does, before any product
        b_k0, b_k1, b_k2, b_k3 = (b_k0 * scale)[None, :], (b_k1 * scale)[None, :], (b_k2 * scale)[None, :], (b_k3 * scale)[None, :]
        b_s0, b_s1, b_s2, b_s3 = b_s0 * decay, b_s1 * decay, b_s2 * decay, b_s3 * decay
        b_u = ((b_v - tl.sum(b_s0 * b_k0 + b_s1 * b_k1 + b_s2 * b_k2 + b_s3 * b_k3, 1)) * beta)[:, None]
        b_s0, b_s1, b_s2, b_s3 = b_s0 + b_u * b_k0, b_s1 + b_u * b_k1, b_s2 + b_u * b_k2, b_s3 + b_u * b_k3
        # read ahead; behind the last token the last one again
        row = tl.minimum(first + i_t + 1, last)
        b_k0, b_k1, b_k2, b_k3 = load_quarters(p_k + (row * HK + i_hk) * DK, o_k, QUARTER, INTERPRET)
        b_v, scale, decay, beta = load_gates(p_v, p_k_scale, p_g, p_beta, row, i_hk, i_hv, o_v, HK, HV, DV, INTERPRET)
        # slot 0 is the null block
        if (i_t + 1 == len0) & (dst0 > 0):
            store_quarters(p_state + dst0 * stride_slot, o_state, QUARTER * stride_k, b_s0, b_s1, b_s2, b_s3, DTYPE)
        if (i_t + 1 == len1) & (dst1 > 0):
            store_quarters(p_state + dst1 * stride_slot, o_state, QUARTER * stride_k, b_s0, b_s1, b_s2, b_s3, DTYPE)


def commit_replay(
    layers: LayerTable,
    g: torch.Tensor,
    beta: torch.Tensor,
    x: torch.Tensor,
    forest: Forest,
    path: torch.Tensor,
    path_len: torch.Tensor,
    src_slot: torch.Tensor,
    dst_slot: torch.Tensor,
    dst_len: torch.Tensor,
    work: ReplayWork | None = None,
    round_products: bool | None = None,
) -> None:
    """Writes every layer's state and conv state after the accepted path, in place, by replaying the recurrence.

    Args:
        layers: addresses of the caches and of the conv weights (and biases), width 4.
        g, beta: [L, capacity, HV] fp32, a node's own log decay and its linear write gate. x: [L, capacity, C], conv inputs in the conv
            state's dtype. Any stride of the first dimension, contiguous behind it.
        forest, path, path_len, src_slot, dst_slot, dst_len: as `commit_factor`.
        work: for L layers and paths of Dp nodes, overwritten; fewer requests than R take more launches. None: allocated here, for R.
        round_products: round each product of the convolution to x.dtype; None: as native decode on this device does.

    Three launches for all layers and heads and the requests that `work` holds: inputs of the path, states, conv states (last, since the
    first reads them). Raises ValueError on wrong shapes or dtypes, or a table without weights.
    """
    heads, dim_v, keys, dim_k = layers.num_value_heads, layers.head_v_dim, layers.num_key_heads, layers.head_k_dim
    check_commit(layers, x, path, path_len, src_slot, dst_slot, dst_len, g=(g, (heads,)), beta=(beta, (heads,)))
    if layers.weight_ptr is None or layers.conv_width != CONV_WIDTH:
        raise ValueError(f"the replay needs conv weights of width {CONV_WIDTH}; the layer table has width {layers.conv_width}")
    num_requests, width = path_len.shape[0], path.shape[1]
    if num_requests == 0:
        return
    if work is None:
        work = ReplayWork.allocate(layers.num_layers, num_requests, width, keys, dim_k, heads, dim_v, x.dtype, x.device)
    work.check(layers.num_layers, width, (keys, dim_k), (heads, dim_v), x.dtype)
    if round_products is None:
        round_products = x.is_cuda and layers.weight_dtype == x.dtype and x.dtype != torch.float32
    at_once = work.k.shape[1]
    for first in range(0, num_requests, at_once):
        part = slice(first, first + at_once)
        slots = (t[:, part].contiguous() for t in (src_slot, dst_slot))
        _replay(layers, g, beta, x, forest.node_offset[first:], path[part], path_len[part], *slots, dst_len[part], work, round_products)


def _replay(layers, g, beta, x, node_offset, path, path_len, src_slot, dst_slot, dst_len, work: ReplayWork, round_products: bool) -> None:
    """`commit_replay` of requests that the work area holds together; arguments already checked."""
    heads, dim_v, keys, dim_k = layers.num_value_heads, layers.head_v_dim, layers.num_key_heads, layers.head_k_dim
    num_layers, num_requests, width = layers.num_layers, path_len.shape[0], path.shape[1]
    has_bias = layers.bias_ptr is not None
    overlap = overlaps(x.device)
    sizes = {"HK": keys, "HV": heads, "DK": dim_k, "DV": dim_v}
    tokens, group = _inputs_tile(width, keys + heads)
    replay_inputs_kernel[(triton.cdiv(keys + heads, group), num_requests, num_layers)](
        layers.conv_ptr,
        layers.weight_ptr,
        layers.bias_ptr if has_bias else layers.weight_ptr,
        layers.layer_group,
        g,
        beta,
        x,
        node_offset,
        path,
        path_len,
        src_slot,
        dst_len,
        work.k,
        work.k_scale,
        work.v,
        work.g,
        work.beta,
        NORM_EPS,
        work.k.shape[1],
        work.k.shape[2],
        g.stride(0),
        beta.stride(0),
        x.stride(0),
        path.stride(0),
        *layers.conv_stride,
        *layers.weight_stride,
        **sizes,
        CONV_DTYPE=TL_DTYPE[layers.conv_dtype],
        WEIGHT_DTYPE=TL_DTYPE[layers.weight_dtype],
        BIAS_DTYPE=TL_DTYPE[layers.bias_dtype if has_bias else layers.weight_dtype],
        HAS_BIAS=has_bias,
        DENSE=layers.conv_stride[1] == 1,
        ALIGN=layers.align_bytes,
        ROUND=round_products,
        BN=tokens,
        BH=group,
        BD=triton.next_power_of_2(max(dim_k, dim_v)),
        OVERLAP=overlap,
    )
    tile, warps = state_tile(dim_v)
    commit_replay_kernel[(heads * (dim_v // tile), num_requests, num_layers)](
        layers.ssm_ptr,
        layers.layer_group,
        work.k,
        work.k_scale,
        work.v,
        work.g,
        work.beta,
        path_len,
        src_slot,
        dst_slot,
        dst_len,
        work.k.shape[1],
        work.k.shape[2],
        *layers.ssm_stride,
        **sizes,
        BV=tile,
        DTYPE=TL_DTYPE[layers.ssm_dtype],
        ALIGN=layers.align_bytes,
        INTERPRET=INTERPRET,
        OVERLAP=overlap,
        num_warps=warps,
        **launch_options(overlap),
    )
    commit_conv(layers, x, node_offset, path, path_len, src_slot, dst_slot, dst_len)


def _inputs_tile(path_width: int, num_heads: int) -> tuple[int, int]:
    """Tokens and heads of one program; the interpreter pays per operation, not per element."""
    tokens = triton.next_power_of_2(path_width)
    return (min(32, tokens), min(16, triton.next_power_of_2(num_heads))) if INTERPRET else (min(8, tokens), 2)
