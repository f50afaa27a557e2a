"""`python -m benchmarks kernels`: correctness gates first, then every kernel of a verify round against its floor and its baselines."""

from __future__ import annotations

import argparse

from benchmarks.kernels.options import Options, add_arguments

__all__ = ["Options", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Exit status: 1 if a correctness gate failed."""
    options = Options.from_args(args)
    options.prepare_interpreter()
    # triton reads its environment when it is imported
    from benchmarks.kernels.runner import run_benchmark

    return run_benchmark(options)
