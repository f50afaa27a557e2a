"""Prose that lies in Python sources: docstrings as a dialogue about a module's functions, and as summaries of its classes."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

# A definition whose signature holds at most two levels of brackets, and the docstring right below it.
DEFINITION = re.compile(
    r"^[ \t]*(?:async )?(def|class) (\w+)(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?[^:\n]*:[ \t]*\n"
    r'[ \t]+[rR]?"""(.*?)"""',
    re.MULTILINE | re.DOTALL,
)
MODULE = re.compile(r'\A(?:\s*#[^\n]*\n)*\s*[rR]?"""(.*?)"""', re.DOTALL)
UNWANTED = re.compile(r"^(?:[-=~]{3,}|:\w+|\.\. |\w+:$)|https?:", re.MULTILINE)
LEAST = 48  # characters of a first paragraph; shorter ones say little
MOST = 6  # paragraphs taken of one docstring
QUESTIONS = (
    ("What does {} do?", "Can you tell me what {} is for?", "How would you describe {}?", "I came across {}. What is it?"),
    ("Can you tell me more about it?", "What else should I know?", "Could you go into detail?", "Is there more to it?"),
    ("Can you show me an example?", "How do I use it?", "What does that look like in a session?", "Could you give an example?"),
)
USER, ASSISTANT, TITLE = "User:", "Assistant:", "#"


class Documented(NamedTuple):
    """A definition and the paragraphs of its docstring."""

    kind: str  # "module", "class" or "def"
    name: str
    paragraphs: list[str]


def paragraphs_of(docstring: str) -> list[str]:
    """The first paragraphs, without indentation, section titles, field lists and addresses."""
    found = (part.strip() for part in re.split(r"\n\s*\n", inspect.cleandoc(docstring)))
    return [part for part in found if part and not UNWANTED.search(part)][:MOST]


def documented(name: str, text: str) -> Iterator[Documented]:
    """What a source of this package-relative name documents, the module first."""
    dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".").removeprefix("stdlib.")
    found = [("module", dotted, head[1])] if (head := MODULE.match(text)) else []
    found += [(kind, name, docstring) for kind, name, docstring in DEFINITION.findall(text) if not name.startswith("test")]
    for kind, name, docstring in found:
        paragraphs = paragraphs_of(docstring)
        if paragraphs and len(paragraphs[0]) >= LEAST and paragraphs[0][0].isupper():
            yield Documented(kind, name, paragraphs)


def turns(thing: Documented) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs about one definition; the wording of a question depends on the name alone."""
    pick = hashlib.sha256(thing.name.encode()).digest()
    first, *rest = thing.paragraphs
    yield QUESTIONS[0][pick[0] % 4].format(thing.name), first
    for index, paragraph in enumerate(rest):
        example = paragraph.startswith(">>>")
        if example or (index == 0 and paragraph[0].isupper()):
            yield QUESTIONS[1 + example][pick[1 + example] % 4], paragraph


def dialogue(things: list[Documented]) -> str:
    """A user asks for a source's functions, an assistant answers with their docstrings; empty where there are none."""
    pairs = (pair for thing in things if thing.kind == "def" for pair in turns(thing))
    return "\n\n".join(f"{USER} {question}\n\n{ASSISTANT} {answer}" for question, answer in pairs)


def summary(things: list[Documented]) -> str:
    """Titles, each with its docstring's prose: module, classes, and functions described at length; empty where there are none."""
    parts = []
    for thing in things:
        prose = [part for part in thing.paragraphs if part[0].isupper()]
        if thing.kind != "def" or len(prose) > 1:
            parts += [f"{TITLE} {thing.name}", *prose]
    return "\n\n".join(parts)
