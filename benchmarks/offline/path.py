"""Which path served an arm: classes in the worker, and counters before and after a point."""

from __future__ import annotations

from typing import Any

from benchmarks.offline.arms import Arm

Counters = dict[str, float]

BOLE = "bole_vllm."
# a round near the model's length, or the first after a prompt, may hold fewer drafts
MIN_FILLED = 0.95
_VLLM_COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
_BOLE_COUNTERS = ("steps", "rows", "nodes", "tree_rows", "tokens", "accepted", "branched", "spine_hits")


def classes(worker: Any) -> dict[str, str]:
    """RPC: the classes that make a round, with their modules."""
    runner = getattr(worker, "worker", worker).model_runner
    parts = {"worker": getattr(worker, "worker", worker), "model": runner.model, "model_state": runner.model_state}
    parts["speculator"] = runner.speculator
    return {name: f"{type(part).__module__}.{type(part).__qualname__}" for name, part in parts.items() if part is not None}


def verify_setting(worker: Any) -> str | None:
    """RPC: how Bole verifies trees, by the settings that its model state runs with; None for stock vLLM."""
    model_state = getattr(worker, "worker", worker).model_runner.model_state
    return getattr(getattr(model_state, "config", None), "verify", None)


def counters(llm: Any, arm: Arm) -> Counters:
    """vLLM's sums of drafts (rounds of a request), draft tokens and accepted tokens; Bole's own where it runs."""
    found: Counters = {}
    if arm.num_drafts:
        for metric in llm.get_metrics():
            if metric.name in _VLLM_COUNTERS:
                found[metric.name.removeprefix("vllm:spec_decode_num_")] = metric.value
    if arm.bole is not None:
        stats = llm.collective_rpc("bole_stats")[0]
        found |= {name: stats[name] for name in _BOLE_COUNTERS}
    return found


def change(before: Counters, after: Counters) -> Counters:
    """What a point added."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def wrong_classes(arm: Arm, found: dict[str, str]) -> list[str]:
    """A stock arm has none of Bole's classes; a tree arm has its worker, model, model state and speculator."""
    if arm.bole is None:
        return [f"{name} is {where}: stock vLLM expected" for name, where in found.items() if where.startswith(BOLE)]
    wanted = ("worker", "model", "model_state", "speculator")
    return [f"{name} is {found.get(name)}: Bole's expected" for name in wanted if not found.get(name, "").startswith(BOLE)]


def wrong_rounds(arm: Arm, added: Counters) -> list[str]:
    """What a point's counters say against the arm: no rounds, or rounds of another size."""
    if arm.family == "plain":
        return []
    if arm.bole is None:
        rounds, drafts = added.get("drafts", 0), added.get("draft_tokens", 0)
        if rounds <= 0:
            return ["no round had drafts"]
        return [] if MIN_FILLED * arm.num_drafts <= drafts / rounds <= arm.num_drafts else [f"{drafts / rounds:.2f} drafts a round"]
    trees = added.get("tree_rows", 0)
    if trees <= 0:
        return ["no tree was verified"]
    # rows without drafts are trees of one node
    nodes = (added["nodes"] - (added["rows"] - trees)) / trees
    return [] if MIN_FILLED * arm.nodes <= nodes <= arm.nodes else [f"{nodes:.2f} nodes a tree instead of {arm.nodes}"]


def wrong_verify(arm: Arm, setting: str | None) -> list[str]:
    """Trees of the serial arms, and only theirs, are verified serially."""
    return [] if (setting == "serial") == (arm.family == "serial") else [f"trees are verified by {setting!r}"]
