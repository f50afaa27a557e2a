"""Text of five kinds from this machine: Python, dialogue, structured, summary, and prose at large; each split by a hash of the path.

A document's name is the package-relative path of the file that it was made of, or the seed of a generated one. `Source.held_out` of the
demo's corpus, a function of the name alone, keeps a file's code, dialogue and summary on one side of the split, here and on any machine.
"""

from __future__ import annotations

import argparse
import email
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.models.demo import corpus as demo
from benchmarks.models.docstrings import TITLE, dialogue, documented, paragraphs_of, summary
from benchmarks.models.generated import structured

Source = demo.Source
# Share of each kind in the training tokens.
SHARES = {"code": 0.6, "dialogue": 0.13, "summary": 0.1, "structured": 0.09, "prose": 0.08}
GENERATED = "generated"  # first part of the names of generated documents
GENERATED_COUNT = 6000
PROSE = re.compile(r"^(?:README|LICEN[CS]E|COPYING|AUTHORS|FAQ|NEWS|copyright).*|.*\.(?:txt|md|rst)$", re.IGNORECASE)
METADATA = re.compile(r"^(?:METADATA|PKG-INFO)$")
PROSE_ROOTS = [Path("/usr/share/doc")]  # besides the roots of the Python files; used where it is there


def distinct(sources: Iterable[Source]) -> list[Source]:
    """One source per text, none without, in hash order: what `find_sources` of the demo's corpus does for Python files."""
    texts: dict[str, Source] = {}
    for source in sources:
        if source.text:
            texts.setdefault(source.text, source)
    return sorted(texts.values(), key=lambda source: (source.order, source.name))


def find_texts(roots: list[Path], pattern: re.Pattern) -> list[Source]:
    """Text files below roots whose file names match; versions are left out of the names of metadata folders."""
    found = []
    for root in roots:
        for path in sorted(root.rglob("*")):
            if pattern.match(path.name) and (text := demo.read_source(path)):
                found.append(Source(re.sub(r"-[^/-]+\.(dist|egg)-info/", r".\1-info/", demo.relative_name(path, root)), text))
    return distinct(found)


def described(source: Source) -> Source:
    """A package's metadata as a summary: its name, its one-line summary, the first paragraphs of its description."""
    message = email.message_from_string(source.text)
    prose = [part for part in paragraphs_of(message.get_payload()) if part[0].isupper()]
    parts = [f"{TITLE} {message['Name']}", message["Summary"] or "", *prose]
    return Source(source.name, "\n\n".join(part for part in parts if part))


def find_documents(roots: list[Path], prose_roots: list[Path], generated: int = GENERATED_COUNT) -> dict[str, list[Source]]:
    """kind -> documents, each list in hash order. `generated` is the number of structured documents."""
    code = demo.find_sources(roots)
    things = [(source.name, list(documented(*source))) for source in code]
    names = (f"{GENERATED}/{index}" for index in range(generated))
    return {
        "code": code,
        "dialogue": distinct(Source(name, dialogue(found)) for name, found in things),
        "summary": distinct([*(Source(name, summary(found)) for name, found in things), *map(described, find_texts(roots, METADATA))]),
        "structured": distinct(Source(name, structured(name)) for name in names),
        "prose": find_texts([*roots, *(root for root in prose_roots if root.is_dir())], PROSE),
    }


def split(documents: dict[str, list[Source]]) -> tuple[dict[str, list[Source]], dict[str, list[Source]]]:
    """(training, held out) documents by kind."""
    halves = {kind: demo.split(sources, []) for kind, sources in documents.items()}
    return {kind: half[0] for kind, half in halves.items()}, {kind: half[1] for kind, half in halves.items()}


def sample(documents: dict[str, list[Source]], size: int) -> list[Source]:
    """The first documents of every kind, about `size` characters in all, the kinds by their shares."""
    chosen = []
    for kind, sources in documents.items():
        ends = np.cumsum([len(source.text) for source in sources])
        chosen += sources[: int(np.searchsorted(ends, SHARES[kind] * size)) + 1]
    return chosen


def mix(streams: dict[str, np.ndarray]) -> np.ndarray:
    """One stream of token ids [total]: code once, the other kinds cut or repeated to their shares beside it."""
    scale = len(streams["code"]) / SHARES["code"]
    return np.concatenate([np.resize(stream, int(SHARES[kind] * scale)) for kind, stream in streams.items() if len(stream)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the text lies; the commands that train and that make prompts must be told the same."""
    parser.add_argument("--source", nargs="+", type=Path, metavar="DIR", default=demo.default_roots(), help="folders of Python files")
    parser.add_argument("--prose", nargs="*", type=Path, metavar="DIR", default=PROSE_ROOTS, help="folders of more prose")
