"""`workloads`: held-out prompts of four kinds of text, unlike in how well they can be foreseen, as token ids for a benchmark.

Prompts begin where a definition, a question, a title or a document begins, and end where a reply would: after a line or a word, or after
the assistant's name. They come from held-out files only (corpus.py), under licences that let them be quoted; none repeats training text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.models import corpus
from benchmarks.models.docstrings import ASSISTANT, TITLE, USER
from benchmarks.report import write_json

TOKENS = range(32, 257)  # of a prompt; its limit is drawn evenly from these
PASSAGE = 1536  # characters in which a prompt is cut; 256 tokens are fewer
PER_DOCUMENT = 4
LONG_LINE = 32  # characters; shorter lines recur by chance


class Cut(NamedTuple):
    """Where prompts of a kind may begin, and before what they may end."""

    begin: re.Pattern
    end: re.Pattern


CUTS = {
    "code": Cut(re.compile(r"^(?:class|def|async def) ", re.MULTILINE), re.compile(r"\n")),
    "dialogue": Cut(re.compile(rf"^{USER}", re.MULTILINE), re.compile(rf"(?<=^{ASSISTANT}) ", re.MULTILINE)),
    "structured": Cut(re.compile(r"\A"), re.compile(r"\n")),
    "summary": Cut(re.compile(rf"^{TITLE} ", re.MULTILINE), re.compile(r"\s")),
}


class Prompt(NamedTuple):
    """A candidate: the document's name, its text and its tokens."""

    name: str
    text: str
    ids: list[int]


def quotable(source: corpus.Source) -> bool:
    """Whether prompts may come from this document."""
    return source.package == corpus.GENERATED or source.package.split(".")[0] in corpus.demo.QUOTED


def passage(kind: str, text: str) -> str | None:
    """What a prompt is cut from, or None where it does not suit; text begins where the prompt would."""
    if kind == "code":  # the demo's rule for code that can be quoted; near a file's end the shorter one
        return corpus.demo.excerpt(text, PASSAGE) or corpus.demo.excerpt(text, PASSAGE // 2)
    return text[:PASSAGE] if text[:PASSAGE].isascii() else None


def cut(tokenizer: Tokenizer, text: str, end: re.Pattern, limit: int) -> tuple[str, list[int]] | None:
    """The longest beginning of text that ends before a match of `end` and has at most `limit` tokens; None where that is too short."""
    reach = tokenizer.encode(text).offsets[:limit][-1][1]  # characters
    stops = [found.start() for found in end.finditer(text) if found.start() <= reach]
    ids = tokenizer.encode(text[: stops[-1]]).ids if stops else []
    return (text[: stops[-1]], ids) if TOKENS.start <= len(ids) <= limit else None


def candidates(tokenizer: Tokenizer, kind: str, source: corpus.Source, seed: int) -> Iterator[Prompt]:
    """Prompts from one document, at places that depend on the seed and the document alone."""
    rng = random.Random(f"{seed}/{kind}/{source.name}")
    starts = [found.start() for found in CUTS[kind].begin.finditer(source.text)]
    for start in rng.sample(starts, min(PER_DOCUMENT, len(starts))):
        text, limit = passage(kind, source.text[start:]), rng.choice(TOKENS)
        if text and (found := cut(tokenizer, text, CUTS[kind].end, limit)):
            yield Prompt(source.name, *found)


def spread(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Documents take turns, and packages among them; within a turn the given order stays."""
    in_document, in_package, ranked = Counter(), Counter(), []
    for prompt in prompts:
        package = prompt.name.split("/")[0]
        ranked.append(((in_document[prompt.name], in_package[package, in_document[prompt.name]]), prompt))
        in_package[package, in_document[prompt.name]] += 1
        in_document[prompt.name] += 1
    return [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])]


def long_lines(text: str) -> set[str]:
    """Stripped lines that would hardly occur twice by chance."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE}


class Known:
    """What of some texts occurs in the training text."""

    def __init__(self, texts: Iterable[str], training: list[corpus.Source]):
        self.training = training
        wanted = set().union(*map(long_lines, texts))
        self.lines: set[str] = set()
        for source in training:
            self.lines |= wanted.intersection(map(str.strip, source.text.splitlines()))

    def repeats(self, text: str) -> bool:
        """Whether more than half of the text's long lines, or all of it, is training text."""
        lines = long_lines(text)
        return 2 * len(lines & self.lines) > len(lines) or any(text in source.text for source in self.training)


def choose(tokenizer: Tokenizer, kind: str, held_out: list[corpus.Source], training: list[corpus.Source], count: int, seed: int) -> dict:
    """Prompts of one kind and what was left out: {"prompts": [Prompt], "repeated": candidates that are training text}.

    ValueError where the held-out documents hold fewer than `count`.
    """
    found = spread(p for source in held_out if quotable(source) for p in candidates(tokenizer, kind, source, seed))
    known, chosen, repeated = Known((prompt.text for prompt in found), training), {}, 0
    for prompt in found:
        if len(chosen) == count:
            break
        if known.repeats(prompt.text):
            repeated += 1
        else:
            chosen.setdefault(prompt.text, prompt)
    if len(chosen) < count:
        raise ValueError(f"{kind}: {len(chosen)} of {count} prompts found in {len(held_out)} held-out documents")
    return {"prompts": list(chosen.values()), "repeated": repeated}


def write_workloads(documents: dict[str, list[corpus.Source]], model: Path, out: Path, count: int = 64, seed: int = 0) -> dict:
    """Write NAME.jsonl, a line {"prompt_token_ids": [...]} per prompt, for every kind of CUTS, and workloads.json, which is returned."""
    tokenizer, (training, held_out) = Tokenizer.from_file(str(model / "tokenizer.json")), corpus.split(documents)
    out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    record = {"seed": seed, "tokens": [TOKENS.start, TOKENS.stop - 1], "tokenizer_sha256": digest, "workloads": {}}
    for kind in CUTS:
        made = choose(tokenizer, kind, held_out[kind], training[kind], count, seed)
        lines = (json.dumps({"prompt_token_ids": prompt.ids}) for prompt in made["prompts"])
        (out / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
        record["workloads"][kind] = {
            "prompts": count,
            "mean_tokens": round(sum(len(prompt.ids) for prompt in made["prompts"]) / count, 1),
            "left_out_as_training_text": made["repeated"],
            "documents": [prompt.name for prompt in made["prompts"]],
        }
    write_json(out / "workloads.json", record)
    return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--model", type=Path, required=True, help="folder of the small model: its tokenizer is used")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--count", type=int, default=64, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of places and lengths; which files are held out does not depend on it")
    corpus.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """The command."""
    record = write_workloads(corpus.find_documents(args.source, args.prose), args.model, args.out, args.count, args.seed)
    print(json.dumps({kind: {**made, "documents": len(set(made["documents"]))} for kind, made in record["workloads"].items()}, indent=1))
