"""The serial tree against the fp64 recurrence: outputs, snapshots, what is left alone, and what a bad node reaches."""

from __future__ import annotations

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.conv import NodeInputs
from bole_vllm.kernels.serial import serial_tree
from bole_vllm.kernels.serial.naive import serial_tree as naive_serial
from bole_vllm.kernels.solve.naive import tree_recurrence

# largest error over the largest magnitude; the recurrence in fp32 leaves 1e-7 to 1e-6
BOUND = 1e-5


def random_trees(seed, sizes, max_depth=8):
    gen = torch.Generator().manual_seed(seed)
    return [random_parents(n, max_depth, gen) if n else [] for n in sizes]


def make_inputs(seed, trees, device, hk=1, group=2, dim=64, dtype=torch.float32, spare=0) -> NodeInputs:
    """Random inputs for a forest of `trees` and `spare` nodes more, norms as `tree_inputs` takes them."""
    capacity = len(trees) * max([1] + [len(t) for t in trees]) + spare
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(capacity, *shape, generator=gen)

    def scale(x):
        return torch.rsqrt(x.float().square().sum(-1) + 1e-6)

    q, k = normal(hk, dim).to(dtype), normal(hk, dim).to(dtype)
    inputs = NodeInputs(
        q=q,
        k=k,
        v=normal(hk * group, dim).to(dtype),
        q_scale=scale(q) * dim**-0.5,
        k_scale=scale(k),
        g=-torch.rand(capacity, hk * group, generator=gen),
        p=torch.full((capacity, hk * group), float("nan")),  # not for the recurrence
        beta=torch.sigmoid(normal(hk * group)),
    )
    return NodeInputs(**{name: tensor.to(device) for name, tensor in vars(inputs).items()})


def run(inputs, trees, state, device, token_gap=2, out_dtype=torch.float32, kernel=serial_tree, **options):
    """Outputs by token row (NaN where nothing was written), snapshots, and the forest; request r owns slot r + 1."""
    forest = make_forest(trees, device, token_gap=token_gap)
    capacity, heads, dim_v = inputs.v.shape
    snapshots = torch.full((capacity, heads, dim_v, inputs.k.shape[2]), float("nan"), device=device)
    rows = sum(token_gap + max(1, len(t)) for t in trees) + 3
    out = torch.full((rows, heads, dim_v), float("nan"), dtype=out_dtype, device=device)
    slots = torch.arange(1, len(trees) + 1, dtype=torch.int32, device=device)
    before = state.clone()
    kernel(inputs, state, slots, forest, snapshots, out, **options)
    assert torch.equal(state, before), "the state was written"
    return out, snapshots, forest


def expected(inputs, trees, state):
    """States [nodes, HV, DV, DK] and outputs [nodes, HV, DV] of the serial recurrence, fp64."""
    q = inputs.q.double() * inputs.q_scale.double()[..., None]
    k = inputs.k.double() * inputs.k_scale.double()[..., None]
    states, outputs, at = [], [], 0
    for r, tree in enumerate(trees):
        if tree:
            part = slice(at, at + len(tree))
            arrays = (q[part], k[part], inputs.v[part], inputs.g[part], inputs.beta[part])
            found = tree_recurrence(*arrays, state[r + 1], tree)
            states.append(found[0].transpose(-1, -2))
            outputs.append(found[1])
        at += len(tree)
    return torch.cat(states), torch.cat(outputs)


def rows_of(out, forest, trees):
    """[nodes, HV, DV] outputs in node order."""
    starts = forest.token_start.tolist()
    return torch.cat([out[s : s + len(t)] for s, t in zip(starts, trees, strict=True)])


