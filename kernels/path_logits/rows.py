"""Logits rows of a batch whose rows are tree nodes, and the tokens on a node's own path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from ..precision import device_function
from ..topology import Forest


@dataclass(frozen=True)
class PathRows:
    """Which logits rows are nodes of which tree: of some requests of a round that follow each other.

    A request's rows are its tree's nodes in their order; a request without nodes (one that ends its prompt) has rows of no path. What a row
    has before it are its request's committed tokens, the root's among them, then the drafts on its path: depth 1 to its own.
    """

    forest: Forest
    # [R + 1] int32 request -> its first node in the forest's arrays
    node_offset: torch.Tensor
    # [R + 1] int32 request -> its first logits row, counted from the round's first
    row_start: torch.Tensor
    # [R] int32 request -> its slot in the arrays of per-request settings
    slot: torch.Tensor
    # round's row that is row 0 of the logits at hand
    first_row: int

    @classmethod
    def of_round(cls, forest: Forest, row_start: torch.Tensor, slot: torch.Tensor, start: int, end: int, first_row: int) -> PathRows:
        """Requests start..end - 1 of a round."""
        bounds = slice(start, end + 1)
        return cls(forest, forest.node_offset[bounds], row_start[bounds], slot[start:end], first_row)

    @property
    def grid(self) -> tuple[int, int]:
        """Programs for every request and node."""
        return self.slot.shape[0], self.forest.max_nodes

    @property
    def kernel_arguments(self) -> dict:
        """What every kernel here begins with."""
        forest = self.forest
        return {
            "p_node_offset": self.node_offset,
            "p_row_start": self.row_start,
            "p_slot": self.slot,
            "p_token": forest.token,
            "p_path": forest.path,
            "p_depth": forest.depth,
            "first_row": self.first_row,
            "stride_path": forest.path.stride(0),
        }


@device_function
def row_of(p_node_offset, p_row_start, first_row, i_r, i_n):
    """(row of the logits, its request's first node, whether it is a node, whether there is such a row)."""
    start, first = tl.load(p_row_start + i_r), tl.load(p_node_offset + i_r)
    exists = i_n < tl.load(p_row_start + i_r + 1) - start
    return (start - first_row + i_n).to(tl.int64), first.to(tl.int64), i_n < tl.load(p_node_offset + i_r + 1) - first, exists


@device_function
def draft_at(p_token, p_path, stride_path, first, i_n, o_depth, mask):
    """Tokens at the depths of a node's path, -1 off the mask and at pads."""
    b_node = tl.load(p_path + (first + i_n) * stride_path + o_depth, mask=mask, other=0)
    return tl.load(p_token + first + b_node, mask=mask, other=-1)


@device_function
def token_at(p_committed, p_path, p_token, total, position):
    """The token at a position of the committed tokens and then of the path. p_path: the node's, p_token: its request's nodes'."""
    committed = position < total
    node = tl.load(p_path + position - total + 1, mask=position >= total, other=0)
    draft = tl.load(p_token + node, mask=position >= total, other=-1)
    return tl.where(committed, tl.load(p_committed + position, mask=committed, other=-1), draft)
