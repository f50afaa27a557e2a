"""Which dot precision is used where, and the conversions that the kernels share.

Dots whose error reaches the committed state (K S, U and the commit) lose by cancellation: `beta (v - readout)` with v within 1 % of
the readout is off by 1.8 % in tf32 and 14 % in bf16, but by 5e-6 in tf32x3. They stay at tf32x3 or better unless a caller asks for a
lower mode by its name. Under Triton's interpreter every mode is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

# Read once: `triton.jit` decides between compiling and interpreting when a kernel is defined.
INTERPRET = bool(triton.knobs.runtime.interpret)


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
    """Names of the dot precision of every product of the closed form; each is one of "ieee", "tf32x3", "tf32", "bf16"."""

    # K K^T and Q K^T of the factors
    gram: str
    # inversion of G's diagonal blocks, and G U of the solve
    solve: str
    # K S_pre
    key_state: str
    # Q S_pre
    query_state: str
    # C U
    readout: str
    # K^T U of the commit
    commit: str
    # masks (0 or 1 times 0 or 1, fp32 sums): exact in every precision, so the cheapest that takes fp32 operands
    mask: str


def _uniform(name: str) -> DotPrecision:
    return DotPrecision(gram=name, solve=name, key_state=name, query_state=name, readout=name, commit=name, mask="tf32")


DEFAULT = "tf32x3"
MODES = {name: _uniform(name) for name in ("ieee", "tf32x3", "tf32", "bf16")}
_INTERPRETED = DotPrecision("ieee", "ieee", "ieee", "ieee", "ieee", "ieee", "ieee")


def resolve(mode: str) -> DotPrecision:
    """The precision of every dot under `mode`; ValueError if there is no such mode."""
    if mode not in MODES:
        raise ValueError(f"unknown dot precision {mode!r}, known: {', '.join(MODES)}")
    return _INTERPRETED if INTERPRET else MODES[mode]


@device_function
def dot(b_a, b_b, PRECISION: tl.constexpr):
    """fp32 product of two fp32 blocks at a named precision."""
    b_c = tl.dot(b_a.to(tl.bfloat16), b_b.to(tl.bfloat16)) if PRECISION == "bf16" else tl.dot(b_a, b_b, input_precision=PRECISION)
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
def to_fp32(b_x, INTERPRET: tl.constexpr):
    """fp32 of a block. The interpreter's own cast from bf16 is correct but slow."""
    if INTERPRET and b_x.dtype == tl.bfloat16:
        b_y = (b_x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        b_y = b_x.to(tl.float32)
    return b_y
