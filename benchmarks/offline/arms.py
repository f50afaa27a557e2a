"""The arms that are compared, and the engines they run in. An arm's name says everything about it:

plain                        no speculation, stock vLLM
chain-K                      stock vLLM's MTP chain of K drafts
tree-T-dD[-kK][-vN]          Bole: trees of T nodes, D levels of drafts, K children considered (4), drafts among N tokens (all)
serial-T-dD[-kK][-vN]        the same trees verified serially, `{"verify": "serial"}`

Arms that differ in the number of drafts only, and what depth goes with it, share an engine: starting one takes a minute or two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

CHAIN_DRAFTS = (2, 3, 5, 7)
# the settings to choose from, per batch size: fewer nodes for larger batches (8 were the best of three nowhere up to batch 8); drafts among
# 32,768 tokens, as is Bole's default
TREES = ("16-d6-v32768", "32-d8-v32768")
SERIAL_TREES = ("8-d4-v32768", "16-d6-v32768")
DEFAULT = ("plain", *(f"chain-{k}" for k in CHAIN_DRAFTS), *(f"tree-{t}" for t in TREES), *(f"serial-{t}" for t in SERIAL_TREES))
QUICK = (
    "plain", "chain-3", "chain-5", "tree-8-d4-v32768", "tree-16-d6-v32768", "tree-32-d8-v32768", "serial-16-d6-v32768",
)  # fmt: skip
TINY = ("plain", "chain-3", "tree-8-d4", "tree-5-d3")
FAMILIES = ("plain", "chain", "tree", "serial")

_TREE = re.compile(r"(tree|serial)-(\d+)-d(\d+)(?:-k(\d+))?(?:-v(\d+))?")
_CHAIN = re.compile(r"chain-(\d+)")
# what arms of one engine differ in
_SIZE = re.compile(r"\d+(?:-d\d+)?")


@dataclass(frozen=True)
class Arm:
    """One way to speculate."""

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
        bole: dict[str, Any] = {"topk": int(topk or 4), "max_depth": int(depth), "draft_vocab": int(vocab or 0)}
        if family == "serial":
            bole["verify"] = "serial"
        return cls(name, family, int(nodes) - 1, bole)

    @property
    def nodes(self) -> int:
        """Rows of the target per request and round."""
        return self.num_drafts + 1


def engines(arms: list[Arm]) -> list[list[Arm]]:
    """The arms by the engine they run in, in the given order. An engine has one depth for each number of nodes."""
    found: list[list[Arm]] = []
    for arm in arms:
        group = next((group for group in found if all(_fit(arm, other) for other in group)), None)
        if group is None:
            found.append([arm])
        else:
            group.append(arm)
    return found


def _fit(one: Arm, other: Arm) -> bool:
    """Whether one engine can serve both."""
    alike = one.family == other.family and _but_depth(one) == _but_depth(other)
    return alike and (one.nodes != other.nodes or one.bole == other.bole)


def _but_depth(arm: Arm) -> dict[str, Any]:
    return {name: value for name, value in (arm.bole or {}).items() if name != "max_depth"}


def engine_name(group: list[Arm]) -> str:
    """An arm's own name where it is alone, else one with all sizes: chain-3+5, tree-8-d4+16-d6-v32768."""
    if len(group) == 1:
        return group[0].name
    return _SIZE.sub("+".join(_SIZE.search(arm.name)[0] for arm in group), group[0].name, count=1)


def engine_arguments(group: list[Arm], bole: dict[str, Any], max_num_seqs: int) -> dict[str, Any]:
    """What of vllm.LLM's arguments differs between engines. `bole`: settings that all of Bole's arms have besides their own.

    Raises:
        ValueError: more arms than `max_num_seqs`.
    """
    drafts = list(dict.fromkeys(arm.num_drafts for arm in group))
    arguments: dict[str, Any] = {}
    if max(drafts):
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": max(drafts)}
    if len(drafts) > 1:
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = _schedule(drafts, max_num_seqs)
    if group[0].bole is not None:
        depths = sorted({arm.nodes: arm.bole["max_depth"] for arm in group}.items())
        several = {"max_depth": [list(pair) for pair in depths]} if len(drafts) > 1 else {}
        arguments["additional_config"] = {"bole": bole | group[0].bole | several}
    return arguments


def _schedule(drafts: list[int], max_num_seqs: int) -> list[list[int]]:
    """Ranges of batch sizes that name every number of drafts once: vLLM captures graphs for what its schedule names.

    The batch sizes themselves do not matter for the drafts: engine.set_drafts overrides them. But for K drafts vLLM adds capture sizes up
    to the largest batch size that has K. All ranges end as late as they can, so that no batch is padded that would not be in an engine of
    its own.
    """
    if max_num_seqs < len(drafts):
        raise ValueError(
            f"{len(drafts)} arms share an engine ({', '.join(map(str, drafts))} drafts), which takes a schedule of as many batch sizes; "
            f"max_num_seqs is {max_num_seqs}: raise it, or choose fewer arms"
        )
    first = max_num_seqs - len(drafts) + 1
    return [[1, first, drafts[0]], *([first + index, first + index, number] for index, number in enumerate(drafts[1:], start=1))]


def select(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Arm names of a comma-separated list of names and families; a family stands for its arms in DEFAULT."""
    if not text:
        return default
    names: list[str] = []
    for word in text.split(","):
        family = [name for name in DEFAULT if Arm.parse(name).family == word]
        names += family or [Arm.parse(word).name]
    return tuple(dict.fromkeys(names))
