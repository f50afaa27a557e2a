"""The walk emits exactly the samples along the accepted path; every leaf is forced in turn."""

import itertools

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.walk import naive, walk_tree

STALE = -7777


def random_trees(sizes: list[int], max_depth: int, seed: int) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return [random_parents(n, max_depth, gen) if n else [] for n in sizes]


def logits_offsets(trees, other_rows: dict[int, int], device) -> torch.Tensor:
    """Forest requests have a row per node, the others `other_rows[r]`."""
    rows = [len(t) or other_rows.get(r, 0) for r, t in enumerate(trees)]
    return torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32, device=device)


def run(sampled, logits_start, forest, acceptable=None):
    """Walk into poisoned buffers; checks what lies beyond the valid entries and returns [(tokens, path)]."""
    requests, width = logits_start.shape[0] - 1, forest.max_depth + 3
    tokens = torch.full((requests, width), STALE, dtype=torch.int64, device=sampled.device)
    path = torch.full((requests, width), STALE, dtype=torch.int32, device=sampled.device)
    count, path_len = (torch.full((requests,), STALE, dtype=torch.int32, device=sampled.device) for _ in range(2))
    walk_tree(sampled, logits_start, forest, acceptable, tokens, count, path, path_len)
    steps, results = forest.max_depth + 1, []
    for r in range(requests):
        n, p = int(count[r]), int(path_len[r])
        assert 0 <= n <= steps and p in (0, n)
        assert (tokens[r, n:steps] == -1).all() and (path[r, p:steps] == 0).all()
        assert (tokens[r, steps:] == STALE).all() and (path[r, steps:] == STALE).all()
        results.append((tokens[r, :n].tolist(), path[r, :p].tolist()))
    return results


def force(sampled, start: int, forest, first: int, path: list[int], bonus: int) -> None:
    """Make the target sample, along `path`, each next node's token, and `bonus` at its end."""
    for node, child in itertools.pairwise(path):
        sampled[start + node] = forest.token[first + child].long()
    sampled[start + path[-1]] = bonus


@pytest.mark.parametrize("sizes", [[1], [2], [9], [32], [33], [64]], ids=str)
def test_every_node_is_reached(device, sizes):
    trees = random_trees(sizes, 8, seed=sizes[0])
    forest = make_forest(trees, device)
    starts = logits_offsets(trees, {}, device)
    for node in range(sizes[0]):
        sampled = torch.full((sizes[0],), 5, dtype=torch.int64, device=device)
        path = path_to(trees[0], node)
        force(sampled, 0, forest, 0, path, bonus=7)
        expected = [int(forest.token[i]) for i in path[1:]] + [7]
        assert run(sampled, starts, forest) == [(expected, path)], f"node {node}, seed {sizes[0]}"


def test_leaves_of_a_batch(device):
    """Several requests at once, a different leaf in each, requests outside the forest between them."""
    trees = random_trees([16, 0, 5, 0, 1, 32], 6, seed=3)
    forest = make_forest(trees, device, max_nodes=32)
    starts = logits_offsets(trees, {1: 3, 3: 0}, device)
    for shift in range(12):
        sampled = torch.full((int(starts[-1]),), 5, dtype=torch.int64, device=device)
        sampled[int(starts[1]) : int(starts[2])] = torch.tensor([40, 41, 42], device=device)
        expected = []
        for r, tree in enumerate(trees):
            if not tree:
                expected.append(([42], []) if r == 1 else ([], []))
                continue
            leaves = [i for i in range(len(tree)) if i not in tree]
            path = path_to(tree, leaves[shift % len(leaves)])
            force(sampled, int(starts[r]), forest, int(forest.node_offset[r]), path, bonus=9)
            expected.append(([int(forest.token[int(forest.node_offset[r]) + i]) for i in path[1:]] + [9], path))
        assert run(sampled, starts, forest) == expected, f"shift {shift}, seed 3"


def test_all_rejected(device):
    trees = random_trees([9, 16], 4, seed=4)
    forest = make_forest(trees, device)
    sampled = torch.full((25,), 5, dtype=torch.int64, device=device)
    assert run(sampled, logits_offsets(trees, {}, device), forest) == [([5], [0]), ([5], [0])]


@pytest.mark.parametrize("stale", [-1, 103])
def test_pads_are_never_followed(device, stale):
    """Nodes 3.. are pads as the forest's builder leaves them: parent 0, token -1. The sample is -1, or the pad's old token."""
    trees = [[-1, 0, 1, 0, 0]]
    forest = make_forest(trees, device)
    assert int(forest.token[3]) == 103
    forest.token[3:5] = -1
    sampled = torch.full((5,), stale, dtype=torch.int64, device=device)
    assert run(sampled, logits_offsets(trees, {}, device), forest) == [([stale], [0])]


