"""Kernel tests run on a GPU where there is one, else under Triton's interpreter."""

import numpy as np
import pytest
import torch

from bole_vllm.kernels.topology import Forest, num_mask_words
from bole_vllm.kernels.topology.naive import fill_path


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def dots_free_of_shape(monkeypatch) -> None:
    """Products in the interpreter whose elements have the same bits whatever rows and columns are beside them, as on tensor cores.

    The interpreter asks numpy, whose BLAS sums in another order for another shape (which one does so depends on the processor).
    """
    if torch.cuda.is_available():
        return
    matmul = np.matmul

    def in_order(a: np.ndarray, b: np.ndarray, **kwargs) -> np.ndarray:
        if a.ndim != 2 or b.ndim != 2:
            return matmul(a, b, **kwargs)
        total = np.zeros((a.shape[0], b.shape[1]), dtype=kwargs.get("dtype", np.result_type(a, b)))
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[k]
        return total

    monkeypatch.setattr(np, "matmul", in_order)


def random_parents(num_nodes: int, max_depth: int, generator: torch.Generator) -> list[int]:
    """Parents of a random tree, parents before children, depth at most `max_depth`."""
    parents, depths = [-1], [0]
    for node in range(1, num_nodes):
        open_nodes = [i for i in range(node) if depths[i] < max_depth]
        parent = open_nodes[int(torch.randint(len(open_nodes), (1,), generator=generator))]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def make_forest(trees: list[list[int]], device, max_nodes: int | None = None, max_depth: int | None = None, token_gap: int = 0) -> Forest:
    """A forest from parent lists (an empty list: a request without nodes). Tokens are distinct per request.

    `token_gap` token rows lie before every request's rows, as prefill rows between tree rows do.
    """
    max_nodes = max_nodes or max(1, max(len(t) for t in trees))
    all_depths = [[len(path_to(t, i)) - 1 for i in range(len(t))] for t in trees]
    max_depth = max_depth if max_depth is not None else max([0] + [d for ds in all_depths for d in ds])
    forest = Forest.allocate(len(trees), max_nodes, max_depth, device)
    words = num_mask_words(max_nodes)
    offset = row = 0
    for r, parents in enumerate(trees):
        row += token_gap
        forest.node_offset[r], forest.token_start[r] = offset, row
        for i, parent in enumerate(parents):
            n = offset + i
            forest.parent[n], forest.depth[n], forest.token[n] = parent, all_depths[r][i], 100 + i
            forest.logprob[n] = -float(all_depths[r][i])
            mask = sum(1 << j for j in path_to(parents, i))
            for w in range(words):
                word = (mask >> (32 * w)) & 0xFFFFFFFF
                forest.ancestors[n, w] = word - (1 << 32) if word >= 1 << 31 else word
            fill_path(forest, n, r, i)
        offset += len(parents)
        row += max(1, len(parents))
    forest.node_offset[len(trees) :] = offset
    return forest
