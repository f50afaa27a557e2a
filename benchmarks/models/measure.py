"""Loss of a small model on one kind of text, agreement of its drafter at every depth, and the reach of its constant channel."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.models.demo import evaluate as demo
from benchmarks.models.demo import train


@torch.no_grad()
def measure(net: torch.nn.Module, stream: Tensor, length: int, count: int, dtype: torch.dtype) -> dict:
    """At most `count` windows of `length` tokens of a held-out stream [tokens].

    `loss`: nats per predicted token. `agreement`: per depth from 1, by k of top k, how often the drafter's best k tokens hold the target's
    argmax, true tokens fed in. `least_constant`: the least value of the constant channel after a final norm, target or drafter.
    """
    loss, windows, least = 0.0, 0, float("inf")
    hits, rows = torch.zeros(demo.DEPTH, len(demo.TOP), dtype=torch.double), torch.zeros(demo.DEPTH, 1)
    for tokens, _ in demo.windows(stream, length, min(count, len(stream) // length)):
        hidden = net.model(tokens, dtype)
        logits = net.logits(hidden)
        loss += float(train.next_token_loss(logits, tokens)) * len(tokens)
        windows += len(tokens)
        least = min(least, float(hidden[..., -1].min()))
        argmax = logits.argmax(-1)  # [B, T] target's token after each position
        for depth, state in enumerate(net.draft(tokens, hidden, demo.DEPTH)):
            state = state[:, : length - depth - 2]  # rows whose input tokens and wanted token are all inside the window
            hits[depth] += demo.agreement(net, state, argmax[:, depth + 1 : -1]).cpu()
            rows[depth] += state.shape[0] * state.shape[1]
            least = min(least, float(state[..., -1].min()))
    share = [{str(k): round(float(x), 4) for k, x in zip(demo.TOP, row, strict=True)} for row in hits / rows]
    return {"loss": round(loss / windows, 4), "tokens": windows * (length - 1), "agreement": share, "least_constant": round(least, 5)}
