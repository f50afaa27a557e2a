"""Held-out prompts, as token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

DEMO_TOKENS = 40


def read_workload(path: Path, longest: int) -> list[list[int]]:
    """Prompts of a JSONL file, each line {"prompt_token_ids": [...]}, without those of more than `longest` tokens.

    Raises:
        ValueError: a line is not such an object, or no prompt is left.
    """
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            ids = json.loads(line)["prompt_token_ids"]
            if not ids or not all(isinstance(token, int) for token in ids):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'{path}:{number}: not an object with "prompt_token_ids", a list of numbers') from None
        prompts.append(ids)
    found = [ids for ids in prompts if len(ids) <= longest]
    if not found:
        raise ValueError(f"{path}: {len(prompts)} prompts, none of at most {longest} tokens")
    return found


def check_tokenizer(folder: Path, model: Path) -> None:
    """ValueError where workloads.json beside the prompts names another tokenizer than the model's."""
    about = folder / "workloads.json"
    named = json.loads(about.read_text()).get("tokenizer_sha256") if about.is_file() else None
    if named and named != hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest():
        raise ValueError(f"{folder} was made with another tokenizer than {model.name}'s")


def demo_prompts(model: Path, wanted: int) -> list[list[int]]:
    """The first `wanted` held-out texts of the demo model that have DEMO_TOKENS tokens, cut to that length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = json.loads((model / "val_prompts.json").read_text())
    encoded = (tokenizer.encode(text).ids for text in texts)
    return [ids[:DEMO_TOKENS] for ids in encoded if len(ids) >= DEMO_TOKENS][:wanted]


def groups(prompts: list[list[int]], batch: int, wanted: int) -> list[list[int]]:
    """Indices of the prompts that are served together, `batch` at a time: about `wanted` of them, one whole batch at least.

    Raises:
        ValueError: there are fewer prompts than a batch holds.
    """
    if len(prompts) < batch:
        raise ValueError(f"the workload holds {len(prompts)} prompts, fewer than {batch}")
    count = max(batch, min(wanted, len(prompts)) // batch * batch)
    return [list(range(start, start + batch)) for start in range(0, count, batch)]
