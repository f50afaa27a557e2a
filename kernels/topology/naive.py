"""Plain loops over the forest: the oracle of build_forest and tree_positions."""

from __future__ import annotations

import torch

from .forest import WORD_BITS, Forest


def naive_build_forest(
    forest: Forest,
    slot_parent: torch.Tensor,
    slot_token: torch.Tensor,
    slot_logprob: torch.Tensor,
    slot_num_nodes: torch.Tensor,
    slot_of_request: torch.Tensor,
    is_tree: torch.Tensor,
    query_start: torch.Tensor,
    root_token: torch.Tensor,
) -> None:
    """`build_forest`, one node at a time."""
    starts = query_start.tolist()
    offset = 0
    forest.node_offset[0] = 0
    for r in range(forest.max_requests):
        slot = int(slot_of_request[r])
        num_nodes = starts[r + 1] - starts[r] if bool(is_tree[r]) and slot >= 0 else 0
        forest.token_start[r] = starts[r]
        for i in range(num_nodes):
            n = offset + i
            if i == 0:
                parent, token, logprob = -1, int(root_token[starts[r]]), 0.0
            elif i < int(slot_num_nodes[slot]):
                parent, token, logprob = int(slot_parent[slot, i]), int(slot_token[slot, i]), float(slot_logprob[slot, i])
            else:
                parent, token, logprob = 0, -1, float("-inf")
            forest.parent[n], forest.token[n], forest.logprob[n] = parent, token, logprob
            forest.depth[n] = int(forest.depth[offset + parent]) + 1 if parent >= 0 else 0
            forest.ancestors[n] = forest.ancestors[offset + parent] if parent >= 0 else 0
            bit = 1 << (i % WORD_BITS)
            forest.ancestors[n, i // WORD_BITS] |= bit - (1 << WORD_BITS) if bit >> (WORD_BITS - 1) else bit
            fill_path(forest, n, r, i)
        offset += num_nodes
        forest.node_offset[r + 1] = offset


def fill_path(forest: Forest, n: int, r: int, i: int) -> None:
    """Request, path and conv inputs of node i of request r, compact index n; its parent, depth and request's start are filled in."""
    up = int(forest.parent[n])
    forest.request[n] = r
    forest.path[n] = forest.path[n - i + up] if up >= 0 else -1
    forest.path[n, int(forest.depth[n])] = i
    above = forest.conv_source[n - i + up] if up >= 0 else torch.tensor([-4, -3, -2, -1], dtype=torch.int32, device=forest.path.device)
    forest.conv_source[n, :-1] = above[1:]
    forest.conv_source[n, -1] = forest.token_start[r] + i


def naive_tree_positions(forest: Forest, num_computed: torch.Tensor, positions: torch.Tensor) -> None:
    """`tree_positions`, one node at a time."""
    offsets, starts = forest.node_offset.tolist(), forest.token_start.tolist()
    for r in range(forest.max_requests):
        for i in range(offsets[r + 1] - offsets[r]):
            positions[starts[r] + i] = int(num_computed[r]) + int(forest.depth[offsets[r] + i])
