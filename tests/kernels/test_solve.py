"""tree_factors + tree_solve against the serial recurrence in fp64, and the exactness properties that closeness cannot see."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.factors import padded_nodes, tree_factors
from bole_vllm.kernels.factors.naive import tree_factors as naive_factors
from bole_vllm.kernels.solve import tree_solve
from bole_vllm.kernels.solve.naive import tree_recurrence
from bole_vllm.kernels.solve.naive import tree_solve as naive_solve

# largest error over the largest magnitude; fp32 and tf32x3 dots leave 1e-7 to 1e-5 here, tf32 1e-3
BOUND = 2e-5


def path_sums(g: torch.Tensor, trees: list[list[int]]) -> torch.Tensor:
    """P: [capacity, HV], each node's log decays summed from the node up to the root, as `tree_gates` does."""
    p, offset = torch.full_like(g, float("nan")), 0
    for parents in trees:
        for i in range(len(parents)):
            total = torch.zeros_like(g[0])
            for j in path_to(parents, i)[::-1]:
                total = total + g[offset + j]
            p[offset + i] = total
        offset += len(parents)
    return p


@dataclass
class Problem:
    """Inputs of one layer over a forest; node arrays are [capacity, ...], request r owns slot r + 1."""

    trees: list[list[int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    max_nodes: int
    token_gap: int = 2

    @property
    def offsets(self) -> list[int]:
        starts = [0]
        for tree in self.trees:
            starts.append(starts[-1] + len(tree))
        return starts

    def solve(self, block=16, precision="tf32x3", out_dtype=torch.float32, storage="vk"):
        """Runs both kernels on poisoned outputs: outputs by token row, U, P, the forest."""
        device = self.k.device
        forest = make_forest(self.trees, device, max_nodes=self.max_nodes, token_gap=self.token_gap)
        capacity, heads, dim = self.v.shape
        p = path_sums(self.g, self.trees)
        factors = torch.full((2, capacity, heads, padded_nodes(self.max_nodes, block)), float("nan"), device=device)
        rows = sum(self.token_gap + max(1, len(t)) for t in self.trees) + 3
        out = torch.full((rows, heads, dim), float("nan"), dtype=out_dtype, device=device)
        u = torch.full((capacity, heads, dim), float("nan"), device=device)
        slots = torch.arange(1, len(self.trees) + 1, dtype=torch.int32, device=device)
        state = self.state if storage == "kv" else self.state.transpose(-1, -2).contiguous().transpose(-1, -2)
        before = state.clone()
        tree_factors(self.k, self.q, self.beta, p, forest, factors[0], factors[1], block, precision)
        tree_solve(self.q, self.k, self.v, self.beta, p, factors[0], factors[1], state, slots, forest, out, u, block, precision)
        assert torch.equal(state, before), "the solve wrote the state"
        return out, u, p, forest

    def per_node(self, out: torch.Tensor, forest) -> torch.Tensor:
        """[nodes, HV, DV] outputs in node order."""
        starts = forest.token_start.tolist()
        return torch.cat([out[s : s + len(t)] for s, t in zip(starts, self.trees, strict=True)])

    def expected(self):
        """States, outputs and corrections of the serial recurrence, [nodes, ...] fp64."""
        found = []
        for r, tree in enumerate(self.trees):
            if tree:
                a, b = self.offsets[r], self.offsets[r + 1]
                arrays = (x[a:b] for x in (self.q, self.k, self.v, self.g, self.beta))
                found.append(tree_recurrence(*arrays, self.state[r + 1], tree))
        return tuple(torch.cat(x) for x in zip(*found, strict=True))


def make_problem(seed, trees, device, hk=1, group=2, dim=64, max_nodes=None, dtype=torch.float32, decay=1.0, capacity=None) -> Problem:
    gen = torch.Generator().manual_seed(seed)
    hv = hk * group
    nodes = sum(len(t) for t in trees)
    capacity = capacity or nodes + 5

    def normal(*shape):
        return torch.randn(*shape, generator=gen)

    def unit(x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    g = -decay * torch.rand(capacity, hv, generator=gen)
    arrays = {
        "q": unit(normal(capacity, hk, dim)) * dim**-0.5,
        "k": unit(normal(capacity, hk, dim)),
        "v": normal(capacity, hv, dim),
        "g": g,
        "beta": torch.sigmoid(normal(capacity, hv)),
        "state": normal(len(trees) + 1, hv, dim, dim),
    }
    for name in ("q", "k", "v", "g", "beta"):
        arrays[name][nodes:] = float("nan")
    arrays = {name: x.to(device) for name, x in arrays.items()}
    arrays["v"] = arrays["v"].to(dtype)
    return Problem(trees=trees, max_nodes=max_nodes or max(1, max(len(t) for t in trees)), **arrays)


def integer_problem(seed, trees, device, hk=1, group=2, dim=64) -> Problem:
    """g = 0, beta = 1, one-hot keys and small integers: every product and sum is an integer far below 2^24."""
    p = make_problem(seed, trees, device, hk, group, dim)
    gen = torch.Generator().manual_seed(seed)
    nodes, capacity = p.offsets[-1], p.k.shape[0]
    p.k[:] = 0
    choice = torch.randint(6, (capacity, hk), generator=gen)
    for i in range(capacity):
        for h in range(hk):
            p.k[i, h, choice[i, h]] = 1.0
    p.q[:] = torch.randint(-2, 3, p.q.shape, generator=gen).to(p.q)
    p.v[:] = torch.randint(-4, 5, p.v.shape, generator=gen).to(p.v)
    p.state[:] = torch.randint(-4, 5, p.state.shape, generator=gen).to(p.state)
    p.g[:nodes], p.beta[:nodes] = 0.0, 1.0
    return p


def random_trees(seed, sizes, max_depth=8):
    gen = torch.Generator().manual_seed(seed)
    return [random_parents(n, max_depth, gen) if n else [] for n in sizes]


def relative(actual, expected):
    """Largest error over the largest magnitude."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("seed,sizes", [(1, (1, 0, 15, 16)), (2, (17, 32)), (3, (33, 0, 64))])
def test_random_forest(seed, sizes, block, device):
    """Sizes around the block bounds, requests without nodes, rows beyond the nodes."""
    trees = random_trees(seed, sizes)
    problem = make_problem(seed, trees, device, max_nodes=max(sizes) + 3)
    out, u, _, forest = problem.solve(block)
    _, want_out, want_u = problem.expected()
    nodes = problem.offsets[-1]
    assert relative(problem.per_node(out, forest), want_out) < BOUND, f"seed {seed}"
    assert relative(u[:nodes], want_u) < BOUND, f"seed {seed}"
    assert u[nodes:].isnan().all(), "rows beyond the nodes were written"
    written = torch.zeros(out.shape[0], dtype=torch.bool)
    for start, tree in zip(forest.token_start.tolist(), trees, strict=True):
        written[start : start + len(tree)] = True
    assert out[~written.to(device)].isnan().all(), "token rows of no node were written"


@pytest.mark.parametrize("hk,group", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_dtypes(hk, group, dtype, device):
    seed = 10 * hk + group
    problem = make_problem(seed, random_trees(seed, (19,)), device, hk, group, dim=128, dtype=dtype)
    out, u, _, forest = problem.solve(out_dtype=dtype)
    _, want_out, want_u = problem.expected()
    assert relative(u[:19], want_u) < BOUND, f"seed {seed}"
    got = problem.per_node(out, forest)
    if dtype == torch.float32:
        assert relative(got, want_out) < BOUND, f"seed {seed}"
    else:
        # rounding to nearest: half a unit in the last place (2^-8 relative), not the truncation of the interpreter's cast
        bound = want_out.abs() * 2.0**-8 * 1.02 + 1e-5 * want_out.abs().max()
        assert ((got.double() - want_out).abs() <= bound)[want_out.abs() > 1e-3].all(), f"seed {seed}"


@pytest.mark.parametrize("storage", ["kv", "vk"])
@pytest.mark.parametrize("block", [16, 32])
def test_integers_are_exact(storage, block, device):
    seed = 20
    problem = integer_problem(seed, random_trees(seed, (9, 40), max_depth=6), device)
    out, u, _, forest = problem.solve(block, precision="ieee", storage=storage)
    _, want_out, want_u = problem.expected()
    assert torch.equal(u[: problem.offsets[-1]].double(), want_u), f"seed {seed}"
    assert torch.equal(problem.per_node(out, forest).double(), want_out), f"seed {seed}"


def test_matches_naive_closed_form(device):
    seed = 25
    problem = make_problem(seed, random_trees(seed, (21, 3)), device)
    out, u, p, forest = problem.solve()
    factors = torch.zeros(2, *problem.beta.shape, padded_nodes(problem.max_nodes, 16), device=device)
    want_out, want_u = torch.full_like(out, float("nan")), torch.full_like(u, float("nan"))
    slots = torch.tensor([1, 2], device=device)
    naive_factors(problem.k, problem.q, problem.beta, p, forest, factors[0], factors[1], 16)
    args = (problem.beta, p, factors[0], factors[1], problem.state, slots, forest, want_out, want_u, 16)
    naive_solve(problem.q, problem.k, problem.v, *args)
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(u, want_u, rtol=1e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("everything", [False, True], ids=["one", "all"])
def test_non_ancestors_change_no_bit(name, value, everything, device):
    """Poison one node, or everything that is not on one leaf's path: nodes without poison above them keep their bits."""
    seed = 30
    tree = random_trees(seed, (40,), max_depth=7)[0]
    problem = make_problem(seed, [tree, [-1, 0]], device)
    out, u, _, forest = problem.solve()
    base = problem.per_node(out, forest), u[:42]
    assert torch.isfinite(base[0]).all() and torch.isfinite(base[1]).all()
    keep = set(path_to(tree, 39))
    poisoned = [i for i in range(40) if i not in keep] if everything else [4]
    if name == "g" and value > 0:
        value = -value
    getattr(problem, name)[poisoned] = value
    out, u, _, forest = problem.solve()
    got = problem.per_node(out, forest), u[:42]
    # q reaches its own output only, and U not at all
    reached = [bool(set(path_to(tree, i) if name != "q" else [i]) & set(poisoned)) for i in range(40)] + [False, False]
    clean = torch.tensor([not x for x in reached], device=device)
    assert clean.sum() > 3 and (~clean).any()
    assert torch.equal(got[0][clean], base[0][clean]), f"seed {seed}: outputs changed"
    changed_u = clean if name != "q" else torch.ones_like(clean)
    assert torch.equal(got[1][changed_u], base[1][changed_u]), f"seed {seed}: U changed"
    if math.isnan(value):
        assert got[0][~clean].isnan().all(), f"seed {seed}: a NaN was hidden"
        assert name == "q" or got[1][~clean].isnan().all(), f"seed {seed}: a NaN was hidden"


def test_nan_value_stays_in_its_column(device):
    seed = 33
    tree = random_trees(seed, (34,))[0]
    problem = make_problem(seed, [tree], device)
    out, _, _, forest = problem.solve()
    base = problem.per_node(out, forest)
    problem.v[3, 1, 7] = float("nan")
    out, _, _, forest = problem.solve()
    got = problem.per_node(out, forest)
    below = torch.tensor([3 in path_to(tree, i) for i in range(34)], device=device)
    assert got[below, 1, 7].isnan().all()
    got[below, 1, 7] = base[below, 1, 7]
    assert torch.equal(got, base), f"seed {seed}"


@pytest.mark.parametrize("depth", [12, 20])
def test_strong_decay(depth, device):
    """Log decay -20 per token on one branch, 0 on its siblings: a ratio of decay products is 0/0 there."""
    tree = [-1, *list(range(depth)), 0, 0, depth - 1, depth - 2]
    seed = 40 + depth
    problem = make_problem(seed, [tree], device)
    n = len(tree)
    problem.g[:n] = -20.0
    problem.g[depth + 1 : n] = torch.tensor([0.0, -1e-3, 0.0, -60.0], device=device)[:, None]
    out, u, _, forest = problem.solve()
    _, want_out, want_u = problem.expected()
    assert relative(problem.per_node(out, forest), want_out) < BOUND
    assert relative(u[:n], want_u) < BOUND


def test_wide_state_and_cancellation(device):
    """State of magnitude 10^U(-3, 2) and v within 1 % of the readout: u is a small difference of large numbers."""
    seed = 50
    tree = random_trees(seed, (24,), max_depth=8)[0]
    problem = make_problem(seed, [tree], device, dim=128, decay=0.05)
    gen = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (torch.rand(problem.state.shape, generator=gen) * 5 - 3)
    problem.state *= scale.to(device)
    states = [None] * len(tree)
    for i, parent in enumerate(tree):
        s = (problem.state[1] if parent < 0 else states[parent]).double() * torch.exp(problem.g[i].double())[:, None, None]
        readout = torch.einsum("hkv,hk->hv", s, problem.k[i].double().repeat_interleave(2, 0))
        noise = 1 + 0.01 * (2 * torch.rand(readout.shape, generator=gen).to(device) - 1)
        problem.v[i] = (readout * noise).float()
        u = problem.beta[i].double()[:, None] * (problem.v[i].double() - readout)
        states[i] = s + problem.k[i].double().repeat_interleave(2, 0)[:, :, None] * u[:, None, :]
    out, u, _, forest = problem.solve()
    _, want_out, want_u = problem.expected()
    assert relative(u[: len(tree)], want_u) < 1e-4, f"seed {seed}"
    assert relative(problem.per_node(out, forest), want_out) < BOUND, f"seed {seed}"


def test_path_equality(device):
    """A node in the tree equals the end of its path alone."""
    seed = 60
    tree = random_trees(seed, (37,), max_depth=6)[0]
    for exact in (False, True):
        problem = integer_problem(seed, [tree], device) if exact else make_problem(seed, [tree], device)
        out, _, _, forest = problem.solve(precision="ieee")
        got = problem.per_node(out, forest)
        for leaf in (36, 35, 20):
            path = path_to(tree, leaf)
            arrays = {name: getattr(problem, name)[path] for name in ("q", "k", "v", "g", "beta")}
            alone = Problem(trees=[[-1, *list(range(len(path) - 1))]], state=problem.state, max_nodes=len(path), **arrays)
            out, _, _, chain = alone.solve(precision="ieee")
            end = alone.per_node(out, chain)[-1]
            if exact:
                assert torch.equal(end, got[leaf]), f"seed {seed} leaf {leaf}"
            else:
                torch.testing.assert_close(end, got[leaf], rtol=1e-5, atol=1e-5 * float(end.abs().max()))


def test_sibling_permutation(device):
    """Renumbering a tree (parents still before children) renumbers its outputs."""
    seed = 70
    tree = random_trees(seed, (34,), max_depth=5)[0]
    depths = [len(path_to(tree, i)) for i in range(34)]
    order = sorted(range(34), key=lambda i: (depths[i], -i))
    place = {node: i for i, node in enumerate(order)}
    renumbered = [-1 if tree[node] < 0 else place[tree[node]] for node in order]
    for exact in (False, True):
        problem = integer_problem(seed, [tree], device) if exact else make_problem(seed, [tree], device)
        out, _, _, forest = problem.solve(precision="ieee")
        got = problem.per_node(out, forest)[order]
        arrays = {name: getattr(problem, name)[order] for name in ("q", "k", "v", "g", "beta")}
        other = Problem(trees=[renumbered], state=problem.state, max_nodes=34, **arrays)
        out, _, _, forest = other.solve(precision="ieee")
        moved = other.per_node(out, forest)
        if exact:
            assert torch.equal(moved, got), f"seed {seed}"
        else:
            torch.testing.assert_close(moved, got, rtol=1e-5, atol=1e-5 * float(got.abs().max()))


def test_repeated_keys_in_a_chain(device):
    """Equal keys, beta 1, no decay: powers of G hold binomials up to C(30, 15), the inverse only -1, 0 and 1."""
    seed = 80
    tree = [-1, *list(range(31))]
    problem = make_problem(seed, [tree], device)
    problem.k[:32] = problem.k[0]
    problem.g[:32], problem.beta[:32] = 0.0, 1.0
    for block in (16, 32):
        _, u, _, _ = problem.solve(block)
        assert relative(u[:32], problem.expected()[2]) < BOUND, f"block {block}"


def test_chain_against_flash_linear_attention(device):
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    seed = 90
    problem = make_problem(seed, [[-1, *list(range(19))]], device, hk=2, group=1)
    out, _, _, forest = problem.solve()
    q, k, v, g, beta = (getattr(problem, x)[None, :20] for x in ("q", "k", "v", "g", "beta"))
    want, _ = naive.naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale=1.0, initial_state=problem.state[1][None])
    torch.testing.assert_close(problem.per_node(out, forest), want[0], rtol=1e-4, atol=1e-5)


def test_refuses_wrong_arguments(device):
    problem = make_problem(1, [[-1, 0]], device)
    with pytest.raises(ValueError, match="precision"):
        problem.solve(precision="fp8")
    with pytest.raises(ValueError, match="block"):
        problem.solve(block=8)
    problem.v = problem.v.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        problem.solve()
