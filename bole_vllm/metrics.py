"""Counters of tree speculation, kept on the device and read on demand.

vLLM's own speculative-decoding counters stay right (drafted and accepted tokens, acceptance per position = depth). These
say what they cannot: how many tree rows were served, nodes per step, mean accepted tokens, spine hits.
"""

from __future__ import annotations

from typing import Any

import torch

from bole_vllm.kernels.topology import Forest
from bole_vllm.kernels.walk import COUNTS, add_counts


class TreeStats:
    """Sums over all steps since start.

    steps: target forwards with a tree row; rows: requests served in them; nodes: tree nodes verified; tree_rows: rows
    whose tree had drafts; tokens: tokens emitted by them (accepted and bonus); accepted: drafts accepted; branched:
    rows with drafts that accepted at least one; spine_hits: of those, rows whose whole path lay on the top-1 chain.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)

    def add(self, forest: Forest, path: torch.Tensor, path_len: torch.Tensor, token_counts: torch.Tensor | None = None) -> None:
        """Account for one step. path [R, D + 1], path_len [R]; token_counts [vocabulary] fp32 counts the committed tokens, in place. No
        synchronisation."""
        add_counts(forest, path, path_len, self.sums, token_counts)

    def read(self) -> dict[str, Any]:
        """The sums and the ratios made of them; synchronises."""
        sums = dict(zip(COUNTS, self.sums.tolist()))
        return {
            **sums,
            "nodes_per_step": sums["nodes"] / max(sums["steps"], 1),
            "mat": sums["tokens"] / max(sums["tree_rows"], 1),
            "spine_hit_rate": sums["spine_hits"] / max(sums["branched"], 1),
        }


def collect(llm) -> dict[str, Any]:
    """The first worker's statistics of an offline `vllm.LLM` (all ranks agree)."""
    return llm.collective_rpc("bole_stats")[0]
