"""Scratch of the replay commit."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ReplayWork:
    """k, v and gates along the accepted paths, written and read within one commit. R requests of a commit share a launch."""

    k: torch.Tensor  # [L, R, P, HK, DK] activation dtype, not normalised
    k_scale: torch.Tensor  # [L, R, P, HK] fp32
    v: torch.Tensor  # [L, R, P, HV, DV] activation dtype
    g: torch.Tensor  # [L, R, P, HV] fp32 log decay
    beta: torch.Tensor  # [L, R, P, HV] fp32

    @classmethod
    def allocate(
        cls, num_layers: int, max_requests: int, path_width: int, num_key_heads: int, head_k_dim: int, num_value_heads: int,
        head_v_dim: int, dtype: torch.dtype, device,
    ) -> ReplayWork:  # fmt: skip
        """Room for paths of `path_width` nodes."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(num_layers, max_requests, path_width, *shape, dtype=dtype, device=device)

        return cls(
            k=empty(num_key_heads, head_k_dim, dtype=dtype),
            k_scale=empty(num_key_heads),
            v=empty(num_value_heads, head_v_dim, dtype=dtype),
            g=empty(num_value_heads),
            beta=empty(num_value_heads),
        )

    def check(self, num_layers: int, width: int, key_heads: tuple[int, int], value_heads: tuple[int, int], dtype: torch.dtype) -> None:
        """Raise ValueError where it does not serve these layers and paths of `width` nodes."""
        rows = tuple(self.k.shape[:3])
        if rows[0] != num_layers or rows[1] < 1 or rows[2] < width:
            raise ValueError(f"work: room for {num_layers} layers, a request or more and {width} nodes is needed, got {rows}")
        fields = {"k": (key_heads, dtype), "k_scale": (key_heads[:1], torch.float32), "v": (value_heads, dtype)}
        fields |= dict.fromkeys(("g", "beta"), (value_heads[:1], torch.float32))
        for name, (shape, kind) in fields.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != (*rows, *shape) or tensor.dtype != kind or not tensor.is_contiguous():
                raise ValueError(f"work.{name}: expected contiguous {kind} {(*rows, *shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
