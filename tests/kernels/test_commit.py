"""commit_factor and commit_replay against the serial states, and the conv window, over several layers and KV-cache groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from conftest import make_forest, path_to, random_parents
from test_solve import BOUND, cancel, integer_problem, make_problem, relative

from bole_vllm.kernels.commit import LayerTable, ReplayWork, commit_factor, commit_replay, commit_snapshot
from bole_vllm.kernels.commit.naive import commit_factor as naive_factor
from bole_vllm.kernels.commit.naive import commit_replay as naive_replay
from bole_vllm.kernels.commit.naive import commit_snapshot as naive_snapshot
from bole_vllm.kernels.conv import NodeInputs, tree_inputs
from bole_vllm.kernels.solve.naive import tree_recurrence


@dataclass
class Caches:
    """Caches of L layers with the factors of one round; ssm [slots, HV, DK, DV] and conv [slots, C, 3] per layer."""

    ssm: list[torch.Tensor]
    conv: list[torch.Tensor]
    groups: list[int]
    weights: list[torch.Tensor]
    biases: list[torch.Tensor] | None
    g: torch.Tensor
    beta: torch.Tensor
    p: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    u: torch.Tensor
    x: torch.Tensor
    trees: list[list[int]]

    @property
    def table(self) -> LayerTable:
        return LayerTable.build(self.ssm, self.conv, self.groups, self.weights, self.biases)

    def copy(self) -> Caches:
        return replace(self, ssm=[preserve(s) for s in self.ssm], conv=[preserve(c) for c in self.conv])

    def factor(self, forest, *path_args, **options):
        commit_factor(self.table, self.p, self.k, self.k_scale, self.u, self.x, forest, *path_args, **options)

    def naive_factor(self, forest, *path_args):
        naive_factor(self.ssm, self.conv, self.groups, self.p, self.k, self.k_scale, self.u, self.x, forest, *path_args)

    def replay(self, forest, *path_args):
        commit_replay(self.table, self.g, self.beta, self.x, forest, *path_args, round_products=False)

    @property
    def snapshots(self) -> torch.Tensor:
        """[L, capacity, HV, DV, DK] fp32, some state after every node."""
        _, heads, dim_k, dim_v = self.ssm[0].shape
        gen = torch.Generator().manual_seed(self.x.shape[1])
        return torch.randn(len(self.ssm), self.x.shape[1], heads, dim_v, dim_k, generator=gen).to(self.x.device)

    def snapshot(self, forest, *path_args):
        commit_snapshot(self.table, self.snapshots, self.x, forest, *path_args)

    def naive_snapshot(self, forest, *path_args):
        naive_snapshot(self.ssm, self.conv, self.groups, self.snapshots, self.x, forest, *path_args)

    def naive_replay(self, forest, *path_args):
        args = (self.ssm, self.conv, self.groups, self.weights, self.biases, self.g, self.beta, self.x)
        naive_replay(*args, forest, *path_args)


def preserve(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def make_caches(
    seed, trees, device, layers=1, hk=1, group=2, dim=64, storage="vk", dtype=torch.float32, groups=None, bias=False, slots=9
) -> Caches:
    gen = torch.Generator().manual_seed(seed)
    hv = hk * group
    channels = (2 * hk + hv) * dim
    capacity = sum(len(t) for t in trees) + 3

    def normal(*shape, to=torch.float32):
        return torch.randn(*shape, generator=gen).to(device=device, dtype=to)

    def ssm():
        s = normal(slots, hv, dim, dim)
        return s if storage == "kv" else s.transpose(-1, -2)

    def conv():
        # channels innermost, with a gap between slots as in a paged cache; or columns innermost
        return normal(slots, channels, 3, to=dtype) if storage == "kv" else normal(slots, 4, channels, to=dtype)[:, :3].transpose(-1, -2)

    g = -torch.rand(layers, capacity, hv, generator=gen).to(device)
    p = torch.full_like(g, float("nan"))
    offset = 0
    for tree in trees:
        for i in range(len(tree)):
            p[:, offset + i] = g[:, [offset + j for j in path_to(tree, i)]].sum(1)
        offset += len(tree)
    k = normal(layers, capacity, hk, dim, to=dtype)
    return Caches(
        ssm=[ssm() for _ in range(layers)],
        conv=[conv() for _ in range(layers)],
        groups=groups or [0] * layers,
        weights=[normal(channels, 4, to=dtype) for _ in range(layers)],
        biases=[normal(channels, to=dtype) for _ in range(layers)] if bias else None,
        g=g,
        beta=torch.sigmoid(normal(layers, capacity, hv)),
        p=p,
        k=k,
        k_scale=torch.rsqrt(k.float().square().sum(-1) + 1e-6),
        u=normal(layers, capacity, hv, dim),
        x=normal(layers, capacity, channels, to=dtype),
        trees=trees,
    )


def path_tensors(paths, src, dst, length, device, width=None):
    """path [R, Dp] (stale entries beyond the length are far out of range), path_len, src_slot, dst_slot, dst_len."""
    width = width or max(1, max(len(p) for p in paths))
    path = torch.full((len(paths), width), 10**6, dtype=torch.int32)
    for r, p in enumerate(paths):
        path[r, : len(p)] = torch.tensor(p, dtype=torch.int32)
    tensors = (path, torch.tensor([len(p) for p in paths]), torch.tensor(src), torch.tensor(dst), torch.tensor(length))
    return tuple(t.to(device=device, dtype=torch.int32) for t in tensors)


def assert_same(got: Caches, want: Caches, bound=BOUND, written=None, message=""):
    """States close in relative terms, conv states bit for bit; slots not in `written` (per group) unchanged bit for bit."""
    for layer, (a, b) in enumerate(zip(got.ssm, want.ssm, strict=True)):
        for slot in range(a.shape[0]):
            where = f"{message} layer {layer} slot {slot}"
            if written is None or slot in written[got.groups[layer]]:
                assert relative(a[slot], b[slot].double()) < bound, where
            else:
                assert torch.equal(a[slot], b[slot]), where
    for a, b in zip(got.conv, want.conv, strict=True):
        assert torch.equal(a, b), message


@pytest.mark.parametrize("kind", ["factor", "replay", "snapshot"])
@pytest.mark.parametrize("storage", ["kv", "vk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_groups_and_destinations(kind, storage, dtype, device):
    """In place, out of place, two destinations, null slots, nothing to commit, two groups with other slots."""
    seed = 100
    trees = [[-1, 0, 0, 1, 3, 3, 4], [-1, 0, 0], [], [-1, 0, 1, 1, 2, 4, 5, 5, 6], [-1, 0], [-1, 0]]
    caches = make_caches(seed, trees, device, layers=3, storage=storage, dtype=dtype, groups=[0, 1, 0], bias=storage == "kv")
    paths = [path_to(trees[0], 6), [0], [], path_to(trees[3], 8), [], path_to(trees[5], 1)]
    n0, n3 = len(paths[0]), len(paths[3])
    src = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]
    # request 0 in place, 1 out of place, 3 in place with a shorter second state, 4 has no path, 5 aims at the null slot
    dst = [[[1, 0], [7, 0], [3, 0], [4, 8], [5, 0], [0, 6]], [[6, 0], [8, 0], [4, 0], [7, 3], [2, 0], [0, 0]]]
    length = [[n0, 0], [1, 0], [0, 0], [n3, n3 - 1], [3, 0], [1, 1]]
    args = path_tensors(paths, src, dst, length, device)
    forest = make_forest(trees, device, token_gap=1)
    want = caches.copy()
    before = caches.copy()
    getattr(want, f"naive_{kind}")(forest, *args)
    getattr(caches, kind)(forest, *args)
    written = {0: {1, 7, 4, 8, 6}, 1: {6, 8, 7, 3}}
    assert_same(caches, want, written=written, message=f"seed {seed}")
    for layer, group in enumerate(caches.groups):
        for slot in range(9):
            changed = not torch.equal(caches.ssm[layer][slot], before.ssm[layer][slot])
            conv_changed = not torch.equal(caches.conv[layer][slot], before.conv[layer][slot])
            assert changed == conv_changed == (slot in written[group]), f"layer {layer} slot {slot}"


@pytest.mark.parametrize("length", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("in_place", [True, False])
def test_conv_window(length, in_place, device):
    """Path lengths below, at and above the width; integers, so every column can be told apart."""
    tree = [-1, *list(range(5)), 0, 1]
    caches = make_caches(1, [tree], device, dtype=torch.bfloat16)
    caches.x[0, :8] = torch.arange(8, device=device)[:, None]
    caches.conv[0][:] = torch.tensor([-3.0, -2.0, -1.0], device=device)
    dst = 1 if in_place else 5
    args = path_tensors([list(range(length))], [[1]], [[[dst, 0]]], [[length, 0]], device, width=9)
    caches.factor(make_forest([tree], device), *args)
    want = torch.tensor([-3.0, -2.0, -1.0, *range(length)])[-3:]
    assert torch.equal(caches.conv[0][dst].float().cpu(), want.expand(caches.conv[0].shape[1], 3))


@pytest.mark.parametrize("exact", [True, False], ids=["integers", "random"])
def test_every_leaf_in_turn(exact, device):
    """Solve a tree, then commit the path of each node that has no child: the state is that of the serial recurrence there."""
    seed = 110
    tree = random_parents(20, 6, torch.Generator().manual_seed(seed))
    problem = (integer_problem if exact else make_problem)(seed, [tree], device)
    _, u, forest = problem.solve(precision="ieee")
    p = problem.p
    states, _, _ = problem.expected()
    leaves = [i for i in range(20) if i not in tree]
    assert len(leaves) > 4
    caches = make_caches(seed, [tree], device, dtype=torch.bfloat16)
    for leaf in leaves:
        path = path_to(tree, leaf)
        state = problem.state.clone()
        layers = LayerTable.build([state], caches.conv, [0])
        args = path_tensors([path], [[1]], [[[1, 0]]], [[len(path), 0]], device)
        capacity = u.shape[0]
        x = torch.zeros(1, capacity, layers.num_channels, device=device, dtype=torch.bfloat16)
        commit_factor(layers, p[None], problem.k[None], problem.k_scale[None], u[None], x, forest, *args)
        if exact:
            assert torch.equal(state[1].double(), states[leaf]), f"seed {seed} leaf {leaf}"
        else:
            assert relative(state[1], states[leaf]) < BOUND, f"seed {seed} leaf {leaf}"
        assert torch.equal(state[0], problem.state[0])


def test_long_path_crosses_tiles(device):
    """Paths longer than one product's 16 tokens, with strong decay on the way."""
    seed = 120
    tree = [-1, *list(range(39))]
    caches = make_caches(seed, [tree], device)
    caches.g[:, :40] = -0.01
    caches.g[:, 20] = -25.0
    caches.p[:, :40] = caches.g[:, :40].cumsum(1)
    args = path_tensors([list(range(40))], [[1]], [[[2, 3]]], [[40, 17]], device)
    forest = make_forest([tree], device)
    want = caches.copy()
    want.naive_factor(forest, *args)
    caches.factor(forest, *args)
    assert_same(caches, want, message=f"seed {seed}")


