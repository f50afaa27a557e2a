"""`python -m benchmarks offline`: engines end to end. Plain decoding, MTP chains and trees on the same prompts.

    python -m benchmarks offline                            # a GPU; hours
    python -m benchmarks offline --quick --budget-s 540     # the first look
    python -m benchmarks offline --shapes small --arms plain,tree-16-d6 --batches 16 --prompts 64 --repeats 1
                                                            # are outputs equal: 256 prompts, greedy and seeded, ties listed
    python -m benchmarks offline --tiny                     # a CPU: every code path, no speed

How a point (shape, workload, batch size B, temperature) is timed: B requests start together through `LLMEngine.add_request`, and the clock
is read whenever a step's new tokens have arrived. Only the steps count between the one that brought the last request its first token and
the last one before the first request ended. All B requests decode through that whole window, so prefill, first tokens, the shrinking batch
at the end and a round cut off by `max_tokens` are outside. Two runs of different `max_tokens` would be the alternative; their difference
holds the shrinking tail, which is longer the more the requests' acceptance varies, so it would be biased against drafts.

Starting an engine takes a minute or two, so arms that differ in the number of drafts only share one (arms.engines), one after the other. It
captures graphs for every arm's number of drafts, and each arm's rounds have its own number, whatever the batch size. What an engine sets
aside for the longest drafts it sets aside for all of its arms: memory is reported per engine. On a CPU chains of fewer drafts than their
engine's most emit other text than plain decoding: vLLM 0.32's convolution there takes every round for one of the most drafts.

The engine runs in its arms' process (VLLM_ENABLE_V1_MULTIPROCESSING=0 unless set): no message passing in a round, the same for every arm.
"""

from __future__ import annotations

import argparse

from benchmarks.offline.options import Options, add_arguments

__all__ = ["Options", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Exit status: 1 if an arm was served by the wrong path or a tree changed a token beyond a tie."""
    from benchmarks.offline.runner import run_benchmark

    return run_benchmark(Options.from_args(args))
