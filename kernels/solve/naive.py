"""Oracles of the tree solve: the serial recurrence (every node's state from its parent's), and the closed form."""

from __future__ import annotations

import torch

from ..conv import NodeInputs
from ..factors.naive import path_lists
from ..topology import Forest


def tree_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: list[int],
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The recurrence of one request's tree, serially: section 1 of the algorithm with the tree parent as `parent`.

    Args:
        q, k: [n, HK, DK], q already scaled. v: [n, HV, DV]. g, beta: [n, HV], g the node's own log decay.
        state: [HV, DK, DV] before node 0. parents: parent of every node, -1 at the root.

    Returns:
        states [n, HV, DK, DV] after each node, outputs [n, HV, DV], corrections u [n, HV, DV], all `dtype`.
    """
    group = v.shape[1] // k.shape[1]
    q, k = (x.to(dtype).repeat_interleave(group, dim=1) for x in (q, k))
    v, g, beta, state = (x.to(dtype) for x in (v, g, beta, state))
    states, outputs, corrections = [], [], []
    for i, parent in enumerate(parents):
        s = (state if parent < 0 else states[parent]) * torch.exp(g[i])[:, None, None]
        u = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", s, k[i]))
        s = s + k[i][:, :, None] * u[:, None, :]
        states.append(s)
        corrections.append(u)
        outputs.append(torch.einsum("hkv,hk->hv", s, q[i]))
    return torch.stack(states), torch.stack(outputs), torch.stack(corrections)


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
    precision: str = "ieee",
) -> None:
    """See `parallel_solve.tree_solve`; fp64 inside, finite inputs only."""
    group = inputs.v.shape[1] // inputs.k.shape[1]
    for r in range(forest.max_requests):
        first, paths, row = int(forest.node_offset[r]), path_lists(forest, r), int(forest.token_start[r])
        nodes = slice(first, first + len(paths))
        for hv in range(inputs.v.shape[1] if paths else 0):
            s = state[int(state_slot[r]), hv].double()
            kh = inputs.k[nodes, hv // group].double() * inputs.k_scale[nodes, hv // group, None].double()
            qh = inputs.q[nodes, hv // group].double() * inputs.q_scale[nodes, hv // group, None].double()
            decay = torch.exp(inputs.p[nodes, hv].double())[:, None]
            rest = inputs.beta[nodes, hv].double()[:, None] * (inputs.v[nodes, hv].double() - decay * (kh @ s))
            for i, path in enumerate(paths):
                weights = y[first + i, hv, : len(path)].double()
                out_o[row + i, hv] = (decay[i] * (qh[i] @ s) + weights @ rest[path]).to(out_o.dtype)
                if out_u is not None:
                    out_u[first + i, hv] = (z[first + i, hv, : len(path)].double() @ rest[path]).to(out_u.dtype)
