"""`python -m benchmarks.models COMMAND [options]`: small trained models, prompts for them, and large checkpoints that compute the same.

Without a command: scale-up.
"""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "scale-up": ("folder", "write a checkpoint of a large shape that computes what a small model does"),
    "train": ("train", "train a small model from the text on this machine"),
    "workloads": ("workloads", "write held-out prompts of four kinds"),
}


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].startswith("--") and argv[0] != "--help":
        argv = ["scale-up", *argv]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {name: importlib.import_module(f"benchmarks.models.{module}") for name, (module, _) in COMMANDS.items()}
    for name, (_, text) in COMMANDS.items():
        modules[name].add_arguments(commands.add_parser(name, help=text))
    args = parser.parse_args(argv)
    modules[args.command].run(args)


if __name__ == "__main__":
    main()
