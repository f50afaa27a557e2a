"""Where two runs part, and how close the call was there. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

MAX_ULPS = 4.0  # a tie: the two layer implementations round differently, by no more than this
BF16_FRACTION_BITS = 7


@dataclass(frozen=True)
class Parting:
    """The first place where an arm's tokens differ from plain decoding's, judged by plain decoding's own scores.

    gap: score of plain decoding's token less score of the other's, at least 0; ulps: the gap in units of the last bfloat16 place
    of the step's top logit.
    """

    prompt: int
    position: int
    stock_token: int
    tree_token: int
    gap: float
    ulps: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.ulps <= MAX_ULPS

    def as_dict(self) -> dict[str, float]:
        """For JSON, rounded."""
        return {**asdict(self), "gap": round(self.gap, 5), "ulps": round(self.ulps, 3)}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing element, the length of the shorter where it is a proper prefix, None where equal."""
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def differences(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> list[dict[str, int]]:
    """[{prompt, position}] of every prompt whose tokens are not the same; empty: token for token equal."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} against {len(b)} prompts: the two runs did not serve the same requests.")
    found = ((prompt, first_difference(x, y)) for prompt, (x, y) in enumerate(zip(a, b)))
    return [{"prompt": prompt, "position": position} for prompt, position in found if position is not None]


def bf16_ulp(value: float) -> float:
    """Distance between neighbouring bfloat16 numbers at the magnitude of `value`."""
    return float(np.ldexp(1.0, int(np.frexp(abs(value))[1]) - 1 - BF16_FRACTION_BITS))


def distance(scores: np.ndarray, top_logit: float, token: int, other: int) -> float:
    """How far `token` is above `other` by one position's scores [vocab], in ulps of its top logit."""
    return (float(scores[token]) - float(scores[other])) / bf16_ulp(float(top_logit))


def partings(stock: Sequence[Sequence[int]], other: Sequence[Sequence[int]], scores: np.ndarray, top_logit: np.ndarray) -> list[Parting]:
    """Every prompt's first difference from plain decoding.

    After it the two runs read different texts and cannot be compared.

    Args:
        stock, other: tokens per prompt.
        scores: [prompts, tokens, vocab] what plain decoding maximised at each of its tokens.
        top_logit: [prompts, tokens] its largest logit there.
    """
    found = []
    for place in differences(stock, other):
        prompt, position = place["prompt"], place["position"]
        if position >= min(len(stock[prompt]), len(other[prompt])):
            raise ValueError(f"Prompt {prompt}: {len(stock[prompt])} against {len(other[prompt])} tokens; one run stopped early.")
        mine, theirs = stock[prompt][position], other[prompt][position]
        gap = float(scores[prompt, position, mine]) - float(scores[prompt, position, theirs])
        ulps = distance(scores[prompt, position], top_logit[prompt, position], mine, theirs)
        found.append(Parting(prompt, position, mine, theirs, gap, ulps))
    return found


def check_scores(tokens: Sequence[Sequence[int]], scores: np.ndarray, tolerance: float = 1e-4) -> None:
    """Plain decoding's tokens must be the best by the scores that judge the partings.

    Raises:
        ValueError: they are not, so the scores are not what the sampler saw (another seed, position or noise).
    """
    chosen = np.take_along_axis(scores, np.asarray(tokens)[:, :, None], axis=2)[:, :, 0]
    short = scores.max(axis=2) - chosen
    if not (short <= tolerance).all():  # also where a score is NaN
        prompt, position = np.argwhere(~(short <= tolerance))[0].tolist()
        raise ValueError(f"Plain decoding's token {position} of prompt {prompt} is not the best by its own scores.")


def mean_accepted(drafts: float, accepted: float) -> float:
    """Tokens per round: the accepted drafts and the bonus token."""
    return 1.0 + accepted / drafts if drafts else 1.0


def distinct_share(tokens: Sequence[Sequence[int]], length: int = 4) -> float:
    """Share of distinct n-grams within each text, over all texts: near 0 where texts repeat themselves, which flatters every drafter."""
    grams = [[tuple(row[start : start + length]) for start in range(len(row) - length + 1)] for row in tokens]
    total = sum(len(row) for row in grams)
    return sum(len(set(row)) for row in grams) / total if total else 1.0
