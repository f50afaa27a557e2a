"""Oracles of the commit: the formula over the path, the recurrence over the path, a snapshot, and the conv window; loops, fp64."""

from __future__ import annotations

import torch

from ..topology import Forest


def _targets(forest: Forest, path, path_len, src_slot, dst_slot, dst_len, group: int):
    """(source slot, destination slot, compact node indices of the path prefix) of every state to write."""
    for r in range(path_len.shape[0]):
        first = int(forest.node_offset[r])
        for j in range(2):
            length = min(int(dst_len[r, j]), int(path_len[r]))
            if length > 0 and int(dst_slot[group, r, j]) > 0:
                yield int(src_slot[group, r]), int(dst_slot[group, r, j]), [first + int(n) for n in path[r, :length]]


def _commit(ssm_states, conv_states, groups, x, forest, new_state, *path_args) -> None:
    """Writes states and conv states; `new_state(layer, old state, nodes, old conv columns)` gives the state after the nodes."""
    for layer, group in enumerate(groups):
        ssm, conv = ssm_states[layer], conv_states[layer]
        old_ssm, old_conv = ssm.clone(), conv.clone()
        for src, dst, nodes in _targets(forest, *path_args, group):
            ssm[dst] = new_state(layer, old_ssm[src].double(), nodes, old_conv[src]).to(ssm.dtype)
            conv[dst] = torch.cat([old_conv[src], x[layer, nodes].T], dim=1)[:, -conv.shape[2] :]


def commit_factor(ssm_states, conv_states, groups, p, k, k_scale, u, x, forest: Forest, *path_args) -> None:
    """See `factor.commit_factor`; the caches as lists of tensors [slots, HV, DK, DV] and [slots, C, width - 1], written in place."""

    def new_state(layer, state, nodes, _):
        repeat = p.shape[2] // k.shape[2]
        path_p = p[layer, nodes].double()
        state = torch.exp(path_p[-1])[:, None, None] * state
        for j in range(len(nodes)):
            key = (k[layer, nodes[j]].double() * k_scale[layer, nodes[j], :, None].double()).repeat_interleave(repeat, 0)
            weight = torch.exp(path_p[-1] - path_p[j])[:, None, None]
            state = state + weight * key[:, :, None] * u[layer, nodes[j]].double()[:, None, :]
        return state

    _commit(ssm_states, conv_states, groups, x, forest, new_state, *path_args)


def commit_snapshot(ssm_states, conv_states, groups, snapshots, x, forest: Forest, *path_args) -> None:
    """See `snapshot.commit_snapshot`."""
    _commit(ssm_states, conv_states, groups, x, forest, lambda layer, _state, nodes, _: snapshots[layer, nodes[-1]].mT, *path_args)


def commit_replay(ssm_states, conv_states, groups, weights, biases, g, beta, x, forest: Forest, *path_args) -> None:
    """See `replay.commit_replay`; products of the convolution are not rounded."""

    def new_state(layer, state, nodes, columns):
        heads, dim_k, dim_v = state.shape
        key_channels = (x.shape[2] - heads * dim_v) // 2
        inputs = torch.cat([columns, x[layer, nodes].T], dim=1).float()
        weight = weights[layer].float()
        width = weight.shape[1]
        for j, node in enumerate(nodes):
            y = torch.zeros(x.shape[2], device=x.device) if biases is None else biases[layer].float().clone()
            for tap in range(width):
                y += inputs[:, columns.shape[1] - width + 1 + j + tap] * weight[:, tap]
            y = (y / (1 + torch.exp(-y))).to(x.dtype).double()
            key = y[key_channels : 2 * key_channels].view(-1, dim_k)
            key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
            key = key.repeat_interleave(heads // key.shape[0], 0)
            value = y[2 * key_channels :].view(heads, dim_v)
            state = state * torch.exp(g[layer, node].double())[:, None, None]
            value = beta[layer, node].double()[:, None] * (value - torch.einsum("hkv,hk->hv", state, key))
            state = state + key[:, :, None] * value[:, None, :]
        return state

    _commit(ssm_states, conv_states, groups, x, forest, new_state, *path_args)


def block_targets(tables, num_computed, path_len, block_size: int, request_slot, state_column) -> tuple[list, list]:
    """See `targets.block_targets`: (dst_slot [groups][R][2], dst_len [R][2]); state_column is set in place."""
    slots, lengths = [[] for _ in tables], []
    for r, n in enumerate(path_len.tolist()):
        tokens = range(int(num_computed[r]), int(num_computed[r]) + n)
        ends = [t + 1 for t in tokens if (t + 1) % block_size == 0 and t + 1 < tokens.stop]
        last = max(tokens.stop - 1, 0) // block_size
        before = max(tokens.stop // block_size - 1, 0)
        for found, table in zip(slots, tables, strict=True):
            found.append([int(table[r, last]), int(table[r, before])])
        lengths.append([n, ends[-1] - tokens.start if ends else 0])
        if n > 0 and request_slot[r] >= 0:
            state_column[request_slot[r]] = last
    return slots, lengths
