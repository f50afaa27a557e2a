"""`python -m benchmarks offline`: engines end to end. Plain decoding, MTP chains and trees on the same prompts, one engine start an arm.

    python -m benchmarks offline --model 9b=SMALL_A --model 27b=SMALL_B --workloads DIR      # a GPU; hours
    python -m benchmarks offline --model 9b=SMALL_A --workloads DIR --quick --budget-s 540   # the first look
    python -m benchmarks offline --tiny                                                      # a CPU: every code path, no speed

How a point (shape, workload, batch size B, temperature) is timed: B requests start together through `LLMEngine.add_request`, and the clock
is read whenever a step's new tokens have arrived. Only the steps count between the one that brought the last request its first token and
the last one before the first request ended. All B requests decode through that whole window, so prefill, first tokens, the shrinking batch
at the end and a round cut off by `max_tokens` are outside. Two runs of different `max_tokens` would be the alternative; their difference
holds the shrinking tail, which is longer the more the requests' acceptance varies, so it would be biased against drafts.

The engine runs in the arm's process (VLLM_ENABLE_V1_MULTIPROCESSING=0 unless set): no message passing in a round, the same for every arm.
"""

from __future__ import annotations

import argparse

from benchmarks.offline.options import Options, add_arguments

__all__ = ["Options", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Exit status: 1 if an arm was served by the wrong path or a tree changed a greedy token beyond a tie."""
    from benchmarks.offline.runner import run_benchmark

    return run_benchmark(Options.from_args(args))
