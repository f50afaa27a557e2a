"""Addresses of every layer's state, so that one launch commits all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from ..precision import device_function

TL_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@device_function
def load_pointer(p_table, i_entry, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Typed pointer number i_entry of an int64 table, its address a multiple of ALIGN bytes."""
    return tl.multiple_of(tl.load(p_table + i_entry).to(tl.pointer_type(DTYPE)), ALIGN)


@dataclass(frozen=True)
class LayerTable:
    """Base addresses [L] int64 of the GDN layers' tensors on the device, with the shapes and strides that all of them share."""

    # [L] address of [slots, HV, DK, DV]
    ssm_ptr: torch.Tensor
    # [L] address of [slots, C, width - 1], column width - 2 the newest input
    conv_ptr: torch.Tensor
    # [L] address of [C, width] and of [C]; None without weights (no replay) or without bias
    weight_ptr: torch.Tensor | None
    bias_ptr: torch.Tensor | None
    # [L] int32 layer -> KV-cache group, whose slots it uses
    layer_group: torch.Tensor
    num_key_heads: int
    num_value_heads: int
    head_k_dim: int
    head_v_dim: int
    num_channels: int
    conv_width: int
    # elements
    ssm_stride: tuple[int, int, int, int]
    conv_stride: tuple[int, int, int]
    weight_stride: tuple[int, int] | None
    ssm_dtype: torch.dtype
    conv_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    # largest power of two, at most 16, that divides every address
    align_bytes: int
    num_groups: int
    # keeps the addressed memory alive
    owners: tuple[torch.Tensor, ...]

    @property
    def num_layers(self) -> int:
        return self.ssm_ptr.shape[0]

    @classmethod
    def build(
        cls,
        ssm_states: list[torch.Tensor],
        conv_states: list[torch.Tensor],
        groups: list[int],
        conv_weights: list[torch.Tensor] | None = None,
        biases: list[torch.Tensor | None] | None = None,
    ) -> LayerTable:
        """A table of the layers given, in their order.

        Args:
            ssm_states: per layer [slots, HV, DK, DV], any strides; conv_states: [slots, C, width - 1], any strides. Shapes (but for the
                number of slots), strides and dtypes must agree between layers. C = 2 HK DK + HV DV.
            groups: per layer its index into the first dimension of the commit's slots.
            conv_weights, biases: [C, width] and [C] per layer, needed by the replay only. biases: all given or all None.

        Raises ValueError where layers disagree. Copies the addresses to the device: call it once the caches exist, not in a step.
        """
        biases = None if biases is None or all(b is None for b in biases) else biases
        lists = {"ssm_states": ssm_states, "conv_states": conv_states, "groups": groups, "conv_weights": conv_weights, "biases": biases}
        for name, items in lists.items():
            if items is not None and len(items) != len(ssm_states):
                raise ValueError(f"{name}: {len(items)} entries for {len(ssm_states)} layers")
        for name in ("ssm_states", "conv_states", "conv_weights", "biases"):
            if lists[name] is not None:
                _check_alike(name, lists[name], skip_first="states" in name)
        ssm, conv, weight = ssm_states[0], conv_states[0], conv_weights[0] if conv_weights else None
        _, num_value_heads, head_k_dim, head_v_dim = ssm.shape
        _, channels, columns = conv.shape
        key_channels = channels - num_value_heads * head_v_dim
        if key_channels <= 0 or key_channels % (2 * head_k_dim):
            raise ValueError(
                f"{channels} conv channels do not fit {num_value_heads} value heads of {head_v_dim} and key heads of {head_k_dim}"
            )
        if weight is not None and tuple(weight.shape) != (channels, columns + 1):
            raise ValueError(f"conv_weights: expected {(channels, columns + 1)}, got {tuple(weight.shape)}")
        device = ssm.device
        owners = tuple(t for items in (ssm_states, conv_states, conv_weights or [], biases or []) for t in items)

        def addresses(tensors):
            return None if tensors is None else torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)

        return cls(
            ssm_ptr=addresses(ssm_states),
            conv_ptr=addresses(conv_states),
            weight_ptr=addresses(conv_weights),
            bias_ptr=addresses(biases),
            layer_group=torch.tensor(groups, dtype=torch.int32, device=device),
            num_key_heads=key_channels // (2 * head_k_dim),
            num_value_heads=num_value_heads,
            head_k_dim=head_k_dim,
            head_v_dim=head_v_dim,
            num_channels=channels,
            conv_width=columns + 1,
            ssm_stride=tuple(ssm.stride()),
            conv_stride=tuple(conv.stride()),
            weight_stride=None if weight is None else tuple(weight.stride()),
            ssm_dtype=ssm.dtype,
            conv_dtype=conv.dtype,
            weight_dtype=None if weight is None else weight.dtype,
            bias_dtype=None if biases is None else biases[0].dtype,
            align_bytes=_common_alignment(owners),
            num_groups=max(groups) + 1,
            owners=owners,
        )


def _check_alike(name: str, tensors: list[torch.Tensor], skip_first: bool) -> None:
    def signature(t):
        return tuple(t.shape[1:]) if skip_first else tuple(t.shape), t.stride(), t.dtype, t.device

    for i, tensor in enumerate(tensors):
        if signature(tensor) != signature(tensors[0]):
            raise ValueError(f"{name}[{i}] differs from {name}[0]: {signature(tensor)} against {signature(tensors[0])}")
        if tensor.dtype not in TL_DTYPE:
            raise ValueError(f"{name}[{i}]: unsupported dtype {tensor.dtype}")


def _common_alignment(tensors: tuple[torch.Tensor, ...]) -> int:
    align = 16
    while any(t.data_ptr() % align for t in tensors):
        align //= 2
    return align
