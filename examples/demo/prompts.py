"""Held-out prompts, chosen by a rule and not by their results."""

from __future__ import annotations

import json
from pathlib import Path

from examples.demo.arms import Size


def choose(model: Path, size: Size) -> list[list[int]]:
    """Token ids of the first `num_prompts` held-out texts that have `prompt_tokens` tokens, cut to that length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = json.loads((model / "val_prompts.json").read_text())
    encoded = (tokenizer.encode(text) for text in texts)
    prompts = [ids[: size.prompt_tokens] for ids in encoded if len(ids) >= size.prompt_tokens]
    if len(prompts) < size.num_prompts:
        raise SystemExit(f"{model / 'val_prompts.json'} holds {len(prompts)} texts of {size.prompt_tokens} tokens, not {size.num_prompts}.")
    return prompts[: size.num_prompts]
