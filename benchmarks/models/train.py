"""`train`: a small hybrid model with its MTP head, trained on this machine's text for being scaled up to the large shapes.

The demo model's recipe (examples/demo_model/README.md: two stages, the drafter's gradient reaching into the target) with three changes:
text of five kinds (corpus.py), a hidden channel kept constant (constant_channel.py), and learning rates that fall as a cosine over time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.models import corpus
from benchmarks.models.constant_channel import constant_of, reserve_constant_channel
from benchmarks.models.demo import evaluate, model
from benchmarks.models.demo import train as demo
from benchmarks.models.loader import load_small
from benchmarks.models.measure import measure
from benchmarks.models.small import small_config
from benchmarks.report import environment, package_version, write_json

CONSTANT = 0.125  # in every embedding's last channel; about the spread of the other channels once trained
LEAST_CONSTANT = 2**-10  # after a final norm; scale_up.EXTRA_ROW_WEIGHT counts on it
RISE = 0.02  # share of a stage in which its learning rate rises
POINTS = 20  # of the loss curve, in each stage
SETTINGS = ("seed", "seconds", "look_ahead", "tiny", "compile")  # of the command, written to train.json


@dataclass(frozen=True)
class Limits:
    """How much of everything: sequences a step, tokens a sequence, structured documents, windows measured per kind, steps (None: time)."""

    batch: int = 64
    length: int = 1024
    generated: int = corpus.GENERATED_COUNT
    windows: int = 128
    steps: int | None = None


TINY = Limits(batch=8, length=128, generated=300, windows=8, steps=40)


def rise(progress: float) -> float:
    """Learning-rate factor of a stage's beginning."""
    return min(1.0, progress / RISE + 0.01)


def cosine(progress: float) -> float:
    """Learning-rate factor that falls from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * progress))


class SmallTrainer(demo.Trainer):
    """The demo's trainer on a network of its own, whose last hidden channel stays constant.

    `curve` holds [stage, seconds, target's loss, drafter's loss] of the training batches.
    """

    def __init__(self, net: nn.Module, stream: Tensor, args: argparse.Namespace, limits: Limits):
        settings = {**vars(args), **asdict(limits), "init": None, "rate": 1.0, "compile": False}
        super().__init__(stream, argparse.Namespace(**settings))
        self.net, self.seconds, self.limit = net, args.seconds, limits.steps
        self.curve: list[list[float]] = []
        if args.compile:
            self.compile()

    def train(self) -> None:
        """Target and drafter together, then the drafter alone."""
        channel = reserve_constant_channel(self.net, CONSTANT)
        optimizers = {module: demo.Optimizer(module) for module in (self.net.model, self.net.mtp)}
        for optimizer in optimizers.values():
            channel.follow(optimizer.adam)  # the last of an Optimizer's updates
        self.run_stage(1, demo.STAGE_1, optimizers)
        self.net.model.requires_grad_(False)
        self.run_stage(2, 1 - demo.STAGE_1, optimizers)

    def run_stage(self, stage: int, share: float, optimizers: dict[nn.Module, demo.Optimizer]) -> None:
        """One stage of this share of the time, after a pass that compiles. The drafter's rate stays level through stage 1."""
        loss_of = self.stage_1_loss if stage == 1 else self.stage_2_loss
        sum(loss_of(next(self.data[stage]))).backward()
        self.net.zero_grad(set_to_none=True)
        start, points = time.monotonic(), 0
        while (progress := self.progress(stage, share, start)) < 1:
            tokens = next(self.data[stage])
            losses = loss_of(tokens)
            sum(losses).backward()
            if stage == 1:
                optimizers[self.net.model].step(rise(progress) * cosine(progress))
            optimizers[self.net.mtp].step(rise(progress) if stage == 1 else cosine(progress))
            self.steps[stage - 1] += 1
            self.tokens += tokens.numel()
            if progress * POINTS >= points:
                points += 1
                self.curve.append([stage, round(time.monotonic() - start, 1), *(round(float(loss.detach()), 4) for loss in losses)])
                print("stage {} {:6.1f} s: target {:.3f}, drafter {:.3f}".format(*self.curve[-1]), flush=True)

    def progress(self, stage: int, share: float, start: float) -> float:
        """Done of a stage that began at `start` and gets this share of the time, or of the steps where they are limited."""
        if self.limit is not None:
            return self.steps[stage - 1] / round(self.limit * share)
        return (time.monotonic() - start) / (self.seconds * share)


