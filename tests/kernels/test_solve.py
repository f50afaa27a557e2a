"""tree_factors + tree_solve against the serial recurrence in fp64, and the exactness properties that closeness cannot see."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.conv import NodeInputs
from bole_vllm.kernels.factors import tree_factors
from bole_vllm.kernels.factors.naive import tree_factors as naive_factors
from bole_vllm.kernels.precision import MODES
from bole_vllm.kernels.solve import NODE_BLOCK, parallel_solve, tree_solve
from bole_vllm.kernels.solve.naive import tree_recurrence
from bole_vllm.kernels.solve.naive import tree_solve as naive_solve

# largest error over the largest magnitude; fp32 and tf32x3 dots leave 1e-7 to 1e-5 here, tf32 1e-3
BOUND = 2e-5


@dataclass
class Problem:
    """Inputs of one layer over a forest; node arrays are [capacity, ...], request r owns slot r + 1. q, k, v: activations."""

    trees: list[list[int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    max_nodes: int
    token_gap: int = 2

    ARRAYS = ("q", "k", "v", "q_scale", "k_scale", "g", "beta")

    @property
    def p(self) -> torch.Tensor:
        """Log decay summed over every node's path by depth; NaN behind the last node."""
        p = torch.full_like(self.g, float("nan"))
        for tree, first in zip(self.trees, self.offsets, strict=False):
            for i in range(len(tree)):
                p[first + i] = self.g[[first + j for j in path_to(tree, i)]].sum(0)
        return p

    @property
    def offsets(self) -> list[int]:
        starts = [0]
        for tree in self.trees:
            starts.append(starts[-1] + len(tree))
        return starts

    @property
    def inputs(self) -> NodeInputs:
        return NodeInputs(**{name: getattr(self, name) for name in self.ARRAYS}, p=self.p)

    @property
    def unit_k(self) -> torch.Tensor:
        """Normalised keys, fp64."""
        return self.k.double() * self.k_scale.double()[..., None]

    @property
    def unit_q(self) -> torch.Tensor:
        """Normalised and scaled queries, fp64."""
        return self.q.double() * self.q_scale.double()[..., None]

    def part(self, nodes: list[int], trees: list[list[int]]) -> Problem:
        """These nodes alone, as other trees."""
        arrays = {name: getattr(self, name)[nodes] for name in self.ARRAYS}
        return Problem(trees=trees, state=self.state, max_nodes=max(len(t) for t in trees), **arrays)

    def buffers(self, forest, out_dtype=torch.float32):
        """Poisoned z, y, out by token row, u, r."""
        (capacity, heads, dim), device = self.v.shape, self.k.device
        rows = sum(self.token_gap + max(1, len(t)) for t in self.trees) + 3

        def poisoned(*shape, dtype=torch.float32):
            return torch.full(shape, float("nan"), dtype=dtype, device=device)

        z, y = (poisoned(capacity, heads, forest.path.shape[1]) for _ in range(2))
        u, r = (poisoned(capacity, heads, dim) for _ in range(2))
        return z, y, poisoned(rows, heads, dim, dtype=out_dtype), u, r

    def solve(self, precision="fp32", out_dtype=torch.float32, storage="vk", with_u=True):
        """Runs both kernels on poisoned outputs: outputs by token row, U, the forest."""
        device = self.k.device
        forest = make_forest(self.trees, device, max_nodes=self.max_nodes, token_gap=self.token_gap)
        z, y, out, u, r = self.buffers(forest, out_dtype)
        slots = torch.arange(1, len(self.trees) + 1, dtype=torch.int32, device=device)
        state = self.state if storage == "kv" else self.state.transpose(-1, -2).contiguous().transpose(-1, -2)
        before = state.clone()
        z, used_u = (z, u) if with_u else (None, None)
        tree_factors(self.inputs, forest, z, y)
        tree_solve(self.inputs, z, y, state, slots, forest, out, used_u, r, precision)
        assert torch.equal(state, before), "the solve wrote the state"
        return out, u, forest

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
                arrays = (x[a:b] for x in (self.unit_q, self.unit_k, self.v, self.g, self.beta))
                found.append(tree_recurrence(*arrays, self.state[r + 1], tree))
        return tuple(torch.cat(x) for x in zip(*found, strict=True))


