"""What a forest has to satisfy, checked on the host. For tests and debugging: it copies the forest and waits for it."""

from __future__ import annotations

from itertools import pairwise

from .forest import WORD_BITS, Forest


def check_integrity(forest: Forest, num_requests: int, spine: bool = False) -> None:
    """Raise if one of the first `num_requests` trees breaks an invariant of the forest.

    Reads the device (synchronises). `spine`: also require the top-1 chain in nodes 1..d. The kernels are correct without
    it; the KV cache saves its moves with it.

    Raises:
        ValueError: names the broken invariant, the request and the node.
    """
    offsets = forest.node_offset[: num_requests + 1].tolist()
    if offsets[0] != 0 or any(b < a for a, b in pairwise(offsets)):
        raise ValueError(f"offsets monotone: node_offset must start at 0 and never fall, got {offsets}")
    if offsets[-1] > forest.capacity:
        raise ValueError(f"capacity: {offsets[-1]} nodes in a forest of {forest.capacity}")
    total = offsets[-1]
    names = ("parent", "depth", "token", "logprob", "ancestors", "request", "path", "conv_source")
    columns = [getattr(forest, name)[:total].tolist() for name in names]
    for r in range(num_requests):
        tree = [column[offsets[r] : offsets[r + 1]] for column in columns]
        if len(tree[0]) > forest.max_nodes:
            raise ValueError(f"max nodes: request {r} has {len(tree[0])} nodes, at most {forest.max_nodes}")
        if tree[0]:
            _check_shape(r, forest.max_depth, *tree[:2])
            _check_masks(r, tree[0], tree[4])
            _check_content(r, tree[0], tree[2], tree[3])
            _check_paths(r, int(forest.token_start[r]), tree[0], *tree[5:])
            if spine:
                _check_spine(r, tree[0], tree[2], tree[3])


def _check_shape(r: int, max_depth: int, parent: list[int], depth: list[int]) -> None:
    if parent[0] != -1 or depth[0] != 0:
        raise ValueError(f"root first: request {r} node 0 has parent {parent[0]}, depth {depth[0]}")
    for i in range(1, len(parent)):
        if parent[i] < 0:
            raise ValueError(f"one root: request {r} node {i} has parent {parent[i]}")
        if parent[i] >= i:
            raise ValueError(f"parents before children: request {r} node {i} has parent {parent[i]}")
        if depth[i] != depth[parent[i]] + 1:
            raise ValueError(f"depth: request {r} node {i} has depth {depth[i]}, its parent {depth[parent[i]]}")
        if depth[i] > max_depth:
            raise ValueError(f"max depth: request {r} node {i} has depth {depth[i]}, at most {max_depth}")


def _check_masks(r: int, parent: list[int], ancestors: list[list[int]]) -> None:
    expected: list[int] = []
    for i, up in enumerate(parent):
        expected.append((expected[up] if up >= 0 else 0) | 1 << i)
        found = sum((word & 0xFFFFFFFF) << (WORD_BITS * w) for w, word in enumerate(ancestors[i]))
        if found != expected[i]:
            raise ValueError(f"bitmask: request {r} node {i} has ancestors {found:#x}, expected {expected[i]:#x}")


def _check_paths(r: int, row: int, parent: list[int], request: list[int], path: list[list[int]], conv_source: list[list[int]]) -> None:
    """Request, path and conv inputs follow from the parents."""
    paths: list[list[int]] = []
    for i, up in enumerate(parent):
        paths.append([*(paths[up] if up >= 0 else []), i])
        padded = paths[i] + [-1] * (len(path[i]) - len(paths[i]))
        sources = [-3, -2, -1, *(row + j for j in paths[i])][-4:]
        if request[i] != r or path[i] != padded or conv_source[i] != sources:
            raise ValueError(f"path: request {r} node {i} has request {request[i]}, path {path[i]}, conv inputs {conv_source[i]}")


def _check_content(r: int, parent: list[int], token: list[int], logprob: list[float]) -> None:
    if logprob[0] != 0:
        raise ValueError(f"log-probability: request {r} root has {logprob[0]}, expected 0")
    seen: set[tuple[int, int]] = set()
    for i in range(1, len(parent)):
        if not logprob[i] <= logprob[parent[i]]:
            raise ValueError(f"log-probability: request {r} node {i} has {logprob[i]}, its parent {logprob[parent[i]]}")
        if token[i] >= 0 and (parent[i], token[i]) in seen:
            raise ValueError(f"siblings distinct: request {r} node {i} repeats token {token[i]} under node {parent[i]}")
        seen.add((parent[i], token[i]))


def _check_spine(r: int, parent: list[int], token: list[int], logprob: list[float]) -> None:
    node = 0
    while children := [i for i in range(node + 1, len(parent)) if parent[i] == node and token[i] >= 0]:
        best = max(logprob[i] for i in children)
        if children[0] != node + 1 or logprob[node + 1] != best:
            raise ValueError(f"spine first: request {r} node {node} has children {children}, node {node + 1} is not the most likely one")
        node += 1
