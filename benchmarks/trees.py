"""Proposal trees as a drafter with a top-k head and a node budget makes them."""

from __future__ import annotations

import heapq
import random


def draft_tree(num_nodes: int, max_depth: int, rng: random.Random, topk: int = 4) -> list[int]:
    """Parents of a tree of `num_nodes` nodes, root first, the top-1 chain in nodes 1..d, then the most likely nodes.

    Each node's children have probabilities that fall about geometrically from a random top-1 probability of 0.4 to 0.95, as those of
    a conditional drafter do; nodes are taken by the product along their path. Parents come before children, depth <= `max_depth`.
    """
    parents, depths = [-1], [0]
    # (-probability of the path, order of creation, parent); the order breaks ties
    candidates: list[tuple[float, int, int]] = []
    created = 0

    def offer_children(node: int, probability: float, skip_first: bool) -> float:
        """Puts the node's children on the heap; returns the first one's probability."""
        nonlocal created
        first, rest = rng.uniform(0.4, 0.95), 1.0
        top = probability * first
        for rank in range(topk):
            child = probability * rest * first
            rest *= 1.0 - first
            if depths[node] < max_depth and not (skip_first and rank == 0):
                heapq.heappush(candidates, (-child, created, node))
                created += 1
        return top

    probability = 1.0
    for node in range(min(max_depth, num_nodes - 1)):
        probability = offer_children(node, probability, skip_first=True)
        parents.append(node)
        depths.append(depths[node] + 1)
    while len(parents) < num_nodes:
        negative, _, parent = heapq.heappop(candidates)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        offer_children(len(parents) - 1, -negative, skip_first=False)
    return parents


def draft_trees(num_requests: int, num_nodes: int, max_depth: int, seed: int, ragged: bool = False) -> list[list[int]]:
    """One tree a request: all of `num_nodes` nodes, or ragged: the first full, others of any size and every fifth request empty."""
    rng = random.Random(seed)
    sizes = [num_nodes] * num_requests
    if ragged:
        sizes[1:] = [0 if r % 5 == 4 else rng.randint(1, num_nodes) for r in range(1, num_requests)]
    return [draft_tree(size, max_depth, rng) if size else [] for size in sizes]


def chain(num_nodes: int) -> list[int]:
    """The parents of a chain."""
    return list(range(-1, num_nodes - 1))


def depths(parents: list[int]) -> list[int]:
    """Number of strict ancestors of every node."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def deepest_path(parents: list[int], length: int) -> list[int]:
    """The first `length` nodes of a path that goes at least so deep (the spine where there is no other); shorter if the tree is."""
    found = depths(parents)
    node = max((i for i in range(len(parents)) if found[i] < length), key=lambda i: (found[i], i))
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