def make_problem(seed, trees, device, hk=1, group=2, dim=64, max_nodes=None, dtype=torch.bfloat16, decay=1.0, capacity=None) -> Problem:
    gen = torch.Generator().manual_seed(seed)
    hv = hk * group
    nodes = sum(len(t) for t in trees)
    capacity = capacity or nodes + 5

    def normal(*shape):
        return torch.randn(*shape, generator=gen)

    q, k, v = (normal(capacity, heads, dim).to(dtype) for heads in (hk, hk, hv))
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "q_scale": torch.rsqrt(q.float().square().sum(-1) + 1e-6) * dim**-0.5,
        "k_scale": torch.rsqrt(k.float().square().sum(-1) + 1e-6),
        "g": -decay * torch.rand(capacity, hv, generator=gen),
        "beta": torch.sigmoid(normal(capacity, hv)),
        "state": normal(len(trees) + 1, hv, dim, dim),
    }
    for name in Problem.ARRAYS:
        arrays[name][nodes:] = float("nan")
    arrays = {name: x.to(device) for name, x in arrays.items()}
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
    p.g[:nodes], p.beta[:nodes], p.q_scale[:nodes], p.k_scale[:nodes] = 0.0, 1.0, 1.0, 1.0
    return p


def random_trees(seed, sizes, max_depth=8):
    gen = torch.Generator().manual_seed(seed)
    return [random_parents(n, max_depth, gen) if n else [] for n in sizes]