def test_only_the_path_is_read(device):
    """NaN in every node off the path, and in every slot that is not the source, changes no bit; NaN on the path does arrive."""
    seed = 130
    tree = random_parents(18, 5, torch.Generator().manual_seed(seed))
    path = path_to(tree, 17)
    args = path_tensors([path], [[1]], [[[2, 0]]], [[len(path), 0]], device)
    forest = make_forest([tree], device)
    clean = make_caches(seed, [tree], device)
    for kind in ("factor", "replay"):
        base, poisoned, on_path = clean.copy(), clean.copy(), clean.copy()
        off = [i for i in range(clean.x.shape[1]) if i not in path]
        for name in ("p", "k", "k_scale", "u", "x", "g", "beta"):
            setattr(poisoned, name, getattr(clean, name).clone())
            setattr(on_path, name, getattr(clean, name).clone())
            getattr(poisoned, name)[:, off] = float("nan")
            getattr(on_path, name)[:, path[1]] = float("nan")
        poisoned.ssm[0][2:], poisoned.conv[0][2:] = float("nan"), float("nan")
        for caches in (base, poisoned, on_path):
            getattr(caches, kind)(forest, *args)
        assert torch.equal(base.ssm[0][2], poisoned.ssm[0][2]) and torch.equal(base.conv[0][2], poisoned.conv[0][2]), kind
        assert on_path.ssm[0][2].isnan().all(), kind


