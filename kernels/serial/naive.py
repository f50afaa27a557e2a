"""Oracle of the serial tree: every node's state from its parent's, fp64, snapshots kept."""

from __future__ import annotations

import torch

from ..conv import NodeInputs
from ..topology import Forest


def serial_tree(
    inputs: NodeInputs, state: torch.Tensor, state_slot: torch.Tensor, forest: Forest, snapshots: torch.Tensor, out_o: torch.Tensor
) -> None:
    """See `snapshot_tree.serial_tree`; a node's parent is read from its fp64 state, not from the rounded snapshot."""
    group = inputs.v.shape[1] // inputs.k.shape[1]
    # [capacity, HV, DK] and [capacity, HV]
    q, k = (
        (x.double() * scale.double()[..., None]).repeat_interleave(group, dim=1)
        for x, scale in ((inputs.q, inputs.q_scale), (inputs.k, inputs.k_scale))
    )
    v, decay, beta = inputs.v.double(), inputs.g.double().exp(), inputs.beta.double()
    for r in range(forest.max_requests):
        first, last = int(forest.node_offset[r]), int(forest.node_offset[r + 1])
        # [HV, DK, DV] after each node
        states: list[torch.Tensor] = []
        for n in range(first, last):
            parent = int(forest.parent[n])
            s = (state[int(state_slot[r])].double() if parent < 0 else states[parent]) * decay[n][:, None, None]
            u = beta[n][:, None] * (v[n] - torch.einsum("hkv,hk->hv", s, k[n]))
            s = s + k[n][:, :, None] * u[:, None, :]
            states.append(s)
            snapshots[n] = s.transpose(1, 2).to(snapshots.dtype)
            out_o[int(forest.token_start[r]) + n - first] = torch.einsum("hkv,hk->hv", s, q[n]).to(out_o.dtype)
