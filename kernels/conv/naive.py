"""Convolution and gates node by node, fp32: the oracle of tree_inputs."""

from __future__ import annotations

import torch

from ..topology import Forest
from .node_inputs import NodeInputs
from .pointwise import CONV_WIDTH, NORM_EPS


def _nodes(forest: Forest):
    """(request, compact index, token row, token rows of the path from the root to the node) of every node."""
    offsets, starts = forest.node_offset.tolist(), forest.token_start.tolist()
    for r in range(forest.max_requests):
        parents = forest.parent[offsets[r] : offsets[r + 1]].tolist()
        for i in range(len(parents)):
            path = [i]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            yield r, offsets[r] + i, starts[r] + i, [starts[r] + j for j in reversed(path)]


def naive_tree_inputs(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    out: NodeInputs,
    out_x: torch.Tensor | None = None,
    round_products: bool = False,
) -> None:
    """`tree_inputs`, one node at a time, finite inputs only."""
    (_, num_key_heads, head_k_dim), (_, num_value_heads, head_v_dim) = out.k.shape, out.v.shape
    key_width = num_key_heads * head_k_dim

    def log_decay(token_row: int) -> torch.Tensor:
        z = a[token_row].float() + dt_bias.float()
        return -torch.exp(A_log.float()) * torch.where(z <= 20.0, torch.log(1.0 + torch.exp(z)), z)

    for r, n, row, path in _nodes(forest):
        # [C, history + path] inputs before the node, oldest first
        inputs = torch.cat([conv_state[int(state_slot[r])], x[path].T], dim=1)[:, -CONV_WIDTH:]
        y = torch.zeros(x.shape[1], device=x.device) if bias is None else bias.float().clone()
        for tap in range(CONV_WIDTH):
            product = inputs[:, tap].float() * weight[:, tap].float()
            y += product.to(x.dtype).float() if round_products else product
        y = (y / (1 + torch.exp(-y))).to(x.dtype)
        q, k, v = y.split([key_width, key_width, num_value_heads * head_v_dim])
        out.q[n], out.k[n] = q.view(num_key_heads, head_k_dim), k.view(num_key_heads, head_k_dim)
        out.v[n] = v.view(num_value_heads, head_v_dim)
        out.q_scale[n] = torch.rsqrt(out.q[n].float().square().sum(-1) + NORM_EPS) * head_k_dim**-0.5
        out.k_scale[n] = torch.rsqrt(out.k[n].float().square().sum(-1) + NORM_EPS)
        out.g[n] = log_decay(row)
        out.p[n] = sum(log_decay(up) for up in path)
        out.beta[n] = torch.sigmoid(b[row].float())
        if out_x is not None:
            out_x[n] = x[row]
