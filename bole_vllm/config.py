"""Bole's settings: one frozen object read from `additional_config["bole"]`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bole_vllm.kernels import precision as dot_precision

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "bole"
COMMITS = ("factor", "replay")
DRAFT_HEADS = ("int8", "model")
VERIFIERS = ("closed_form", "serial")
MAX_TREE_SIZE = 256


class BoleConfigError(ValueError):
    """A setting that cannot work. The text says what to change."""


@dataclass(frozen=True)
class BoleConfig:
    """What a user may set in `--additional-config '{"bole": {...}}'`.

    Attributes:
        topk: children considered per tree node, 1..16.
        max_depth: levels of drafts below the root, 1..16; the deepest draft is that many tokens ahead. Or a list of [nodes, depth] pairs,
            nodes rising: a tree of at most so many nodes is at most so deep (larger ones as the last pair says), for engines whose trees
            follow the batch size.
        tree_size: nodes per request, root included, 2..256. Left out: `num_speculative_tokens + 1`; given: it must agree.
        commit: `factor` applies the kept corrections in closed form; `replay` reruns the exact recurrence over the
            accepted path from the kept inputs (bit for bit native decode's rounding points, less memory per node).
        verify: `closed_form` verifies a tree from one state; `serial`, the baseline, walks it with one state kept per node and layer, and
            commits by copying the accepted node's (`commit` is not used then).
        precision: dot precision of the verify and commit kernels, a name of bole_vllm.kernels.precision.
        draft_vocab: tokens that drafts may name; the output never depends on it. 0: all; a number: that many, the most frequent in what
            was served; a path: a JSON list of token ids. None: bole_vllm.draft_head.DEFAULT_SIZE where that is less than half of the
            vocabulary and the LM head an unquantized matrix on one rank, else all.
        draft_head: weights of the LM head that drafts are named by, where they are a part of the vocabulary: `int8`, rounded with a scale a
            row, or `model`, in the model's own type. The output does not depend on it.
        debug: check every forest's invariants on the host each step (slow, synchronises).
    """

    topk: int = 4
    max_depth: int | list[list[int]] = 8
    tree_size: int = 0
    verify: str = "closed_form"
    commit: str = "replay"
    precision: str = dot_precision.DEFAULT
    draft_vocab: int | str | None = None
    draft_head: str = "int8"
    debug: bool = False

    def __post_init__(self) -> None:
        _check_int("topk", self.topk, 1, 16)
        _check_depths(self.max_depth)
        _check_int("tree_size", self.tree_size, 2, MAX_TREE_SIZE)
        _check_choice("verify", self.verify, VERIFIERS)
        _check_choice("commit", self.commit, COMMITS)
        _check_choice("precision", self.precision, tuple(dot_precision.MODES))
        if self.draft_vocab is not None and not isinstance(self.draft_vocab, str):
            _check_int("draft_vocab", self.draft_vocab, 0, 2**31 - 1, " or a path to a JSON list of token ids")
            if 0 < self.draft_vocab < self.topk:
                raise BoleConfigError(f'"bole.draft_vocab" must be 0 (all tokens) or at least topk ({self.topk}), got {self.draft_vocab}.')
        _check_choice("draft_head", self.draft_head, DRAFT_HEADS)
        if not isinstance(self.debug, bool):
            raise BoleConfigError(f'"bole.debug" must be true or false, got {self.debug!r}.')

    @property
    def num_drafts(self) -> int:
        """Drafted nodes per request: the tree without its root."""
        return self.tree_size - 1

    @property
    def deepest(self) -> int:
        """Levels of drafts of the deepest tree."""
        depths = [self.max_depth] if isinstance(self.max_depth, int) else [depth for _, depth in self.max_depth]
        return min(max(depths), self.num_drafts)

    def depth_of(self, num_nodes: int) -> int:
        """Most levels of drafts of a tree of this many nodes."""
        if isinstance(self.max_depth, int):
            return self.max_depth
        return next((depth for most, depth in self.max_depth if num_nodes <= most), self.max_depth[-1][1])

    @classmethod
    def parse(cls, settings: Any, num_speculative_tokens: int) -> BoleConfig:
        """Build from the user's dictionary.

        Raises:
            BoleConfigError: for an unknown key, a wrong type, a value out of range, or a contradiction with
                `num_speculative_tokens`.
        """
        if not isinstance(settings, dict):
            raise BoleConfigError(f'additional_config["bole"] must be an object such as {{}}, got {type(settings).__name__}.')
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise BoleConfigError(f'Unknown key {unknown[0]!r} in additional_config["bole"]. Known keys: {", ".join(known)}.')
        tree_size = num_speculative_tokens + 1
        if settings.get("tree_size", tree_size) != tree_size:
            raise BoleConfigError(
                f'"bole.tree_size" is {settings["tree_size"]!r}, but num_speculative_tokens={num_speculative_tokens} means trees of '
                f"{tree_size} nodes (drafts and the root). Change one of them, or leave tree_size out."
            )
        if tree_size > MAX_TREE_SIZE:
            raise BoleConfigError(f"num_speculative_tokens must be at most {MAX_TREE_SIZE - 1} with Bole, got {num_speculative_tokens}.")
        return cls(**{**settings, "tree_size": tree_size})

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> BoleConfig:
        """The settings of an engine that has passed bole_vllm.engine_config.prepare."""
        return cls.parse(vllm_config.additional_config[KEY], vllm_config.speculative_config.num_speculative_tokens)


def is_requested(vllm_config: VllmConfig) -> bool:
    """Whether the user asked for Bole in this engine."""
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and KEY in additional


def _check_int(name: str, value: Any, low: int, high: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BoleConfigError(f'"bole.{name}" must be an integer{otherwise}, got {value!r}.')
    if not low <= value <= high:
        raise BoleConfigError(f'"bole.{name}" must be in {low}..{high}, got {value}.')


def _check_depths(value: Any) -> None:
    if not isinstance(value, list):
        _check_int("max_depth", value, 1, 16, " or a list of [nodes, depth] pairs")
        return
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    if not pairs or len(pairs) < len(value):
        raise BoleConfigError(f'"bole.max_depth" must be an integer or a list of [nodes, depth] pairs, got {value!r}.')
    for nodes, depth in pairs:
        _check_int("max_depth", nodes, 2, MAX_TREE_SIZE, " of nodes in every pair")
        _check_int("max_depth", depth, 1, 16, " of levels in every pair")
    if any(here[0] >= there[0] for here, there in pairwise(pairs)):
        raise BoleConfigError(f'"bole.max_depth" must name rising numbers of nodes, got {value!r}.')


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BoleConfigError(f'"bole.{name}" must be one of {", ".join(choices)}, got {value!r}.')
