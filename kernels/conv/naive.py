"""Convolution and gates node by node, fp32: the oracle of tree_conv and tree_gates."""

from __future__ import annotations

import torch

from ..topology import Forest

CONV_WIDTH = 4


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


def naive_tree_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_slot: torch.Tensor,
    forest: Forest,
    num_key_heads: int,
    head_k_dim: int,
    num_value_heads: int,
    head_v_dim: int,
    out_q: torch.Tensor,
    out_k: torch.Tensor,
    out_v: torch.Tensor,
    out_x: torch.Tensor | None,
    round_products: bool = False,
) -> None:
    """`tree_conv`, one node at a time."""
    key_width = num_key_heads * head_k_dim
    for r, n, row, path in _nodes(forest):
        # [C, history + path] inputs before the node, oldest first
        inputs = torch.cat([conv_state[int(state_slot[r])], x[path].T], dim=1)[:, -CONV_WIDTH:]
        y = torch.zeros(x.shape[1], device=x.device) if bias is None else bias.float().clone()
        for tap in range(CONV_WIDTH):
            product = inputs[:, tap].float() * weight[:, tap].float()
            y += product.to(x.dtype).float() if round_products else product
        y = (y / (1 + torch.exp(-y))).to(x.dtype)
        q, k, v = y.split([key_width, key_width, num_value_heads * head_v_dim])
        q, k = q.float().view(num_key_heads, head_k_dim), k.float().view(num_key_heads, head_k_dim)
        out_q[n] = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * head_k_dim**-0.5
        out_k[n] = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        out_v[n] = v.view(num_value_heads, head_v_dim)
        if out_x is not None:
            out_x[n] = x[row]


def naive_tree_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    forest: Forest,
    out_g: torch.Tensor,
    out_beta: torch.Tensor,
    out_p: torch.Tensor,
) -> None:
    """`tree_gates`, one node at a time."""

    def log_decay(row: int) -> torch.Tensor:
        z = a[row].float() + dt_bias.float()
        return -torch.exp(A_log.float()) * torch.where(z <= 20.0, torch.log(1.0 + torch.exp(z)), z)

    for _, n, row, path in _nodes(forest):
        out_g[n] = log_decay(row)
        out_beta[n] = torch.sigmoid(b[row].float())
        out_p[n] = sum(log_decay(up) for up in reversed(path))