def relative(actual, expected):
    """Largest error over the largest magnitude."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("with_u", [True, False])
@pytest.mark.parametrize("seed,sizes", [(1, (1, 0, 15, 16)), (2, (17, 32)), (3, (33, 0, 64)), (4, (65, 5)), (5, (150,))])
def test_random_forest(seed, sizes, with_u, device):
    """Sizes around the block bounds, requests without nodes, rows beyond the nodes."""
    trees = random_trees(seed, sizes)
    problem = make_problem(seed, trees, device, max_nodes=max(sizes) + 3)
    out, u, forest = problem.solve(with_u=with_u)
    _, want_out, want_u = problem.expected()
    nodes = problem.offsets[-1]
    assert relative(problem.per_node(out, forest), want_out) < BOUND, f"seed {seed}"
    assert not with_u or relative(u[:nodes], want_u) < BOUND, f"seed {seed}"
    assert u[nodes if with_u else 0 :].isnan().all(), "rows beyond the nodes were written"
    written = torch.zeros(out.shape[0], dtype=torch.bool)
    for start, tree in zip(forest.token_start.tolist(), trees, strict=True):
        written[start : start + len(tree)] = True
    assert out[~written.to(device)].isnan().all(), "token rows of no node were written"


@pytest.mark.parametrize("hk,group", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_heads_and_dtypes(hk, group, dtype, device):
    seed = 10 * hk + group
    problem = make_problem(seed, random_trees(seed, (19,)), device, hk, group, dim=128, dtype=dtype)
    out, u, forest = problem.solve(out_dtype=dtype)
    _, want_out, want_u = problem.expected()
    assert relative(u[:19], want_u) < BOUND, f"seed {seed}"
    got = problem.per_node(out, forest)
    if dtype == torch.float32:
        assert relative(got, want_out) < BOUND, f"seed {seed}"
    else:
        # rounding to nearest: half a unit in the last place, not the truncation of the interpreter's cast
        half = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        bound = want_out.abs() * half * 1.02 + 1e-5 * want_out.abs().max()
        assert ((got.double() - want_out).abs() <= bound)[want_out.abs() > 1e-3].all(), f"seed {seed}"


@pytest.mark.parametrize("precision", sorted(MODES))
def test_every_precision(precision, device):
    """Modes keep what they promise: relative error of outputs and U; under the interpreter all are fp32."""
    seed = 15
    problem = make_problem(seed, random_trees(seed, (40,)), device, dim=128)
    out, u, forest = problem.solve(precision)
    _, want_out, want_u = problem.expected()
    bound = {"tf32": 2e-3, "bf16": 2e-2, "bf16x2": 1e-4}.get(precision, BOUND)
    assert relative(problem.per_node(out, forest), want_out) < bound, f"seed {seed}"
    assert relative(u[:40], want_u) < bound, f"seed {seed}"


@pytest.mark.parametrize("storage", ["kv", "vk"])
@pytest.mark.parametrize("precision", ["ieee", "fp32"])
@pytest.mark.parametrize("sizes", [(9, 40), (70,)])
def test_integers_are_exact(storage, precision, sizes, device):
    seed = 20
    problem = integer_problem(seed, random_trees(seed, sizes, max_depth=6), device)
    out, u, forest = problem.solve(precision, storage=storage)
    _, want_out, want_u = problem.expected()
    assert torch.equal(u[: problem.offsets[-1]].double(), want_u), f"seed {seed}"
    assert torch.equal(problem.per_node(out, forest).double(), want_out), f"seed {seed}"


def test_matches_naive_closed_form(device):
    seed = 25
    problem = make_problem(seed, random_trees(seed, (21, 3)), device)
    out, u, forest = problem.solve()
    z, y, want_out, want_u, _ = problem.buffers(forest)
    slots = torch.tensor([1, 2], device=device)
    naive_factors(problem.inputs, forest, z, y)
    naive_solve(problem.inputs, z, y, problem.state, slots, forest, want_out, want_u)
    for got, want in ((out, want_out), (u, want_u)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("value", [float("nan"), 1e4])
@pytest.mark.parametrize("everything", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("size", [40, 80])
def test_non_ancestors_change_no_bit(name, value, everything, size, device):
    """Poison one node, or everything that is not on one leaf's path: nodes without poison above them keep their bits.

    A NaN in q, k or v arrives as `tree_inputs` passes it on: in the scale or the gate.
    """
    seed, last = 30, size - 1
    tree = random_trees(seed, (size,), max_depth=7)[0]
    problem = make_problem(seed, [tree, [-1, 0]], device)
    out, u, forest = problem.solve()
    base = problem.per_node(out, forest), u[: size + 2]
    assert torch.isfinite(base[0]).all() and torch.isfinite(base[1]).all()
    keep = set(path_to(tree, last))
    poisoned = [i for i in range(size) if i not in keep] if everything else [4]
    field = {"q": "q_scale", "k": "k_scale", "v": "beta"}.get(name, name) if math.isnan(value) else name
    getattr(problem, field)[poisoned] = -value if name == "g" else value
    out, u, forest = problem.solve()
    got = problem.per_node(out, forest), u[: size + 2]
    # q reaches its own output only, and U not at all
    reached = [bool(set(path_to(tree, i) if name != "q" else [i]) & set(poisoned)) for i in range(size)] + [False, False]
    clean = torch.tensor([not x for x in reached], device=device)
    assert clean.sum() > 3 and (~clean).any()
    assert torch.equal(got[0][clean], base[0][clean]), f"seed {seed}: outputs changed"
    changed_u = clean if name != "q" else torch.ones_like(clean)
    assert torch.equal(got[1][changed_u], base[1][changed_u]), f"seed {seed}: U changed"
    if math.isnan(value):
        assert got[0][~clean].isnan().all(), f"seed {seed}: a NaN was hidden"
        assert name == "q" or got[1][~clean].isnan().all(), f"seed {seed}: a NaN was hidden"


@pytest.mark.parametrize("depth", [12, 20])
def test_strong_decay(depth, device):
    """Log decay -20 per token on one branch, 0 on its siblings: a ratio of decay products is 0/0 there."""
    tree = [-1, *list(range(depth)), 0, 0, depth - 1, depth - 2]
    seed = 40 + depth
    problem = make_problem(seed, [tree], device)
    n = len(tree)
    problem.g[:n] = -20.0
    problem.g[depth + 1 : n] = torch.tensor([0.0, -1e-3, 0.0, -60.0], device=device)[:, None]
    out, u, forest = problem.solve()
    _, want_out, want_u = problem.expected()
    assert relative(problem.per_node(out, forest), want_out) < BOUND
    assert relative(u[:n], want_u) < BOUND


def cancel(problem: Problem, gen) -> None:
    """Put v of a one-tree problem within 1 % of the readout, so that u is a small difference of large numbers."""
    tree, keys = problem.trees[0], problem.unit_k.repeat_interleave(2, 1)
    states = []
    for i, parent in enumerate(tree):
        s = (problem.state[1] if parent < 0 else states[parent]).double() * torch.exp(problem.g[i].double())[:, None, None]
        readout = torch.einsum("hkv,hk->hv", s, keys[i])
        noise = 1 + 0.01 * (2 * torch.rand(readout.shape, generator=gen).to(readout.device) - 1)
        problem.v[i] = (readout * noise).to(problem.v.dtype)
        u = problem.beta[i].double()[:, None] * (problem.v[i].double() - readout)
        states.append(s + keys[i][:, :, None] * u[:, None, :])


def test_wide_state_and_cancellation(device):
    """State of magnitude 10^U(-3, 2) and v within 1 % of the readout."""
    seed = 50
    tree = random_trees(seed, (24,), max_depth=8)[0]
    problem = make_problem(seed, [tree], device, dim=128, decay=0.05)
    gen = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (torch.rand(problem.state.shape, generator=gen) * 5 - 3)
    problem.state *= scale.to(device)
    cancel(problem, gen)
    out, u, forest = problem.solve()
    _, want_out, want_u = problem.expected()
    assert relative(u[: len(tree)], want_u) < 1e-4, f"seed {seed}"
    assert relative(problem.per_node(out, forest), want_out) < BOUND, f"seed {seed}"


def test_path_equality(device):
    """A node in the tree equals the end of its path alone."""
    seed = 60
    tree = random_trees(seed, (37,), max_depth=6)[0]
    for exact in (False, True):
        problem = integer_problem(seed, [tree], device) if exact else make_problem(seed, [tree], device)
        out, _, forest = problem.solve(precision="ieee")
        got = problem.per_node(out, forest)
        for leaf in (36, 35, 20):
            path = path_to(tree, leaf)
            alone = problem.part(path, [[-1, *list(range(len(path) - 1))]])
            out, _, chain = alone.solve(precision="ieee")
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
        out, _, forest = problem.solve(precision="ieee")
        got = problem.per_node(out, forest)[order]
        other = problem.part(order, [renumbered])
        out, _, forest = other.solve(precision="ieee")
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
    problem.k[:32], problem.k_scale[:32] = problem.k[0].clone(), problem.k_scale[0].clone()
    problem.g[:32], problem.beta[:32] = 0.0, 1.0
    _, u, _ = problem.solve()
    assert relative(u[:32], problem.expected()[2]) < BOUND


def test_chain_against_flash_linear_attention(device):
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    seed = 90
    problem = make_problem(seed, [[-1, *list(range(19))]], device, hk=2, group=1)
    out, _, forest = problem.solve()
    q, k, v, g, beta = (x[None, :20].float() for x in (problem.unit_q, problem.unit_k, problem.v, problem.g, problem.beta))
    want, _ = naive.naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale=1.0, initial_state=problem.state[1][None])
    torch.testing.assert_close(problem.per_node(out, forest), want[0], rtol=1e-4, atol=1e-5)


def test_alternating_topologies(device):
    """One set of buffers, other trees every time (replayed from one captured graph on a GPU): each result is that of fresh buffers."""
    seed = 95
    shapes = [random_trees(seed + i, (13, 30)) for i in range(3)]
    problem = make_problem(seed, shapes[0], device, dim=64)
    forest = make_forest(shapes[0], device, max_nodes=32, max_depth=8, token_gap=2)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    z, y, out, u, r = problem.buffers(forest)
    inputs = problem.inputs

    def step():
        tree_factors(inputs, forest, z, y)
        tree_solve(inputs, z, y, problem.state, slots, forest, out, u, r)

    step()
    graph = None
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for trees in (*shapes[1:], shapes[0], shapes[2]):
        other = make_forest(trees, device, max_nodes=32, max_depth=8, token_gap=2)
        for name in ("node_offset", "token_start", "parent", "depth", "ancestors", "request", "path", "conv_source"):
            getattr(forest, name).copy_(getattr(other, name))
        problem.trees = trees
        inputs.p.copy_(problem.p)
        step() if graph is None else graph.replay()
        fresh, _, _ = problem.solve()
        assert torch.equal(problem.per_node(out, forest), problem.per_node(fresh, forest)), f"seed {seed}"


def test_refuses_wrong_arguments(device):
    problem = make_problem(1, [[-1, 0]], device)
    with pytest.raises(ValueError, match="precision"):
        problem.solve(precision="fp8")
    forest = make_forest([[-1, 0]], device, max_nodes=NODE_BLOCK + 1)
    z, y, out, u, _ = problem.buffers(forest)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="scratch_r"):
        tree_solve(problem.inputs, z, y, problem.state, slots, forest, out, u)
    with pytest.raises(ValueError, match="belong together"):
        tree_solve(problem.inputs, None, y, problem.state, slots, forest, out, u)
    problem.v = problem.v.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        problem.solve()


@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_tiles_per_program_change_no_bit(tiles, device, monkeypatch, dots_free_of_shape):
    """A program of the small kernel may take several tiles, reading ahead; what it computes of each is the same."""
    seed = 77
    problem = make_problem(seed, random_trees(seed, (16, 0, 1, 9), 6), device, group=4)
    want, want_u, forest = problem.solve()
    monkeypatch.setattr(parallel_solve, "_tiles_of_a_program", lambda *_: (tiles, min(tiles, 3)))
    out, u, _ = problem.solve()
    assert torch.equal(problem.per_node(out, forest), problem.per_node(want, forest)), f"seed {seed}"
    nodes = sum(len(tree) for tree in problem.trees)
    assert torch.equal(u[:nodes], want_u[:nodes]), f"seed {seed}"
