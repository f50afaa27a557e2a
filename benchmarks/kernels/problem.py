"""The inputs of one layer's verify round, several independent sets of them, and the calls that are measured."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from benchmarks.shapes import CONV_WIDTH, LayerShape
from benchmarks.timing import num_sets
from benchmarks.trees import depths
from bole_vllm.kernels.conv import NodeInputs, tree_inputs
from bole_vllm.kernels.factors import tree_factors
from bole_vllm.kernels.precision import DEFAULT
from bole_vllm.kernels.serial import serial_tree
from bole_vllm.kernels.solve import NODE_BLOCK, tree_solve
from bole_vllm.kernels.topology import Forest, build_forest

DTYPE = torch.bfloat16
# snapshots of more than this need no rotation: they exceed the L2 on their own
ROTATED_SNAPSHOTS = 300 * 2**20
COMMITS = ("factor", "replay")


def make_forest(trees: list[list[int]], device: torch.device, max_depth: int | None = None) -> Forest:
    """A forest of parent lists (empty: a request without nodes, but with one token row), built by the kernel that builds it in use."""
    num_requests, max_nodes = len(trees), max(1, *(len(t) for t in trees))
    deepest = max([1] + [d for tree in trees for d in depths(tree)])
    forest = Forest.allocate(num_requests, max_nodes, deepest if max_depth is None else max_depth, device)
    parent = torch.zeros(num_requests, max_nodes, dtype=torch.int32)
    for r, tree in enumerate(trees):
        parent[r, 1 : len(tree)] = torch.tensor(tree[1:], dtype=torch.int32)
    sizes = torch.tensor([len(t) for t in trees])
    rows = torch.clamp(sizes, min=1)
    query_start = torch.zeros(num_requests + 1, dtype=torch.int32)
    query_start[1:] = torch.cumsum(rows, 0)
    shape = (num_requests, max_nodes)
    arguments = (
        parent,
        torch.arange(1, max_nodes + 1, dtype=torch.int32).repeat(num_requests, 1),
        -torch.ones(shape).cumsum(1),
        sizes.to(torch.int32),
        torch.arange(num_requests),
        sizes > 0,
        query_start,
        torch.ones(int(query_start[-1]), dtype=torch.int32),
    )
    build_forest(forest, *(t.to(device) for t in arguments))
    return forest


@dataclass
class LayerSet:
    """One layer's weights, inputs, and everything that a round writes. Request r has slot r + 1."""

    weight: torch.Tensor  # [C, 4]
    A_log: torch.Tensor  # [HV]
    dt_bias: torch.Tensor  # [HV]
    x: torch.Tensor  # [token rows, C]
    a: torch.Tensor  # [token rows, HV]
    b: torch.Tensor  # [token rows, HV]
    conv_state: torch.Tensor  # [slots, C, 3], channels innermost as vLLM stores it
    state: torch.Tensor  # [slots, HV, DK, DV], keys innermost as vLLM stores it
    inputs: NodeInputs
    o: torch.Tensor  # [token rows, HV, DV]
    u: torch.Tensor  # [capacity, HV, DV]
    z: torch.Tensor  # [capacity, HV, D]
    y: torch.Tensor  # [capacity, HV, D]
    r: torch.Tensor | None  # [capacity, HV, DV] scratch of trees larger than a block
    kept_x: torch.Tensor  # [capacity, C]


def random_state(generator: torch.Generator, slots: int, shape: LayerShape, device: torch.device) -> torch.Tensor:
    """[slots, HV, DK, DV], keys innermost."""
    size = (slots, shape.value_heads, shape.value_dim, shape.key_dim)
    return torch.randn(size, generator=generator, device=device).transpose(-1, -2)


