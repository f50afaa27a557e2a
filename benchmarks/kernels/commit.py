"""The commit of all layers: reading and writing every request's states once is the floor; bytes kept per node, from the buffers."""

from __future__ import annotations

import functools

import torch

from benchmarks.kernels.case import Arm, Case, Check, Context, Ready
from benchmarks.kernels.gates import flag
from benchmarks.kernels.options import SEED, Options
from benchmarks.kernels.oracle import largest, normalised, path_sums
from benchmarks.kernels.problem import COMMITS, DTYPE, make_forest, random_state
from benchmarks.shapes import CONV_WIDTH, LAYERS, TINY_LAYER, LayerShape
from benchmarks.timing import num_sets
from benchmarks.trees import deepest_path, draft_trees
from bole_vllm.kernels.commit import LayerTable, commit_factor, commit_replay
from bole_vllm.kernels.conv.pointwise import native_rounds_products

PATH = 6
NODES = 64
MAX_DEPTH = 8


def cases(options: Options) -> list[Case]:
    shape = TINY_LAYER if options.tiny else LAYERS["9b"]
    nodes = 12 if options.tiny else NODES
    return [
        Case(
            "commit",
            {"shape": shape.name, "T": nodes, "B": requests, "path": PATH},
            functools.partial(_arms, shape=shape, nodes=nodes, requests=requests),
        )
        for requests in options.commit_batches()
    ]


