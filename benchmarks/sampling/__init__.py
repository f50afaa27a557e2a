"""`python -m benchmarks sampling`: what sampling options cost in a tree's round.

    python -m benchmarks sampling             # a GPU: the 9B shape, trees of 32 nodes, 1, 8 and 16 requests
    python -m benchmarks sampling --tiny      # a CPU: every option and every gate, no speed

One engine serves the same prompts with each option of benchmarks.sampling.options, and with all of them together. Reported are the
sampler's part of a round (logits to emitted tokens, parts.py) and the whole round, medians over the rounds in which all requests decoded,
and how far the device memory of serving went beyond that without any option. An option's gate is what it promises of the text.
"""

from __future__ import annotations

import argparse

from benchmarks.offline.options import Options, add_arguments

__all__ = ["add_arguments", "run"]

DEFAULTS = {"shapes": "9b", "arms": "tree-32-d8-v32768", "batches": "1,8,16", "max_tokens": 64}
TINY = {"arms": "tree-8-d4", "max_tokens": 12}


def run(args: argparse.Namespace) -> int:
    """Exit status: 1 if a text breaks what its options promise, or another path served it."""
    from benchmarks.report import default_device
    from benchmarks.sampling.runner import run_benchmark

    tiny = args.tiny or default_device().type != "cuda"
    for name, value in (TINY if tiny else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return run_benchmark(Options.from_args(args))
