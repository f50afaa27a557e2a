"""Drafted trees on their way to the scheduler, which masks them where a request has a grammar.

A node travels as one number: its token, and above it its parent's index in the tree. vLLM's own path for draft tokens carries it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

# bits of a token
TOKEN_BITS = 32
PAD = -1


@dataclass
class DraftedTree:
    """A request's tree on the host: nodes 1, 2, ... in their order; parents count from the root, 0."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def unpack(cls, codes: list[int]) -> DraftedTree:
        """From what `pack` made; a pad is a token of -1 at the root."""
        tokens = [PAD if code < 0 else code & ((1 << TOKEN_BITS) - 1) for code in codes]
        return cls(tokens, [max(code, 0) >> TOKEN_BITS for code in codes])

    def first(self, count: int) -> DraftedTree:
        """Its first nodes; parents come before children."""
        return DraftedTree(self.tokens[:count], self.parents[:count])

    def spine(self) -> list[int]:
        """Tokens of the top-1 chain: nodes 1, 2, ... as long as each is the child of the one before."""
        length = next((i for i, (t, p) in enumerate(zip(self.tokens, self.parents)) if t == PAD or p != i), len(self.tokens))
        return self.tokens[:length]

    def children(self) -> list[list[int]]:
        """Node -> its children that are not pads; node 0 is the root."""
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents), start=1):
            if token != PAD:
                found[parent].append(node)
        return found


def pack(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """[R, N] int64 tokens (-1: a pad) and integer parents -> [R, N] int64, -1 at pads."""
    return torch.where(tokens < 0, PAD, tokens | (parents.to(torch.int64) << TOKEN_BITS))


class TreeDraftTokensHandler(DraftTokensHandler):
    """vLLM's handler, which sends drafts to the scheduler where a grammar needs them, with the nodes' parents."""

    def __init__(self, device: torch.device, trees) -> None:
        """trees: bole_vllm.forest.TreeStore, which holds the trees that the draft tokens belong to."""
        super().__init__(device)
        self.trees = trees

    def set_draft_tokens(self, input_batch, draft_tokens: torch.Tensor) -> None:
        """draft_tokens [R, N] of the batch's requests, in node order."""
        if input_batch.has_structured_output_reqs:
            slots = input_batch.idx_mapping[: draft_tokens.shape[0]].long()
            draft_tokens = pack(draft_tokens, self.trees.parent[slots, 1 : draft_tokens.shape[1] + 1])
        super().set_draft_tokens(input_batch, draft_tokens)
