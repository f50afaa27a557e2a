"""References for the gates, in plain torch and fp64, written from the equations and not from the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.shapes import CONV_WIDTH, LayerShape
from benchmarks.trees import depths
from bole_vllm.kernels.conv import NodeInputs

# fp64 states held at one time
STATE_BUDGET_BYTES = 6 * 2**30


@dataclass(frozen=True)
class Nodes:
    """The nodes of some requests of a batch, in order."""

    requests: list[int]
    # per request: index of its node 0 in the node arrays, and its first token row
    first_node: list[int]
    first_row: list[int]
    trees: list[list[int]]

    @classmethod
    def of(cls, trees: list[list[int]], state_bytes: int = 0) -> Nodes:
        """All requests, or, where their fp64 states are too many, the last and as many first ones as fit. `state_bytes`: fp32, a node."""
        nodes = [len(t) for t in trees]
        starts = [sum(nodes[:r]) for r in range(len(trees))]
        rows = [sum(max(1, n) for n in nodes[:r]) for r in range(len(trees))]
        limit = STATE_BUDGET_BYTES // max(1, 4 * state_bytes) if state_bytes else sum(nodes)
        chosen, total = [], 0
        for r in [len(trees) - 1, *range(len(trees) - 1)]:
            if not chosen or total + nodes[r] <= limit:
                chosen.append(r)
                total += nodes[r]
        chosen.sort()
        return cls(chosen, [starts[r] for r in chosen], [rows[r] for r in chosen], [trees[r] for r in chosen])

    def node_index(self, device: torch.device) -> torch.Tensor:
        """[n] positions in the node arrays."""
        return self._index(self.first_node, device)

    def row_index(self, device: torch.device) -> torch.Tensor:
        """[n] token rows."""
        return self._index(self.first_row, device)

    def _index(self, firsts: list[int], device: torch.device) -> torch.Tensor:
        return torch.tensor(
            [first + i for first, tree in zip(firsts, self.trees) for i in range(len(tree))], dtype=torch.long, device=device
        )


def node_inputs(s, shape: LayerShape, nodes: Nodes, round_products: bool) -> dict[str, torch.Tensor]:
    """q, k, v before the norms [n, heads, dim] in the activation dtype (as fp64), and g, p, beta [n, HV] fp64.

    `s`: a LayerSet. The convolution's sum is fp32 in the order of decode, so that only its last bit can differ after rounding.
    """
    device, columns = s.x.device, CONV_WIDTH - 1
    # [rows + slots * 3, C]: every possible input of the convolution
    state_rows = s.conv_state.transpose(1, 2).reshape(-1, shape.channels)
    pool = torch.cat([s.x, state_rows])
    window: list[list[int]] = []
    for r, first, tree in zip(nodes.requests, nodes.first_row, nodes.trees):
        history = [s.x.shape[0] + (r + 1) * columns + c for c in range(columns)]
        paths: list[list[int]] = []
        for i, parent in enumerate(tree):
            paths.append([*(paths[parent] if parent >= 0 else history)[-columns:], first + i])
        window += [path[-CONV_WIDTH:] for path in paths]
    index = torch.tensor(window, dtype=torch.long, device=device).view(-1, CONV_WIDTH)
    y = torch.zeros(index.shape[0], shape.channels, device=device)
    for tap in range(CONV_WIDTH):
        product = pool[index[:, tap]].float() * s.weight[:, tap].float()
        y += product.to(s.x.dtype).float() if round_products else product
    y = (y / (1 + torch.exp(-y))).to(s.x.dtype).double()
    keys = shape.key_heads * shape.key_dim
    q, k, v = y.split([keys, keys, shape.value_heads * shape.value_dim], dim=1)
    rows = nodes.row_index(device)
    z = s.a[rows].double() + s.dt_bias.double()
    g = -torch.exp(s.A_log.double()) * torch.nn.functional.softplus(z, threshold=20.0)
    return {
        "q": q.view(-1, shape.key_heads, shape.key_dim),
        "k": k.view(-1, shape.key_heads, shape.key_dim),
        "v": v.view(-1, shape.value_heads, shape.value_dim),
        "g": g,
        "p": path_sums(g, nodes.trees),
        "beta": torch.sigmoid(s.b[rows].double()),
    }


def path_sums(x: torch.Tensor, trees: list[list[int]]) -> torch.Tensor:
    """Rows [n, ...] of the nodes of all trees, in order, summed over each node's path; depth by depth."""
    out = x.clone()
    offset = [sum(len(t) for t in trees[:r]) for r in range(len(trees))]
    level = [depths(tree) for tree in trees]
    for depth in range(1, max([0, *(d for found in level for d in found)]) + 1):
        at = [(r, i) for r, found in enumerate(level) for i, d in enumerate(found) if d == depth]
        node = torch.tensor([offset[r] + i for r, i in at], dtype=torch.long, device=x.device)
        parent = torch.tensor([offset[r] + trees[r][i] for r, i in at], dtype=torch.long, device=x.device)
        out[node] = out[parent] + x[node]
    return out


