"""Loss of a demo checkpoint on prompts, and how often its drafter names the target's argmax."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from model import CHUNK, DemoModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

TOP = (1, 2, 4, 8)
DEPTH = 4  # drafted tokens measured


def load(folder: Path, device: str = "cpu") -> DemoModel:
    """The checkpoint in folder as a DemoModel with fp32 parameters."""
    net = DemoModel(json.loads((folder / "config.json").read_text()))
    net.load_state_dict(load_file(folder / "model.safetensors"))
    return net.to(device)


def windows(stream: Tensor, length: int, count: int, batch: int = 16) -> Iterable[tuple[Tensor, int]]:
    """`count` evenly spaced windows of a token stream, as (tokens [B, length], length)."""
    starts = torch.linspace(0, len(stream) - length, count).long().to(stream.device)
    for part in starts.split(batch):
        yield stream[part[:, None] + torch.arange(length, device=stream.device)].long(), length


def prompt_batches(tokenizer: Tokenizer, prompts: list[str]) -> Iterable[tuple[Tensor, int]]:
    """One prompt at a time, padded to whole chunks, as (tokens [1, padded length], length)."""
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        yield torch.tensor([ids + [0] * (-len(ids) % CHUNK)]), len(ids)


def agreement(net: DemoModel, state: Tensor, wanted: Tensor) -> Tensor:
    """Rows of drafted states [B, R, hidden] whose best k tokens hold the wanted one [B, R], counted for every k of TOP."""
    best = net.logits(state).topk(max(TOP), -1).indices
    hit = best == wanted.unsqueeze(-1)
    return torch.stack([hit[..., :k].any(-1).sum() for k in TOP]).double()


@torch.no_grad()
def evaluate(net: DemoModel, batches: Iterable[tuple[Tensor, int]], dtype: torch.dtype = torch.float32) -> dict:
    """Loss (nats per predicted token) and teacher-forced agreement of the drafter with the target's argmax.

    `agreement` is for the first drafted token, by k of top k; `agreement_by_depth` is top 1 for each depth, the drafter reading its own
    hidden states and the true tokens.
    """
    loss, predicted = torch.zeros((), dtype=torch.double), 0
    hits, rows = torch.zeros(DEPTH, len(TOP), dtype=torch.double), torch.zeros(DEPTH, 1, dtype=torch.double)
    for tokens, length in batches:
        hidden = net.model(tokens, dtype)
        logits = net.logits(hidden)[:, :length].float()
        loss += F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:length].flatten(), reduction="sum").cpu()
        predicted += tokens.shape[0] * (length - 1)
        argmax = logits.argmax(-1)
        for step, state in enumerate(net.draft(tokens, hidden, DEPTH)):
            last = length - 1 - step - 1  # rows whose input token p+1+step and wanted token are both inside the text
            hits[step] += agreement(net, state[:, :last], argmax[:, step + 1 : length - 1]).cpu()
            rows[step] += tokens.shape[0] * last
    share = hits / rows
    return {
        "loss": round(float(loss) / predicted, 4),
        "tokens": predicted,
        "agreement": {str(k): round(float(x), 4) for k, x in zip(TOP, share[0], strict=True)},
        "agreement_by_depth": [round(float(x), 4) for x in share[:, 0]],
    }


def main() -> None:
    """Command line."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=here, help="checkpoint folder (default: this one)")
    parser.add_argument("--prompts", type=Path, help="JSON list of texts (default: val_prompts.json of the checkpoint)")
    args = parser.parse_args()
    prompts = json.loads((args.prompts or args.folder / "val_prompts.json").read_text())
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    result = evaluate(load(args.folder), prompt_batches(tokenizer, prompts))
    result["bits_per_byte"] = round(result["loss"] * result["tokens"] / sum(len(p.encode()) for p in prompts) / 0.6931472, 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
