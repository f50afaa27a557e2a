"""Oracles of the tree solve: the serial recurrence (every node's state from its parent's), and the closed form."""

from __future__ import annotations

import torch

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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    p: torch.Tensor,
    g: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    out_o: torch.Tensor,
    out_u: torch.Tensor,
    block: int,
    precision: str = "ieee",
) -> None:
    """See `forward_substitution.tree_solve`; fp64 inside."""
    group = v.shape[1] // k.shape[1]
    for r in range(forest.max_requests):
        first, last = int(forest.node_offset[r]), int(forest.node_offset[r + 1])
        n, row = last - first, int(forest.token_start[r])
        for hv in range(v.shape[1]):
            s = state[int(state_slot[r]), hv].double()
            kh, qh = k[first:last, hv // group].double(), q[first:last, hv // group].double()
            decay = torch.exp(p[first:last, hv].double())[:, None]
            rest = beta[first:last, hv].double()[:, None] * (v[first:last, hv].double() - decay * (kh @ s))
            u = torch.zeros(n, v.shape[2], dtype=torch.float64, device=v.device)
            gh, ch = g[first:last, hv, :n].double().tril(), c[first:last, hv, :n].double().tril()
            for lo in range(0, n, block):
                hi = min(lo + block, n)
                u[lo:hi] = gh[lo:hi, lo:hi] @ (rest[lo:hi] - gh[lo:hi, :lo] @ u[:lo])
            out_u[first:last, hv] = u.to(out_u.dtype)
            out_o[row : row + n, hv] = (decay * (qh @ s) + ch @ u).to(out_o.dtype)
