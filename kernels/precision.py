"""Which dot precision is used where, and the conversions that the kernels share.

Products whose error reaches the committed state (K S and Z R) lose by cancellation: `beta (v - readout)` with v
within 1 % of the readout is off by 1.8 % in tf32 and 14 % in bf16, but by 5e-6 in tf32x3. They stay at that or better unless a caller
asks for a lower mode by its name. q and k are 16-bit activations, exact on tensor cores; only their partner has to be split: a sum of
three bfloat16 terms holds an fp32 value. Under Triton's interpreter every mode is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

# Read once: `triton.jit` decides between compiling and interpreting when a kernel is defined.
INTERPRET = bool(triton.knobs.runtime.interpret)
INTERPRETED = tl.constexpr(INTERPRET)


def device_function(function):
    """`triton.jit` for a function that kernels call; under the interpreter the plain function, or a jitted one made plain.

    The interpreter patches the whole language module again at every call of a jitted function (0.1 to 0.3 ms, more than ten
    operations), so there kernels call plain functions; for the same reason they prefer `tl.full` to `tl.zeros`.
    """
    if INTERPRET:
        return getattr(function, "fn", function)
    return function if hasattr(function, "fn") else triton.jit(function)


@dataclass(frozen=True)
class DotPrecision:
    """Names of the precision of every product of the closed form that is not exact.

    "ieee", "tf32x3", "tf32" and "bf16" are Triton's own; "bf16x2" and "bf16x3" are sums of two and three bfloat16 products: beside an
    activation, which is exact, the fp32 operand in two or three terms (16 and 24 bits), otherwise both in two terms without the last one.
    """

    # K S_pre and Q S_pre, exact left operand
    state: str
    # U = Z R and the readout Y R through the corrections
    factors: str


DEFAULT = "fp32"
# from exact to cheap
MODES = {
    "ieee": DotPrecision("ieee", "ieee"),
    "tf32x3": DotPrecision("tf32x3", "tf32x3"),
    # as exact as fp32, in the cheapest products that are
    "fp32": DotPrecision("bf16x3", "tf32x3"),
    "bf16x3": DotPrecision("bf16x3", "bf16x3"),
    # 16 bits of the state
    "bf16x2": DotPrecision("bf16x2", "bf16x3"),
    "tf32": DotPrecision("tf32", "tf32"),
    "bf16": DotPrecision("bf16", "bf16"),
}


def resolve(mode: str, dtype: torch.dtype) -> DotPrecision:
    """The precision of every product under `mode` for q and k of this dtype; ValueError if there is no such mode.

    Left operands that bfloat16 cannot hold exactly (fp16, fp32) take tf32x3 in place of the bfloat16 sums.
    """
    if mode not in MODES:
        raise ValueError(f"unknown dot precision {mode!r}, known: {', '.join(MODES)}")
    if INTERPRET:
        return MODES["ieee"]
    dots = MODES[mode]
    inexact = dtype != torch.bfloat16 and dots.state in ("bf16x2", "bf16x3")
    return replace(dots, state="tf32x3") if inexact else dots


@device_function
def to_bf16(b_x):
    """fp32 to bfloat16. Compiled: to nearest even, two values an instruction (Triton 3.6 emits one at an eighth of the rate on Hopper)."""
    if INTERPRETED:
        b_y = b_x.to(tl.bfloat16)
    else:
        b_y = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_x], dtype=tl.bfloat16, is_pure=True, pack=2)
    return b_y


@device_function
def split_bf16(b_x):
    """Three bfloat16 blocks whose sum is an fp32 block (to 24 bits)."""
    b_1 = to_bf16(b_x)
    b_rest = b_x - b_1.to(tl.float32)
    b_2 = to_bf16(b_rest)
    return b_1, b_2, to_bf16(b_rest - b_2.to(tl.float32))


@device_function
def dot(b_a, b_b, PRECISION: tl.constexpr):
    """fp32 product of two fp32 blocks at a named precision."""
    if PRECISION == "bf16x3":
        b_a1 = to_bf16(b_a)
        b_a2 = to_bf16(b_a - b_a1.to(tl.float32))
        b_b1 = to_bf16(b_b)
        b_b2 = to_bf16(b_b - b_b1.to(tl.float32))
        b_c = tl.dot(b_a1, b_b2)
        b_c = tl.dot(b_a2, b_b1, acc=b_c)
        b_c = tl.dot(b_a1, b_b1, acc=b_c)
    elif PRECISION == "bf16":
        b_c = tl.dot(to_bf16(b_a), to_bf16(b_b))
    else:
        b_c = tl.dot(b_a, b_b, input_precision=PRECISION)
    return b_c


@device_function
def ordered_dot(b_s, b_x, b_c, STATE_LEFT: tl.constexpr, PRECISION: tl.constexpr):
    b_left, b_right = (b_s, b_x) if STATE_LEFT else (b_x, b_s)
    return tl.dot(b_left, b_right, acc=b_c, input_precision=PRECISION)


@device_function
def state_dot(b_s, b_x, b_c, STATE_LEFT: tl.constexpr, PRECISION: tl.constexpr):
    """b_c plus the fp32 product of an fp32 block of the state and a block of activations, in this order or the other."""
    if PRECISION == "bf16x3" or PRECISION == "bf16x2" or PRECISION == "bf16":
        # terms that are not used cost nothing
        b_1, b_2, b_3 = split_bf16(b_s)
        if PRECISION == "bf16x3":
            b_c = ordered_dot(b_3, b_x, b_c, STATE_LEFT, "ieee")
        if PRECISION != "bf16":
            b_c = ordered_dot(b_2, b_x, b_c, STATE_LEFT, "ieee")
        b_c = ordered_dot(b_1, b_x.to(tl.bfloat16), b_c, STATE_LEFT, "ieee")
    else:
        b_c = ordered_dot(b_s, to_fp32(b_x, INTERPRETED), b_c, STATE_LEFT, PRECISION)
    return b_c


@device_function
def exp_non_positive(b_x):
    """exp(min(x, 0)) that keeps a NaN (a bare minimum returns 0 for it and hides it)."""
    return tl.exp(tl.where(b_x > 0, 0.0, b_x))


@device_function
def is_finite(b_x):
    """True where x is neither NaN nor infinite."""
    return tl.abs(b_x) < float("inf")


@device_function
def finite_or_zero(b_x):
    """x, or 0 where it is NaN or infinite."""
    return tl.where(tl.abs(b_x) < float("inf"), b_x, 0.0)


@device_function
def to_fp32(b_x, INTERPRET: tl.constexpr):
    """fp32 of a block. The interpreter's own cast from bf16 is correct but slow."""
    if INTERPRET and b_x.dtype == tl.bfloat16:
        b_y = (b_x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        b_y = b_x.to(tl.float32)
    return b_y
