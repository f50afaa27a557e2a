"""The scalar steps of the GDN input path, with the rounding points of vLLM's native decode.

Shared by everything that has to reproduce a decode step (tree verification, replay on commit).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..precision import INTERPRETED, to_bf16
from ..topology.forest import CONV_WIDTH as CONV_WIDTH

# epsilon of the L2 norm of q and k
NORM_EPS = 1e-6


def native_rounds_products(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether native decode rounds each product of the convolution to the activation dtype.

    vLLM's Triton kernel multiplies 16-bit activations by weights of the same dtype, which gives a 16-bit product, and
    adds it to an fp32 sum. Its C++ kernels for the CPU keep fp32 throughout.
    """
    return x.is_cuda and x.dtype == weight.dtype and x.dtype != torch.float32


@triton.jit
def round_to(b_x, dtype: tl.constexpr):
    """fp32 to `dtype`, to nearest even. Triton's interpreter truncates to bf16, and stores do, too: round before a store."""
    if INTERPRETED and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.uint32, bitcast=True)
        m_nan = (b_bits & 0x7FFFFFFF) > 0x7F800000
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        b_y = tl.where(m_nan, 0x7FC0, b_bits).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.bfloat16:
        b_y = to_bf16(b_x)
    else:
        b_y = b_x.to(dtype)
    return b_y


@triton.jit
def add_tap(b_acc, b_x, b_w, ROUND: tl.constexpr):
    """One tap of the convolution on an fp32 sum; exact fp32 product of 16-bit operands, rounded to their dtype if ROUND."""
    if ROUND and not INTERPRETED and b_x.dtype == tl.bfloat16:
        # two products an instruction (x w - 0 keeps the sign of zero), a bfloat16 is the upper half of an fp32
        ASM: tl.constexpr = """{
            .reg .b32 %w, %lo, %hi;
            mov.b32 %w, 0x80008000;
            fma.rn.bf16x2 %w, $2, $3, %w;
            shl.b32 %lo, %w, 16;
            and.b32 %hi, %w, 0xffff0000;
            add.rn.f32 $0, %lo, $4;
            add.rn.f32 $1, %hi, $5;
        }"""
        return tl.inline_asm_elementwise(ASM, "=f,=f,r,r,f,f", [b_x, b_w, b_acc], dtype=tl.float32, is_pure=True, pack=2)
    if ROUND and not INTERPRETED:
        # a product of two 16-bit blocks is rounded once, which is what is wanted
        b_product = (b_x * b_w).to(tl.float32)
    else:
        b_product = b_x.to(tl.float32) * b_w.to(tl.float32)
        if ROUND:
            b_product = round_to(b_product, b_x.dtype).to(tl.float32)
    return b_acc + b_product


@triton.jit
def silu(b_x):
    if INTERPRETED:
        b_e = tl.exp(-b_x)
    else:
        # tl.exp without its care for subnormal results, which vanish beside 1
        b_e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [-b_x * 1.4426950408889634], tl.float32, is_pure=True, pack=1)
    return b_x / (1 + b_e)


@triton.jit
def log_decay(b_a, b_neg_decay_rate, b_dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias), fp32; softplus is the identity above 20. `b_neg_decay_rate` is -exp(A_log)."""
    b_z = b_a.to(tl.float32) + b_dt_bias
    return b_neg_decay_rate * tl.where(b_z <= 20.0, tl.log(1.0 + tl.exp(b_z)), b_z)
