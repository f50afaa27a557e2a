"""Grammar masks of trees' nodes: each by the grammar's state behind its own path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import xgrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from bole_vllm.draft_tokens import DraftedTree

# a row of vLLM's bitmasks that allows every token
EVERY_TOKEN = -1
# threads that fill masks: as many as vLLM takes for large batches
THREADS = max(1, min((os.cpu_count() or 1) // 2, 8))


@dataclass
class MaskedTree:
    """A request's tree and where its masks go: rows start, start + 1, ... of its root and its nodes."""

    # vllm.v1.structured_output.backend_types.StructuredOutputGrammar
    grammar: Any
    request_id: str
    tree: DraftedTree
    start: int

    def __post_init__(self) -> None:
        self.children = self.tree.children()

    def allowed(self, node: int, masks: np.ndarray) -> list[tuple[int, int]]:
        """(child, its token) of the children that the node's mask allows."""
        row, tokens = masks[self.start + node], self.tree.tokens
        found = [(child, tokens[child - 1]) for child in self.children[node]]
        return [(child, token) for child, token in found if (int(row[token // 32]) >> (token % 32)) & 1]


def fill_trees(trees: list[MaskedTree], bitmask: torch.Tensor) -> None:
    """The trees' rows of bitmask [>= rows, words] int32, in place: bit t % 32 of word t // 32, token t may follow.

    The grammars are left as they were. A node whose token its parent's mask forbids is never accepted: it and what hangs below costs
    nothing, and its row allows everything. Behind a grammar's end everything is allowed, as in plain decoding.
    """
    masks = bitmask.numpy()
    for one in trees:
        masks[one.start : one.start + len(one.children)] = EVERY_TOKEN
    trees = [one for one in trees if not one.grammar.is_terminated()]
    _fill_levels([one for one in trees if isinstance(one.grammar, XgrammarGrammar)], bitmask, masks)
    for one in trees:
        if not isinstance(one.grammar, XgrammarGrammar):
            _fill_below(one, 0, bitmask, masks)


@cache
def _filler() -> xgrammar.BatchGrammarMatcher:
    """One for all rounds, with its threads."""
    return xgrammar.BatchGrammarMatcher(max_threads=THREADS)


def _fill_levels(trees: list[MaskedTree], bitmask: torch.Tensor, masks: np.ndarray) -> None:
    """xgrammar: all nodes of a depth at once, on several threads. A copy of a matcher takes less time than one mask by far."""
    level = [(one, 0, one.grammar.matcher) for one in trees]
    while level:
        _filler().batch_fill_next_token_bitmask([matcher for *_, matcher in level], bitmask, [one.start + node for one, node, _ in level])
        below = []
        for one, node, matcher in level:
            for child, token in one.allowed(node, masks):
                after = matcher.fork()
                if after.accept_token(token) and not after.is_terminated():
                    below.append((one, child, after))
        level = below


def _fill_below(one: MaskedTree, node: int, bitmask: torch.Tensor, masks: np.ndarray) -> None:
    """Any other grammar: the node's row, where its grammar has come to, and those below, there and back."""
    one.grammar.fill_bitmask(bitmask, one.start + node)
    for child, token in one.allowed(node, masks):
        if one.grammar.accept_tokens(one.request_id, [token]):
            if not one.grammar.is_terminated():
                _fill_below(one, child, bitmask, masks)
            one.grammar.rollback(1)
