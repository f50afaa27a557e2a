"""`python -m examples.demo`: run the arms, compare, report. The last line of the output is JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from examples.demo.arms import ARMS, MAX_SEQS, PLAIN, SAMPLED, Size

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "demo_model"


def main() -> int:
    """Exit status 1: a token differs where none may."""
    options = _options()
    if not (options.model / "model.safetensors").exists():
        raise SystemExit(f"No model in {options.model}: config.json, model.safetensors, tokenizer.json and val_prompts.json are needed.")
    if options.arm:
        from examples.demo import engine

        engine.run(ARMS[options.arm], options.model, _size(options.quick), options.out)
        return 0
    return _demo(options)


def _demo(options: argparse.Namespace) -> int:
    import numpy as np
    import torch

    from examples.demo.launch import run_arms
    from examples.demo.picture import draw
    from examples.demo.report import Records, Report

    started = time.monotonic()
    options.out_dir.mkdir(parents=True, exist_ok=True)
    size = _size(options.quick)
    print(f"{len(ARMS)} engines, each {size.num_prompts} prompts of {size.prompt_tokens} tokens, {size.max_tokens} new tokens, "
          f"greedy and at temperature {SAMPLED.temperature}.", flush=True)  # fmt: skip
    paths = run_arms(options.model.resolve(), options.out_dir.resolve(), options.quick, on_gpu=torch.cuda.is_available())
    by_arm = {name: json.loads(paths[name].read_text()) for name in ARMS}
    scores = dict(np.load(paths[PLAIN.name].with_suffix(".npz")))
    round_drawn = by_arm["tree"].get("round")
    picture = options.out_dir / "tree.png" if round_drawn else None
    if picture:
        draw(round_drawn, picture)
    report = Report(Records(by_arm, scores), time.monotonic() - started, picture)
    return _print(report)


def _print(report) -> int:
    print(f"\n{report.table()}\n")
    print(f"MAT: mean accepted tokens a round, bonus included. Forwards: of the target, greedy + sampled, up to {MAX_SEQS} requests each.")
    print("Bytes/draft: what a draft holds until its round is committed; in a chain, a whole recurrent state. Seconds: with start-up.")
    distinct = report.as_json()["distinct_4grams"]
    print("A small model repeats itself, which flatters every drafter. Share of distinct 4-grams: "
          + ", ".join(f"{phase} {share:.2f}" for phase, share in distinct.items()) + ".")  # fmt: skip
    for failure in report.failures():
        print(f"FAILED: {failure}", file=sys.stderr)
    print(report.marks())
    print(json.dumps(report.as_json()), flush=True)
    return 1 if report.failures() else 0


def _size(quick: bool) -> Size:
    return Size.quick() if quick else Size()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="model folder with val_prompts.json (default: examples/demo_model)"
    )
    parser.add_argument("--out-dir", type=Path, default=Path("demo-out"), help="records, logs and the picture (default: demo-out)")
    parser.add_argument("--quick", action="store_true", help="2 prompts of 16 new tokens")
    parser.add_argument("--arm", choices=ARMS, help="run one engine in this process and write its record to --out")
    parser.add_argument("--out", type=Path, help="with --arm: the record's file")
    options = parser.parse_args()
    if options.arm and not options.out:
        parser.error("--arm needs --out")
    return options


if __name__ == "__main__":
    sys.exit(main())