class Caches:
    """Caches of all layers, and what a round kept of its nodes. Set i of the requests owns slots 1 + i B .. (i + 1) B."""

    def __init__(self, shape: LayerShape, nodes: int, requests: int, device: torch.device, sets: int | None) -> None:
        self.shape, self.requests, self.device = shape, requests, device
        self.num_sets = sets or num_sets(shape.layers * requests * shape.state_bytes)
        gen = torch.Generator(device=device).manual_seed(SEED)
        layers, heads, slots = shape.layers, shape.value_heads, self.num_sets * requests + 1

        def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(size, generator=gen, device=device).to(dtype)

        self.trees = draft_trees(requests, nodes, MAX_DEPTH, SEED)
        self.forest = make_forest(self.trees, device)
        self.paths = [deepest_path(tree, PATH) for tree in self.trees]
        capacity = self.forest.capacity
        self.ssm = [random_state(gen, slots, shape, device) for _ in range(layers)]
        self.conv = [normal(slots, CONV_WIDTH - 1, shape.channels, dtype=DTYPE).transpose(1, 2) for _ in range(layers)]
        self.weights = [(normal(shape.channels, CONV_WIDTH) * CONV_WIDTH**-0.5).to(DTYPE) for _ in range(layers)]
        self.table = LayerTable.build(self.ssm, self.conv, [0] * layers, self.weights)
        g = -0.5 * torch.rand(layers, capacity, heads, generator=gen, device=device)
        k = normal(layers, capacity, shape.key_heads, shape.key_dim, dtype=DTYPE)
        x = normal(layers, capacity, shape.channels, dtype=DTYPE)
        # what each commit keeps of a node, by the name of its argument
        self.kept = {
            "factor": {
                "p": path_sums(g.transpose(0, 1), self.trees).transpose(0, 1).contiguous(),
                "k": k,
                "k_scale": torch.rsqrt(k.float().square().sum(-1) + 1e-6),
                "u": normal(layers, capacity, heads, shape.value_dim),
                "x": x,
            },
            "replay": {"g": g, "beta": torch.sigmoid(normal(layers, capacity, heads)), "x": x},
        }
        length = [len(path) for path in self.paths]
        self.path_args = {
            "path": self._int([path + [0] * (PATH - len(path)) for path in self.paths]),
            "path_len": self._int(length),
            "dst_len": self._int([[n, 0] for n in length]),
        }
        first = [1 + i * requests for i in range(self.num_sets)]
        # in place, as a round that crosses no block boundary
        self.src = [self._int([[slot + r for r in range(requests)]]) for slot in first]
        self.dst = [self._int([[[slot + r, 0] for r in range(requests)]]) for slot in first]

    def _int(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def commit(self, kind: str, i: int) -> None:
        function = commit_factor if kind == "factor" else commit_replay
        function(layers=self.table, forest=self.forest, src_slot=self.src[i], dst_slot=self.dst[i], **self.kept[kind], **self.path_args)

    def bytes_per_node(self, kind: str) -> dict[str, int]:
        """All layers, from the shapes and dtypes of the buffers that the commit takes."""
        kept = self.kept[kind].items()
        return {name: t.numel() * t.element_size() // t.shape[1] for name, t in kept}

    def path_nodes(self) -> torch.Tensor:
        """[B, path] positions of the committed nodes in the node arrays."""
        offset = [sum(len(t) for t in self.trees[:r]) for r in range(len(self.trees))]
        return torch.tensor([[o + i for i in path] for o, path in zip(offset, self.paths)], dtype=torch.long, device=self.device)


class CommitGate:
    """States and conv states of some layers before the commit of set 0, and what they have to be after it."""

    def __init__(self, caches: Caches, kind: str) -> None:
        self.caches, self.kind = caches, kind
        last = caches.shape.layers - 1
        self.layers = sorted({0, last // 2, last})
        slots = caches.src[0][0].long()
        self.ssm = {n: caches.ssm[n][slots].double() for n in self.layers}
        self.conv = {n: caches.conv[n][slots].clone() for n in self.layers}
        self.others = {n: caches.ssm[n][0].clone() for n in self.layers}

    def checks(self) -> list[Check]:
        c, slots = self.caches, self.caches.src[0][0].long()
        want = self._factor if self.kind == "factor" else self._replay
        state = max((largest(c.ssm[n][slots], want(n)) for n in self.layers), key=lambda error: (error != error, error))
        nodes = c.path_nodes()
        conv_wrong = any(not torch.equal(c.conv[n][slots], self._window(n, nodes)[:, :, -CONV_WIDTH + 1 :]) for n in self.layers)
        null_wrong = any(not torch.equal(c.ssm[n][0], self.others[n]) for n in self.layers)
        # the replay rounds k and v to bfloat16, and a sum on the edge may fall to either side
        bound = 1e-4 if self.kind == "factor" else 4e-3
        return [Check("state", state, bound), flag("conv state", conv_wrong), flag("null slot untouched", null_wrong)]

    def _window(self, layer: int, nodes: torch.Tensor) -> torch.Tensor:
        """[B, C, 3 + path] conv inputs: the old columns, then those of the path."""
        return torch.cat([self.conv[layer], self.caches.kept[self.kind]["x"][layer][nodes].transpose(1, 2)], dim=2)

    def _factor(self, layer: int) -> torch.Tensor:
        nodes, kept, shape = self.caches.path_nodes(), self.caches.kept["factor"], self.caches.shape
        group = shape.value_heads // shape.key_heads
        # [B, path, HV]
        p = kept["p"][layer][nodes].double()
        weight = torch.exp(p[:, -1:] - p)
        k = normalised(kept["k"][layer][nodes]).repeat_interleave(group, 2)
        added = torch.einsum("bth,bthk,bthv->bhkv", weight, k, kept["u"][layer][nodes].double())
        return torch.exp(p[:, -1])[:, :, None, None] * self.ssm[layer] + added

    def _replay(self, layer: int) -> torch.Tensor:
        nodes, kept, shape = self.caches.path_nodes(), self.caches.kept["replay"], self.caches.shape
        group, keys = shape.value_heads // shape.key_heads, shape.key_heads * shape.key_dim
        window, weight = self._window(layer, nodes), self.caches.weights[layer].float()
        rounds = native_rounds_products(window, weight.to(DTYPE))
        state = self.ssm[layer].clone()
        for step in range(nodes.shape[1]):
            y = torch.zeros(window.shape[:2], device=window.device)
            for tap in range(CONV_WIDTH):
                product = window[:, :, step + tap].float() * weight[:, tap]
                y += product.to(DTYPE).float() if rounds else product
            y = (y / (1 + torch.exp(-y))).to(DTYPE)
            k = normalised(y[:, keys : 2 * keys].view(-1, shape.key_heads, shape.key_dim)).repeat_interleave(group, 1)
            v = y[:, 2 * keys :].view(-1, shape.value_heads, shape.value_dim).double()
            state = state * torch.exp(kept["g"][layer][nodes[:, step]].double())[:, :, None, None]
            u = kept["beta"][layer][nodes[:, step]].double()[:, :, None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
            state = state + k[:, :, :, None] * u[:, :, None, :]
        return state


def _arms(context: Context, shape: LayerShape, nodes: int, requests: int) -> list[Arm]:
    caches = Caches(shape, nodes, context.batch(requests), context.device, sets=None if context.timed else 1)

    def commit(kind: str) -> Ready:
        gate = CommitGate(caches, kind)
        floor = 2 * shape.layers * requests * shape.state_bytes
        sizes = caches.bytes_per_node(kind)
        return Ready(lambda i: caches.commit(kind, i), gate.checks, caches.num_sets, floor, extra={"bytes_per_node": sizes})

    return [Arm(kind, functools.partial(commit, kind)) for kind in COMMITS]
