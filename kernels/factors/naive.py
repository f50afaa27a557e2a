"""Oracle of the factors: G and C from their definitions and the dense inverse, fp64."""

from __future__ import annotations

import torch

from ..conv import NodeInputs
from ..topology import Forest


def path_lists(forest: Forest, request: int) -> list[list[int]]:
    """For every node of a request: its path from the root, itself last, from the parents."""
    first, last = int(forest.node_offset[request]), int(forest.node_offset[request + 1])
    paths: list[list[int]] = []
    for i, parent in enumerate(forest.parent[first:last].tolist()):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    return paths


def tree_gram(inputs: NodeInputs, forest: Forest, request: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """G and C [n, n] fp64 of one request and value head; finite inputs only."""
    first, paths = int(forest.node_offset[request]), path_lists(forest, request)
    n, i_hk = len(paths), head // (inputs.v.shape[1] // inputs.k.shape[1])
    nodes = slice(first, first + n)
    # [n, DK], [n]
    k = inputs.k[nodes, i_hk].double() * inputs.k_scale[nodes, i_hk, None].double()
    q = inputs.q[nodes, i_hk].double() * inputs.q_scale[nodes, i_hk, None].double()
    beta, decay = inputs.beta[nodes, head].double(), inputs.g[nodes, head].double()
    p = torch.stack([decay[path].sum() for path in paths])
    g = torch.zeros(n, n, dtype=torch.float64, device=k.device)
    c = torch.zeros_like(g)
    for i, path in enumerate(paths):
        weight = torch.exp(p[i] - p[path])
        c[i, path] = weight * (k[path] @ q[i])
        g[i, path[:-1]] = (beta[i] * weight * (k[path] @ k[i]))[:-1]
    return g, c


def tree_factors(inputs: NodeInputs, forest: Forest, out_z: torch.Tensor | None, out_y: torch.Tensor) -> None:
    """See `rows.tree_factors`; finite inputs only."""
    for r in range(forest.max_requests):
        first, paths = int(forest.node_offset[r]), path_lists(forest, r)
        for hv in range(inputs.v.shape[1] if paths else 0):
            g, c = tree_gram(inputs, forest, r, hv)
            eye = torch.eye(len(paths), dtype=g.dtype, device=g.device)
            z = torch.linalg.solve_triangular(eye + g, eye, upper=False)
            for i, path in enumerate(paths):
                for out, rows in ((out_z, z), (out_y, c @ z)):
                    if out is not None:
                        out[first + i, hv] = 0
                        out[first + i, hv, : len(path)] = rows[i, path].to(out.dtype)