def make_set(shape: LayerShape, rows: int, requests: int, forest: Forest, seed: int, device: torch.device) -> LayerSet:
    """Random inputs. Decays of 0.3 to 1 a token, as heads with a long memory have; outputs poisoned with NaN."""
    gen = torch.Generator(device=device).manual_seed(seed)
    heads, capacity, columns = shape.value_heads, forest.capacity, forest.path.shape[1]

    def normal(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(size, generator=gen, device=device).to(dtype)

    def poisoned(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(size, float("nan"), dtype=dtype, device=device)

    return LayerSet(
        weight=(normal(shape.channels, CONV_WIDTH, dtype=torch.float32) * CONV_WIDTH**-0.5).to(DTYPE),
        A_log=torch.rand(heads, generator=gen, device=device) * 4 - 4,
        dt_bias=normal(heads, dtype=torch.float32) * 0.5,
        x=normal(rows, shape.channels),
        a=normal(rows, heads),
        b=normal(rows, heads),
        conv_state=normal(requests + 1, CONV_WIDTH - 1, shape.channels).transpose(1, 2),
        state=random_state(gen, requests + 1, shape, device),
        inputs=NodeInputs.allocate(capacity, shape.key_heads, shape.key_dim, heads, shape.value_dim, DTYPE, device),
        o=poisoned(rows, heads, shape.value_dim, dtype=DTYPE),
        u=poisoned(capacity, heads, shape.value_dim),
        z=poisoned(capacity, heads, columns),
        y=poisoned(capacity, heads, columns),
        r=poisoned(capacity, heads, shape.value_dim) if forest.max_nodes > NODE_BLOCK else None,
        kept_x=poisoned(capacity, shape.channels, dtype=DTYPE),
    )


class Round:
    """A verify round of one layer over the trees, on several input sets; the methods are what the arms call."""

    def __init__(self, shape: LayerShape, trees: list[list[int]], seed: int, device: torch.device, sets: int | None = None) -> None:
        self.shape, self.trees, self.device = shape, trees, device
        self.forest = make_forest(trees, device)
        # token rows: those of the nodes, and one of each request without nodes
        self.rows = sum(max(1, len(t)) for t in trees)
        self.nodes = sum(len(t) for t in trees)
        self.slots = torch.arange(1, len(trees) + 1, dtype=torch.int32, device=device)
        self._seed = seed
        first = self._make(0)
        per_set = sum(t.numel() * t.element_size() for t in (first.x, first.o, first.u, first.kept_x, first.inputs.v, first.state))
        self.sets = [first] + [self._make(i) for i in range(1, sets or num_sets(per_set))]

    def _make(self, index: int) -> LayerSet:
        return make_set(self.shape, self.rows, len(self.trees), self.forest, self._seed + 7919 * index, self.device)

    @functools.cached_property
    def snapshots(self) -> list[torch.Tensor]:
        """[capacity, HV, DV, DK] state after every node, as many of them as rotation needs."""
        shape = self.shape
        size = (self.forest.capacity, shape.value_heads, shape.value_dim, shape.key_dim)
        count = max(1, min(len(self.sets), ROTATED_SNAPSHOTS // (4 * size[0] * size[1] * size[2] * size[3])))
        return [torch.empty(size, device=self.device) for _ in range(count)]

    def tree_inputs(self, i: int, overlap: bool = False) -> None:
        s = self.sets[i]
        tree_inputs(
            x=s.x,
            a=s.a,
            b=s.b,
            weight=s.weight,
            bias=None,
            A_log=s.A_log,
            dt_bias=s.dt_bias,
            conv_state=s.conv_state,
            state_slot=self.slots,
            forest=self.forest,
            out=s.inputs,
            out_x=s.kept_x,
            overlap=overlap,
        )

    def tree_factors(self, i: int, commit: str, overlap: bool = False) -> None:
        s = self.sets[i]
        tree_factors(s.inputs, self.forest, s.z if commit == "factor" else None, s.y, overlap)

    def tree_solve(self, i: int, commit: str, precision: str = DEFAULT, out_o: torch.Tensor | None = None, overlap: bool = False) -> None:
        """Solve and readout from the factors that are there; U is written for `factor`."""
        s = self.sets[i]
        z, u = (s.z, s.u) if commit == "factor" else (None, None)
        tree_solve(s.inputs, z, s.y, s.state, self.slots, self.forest, s.o if out_o is None else out_o, u, s.r, precision, overlap)

    def tree_verify(self, i: int, commit: str, precision: str = DEFAULT, out_o: torch.Tensor | None = None) -> None:
        """Everything after the node inputs."""
        self.tree_factors(i, commit)
        self.tree_solve(i, commit, precision, out_o)

    def tree_core(self, i: int, commit: str) -> None:
        """Each kernel starts while the one before it runs; the first beside the last launch, in a model a projection."""
        self.tree_inputs(i, overlap=True)
        self.tree_factors(i, commit, overlap=True)
        self.tree_solve(i, commit, overlap=True)

    def serial_tree(self, i: int, value_tile: int | None = None, num_warps: int | None = None) -> None:
        s = self.sets[i]
        snapshots = self.snapshots[i % len(self.snapshots)]
        serial_tree(s.inputs, s.state, self.slots, self.forest, snapshots, s.o, value_tile=value_tile, num_warps=num_warps)

    def serial_core(self, i: int, value_tile: int | None = None, num_warps: int | None = None) -> None:
        self.tree_inputs(i, overlap=True)
        self.serial_tree(i, value_tile, num_warps)

    @functools.cached_property
    def inputs_filled(self) -> bool:
        """Node inputs and factors of all sets computed, for arms that start from them."""
        for i in range(len(self.sets)):
            self.tree_inputs(i)
            self.tree_factors(i, "factor")
        return True

    def poison(self, *names: str) -> None:
        """NaN in these outputs of set 0, so that a gate sees what was not written."""
        for name in names:
            getattr(self.sets[0], name).fill_(float("nan"))
