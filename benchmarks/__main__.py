"""`python -m benchmarks KIND [options]`; without a kind every benchmark runs with its defaults."""

from __future__ import annotations

import argparse
import sys

from benchmarks.registry import BENCHMARKS


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    for benchmark in BENCHMARKS.values():
        benchmark.load().add_arguments(kinds.add_parser(benchmark.name, help=benchmark.help))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 where a correctness gate failed."""
    parser = build_parser()
    args = parser.parse_args(argv)
    chosen = [args] if args.kind else [parser.parse_args([name]) for name in BENCHMARKS]
    return max(BENCHMARKS[one.kind].load().run(one) for one in chosen)


if __name__ == "__main__":
    sys.exit(main())
