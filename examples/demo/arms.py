"""The engines that the demo compares, and what each is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_SEQS = 8  # requests served together
CHAIN_DRAFTS = 8  # as deep as the tree, so that both may emit the same number of tokens in a round
TREE_DRAFTS = 31
TREE_DEPTH = 8
TREE_TOPK = 4
# of the sampled requests, found by examples/demo/margins.py: no token of theirs was a close call
SEEDS = (1000, 1004, 1009, 1011, 1008, 1011, 1003, 1011)


@dataclass(frozen=True)
class Arm:
    """One engine's configuration."""

    name: str
    title: str
    bole: dict[str, Any] | None = None  # additional_config["bole"]; None: stock vLLM
    speculative: dict[str, Any] | None = None  # speculative_config; None: no drafts

    def engine_arguments(self, model: str, on_gpu: bool) -> dict[str, Any]:
        """Keyword arguments of vllm.LLM."""
        arguments: dict[str, Any] = {
            "model": model,
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": MAX_SEQS,
            "seed": 0,
            "disable_log_stats": False,  # the chain's acceptance is read from vLLM's counters
            "speculative_config": self.speculative,
        }
        if self.bole is not None:
            arguments["additional_config"] = {"bole": self.bole}
        if self.name == PLAIN.name:  # every logit of every step, to judge a place where another arm parts from it
            arguments |= {"logprobs_mode": "raw_logits", "max_logprobs": -1}
        if on_gpu:
            arguments |= {"gpu_memory_utilization": 0.3, "gdn_prefill_backend": "triton"}
        return arguments


@dataclass(frozen=True)
class Phase:
    """One batch of requests: the same prompts under one way of sampling."""

    name: str
    temperature: float

    def seed(self, prompt: int) -> int:
        """Each request's own seed."""
        return SEEDS[prompt % len(SEEDS)]


@dataclass(frozen=True)
class Size:
    """How much work the demo does."""

    num_prompts: int = MAX_SEQS
    prompt_tokens: int = 96
    max_tokens: int = 64

    @classmethod
    def quick(cls) -> Size:
        """For development."""
        return cls(num_prompts=2, max_tokens=16)


def _mtp(num_drafts: int, **options: Any) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": num_drafts, **options}


GREEDY = Phase("greedy", 0.0)
SAMPLED = Phase("sampled", 0.8)
PHASES = (GREEDY, SAMPLED)

PLAIN = Arm("plain", "plain decoding, stock vLLM")
CHAIN = Arm("chain", f"chain of {CHAIN_DRAFTS} drafts, stock vLLM", speculative=_mtp(CHAIN_DRAFTS))
# vLLM's dynamic speculation with 0 drafts for every batch size: plain decoding through the same layers as the tree.
ONE_NODE = Arm(
    "one_node",
    "trees of one node",
    bole={},
    speculative=_mtp(TREE_DRAFTS, num_speculative_tokens_per_batch_size=[[1, MAX_SEQS, 0]]),
)
TREE = Arm(
    "tree",
    f"trees of {TREE_DRAFTS + 1} nodes",
    bole={"topk": TREE_TOPK, "max_depth": TREE_DEPTH},
    speculative=_mtp(TREE_DRAFTS),
)
ARMS = {arm.name: arm for arm in (PLAIN, CHAIN, ONE_NODE, TREE)}


@dataclass
class PhaseResult:
    """What one arm did in one phase."""

    tokens: list[list[int]]  # per prompt
    forwards: int  # target forwards with at least one decode row
    seconds: float
    counters: dict[str, float] = field(default_factory=dict)  # differences over the phase
