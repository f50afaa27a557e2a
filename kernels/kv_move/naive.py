"""Oracle of the KV move: reads a request's whole path, then writes it."""

from __future__ import annotations

import torch

from ..topology import Forest


def move_kv(
    kv_caches: list[torch.Tensor],
    groups: list[int],
    slot_mapping: torch.Tensor,
    forest: Forest,
    path: torch.Tensor,
    path_len: torch.Tensor,
) -> None:
    """See `path_copy.move_kv`; takes the layers' caches and groups as lists."""
    for cache, group in zip(kv_caches, groups, strict=True):
        slots, block_size = slot_mapping[group].tolist(), cache.shape[2]
        for r in range(path_len.shape[0]):
            start, moves = int(forest.token_start[r]), []
            for j, node in enumerate(path[r, : int(path_len[r])].tolist()):
                source, target = slots[start + node], slots[start + j]
                if source >= 0 and target >= 0 and source != target:
                    moves.append((target, cache[source // block_size, :, source % block_size].clone()))
            for target, row in moves:
                cache[target // block_size, :, target % block_size] = row
