"""Oracle: one row at a time, sorted as a whole, in plain torch."""

from __future__ import annotations

import math

import torch


def best_tokens(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[list[float], list[int]]:
    """(values, tokens) that are left of one row [V], best first, the lower token among equals."""
    x = row.float().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if temperature == 0.0:
        top_k, top_p, min_p, temperature = 1, 1.0, 0.0, 1.0
    value, token = (x / torch.tensor(temperature)).sort(descending=True, stable=True)
    value, token = value[:top_k], token[:top_k]
    if min_p > 0.0:
        kept = value >= value[0] + torch.tensor(min_p).log()
        value, token = value[kept], token[kept]
    if top_p < 1.0 and value[0] > -math.inf:
        probability = value.double().softmax(0)
        kept = probability.cumsum(0) - probability < top_p
        kept[0] = True
        value, token = value[kept], token[kept]
    return value.tolist(), token.tolist()
