"""Sampling where few tokens are left of every row: temperature, min_p, top_k and top_p without a copy of the logits.

vLLM cuts rows in several passes over the whole vocabulary, one program a row. Trees have many rows: with settings like Qwen's own (top_k
20, top_p 0.95) that was a third of a round of 16 trees. Here the tokens that are left are taken out of the logits, and only these get the
noise that vLLM's sampler gives them, keyed by seed, position and token: the sample is the same.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax
from vllm.v1.worker.gpu.sample.states import SamplingStates

from bole_vllm.kernels.candidates import MAX_CANDIDATES, best_tokens


def most_candidates(states: SamplingStates, slots: np.ndarray) -> int | None:
    """The largest top_k of the requests in these slots; None where one that is sampled has none, or one above MAX_CANDIDATES."""
    sampled = states.temperature.np[slots] != 0.0
    most = int(np.where(sampled, states.top_k.np[slots], 1).max())
    return most if most <= MAX_CANDIDATES else None


def sample_candidates(
    logits: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, states: SamplingStates, most: int, processed: bool, use_fp64: bool
) -> torch.Tensor:
    """[N] int64 samples of logits [N, V], by the settings in `states` of the rows' slots [N]; position [N]. most: `most_candidates`.

    processed: temperature and min_p are applied already."""
    value, token = best_tokens(
        logits, slot, states.temperature.gpu, states.top_k.gpu, states.top_p.gpu, states.min_p.gpu, most, processed=processed
    )
    sampled = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _noise_kernel[(logits.shape[0],)](
        value, token, slot, position, states.temperature.gpu, states.seeds.gpu, sampled, K=value.shape[1], USE_FP64=use_fp64, num_warps=1
    )
    return sampled


@triton.jit
def _noise_kernel(p_value, p_token, p_slot, p_position, p_temperature, p_seed, p_sampled, K: tl.constexpr, USE_FP64: tl.constexpr):
    i_r = tl.program_id(0).to(tl.int64)
    i_s = tl.load(p_slot + i_r)
    o_k = i_r * K + tl.arange(0, K)
    b_value, b_token = tl.load(p_value + o_k), tl.load(p_token + o_k)
    temperature, seed, position = tl.load(p_temperature + i_s), tl.load(p_seed + i_s), tl.load(p_position + i_r)
    _, best = gumbel_noised_argmax(
        b_value, b_token, b_value > float("-inf"), seed, position, temperature,
        IS_DRAFTING=False, USE_FP64=USE_FP64, APPLY_TEMPERATURE=False,
    )  # fmt: skip
    tl.store(p_sampled + i_r, tl.load(p_token + i_r * K + best))
