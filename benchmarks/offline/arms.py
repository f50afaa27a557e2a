"""The engines that are compared. An arm's name says everything about it:

plain                        no speculation, stock vLLM
chain-K                      stock vLLM's MTP chain of K drafts
tree-T-dD[-kK][-vN]          Bole: trees of T nodes, D levels of drafts, K children considered (4), drafts among N tokens (all)
serial-T-dD[-kK][-vN]        the same trees verified serially, `{"verify": "serial"}`
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

CHAIN_DRAFTS = (2, 3, 5, 7)
# the settings to choose from, per batch size: fewer nodes for larger batches, draft heads of the whole vocabulary and of 32,768 tokens
TREES = ("16-d5", "32-d8", "8-d4-v32768", "16-d5-v32768", "32-d8-v32768")
SERIAL_TREES = ("16-d5", "32-d8")
DEFAULT = ("plain", *(f"chain-{k}" for k in CHAIN_DRAFTS), *(f"tree-{t}" for t in TREES), *(f"serial-{t}" for t in SERIAL_TREES))
QUICK = ("plain", "chain-3", "chain-5", "tree-16-d5-v32768", "tree-32-d8-v32768", "serial-16-d5")
TINY = ("plain", "chain-3", "tree-8-d4")
# settings of every arm of Bole's, unless --bole says otherwise: graphs as the stock arms have them
BOLE = {"graphs": True}
FAMILIES = ("plain", "chain", "tree", "serial")

_TREE = re.compile(r"(tree|serial)-(\d+)-d(\d+)(?:-k(\d+))?(?:-v(\d+))?")
_CHAIN = re.compile(r"chain-(\d+)")


@dataclass(frozen=True)
class Arm:
    """One engine's way to speculate."""

    name: str
    family: str
    # drafts a round; a tree has one node more, its root
    num_drafts: int = 0
    # additional_config["bole"]; None: stock vLLM
    bole: dict[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm of this name; ValueError where there is none."""
        if name == "plain":
            return cls(name, "plain")
        if found := _CHAIN.fullmatch(name):
            return cls(name, "chain", int(found[1]))
        if not (found := _TREE.fullmatch(name)):
            raise ValueError(f"no arm {name!r}; there are plain, chain-K, tree-T-dD[-kK][-vN] and serial-T-dD[-kK][-vN]")
        family, nodes, depth, topk, vocab = found.groups()
        bole: dict[str, Any] = {"topk": int(topk or 4), "max_depth": int(depth)}
        if vocab:
            bole["draft_vocab"] = int(vocab)
        if family == "serial":
            bole["verify"] = "serial"
        return cls(name, family, int(nodes) - 1, bole)

    @property
    def nodes(self) -> int:
        """Rows of the target per request and round."""
        return self.num_drafts + 1

    def engine_arguments(self, bole: dict[str, Any]) -> dict[str, Any]:
        """What of vllm.LLM's arguments differs between arms. `bole`: settings that all of Bole's arms have besides their own."""
        arguments: dict[str, Any] = {}
        if self.num_drafts:
            arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.num_drafts}
        if self.bole is not None:
            arguments["additional_config"] = {"bole": bole | self.bole}
        return arguments


def select(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Arm names of a comma-separated list of names and families; a family stands for its arms in DEFAULT."""
    if not text:
        return default
    names: list[str] = []
    for word in text.split(","):
        family = [name for name in DEFAULT if Arm.parse(name).family == word]
        names += family or [Arm.parse(word).name]
    return tuple(dict.fromkeys(names))
