"""Oracle: one row at a time, from the list of all tokens before it, in plain torch."""

from __future__ import annotations

import math

import torch


def penalise(logits: torch.Tensor, prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float) -> None:
    """One row [V] fp32, in place; `output` holds the drafts on its path."""
    vocab = logits.shape[0]
    count, seen = (
        torch.bincount(torch.tensor(tokens, dtype=torch.int64, device=logits.device), minlength=vocab)
        for tokens in (output, prompt + output)
    )
    seen = seen > 0
    factor = torch.where(logits > 0, 1.0 / torch.tensor(repetition), torch.tensor(repetition))
    logits[seen] *= factor[seen]
    logits -= frequency * count
    logits -= presence * (count > 0)


def ban(logits: torch.Tensor, output: list[int], words: list[list[int]]) -> None:
    """One row [V], in place: -inf for the last token of every word that the output's end has begun."""
    for *begin, last in words:
        if len(begin) <= len(output) and output[len(output) - len(begin) :] == begin:
            logits[last] = -math.inf


def _last(tokens: list[int], marker: list[int]) -> int:
    return max((i for i in range(len(tokens) - len(marker) + 1) if tokens[i : i + len(marker)] == marker), default=-1)


def forced_token(tokens: list[int], budget: int, start: list[int], natural: list[int], end: list[int]) -> int | None:
    """The token that a budget forces after all these tokens, prompt included; None: it forces none."""
    begun, ended = _last(tokens, start), _last(tokens, natural)
    if budget < 0 or begun < 0 or begun <= ended or len(tokens) - begun - len(start) < budget:
        return None
    sizes = [size for size in range(1, len(end)) if size <= len(tokens) and tokens[len(tokens) - size :] == end[:size]]
    return end[max(sizes, default=0)]
