"""Trees on their way to the scheduler, and a grammar's masks along their paths: against a fresh matcher for every path."""

from __future__ import annotations

import pytest
import torch

from bole_vllm.draft_tokens import DraftedTree, pack
from bole_vllm.tree_grammar import MaskedTree, fill_trees

# 40 tokens: two words of bits; the last one ends a text
VOCABULARY = ["a", "b", "ab", "1", "2", "12", ".", " ", *(f"<{i}>" for i in range(31)), "</s>"]
END = len(VOCABULARY) - 1
RULES = {
    "items": 'root ::= ([ab]+ [12] " "?)+ "."?',
    "one of three": 'root ::= "ab1." | "a2" | "12"',
}


class OtherGrammar:
    """The same behind vLLM's interface alone, as grammars of another library are."""

    def __init__(self, own) -> None:
        for name in ("accept_tokens", "fill_bitmask", "is_terminated", "rollback", "validate_tokens"):
            setattr(self, name, getattr(own, name))


@pytest.fixture(scope="module", params=[(rule, other) for rule in RULES for other in (False, True)], ids=str)
def make_grammar(request):
    """A fresh matcher of the rule at its start, as vLLM wraps it."""
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    rule, other = request.param
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[END])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(RULES[rule])

    def make():
        own = XgrammarGrammar(vocab_size=len(VOCABULARY), matcher=xgrammar.GrammarMatcher(compiled), ctx=compiled)
        return OtherGrammar(own) if other else own

    return make


def random_tree(gen: torch.Generator, nodes: int) -> DraftedTree:
    """Siblings are distinct, some tokens are legal nowhere, the last two nodes are pads."""
    likely = [0, 1, 2, 3, 4, 5, 6, 7, 20, END]
    tokens, parents = [], []
    while len(tokens) < nodes:
        parent = int(torch.randint(len(tokens) + 1, (1,), generator=gen))
        token = likely[int(torch.randint(len(likely), (1,), generator=gen))]
        if (parent, token) not in zip(parents, tokens):
            tokens.append(token)
            parents.append(parent)
    return DraftedTree([*tokens, -1, -1], [*parents, 0, 0])


def path_of(tree: DraftedTree, node: int) -> list[int]:
    """Tokens from below the root to the node."""
    return [] if node == 0 else [*path_of(tree, tree.parents[node - 1]), tree.tokens[node - 1]]


def test_packed_trees_come_apart_again():
    """Parents up to 255, tokens of a large vocabulary, pads; cut to fewer nodes. Seed 0."""
    gen = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 248320, (3, 255), generator=gen)
    parents = torch.randint(0, 256, (3, 255), generator=gen, dtype=torch.int32)
    tokens[1, 200:] = -1
    for row, codes in enumerate(pack(tokens, parents).tolist()):
        tree = DraftedTree.unpack(codes)
        assert tree.tokens == tokens[row].tolist()
        assert [p for p, t in zip(tree.parents, tree.tokens) if t >= 0] == parents[row][tokens[row] >= 0].tolist()
        assert tree.first(7) == DraftedTree(tree.tokens[:7], tree.parents[:7])
    assert DraftedTree.unpack([-1, -1]) == DraftedTree([-1, -1], [0, 0])


def test_the_spine_of_a_tree():
    assert DraftedTree([5, 6, 7, 8, 9], [0, 1, 2, 0, 4]).spine() == [5, 6, 7]
    assert DraftedTree([5, 6, -1], [0, 1, 0]).spine() == [5, 6]
    assert DraftedTree([5, 6], [0, 0]).spine() == [5] and DraftedTree([], []).spine() == []


def test_masks_along_paths(make_grammar):
    """Two requests at once, at the grammar's start and within a text: every legal node's row is what its path alone gives, behind an end
    too; illegal ones allow everything; the grammars are left alone. Seeds 0 to 49."""
    legal_nodes = ended = 0
    for seed in range(50):
        gen = torch.Generator().manual_seed(seed)
        starts, begun = (2, 30), ([], [0])
        trees = [MaskedTree(make_grammar(), "r", random_tree(gen, 24), start) for start in starts]
        assert trees[1].grammar.accept_tokens("r", begun[1])
        masks = torch.full((60, 2), 12345, dtype=torch.int32)
        fill_trees(trees, masks)
        for one, before in zip(trees, begun):
            legal, rows = {0}, masks[one.start :]
            for node in range(len(one.tree.tokens) + 1):
                path = path_of(one.tree, node)
                alone, own = make_grammar(), torch.full((1, 2), 0, dtype=torch.int32)
                parent_legal = node == 0 or one.tree.parents[node - 1] in legal
                if -1 not in path and parent_legal and alone.validate_tokens([*before, *path]) == [*before, *path]:
                    legal.add(node)
                    legal_nodes += node > 0
                    assert not (before or path) or alone.accept_tokens("r", [*before, *path])
                    ended += alone.is_terminated()
                    own.fill_(-1) if alone.is_terminated() else alone.fill_bitmask(own, 0)
                    assert torch.equal(rows[node], own[0]), f"node {node}, seed {seed}"
                else:
                    assert (rows[node] == -1).all(), f"node {node}, seed {seed}"
            again = torch.zeros(1, 2, dtype=torch.int32)
            one.grammar.fill_bitmask(again, 0)
            assert torch.equal(again[0], rows[0]), "the grammar is where it was"
        assert (masks[[0, 1, 29, 57, 58, 59]] == 12345).all(), "rows of nobody"
    assert legal_nodes > 60 and ended > 0
