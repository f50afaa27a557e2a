"""The options whose cost is measured, and what each promises of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# one that nothing asks for, and one with everything
NONE, ALL = "none", "all"
GREEDY = "greedy"
TOKENS_ALLOWED, LOGPROBS, MIN_TOKENS = 1024, 5, 2
BIASED = tuple(range(400, 464))
BAD_WORDS = ("self", "return", "the ")
PATTERN = r"[^0-9]*"


@dataclass(frozen=True)
class Option:
    """Arguments of SamplingParams by a name; kept: whether a request's output is as the option promises."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    kept: Callable[[Any], bool] = lambda _output: True


def options(temperature: float, tokenizer: Any) -> list[Option]:
    """NONE first, ALL last; all but GREEDY sample at the temperature."""
    from vllm.sampling_params import StructuredOutputsParams

    allowed = set(range(TOKENS_ALLOWED))
    bad = [tokenizer.encode(word, add_special_tokens=False) for word in BAD_WORDS]
    of_each = [
        Option("top_k, top_p", {"top_k": 50, "top_p": 0.95}),
        Option("min_p", {"min_p": 0.02}),
        Option("logit_bias", {"logit_bias": dict.fromkeys(BIASED, -100.0)}, lambda one: not set(BIASED) & set(one.token_ids)),
        Option("allowed_token_ids", {"allowed_token_ids": sorted(allowed)}, lambda one: set(one.token_ids) <= allowed),
        Option("penalties", {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}),
        Option("bad_words", {"bad_words": list(BAD_WORDS)}, lambda one: not any(holds(one.token_ids, word) for word in bad)),
        Option("logprobs", {"logprobs": LOGPROBS}, lambda one: all(len(place) >= LOGPROBS for place in one.logprobs)),
        Option("regex", {"structured_outputs": StructuredOutputsParams(regex=PATTERN)}, lambda one: not any(c.isdigit() for c in one.text)),
    ]
    everything = Option(
        ALL,
        {name: value for one in of_each for name, value in one.arguments.items()} | {"min_tokens": MIN_TOKENS},
        lambda output: all(one.kept(output) for one in of_each),
    )
    sampled = [Option(one.name, {"temperature": temperature, **one.arguments}, one.kept) for one in (Option(NONE), *of_each, everything)]
    return [sampled[0], Option(GREEDY, {"temperature": 0.0}), *sampled[1:]]


def holds(tokens: Sequence[int], word: list[int]) -> bool:
    """Whether the word's tokens lie in them side by side."""
    return any(list(tokens[at : at + len(word)]) == word for at in range(len(tokens) - len(word) + 1))
