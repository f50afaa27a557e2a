"""Function-preserving scale-up: the weights of a large Qwen3.5 text model that computes exactly what a small trained one computes.

The large model's residual stream is [x, x, ...] for the small model's x: as many copies as fit, so the ratio of the hidden sizes must be
a whole number. The mean square of all copies is that of one, so norms with the same epsilon and gains give copies of the small model's
output. Hence
  * what writes to the stream (embedding, fc, o_proj, out_proj, down_proj) and the norms write every copy;
  * what reads a norm's output (input projections, fc, head) reads the first copy, its weights for the others are zero.
No weight is scaled: every rounding point of the large model rounds the number that the small one rounds there, and only the order in
which a matrix product or a norm adds up may differ.

Added heads, MLP channels, experts and layers compute on random weights over all copies, and their residual writes are zero. Added
vocabulary needs a constant channel (constant_channel.py): its head rows read that with EXTRA_ROW_WEIGHT. A mixture of
experts holds the small MLP as its shared expert, whose gate reads the constant channel with SHARED_GATE_WEIGHT and is 1 to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.models.constant_channel import EMBEDDING, constant_of
from benchmarks.models.placement import Axis, Placement
from benchmarks.models.shapes import is_moe, layer_types

READ_STD = 0.02  # of random input projections: inputs of spread 1 over H channels give outputs of spread about 0.02 * sqrt(H)
EXTRA_ROW_WEIGHT = -(2.0**22)  # the final norm's constant channel, at least 1/1000 or so, makes it a logit below -1000
SHARED_GATE_WEIGHT = 2.0**16  # sigmoid is 1 in fp32 above 17
HEAD = "lm_head.weight"
_LAYER = re.compile(r"^(model|mtp)\.layers\.(\d+)\.(.+)$")

Fill = Callable[[Tensor, torch.Generator], Tensor]  # fills a tensor in place


def normal(std: float, mean: float = 0.0) -> Fill:
    return lambda out, generator: out.normal_(mean, std, generator=generator)


def zero(out: Tensor, _generator: torch.Generator) -> Tensor:
    return out.zero_()


def log_decay_rate(out: Tensor, generator: torch.Generator) -> Tensor:
    """A_log of rates between 1/4 and 16, evenly spread in the logarithm."""
    return out.uniform_(-1.4, 2.8, generator=generator)


@dataclass(frozen=True)
class Rule:
    """How a large tensor comes about: `fill` everywhere, then in its `rows` the small tensor of name `source`, at the places of `columns`
    and 0 elsewhere (no columns: whole rows of shape `rest`)."""

    rows: Axis
    columns: Axis | None = None
    fill: Fill = zero
    source: str | None = None
    rest: tuple[int, ...] = ()

    def shape(self, big: bool = True) -> tuple[int, ...]:
        """Of the large tensor, or of the small one."""
        axes = [self.rows] if self.columns is None else [self.rows, self.columns]
        return (*((axis.big if big else axis.small) for axis in axes), *self.rest)


@dataclass(frozen=True)
class Random:
    """A tensor of which the small model has no part."""

    size: tuple[int, ...]
    fill: Fill

    def shape(self) -> tuple[int, ...]:
        return self.size


class ScaleUp:
    """The large model's tensors, one at a time. The arguments are those of `scaled_weights`, which checks them here."""

    def __init__(self, small_state: Mapping[str, Tensor], small_config: dict, big_config: dict, seed: int):
        self.state, self.big, self.seed = small_state, big_config, seed
        self.place = Placement(small_config, big_config)
        self.extra_vocab = self.place.vocab.big > self.place.vocab.small
        self.constant = constant_of(small_state) if self.extra_vocab or is_moe(big_config) else None
        self.rules = self._rules()
        self._check_state()

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """The large model's tensor of this name. Its random part depends on the seed, the name, dtype and kind of device alone."""
        rule = self.rules[name]
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        out = rule.fill(torch.empty(rule.shape(), dtype=dtype, device=device), generator)
        if isinstance(rule, Rule) and rule.source is not None:
            part = self.state[rule.source].detach().to(device, dtype)[rule.rows.source.to(device)]
            target = rule.rows.target.to(device)
            if rule.columns is None:
                out[target] = part
            else:
                out[target] = 0
                out[target[:, None], rule.columns.target.to(device)] = part[:, rule.columns.source.to(device)]
        self._use_constant(name, out)
        return out

    def _use_constant(self, name: str, out: Tensor) -> None:
        """What reads the constant channel: head rows of added tokens, gates of shared experts. Added embeddings hold it too."""
        known, width = self.place.vocab.small, self.place.hidden.small
        channel = width - 1
        if name == EMBEDDING and self.extra_vocab:
            out[known:, channel::width] = self.constant
        elif name == HEAD and self.extra_vocab:
            out[known:, channel] = EXTRA_ROW_WEIGHT
        elif name.endswith("shared_expert_gate.weight"):
            out[:, channel] = SHARED_GATE_WEIGHT

    def _check_state(self) -> None:
        """Every tensor of the small model must have its place and the shape that its configuration says."""
        used = {HEAD, EMBEDDING}
        for rule in self.rules.values():
            if isinstance(rule, Rule) and rule.source is not None:
                used.add(rule.source)
                if rule.source not in self.state:
                    raise ValueError(f"the small model has no {rule.source}")
                found, wanted = tuple(self.state[rule.source].shape), rule.shape(big=False)
                if found != wanted:
                    raise ValueError(f"{rule.source} of the small model is {list(found)}, by its configuration {list(wanted)}")
        if unknown := set(self.state) - used:
            raise ValueError(f"no place for tensors of the small model: {', '.join(sorted(unknown))}")

    def _rules(self) -> dict[str, Rule | Random]:
        """Rule of every tensor, in the order of the layers: target, head, MTP."""
        p, rules = self.place, {}
        hidden_norm = {"rows": p.hidden, "fill": normal(0.1)}
        rules[EMBEDDING] = Rule(p.vocab, p.hidden, normal(READ_STD), EMBEDDING)
        sources = {big: small for small, big in enumerate(p.layers)}
        for index, kind in enumerate(layer_types(self.big)):
            small = f"model.layers.{sources[index]}" if index in sources else None
            self._layer(rules, f"model.layers.{index}", small, kind)
        rules["model.norm.weight"] = Rule(**hidden_norm, source="model.norm.weight")
        rules[HEAD] = Rule(p.vocab, p.read, normal(READ_STD), HEAD if HEAD in self.state else EMBEDDING)
        for name in ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"):
            rules[name] = Rule(**hidden_norm, source=name)
        rules["mtp.fc.weight"] = Rule(p.hidden, p.joined, zero, "mtp.fc.weight")
        for index in range(self.big.get("mtp_num_hidden_layers", 1)):
            self._layer(rules, f"mtp.layers.{index}", f"mtp.layers.{index}", "full_attention")
        return rules

    def _layer(self, rules: dict[str, Rule | Random], big: str, small: str | None, kind: str) -> None:
        """Rules of one layer; `small` is the prefix of the layer it holds, None for an added one."""
        p = self.place
        parts = {
            "input_layernorm.weight": Rule(p.hidden, fill=normal(0.1)),
            "post_attention_layernorm.weight": Rule(p.hidden, fill=normal(0.1)),
        }
        parts |= self._linear() if kind == "linear_attention" else self._attention()
        parts |= self._mlp("mlp.shared_expert" if is_moe(self.big) else "mlp")
        for part, rule in parts.items():
            source = None if small is None else f"{small}.{part.replace('.shared_expert.', '.')}"
            rules[f"{big}.{part}"] = Rule(rule.rows, rule.columns, rule.fill, source, rule.rest)
        if is_moe(self.big):
            rules.update({f"{big}.mlp.{part}": rule for part, rule in self._experts().items()})

    def _read(self, rows: Axis) -> Rule:
        """An input projection."""
        return Rule(rows, self.place.read, normal(READ_STD))

    def _write(self, columns: Axis) -> Rule:
        """An output projection."""
        return Rule(self.place.hidden, columns, zero)

    def _linear(self) -> dict[str, Rule]:
        """A Gated DeltaNet layer's own tensors."""
        p = self.place
        return {
            "linear_attn.in_proj_qkv.weight": self._read(p.qkv),
            "linear_attn.in_proj_z.weight": self._read(p.values),
            "linear_attn.in_proj_b.weight": self._read(p.value_heads),
            "linear_attn.in_proj_a.weight": self._read(p.value_heads),
            "linear_attn.conv1d.weight": Rule(p.qkv, fill=normal(0.3), rest=(1, self.big["linear_conv_kernel_dim"])),
            "linear_attn.A_log": Rule(p.value_heads, fill=log_decay_rate),
            "linear_attn.dt_bias": Rule(p.value_heads, fill=normal(0.5, -2.0)),
            "linear_attn.norm.weight": Rule(p.value_channels, fill=normal(0.1, 1.0)),
            "linear_attn.out_proj.weight": self._write(p.values),
        }

    def _attention(self) -> dict[str, Rule]:
        """A full-attention layer's own tensors."""
        p = self.place
        return {
            "self_attn.q_proj.weight": self._read(p.queries_and_gates),
            "self_attn.k_proj.weight": self._read(p.kv),
            "self_attn.v_proj.weight": self._read(p.kv),
            "self_attn.q_norm.weight": Rule(p.head_channels, fill=normal(0.1)),
            "self_attn.k_norm.weight": Rule(p.head_channels, fill=normal(0.1)),
            "self_attn.o_proj.weight": self._write(p.queries),
        }

    def _mlp(self, prefix: str) -> dict[str, Rule]:
        """A dense MLP, or a shared expert."""
        mlp = self.place.mlp
        rules = {"gate_proj": self._read(mlp), "up_proj": self._read(mlp), "down_proj": self._write(mlp)}
        return {f"{prefix}.{name}.weight": rule for name, rule in rules.items()}

    def _experts(self) -> dict[str, Random]:
        """Router, routed experts (random, writing nothing) and the shared expert's gate."""
        experts, width, hidden = self.big["num_experts"], self.big["moe_intermediate_size"], self.place.hidden.big
        return {
            "gate.weight": Random((experts, hidden), normal(READ_STD)),
            "experts.gate_up_proj": Random((experts, 2 * width, hidden), normal(READ_STD)),
            "experts.down_proj": Random((experts, hidden, width), zero),
            "shared_expert_gate.weight": Random((1, hidden), zero),
        }


