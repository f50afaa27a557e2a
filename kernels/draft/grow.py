"""Growing a proposal tree depth by depth: a candidate table, a beam of frontier rows, and the final selection.

A depth is two launches for the children (`top_children`) and one for the rest (`first_depth`, `next_depth`), the selection is one
(`best_nodes`); no host sync, static shapes: the whole of it can be captured in a CUDA graph.

Candidate indices are static. Depth 1 holds the root's k children at 0..k-1; depth d >= 2 holds the k children of each of the w
frontier rows of depth d-1, child j of row b at k + (d-2)*w*k + b*k + j. Frontier row 0 is always the spine (the top-1 child of the
top-1 child ...), so the spine's candidates are the first of every depth.

Scores: a step's log-probability is clamped to [-100, -1e-3], so that the cumulative one strictly decreases along a path. Every
best-n selection is then closed under parents, also where tokens have probability 1 or 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import best_nodes, first_depth, next_depth
from .next_depth import RowInputs, RowOutputs
from .top_children import top_children

WORD_BITS = 32
# fp32 still resolves MAX_STEP_LOGPROB at MAX_DEPTH * MIN_STEP_LOGPROB
MAX_DEPTH = 64


@dataclass(frozen=True)
class TreeShape:
    """Static sizes of a proposal tree."""

    # nodes of the tree, the root included (T)
    num_nodes: int
    # children drawn per expanded node (k)
    topk: int
    # depth of the spine; the root has depth 0 (D)
    max_depth: int
    # frontier rows run through the draft model per depth (w)
    beam: int

    def __post_init__(self) -> None:
        if self.num_nodes < 2:
            raise ValueError(f"a tree with drafts has at least 2 nodes, got num_nodes={self.num_nodes}")
        if self.topk < 1:
            raise ValueError(f"topk must be at least 1, got {self.topk}")
        if not 1 <= self.max_depth <= min(MAX_DEPTH, self.num_nodes - 1):
            raise ValueError(f"max_depth must be in 1..min({MAX_DEPTH}, num_nodes - 1), got {self.max_depth} with {self.num_nodes} nodes")
        if not 1 <= self.beam <= min(self.topk, WORD_BITS):
            raise ValueError(f"beam must be in 1..min(topk, {WORD_BITS}), got {self.beam} with topk={self.topk}")
        if self.num_expanded > self.num_nodes - 1:
            raise ValueError(f"{self.num_expanded} expanded rows do not fit in the {self.num_nodes - 1} scratch slots of the tree")

    @classmethod
    def plan(cls, num_nodes: int, topk: int, max_depth: int) -> TreeShape:
        """The deepest and widest shape within `max_depth` and `topk` whose expanded rows fit in the tree's num_nodes - 1 slots."""
        max_depth = min(max_depth, num_nodes - 1)
        beam = min(topk, WORD_BITS, max(1, (num_nodes - 1) // max(1, max_depth - 1)))
        return cls(num_nodes=num_nodes, topk=topk, max_depth=max_depth, beam=beam)

    @property
    def num_candidates(self) -> int:
        """M: entries of the candidate table."""
        return self.first_candidate(self.max_depth + 1)

    @property
    def num_expanded(self) -> int:
        """E: frontier rows that run through the draft model after the root."""
        return (self.max_depth - 1) * self.beam

    @property
    def num_words(self) -> int:
        """Words of a bitmask over the expanded rows."""
        return (max(self.num_expanded, 1) + WORD_BITS - 1) // WORD_BITS

    @property
    def num_selected(self) -> int:
        """Nodes that `select` fills, the root included."""
        return min(self.num_candidates, self.num_nodes - 1) + 1

    def first_candidate(self, depth: int) -> int:
        """Index of the first candidate of a depth (1-based): the spine's."""
        return 0 if depth == 1 else self.topk + (depth - 2) * self.beam * self.topk


@dataclass
class Candidates:
    """The candidate table of a batch while it grows; entries of depths not grown yet: token -1, parent -1, log-probability -inf."""

    # [R, M] int64 token id
    token: torch.Tensor
    # [R, M] int64 candidate index of the parent, -1: the root
    parent: torch.Tensor
    # [R, M] fp32 cumulative log-probability, natural log
    logprob: torch.Tensor
    # [R, w] int64 candidate index of the current frontier rows; row 0 is the spine
    frontier: torch.Tensor
    # [R, w] integer token id of the frontier rows; every depth writes to the same memory
    frontier_token: torch.Tensor
    # [R, w, num_words] int32 bit e % 32 of word e // 32 set: the frontier row may attend to expanded row e (its ancestors and
    # itself); the row of depth d (1-based) and beam b has e = (d-1)*w + b
    frontier_mask: torch.Tensor
    # [R] int32 expanded rows of each request that exist; those from there on are in no mask
    room: torch.Tensor


@dataclass
class Tree:
    """A batch's selected trees; entries from `num_nodes` on: token -1, parent 0, log-probability -inf."""

    # [R, T] int32 token id; -1 at the root (its token is the pending one)
    token: torch.Tensor
    # [R, T] int32 parent node, -1 at the root
    parent: torch.Tensor
    # [R, T] fp32 cumulative log-probability, 0 at the root
    logprob: torch.Tensor
    # valid nodes, the root included; the same for every request
    num_nodes: int


def start(logits: torch.Tensor, shape: TreeShape, token_ids: torch.Tensor | None = None) -> Candidates:
    """The table after depth 1, from the draft distribution after the root [R, V]: see `top_children` and `start_from`."""
    return start_from(*top_children(logits, shape.topk, token_ids), shape)


def start_from(
    token: torch.Tensor, logprob: torch.Tensor, shape: TreeShape, room: torch.Tensor | None = None, token_out: torch.Tensor | None = None
) -> Candidates:
    """The table after depth 1: the root's children [R, k], best first; the frontier is the w best of them.

    room       [R] int32: see `Candidates`. None: all expanded rows exist.
    token_out  [R * w] integers that hold the frontier's token ids from here on. None: a new tensor of int64.
    """
    return Candidates(*first_depth.launch(token, logprob, shape, room, token_out))


def extend(
    candidates: Candidates,
    logits: torch.Tensor,
    depth: int,
    shape: TreeShape,
    token_ids: torch.Tensor | None = None,
    outputs: RowOutputs | None = None,
    inputs: RowInputs | None = None,
) -> tuple[Candidates, torch.Tensor]:
    """Add depth `depth` (2..D): the k children of every frontier row, and move the frontier to it.

    logits     [R, w, V]: the draft distribution after every frontier row
    token_ids  as `start`
    outputs    of the frontier's rows, which become the new frontier's `inputs`: each row takes its parent's, and its position

    New frontier: row 0 is the top-1 child of row 0 (the spine), the others are the best w-1 other children of this depth by
    cumulative log-probability (ties: the lower candidate index).

    Returns `candidates`, updated in place, and source_row [R, w] int64: for every new frontier row the row, counted through the batch
    (0..R * w - 1), of the previous frontier whose child it is. At depth D the new frontier is not expanded and has no bit of its own
    in the mask. Raises ValueError on a wrong depth or shape, and if only one of outputs and inputs is given.
    """
    if not 2 <= depth <= shape.max_depth:
        raise ValueError(f"depth must be in 2..{shape.max_depth}, got {depth}")
    if logits.dim() != 3 or logits.shape[1] != shape.beam:
        raise ValueError(f"logits must be [R, {shape.beam}, V], got {tuple(logits.shape)}")
    if (outputs is None) != (inputs is None):
        raise ValueError("outputs and inputs go together: the ones are moved to the others")
    child, step = top_children(logits, shape.topk, token_ids)
    return candidates, next_depth.launch(candidates, child, step, depth, shape, outputs, inputs)


def select(candidates: Candidates, shape: TreeShape) -> Tree:
    """The tree: the root, the spine at nodes 1..D, then the best other candidates in the order of their indices (ties: the lower index).

    Closed under parents, parents before children. The number of nodes is static: min(M, T - 1) + 1.
    """
    return Tree(*best_nodes.launch(candidates, shape), num_nodes=shape.num_selected)
