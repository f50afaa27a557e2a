"""A hidden channel that holds the same positive number for every token, from the embedding to the final norms.

With it a large vocabulary can be put over a small one: head rows of tokens the small model does not have carry a large negative weight
there. The channel is the last one. In a model that keeps it,
  * every embedding row holds the same number above 0 there;
  * nothing writes to it: its rows of every output projection are zero, in the target and the MTP layers;
  * the MTP's `fc` computes it from the embedding's channel alone, times 1;
  * norms that read it towards a head, a router or `fc` have gain 1 there.
The final norms then hold a positive number there, which varies with the other channels, and the tied head adds the same to all logits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

EMBEDDING, FC = "model.embed_tokens.weight", "mtp.fc.weight"
_WRITES = re.compile(r"\.(o_proj|out_proj|down_proj)\.weight$")
_GAINS = re.compile(r"(^model\.norm|^mtp\.norm|^mtp\.pre_fc_norm_embedding|\.post_attention_layernorm)\.weight$")


def _pinned(state: Mapping[str, Tensor], value: float) -> list[tuple[str, Tensor, float]]:
    """(name, view of entries that the channel fixes, the number that all of them must be)."""
    channel = state[EMBEDDING].shape[1] - 1
    pins = []
    for name, tensor in state.items():
        tensor = tensor.detach()
        if name == EMBEDDING:
            pins.append((name, tensor[:, channel], value))
        elif name == FC:
            row = tensor[channel]
            pins += [(name, row[:channel], 0.0), (name, row[channel], 1.0), (name, row[channel + 1 :], 0.0)]
        elif _WRITES.search(name) or _GAINS.search(name):
            pins.append((name, tensor[channel], 0.0))
    return pins


class ConstantChannel:
    """Keeps a model's last hidden channel constant while it is trained.

    `apply()` sets the tensors in place; call it after every optimizer step, or let `follow(optimizer)` do so. An optimizer made of several
    must have it follow the one that steps last. `value` is what the embedding holds.
    """

    def __init__(self, model: nn.Module, value: float):
        if value <= 0:
            raise ValueError(f"the constant must be above 0, not {value}")
        self.model, self.value = model, value

    def apply(self, *_args) -> None:
        """Set everything that the channel fixes."""
        for _name, view, wanted in _pinned(dict(self.model.named_parameters()), self.value):
            view.fill_(wanted)

    def follow(self, optimizer: torch.optim.Optimizer):
        """Apply after each of this optimizer's steps from now on. Returns torch's handle, whose `remove()` ends that."""
        return optimizer.register_step_post_hook(self.apply)


def reserve_constant_channel(model: nn.Module, value: float = 0.125) -> ConstantChannel:
    """Make the last hidden channel of a DemoModel constant, in place, once; the result keeps it so through training.

    Parameter names are those of the checkpoint. A model already trained changes its function a little. A power of two is exact in bf16.
    The embedding's own spread is a good `value`: much more, and the norms leave the other channels little.
    """
    channel = ConstantChannel(model, value)
    channel.apply()
    return channel


def constant_of(state: Mapping[str, Tensor]) -> float:
    """What the embedding holds in the constant channel. ValueError where the state does not keep one."""
    value = float(state[EMBEDDING][0, -1])
    if value <= 0:
        raise ValueError(f"no constant channel: the last channel of the first embedding is {value}, not above 0")
    for name, view, wanted in _pinned(state, value):
        if not bool((view == wanted).all()):
            raise ValueError(f"no constant channel: {name} does not keep the last channel (see reserve_constant_channel)")
    return value
