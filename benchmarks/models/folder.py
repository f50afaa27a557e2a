"""`scale-up`: a checkpoint of a large shape that computes what the small model does."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.models.loader import load_small
from benchmarks.models.scale_up import scaled_weights, write_folder, write_weights
from benchmarks.models.shapes import SHAPES, scaled_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--small", type=Path, required=True, help="folder of the small model: config, weights, tokenizer")
    parser.add_argument("--shape", choices=SHAPES, required=True, help="the large shape")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the random part")
    parser.add_argument("--device", default="cpu", help="where the tensors are made")
    parser.add_argument("--config-only", action="store_true", help="config and tokenizer only, for load_format scale_up")


def run(args: argparse.Namespace) -> None:
    """The command."""
    state, small = load_small(args.small)
    config = scaled_config(args.shape, small)
    weights = scaled_weights(state, small, config, args.seed, device=args.device)
    write_folder(args.out, config, args.small)
    if not args.config_only:
        write_weights(args.out, weights)