def relative(actual, want):
    return float((actual.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("seed,sizes", [(1, (1, 0, 15)), (2, (0, 17, 0)), (3, (40, 3))])
def test_random_forest(seed, sizes, device):
    """Sizes of every kind, requests without nodes, rows beyond the nodes."""
    trees, nodes = random_trees(seed, sizes), sum(sizes)
    inputs = make_inputs(seed, trees, device, spare=4)
    state = torch.randn(len(trees) + 1, 2, 64, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    out, snapshots, forest = run(inputs, trees, state, device)
    want_states, want_out = expected(inputs, trees, state)
    assert relative(rows_of(out, forest, trees), want_out) < BOUND, f"seed {seed}"
    assert relative(snapshots[:nodes], want_states) < BOUND, f"seed {seed}"
    assert snapshots[nodes:].isnan().all(), "snapshots beyond the nodes were written"
    written = torch.zeros(out.shape[0], dtype=torch.bool, device=device)
    for start, tree in zip(forest.token_start.tolist(), trees, strict=True):
        written[start : start + len(tree)] = True
    assert out[~written].isnan().all(), "token rows of no node were written"


@pytest.mark.parametrize("hk,group", [(1, 1), (2, 3)])
@pytest.mark.parametrize("value_tile,num_warps", [(None, None), (16, 2), (64, 4)])
def test_heads_tiles_and_layouts(hk, group, value_tile, num_warps, device):
    """bf16 activations, a v-major state as vLLM stores it, every tile."""
    seed = 10 * hk + group
    trees = random_trees(seed, (12, 5))
    inputs = make_inputs(seed, trees, device, hk, group, dtype=torch.bfloat16)
    state = torch.randn(3, hk * group, 64, 64, generator=torch.Generator().manual_seed(seed)).to(device).transpose(-1, -2)
    out, snapshots, forest = run(inputs, trees, state, device, value_tile=value_tile, num_warps=num_warps)
    want_states, want_out = expected(inputs, trees, state)
    assert relative(snapshots[:17], want_states) < BOUND, f"seed {seed}"
    assert relative(rows_of(out, forest, trees), want_out) < BOUND, f"seed {seed}"


def test_bf16_outputs_round_to_nearest(device):
    trees = random_trees(5, (20,))
    inputs = make_inputs(5, trees, device, dtype=torch.bfloat16)
    state = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(5)).to(device)
    out, _, forest = run(inputs, trees, state, device, out_dtype=torch.bfloat16)
    _, want = expected(inputs, trees, state)
    error = (rows_of(out, forest, trees).double() - want).abs()
    assert (error <= want.abs() * 2.0**-8 * 1.02 + 1e-5 * want.abs().max()).all()


def test_naive_agrees(device):
    trees = random_trees(6, (7, 0, 9))
    inputs = make_inputs(6, trees, device)
    state = torch.randn(4, 2, 64, 64, generator=torch.Generator().manual_seed(6)).to(device)
    out, snapshots, _ = run(inputs, trees, state, device)
    want_out, want_snapshots, _ = run(inputs, trees, state, device, kernel=naive_serial)
    assert torch.equal(out.isnan(), want_out.isnan())
    assert relative(out.nan_to_num(), want_out.nan_to_num().double()) < BOUND
    assert relative(snapshots[:16], want_snapshots[:16].double()) < BOUND


def test_bad_node_reaches_its_descendants_only(device):
    """A NaN key: nodes below it are NaN, the bits of all others stay."""
    trees = random_trees(7, (24,), max_depth=5)
    inputs = make_inputs(7, trees, device)
    state = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(7)).to(device)
    clean, _, forest = run(inputs, trees, state, device)
    bad = next(i for i in range(1, 24) if i in trees[0])
    inputs.k_scale[bad] = float("nan")
    out, _, _ = run(inputs, trees, state, device)
    clean, out = rows_of(clean, forest, trees), rows_of(out, forest, trees)
    for node in range(24):
        if bad in path_to(trees[0], node):
            assert out[node].isnan().all(), f"node {node} is below node {bad}"
        else:
            assert torch.equal(out[node], clean[node]), f"node {node} is not below node {bad}"


def test_refuses_wrong_arguments(device):
    inputs = make_inputs(8, [[-1, 0]], device)
    state = torch.zeros(2, 2, 64, 64, device=device)
    with pytest.raises(ValueError, match="value_tile"):
        run(inputs, [[-1, 0]], state, device, value_tile=48)
    with pytest.raises(ValueError, match="state"):
        run(inputs, [[-1, 0]], state[:, :1], device)
    forest = make_forest([[-1, 0]], device)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    out = torch.zeros(2, 2, 64, device=device)
    with pytest.raises(ValueError, match="snapshots"):
        serial_tree(inputs, state, slots, forest, torch.zeros(1, 2, 64, 64, device=device), out)


def test_empty_batch_writes_nothing(device):
    inputs, state = make_inputs(9, [[], []], device), torch.zeros(3, 2, 64, 64, device=device)
    out, snapshots, forest = run(inputs, [[], []], state, device)
    assert out.isnan().all() and snapshots.isnan().all()
    serial_tree(inputs, state, torch.zeros(0, dtype=torch.int32, device=device), forest.for_requests(0), snapshots, out)
    assert out.isnan().all() and snapshots.isnan().all()
