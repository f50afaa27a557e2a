"""Oracles: plain Python, one request after the other."""

from __future__ import annotations

import torch

from ..topology import Forest


def walk_tree(
    sampled: torch.Tensor,
    logits_start: torch.Tensor,
    forest: Forest,
    acceptable: torch.Tensor | None,
    num_requests: int,
) -> list[tuple[list[int], list[int]]]:
    """(emitted tokens, visited nodes) of every request; see `edge_walk.walk_tree`."""
    target, starts = sampled.tolist(), logits_start.tolist()
    allowed = [True] * len(target) if acceptable is None else acceptable.tolist()
    offsets, parents, tokens = forest.node_offset.tolist(), forest.parent.tolist(), forest.token.tolist()
    results: list[tuple[list[int], list[int]]] = []
    for r in range(num_requests):
        first, num_nodes, row = offsets[r], offsets[r + 1] - offsets[r], starts[r]
        if num_nodes == 0:
            results.append(([target[starts[r + 1] - 1]] if starts[r + 1] > row else [], []))
            continue
        emitted, path = [target[row]], [0]
        while True:
            children = [i for i in range(num_nodes) if parents[first + i] == path[-1] and tokens[first + i] >= 0]
            followed = [i for i in children if tokens[first + i] == emitted[-1] and allowed[row + i]]
            if not followed:
                break
            path.append(followed[0])
            emitted.append(target[row + followed[0]])
        results.append((emitted, path))
    return results


def counts(forest: Forest, path: torch.Tensor, path_len: torch.Tensor) -> list[int]:
    """What `counts.add_counts` adds for one round."""
    offsets, paths = forest.node_offset.tolist(), path.tolist()
    rows = [(offsets[r + 1] - offsets[r], paths[r][:n]) for r, n in enumerate(path_len.tolist())]
    served = [(nodes, taken) for nodes, taken in rows if nodes > 0]
    drafted = [taken for nodes, taken in served if nodes > 1]
    branched = [taken for taken in drafted if len(taken) > 1]
    tokens = sum(map(len, drafted))
    on_spine = sum(taken == list(range(len(taken))) for taken in branched)
    nodes = sum(nodes for nodes, _ in served)
    return [int(bool(served)), len(served), nodes, len(drafted), tokens, tokens - len(drafted), len(branched), on_spine]


def chain_order(start: torch.Tensor, path: torch.Tensor, path_len: torch.Tensor, num_rows: int) -> list[int]:
    """`chain_order.chain_order`."""
    rows, first = list(range(num_rows)), start.tolist()
    for r, n in enumerate(path_len.tolist()):
        rows[first[r] : first[r] + n] = [first[r] + node for node in path[r, :n].tolist()]
    return rows
