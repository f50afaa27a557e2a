"""Verify one random tree with the kernels alone (torch and Triton, no engine) and compare with the serial recurrence.

    python -m examples.kernels_only                       # on a GPU
    TRITON_INTERPRET=1 python -m examples.kernels_only    # on a CPU, in Triton's interpreter

One request, one Gated DeltaNet layer: `tree_inputs`, `tree_factors` and `tree_solve` give the outputs of all nodes from the one
state before the tree, `commit_factor` then folds a path into that state. The reference walks the tree node by node in float64.
"""

from __future__ import annotations

import argparse

import torch

from bole_vllm.kernels.commit import LayerTable, commit_factor
from bole_vllm.kernels.conv import NodeInputs, tree_inputs
from bole_vllm.kernels.factors import tree_factors
from bole_vllm.kernels.solve import NODE_BLOCK, tree_solve
from bole_vllm.kernels.topology import Forest, build_forest, check_integrity

HK, HV, DK, DV = 2, 4, 128, 128  # key heads, value heads and their sizes
CHANNELS, WIDTH = 2 * HK * DK + HV * DV, 4  # of the causal convolution
SLOT = 1  # the request's state slot (0 is the null slot)
TOLERANCE = 1e-4


def random_tree(num_nodes: int, max_depth: int, device: torch.device) -> tuple[Forest, list[int]]:
    """A forest of one random tree, and its parents (before their children; node 0 is the root)."""
    parents, depths = [-1], [0]
    while len(parents) < num_nodes:
        parent = int(torch.randint(len(parents), ()))
        if depths[parent] < max_depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    forest = Forest.allocate(max_requests=1, max_nodes=num_nodes, max_depth=max_depth, device=device)
    stored = torch.tensor([parents], dtype=torch.int32, device=device)
    build_forest(
        forest,
        slot_parent=stored,
        slot_token=torch.arange(num_nodes, dtype=torch.int32, device=device)[None],
        slot_logprob=-torch.tensor([depths], dtype=torch.float32, device=device),
        slot_num_nodes=torch.tensor([num_nodes], dtype=torch.int32, device=device),
        slot_of_request=torch.tensor([0], device=device),
        is_tree=torch.tensor([True], device=device),
        query_start=torch.tensor([0, num_nodes], dtype=torch.int32, device=device),
        root_token=torch.zeros(num_nodes, dtype=torch.int32, device=device),
    )
    check_integrity(forest, num_requests=1)
    return forest, parents


def serial(parents: list[int], q, k, v, g, beta, state) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs [T, HV, DV] and the state [HV, DK, DV] after every node, one recurrence step per node in float64."""
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    outputs, states = [], []
    for i, parent in enumerate(parents):
        # value head h reads key head h // (HV // HK)
        q_i, k_i = (t[i].repeat_interleave(HV // HK, dim=0) for t in (q, k))
        decayed = (state if parent < 0 else states[parent]) * g[i].exp()[:, None, None]
        u = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", decayed, k_i))
        states.append(decayed + k_i[:, :, None] * u[:, None, :])
        outputs.append(torch.einsum("hkv,hk->hv", states[i], q_i))
    return torch.stack(outputs), states


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32, help="tree nodes, root included (default: 32)")
    parser.add_argument("--depth", type=int, default=8, help="levels below the root (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    forest, parents = random_tree(args.nodes, args.depth, device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=device)

    # [T, ...] what a layer's projections give per token row: convolution inputs, decay and write gate before their activations
    x, a, b = normal(args.nodes, CHANNELS).bfloat16(), normal(args.nodes, HV), normal(args.nodes, HV)
    # the layer's parameters
    weight, A_log, dt_bias = (normal(CHANNELS, WIDTH) * 0.5).bfloat16(), normal(HV) - 2, normal(HV)
    # [slots, HV, DK, DV] and [slots, CHANNELS, WIDTH - 1]
    state, conv_state = normal(2, HV, DK, DV), normal(2, CHANNELS, WIDTH - 1).bfloat16()
    slot = torch.tensor([SLOT], dtype=torch.int32, device=device)

    # verify: all nodes from the state before the tree, which is only read
    nodes = NodeInputs.allocate(args.nodes, HK, DK, HV, DV, x.dtype, device)
    kept_x = torch.empty_like(x)
    tree_inputs(x, a, b, weight, None, A_log, dt_bias, conv_state, slot, forest, nodes, kept_x)
    z, y = (empty(args.nodes, HV, forest.path.shape[1]) for _ in range(2))
    out, u = empty(args.nodes, HV, DV), empty(args.nodes, HV, DV)
    tree_factors(nodes, forest, z, y)
    scratch = torch.empty_like(u) if args.nodes > NODE_BLOCK else None
    tree_solve(nodes, z, y, state, slot, forest, out, u, scratch)
    q, k = nodes.q * nodes.q_scale[..., None], nodes.k * nodes.k_scale[..., None]
    expected, states = serial(parents, q, k, nodes.v, nodes.g, nodes.beta, state[SLOT])

    # commit: the path to the deepest node becomes the state
    deepest = max(range(args.nodes), key=lambda node: len(path_to(parents, node)))
    path = path_to(parents, deepest)
    lengths = torch.tensor([len(path)], dtype=torch.int32, device=device)
    layers = LayerTable.build([state], [conv_state], groups=[0])
    commit_factor(
        layers, nodes.p[None], nodes.k[None], nodes.k_scale[None], u[None], kept_x[None], forest,
        path=torch.tensor([path], dtype=torch.int32, device=device),
        path_len=lengths,
        src_slot=slot[None],
        dst_slot=torch.tensor([[[SLOT, 0]]], dtype=torch.int32, device=device),
        dst_len=torch.tensor([[len(path), 0]], dtype=torch.int32, device=device),
    )  # fmt: skip

    errors = {"outputs": difference(out, expected), "committed state": difference(state[SLOT], states[deepest])}
    print(f"{args.nodes} nodes, path of {len(path)} committed, on {device.type}")
    for name, error in errors.items():
        print(f"{name}: largest difference to the serial recurrence {error:.1e} (relative)")
    if not max(errors.values()) < TOLERANCE:
        raise SystemExit(f"differs from the serial recurrence by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
