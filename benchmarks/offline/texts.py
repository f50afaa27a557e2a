"""What was emitted: does it loop, and is it what plain decoding emits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from examples.demo.compare import MAX_ULPS, differences, distinct_share

# a text with a smaller share of distinct 4-grams loops, which flatters every drafter (prose and code lie above 0.8)
MIN_DISTINCT = 0.6

# tokens of a prompt and the largest scores at each, as rounds.scores gives them
Scores = dict[str, Any]


@dataclass(frozen=True)
class Parting:
    """The first token of a prompt that is not plain decoding's.

    lead_ulps: how far plain decoding's token lies above the other by its own scores, in units of the last bfloat16 place of its largest
    logit; None where they were not recorded for the same text.
    """

    prompt: int
    position: int
    lead_ulps: float | None

    @property
    def verdict(self) -> str:
        """`tie`: rounding explains it by plain decoding's scores; `beyond`: it does not; `unjudged`: no scores on record."""
        if self.lead_ulps is None:
            return "unjudged"
        return "tie" if self.lead_ulps <= MAX_ULPS else "beyond"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def lead_ulps(scores: Scores | None, tokens: list[int], position: int, other: int) -> float | None:
    """How far tokens[position] lies above `other`, by scores recorded for the text tokens[:position]; None without such.

    A greedy token beyond the recorded ones is below the last of them; that much lead is returned where it is more than a tie. Nothing is
    known of a sampled one.
    """
    if scores is None or scores["tokens"][:position] != tokens[:position] or position >= len(scores["top"]):
        return None
    top, ulp = dict(scores["top"][position]), scores["ulp"][position]
    mine = top.get(tokens[position])
    if mine is None:
        return None
    if other in top:
        return (mine - top[other]) / ulp
    least = (mine - min(top.values())) / ulp
    return least if scores["greedy"] and least > MAX_ULPS else None


def partings(plain: list[list[int]], arm: list[list[int]], scores: list[Scores] | None) -> list[Parting]:
    """First differences of each prompt's tokens. `scores`: plain decoding's; a prompt's have its index."""
    found = []
    for place in differences(plain, arm):
        prompt, position = place["prompt"], place["position"]
        here, there = plain[prompt], arm[prompt]
        inside = position < min(len(here), len(there))
        found.append(Parting(prompt, position, lead_ulps(_of(scores, prompt), here, position, there[position]) if inside else None))
    return found


def _of(scores: list[Scores] | None, prompt: int) -> Scores | None:
    return scores[prompt] if scores is not None and prompt < len(scores) else None


def equality(found: list[Parting], prompts: int) -> dict[str, Any]:
    """Counts over a point's prompts: equal, ties, beyond a tie, unjudged; the partings themselves."""
    verdicts = [parting.verdict for parting in found]
    counts = {"equal": prompts - len(found), **{name: verdicts.count(name) for name in ("tie", "beyond", "unjudged")}}
    return counts | {"partings": [parting.as_json() for parting in found]}


def repetition(tokens: list[list[int]]) -> dict[str, Any]:
    """Share of distinct 4-grams over a point's texts, share of texts that loop, and whether the point is flagged."""
    share = distinct_share(tokens)
    looping = sum(distinct_share([text]) < MIN_DISTINCT for text in tokens) / max(1, len(tokens))
    return {"distinct_4grams": round(share, 3), "looping_share": round(looping, 3), "looping": share < MIN_DISTINCT}
