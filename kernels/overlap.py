"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs, and waits where it needs its results.

Each of the three kernels of a verify round may start early: it reads the topology, and the solve even makes its products with the state,
while its predecessor works. `tree_inputs` lets its successor start at once, `tree_factors` only after it has waited for `tree_inputs`
itself; so what starts after `tree_factors` finds the inputs of the round complete. Every kernel waits before it ends, so the next ordinary
launch waits for all of them. Needs compute capability 9; elsewhere the flag does nothing.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl

from .precision import INTERPRET, device_function


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can start before their predecessor has ended."""
    return not INTERPRET and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(overlap: bool) -> dict[str, bool]:
    """Launch options of a kernel compiled with OVERLAP = `overlap`."""
    return {"launch_pdl": True} if overlap else {}


@device_function
def wait_for_previous():
    """Until the kernel before this one on the stream has ended and its results are visible."""
    tl.extra.cuda.gdc_wait()


@device_function
def after_previous(value):
    """`value`, once the kernel before this one has ended: what is addressed with it is read after that, even if a loop reads it ahead."""
    # declared free of side effects, so that the software pipeliner accepts it; the dependency keeps the order
    return tl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1)


@device_function
def let_next_start():
    """The next kernel may start once every program has come here (or has ended)."""
    tl.extra.cuda.gdc_launch_dependents()
