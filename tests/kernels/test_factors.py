"""tree_factors: G (diagonal blocks inverted) and C against their definition in fp64."""

from __future__ import annotations

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.factors import padded_nodes, tree_factors
from bole_vllm.kernels.factors.naive import tree_factors as naive_factors


def inputs(seed, trees, device, hk=1, group=2, dim=64):
    """k, q [capacity, HK, DK], beta, p [capacity, HV]; NaN beyond the nodes."""
    gen = torch.Generator().manual_seed(seed)
    nodes = sum(len(t) for t in trees)
    k, q = torch.randn(2, nodes + 4, hk, dim, generator=gen)
    k, q = k / k.norm(dim=-1, keepdim=True), q / q.norm(dim=-1, keepdim=True)
    beta, g = torch.rand(nodes + 4, hk * group, generator=gen), -torch.rand(nodes + 4, hk * group, generator=gen)
    p, offset = torch.full_like(g, float("nan")), 0
    for tree in trees:
        for i in range(len(tree)):
            p[offset + i] = sum(g[offset + j] for j in path_to(tree, i)[::-1])
        offset += len(tree)
    for x in (k, q, beta):
        x[nodes:] = float("nan")
    return tuple(x.to(device) for x in (k, q, beta, p))


def run(args, trees, device, block, function=tree_factors, max_nodes=None, precision="tf32x3"):
    forest = make_forest(trees, device, max_nodes=max_nodes)
    shape = (*args[2].shape, padded_nodes(forest.max_nodes, block))
    g, c = torch.full(shape, float("nan"), device=device), torch.full(shape, float("nan"), device=device)
    function(*args, forest, g, c, block, precision)
    return g, c


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("seed,sizes,hk,group", [(1, (1, 15, 0, 16), 1, 1), (2, (17, 32), 2, 2), (3, (64, 33), 1, 3)])
def test_against_definition(seed, sizes, hk, group, block, device):
    gen = torch.Generator().manual_seed(seed)
    trees = [random_parents(n, 9, gen) if n else [] for n in sizes]
    args = inputs(seed, trees, device, hk, group)
    max_nodes = max(sizes) + 20
    want_g, want_c = run(args, trees, device, block, naive_factors, max_nodes)
    got_g, got_c = run(args, trees, device, block, max_nodes=max_nodes)
    offset = 0
    for tree in trees:
        for i in range(len(tree)):
            end = min((i // block + 1) * block, len(tree))
            for got, want in ((got_g, want_g), (got_c, want_c)):
                row, ref = got[offset + i], want[offset + i]
                torch.testing.assert_close(row[:, :end], ref[:, :end], rtol=1e-5, atol=1e-5, msg=f"seed {seed} node {i}")
                assert (row[:, end : (i // block + 1) * block] == 0).all(), f"seed {seed} node {i}: columns without a node"
            m_plus = torch.zeros(end, dtype=torch.bool)
            m_plus[path_to(tree, i)] = True
            assert (got_c[offset + i, :, :end][:, ~m_plus.to(device)] == 0).all(), f"seed {seed} node {i}: C of a non-ancestor"
            assert (got_g[offset + i, :, :end][:, ~m_plus.to(device)] == 0).all(), f"seed {seed} node {i}: G of a non-ancestor"
        offset += len(tree)
    assert got_g[offset:].isnan().all() and got_c[offset:].isnan().all(), "rows beyond the nodes were written"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("which", range(4), ids=["k", "q", "beta", "p"])
def test_non_ancestors_change_no_bit(which, value, device):
    seed = 10
    tree = random_parents(24, 6, torch.Generator().manual_seed(seed))
    args = inputs(seed, [tree], device)
    base = run(args, [tree], device, 16)
    args[which][5] = -value if which == 3 else value
    got = run(args, [tree], device, 16)
    clean = [i for i in range(24) if 5 not in path_to(tree, i)]
    for a, b in zip(got, base, strict=True):
        assert torch.equal(a[clean].nan_to_num(7.0), b[clean].nan_to_num(7.0)), f"seed {seed}"


def test_inverse_of_equal_keys_is_exact(device):
    """G of a chain of equal keys is all ones below the diagonal; its inverse is bidiagonal."""
    tree = [-1, *list(range(31))]
    k = torch.zeros(32, 1, 64, device=device)
    k[:, 0, 3] = 1.0
    beta, p = torch.ones(32, 1, device=device), torch.zeros(32, 1, device=device)
    g, _ = run((k, k, beta, p), [tree], device, 32)
    want = torch.eye(32, device=device) - torch.diag(torch.ones(31, device=device), -1)
    assert torch.equal(g[:, 0], want)


def test_large_log_decays_stay_finite(device):
    """Differences of P of several hundred: exp before masking overflows to inf, and inf * 0 is NaN."""
    seed = 12
    tree = random_parents(32, 12, torch.Generator().manual_seed(seed))
    k, q, beta, p = inputs(seed, [tree], device)
    p[:32] *= 400
    g, c = run((k, q, beta, p), [tree], device, 32)
    assert torch.isfinite(g[:32]).all() and torch.isfinite(c[:32]).all(), f"seed {seed}"


def test_refuses_wrong_arguments(device):
    args = inputs(1, [[-1, 0]], device)
    with pytest.raises(ValueError, match="block"):
        run(args, [[-1, 0]], device, 64)
    with pytest.raises(ValueError, match="precision"):
        run(args, [[-1, 0]], device, 16, precision="fp16")
    with pytest.raises(ValueError, match="beta"):
        run((args[0], args[1], args[2].double(), args[3]), [[-1, 0]], device, 16)
