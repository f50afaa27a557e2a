"""tree_factors: rows of Z = (I + G)^-1 and Y = C Z against dense algebra in fp64, from both kernels."""

from __future__ import annotations

import pytest
import torch
from conftest import make_forest, path_to, random_parents
from test_solve import integer_problem, make_problem

from bole_vllm.kernels.factors.block_rows import MAX_BLOCK, launch_block_rows
from bole_vllm.kernels.factors.naive import tree_factors as naive_factors
from bole_vllm.kernels.factors.path_rows import launch_path_rows
from bole_vllm.kernels.factors.rows import tree_factors

KERNELS = {"block": launch_block_rows, "path": launch_path_rows}


def run(problem, function=tree_factors, with_z=True):
    """Poisoned outputs (z, y) of one call."""
    forest = make_forest(problem.trees, problem.k.device, max_nodes=problem.max_nodes)
    shape = (*problem.beta.shape, forest.path.shape[1])
    z, y = (torch.full(shape, float("nan"), device=problem.k.device) for _ in range(2))
    function(problem.inputs, forest, z if with_z else None, y)
    return z, y


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed,sizes,hk,group", [(1, (1, 15, 0, 16), 1, 1), (2, (17, 32), 2, 2), (3, (64, 33), 1, 3), (4, (100,), 1, 2)])
@pytest.mark.parametrize("max_depth", [3, 9, 17])
def test_against_definition(seed, sizes, hk, group, max_depth, kernel, device):
    if kernel == "block" and max(sizes) > MAX_BLOCK:
        pytest.skip("larger than a block")
    gen = torch.Generator().manual_seed(seed)
    trees = [random_parents(n, max_depth, gen) if n else [] for n in sizes]
    problem = make_problem(seed, trees, device, hk, group)
    got, want = run(problem, KERNELS[kernel]), run(problem, naive_factors)
    nodes = problem.offsets[-1]
    for name, a, b in zip(("z", "y"), got, want, strict=True):
        torch.testing.assert_close(a[:nodes], b[:nodes], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"seed {seed}: {n}: {m}")
        assert a[nodes:].isnan().all(), f"seed {seed}: {name} written behind the last node"
    # columns beyond a node's depth are exact zeros: the solve relies on nothing else being there
    depth = torch.tensor([len(path_to(t, i)) for t in trees for i in range(len(t))], device=device)
    beyond = torch.arange(got[0].shape[2], device=device) >= depth[:, None]
    for a in got:
        assert (a[:nodes].transpose(0, 1)[:, beyond] == 0).all(), f"seed {seed}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_y_alone(kernel, device):
    """Without Z the other output keeps its bits."""
    problem = make_problem(5, [random_parents(20, 6, torch.Generator().manual_seed(5))], device)
    both, alone = run(problem, KERNELS[kernel]), run(problem, KERNELS[kernel], with_z=False)
    assert torch.equal(both[1][:20], alone[1][:20])
    assert alone[0].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("field,value", [("k_scale", "nan"), ("q_scale", "nan"), ("beta", "nan"), ("g", "nan"), ("k", 1e4), ("g", -1e4)])
def test_non_ancestors_change_no_bit(field, value, kernel, device):
    seed = 10
    tree = random_parents(24, 6, torch.Generator().manual_seed(seed))
    problem = make_problem(seed, [tree], device)
    base = run(problem, KERNELS[kernel])
    getattr(problem, field)[5] = float(value)
    got = run(problem, KERNELS[kernel])
    below = torch.tensor([5 in path_to(tree, i) for i in range(24)], device=device)
    for a, b in zip(got, base, strict=True):
        assert torch.equal(a[:24][~below], b[:24][~below]), f"seed {seed}"
    if value == "nan" and field != "q_scale":
        assert all(a[:24][below].isnan().all() for a in got), f"seed {seed}: a NaN was hidden"
    if field == "q_scale":
        assert got[1][5].isnan().all() and torch.equal(got[0][:24], base[0][:24]), f"seed {seed}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(2))
def test_path_equality(seed, kernel, device):
    """A node's rows are those of the end of its path alone."""
    tree = random_parents(30, 8, torch.Generator().manual_seed(seed))
    problem = make_problem(seed, [tree], device, hk=2)
    whole = run(problem, KERNELS[kernel])
    for leaf in (29, 20, 7):
        path = path_to(tree, leaf)
        alone = run(problem.part(path, [list(range(-1, len(path) - 1))]), KERNELS[kernel])
        for a, b in zip(alone, whole, strict=True):
            length = len(path)
            torch.testing.assert_close(a[length - 1, :, :length], b[leaf, :, :length], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inverse_of_equal_keys_is_exact(kernel, device):
    """G of a chain of equal keys is all ones below the diagonal; its inverse is bidiagonal."""
    problem = integer_problem(6, [list(range(-1, 31))], device)
    problem.k[:] = 0
    problem.k[:, :, 3] = 1.0
    z, _ = run(problem, KERNELS[kernel])
    want = torch.eye(32, device=device) - torch.diag(torch.ones(31, device=device), -1)
    assert torch.equal(z[:32, 0, :32], want)
    assert (z[:32, 0, 32:] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_log_decays_stay_finite(kernel, device):
    """Differences of P of several hundred: exp before masking overflows to inf, and inf * 0 is NaN."""
    seed = 12
    problem = make_problem(seed, [random_parents(32, 12, torch.Generator().manual_seed(seed))], device, decay=400)
    z, y = run(problem, KERNELS[kernel])
    assert torch.isfinite(z[:32]).all() and torch.isfinite(y[:32]).all(), f"seed {seed}"


def test_refuses_wrong_arguments(device):
    problem = make_problem(1, [[-1, 0]], device)
    forest = make_forest(problem.trees, device)
    z, y = torch.zeros(2, *problem.beta.shape, forest.path.shape[1], device=device)
    with pytest.raises(ValueError, match="out_y"):
        tree_factors(problem.inputs, forest, z, y[:, :, :8])
    problem.beta = problem.beta.double()
    with pytest.raises(ValueError, match="beta"):
        tree_factors(problem.inputs, forest, z, y)