def normalised(x: torch.Tensor) -> torch.Tensor:
    """L2-normalised with native decode's epsilon, fp64."""
    x = x.double()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Problem:
    """The recurrence over `Nodes`, fp64."""

    q: torch.Tensor  # [n, HK, DK] normalised and scaled
    k: torch.Tensor  # [n, HK, DK] normalised
    v: torch.Tensor  # [n, HV, DV]
    g: torch.Tensor  # [n, HV] log
    beta: torch.Tensor  # [n, HV]
    state: torch.Tensor  # [R, HV, DK, DV]
    nodes: Nodes

    @classmethod
    def of(cls, inputs: NodeInputs, state: torch.Tensor, nodes: Nodes) -> Problem:
        """From the kernel's own q, k, v, g and beta, the norms taken anew in fp64; request r has slot r + 1."""
        at = nodes.node_index(state.device)
        slots = torch.tensor([r + 1 for r in nodes.requests], device=state.device)
        return cls(
            q=normalised(inputs.q[at]) * inputs.q.shape[2] ** -0.5,
            k=normalised(inputs.k[at]),
            v=inputs.v[at].double(),
            g=inputs.g[at].double(),
            beta=inputs.beta[at].double(),
            state=state[slots].double(),
            nodes=nodes,
        )

    def solve(self, leaves: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """O and U [n, HV, DV], and the states [R, HV, DK, DV] after node `leaves[r]` of each request. One depth at a time."""
        group = self.v.shape[1] // self.k.shape[1]
        device = self.v.device
        level = [d for tree in self.nodes.trees for d in depths(tree)]
        request = [r for r, tree in enumerate(self.nodes.trees) for _ in tree]
        offset = [sum(len(t) for t in self.nodes.trees[:r]) for r in range(len(self.nodes.trees))]
        parent = [offset[r] + p if p >= 0 else -1 for r, tree in enumerate(self.nodes.trees) for p in tree]
        out_o, out_u = torch.zeros_like(self.v), torch.zeros_like(self.v)
        final = None if leaves is None else torch.zeros_like(self.state)
        place: dict[int, int] = {}
        above = self.state
        for depth in range(max(level, default=-1) + 1):
            at = [n for n, d in enumerate(level) if d == depth]
            source = [request[n] if parent[n] < 0 else place[parent[n]] for n in at]
            index = torch.tensor(at, device=device)
            k = self.k[index].repeat_interleave(group, 1)
            q = self.q[index].repeat_interleave(group, 1)
            states = above[torch.tensor(source, device=device)] * torch.exp(self.g[index])[:, :, None, None]
            u = self.beta[index][:, :, None] * (self.v[index] - torch.einsum("nhkv,nhk->nhv", states, k))
            states += k[:, :, :, None] * u[:, :, None, :]
            out_o[index], out_u[index] = torch.einsum("nhkv,nhk->nhv", states, q), u
            place = {n: i for i, n in enumerate(at)}
            for r, leaf in enumerate(leaves or ()):
                if self.nodes.trees[r] and offset[r] + leaf in place:
                    final[r] = states[place[offset[r] + leaf]]
            above = states
        return out_o, out_u, final


def largest(actual: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error over the largest magnitude; NaN stays NaN."""
    return float((actual.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-300))


def largest_by_row(actual: torch.Tensor, want: torch.Tensor) -> float:
    """The same for every row (last dimension) on its own, the worst of them."""
    error = (actual.double() - want.double()).abs().amax(-1)
    return float((error / want.double().abs().amax(-1).clamp(min=1e-300)).max())


def in_units(actual: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error in units of 2^-8 of the entry, or of a hundredth of the largest magnitude where the entry is smaller."""
    magnitude = want.double().abs()
    unit = torch.maximum(magnitude, 0.01 * magnitude.max()) * 2.0**-8
    return float(((actual.double() - want.double()).abs() / unit).max())
