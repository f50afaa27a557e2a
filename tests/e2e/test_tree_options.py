"""Options whose effect depends on a row's earlier tokens, on whole trees: plain decoding's tokens, whichever leaf wins."""

from __future__ import annotations

import pytest
from e2e_helpers import BUSH, Script, counted, each_leaf, generate, params

LENGTH = 12
TOPOLOGIES = {"comb": [-1, 0, 1, 2, 0, 1, 2, 3], "bush": BUSH}
# a word the model likes to say, as the start of reasoning, and what is forced in its place
REASONING = {"reasoning_config": {"reasoning_start_str": "self", "reasoning_end_str": "return None"}}

OPTIONS = {
    "penalties": [
        {"repetition_penalty": 1.5, "frequency_penalty": 0.7},
        {"presence_penalty": 1.2, "temperature": 0.8, "seed": 51},
        {"frequency_penalty": -0.4, "presence_penalty": 0.5, "repetition_penalty": 0.9},
        {},
    ],
    "mixed": [
        {"repetition_penalty": 1.3, "bad_words": ["self"], "logit_bias": {40: 2.5}},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 51},
        {"presence_penalty": 1.0, "temperature": 1.1, "min_p": 0.05, "seed": 7, "logprobs": 2},
        {"min_tokens": 12, "stop_token_ids": [13], "ignore_eos": False},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(engines, prompts) -> list[list[int]]:
    """What the requests say without options."""
    return generate(engines.one_node(), prompts, params(LENGTH))


def words_of(llm, tokens: list[int]) -> list[str]:
    """Two words of a text, of one and of two tokens, that vLLM bans by just these tokens."""
    tokenizer = llm.get_tokenizer()

    def banned(word: str) -> list[list[int]]:
        sampling = params(1, bad_words=[word])
        sampling.update_from_tokenizer(tokenizer)
        return sampling.bad_words_token_ids

    pieces = [[tokens[i : i + size] for i in range(2, len(tokens) - size)] for size in (1, 2)]
    return [next(text for piece in of_size if (text := tokenizer.decode(piece)).strip() and piece in banned(text)) for of_size in pieces]


def check(tree, one_node, prompts: list[list[int]], options: list[dict], parents: list[int]) -> list[list[int]]:
    """Each leaf wins in turn, beside wrong tokens; returns the tokens. What is accepted leaves the top-1 chain."""
    sampling = [params(LENGTH, **{"seed": 3, **one}) for one in options]
    wanted = generate(one_node, prompts, sampling)
    with counted(tree) as gained, Script(tree, [p + w for p, w in zip(prompts, wanted, strict=True)], each_leaf(parents)):
        assert generate(tree, prompts, sampling) == wanted
    assert gained["accepted"] > sum(map(len, wanted)) / 2
    assert gained["spine_hits"] < gained["branched"]
    return wanted


@pytest.mark.parametrize("name,topology", [("penalties", "comb"), ("mixed", "bush")])
def test_each_leaf_wins_in_turn(engines, prompts, plain, name, topology):
    """Seeds 3, 5, 7, 51; different options side by side in one batch."""
    found = check(engines.tree(), engines.one_node(), prompts, OPTIONS[name], TOPOLOGIES[topology])
    assert found[0] != plain[0], "the option has no effect"


def test_words_that_a_path_would_complete(engines, prompts, plain):
    """Of one and of two tokens, from what each request says without the ban; the last request has none."""
    words = [words_of(engines.one_node(), tokens) for tokens in plain]
    options = [{"bad_words": words[0]}, {"bad_words": words[1][1:]}, {"bad_words": words[2], "temperature": 0.7, "seed": 5}, {}]
    found = check(engines.tree(), engines.one_node(), prompts, options, TOPOLOGIES["bush"])
    assert found[0] != plain[0] and found[1] != plain[1] and found[3] == plain[3]


def test_a_thinking_budget_runs_out_inside_a_tree(engines, prompts):
    """Budgets that end before, in and behind a path; the forced tokens are drafted and accepted, too."""
    tree, one_node = engines.tree(**REASONING), engines.one_node(**REASONING)
    [start] = one_node.llm_engine.vllm_config.reasoning_config.reasoning_start_token_ids
    begun = [[*prompt, start] for prompt in prompts]
    options = [{"thinking_token_budget": n} for n in (0, 2, 5)] + [{}]
    found = check(tree, one_node, begun, options, TOPOLOGIES["bush"])
    end = one_node.llm_engine.vllm_config.reasoning_config.reasoning_end_token_ids
    assert len(end) > 1
    for tokens, budget in zip(found, (0, 2, 5)):
        assert tokens[budget : budget + len(end)] == end


def test_the_models_own_drafts_in_used_slots(engines, prompts):
    """As `LLM.generate` runs it, in the slots of batches with other options; then one request alone."""
    tree, one_node = engines.tree(), engines.one_node()
    sampling = [params(LENGTH, **{"seed": 3, **one}) for one in OPTIONS["mixed"][::-1]]
    wanted = generate(one_node, prompts, sampling)
    assert generate(tree, prompts, sampling) == wanted
    assert generate(tree, prompts[3:], sampling[3]) == wanted[3:]


def test_logits_in_parts(engines, prompts, plain, monkeypatch):
    """A round whose fp32 logits would pass vLLM's limit is sampled a few requests at a time: here, of 8 rows each, two at a time."""
    monkeypatch.setattr("bole_vllm.sampler.get_max_chunk_logits", lambda _vocab_size: 20)
    check(engines.tree(), engines.one_node(), prompts, OPTIONS["mixed"], TOPOLOGIES["comb"])
