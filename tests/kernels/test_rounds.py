"""What a round leaves for the counters and the drafter: sums over paths, and rows in the order of a chain."""

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.walk import COUNTS, add_counts, chain_order, naive


def random_round(seed: int, requests: int, max_nodes: int, max_depth: int, device):
    """Forest, [R, D + 1] paths (each to a random node, some along the spine) and their lengths; requests without a node among them."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, max_nodes + 1, (requests,), generator=gen).tolist()
    trees = [random_parents(n, max_depth, gen) if n else [] for n in sizes]
    path, length = torch.full((requests, max_depth + 3), 999, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
    for r, tree in enumerate(trees):
        if tree:
            taken = path_to(tree, int(torch.randint(0, len(tree), (1,), generator=gen)))
            path[r, : len(taken)], length[r] = torch.tensor(taken, dtype=torch.int32), len(taken)
    return make_forest(trees, device, max_depth=max_depth), sizes, path.to(device), length.to(device)


@pytest.mark.parametrize("requests", [1, 3, 32, 33, 70])
def test_counts_match_naive(requests, device):
    sums, want = torch.zeros(len(COUNTS), dtype=torch.int64, device=device), [0] * len(COUNTS)
    for seed in range(4):
        forest, _, path, length = random_round(seed, requests, 9, 4, device)
        add_counts(forest, path, length, sums)
        want = [a + b for a, b in zip(want, naive.counts(forest, path, length), strict=True)]
        assert sums.tolist() == want, f"seed {seed}"
    assert requests < 32 or min(want) > 0, "every counter counted something"


@pytest.mark.parametrize("requests", [1, 40])
def test_tokens_on_paths_are_counted(requests, device):
    """The pending token and the accepted drafts, as often as they occur; pads and what was not accepted are not."""
    sums, vocabulary = torch.zeros(len(COUNTS), dtype=torch.int64, device=device), 7
    counts = torch.full((vocabulary,), 0.5, device=device)
    want = counts.tolist()
    for seed in range(3):
        forest, _, path, length = random_round(50 + seed, requests, 9, 4, device)
        forest.token.copy_(torch.randint(-1, vocabulary, forest.token.shape, generator=torch.Generator().manual_seed(seed)))
        add_counts(forest, path, length, sums, counts)
        offset, token, paths = forest.node_offset.tolist(), forest.token.tolist(), path.tolist()
        for r, n in enumerate(length.tolist()):
            for node in paths[r][:n]:
                if (found := token[offset[r] + node]) >= 0:
                    want[found] += 1
        assert counts.tolist() == want, f"seed {seed}"
    with pytest.raises(ValueError, match="token_counts must be float32"):
        add_counts(forest, path, length, sums, counts.long())


def test_counts_refuse_wrong_arguments(device):
    forest, _, path, length = random_round(0, 2, 5, 3, device)
    sums = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="sums must be int64"):
        add_counts(forest, path, length, sums.int())
    with pytest.raises(ValueError, match="path must be int32"):
        add_counts(forest, path[:, :2], length, sums)


@pytest.mark.parametrize("requests", [1, 5, 40])
def test_accepted_rows_come_first(requests, device):
    """Requests of trees, of prompts (no path; longer than a program's step) and rows that belong to nobody."""
    for seed in range(3):
        _, sizes, path, length = random_round(100 + seed, requests, 9, 4, device)
        rows = [size if size else 300 for size in sizes]
        start = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32, device=device)
        total = int(start[-1]) + 5
        gen = torch.Generator().manual_seed(seed)
        seq_lens, rejected, emitted = (torch.randint(0, 9, (requests,), generator=gen, dtype=torch.int32).to(device) for _ in range(3))
        lengths, sampled = (torch.full((requests + beyond,), 99, dtype=torch.int32, device=device) for beyond in (300, 2))
        found = chain_order(start, path, length, total, seq_lens + 20, rejected, emitted, lengths, sampled)
        assert found.tolist() == naive.chain_order(start, path, length, total), f"seed {seed}"
        assert lengths.tolist() == (seq_lens + 20 - rejected).tolist() + [0] * 300, "rows beyond the requests hold nothing"
        assert sampled.tolist() == [*emitted.tolist(), 99, 99]
    with pytest.raises(ValueError, match="lengths must be contiguous int32"):
        chain_order(start, path, length, total, seq_lens, rejected, emitted, lengths.long(), sampled)
