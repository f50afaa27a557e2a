"""Trees give plain decoding's tokens, greedy and seeded, whatever the batch looks like. Reference: trees of one node."""

from __future__ import annotations

import pytest
from e2e_helpers import Script, counted, each_leaf, generate, params, settled, stats, text_tokens

T = 8
LENGTH = 32
# name -> parents of a tree of T nodes
TOPOLOGIES = {
    "comb": [-1, 0, 1, 2, 0, 1, 2, 3],
    "early_sibling": [-1, 0, 0, 2, 3, 4, 5, 6],
    "bush": [-1, 0, 0, 0, 1, 1, 2, 3],
    "chain": [-1, 0, 1, 2, 3, 4, 5, 6],
}


@pytest.fixture(scope="module")
def greedy(engines, prompts) -> list[list[int]]:
    return settled(engines.one_node(), prompts, LENGTH)


def test_every_prompt_length_greedy_and_seeded(engines):
    """Prompts of 1..T+2 tokens, greedy and sampled rows in one batch, requests joining and leaving (4 at a time)."""
    prompts = [text_tokens(i, length) for i, length in enumerate(range(1, T + 3))]
    sampling = [params(4 + i % 3, temperature=0.8 * (i % 2), seed=100 + i) for i in range(len(prompts))]
    tree = engines.tree()
    before = stats(tree)["tree_rows"]
    assert generate(tree, prompts, sampling) == generate(engines.one_node(), prompts, sampling)
    assert stats(tree)["tree_rows"] >= before + len(prompts)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_leaf_wins_in_turn(engines, prompts, greedy, topology):
    """The next steps stay right after any leaf has won: state, conv window, KV and draft prefill follow the path."""
    parents = TOPOLOGIES[topology]
    tree = engines.tree()
    with counted(tree) as gained, Script(tree, [p + g for p, g in zip(prompts, greedy)], each_leaf(parents)):
        assert generate(tree, prompts, params(LENGTH)) == greedy
    assert gained["accepted"] > 3 * LENGTH / 2
    if topology != "chain":
        assert gained["spine_hits"] < gained["branched"]


def test_all_drafts_rejected(engines, prompts, greedy):
    tree = engines.tree()
    before = stats(tree)
    with Script(tree, [p + g for p, g in zip(prompts, greedy)], lambda i: (TOPOLOGIES["bush"], None)):
        assert generate(tree, prompts, params(16)) == [g[:16] for g in greedy]
    after = stats(tree)
    assert after["accepted"] == before["accepted"]
    assert after["tree_rows"] - before["tree_rows"] == 4 * 15


def test_many_then_none_then_drafts(engines, prompts, greedy):
    """Long acceptance, then rounds without a right draft, then drafts again."""
    pattern = [(TOPOLOGIES["chain"], 7), ([-1], None), (TOPOLOGIES["comb"], None), (TOPOLOGIES["early_sibling"], 7)]
    tree = engines.tree()
    with Script(tree, [p + g for p, g in zip(prompts, greedy)], lambda i: pattern[i % len(pattern)]):
        assert generate(tree, prompts, params(LENGTH)) == greedy