def test_wide_state_over_many_rounds(device):
    """Eight rounds of solve and commit with state 10^U(-3, 2) and v within 1 % of the readout stay with the fp64 recurrence."""
    seed = 140
    gen = torch.Generator().manual_seed(seed)
    state = torch.randn(2, 2, 128, 128, generator=gen) * 10.0 ** (torch.rand(2, 2, 128, 128, generator=gen) * 5 - 3)
    state = state.to(device)
    want = state[1].double()
    caches = make_caches(seed, [[-1]], device, dim=128, slots=2, dtype=torch.bfloat16)
    for step in range(8):
        tree = random_parents(10, 5, gen)
        problem = make_problem(seed + step, [tree], device, dim=128, decay=0.02)
        problem.state = torch.stack([want, want])
        cancel(problem, gen)
        want = problem.expected()[0][9]
        problem.state = state
        _, u, _ = problem.solve(storage="kv")
        p = problem.p
        path = path_to(tree, 9)
        layers = LayerTable.build([state], caches.conv, [0])
        args = path_tensors([path], [[1]], [[[1, 0]]], [[len(path), 0]], device)
        x = torch.zeros(1, u.shape[0], layers.num_channels, device=device, dtype=torch.bfloat16)
        commit_factor(layers, p[None], problem.k[None], problem.k_scale[None], u[None], x, make_forest([tree], device), *args)
        assert relative(state[1], want) < 1e-5, f"seed {seed} step {step}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_is_decoding_the_path(dtype, device):
    """The replay computes k and v as the tree's convolution does, and leaves the state of the recurrence over them."""
    seed = 150
    tree = random_parents(14, 6, torch.Generator().manual_seed(seed))
    path = path_to(tree, 13)
    caches = make_caches(seed, [tree], device, hk=2, group=2, dtype=dtype)
    forest = make_forest([tree], device)
    out = NodeInputs.allocate(14, 2, 64, 4, 64, dtype, device)
    slot = torch.tensor([1], dtype=torch.int32, device=device)
    x, gates = caches.x[0, :14], torch.zeros(14, 4, device=device)
    layer = (caches.weights[0], None, gates[0], gates[0], caches.conv[0], slot)
    tree_inputs(x, gates, gates, *layer, forest, out, round_products=False)
    q, k = out.q * out.q_scale[..., None], out.k * out.k_scale[..., None]
    states, _, _ = tree_recurrence(q, k, out.v, caches.g[0, :14], caches.beta[0, :14], caches.ssm[0][1], tree)
    caches.replay(forest, *path_tensors([path], [[1]], [[[1, 3]]], [[len(path), 1]], device))
    assert relative(caches.ssm[0][1], states[13]) < 1e-6, f"seed {seed}"
    assert relative(caches.ssm[0][3], states[0]) < 1e-6, f"seed {seed}"


