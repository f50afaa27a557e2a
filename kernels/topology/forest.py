"""The flat-ragged forest: every proposal tree of a batch in one set of device arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

WORD_BITS = 32
# inputs of GDN's causal convolution: three before the node and the node's own
CONV_WIDTH = 4


def num_mask_words(max_nodes: int) -> int:
    """Words of an ancestor bitmask over `max_nodes` nodes."""
    return (max_nodes + WORD_BITS - 1) // WORD_BITS


def path_columns(max_depth: int) -> int:
    """Columns of a node's path: one per depth and a spare one, rounded up to a size that tensor cores take."""
    return max(16, 1 << (max_depth + 1).bit_length())


@dataclass
class Forest:
    """Topology of one round. Static shapes, contents rewritten in place every round (CUDA-graph safe).

    Nodes of a request are contiguous, parents before children, root first; the top-1 chain ("spine") occupies nodes
    1..d. A request with no nodes (a prefill chunk, a padded row) takes no place: its two offsets are equal.
    """

    # [R + 1] request -> index of its node 0 in the node arrays; the last entry is the number of nodes
    node_offset: torch.Tensor
    # [R] request -> row of its node 0 among the batch's token rows
    token_start: torch.Tensor
    # [capacity] node -> parent's index within the request, -1 at the root
    parent: torch.Tensor
    # [capacity] node -> number of strict ancestors
    depth: torch.Tensor
    # [capacity] node -> token id; -1: a pad, never accepted
    token: torch.Tensor
    # [capacity] node -> cumulative draft log-probability, natural log, 0 at the root
    logprob: torch.Tensor
    # [capacity, W] bit j % 32 of word j // 32: node j of the same request is an ancestor of this node, or is it
    ancestors: torch.Tensor
    # [capacity] node -> its request
    request: torch.Tensor
    # [capacity, D] node -> index within the request of its ancestor at depth m, itself at m = depth, -1 beyond
    path: torch.Tensor
    # [capacity, 4] node -> its conv inputs, oldest first, itself last: a token row, or -1, -2, -3 for the newest, middle and oldest
    # column of the request's conv state
    conv_source: torch.Tensor
    # static bound on the nodes of one request (T, root included)
    max_nodes: int
    # static bound on a node's depth
    max_depth: int

    @classmethod
    def allocate(cls, max_requests: int, max_nodes: int, max_depth: int, device: torch.device | str, capacity: int | None = None) -> Forest:
        """An empty forest for `max_requests` trees of at most `max_nodes` nodes, all offsets 0."""
        if not 1 <= max_nodes <= 256:
            raise ValueError(f"max_nodes must be in 1..256, got {max_nodes}")
        capacity = max_requests * max_nodes if capacity is None else capacity

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            node_offset=zeros(max_requests + 1),
            token_start=zeros(max_requests),
            parent=zeros(capacity),
            depth=zeros(capacity),
            token=zeros(capacity),
            logprob=zeros(capacity, dtype=torch.float32),
            ancestors=zeros(capacity, num_mask_words(max_nodes)),
            request=zeros(capacity),
            path=zeros(capacity, path_columns(max_depth)),
            conv_source=zeros(capacity, CONV_WIDTH),
            max_nodes=max_nodes,
            max_depth=max_depth,
        )

    @property
    def max_requests(self) -> int:
        return self.token_start.shape[0]

    @property
    def capacity(self) -> int:
        return self.parent.shape[0]

    def for_requests(self, num_requests: int) -> Forest:
        """The same buffers seen by a batch of `num_requests` requests (fewer programs to launch)."""
        return replace(self, node_offset=self.node_offset[: num_requests + 1], token_start=self.token_start[:num_requests])
