"""Finds the seeds of the demo: python -m examples.demo.margins (a quarter of an hour on a CPU).

Two engines whose layers round differently may part where two candidates are nearly level, and say nothing about correctness there. The
demo demands equal tokens without any tolerance, so its sampled requests are ones without such a place: for each prompt the first seed,
from FIRST_SEED on, whose every token was at least MARGIN above the runner-up (logit / temperature + noise, the network in fp32). The rule
knows nothing of drafts.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from examples.demo.arms import SAMPLED, Size
from examples.demo.prompts import choose
from examples.demo.scores import gumbel_noise

FIRST_SEED = 1000
# bfloat16 logits between 8 and 16 are 0.0625 apart, 0.08 when divided by the temperature
MARGIN = 0.1
BATCH = 32
MODEL = Path(__file__).resolve().parents[1] / "demo_model"


def clear_seed(net, prompt: list[int], seeds: range, num_tokens: int, temperature: float, chunk: int) -> int | None:
    """The first of the seeds whose num_tokens tokens all lead by MARGIN; None if none does."""
    seed = torch.tensor(seeds)
    tokens = torch.tensor([prompt]).expand(len(seeds), -1)
    for _ in range(num_tokens):
        length = tokens.shape[1]
        padded = torch.nn.functional.pad(tokens, (0, -length % chunk))
        logits = net.logits(net.model(padded, torch.float32)[:, length - 1])
        scores = logits / temperature + gumbel_noise(seed, torch.full_like(seed, length - 1), logits.shape[1])
        best = scores.topk(2, dim=-1)
        clear = best.values[:, 0] - best.values[:, 1] >= MARGIN
        tokens, seed = torch.cat([tokens, best.indices[:, :1]], dim=1)[clear], seed[clear]
        if not len(seed):
            return None
    return int(seed[0])


@torch.no_grad()
def main() -> None:
    """Print the seeds, a list to paste into arms.py."""
    sys.path.insert(0, str(MODEL))
    from evaluate import load
    from model import CHUNK

    size, net = Size(), load(MODEL)
    chosen = []
    for i, prompt in enumerate(choose(MODEL, size)):
        batches = (range(first, first + BATCH) for first in itertools.count(FIRST_SEED, BATCH))
        found = (clear_seed(net, prompt, seeds, size.max_tokens, SAMPLED.temperature, CHUNK) for seeds in batches)
        chosen.append(next(seed for seed in found if seed is not None))
        print(f"prompt {i}: seed {chosen[-1]}", flush=True)
    print(chosen)


if __name__ == "__main__":
    main()
