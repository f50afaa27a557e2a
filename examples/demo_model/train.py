"""Train the demo checkpoint from the Python files of this machine: tokenizer, target, then drafter. About five minutes on one GPU.

Two stages, each as long as its share of --seconds, learning rates following the clock:
  1. The target learns to predict the next token; the drafter learns the target's distribution, two steps deep, on half of each batch.
     The drafter's gradient, times --look-ahead, reaches the target's hidden states, so that they come to hold what drafting needs.
  2. The target is fixed; the drafter learns on, DEPTH steps deep, each step fed the hidden states of the one before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import torch
import torch.nn.functional as F
from evaluate import DEPTH, evaluate, load, windows
from model import CONFIG, MLP, Attention, DemoModel, GatedDeltaNet, RMSNorm
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

MUON_RATE, ADAM_RATE = 0.02, 0.003
MUON_MOMENTUM, MUON_DECAY = 0.95, 0.02
DEEPER = 0.8  # weight of each drafting step relative to the one before
STAGE_1 = 0.7  # share of the time
EVAL_WINDOWS = 256


def orthogonalize(x: Tensor) -> Tensor:
    """Nearest orthogonal matrices of x [n, rows, columns], roughly: quintic Newton-Schulz iteration (K. Jordan, Muon, 2024)."""
    y = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y.mT if x.shape[-2] > x.shape[-1] else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return (y.mT if x.shape[-2] > x.shape[-1] else y).to(x.dtype)


class Muon:
    """Momentum whose matrix updates are orthogonalized, matrices of one shape together."""

    def __init__(self, params: list[nn.Parameter]):
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault(p.shape, []).append(p)
        self.momentum = {shape: torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for shape, group in self.groups.items():
            grad = torch.stack([p.grad for p in group])
            momentum = self.momentum[shape].lerp_(grad, 1 - MUON_MOMENTUM)
            update = orthogonalize(grad.lerp(momentum, MUON_MOMENTUM))
            torch._foreach_mul_(group, 1 - rate * MUON_DECAY)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * max(1, shape[0] / shape[1]) ** 0.5)


class Optimizer:
    """Muon for the matrices of a module, Adam for its embedding, norms, convolutions and gate scalars."""

    def __init__(self, module: nn.Module):
        matrices = {n for n, p in module.named_parameters() if p.ndim == 2 and min(p.shape) > 16 and "embed" not in n}
        named = dict(module.named_parameters())
        self.params = list(named.values())
        self.muon = Muon([p for n, p in named.items() if n in matrices])
        others = [p for n, p in named.items() if n not in matrices]
        self.adam = torch.optim.Adam(others, lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10, fused=self.params[0].is_cuda)

    def step(self, scale: float) -> None:
        """Clip, update at `scale` times the learning rates, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.muon.step(MUON_RATE * scale)
        self.adam.param_groups[0]["lr"] = ADAM_RATE * scale
        self.adam.step()
        for p in self.params:
            p.grad = None


def rate_at(progress: float, flat: float) -> float:
    """Learning-rate factor: a short rise, level up to `flat`, then linear to zero."""
    return min(1.0, progress / 0.02 + 0.01, max(0.0, 1 - progress) / (1 - flat))


def batches(stream: Tensor, size: int, length: int) -> Iterator[Tensor]:
    """Endless [size, length] windows of a token stream; every pass cuts it anew and shuffles."""
    offsets = torch.arange(length, device=stream.device)
    while True:
        starts = torch.arange(int(torch.randint(length, ())), len(stream) - length, length)
        starts = starts[torch.randperm(len(starts))].to(stream.device)
        for part in starts.split(size):
            if len(part) == size:
                yield stream[part[:, None] + offsets].long()


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of logits [B, T, V] against the tokens [B, T] that follow."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def soft_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy of the student's distribution against the teacher's; both logits [B, R, V]."""
    return -(teacher.float().softmax(-1) * student.float().log_softmax(-1)).sum(-1).mean()


