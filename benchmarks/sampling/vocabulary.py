"""A tokenizer as large as a scaled-up model's vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED = 0


def fill_vocabulary(folder: Path) -> None:
    """Give every id of the model a text in the folder's tokenizer.json, in place: pairs of the small model's tokens, which no text is split
    into, as no merge makes them. Without them a grammar's masks, whose cost depends on the texts of the vocabulary, would see numbers
    without a text instead."""
    config = json.loads((folder / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    pieces, gen = [text for text in vocab if text not in special], random.Random(SEED)
    while len(vocab) < size:
        vocab.setdefault(gen.choice(pieces) + gen.choice(pieces), len(vocab))
    file.write_text(json.dumps(tokenizer))
