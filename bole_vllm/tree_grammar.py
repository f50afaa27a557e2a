"""Grammar masks of a tree's nodes: each by the grammar's state behind its own path."""

from __future__ import annotations

from typing import Any

import torch

from bole_vllm.draft_tokens import DraftedTree

# a row of vLLM's bitmasks that allows every token
EVERY_TOKEN = -1


def fill_tree(grammar: Any, request_id: str, tree: DraftedTree, bitmask: torch.Tensor) -> None:
    """Masks of the root and every node, rows 0..N of bitmask [>= N + 1, words] int32, in place: bit t % 32 of word t // 32, t may follow.

    `grammar` (vllm.v1.structured_output.backend_types.StructuredOutputGrammar) is left as it was. A node whose token its parent's mask
    forbids is never accepted; its row and those below it are its parent's. Behind a grammar's end everything is allowed, as in plain
    decoding.
    """
    children = tree.children()

    def visit(node: int) -> None:
        ended = grammar.is_terminated()
        if ended:
            bitmask[node].fill_(EVERY_TOKEN)
        else:
            grammar.fill_bitmask(bitmask, node)
        for child in children[node]:
            token = tree.tokens[child - 1]
            if not ended and _allows(bitmask[node], token) and grammar.accept_tokens(request_id, [token]):
                visit(child)
                grammar.rollback(1)
            else:
                copy_below(child, node)

    def copy_below(node: int, source: int) -> None:
        bitmask[node].copy_(bitmask[source])
        for child in children[node]:
            copy_below(child, source)

    bitmask[1 : len(tree.tokens) + 1].fill_(EVERY_TOKEN)  # pads, which nothing reads
    visit(0)


def _allows(row: torch.Tensor, token: int) -> bool:
    return bool((int(row[token // 32]) >> (token % 32)) & 1)
