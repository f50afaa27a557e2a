"""Where the parts of a small model sit in a large one: channels, heads, layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.models.shapes import is_moe, layer_types

# What must agree, because the function depends on it. Absent means the default of `Qwen3_5TextConfig`.
SAME = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mtp_num_hidden_layers": 1,
}


@dataclass(frozen=True)
class Axis:
    """One tensor dimension: index `source[i]` of the small model's goes to index `target[i]` of the large one's.

    An index of the small model may go to several places, no place takes two. source, target int64 [n].
    """

    small: int
    big: int
    source: Tensor
    target: Tensor

    @classmethod
    def leading(cls, small: int, big: int, what: str) -> Axis:
        """The small model's indices come first."""
        if small > big:
            raise ValueError(f"{what}: the small model has {small}, the large one only {big}")
        return cls(small, big, torch.arange(small), torch.arange(small))

    def times(self, width: int) -> Axis:
        """Every index becomes a block of `width`: heads become channels."""
        inner = torch.arange(width)
        source, target = ((x[:, None] * width + inner).flatten() for x in (self.source, self.target))
        return Axis(self.small * width, self.big * width, source, target)

    def then(self, other: Axis) -> Axis:
        """Both along one dimension, `other` after this one."""
        source, target = torch.cat([self.source, other.source + self.small]), torch.cat([self.target, other.target + self.big])
        return Axis(self.small + other.small, self.big + other.big, source, target)


def place_heads(groups: tuple[int, int], heads: tuple[int, int], what: str) -> tuple[Axis, Axis]:
    """Places for groups (key heads, KV heads) and the heads that share them, each pair (small, large); head h belongs to group
    h // (heads / groups) in both models. A group with more heads than a large one holds is copied, its heads divided among the copies."""
    per_small, per_big = (h // g for g, h in zip(groups, heads))
    if any(h % g for g, h in zip(groups, heads)):
        raise ValueError(f"{what}: {heads[0]} and {heads[1]} heads do not divide into {groups[0]} and {groups[1]} groups")
    copies = -(-per_small // per_big)
    if groups[0] * copies > groups[1]:
        raise ValueError(
            f"{what}: {groups[0]} groups of {per_small} heads need {groups[0] * copies} groups of {per_big}; there are {groups[1]}"
        )
    group, head = torch.arange(groups[0] * copies), torch.arange(heads[0])
    inside = head % per_small
    place = (head // per_small * copies + inside // per_big) * per_big + inside % per_big
    return Axis(groups[0], groups[1], group // copies, group), Axis(heads[0], heads[1], head, place)


def place_layers(small: list[str], big: list[str]) -> list[int]:
    """Large layer of each small layer: same kind, same order, as early as possible."""
    places, start = [], 0
    for index, kind in enumerate(small):
        if kind not in big[start:]:
            raise ValueError(f"layer types do not fit: no {kind} layer at {start} or later of {len(big)} is left for layer {index}")
        places.append(big.index(kind, start))
        start = places[-1] + 1
    return places


def place_channels(small: int, big: int) -> tuple[Axis, Axis]:
    """Places of the residual stream's channels where they are written, which are all of `big`, and where they are read: the first copy."""
    if small > big or big % small:
        raise ValueError(f"hidden sizes {small} and {big}: the larger must be a multiple of the smaller, since it holds whole copies")
    return Axis(small, big, torch.arange(big) % small, torch.arange(big)), Axis.leading(small, big, "hidden_size")


def _rope(config: dict) -> dict:
    """What of the rotary positions a text sees. Sections of multimodal positions are equal in text."""
    rope = {"rope_type": "default", "partial_rotary_factor": config.get("partial_rotary_factor", 0.25), **config["rope_parameters"]}
    return {key: value for key, value in rope.items() if not key.startswith("mrope")}


def check_configs(small: dict, big: dict) -> None:
    """Raise ValueError where the large model cannot compute what the small one does."""
    for key, default in SAME.items():
        here, there = small.get(key, default), big.get(key, default)
        if here != there:
            raise ValueError(f"{key} differs: {here} in the small model, {there} in the large one")
    if _rope(small) != _rope(big):
        raise ValueError(f"rotary positions differ: {_rope(small)} in the small model, {_rope(big)} in the large one")
    if is_moe(small):
        raise ValueError("the small model must be dense")
    if big.get("tie_word_embeddings", False):
        raise ValueError("the large model must have tie_word_embeddings false: its head reads one copy of the channels")
    for config in (small, big):
        if len(layer_types(config)) != config["num_hidden_layers"]:
            raise ValueError(f"{len(layer_types(config))} layer_types for {config['num_hidden_layers']} layers")


class Placement:
    """All axes of a pair of configurations, and the places of the layers. Errors as `check_configs`, or where something has no room."""

    def __init__(self, small: dict, big: dict):
        check_configs(small, big)

        def pair(key: str) -> tuple[int, int]:
            return small[key], big[key]

        self.hidden, self.read = place_channels(*pair("hidden_size"))
        self.layers = place_layers(layer_types(small), layer_types(big))  # small layer -> large layer
        keys, self.value_heads = place_heads(pair("linear_num_key_heads"), pair("linear_num_value_heads"), "linear attention")
        kv_heads, heads = place_heads(pair("num_key_value_heads"), pair("num_attention_heads"), "attention")
        key_dim, value_dim, head_dim = (small[key] for key in ("linear_key_head_dim", "linear_value_head_dim", "head_dim"))
        self.vocab = Axis.leading(*pair("vocab_size"), "vocab_size")
        self.joined = self.read.then(self.read)  # input of the MTP's fc: embedding, then hidden state
        self.values = self.value_heads.times(value_dim)
        self.qkv = keys.times(key_dim).then(keys.times(key_dim)).then(self.values)
        self.queries = heads.times(head_dim)
        self.queries_and_gates = heads.times(2 * head_dim)  # per head its query, then its gate
        self.kv = kv_heads.times(head_dim)
        mlp = "shared_expert_intermediate_size" if is_moe(big) else "intermediate_size"
        self.mlp = Axis.leading(small["intermediate_size"], big[mlp], mlp)
        self.head_channels, self.value_channels = (Axis.leading(size, size, "head size") for size in (head_dim, value_dim))