def test_table_refuses_layers_that_differ(device):
    caches = make_caches(1, [[-1]], device, layers=2)
    with pytest.raises(ValueError, match=r"ssm_states\[1\]"):
        LayerTable.build([caches.ssm[0], caches.ssm[1].contiguous()], caches.conv, [0, 0])
    with pytest.raises(ValueError, match="groups"):
        LayerTable.build(caches.ssm, caches.conv, [0])
    with pytest.raises(ValueError, match="channels"):
        LayerTable.build(caches.ssm, [c[:, :100] for c in caches.conv], [0, 0])


def test_refuses_wrong_arguments(device):
    caches = make_caches(1, [[-1, 0]], device, layers=2, groups=[0, 1])
    forest = make_forest([[-1, 0]], device)
    one_group = path_tensors([[0]], [[1]], [[[1, 0]]], [[1, 0]], device)
    with pytest.raises(ValueError, match="groups"):
        caches.factor(forest, *one_group)
    args = path_tensors([[0]], [[1], [1]], [[[1, 0]], [[1, 0]]], [[1, 0]], device)
    with pytest.raises(ValueError, match="u:"):
        replace(caches, u=caches.u.double()).factor(forest, *args)
    with pytest.raises(ValueError, match="x:"):
        replace(caches, x=caches.x.bfloat16()).factor(forest, *args)
    table = LayerTable.build(caches.ssm, caches.conv, caches.groups)
    with pytest.raises(ValueError, match="weights"):
        commit_replay(table, caches.g, caches.beta, caches.x, forest, *args)


def test_empty_problem_writes_nothing(device):
    """All requests without a path: stale lengths and slots are not used."""
    caches = make_caches(2, [[], []], device)
    before = caches.copy()
    args = path_tensors([[], []], [[1, 2]], [[[1, 3], [2, 4]]], [[2, 1], [1, 1]], device, width=4)
    for kind in ("factor", "replay"):
        getattr(caches, kind)(make_forest([[], []], device, max_nodes=4), *args)
        assert_same(caches, before, bound=0 + 1e-300)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_replay_in_parts_changes_no_bit(at_once, device):
    """A work area for fewer requests than there are: more launches, the same states."""
    seed = 190
    gen = torch.Generator().manual_seed(seed)
    trees = [random_parents(n, 4, gen) for n in (5, 1, 9, 3, 7)]
    paths = [path_to(tree, len(tree) - 1) for tree in trees]
    slots = [[r + 1 for r in range(5)]]
    args = path_tensors(paths, slots, [[[slot, 0] for slot in slots[0]]], [[len(path), 0] for path in paths], device)
    forest, caches = make_forest(trees, device), make_caches(seed, trees, device, layers=2)
    want = caches.copy()
    want.replay(forest, *args)
    work = ReplayWork.allocate(2, at_once, args[0].shape[1], 1, 64, 2, 64, caches.x.dtype, device)
    commit_replay(caches.table, caches.g, caches.beta, caches.x, forest, *args, work=work, round_products=False)
    assert all(torch.equal(a, b) for a, b in zip(caches.ssm + caches.conv, want.ssm + want.conv, strict=True)), f"seed {seed}"