class Trainer:
    """The network, its data and the two training losses."""

    def __init__(self, stream: Tensor, args: argparse.Namespace):
        self.net = (load(args.init) if args.init else DemoModel()).to(args.device)
        self.dtype, self.rate, self.look_ahead = torch.bfloat16, args.rate, args.look_ahead
        self.data = {1: batches(stream, args.batch, args.length), 2: batches(stream, args.batch // 2, args.length)}
        self.soft_loss, self.next_token_loss = soft_loss, next_token_loss
        self.steps, self.tokens = [0, 0], 0
        if args.compile:
            self.compile()

    def compile(self) -> None:
        """Compile the parts rather than the whole: far quicker to compile, and the layers share the result."""
        torch._dynamo.config.cache_size_limit = 64
        for module in self.net.modules():
            if isinstance(module, GatedDeltaNet | MLP | RMSNorm):
                module.compile(dynamic=False)
            elif isinstance(module, Attention):
                module.project = torch.compile(module.project, dynamic=False)
        self.soft_loss = torch.compile(soft_loss, dynamic=False)
        self.next_token_loss = torch.compile(next_token_loss, dynamic=False)

    def draft_loss(self, tokens: Tensor, hidden: Tensor, logits: Tensor, steps: int) -> Tensor:
        """Distance of the drafter's distributions, `steps` deep, from the target's at the positions drafted for."""
        head = self.net.model.embed_tokens.weight.detach().to(self.dtype)
        losses = []
        for step, state in enumerate(self.net.draft(tokens, hidden, steps)):
            student = F.linear(state[:, : -step - 1], head)
            losses.append(self.soft_loss(student, logits[:, step + 1 :]) * DEEPER**step)
        return sum(losses) / sum(DEEPER**step for step in range(steps))

    def stage_1_loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(target's loss, drafter's loss) of one batch."""
        hidden = self.net.model(tokens, self.dtype)
        logits = self.net.logits(hidden)
        part = slice(len(tokens) // 2)
        seen = hidden[part].detach().lerp(hidden[part], self.look_ahead)
        return self.next_token_loss(logits, tokens), self.draft_loss(tokens[part], seen, logits[part].detach(), 2)

    def stage_2_loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The same with the target fixed."""
        with torch.no_grad():
            hidden = self.net.model(tokens, self.dtype)
            logits = self.net.logits(hidden)
        return self.next_token_loss(logits, tokens).detach(), self.draft_loss(tokens, hidden, logits, DEPTH)

    def run(self, stage: int, seconds: float, optimizers: dict[nn.Module, Optimizer]) -> None:
        """Train for `seconds`, after one untimed pass that compiles. The drafter's rate stays level through stage 1."""
        loss_of = self.stage_1_loss if stage == 1 else self.stage_2_loss
        called = time.monotonic()
        sum(loss_of(next(self.data[stage]))).backward()
        self.net.zero_grad(set_to_none=True)
        start = reported = time.monotonic()
        print(f"stage {stage} starts after {start - called:.0f} s of compiling", flush=True)
        while (now := time.monotonic()) - start < seconds:
            progress = (now - start) / seconds
            tokens = next(self.data[stage])
            target, drafter = loss_of(tokens)
            (target + drafter).backward()
            if stage == 1:
                optimizers[self.net.model].step(self.rate * rate_at(progress, 0.4))
            drafter_rate = min(1.0, progress / 0.02 + 0.01) if stage == 1 else rate_at(0.02 + 0.98 * progress, 0.2)
            optimizers[self.net.mtp].step(self.rate * drafter_rate)
            self.steps[stage - 1] += 1
            self.tokens += tokens.numel()
            if now - reported > 5 or self.steps[stage - 1] <= 2:
                reported = now
                print(f"stage {stage} {progress:4.0%} step {self.steps[stage - 1]} loss {target:.3f} drafter {drafter:.3f}", flush=True)


def save(net: DemoModel, folder: Path) -> None:
    """Write config.json and model.safetensors, and round the network to what was written."""
    state = {name: tensor.detach().to(torch.bfloat16).contiguous().cpu() for name, tensor in net.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    net.load_state_dict(state)


def prepare(args: argparse.Namespace) -> tuple[Tensor, Tensor, dict]:
    """Train the tokenizer (or take that of --init), write it and the prompts; returns (training stream, held-out stream, figures)."""
    excluded = [text for path in args.exclude for text in json.loads(path.read_text())]
    training, held_out = corpus.split(corpus.find_sources(args.source), excluded)
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
    else:
        tokenizer = corpus.train_tokenizer(training, CONFIG["vocab_size"])
    corpus.save_tokenizer(tokenizer, args.out, CONFIG["max_position_embeddings"])
    prompts = corpus.choose_prompts(held_out)
    (args.out / "val_prompts.json").write_text(json.dumps(prompts, indent=0) + "\n")
    streams = [torch.from_numpy(corpus.encode(tokenizer, part)).to(args.device) for part in (training, held_out)]
    held_out_bytes = sum(len(source.text.encode()) for source in held_out)
    figures = {
        "files": {"train": len(training), "held_out": len(held_out)},
        "corpus_tokens": {"train": len(streams[0]), "held_out": len(streams[1])},
        "held_out_bytes_per_token": round(held_out_bytes / len(streams[1]), 3),
        "prompts": len(prompts),
    }
    return *streams, figures


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", type=Path, metavar="DIR", default=corpus.default_roots(), help="folders of Python files")
    parser.add_argument("--exclude", nargs="*", type=Path, metavar="FILE", default=[], help="JSON lists of texts: leave out files with one")
    parser.add_argument("--init", type=Path, metavar="FOLDER", help="checkpoint to go on from, with its tokenizer")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on every learning rate (less when going on from a checkpoint)")
    parser.add_argument("--look-ahead", type=float, default=2.0, help="factor on the drafter's gradient where it reaches the hidden states")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder to write (default: demo-out)")
    parser.add_argument("--seconds", type=float, default=300, help="training time, without data preparation and compilation")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step of stage 1")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


def main() -> None:
    """Train, save, measure what was saved."""
    args = parse()
    begin = time.monotonic()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    stream, held_out, figures = prepare(args)
    print(json.dumps(figures), f"{time.monotonic() - begin:.0f} s", flush=True)
    trainer = Trainer(stream, args)
    net = trainer.net
    optimizers = {module: Optimizer(module) for module in (net.model, net.mtp)}
    trainer.run(1, args.seconds * STAGE_1, optimizers)
    net.model.requires_grad_(False)
    trainer.run(2, args.seconds * (1 - STAGE_1), optimizers)
    save(net, args.out)
    torch.set_float32_matmul_precision("highest")
    result = evaluate(net, windows(held_out, args.length, EVAL_WINDOWS), trainer.dtype)
    metrics = {
        "val_loss": result["loss"],
        "val_tokens": result["tokens"],
        "mtp_agreement": result["agreement"],
        "mtp_agreement_by_depth": result["agreement_by_depth"],
        "parameters": sum(p.numel() for p in net.parameters()),
        "steps": {"target": trainer.steps[0], "drafter": sum(trainer.steps)},
        "tokens": trainer.tokens,
        "seconds": {"training": args.seconds, "all": round(time.monotonic() - begin)},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "torch": torch.__version__,
        **figures,
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
