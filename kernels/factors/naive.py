"""Oracle of the tree factors: every entry from its definition, fp64."""

from __future__ import annotations

import torch

from ..topology import Forest

WORD_BITS = 32


def ancestor_lists(forest: Forest, request: int) -> list[list[int]]:
    """For every node of a request: its ancestors and itself, ascending, from the bitmasks."""
    first, last = int(forest.node_offset[request]), int(forest.node_offset[request + 1])
    words = forest.ancestors[first:last].tolist()
    return [[j for j in range(last - first) if (row[j // WORD_BITS] >> (j % WORD_BITS)) & 1] for row in words]


def tree_factors(
    k: torch.Tensor,
    q: torch.Tensor,
    beta: torch.Tensor,
    p: torch.Tensor,
    forest: Forest,
    out_g: torch.Tensor,
    out_c: torch.Tensor,
    block: int,
    precision: str = "ieee",
) -> None:
    """See `block_inverse.tree_factors`."""
    group = beta.shape[1] // k.shape[1]
    for r in range(forest.max_requests):
        first, last = int(forest.node_offset[r]), int(forest.node_offset[r + 1])
        n = last - first
        lists = ancestor_lists(forest, r)
        for hv in range(beta.shape[1]):
            # [n, DK], [n]
            kh, qh = k[first:last, hv // group].double(), q[first:last, hv // group].double()
            ph, bh = p[first:last, hv].double(), beta[first:last, hv].double()
            g = torch.zeros(n, n, dtype=torch.float64, device=k.device)
            c = torch.zeros_like(g)
            for i in range(n):
                for j in lists[i]:
                    decay = torch.exp(ph[i] - ph[j])
                    c[i, j] = decay * (qh[i] @ kh[j])
                    if j != i:
                        g[i, j] = bh[i] * decay * (kh[i] @ kh[j])
            for lo in range(0, n, block):
                hi = min(lo + block, n)
                eye = torch.eye(hi - lo, dtype=torch.float64, device=k.device)
                g[lo:hi, lo:hi] = torch.linalg.solve_triangular(eye + g[lo:hi, lo:hi], eye, upper=False)
            # Columns right of a row's diagonal block are not part of the contract.
            for i in range(n):
                end = min((i // block + 1) * block, n)
                out_g[first + i, hv, :end] = g[i, :end].to(out_g.dtype)
                out_c[first + i, hv, :end] = c[i, :end].to(out_c.dtype)
