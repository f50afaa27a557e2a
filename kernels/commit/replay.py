"""The commit by replay: the exact recurrence over the accepted path, with native decode's rounding points.

Needs only the conv inputs, g and beta of a node: k and v come again from x (convolution, SiLU, rounding to the activation dtype, L2
norm of k), so the committed state is the one that decoding the path token by token would have left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..conv import pointwise
from ..conv.pointwise import CONV_WIDTH, NORM_EPS
from ..precision import INTERPRET, device_function, to_fp32
from ..topology import Forest
from .conv import commit_conv
from .factor import check_commit
from .layers import TL_DTYPE, LayerTable, load_pointer

round_to, silu = device_function(pointwise.round_to), device_function(pointwise.silu)


@device_function
def load_weights(p_weight, o_c, stride_w, stride_tap, INTERPRET: tl.constexpr):
    """The four taps of channels o_c, oldest first, as fp32."""
    p_w = p_weight + o_c * stride_w
    b_w0 = to_fp32(tl.load(p_w), INTERPRET)
    b_w1 = to_fp32(tl.load(p_w + stride_tap), INTERPRET)
    b_w2 = to_fp32(tl.load(p_w + 2 * stride_tap), INTERPRET)
    b_w3 = to_fp32(tl.load(p_w + 3 * stride_tap), INTERPRET)
    return b_w0, b_w1, b_w2, b_w3


@device_function
def add_tap(b_acc, b_x, b_w, DTYPE: tl.constexpr, ROUND: tl.constexpr, INTERPRET: tl.constexpr):
    """One tap on an fp32 sum; the product rounded to DTYPE if ROUND, as a product of two blocks of that dtype is."""
    b_y = b_x * b_w
    if ROUND:
        b_y = to_fp32(round_to(b_y, DTYPE), INTERPRET)
    return b_acc + b_y


@device_function
def conv_step(b_bias, b_x0, b_x1, b_x2, b_x3, b_w0, b_w1, b_w2, b_w3, DTYPE: tl.constexpr, ROUND: tl.constexpr, INTERPRET: tl.constexpr):
    """Convolution output of one token, rounded to the activation dtype DTYPE; all blocks fp32, x0 the oldest input."""
    b_acc = add_tap(b_bias, b_x0, b_w0, DTYPE, ROUND, INTERPRET)
    b_acc = add_tap(b_acc, b_x1, b_w1, DTYPE, ROUND, INTERPRET)
    b_acc = add_tap(b_acc, b_x2, b_w2, DTYPE, ROUND, INTERPRET)
    b_acc = add_tap(b_acc, b_x3, b_w3, DTYPE, ROUND, INTERPRET)
    return to_fp32(round_to(silu(b_acc), DTYPE), INTERPRET)


@triton.jit
def commit_replay_kernel(
    p_ssm_table,
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
    p_dst_slot,
    p_dst_len,
    eps,
    stride_g_layer,
    stride_beta_layer,
    stride_x_layer,
    stride_path,
    stride_slot,
    stride_head,
    stride_k,
    stride_v,
    stride_conv_slot,
    stride_conv_c,
    stride_conv_w,
    stride_weight,
    stride_tap,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    DTYPE: tl.constexpr,
    CONV_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    BIAS_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROUND: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    i_vh, i_r, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_v, i_hv = i_vh % (DV // BV), i_vh // (DV // BV)
    path_len = tl.load(p_path_len + i_r)
    i_slot = tl.load(p_layer_group + i_l) * tl.num_programs(1) + i_r
    dst0 = tl.load(p_dst_slot + i_slot * 2).to(tl.int64)
    dst1 = tl.load(p_dst_slot + i_slot * 2 + 1).to(tl.int64)
    len0 = tl.minimum(tl.load(p_dst_len + i_r * 2), path_len)
    len1 = tl.minimum(tl.load(p_dst_len + i_r * 2 + 1), path_len)
    num_tokens = tl.maximum(tl.maximum(len0, len1), 0)
    if num_tokens <= 0:
        return
    src = tl.load(p_src_slot + i_slot).to(tl.int64)
    layer = i_l.to(tl.int64)
    node_start = tl.load(p_node_offset + i_r)
    o_d = tl.arange(0, DK)
    o_v = i_v * BV + tl.arange(0, BV)
    # channels of this head's k and of this tile's v
    o_ck = (HK + i_hv // (HV // HK)) * DK + o_d
    o_cv = 2 * HK * DK + i_hv * DV + o_v
    p_weight = load_pointer(p_weight_table, i_l, WEIGHT_DTYPE, ALIGN)
    b_wk0, b_wk1, b_wk2, b_wk3 = load_weights(p_weight, o_ck, stride_weight, stride_tap, INTERPRET)
    b_wv0, b_wv1, b_wv2, b_wv3 = load_weights(p_weight, o_cv, stride_weight, stride_tap, INTERPRET)
    b_bias_k = tl.full([DK], 0.0, tl.float32)
    b_bias_v = tl.full([BV], 0.0, tl.float32)
    if HAS_BIAS:
        p_bias = load_pointer(p_bias_table, i_l, BIAS_DTYPE, ALIGN)
        b_bias_k += tl.load(p_bias + o_ck).to(tl.float32)
        b_bias_v += tl.load(p_bias + o_cv).to(tl.float32)
    p_conv = load_pointer(p_conv_table, i_l, CONV_DTYPE, ALIGN) + src * stride_conv_slot
    b_k0 = to_fp32(tl.load(p_conv + o_ck * stride_conv_c), INTERPRET)
    b_k1 = to_fp32(tl.load(p_conv + o_ck * stride_conv_c + stride_conv_w), INTERPRET)
    b_k2 = to_fp32(tl.load(p_conv + o_ck * stride_conv_c + 2 * stride_conv_w), INTERPRET)
    b_v0 = to_fp32(tl.load(p_conv + o_cv * stride_conv_c), INTERPRET)
    b_v1 = to_fp32(tl.load(p_conv + o_cv * stride_conv_c + stride_conv_w), INTERPRET)
    b_v2 = to_fp32(tl.load(p_conv + o_cv * stride_conv_c + 2 * stride_conv_w), INTERPRET)
    # [BV, DK], the tile and order of native decode
    p_state = load_pointer(p_ssm_table, i_l, DTYPE, ALIGN) + i_hv.to(tl.int64) * stride_head
    o_state = o_v[:, None] * stride_v + o_d[None, :] * stride_k
    b_s = to_fp32(tl.load(p_state + src * stride_slot + o_state), INTERPRET)

    for i_t in range(num_tokens):
        row = (node_start + tl.load(p_path + i_r * stride_path + i_t)).to(tl.int64)
        p_row = p_x + layer * stride_x_layer + row * (2 * HK * DK + HV * DV)
        b_k3 = to_fp32(tl.load(p_row + o_ck), INTERPRET)
        b_v3 = to_fp32(tl.load(p_row + o_cv), INTERPRET)
        b_k = conv_step(b_bias_k, b_k0, b_k1, b_k2, b_k3, b_wk0, b_wk1, b_wk2, b_wk3, CONV_DTYPE, ROUND, INTERPRET)
        b_v = conv_step(b_bias_v, b_v0, b_v1, b_v2, b_v3, b_wv0, b_wv1, b_wv2, b_wv3, CONV_DTYPE, ROUND, INTERPRET)
        b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k) + eps)
        b_s = b_s * tl.exp(tl.load(p_g + layer * stride_g_layer + row * HV + i_hv))
        b_v = (b_v - tl.sum(b_s * b_k[None, :], 1)) * tl.load(p_beta + layer * stride_beta_layer + row * HV + i_hv)
        b_s = b_s + b_v[:, None] * b_k[None, :]
        b_k0, b_k1, b_k2 = b_k1, b_k2, b_k3
        b_v0, b_v1, b_v2 = b_v1, b_v2, b_v3
        # slot 0 is the null block
        if (i_t + 1 == len0) & (dst0 > 0):
            tl.store(p_state + dst0 * stride_slot + o_state, round_to(b_s, DTYPE))
        if (i_t + 1 == len1) & (dst1 > 0):
            tl.store(p_state + dst1 * stride_slot + o_state, round_to(b_s, DTYPE))


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
    round_products: bool | None = None,
) -> None:
    """Writes every layer's state and conv state after the accepted path, in place, by replaying the recurrence.

    Args:
        layers: addresses of the caches and of the conv weights (and biases), width 4.
        g, beta: [L, capacity, HV] fp32, a node's own log decay and its linear write gate. x: [L, capacity, C], conv inputs in the conv
            state's dtype. Any stride of the first dimension, contiguous behind it.
        forest, path, path_len, src_slot, dst_slot, dst_len: as `commit_factor`.
        round_products: round each product of the convolution to x.dtype; None: as native decode on this device does.

    Two launches for all layers, requests and heads: the states first, since they read the old conv state. Raises ValueError on wrong
    shapes or dtypes, or a table without weights.
    """
    heads, dim_v = layers.num_value_heads, layers.head_v_dim
    check_commit(layers, x, path, path_len, src_slot, dst_slot, dst_len, g=(g, (heads,)), beta=(beta, (heads,)))
    if layers.weight_ptr is None or layers.conv_width != CONV_WIDTH:
        raise ValueError(f"the replay needs conv weights of width {CONV_WIDTH}; the layer table has width {layers.conv_width}")
    if round_products is None:
        round_products = x.is_cuda and layers.weight_dtype == x.dtype and x.dtype != torch.float32
    tile = dim_v if INTERPRET else min(dim_v, 32)
    grid = (heads * (dim_v // tile), path_len.shape[0], layers.num_layers)
    has_bias = layers.bias_ptr is not None
    commit_replay_kernel[grid](
        layers.ssm_ptr,
        layers.conv_ptr,
        layers.weight_ptr,
        layers.bias_ptr if has_bias else layers.weight_ptr,
        layers.layer_group,
        g,
        beta,
        x,
        forest.node_offset,
        path,
        path_len,
        src_slot,
        dst_slot,
        dst_len,
        NORM_EPS,
        g.stride(0),
        beta.stride(0),
        x.stride(0),
        path.stride(0),
        *layers.ssm_stride,
        *layers.conv_stride,
        *layers.weight_stride,
        HK=layers.num_key_heads,
        HV=heads,
        DK=layers.head_k_dim,
        DV=dim_v,
        BV=tile,
        DTYPE=TL_DTYPE[layers.ssm_dtype],
        CONV_DTYPE=TL_DTYPE[layers.conv_dtype],
        WEIGHT_DTYPE=TL_DTYPE[layers.weight_dtype],
        BIAS_DTYPE=TL_DTYPE[layers.bias_dtype if has_bias else layers.weight_dtype],
        HAS_BIAS=has_bias,
        ALIGN=layers.align_bytes,
        ROUND=round_products,
        INTERPRET=INTERPRET,
        num_warps=4,
        num_stages=3,
    )
    commit_conv(layers, x, forest.node_offset, path, path_len, src_slot, dst_slot, dst_len)
