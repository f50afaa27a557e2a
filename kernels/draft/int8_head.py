"""An LM head's rows in int8, for drafts alone: half of bfloat16's bytes, and with few rows of activations bytes are all that it costs.

A row keeps one scale, its largest magnitude / 127. Activations are two int8 terms with a scale a row, 15 bits of its largest: they add no
error to speak of, and the products are sums of integers, the same in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..precision import INTERPRET, device_function, to_fp32

LARGEST = tl.constexpr(127.0)
# of a unit of the first term; its rounding error is at most 1/2
SECOND = tl.constexpr(2 * 127.0)

largest = device_function(tl.max)


@device_function
def nearest(b_x):
    """The nearest integer, within int8's symmetric range."""
    return tl.minimum(tl.maximum(tl.floor(b_x + 0.5), -LARGEST), LARGEST)


@device_function
def scaled_row(p_row, o_h, m_h, INTERPRET: tl.constexpr):
    """A row in units of its scale, in -127..127, and the scale; zeros have the scale 0."""
    b_x = to_fp32(tl.load(p_row + o_h, mask=m_h, other=0.0), INTERPRET)
    scale = largest(tl.abs(b_x)) / LARGEST
    return b_x * tl.where(scale > 0, 1.0 / scale, 0.0), scale


@triton.jit
def quantize_rows_kernel(p_head, p_ids, p_weight, p_scale, stride_head, H: tl.constexpr, BH: tl.constexpr, INTERPRET: tl.constexpr):
    # one program a row
    i_n = tl.program_id(0).to(tl.int64)
    # [BH] the row
    o_h = tl.arange(0, BH)
    b_x, scale = scaled_row(p_head + tl.load(p_ids + i_n) * stride_head, o_h, o_h < H, INTERPRET)
    tl.store(p_weight + i_n * H + o_h, nearest(b_x).to(tl.int8), mask=o_h < H)
    tl.store(p_scale + i_n, scale)


@triton.jit(do_not_specialize=["num_rows"])
def split_rows_kernel(p_hidden, p_terms, p_scale, num_rows, stride_hidden, H: tl.constexpr, BH: tl.constexpr, INTERPRET: tl.constexpr):
    # one program a row
    i_r = tl.program_id(0).to(tl.int64)
    # [BH] the row
    o_h = tl.arange(0, BH)
    b_x, scale = scaled_row(p_hidden + i_r * stride_hidden, o_h, o_h < H, INTERPRET)
    b_first = nearest(b_x)
    tl.store(p_terms + i_r * H + o_h, b_first.to(tl.int8), mask=o_h < H)
    tl.store(p_terms + (num_rows + i_r) * H + o_h, nearest((b_x - b_first) * SECOND).to(tl.int8), mask=o_h < H)
    tl.store(p_scale + i_r, scale)


# the number of rows follows the batch
@triton.jit(do_not_specialize=["num_rows"])
def int8_logits_kernel(
    p_terms,
    p_row_scale,
    p_weight,
    p_scale,
    p_logits,
    num_rows,
    num_columns,
    H: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
):
    # programs beside each other read the same weights
    i_r, i_n = tl.program_id(0), tl.program_id(1)
    # [BN] rows of the head, [BR] of the activations, [BH] a part of both
    o_n, o_r, o_h = i_n * BN + tl.arange(0, BN), i_r * BR + tl.arange(0, BR), tl.arange(0, BH)
    m_n, m_r = o_n < num_columns, o_r < num_rows
    p_w = p_weight + o_n.to(tl.int64)[:, None] * H + o_h[None, :]
    p_first = p_terms + o_r.to(tl.int64)[None, :] * H + o_h[:, None]
    p_second = p_first + num_rows.to(tl.int64) * H
    # [BN, BR] sums of products of the first and of the second term
    b_first, b_second = tl.full([BN, BR], 0, tl.int32), tl.full([BN, BR], 0, tl.int32)
    for start in range(0, H, BH):
        m_w, m_x = m_n[:, None], m_r[None, :]
        if H % BH:
            m_h = start + o_h < H
            m_w, m_x = m_w & m_h[None, :], m_x & m_h[:, None]
        b_w = tl.load(p_w + start, mask=m_w, other=0)
        b_first = tl.dot(b_w, tl.load(p_first + start, mask=m_x, other=0), acc=b_first, out_dtype=tl.int32)
        b_second = tl.dot(b_w, tl.load(p_second + start, mask=m_x, other=0), acc=b_second, out_dtype=tl.int32)
    b_scale = tl.load(p_scale + o_n, mask=m_n, other=0.0)[:, None] * tl.load(p_row_scale + o_r, mask=m_r, other=0.0)[None, :]
    b_y = (b_first.to(tl.float32) + b_second.to(tl.float32) / SECOND) * b_scale
    p_y = p_logits + o_r.to(tl.int64)[None, :] * num_columns + o_n[:, None]
    tl.store(p_y, b_y.to(p_logits.dtype.element_ty), mask=m_n[:, None] & m_r[None, :])


def quantize_rows(head: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Rows `ids` of the head, rounded: head[ids[n]] ~ weight[n] * scale[n]. In place, no host sync.

    head    [V, H] bfloat16, float16 or float32, contiguous in H
    ids     [N] int64
    weight  [N, H] int8
    scale   [N] fp32, 0 for a row of zeros
    """
    num_rows, width = weight.shape
    if num_rows:
        block = triton.next_power_of_2(width)
        quantize_rows_kernel[(num_rows,)](head, ids, weight, scale, head.stride(0), H=width, BH=block, INTERPRET=INTERPRET)


def int8_logits(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """hidden [rows, H], contiguous in H -> [rows, N] of its dtype: products with `weight * scale`, as `quantize_rows` makes them.

    Two launches, no host sync. Raises ValueError on wrong shapes or strides.
    """
    (num_rows, width), (num_columns, other), device = hidden.shape, weight.shape, hidden.device
    if width != other or hidden.stride(1) != 1 or not weight.is_contiguous() or scale.shape != (num_columns,):
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and scale {tuple(scale.shape)} do not fit")
    logits = torch.empty(num_rows, num_columns, dtype=hidden.dtype, device=device)
    terms = torch.empty(2, num_rows, width, dtype=torch.int8, device=device)
    row_scale = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows:
        block = triton.next_power_of_2(width)
        split_rows_kernel[(num_rows,)](hidden, terms, row_scale, num_rows, hidden.stride(0), H=width, BH=block, INTERPRET=INTERPRET)
        rows, columns, depth = tile_of(num_rows, num_columns, width)
        grid = triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns)
        sizes = {"H": width, "BR": rows, "BN": columns, "BH": depth}
        int8_logits_kernel[grid](terms, row_scale, weight, scale, logits, num_rows, num_columns, **sizes, num_warps=4, num_stages=4)
    return logits


def tile_of(num_rows: int, num_columns: int, width: int) -> tuple[int, int, int]:
    """Rows of the activations, rows of the head and depth of a step, powers of two. A step of 16 KiB of weights, four in flight."""
    rows = min(max(triton.next_power_of_2(num_rows), 16), 64)
    if INTERPRET:  # the interpreter pays per operation
        return rows, min(triton.next_power_of_2(num_columns), 4096), triton.next_power_of_2(width)
    return rows, 128, min(max(triton.next_power_of_2(width), 32), 128)
