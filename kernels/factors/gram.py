"""Products of activations, the start of both factors."""

from __future__ import annotations

import triton.language as tl

from ..precision import INTERPRETED, device_function, to_fp32


@device_function
def activation_dot(b_a, b_b):
    """fp32 product of two blocks of activations: exact products and fp32 sums if they have 16 bits. Also a batch of products."""
    if INTERPRETED:
        b_c = tl.dot(to_fp32(b_a, True), to_fp32(b_b, True), input_precision="ieee")
    elif b_a.dtype == tl.float32:
        b_c = tl.dot(b_a, b_b, input_precision="tf32x3")
    else:
        b_c = tl.dot(b_a, b_b)
    return b_c
