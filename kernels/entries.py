"""A column of the vocabulary and its value as one 64-bit entry: the value's order in the upper half, the column's complement in the lower.

Entries are ordered by the value and, among equals, by the lower column. No two columns have equal ones, so every order of merging keeps
the same k best.
"""

from __future__ import annotations

import triton.language as tl

from .precision import device_function

# below every entry, and above
NOTHING = tl.constexpr(-(2**63))
EVERYTHING = tl.constexpr(2**63 - 1)
MAX_COLUMN = tl.constexpr(2**31 - 1)


@device_function
def order_of(b_x):
    """int32 in the order of fp32 values without NaN; both zeros are 0."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & MAX_COLUMN)


@device_function
def entry_of(b_x, o_c):
    """The entries of fp32 values without NaN in int32 columns."""
    return (order_of(b_x).to(tl.int64) << 32) | (o_c ^ MAX_COLUMN).to(tl.int64)


@device_function
def order_in(b_entry):
    """`order_of` the value of an entry."""
    return (b_entry >> 32).to(tl.int32)


@device_function
def value_in(b_entry):
    """The fp32 value of an entry."""
    b_order = order_in(b_entry)
    return (b_order ^ ((b_order >> 31) & MAX_COLUMN)).to(tl.float32, bitcast=True)


@device_function
def column_in(b_entry):
    """The column of an entry, int64."""
    return (b_entry & MAX_COLUMN) ^ MAX_COLUMN
