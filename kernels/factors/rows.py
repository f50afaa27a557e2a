"""The factors Z = (I + G)^-1 and Y = C (I + G)^-1 of a tree's closed form, one row per node.

A row of either holds numbers at the node's own ancestors only, and those of row i follow from the rows of G along i's path: with z the
row of Z, z^T (I + G) = e_i^T is a triangular system of depth + 1 unknowns. So every node solves its own path, in fp32, without any
matrix power (powers of G hold binomials that cancel), and its result depends on its path alone. Rows are stored by depth of the
ancestor. Trees of one block of nodes share the products of keys (`block_rows`); larger ones, and one medium tree alone, take them path by
path (`path_rows`).
"""

from __future__ import annotations

import torch

from ..conv import NodeInputs
from ..overlap import overlaps
from ..precision import INTERPRET
from ..topology import Forest
from ..topology.locate import node_bound
from .block_rows import MAX_BLOCK, launch_block_rows
from .path_rows import launch_path_rows


def tree_factors(inputs: NodeInputs, forest: Forest, out_z: torch.Tensor | None, out_y: torch.Tensor, overlap: bool = False) -> None:
    """Rows of Z and Y of every node, one layer, in place, with

        G_ij = beta_i exp(P_i - P_j) (k_i . k_j)   j a strict ancestor of i, else 0
        C_ij = exp(P_i - P_j) (q_i . k_j)          j an ancestor of i or i, else 0
        Z = (I + G)^-1,  Y = C Z

    so that U = Z R and O = exp(P) Q S_pre + Y R.

    Args:
        inputs: of `tree_inputs`. forest: topology; its nodes lie within D - 2 levels.
        out_z: [capacity, HV, D] fp32, D = `forest.path.shape[1]`: column m belongs to the ancestor at depth m (the node itself at its own
            depth), 0 beyond. None: only Y is wanted. out_y: likewise.
        overlap: the launch before this one on the stream is this round's `tree_inputs`; start while it runs.

    Products of keys are exact in 16-bit activations, everything else is fp32. A node whose path holds something not finite (see
    `tree_inputs`) gets NaN; no other node's bits depend on it. Entries behind the last node are not written. Raises ValueError on wrong
    shapes or dtypes.
    """
    inputs.check()
    rows = (*inputs.beta.shape, forest.path.shape[1])
    for name, tensor in (("out_z", out_z), ("out_y", out_y)):
        if tensor is None and name == "out_z":
            continue
        if tuple(tensor.shape) != rows or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous fp32 {rows}, got {tensor.dtype} {tuple(tensor.shape)}")
    if forest.max_requests > 0:
        launch = launch_path_rows if _by_path(forest.max_nodes, node_bound(forest)) else launch_block_rows
        launch(inputs, forest, out_z, out_y, overlap and overlaps(inputs.k.device))


def _by_path(max_nodes: int, num_nodes: int) -> bool:
    """Whether the path kernel takes the batch.

    On an H200 one tree of 64 nodes takes 6.7 us by path and 10.4 as a block, sixteen of them 62 and 24, one of 16 nodes 5.4 and 4.9. In
    the interpreter, which pays per program, the path kernel takes a whole batch at once.
    """
    return INTERPRET or max_nodes > MAX_BLOCK or (max_nodes > 32 and num_nodes <= 64)