def make_tokenizer(given: Path | None, training: dict[str, list[corpus.Source]], vocab_size: int) -> Tokenizer:
    """The tokenizer of a model's folder, or one trained on the mixture."""
    if given is None:
        return corpus.demo.train_tokenizer(corpus.sample(training, corpus.demo.TOKENIZER_BYTES), vocab_size)
    tokenizer = Tokenizer.from_file(str(given / "tokenizer.json"))
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(f"the tokenizer of {given} has {tokenizer.get_vocab_size()} tokens, the model {vocab_size}")
    return tokenizer


def prepare(args: argparse.Namespace, config: dict, limits: Limits) -> tuple[Tensor, dict[str, Tensor], dict]:
    """Find the text, write the tokenizer, encode.

    Returns (training stream [tokens], held-out streams by kind, figures: documents and tokens [training, held out] of every kind).
    """
    halves = corpus.split(corpus.find_documents(args.source, args.prose, limits.generated))
    tokenizer = make_tokenizer(args.tokenizer, halves[0], config["vocab_size"])
    corpus.demo.save_tokenizer(tokenizer, args.out, config["max_position_embeddings"])
    encoded = [{kind: corpus.demo.encode(tokenizer, sources) for kind, sources in half.items() if sources} for half in halves]
    training = corpus.mix(encoded[0])
    figures = {
        "documents": {kind: [len(half[kind]) for half in halves] for kind in corpus.SHARES},
        "tokens": {kind: [len(half.get(kind, ())) for half in encoded] for kind in corpus.SHARES},
        "mixed_tokens": len(training),
    }
    held_out = {kind: torch.from_numpy(stream).to(args.device) for kind, stream in encoded[1].items() if len(stream) >= limits.length}
    return torch.from_numpy(training).to(args.device), held_out, figures


def save(net: nn.Module, folder: Path) -> None:
    """Write the checkpoint; ValueError where its constant channel is not."""
    demo.save(net, folder)
    (folder / "config.json").write_text(json.dumps(net.config, indent=2) + "\n")
    if constant_of(load_small(folder)[0]) != CONSTANT:
        raise ValueError(f"the constant channel does not hold {CONSTANT}")


def train(args: argparse.Namespace) -> dict:
    """Train, save, measure what was saved. Returns what train.json holds."""
    limits, begin, on_gpu = TINY if args.tiny else Limits(), time.monotonic(), args.device.startswith("cuda")
    config = small_config(args.tiny)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    stream, held_out, figures = prepare(args, config, limits)
    print(json.dumps(figures), f"{time.monotonic() - begin:.0f} s", flush=True)
    trainer = SmallTrainer(model.DemoModel(config).to(args.device), stream, args, limits)
    trainer.train()
    save(trainer.net, args.out)
    torch.set_float32_matmul_precision("highest")
    saved = evaluate.load(args.out, args.device)
    measured = {kind: measure(saved, text, limits.length, limits.windows, trainer.dtype) for kind, text in held_out.items()}
    return {
        "environment": environment(f"python -m benchmarks.models {' '.join(sys.argv[1:])}", torch.device(args.device)),
        "packages": {name: package_version(name) for name in ("tokenizers", "safetensors", "numpy")},
        "settings": {**{key: getattr(args, key) for key in SETTINGS}, **asdict(limits)},
        "corpus": {**figures, "shares": corpus.SHARES},
        "parameters": sum(p.numel() for p in saved.parameters()),
        "steps": trainer.steps,
        "trained_tokens": trainer.tokens,
        "seconds": round(time.monotonic() - begin),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "curve": trainer.curve,
        "held_out": measured,
        "constant": CONSTANT,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seconds", type=float, default=300, help="training time, without data preparation and compilation")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; the split of the text does not depend on it")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="a model's folder: use its tokenizer")
    parser.add_argument("--look-ahead", type=float, default=2.0, help="factor on the drafter's gradient where it reaches the hidden states")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=on_gpu)
    parser.add_argument("--tiny", action="store_true", help=f"{TINY.steps} steps of a model of two layers: a check, of no other use")
    corpus.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """The command."""
    report = train(args)
    write_json(args.out / "train.json", report)
    print(json.dumps(report["held_out"], indent=1))
    least = min(found["least_constant"] for found in report["held_out"].values())
    if least < LEAST_CONSTANT:
        raise SystemExit(f"the constant channel falls to {least} after a final norm: too little for scaling up, train again")
