"""tree_inputs: per-path computations, so most checks demand equal bits."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.conv import NodeInputs, tree_inputs
from bole_vllm.kernels.conv.naive import naive_tree_inputs
from bole_vllm.kernels.conv.pointwise import round_to
from bole_vllm.kernels.topology import Forest

NAMES = ("q", "k", "v", "q_scale", "k_scale", "g", "p", "beta", "x")


@triton.jit
def round_kernel(x, y, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o_x, round_to(tl.load(x + o_x), y.dtype.element_ty))


@dataclass
class Dims:
    HK: int = 1
    HV: int = 2
    DK: int = 16
    DV: int = 16

    @property
    def C(self) -> int:
        return 2 * self.HK * self.DK + self.HV * self.DV


@dataclass
class Inputs:
    """Token rows, layer parameters and conv states; strided as the engine's are."""

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor
    slot: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor


def make_inputs(
    dims: Dims, num_rows: int, num_requests: int, seed: int, device, dtype=torch.bfloat16, bias=False, transposed=True
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    S, C, HV = num_requests + 3, dims.C, dims.HV
    # views into wider rows: x beside other projections, a beside b; the state as [S, 3, C] or [S, C, 3]
    ba = randn(num_rows, 2 * HV)
    return Inputs(
        x=randn(num_rows, C + 24)[:, 8 : 8 + C],
        a=ba[:, HV:],
        b=ba[:, :HV],
        weight=randn(C, 4),
        bias=randn(C) if bias else None,
        state=randn(S, 3, C).transpose(1, 2) if transposed else randn(S, C, 3),
        slot=torch.randperm(S, generator=generator)[:num_requests].int().to(device),
        A_log=randn(HV, dtype=torch.float32),
        dt_bias=randn(HV),
    )


def run(inputs: Inputs, dims: Dims, forest: Forest, naive=False, keep_x=True, **options) -> dict[str, torch.Tensor]:
    """All outputs by name, poisoned before the call."""
    dtype, device = inputs.x.dtype, inputs.x.device
    out = NodeInputs.allocate(forest.capacity, dims.HK, dims.DK, dims.HV, dims.DV, dtype, device)
    for tensor in vars(out).values():
        tensor.fill_(float("nan"))
    x = torch.full((forest.capacity, dims.C), float("nan"), dtype=dtype, device=device)
    i = inputs
    layer = (i.weight, i.bias, i.A_log, i.dt_bias)
    (naive_tree_inputs if naive else tree_inputs)(i.x, i.a, i.b, *layer, i.state, i.slot, forest, out, x if keep_x else None, **options)
    return {**vars(out), "x": x}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.equal(bits(actual), bits(expected)), f"{what}: bits differ in {int((bits(actual) != bits(expected)).sum())} places"


def assert_close(actual: dict, expected: dict, num_nodes: int, what: str) -> None:
    for name in NAMES:
        a, e = actual[name].float(), expected[name].float()
        assert bool(a[num_nodes:].isnan().all()), f"{what}: {name} written behind the last node"
        a, e = a[:num_nodes], e[:num_nodes]
        assert bool(e.isfinite().all()), f"{what}: {name} oracle not finite"
        half = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[actual["v"].dtype]
        if name == "x":
            assert_bits(actual[name][:num_nodes], expected[name][:num_nodes], f"{what}: x")
        elif name in ("g", "p", "beta"):
            torch.testing.assert_close(a, e, rtol=2e-6, atol=2e-6, msg=lambda m, n=name: f"{what}: {n}: {m}")
        else:
            # one step of the activation dtype where exp differs in its last bit ...
            torch.testing.assert_close(a, e, rtol=half + 2e-5, atol=2e-6, msg=lambda m, n=name: f"{what}: {n}: {m}")
            # ... which is rare: a wrong rounding point would show in most places
            if half and name in "qkv":
                wrong = float(((a - e).abs() > 2e-6 + 2e-5 * e.abs()).float().mean())
                assert wrong < 0.01, f"{what}: {name} differs in {wrong:.1%} of places"


def num_rows_of(trees: list[list[int]], gap: int) -> int:
    return sum(max(1, len(t)) + gap for t in trees)


def num_nodes_of(forest: Forest) -> int:
    return int(forest.node_offset[-1])


@pytest.mark.parametrize("T", [1, 2, 15, 16, 31, 32, 33, 64, 65])
def test_matches_naive_for_every_width(T, device):
    generator = torch.Generator().manual_seed(T)
    dims = Dims()
    trees = [random_parents(T, 7, generator), [], random_parents((T + 1) // 2, 3, generator), [-1], []]
    forest = make_forest(trees, device, max_nodes=T, token_gap=2)
    inputs = make_inputs(dims, num_rows_of(trees, 2), len(trees), T, device)
    # a request without nodes has no slot worth reading
    inputs.slot[1] = inputs.slot[4] = -(2**31)
    actual, expected = run(inputs, dims, forest), run(inputs, dims, forest, naive=True, round_products=inputs.x.is_cuda)
    assert_close(actual, expected, num_nodes_of(forest), f"T={T}")


CASES = {
    "fp32_bias": (Dims(2, 4, 32, 32), torch.float32, True, False, False),
    "fp16": (Dims(1, 1, 64, 64), torch.float16, False, True, False),
    "bf16_rounded": (Dims(1, 2, 64, 64), torch.bfloat16, True, True, True),
    "fp16_rounded": (Dims(1, 2, 16, 16), torch.float16, True, False, True),
    "bf16_not_rounded": (Dims(2, 2, 64, 64), torch.bfloat16, True, False, False),
    "value_heads_wider": (Dims(1, 3, 16, 64), torch.bfloat16, False, True, False),
    "key_heads_wider": (Dims(3, 6, 64, 16), torch.float32, False, True, False),
    "model_heads": (Dims(1, 2, 128, 128), torch.bfloat16, False, True, False),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_matches_naive(case, seed, device):
    dims, dtype, bias, transposed, rounded = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    trees = [random_parents(int(n), 5, generator) if n else [] for n in torch.randint(0, 20, (4,), generator=generator)]
    trees.append([-1, 0])
    forest = make_forest(trees, device, max_nodes=24, token_gap=seed)
    inputs = make_inputs(dims, num_rows_of(trees, seed), len(trees), seed, device, dtype, bias, transposed)
    actual = run(inputs, dims, forest, round_products=rounded)
    expected = run(inputs, dims, forest, naive=True, round_products=rounded)
    assert_close(actual, expected, num_nodes_of(forest), f"{case} seed={seed}")


def test_rounding_points_differ(device):
    """The two roundings of the products are told apart by the closeness test above."""
    dims = Dims()
    forest = make_forest([list(range(-1, 15))], device)
    inputs = make_inputs(dims, 16, 1, 0, device)
    plain, rounded = (run(inputs, dims, forest, round_products=r)["v"] for r in (False, True))
    assert float((plain != rounded).float().mean()) > 0.1


def test_rounding_to_bf16_is_to_nearest_even(device):
    """Stores to bf16 round as torch does, under the interpreter, too; NaN and infinities stay."""
    generator = torch.Generator().manual_seed(0)
    # every 16-bit pattern, followed by low halves around the tie
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).repeat_interleave(8) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x4000, 0xC000], dtype=torch.int32).repeat(2**16)
    x = torch.cat([(high | low).view(torch.float32), torch.randn(2**19, generator=generator)]).to(device)
    y = torch.full(x.shape, 7.0, dtype=torch.bfloat16, device=device)
    round_kernel[(x.numel() // 2**16,)](x, y, BLOCK=2**16)
    expected = x.bfloat16()
    assert torch.equal(y.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert_bits(y[finite], expected[finite], "bf16")


def test_no_nodes_writes_nothing(device):
    dims = Dims()
    forest = make_forest([[], [], []], device, max_nodes=8)
    inputs = make_inputs(dims, 3, 3, 0, device)
    inputs.slot.fill_(-1)
    for name, out in run(inputs, dims, forest).items():
        assert bool(out.isnan().all()), name


def test_capacity_beyond_the_nodes_is_untouched(device):
    """The forest's arrays are larger than the batch, and hold stale topology behind the last node."""
    generator = torch.Generator().manual_seed(1)
    dims = Dims()
    trees = [random_parents(9, 4, generator), random_parents(5, 4, generator)]
    small = make_forest(trees, device)
    large = Forest.allocate(2, 9, 4, device, capacity=300)
    for name in ("parent", "depth", "token", "ancestors", "request", "path", "conv_source"):
        getattr(large, name).fill_(10**6)
        getattr(large, name)[:18] = getattr(small, name)
        getattr(large, name)[14:] = 10**6
    large.node_offset.copy_(small.node_offset)
    large.token_start.copy_(small.token_start)
    inputs = make_inputs(dims, 14, 2, 1, device)
    expected, actual = run(inputs, dims, small), run(inputs, dims, large)
    for name in NAMES:
        assert_bits(actual[name][:14], expected[name][:14], name)
        assert bool(actual[name][14:].isnan().all()), name


def test_out_x_is_optional(device):
    dims = Dims()
    forest = make_forest([[-1, 0, 0, 1]], device)
    inputs = make_inputs(dims, 4, 1, 2, device)
    with_x, without = run(inputs, dims, forest), run(inputs, dims, forest, keep_x=False)
    for name in ("q", "k", "v"):
        assert_bits(without[name], with_x[name], name)


def test_inputs_are_only_read(device):
    dims = Dims()
    forest = make_forest([[-1, 0, 0, 1]], device, token_gap=1)
    inputs = make_inputs(dims, 5, 1, 3, device)
    before = {k: v.clone() for k, v in vars(inputs).items() if v is not None}
    run(inputs, dims, forest)
    for name, value in before.items():
        assert torch.equal(getattr(inputs, name), value), name


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("seed", range(3))
def test_non_interference(seed, poison, device):
    """One tree, once per node: in copy i every row but those of i's path is poisoned. Node i's bits are the clean ones."""
    generator = torch.Generator().manual_seed(seed)
    dims = Dims()
    tree = random_parents(20, 6, generator)
    T = len(tree)
    clean = make_inputs(dims, T, 1, seed, device)
    reference = run(clean, dims, make_forest([tree], device))
    forest = make_forest([tree] * T, device)
    inputs = make_inputs(dims, T * T, T, seed, device)
    for name in ("weight", "A_log", "dt_bias"):
        setattr(inputs, name, getattr(clean, name))
    for t in (inputs.x, inputs.a, inputs.b):
        t.fill_(poison)
    inputs.state.fill_(poison)
    for i in range(T):
        for j in path_to(tree, i):
            for name in ("x", "a", "b"):
                getattr(inputs, name)[i * T + j] = getattr(clean, name)[j]
        inputs.state[int(inputs.slot[i])] = clean.state[int(clean.slot[0])]
    actual = run(inputs, dims, forest)
    for i in range(T):
        for name in NAMES:
            assert_bits(actual[name][i * T + i], reference[name][i], f"seed={seed} node {i} {name}")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_is_flagged_and_kept_out(poison, device):
    """What is not finite marks the nodes it reaches, in scales and gates; the stored activations are finite all the same."""
    dims = Dims()
    tree = [-1, 0, 1, 2, 3, 4, 0]
    forest = make_forest([tree], device)
    inputs = make_inputs(dims, 7, 1, 0, device)
    inputs.x[1] = inputs.a[1] = poison
    out = run(inputs, dims, forest)
    window = [False, True, True, True, True, False, False]
    for name in ("q_scale", "k_scale", "beta"):
        assert out[name].isnan().all(1).tolist() == window, name
    assert out["g"].isnan().all(1).tolist() == [False, True, False, False, False, False, False]
    assert out["p"].isnan().all(1).tolist() == [False, True, True, True, True, True, False]
    for name in ("q", "k", "v"):
        assert bool(out[name].isfinite().all()), name
    assert bool((out["x"][1] == inputs.x[1]).all()) or poison != poison


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_path_equality(seed, dtype, device):
    """Every node of a tree = the end of its path, alone in a request of its own."""
    generator = torch.Generator().manual_seed(seed)
    dims = Dims(1, 2, 32, 16)
    trees = [random_parents(33, 8, generator), random_parents(7, 6, generator)]
    forest = make_forest(trees, device, token_gap=1)
    inputs = make_inputs(dims, num_rows_of(trees, 1), 2, seed, device, dtype, bias=True)
    in_tree = run(inputs, dims, forest)

    # (request, path) of every node, in compact order
    paths = [(r, path_to(tree, i)) for r, tree in enumerate(trees) for i in range(len(tree))]
    rows = [int(forest.token_start[r]) + j for r, path in paths for j in path]
    chains = make_forest([list(range(-1, len(path) - 1)) for _, path in paths], device)
    alone = Inputs(**vars(inputs))
    alone.x, alone.a, alone.b = inputs.x[rows], inputs.a[rows], inputs.b[rows]
    alone.slot = inputs.slot[[r for r, _ in paths]]
    on_path = run(alone, dims, chains)
    ends = chains.node_offset[1:].long() - 1
    for name in NAMES:
        for n, end in enumerate(ends.tolist()):
            assert_bits(in_tree[name][n], on_path[name][end], f"seed={seed} node {n} {name}")


@pytest.mark.parametrize("seed", range(3))
def test_sibling_permutation(seed, device):
    """Another order of the nodes (parents still first) permutes the outputs, nothing else."""
    generator = torch.Generator().manual_seed(seed)
    dims = Dims()
    tree = random_parents(40, 6, generator)
    order = [0]
    while len(order) < len(tree):
        ready = [i for i in range(1, len(tree)) if i not in order and tree[i] in order]
        order.append(ready[int(torch.randint(len(ready), (1,), generator=generator))])
    assert order != list(range(len(tree)))
    permuted = [order.index(tree[i]) if tree[i] >= 0 else -1 for i in order]
    inputs = make_inputs(dims, 40, 1, seed, device)
    original = run(inputs, dims, make_forest([tree], device))
    inputs.x, inputs.a, inputs.b = inputs.x[order], inputs.a[order], inputs.b[order]
    shuffled = run(inputs, dims, make_forest([permuted], device))
    for name in NAMES:
        assert_bits(shuffled[name], original[name][order], f"seed={seed} {name}")


def test_requests_do_not_see_each_other(device):
    """The same tree in a batch of one and among others, at another place in the tile."""
    generator = torch.Generator().manual_seed(5)
    dims = Dims()
    trees = [random_parents(n, 5, generator) if n else [] for n in (13, 0, 30, 30, 9)]
    forest = make_forest(trees, device)
    inputs = make_inputs(dims, num_rows_of(trees, 0), 5, 5, device)
    together = run(inputs, dims, forest)
    for r in (0, 3, 4):
        single = Inputs(**vars(inputs))
        start, base, size = int(forest.token_start[r]), int(forest.node_offset[r]), len(trees[r])
        single.x, single.a, single.b = (t[start : start + size] for t in (inputs.x, inputs.a, inputs.b))
        single.slot = inputs.slot[r : r + 1]
        alone = run(single, dims, make_forest([trees[r]], device))
        for name in NAMES:
            assert_bits(together[name][base : base + size], alone[name], f"request {r} {name}")


def test_chain_is_a_causal_convolution(device):
    """A chain with its history = torch's conv1d over the concatenated inputs."""
    dims, T = Dims(1, 2, 16, 16), 24
    forest = make_forest([list(range(-1, T - 1))], device, token_gap=2)
    inputs = make_inputs(dims, T + 2, 1, 9, device, torch.float32, bias=True)
    out = run(inputs, dims, forest)
    sequence = torch.cat([inputs.state[int(inputs.slot[0])], inputs.x[2:].T], dim=1)
    y = torch.nn.functional.conv1d(sequence[None], inputs.weight[:, None], inputs.bias, groups=dims.C)[0].T
    q, k, v = torch.nn.functional.silu(y).split([16, 16, 32], dim=1)
    torch.testing.assert_close(out["v"].flatten(1), v, rtol=1e-5, atol=1e-5)
    for name, want, scale in (("q", q, 0.25), ("k", k, 1.0)):
        torch.testing.assert_close(out[name].flatten(1), want, rtol=1e-5, atol=1e-5)
        unit = torch.nn.functional.normalize(want, dim=1) * scale
        torch.testing.assert_close(out[name].flatten(1) * out[f"{name}_scale"], unit, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tap", range(4))
def test_history_of_shallow_nodes(tap, transposed, device):
    """With one tap set, a node shows which single input it took: a conv-state column for depths 0, 1, 2."""
    dims = Dims(1, 1, 16, 16)
    # two branches below the root: 0-1-3-5 and 0-2-4
    tree = [-1, 0, 0, 1, 2, 3]
    forest = make_forest([[-1], tree], device)
    inputs = make_inputs(dims, 7, 2, 0, device, torch.float32, transposed=transposed)
    slot = int(inputs.slot[1])
    inputs.weight.zero_()
    inputs.weight[:, tap] = 1.0
    # the input at step s of the path (0, 1, 2 the history) has its own value
    inputs.state.fill_(float("nan"))
    inputs.state[int(inputs.slot[0])] = 0.0
    for column in range(3):
        inputs.state[slot, :, column] = 1.0 + column
    for node in range(6):
        inputs.x[1 + node] = 10.0 + node
    v = run(inputs, dims, forest)["v"][1:7, 0]
    for node in range(6):
        path = path_to(tree, node)
        took = ([1.0, 2.0, 3.0] + [10.0 + j for j in path])[-4:][tap]
        expected = torch.nn.functional.silu(torch.full((16,), took, device=device))
        torch.testing.assert_close(v[node], expected, rtol=1e-6, atol=0, msg=lambda m, n=node: f"node {n} tap {tap}: {m}")


def test_extreme_gates(device):
    """a = +-100, b = +-100 and rates from e^-20 to e^5: no overflow, log decay never positive, P finite at depth 30."""
    HV = 4
    T = 31
    forest = make_forest([list(range(-1, T - 1))], device)
    dims = Dims(1, HV)
    inputs = make_inputs(dims, T, 1, 0, device)
    inputs.a[::2], inputs.a[1::2] = 100.0, -100.0
    inputs.b[::3], inputs.b[1::3] = 100.0, -100.0
    inputs.A_log = torch.tensor([-20.0, 0.0, 2.0, 5.0], device=device)
    inputs.dt_bias = torch.tensor([-80.0, 0.0, 20.0, 80.0], device=device)
    out, expected = run(inputs, dims, forest), run(inputs, dims, forest, naive=True)
    for name in ("g", "beta", "p"):
        assert bool(out[name].isfinite().all()), name
        torch.testing.assert_close(out[name], expected[name], rtol=2e-6, atol=1e-30, msg=lambda m, n=name: f"{n}: {m}")
    assert bool((out["g"] <= 0).all()) and bool((out["p"] <= out["g"]).all())
    assert float(out["g"].min()) < -1e4 and float(out["g"].max()) == 0.0
    assert set(out["beta"][::3].flatten().tolist()) == {1.0} and float(out["beta"][1::3].max()) < 1e-37


def test_softplus_threshold(device):
    """Above 20 softplus is the identity, as in native decode."""
    dims = Dims(1, 4)
    inputs = make_inputs(dims, 1, 1, 0, device)
    inputs.a = torch.tensor([[19.999, 20.0, 20.001, 0.0]], device=device)
    inputs.A_log, inputs.dt_bias = torch.zeros(2, 4, device=device)
    out = run(inputs, dims, make_forest([[-1]], device))
    g = out["g"]
    assert_bits(out["p"], g, "p of a root is its g")
    assert float(g[0, 2]) == -float(inputs.a[0, 2])
    torch.testing.assert_close(g, -torch.nn.functional.softplus(inputs.a), rtol=1e-6, atol=0)


def test_zero_input_has_zero_norm(device):
    """All-zero channels: the epsilon keeps q and k at 0."""
    dims = Dims()
    inputs = make_inputs(dims, 3, 1, 0, device)
    inputs.x.zero_()
    inputs.state.zero_()
    out = run(inputs, dims, make_forest([[-1, 0, 0]], device))
    for name in ("q", "k", "v"):
        assert bool((out[name] == 0).all()), name


def test_validation(device):
    dims = Dims()
    forest = make_forest([[-1, 0]], device)
    for change, message in (
        ({"x": torch.zeros(2, dims.C + 1, device=device)}, "x must"),
        ({"weight": torch.zeros(dims.C, 3, device=device)}, "weight must"),
        ({"bias": torch.zeros(dims.C + 1, device=device)}, "bias must"),
        ({"state": torch.zeros(4, dims.C, 3, device=device)}, "conv_state must"),
        ({"slot": torch.zeros(0, dtype=torch.int32, device=device)}, "state_slot must"),
        ({"a": torch.zeros(2, 3, device=device)}, "a must"),
        ({"b": torch.zeros(4, 2, device=device).T}, "b must"),
        ({"dt_bias": torch.zeros(3, device=device)}, "dt_bias must"),
    ):
        inputs = make_inputs(dims, 2, 1, 0, device)
        for name, value in change.items():
            setattr(inputs, name, value)
        with pytest.raises(ValueError, match=message):
            run(inputs, dims, forest)
