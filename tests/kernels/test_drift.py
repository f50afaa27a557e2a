"""The committed state over a long output: thousands of rounds of verification and commit against the recurrence in float64."""

from __future__ import annotations

import torch
from conftest import make_forest, path_to, random_parents
from test_commit import path_tensors

from bole_vllm.kernels.commit import LayerTable, commit_factor, commit_replay
from bole_vllm.kernels.conv import NodeInputs, tree_inputs
from bole_vllm.kernels.factors import tree_factors
from bole_vllm.kernels.solve import tree_solve

HK, HV, DIM, T = 1, 2, 64, 8
CHANNELS = (2 * HK + HV) * DIM
# the interpreter takes some 30 ms a round
TOKENS = 10_000 if torch.cuda.is_available() else 240


class Layer:
    """One layer and request that generates with trees; slot 1. The state after every round is also followed step by step."""

    def __init__(self, commit: str, gen: torch.Generator, device) -> None:
        self.commit, self.device = commit, device
        self.weight = (torch.randn(CHANNELS, 4, generator=gen) * 0.5).bfloat16().to(device)
        # decays of 0.998 and 0.98 a token: memories of 500 and 50 tokens
        self.A_log = torch.tensor([0.002, 0.02]).log().to(device)
        self.dt_bias = torch.ones(HV, device=device).expm1().log()
        self.state = torch.zeros(2, HV, DIM, DIM, device=device).transpose(-1, -2)
        self.conv = torch.zeros(2, 3, CHANNELS, dtype=torch.bfloat16, device=device).transpose(1, 2)
        self.table = LayerTable.build([self.state], [self.conv], [0], [self.weight])
        self.slot = torch.ones(1, dtype=torch.int32, device=device)
        self.nodes = NodeInputs.allocate(T, HK, DIM, HV, DIM, torch.bfloat16, device)
        self.exact = torch.zeros(HV, DIM, DIM, dtype=torch.float64, device=device)
        self.single = torch.zeros(HV, DIM, DIM, device=device)

    def round(self, forest, path: list[int], x, a, b) -> None:
        n, device = self.nodes, self.device
        tree_inputs(x, a, b, self.weight, None, self.A_log, self.dt_bias, self.conv, self.slot, forest, n, round_products=False)
        args = (forest, *path_tensors([path], [[1]], [[[1, 0]]], [[len(path), 0]], device))
        if self.commit == "factor":
            z, y = torch.zeros(2, T, HV, forest.path.shape[1], device=device)
            out, u = torch.zeros(2, T, HV, DIM, device=device)
            tree_factors(n, forest, z, y)
            tree_solve(n, z, y, self.state, self.slot, forest, out, u)
            commit_factor(self.table, n.p[None], n.k[None], n.k_scale[None], u[None], x[None], *args)
        else:
            commit_replay(self.table, n.g[None], n.beta[None], x[None], *args, round_products=False)
        for node in path:
            self.exact = step(self.exact, n, node)
            self.single = step(self.single, n, node)

    def errors(self) -> tuple[float, float]:
        """Relative error of the committed state, and of the recurrence in fp32 that decoding token by token runs."""
        size = self.exact.abs().max()
        return tuple(float((s.double() - self.exact).abs().max() / size) for s in (self.state[1], self.single))


def step(state: torch.Tensor, n: NodeInputs, node: int) -> torch.Tensor:
    """One token of the recurrence in the dtype of state [HV, DK, DV]."""
    k = (n.k[node].to(state.dtype) * n.k_scale[node, :, None].to(state.dtype)).repeat_interleave(HV // HK, 0)
    state = state * torch.exp(n.g[node].to(state.dtype))[:, None, None]
    u = n.beta[node].to(state.dtype)[:, None] * (n.v[node].to(state.dtype) - torch.einsum("hkv,hk->hv", state, k))
    return state + k[:, :, None] * u[:, None, :]


def test_drift_over_a_long_output(device):
    """Both stay as near to the float64 recurrence as decoding in fp32 does, and their error does not grow with length."""
    seed = 200
    gen = torch.Generator().manual_seed(seed)
    trees = [random_parents(T, 5, gen) for _ in range(8)]
    forests = [make_forest([tree], device, max_nodes=T, max_depth=5) for tree in trees]
    layers = [Layer(commit, torch.Generator().manual_seed(seed), device) for commit in ("factor", "replay")]
    tokens, half = 0, {}
    while tokens < TOKENS:
        i = int(torch.randint(8, (), generator=gen))
        path = path_to(trees[i], int(torch.randint(T, (), generator=gen)))
        rows = [torch.randn(T, size, generator=gen).bfloat16().to(device) for size in (CHANNELS, HV, HV)]
        for layer in layers:
            layer.round(forests[i], path, *rows)
        tokens += len(path)
        if not half and tokens >= TOKENS // 2:
            half = {layer.commit: layer.errors()[0] for layer in layers}
    for layer in layers:
        error, decoding = layer.errors()
        assert torch.isfinite(layer.state).all()
        assert error <= 2 * decoding, f"seed {seed}: {layer.commit} {error} against {decoding} in fp32"
        assert error < 2e-6, f"seed {seed}: {layer.commit} {error}"
        print(f"{layer.commit}: {error:.2e} after {tokens} tokens, decoding in fp32 {decoding:.2e}")
        assert error < 4 * half[layer.commit] + 1e-7, f"seed {seed}: {layer.commit} grew from {half[layer.commit]} to {error}"
