"""U = Z R and O = exp(P) Q S + Y R over a forest, tiled over the value dimension.

Z and Y come as rows over a node's ancestors; the dense block is gathered by the ancestor's depth and masked by the ancestor bits.
"""

from __future__ import annotations

import torch
import triton

from ..conv import NodeInputs
from ..overlap import launch_options, overlaps
from ..precision import DEFAULT, INTERPRET, resolve
from ..topology import Forest
from .blocks import block_solve_kernel
from .small_trees import MAX_NODES as SMALL_NODES
from .small_trees import small_solve_kernel

NODE_BLOCK = 64
# lets three programs of the block kernel run on a multiprocessor (41.3 us instead of 43.3 at 64 nodes, batch 16)
MAX_REGISTERS = 168


def _check(inputs, z, y, state, state_slot, forest, out_o, out_u, scratch_r) -> None:
    inputs.check()
    capacity, heads, dim_v = inputs.v.shape
    if tuple(state.shape[1:]) != (heads, inputs.k.shape[2], dim_v):
        raise ValueError(f"state: expected [slots, {heads}, {inputs.k.shape[2]}, {dim_v}], got {tuple(state.shape)}")
    if tuple(out_o.shape[1:]) != (heads, dim_v) or out_o.stride(2) != 1 or out_o.stride(1) != dim_v:
        raise ValueError(f"out_o: expected [rows, {heads}, {dim_v}] with contiguous rows, got {tuple(out_o.shape)}")
    if state_slot.dim() != 1 or state_slot.shape[0] < forest.max_requests:
        raise ValueError(f"state_slot must cover {forest.max_requests} requests, got {list(state_slot.shape)}")
    if (out_u is None) != (z is None):
        raise ValueError("z and out_u belong together: give both or neither")
    if scratch_r is None and forest.max_nodes > NODE_BLOCK:
        raise ValueError(f"scratch_r is needed for trees of more than {NODE_BLOCK} nodes")
    rows, values = (capacity, heads, forest.path.shape[1]), (capacity, heads, dim_v)
    wanted = {"y": (y, rows), "z": (z, rows), "out_u": (out_u, values), "scratch_r": (scratch_r, values)}
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous()):
            raise ValueError(f"{name}: expected contiguous fp32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}")


def tree_solve(
    inputs: NodeInputs,
    z: torch.Tensor | None,
    y: torch.Tensor,
    state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    out_o: torch.Tensor,
    out_u: torch.Tensor | None = None,
    scratch_r: torch.Tensor | None = None,
    precision: str = DEFAULT,
    overlap: bool = False,
) -> None:
    """Equations R, U, O of the closed form over a forest, one layer.

        R = beta (V - exp(P) K S_pre)      U = Z R      O = exp(P) Q S_pre + Y R

    Args:
        inputs: of `tree_inputs`. z, y: of `tree_factors`; z None where no U is wanted.
        state: [slots, HV, DK, DV], any float dtype and strides, read only. state_slot: [R] int32 request -> slot.
        forest: topology; a request without nodes is skipped.
        out_o: [num token rows, HV, DV], any float dtype and row stride, written in place at a request's token rows.
        out_u: [capacity, HV, DV] fp32, written in place (the factor commit needs it), or None. Rows without a node keep their contents,
            in both.
        scratch_r: [capacity, HV, DV] fp32, overwritten; needed if `forest.max_nodes` is above NODE_BLOCK.
        precision: a name of `precision.MODES`.
        overlap: the launch before this one on the stream is this round's `tree_factors`, itself launched with overlap; start while it
            runs.

    A node whose path holds something not finite (see `tree_inputs`) gets NaN; no other node's bits depend on it. A finite input whose
    products overflow fp32 counts as 0 for its descendants. Raises ValueError on wrong shapes, dtypes or precision.
    """
    dots = resolve(precision, inputs.k.dtype)
    _check(inputs, z, y, state, state_slot, forest, out_o, out_u, scratch_r)
    if forest.max_requests == 0:
        return
    overlap = overlap and overlaps(state.device)
    arguments = (
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.q_scale,
        inputs.k_scale,
        inputs.beta,
        inputs.p,
        y if z is None else z,
        y,
        state,
        state_slot,
        forest.node_offset,
        forest.token_start,
        forest.depth,
        forest.ancestors,
        out_o,
        y if out_u is None else out_u,
    )
    heads, dim_v = inputs.v.shape[1:]
    common = {
        "HK": inputs.k.shape[1],
        "HV": heads,
        "DK": inputs.k.shape[2],
        "DV": dim_v,
        "D": y.shape[2],
        "W": forest.ancestors.shape[1],
        "HAS_U": out_u is not None,
        "STATE": dots.state,
        "OVERLAP": overlap,
        "INTERPRET": INTERPRET,
        "num_warps": 4,
        **launch_options(overlap),
    }
    strides = (*state.stride(), out_o.stride(0))
    if forest.max_nodes <= SMALL_NODES:
        tile = dim_v if INTERPRET else min(dim_v, 64)
        tiles, stages = _tiles_of_a_program(forest.max_nodes, forest.max_requests * heads, heads // inputs.k.shape[1] * (dim_v // tile))
        small_solve_kernel[(heads * (dim_v // tile) // tiles, forest.max_requests)](
            *arguments,
            *strides,
            BT=max(16, triton.next_power_of_2(forest.max_nodes)),
            BV=tile,
            TILES=tiles,
            STAGES=stages,
            FACTORS=dots.factors,
            num_stages=stages,
            **common,
        )
        return
    tile = _value_tile(dim_v, heads * forest.max_requests)
    cap = {"maxnreg": MAX_REGISTERS} if tile == 64 and out_u is None and not INTERPRET else {}
    block_solve_kernel[(dim_v // tile, heads, forest.max_requests)](
        *arguments,
        y if scratch_r is None else scratch_r,
        *strides,
        BT=NODE_BLOCK,
        BV=tile,
        MANY_BLOCKS=forest.max_nodes > NODE_BLOCK,
        FACTORS=_for_tile(dots.factors, tile),
        num_stages=1,
        **cap,
        **common,
    )


def _tiles_of_a_program(max_nodes: int, num_heads: int, per_key_head: int) -> tuple[int, int]:
    """Tiles that one program of the small kernel takes, and its pipeline stages; num_heads: of all requests.

    On an H200, 16 nodes and batch 16: four tiles a program 17.9 us, one 19.4; at batch 1 10.7 and 4.4. With 32 nodes reading ahead spills.
    """
    if INTERPRET:
        return per_key_head, 1
    if max_nodes > 16 or num_heads < 256:
        return 1, 1
    return max(tiles for tiles in (1, 2, 3, 4) if per_key_head % tiles == 0), 3


def _value_tile(head_v_dim: int, num_heads: int) -> int:
    """Values of one program of the block kernel: 32 fill the card at batch size 1, 64 read keys and factors less often."""
    if INTERPRET:
        return head_v_dim
    return min(head_v_dim, 32 if num_heads * head_v_dim <= 64 * 128 else 64)


def _for_tile(name: str, tile: int) -> str:
    """The precision itself, or one that compiles correctly: on Hopper, Triton 3.6 gets products of bfloat16 wrong whose right operand has
    64 rows and fewer than 64 columns; in tf32 they are right."""
    return {"bf16x3": "tf32x3", "bf16": "tf32"}.get(name, name) if tile < 64 else name
