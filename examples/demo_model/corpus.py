"""The training text: Python files found on this machine, split by file, and the tokenizer trained on them."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"  # token 0, put before every file
HELD_OUT_PERCENT = 2
FILE_BYTES = range(256, 512 * 1024)  # sizes taken; larger files are mostly tables
TOKENIZER_BYTES = 24 * 1024 * 1024  # the tokenizer is trained on about this much of the text
# Held-out prompts are quoted in this repository: standard library and packages under BSD, MIT or Apache licences only.
PERMISSIVE = """
    stdlib _pytest accelerate aiohttp botorch click cupy diffrax equinox flax gpytorch jax jinja2 matplotlib mpmath networkx numba numpy
    optax packaging pandas pip pygments requests rich scipy seaborn setuptools skimage sklearn statsmodels sympy torch transformers urllib3
"""
QUOTED = frozenset(PERMISSIVE.split())


class Source(NamedTuple):
    """One Python file."""

    name: str  # package-relative path, the same on every machine
    text: str

    @property
    def order(self) -> int:
        """A number that depends on the name alone: decides the split and every order in which files are taken."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")

    @property
    def held_out(self) -> bool:
        """Whether the file is kept away from training."""
        return self.order % 100 < HELD_OUT_PERCENT

    @property
    def package(self) -> str:
        """First part of the name."""
        return self.name.split("/")[0]


def default_roots() -> list[Path]:
    """The running interpreter's standard library and installed packages."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib") if Path(paths[key]).is_dir()))


def relative_name(path: Path, root: Path) -> str:
    """Name of a file that does not depend on where packages are installed; standard library files begin with 'stdlib/'."""
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            return "/".join(path.parts[path.parts.index(folder) + 1 :])
    first = "stdlib" if root == Path(sysconfig.get_paths()["stdlib"]) else root.name
    return "/".join((first, *path.relative_to(root).parts))


def read_source(path: Path) -> str | None:
    """The file's text, or None where it is too small, too large, unreadable or not UTF-8."""
    try:
        if path.stat().st_size not in FILE_BYTES:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def find_sources(roots: list[Path]) -> list[Source]:
    """Every distinct Python file under roots, in hash order."""
    texts: dict[str, str] = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            text = read_source(path)
            if text is not None:
                texts.setdefault(text, relative_name(path, root))
    return sorted((Source(name, text) for text, name in texts.items()), key=lambda source: (source.order, source.name))


def split(sources: list[Source], excluded: list[str]) -> tuple[list[Source], list[Source]]:
    """(training, held out). A file that contains one of the excluded texts is in neither."""
    kept = [source for source in sources if not any(text in source.text for text in excluded)]
    return [s for s in kept if not s.held_out], [s for s in kept if s.held_out]


def train_tokenizer(sources: list[Source], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of vocab_size tokens, the end-of-text token first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(first_bytes(sources, TOKENIZER_BYTES), trainer)
    return tokenizer


def first_bytes(sources: list[Source], limit: int):
    """Texts of the first sources, up to about limit characters in all."""
    for source in sources:
        yield source.text
        limit -= len(source.text)
        if limit <= 0:
            return


def encode(tokenizer: Tokenizer, sources: list[Source]) -> np.ndarray:
    """All sources as one stream of int16 token ids, each file after an end-of-text token."""
    parts = []
    for start in range(0, len(sources), 512):
        for encoded in tokenizer.encode_batch_fast([source.text for source in sources[start : start + 512]]):
            parts.append(np.asarray([0, *encoded.ids], dtype=np.int16))
    return np.concatenate(parts)


def excerpt(text: str, size: int) -> str | None:
    """About size characters of text from its first function or class on, ending at a line's end; None where nothing suits."""
    found = re.search(r"^(?:class|def|async def) ", text, re.MULTILINE)
    if not found or len(text) - found.start() < size:
        return None
    piece = text[found.start() : found.start() + size].rsplit("\n", 1)[0].rstrip()
    plain = piece.isascii() and not re.search(r"copyright|licen[cs]e|https?:|@\w+\.", piece, re.IGNORECASE)
    return piece if plain and len(piece) > size // 2 and max(map(len, piece.split("\n"))) < 140 else None


def choose_prompts(held_out: list[Source], count: int = 64, per_package: int = 6, size: int = 640) -> list[str]:
    """Short excerpts of held-out files, at most per_package of one package."""
    prompts, used = [], Counter()
    for source in held_out:
        piece = excerpt(source.text, size) if source.package in QUOTED and used[source.package] < per_package else None
        if piece and len(prompts) < count:
            used[source.package] += 1
            prompts.append(piece)
    return prompts


def save_tokenizer(tokenizer: Tokenizer, folder: Path, length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "model_max_length": length}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
