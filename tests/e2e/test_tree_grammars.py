"""Structured outputs on whole trees: plain decoding's tokens under every kind of grammar, whichever leaf wins."""

from __future__ import annotations

import json
import re

from e2e_helpers import BUSH, NUMBERS, SCHEMA, Script, counted, each_leaf, generate, params, stats, structured

LENGTH = 12
GRAMMAR = 'root ::= item+ "."\nitem ::= [a-c] [0-9] " "'


def sampling_of(kinds: list[dict]) -> list:
    return [params(LENGTH, **{"seed": 3, **(structured(**kind) if kind else {})}) for kind in kinds]


def check(engines, prompts, sampling, fits) -> list[list[int]]:
    """Each leaf wins in turn, beside tokens the grammar forbids; returns the tokens. `fits`: of each request's text."""
    tree, one_node = engines.tree(), engines.one_node()
    wanted = generate(one_node, prompts, sampling)
    tokenizer = tree.get_tokenizer()
    for request, (tokens, rule) in enumerate(zip(wanted, fits, strict=True)):
        assert rule(tokenizer.decode(tokens, skip_special_tokens=True)), f"request {request}: {tokenizer.decode(tokens)!r}"
    with counted(tree) as gained, Script(tree, [p + w for p, w in zip(prompts, wanted, strict=True)], each_leaf(BUSH)):
        assert generate(tree, prompts, sampling) == wanted
    assert gained["spine_hits"] < gained["branched"], "only the chain was accepted"
    return wanted


def test_regex_choice_and_grammar_in_one_batch(engines, prompts):
    """A request without a grammar beside them keeps its whole tree as well."""
    kinds = [{"regex": NUMBERS}, {"choice": ["a cat sat", "a dog", "the end of it"]}, {"grammar": GRAMMAR}, {}]
    choice = ("a cat sat", "a dog", "the end of it").__contains__
    item = re.compile(r"([a-c][0-9] )*([a-c][0-9]?)?\.?")
    number = re.compile(r"(\d\d?(, ?)?)*")
    fits = [lambda text: bool(number.fullmatch(text)), choice, lambda text: bool(item.fullmatch(text)), lambda text: True]
    check(engines, prompts, sampling_of(kinds), fits)


def test_json_greedy_and_sampled(engines, prompts):
    """A schema, greedy and at two temperatures, and any object; texts are whole or cut off by the limit."""

    def whole(text: str) -> bool:
        try:
            value = json.loads(text)
        except ValueError:
            return text.lstrip().startswith("{")
        return set(value) == {"name", "n"} and 0 <= value["n"] <= 99

    sampling = sampling_of([{"json": SCHEMA}] * 3 + [{"json_object": True}])
    sampling[1].temperature, sampling[2].temperature = 0.8, 1.3
    check(engines, prompts, sampling, [whole, whole, whole, lambda text: text.lstrip().startswith("{")])


def test_a_grammar_with_penalties_and_logprobs(engines, prompts):
    """Masks of a path and penalties of a path meet in one row; the first request also equals itself alone, with the model's own drafts."""
    sampling = sampling_of([{"regex": NUMBERS}, {"grammar": GRAMMAR}, {}, {"json": SCHEMA}])
    sampling[0].frequency_penalty, sampling[1].presence_penalty, sampling[1].temperature = 0.9, 1.0, 0.7
    sampling[2].repetition_penalty, sampling[3].logprobs = 1.4, 2
    wanted = check(engines, prompts, sampling, [lambda text: True] * 4)
    assert generate(engines.tree(), prompts[:1], sampling[0]) == wanted[:1]


def test_without_asynchronous_scheduling(engines, prompts):
    sampling = sampling_of([{"regex": NUMBERS}, {"json": SCHEMA}, {}, {"grammar": GRAMMAR}])
    tree = engines.tree(async_scheduling=False)
    before = stats(tree)
    assert generate(tree, prompts, sampling) == generate(engines.one_node(), prompts, sampling)
    assert stats(tree)["accepted"] > before["accepted"]


def test_a_grammar_that_begins_behind_reasoning(engines, prompts):
    """A reasoning parser of words that the model says: free text up to the end word, then the grammar, both inside trees."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    class Words(BaseThinkingReasoningParser):
        start_token, end_token = "import", "self"

    ReasoningParserManager.register_module("bole_test_words", force=True, module=Words)
    options = {"structured_outputs_config": {"reasoning_parser": "bole_test_words"}}
    tree, one_node = engines.tree(**options), engines.one_node(**options)
    [begin], [end] = (tree.get_tokenizer().encode(word) for word in ("import", "self"))
    begun = [[*prompt, begin] for prompt in prompts]
    sampling = sampling_of([{"regex": NUMBERS}, {"grammar": GRAMMAR}, {}, {"regex": NUMBERS}])
    wanted = generate(one_node, begun, sampling)
    assert 0 < wanted[3].index(end) < len(wanted[3]) - 8, "the last request's reasoning ends, and digits follow"
    assert end not in wanted[0], "the first one's does not"
    with Script(tree, [p + w for p, w in zip(begun, wanted, strict=True)], lambda i: (BUSH, [4, 7, 5, 6][i % 4])):
        assert generate(tree, begun, sampling) == wanted


def test_the_reference_is_vllm_itself(engines, prompts):
    """Trees of one node under a grammar against the engine without Bole."""
    sampling = sampling_of([{"regex": NUMBERS}, {"json": SCHEMA}, {"grammar": GRAMMAR}, {"choice": ["a cat sat", "a dog"]}])
    assert generate(engines.one_node(), prompts, sampling) == generate(engines.stock(), prompts, sampling)
