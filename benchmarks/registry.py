"""The benchmarks by name. A benchmark is a module with `add_arguments(parser)` and `run(args) -> exit status`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lives and what it measures."""

    name: str
    help: str
    module: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("kernels", "every kernel of a verify round against its floor and its baselines, one GPU", "benchmarks.kernels"),
        Benchmark("offline", "engines end to end: plain decoding, MTP chains and trees on the same prompts", "benchmarks.offline"),
        Benchmark("sampling", "what each sampling option costs in a tree's round", "benchmarks.sampling"),
    )
}
