"""Oracles: the best columns of logits in plain torch, and the tree's growth for one request in Python lists, with the same beam."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from .grow import TreeShape
from .top_children import MAX_STEP_LOGPROB, MIN_STEP_LOGPROB


def top_children(logits: torch.Tensor, topk: int, token_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_children.top_children` for logits of any float dtype and strides."""
    order = logits.masked_fill(logits.isnan(), -math.inf)
    column = order.sort(dim=-1, descending=True, stable=True).indices[..., :topk].contiguous()
    logprob = torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, column)
    token = column if token_ids is None else token_ids[column]
    return token, logprob.nan_to_num(nan=MIN_STEP_LOGPROB).clamp(MIN_STEP_LOGPROB, MAX_STEP_LOGPROB)


@dataclass
class Candidate:
    token: int
    # index in the table, -1: the root
    parent: int
    logprob: float
    spine: bool


@dataclass
class Growth:
    """The table of one request. `rows` maps the index of an expanded row (d-1)*w + b to its candidate."""

    table: list[Candidate] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)

    def visible_rows(self, row: int) -> set[int]:
        """Expanded rows that the frontier row may attend to: those that hold one of its ancestors, or itself."""
        path, node = [], self.frontier[row]
        while node >= 0:
            path.append(node)
            node = self.table[node].parent
        return {e for e, candidate in self.rows.items() if candidate in path}


def _children(logits: list[float], topk: int) -> list[tuple[int, float]]:
    """[(token, clamped log-probability)], best first, the lower token id first among equals."""
    largest = max(logits)
    total = largest + math.log(sum(math.exp(x - largest) for x in logits))
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:topk]
    return [(t, min(max(logits[t] - total, MIN_STEP_LOGPROB), MAX_STEP_LOGPROB)) for t in order]


def _set_frontier(growth: Growth, fresh: list[int], depth: int, shape: TreeShape) -> None:
    spine = [c for c in fresh if growth.table[c].spine]
    others = sorted((c for c in fresh if not growth.table[c].spine), key=lambda c: (-growth.table[c].logprob, c))
    growth.frontier = (spine + others)[: shape.beam]
    if depth < shape.max_depth:
        growth.rows.update({(depth - 1) * shape.beam + b: c for b, c in enumerate(growth.frontier)})


def start(logits: list[float], shape: TreeShape) -> Growth:
    """`grow.start` for one request."""
    growth = Growth()
    for j, (token, logprob) in enumerate(_children(logits, shape.topk)):
        growth.table.append(Candidate(token, -1, logprob, spine=j == 0))
    _set_frontier(growth, list(range(shape.topk)), 1, shape)
    return growth


def extend(growth: Growth, logits: list[list[float]], depth: int, shape: TreeShape) -> list[int]:
    """`grow.extend` for one request; returns the previous frontier row of every new one."""
    first, old = len(growth.table), list(growth.frontier)
    for row, node in enumerate(old):
        for j, (token, logprob) in enumerate(_children(logits[row], shape.topk)):
            parent = growth.table[node]
            growth.table.append(Candidate(token, node, parent.logprob + logprob, spine=parent.spine and j == 0))
    _set_frontier(growth, list(range(first, len(growth.table))), depth, shape)
    return [old.index(growth.table[c].parent) for c in growth.frontier]


def select(growth: Growth, shape: TreeShape) -> list[tuple[int, int, float]]:
    """`grow.select` for one request: [(token, parent node, log-probability)] of all T entries."""
    spine = [c for c, entry in enumerate(growth.table) if entry.spine]
    others = sorted((c for c, entry in enumerate(growth.table) if not entry.spine), key=lambda c: (-growth.table[c].logprob, c))
    chosen = spine + sorted(others[: shape.num_nodes - 1 - len(spine)])
    node_of = {-1: 0} | {c: i + 1 for i, c in enumerate(chosen)}
    nodes = [(-1, -1, 0.0)] + [(growth.table[c].token, node_of[growth.table[c].parent], growth.table[c].logprob) for c in chosen]
    return nodes + [(-1, 0, -math.inf)] * (shape.num_nodes - len(nodes))