def test_equal_tokens_under_different_parents(device):
    """The same token everywhere except among siblings: only the parent link tells the nodes apart."""
    trees = [[-1, 0, 1, 0, 3, 4]]
    forest = make_forest(trees, device)
    forest.token[:] = torch.tensor([50, 60, 61, 61, 60, 61], dtype=torch.int32, device=device)
    starts = logits_offsets(trees, {}, device)
    sampled = torch.tensor([61, 61, 0, 60, 61, 8], dtype=torch.int64, device=device)
    assert run(sampled, starts, forest) == [([61, 60, 61, 8], [0, 3, 4, 5])]
    sampled = torch.tensor([60, 61, 8, 60, 61, 9], dtype=torch.int64, device=device)
    assert run(sampled, starts, forest) == [([60, 61, 8], [0, 1, 2])]
    sampled = torch.tensor([60, 60, 8, 60, 61, 9], dtype=torch.int64, device=device)
    assert run(sampled, starts, forest) == [([60, 60], [0, 1])]


def test_acceptable(device):
    trees = [[-1, 0, 1, 2], [-1, 0, 1, 2]]
    forest = make_forest(trees, device)
    starts = logits_offsets(trees, {}, device)
    sampled = torch.tensor([101, 102, 103, 7] * 2, dtype=torch.int64, device=device)
    acceptable = torch.ones(8, dtype=torch.bool, device=device)
    acceptable[2] = False
    assert run(sampled, starts, forest, acceptable) == [([101, 102], [0, 1]), ([101, 102, 103, 7], [0, 1, 2, 3])]
    # the root is always visited
    acceptable[:] = False
    assert run(sampled, starts, forest, acceptable) == [([101], [0]), ([101], [0])]


def test_no_request_has_nodes(device):
    trees = [[], [], []]
    forest = make_forest(trees, device, max_nodes=4, max_depth=2)
    starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32, device=device)
    sampled = torch.tensor([11, 12], dtype=torch.int64, device=device)
    assert run(sampled, starts, forest) == [([11], []), ([], []), ([12], [])]


@pytest.mark.parametrize("seed", range(6))
def test_random_against_oracle(device, seed):
    """Few token values, so that a walk takes several steps."""
    gen = torch.Generator().manual_seed(seed)
    sizes = [int(torch.randint(0, 33, (1,), generator=gen)) for _ in range(7)]
    trees = random_trees(sizes, 7, seed)
    forest = make_forest(trees, device, max_nodes=33, max_depth=7)
    starts = logits_offsets(trees, {r: r % 3 for r in range(7)}, device)
    # distinct among siblings, drawn from few values
    for r, tree in enumerate(trees):
        for i in range(1, len(tree)):
            forest.token[int(forest.node_offset[r]) + i] = sum(1 for j in range(i) if tree[j] == tree[i])
    sampled = torch.randint(0, 2, (int(starts[-1]),), generator=gen).to(device)
    acceptable = (torch.rand(int(starts[-1]), generator=gen) < 0.9).to(device)
    for allowed in (None, acceptable):
        expected = naive.walk_tree(sampled, starts, forest, allowed, 7)
        assert run(sampled, starts, forest, allowed) == expected, f"seed {seed}"
        assert max(len(path) for _, path in expected) > 1


def test_fewer_requests_than_the_forest(device):
    trees = random_trees([4, 4, 4], 3, seed=9)
    forest = make_forest(trees, device).for_requests(2)
    starts = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    sampled = torch.full((12,), 101, dtype=torch.int64, device=device)
    assert run(sampled, starts, forest) == naive.walk_tree(sampled, starts, forest, None, 2)


def test_rejects_bad_arguments(device):
    trees = [[-1, 0, 1]]
    forest = make_forest(trees, device)
    sampled, starts = torch.zeros(3, dtype=torch.int64, device=device), logits_offsets(trees, {}, device)
    tokens, path = torch.zeros(1, 3, dtype=torch.int64, device=device), torch.zeros(1, 3, dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="out_tokens"):
        walk_tree(sampled, starts, forest, None, tokens[:, :2], count, path, count)
    with pytest.raises(ValueError, match="out_path"):
        walk_tree(sampled, starts, forest, None, tokens, count, path.long(), count)
    with pytest.raises(ValueError, match="requests"):
        walk_tree(sampled, torch.zeros(9, dtype=torch.int32, device=device), forest, None, tokens, count, path, count)
    with pytest.raises(ValueError, match="acceptable"):
        walk_tree(sampled, starts, forest, torch.ones(3, device=device), tokens, count, path, count)
