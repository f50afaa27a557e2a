"""What was emitted: does it loop, and is it what plain decoding emits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from examples.demo.compare import MAX_ULPS, bf16_ulp, differences, distinct_share

# a text with a smaller share of distinct 4-grams loops, which flatters every drafter (prose and code lie above 0.8)
MIN_DISTINCT = 0.6
TOP_LOGITS = 5

# greedy tokens of a prompt and the largest logits at each, as rounds.logits gives them
Logits = dict[str, Any]


@dataclass(frozen=True)
class Parting:
    """The first token of a prompt that is not plain decoding's.

    lead_ulps: how far plain decoding's token lies above the other by its own logits, in units of the last bfloat16 place of its largest
    logit; None where they were not recorded for the same text.
    """

    prompt: int
    position: int
    lead_ulps: float | None

    @property
    def verdict(self) -> str:
        """`tie`: rounding explains it by plain decoding's logits; `beyond`: it does not; `unjudged`: no logits on record."""
        if self.lead_ulps is None:
            return "unjudged"
        return "tie" if self.lead_ulps <= MAX_ULPS else "beyond"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def lead_ulps(logits: Logits | None, tokens: list[int], position: int, other: int) -> float | None:
    """How far tokens[position] lies above `other`, by logits recorded for the text tokens[:position]; None without such.

    A token beyond the recorded ones is below the last of them; that much lead is returned where it is more than a tie.
    """
    if logits is None or logits["tokens"][:position] != tokens[:position] or position >= len(logits["top"]):
        return None
    scores = dict(logits["top"][position])
    mine = scores.get(tokens[position])
    if mine is None:
        return None
    ulp = bf16_ulp(max(scores.values()))
    if other in scores:
        return (mine - scores[other]) / ulp
    least = (mine - min(scores.values())) / ulp
    return least if least > MAX_ULPS else None


def partings(plain: list[list[int]], arm: list[list[int]], logits: list[Logits] | None) -> list[Parting]:
    """First differences of each prompt's tokens. `logits`: plain decoding's; a prompt's have its index."""
    found = []
    for place in differences(plain, arm):
        prompt, position = place["prompt"], place["position"]
        here, there = plain[prompt], arm[prompt]
        inside = position < min(len(here), len(there))
        found.append(Parting(prompt, position, lead_ulps(_of(logits, prompt), here, position, there[position]) if inside else None))
    return found


def _of(logits: list[Logits] | None, prompt: int) -> Logits | None:
    return logits[prompt] if logits is not None and prompt < len(logits) else None


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
