"""Shapes of the recurrent state cache without vLLM's room for drafts."""

from __future__ import annotations

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

Shapes = tuple[tuple[int, ...], ...]


def one_state_per_request(shapes: Shapes, num_spec: int) -> Shapes:
    """vLLM's (conv, recurrent) state shapes with the conv window at `width - 1` columns.

    With speculation vLLM widens the window by one column per draft. Trees keep conv inputs per node for one round and
    write the window at the commit, so the cache needs no more than plain decoding does.
    """
    conv, *rest = shapes
    axis = 1 if is_conv_state_dim_first() else 0
    narrow = list(conv)
    narrow[axis] -= num_spec
    return (tuple(narrow), *rest)
