"""The trees of all request slots, and the forest that a step's batch makes of them."""

from __future__ import annotations

import torch

from bole_vllm.kernels.topology import Forest, build_forest, check_integrity, num_mask_words

__all__ = ["Forest", "TreeStore", "check_integrity", "num_mask_words"]


class TreeStore:
    """One drafted tree per request slot, on the device.

    The drafter writes a tree at the end of a round; the next step's batch reads it in its own order. One row more than
    there are slots takes the writes of rows that stand for no request (slot -1).
    """

    def __init__(self, num_slots: int, tree_size: int, device: torch.device) -> None:
        rows = num_slots + 1
        # [slots + 1, T] node -> parent within the tree; entry 0 is the root
        self.parent = torch.zeros(rows, tree_size, dtype=torch.int32, device=device)
        # [slots + 1, T] node -> token; entry 0 unused
        self.token = torch.full((rows, tree_size), -1, dtype=torch.int32, device=device)
        # [slots + 1, T] cumulative draft log-probability
        self.logprob = torch.zeros(rows, tree_size, dtype=torch.float32, device=device)
        # [slots + 1] nodes drafted, root included
        self.num_nodes = torch.ones(rows, dtype=torch.int32, device=device)

    def reset(self, slot: int) -> None:
        """A slot changes hands: no tree."""
        self.num_nodes[slot].fill_(1)

    def write(self, slots: torch.Tensor, token: torch.Tensor, parent: torch.Tensor, logprob: torch.Tensor, num_nodes: torch.Tensor) -> None:
        """Store trees in place. slots [R] (-1: nobody); token, parent, logprob [R, T]; num_nodes [R]."""
        width = token.shape[1]
        self.parent[slots, :width] = parent
        self.token[slots, :width] = token
        self.logprob[slots, :width] = logprob
        self.num_nodes[slots] = num_nodes

    def build(self, forest: Forest, slots: torch.Tensor, is_tree: torch.Tensor, query_start: torch.Tensor, input_ids: torch.Tensor) -> None:
        """Fill `forest` in place for a batch. slots [R], is_tree [R] bool, query_start [R + 1], input_ids [token rows]."""
        build_forest(forest, self.parent, self.token, self.logprob, self.num_nodes, slots, is_tree, query_start, input_ids)