def scaled_weights(
    small_state: Mapping[str, Tensor],
    small_config: dict,
    big_config: dict,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    only: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of the large checkpoint, made one at a time; what a model's `load_weights` takes.

    small_state: the small model's tensors, names and shapes of a `Qwen3_5ForCausalLM` checkpoint with its MTP, head tied or not.
    Every tensor comes in `dtype` on `device`, where its random part is drawn; `only` limits the names. ValueError at the call, not later,
    where the large shape cannot hold the small model: head sizes, epsilon or rotary positions that differ, a hidden size that is no
    multiple, too few heads, channels or layers of a type, a larger vocabulary or a mixture of experts without a constant channel.
    """
    made = ScaleUp(small_state, small_config, big_config, seed)
    return ((name, made.tensor(name, dtype, device)) for name in made.rules if only is None or only(name))


def tensor_shapes(small_state: Mapping[str, Tensor], small_config: dict, big_config: dict) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that `scaled_weights` would make; errors as there."""
    return {name: rule.shape() for name, rule in ScaleUp(small_state, small_config, big_config, 0).rules.items()}


def write_folder(folder: Path, config: dict, tokenizer_from: Path) -> None:
    """A checkpoint's folder without its weights: config.json and the tokenizer of the small model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(tokenizer_from.glob("tokenizer*.json")):
        shutil.copy(path, folder / path.name)


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int = 4 << 30) -> None:
    """Write weights as safetensors shards of about `shard_bytes` and their index; no more than one shard is held in memory."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = held = count = 0

    def flush() -> None:
        nonlocal held, count
        if shard:
            count += 1
            name = f"model-{count:05d}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, name))
            shard.clear()
            held = 0

    for name, tensor in weights:
        if held and held + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor.contiguous().cpu()
        held += tensor.nbytes
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
