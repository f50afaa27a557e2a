"""What is measured: command line and grids."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import default_device, this_command

STAGES = ("verify", "native", "precision", "commit", "attention", "draft")
SEED = 20261130


@dataclass(frozen=True)
class Options:
    """One run of the benchmark."""

    only: tuple[str, ...] = STAGES
    quick: bool = False
    full: bool = False
    tiny: bool = False
    ragged: bool = False
    trace: bool = False
    # None: benchmarks/results/<device>, or no files where nothing is timed
    out: Path | None = None
    # processes that compile ahead, and this process's share if it is one of them
    jobs: int = 10
    shard: tuple[int, int] | None = None
    command: str = ""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Options:
        only = tuple(args.only.split(",")) if args.only else STAGES
        unknown = sorted(set(only) - set(STAGES))
        if unknown:
            raise SystemExit(f"--only: no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
        if args.quick and args.full:
            raise SystemExit("--quick and --full exclude each other")
        return cls(
            only=only,
            quick=args.quick,
            full=args.full,
            tiny=args.tiny or not torch.cuda.is_available(),
            ragged=args.ragged,
            trace=args.trace,
            out=args.out,
            jobs=args.jobs,
            shard=tuple(int(n) for n in args.shard.split("/")) if args.shard else None,
            command=this_command(),
        )

    @property
    def device(self) -> torch.device:
        return default_device()

    @property
    def timed(self) -> bool:
        """Tiny shapes pass the correctness gates only."""
        return not self.tiny

    @property
    def results_name(self) -> str:
        """`kernels` only for a run that measures every mark: whoever reads marks takes the newest file of that name."""
        if not self.timed:
            return "gates-kernels"
        return "partial-kernels" if self.ragged or set(self.only) != set(STAGES) else "kernels"

    def prepare_interpreter(self) -> None:
        """Without a GPU the kernels run in Triton's interpreter; call before triton is imported."""
        if self.device.type == "cpu":
            os.environ.setdefault("TRITON_INTERPRET", "1")

    def verify_grid(self) -> list[tuple[int, int]]:
        """(nodes per request, requests) of the verify cases of the 9B layer; the marks' first."""
        if self.tiny:
            return [(5, 5)]
        marks = [(64, 1), (64, 16), (16, 1), (16, 16)]
        if self.quick:
            return marks
        if self.full:
            return marks + [(t, b) for t in (8, 16, 32, 64, 128, 256) for b in (1, 2, 4, 8, 16, 32, 64) if (t, b) not in marks]
        return [*marks, (32, 1), (32, 16), (8, 1), (8, 16), (128, 1), (128, 16), (64, 4), (64, 8), (64, 32)]

    def other_grid(self) -> list[tuple[int, int]]:
        """The same for the layers of other models, which only a full run measures."""
        return [(16, 1), (16, 16), (64, 1), (64, 16)]

    def native_grid(self) -> list[tuple[int, int]]:
        if self.tiny:
            return [(4, 2)]
        if self.quick:
            return [(8, 1), (64, 16)]
        wide = (2, 4, 8, 16, 32, 64, 128) if self.full else (4, 8, 16, 64)
        return [(t, b) for t in wide for b in ((1, 4, 16, 32) if self.full else (1, 16))]

    def commit_batches(self) -> list[int]:
        if self.tiny:
            return [2]
        return [1, 2, 4, 8, 16, 32] if self.full else [1, 16]

    def attention_grid(self) -> list[tuple[int, int, int]]:
        """(rows per request, prefix, requests)."""
        if self.tiny:
            return [(5, 19, 2)]
        marks = [(64, 4096, 8), (64, 32768, 1)]
        return marks if not self.full else [*marks, (16, 4096, 8), (64, 1024, 16), (128, 4096, 4), (16, 32768, 1)]

    def draft_grid(self) -> list[tuple[str, int]]:
        """(model, requests)."""
        if self.tiny:
            return [("tiny", 2)]
        return [(shape, b) for shape in ("9b", "27b") for b in ((1, 2, 4, 8, 16, 64) if self.full else (1, 4, 16))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help=f"comma-separated stages of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="the shapes of the marks only")
    parser.add_argument("--full", action="store_true", help="all T, B, models and tensor-parallel head counts (many minutes)")
    parser.add_argument("--tiny", action="store_true", help="correctness gates on tiny shapes, no timing; what runs without a GPU")
    parser.add_argument("--ragged", action="store_true", help="verify: trees of random sizes, every fifth request empty")
    parser.add_argument("--trace", action="store_true", help="also a profiler trace of one verify round, summed up by kernel")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/<device>; without timing: none)")
    parser.add_argument("--jobs", type=int, default=10, help="processes that compile the kernels ahead of the timing (0: none)")
    parser.add_argument("--shard", help=argparse.SUPPRESS)
