"""The verify core as a layer runs it, tree_inputs -> tree_factors -> tree_solve: what must hold across the three."""

from __future__ import annotations

import pytest
import torch
from conftest import make_forest, path_to, random_parents
from test_conv import Dims, Inputs, make_inputs, num_rows_of

from bole_vllm.kernels.conv import NodeInputs, tree_inputs
from bole_vllm.kernels.factors import tree_factors
from bole_vllm.kernels.solve import tree_solve
from bole_vllm.kernels.solve.naive import tree_recurrence

DIMS = Dims(1, 2, 32, 32)


def run_core(inputs: Inputs, dims: Dims, forest, state: torch.Tensor, with_u: bool = True, precision: str = "fp32"):
    """Outputs by token row, U and the node inputs; state [slots, HV, DK, DV]."""
    device, capacity = inputs.x.device, forest.capacity
    nodes = NodeInputs.allocate(capacity, dims.HK, dims.DK, dims.HV, dims.DV, inputs.x.dtype, device)
    layer = (inputs.weight, inputs.bias, inputs.A_log, inputs.dt_bias)
    tree_inputs(inputs.x, inputs.a, inputs.b, *layer, inputs.state, inputs.slot, forest, nodes)
    z, y = torch.zeros(2, capacity, dims.HV, forest.path.shape[1], device=device)
    u, r = torch.zeros(2, capacity, dims.HV, dims.DV, device=device)
    out = torch.zeros(inputs.x.shape[0], dims.HV, dims.DV, device=device)
    z, u = (z, u) if with_u else (None, None)
    tree_factors(nodes, forest, z, y)
    tree_solve(nodes, z, y, state, inputs.slot, forest, out, u, r, precision)
    return out, u, nodes


def problem(seed: int, trees, device, dtype=torch.bfloat16):
    forest = make_forest(trees, device, token_gap=1)
    inputs = make_inputs(DIMS, num_rows_of(trees, 1), len(trees), seed, device, dtype)
    state = torch.randn(len(trees) + 3, DIMS.HV, DIMS.DK, DIMS.DV, generator=torch.Generator().manual_seed(seed)).to(device)
    return forest, inputs, state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_against_the_recurrence(seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    trees = [random_parents(20, 7, generator), [], random_parents(9, 4, generator)]
    forest, inputs, state = problem(seed, trees, device, dtype)
    out, u, nodes = run_core(inputs, DIMS, forest, state)
    first = 0
    for r, tree in enumerate(trees):
        if not tree:
            continue
        rows = slice(first, first + len(tree))
        unit_q, unit_k = nodes.q.double() * nodes.q_scale.double()[..., None], nodes.k.double() * nodes.k_scale.double()[..., None]
        arrays = (t[rows] for t in (unit_q, unit_k, nodes.v, nodes.g, nodes.beta))
        _, want, want_u = tree_recurrence(*arrays, state[int(inputs.slot[r])], tree)
        start = int(forest.token_start[r])
        torch.testing.assert_close(out[start : start + len(tree)].double(), want, rtol=1e-4, atol=1e-5, msg=f"seed {seed}")
        torch.testing.assert_close(u[rows].double(), want_u, rtol=1e-4, atol=1e-5, msg=f"seed {seed}")
        first += len(tree)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("everything", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("which", ["x", "a", "b"])
def test_non_interference(which, everything, poison, device):
    """Rows off a node's path, poisoned, leave its bits; a NaN on the path reaches everything below it."""
    seed = 7
    tree = random_parents(40, 7, torch.Generator().manual_seed(seed))
    forest, inputs, state = problem(seed, [tree, [-1, 0]], device)
    base, base_u, _ = run_core(inputs, DIMS, forest, state)
    keep = set(path_to(tree, 39))
    poisoned = [i for i in range(40) if i not in keep] if everything else [4]
    for i in poisoned:
        getattr(inputs, which)[int(forest.token_start[0]) + i] = poison
    out, u, _ = run_core(inputs, DIMS, forest, state)
    start = int(forest.token_start[0])
    reached = torch.tensor([bool(set(path_to(tree, i)) & set(poisoned)) for i in range(40)], device=device)
    assert reached.any() and (~reached).sum() > 3
    assert torch.equal(out[start : start + 40][~reached], base[start : start + 40][~reached]), f"seed {seed}"
    assert torch.equal(u[:40][~reached], base_u[:40][~reached]), f"seed {seed}"
    assert torch.equal(out[start + 40 :], base[start + 40 :]), f"seed {seed}: another request changed"
    if poison != poison:
        assert out[start : start + 40][reached].isnan().all() and u[:40][reached].isnan().all(), f"seed {seed}: a NaN was hidden"


def test_outputs_without_u(device):
    """What replay asks for: the same outputs, nothing kept."""
    forest, inputs, state = problem(3, [random_parents(25, 6, torch.Generator().manual_seed(3))], device)
    with_u = run_core(inputs, DIMS, forest, state, precision="tf32x3")[0]
    assert torch.equal(with_u, run_core(inputs, DIMS, forest, state, with_u=False, precision="tf32x3")[0])


@pytest.mark.parametrize("sizes", [(16, 0, 7), (30, 1), (64, 3, 50), (100, 20)])
def test_overlapped_launches_change_no_bit(sizes, device):
    """Two rounds of other contents in turn through the same buffers: a kernel that started too early would read the other round's."""
    seed = 40 + len(sizes)
    generator = torch.Generator().manual_seed(seed)
    trees = [random_parents(n, 7, generator) if n else [] for n in sizes]
    forest = make_forest(trees, device, token_gap=1)
    dims, rows = DIMS, num_rows_of(trees, 1)
    rounds = [make_inputs(dims, rows, len(trees), seed + i, device) for i in range(2)]
    states = [torch.randn(len(trees) + 3, dims.HV, dims.DK, dims.DV, generator=generator).to(device) for _ in range(2)]
    nodes = NodeInputs.allocate(forest.capacity, dims.HK, dims.DK, dims.HV, dims.DV, torch.bfloat16, device)
    z, y = torch.zeros(2, forest.capacity, dims.HV, forest.path.shape[1], device=device)
    u, r = torch.zeros(2, forest.capacity, dims.HV, dims.DV, device=device)
    out = torch.zeros(rows, dims.HV, dims.DV, device=device)

    def run(i: int, overlap: bool, with_u: bool) -> list[torch.Tensor]:
        x, factor, correction = rounds[i], z if with_u else None, u if with_u else None
        layer = (x.weight, x.bias, x.A_log, x.dt_bias)
        tree_inputs(x.x, x.a, x.b, *layer, x.state, x.slot, forest, nodes)
        tree_factors(nodes, forest, factor, y, overlap=overlap)
        tree_solve(nodes, factor, y, states[i], x.slot, forest, out, correction, r, overlap=overlap)
        return [out.clone(), u.clone()] if with_u else [out.clone()]

    for with_u in (False, True):
        want = [run(i, False, with_u) for i in range(2)]
        for turn in range(20 if device.type == "cuda" else 2):
            found = run(turn % 2, True, with_u)
            assert all(torch.equal(a, b) for a, b in zip(found, want[turn % 2], strict=True)), f"seed {seed}, turn {turn}"
