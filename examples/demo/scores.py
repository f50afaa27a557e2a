"""The numbers that plain decoding took its tokens from: logits, and with a temperature logits plus vLLM's own noise.

vLLM samples by adding Gumbel noise to logits / temperature and taking the largest. The noise depends on the request's
seed, the position and the token alone, so two engines differ in a sampled token only where their logits differ.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_uniform32

from examples.demo.arms import Phase


@triton.jit
def _noise_kernel(p_noise, p_seed, p_pos, VOCAB, BLOCK: tl.constexpr):
    i_row = tl.program_id(0)
    o_token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    uniform = murmur3_uniform32(tl.load(p_seed + i_row), tl.load(p_pos + i_row), o_token)
    tl.store(p_noise + i_row.to(tl.int64) * VOCAB + o_token, -tl.log(-_log1p_neg_stable(uniform)), mask=o_token < VOCAB)


def gumbel_noise(seed: torch.Tensor, pos: torch.Tensor, vocab: int) -> torch.Tensor:
    """[rows, vocab] fp32: the noise of vllm.v1.worker.gpu.sample.gumbel for int64 seeds and positions [rows]."""
    noise = torch.empty(seed.shape[0], vocab, dtype=torch.float32, device=seed.device)
    block = 4096
    _noise_kernel[(seed.shape[0], triton.cdiv(vocab, block))](noise, seed, pos, vocab, BLOCK=block)
    return noise


def scores(logits: np.ndarray, prompt_lengths: list[int], phase: Phase, device: str) -> np.ndarray:
    """What the sampler maximised, fp32. logits [prompts, tokens, vocab]: of each generated token.

    Token j of a request with L prompt tokens is sampled at the row of position L + j - 1.
    """
    if phase.temperature == 0.0:
        return logits
    num_prompts, num_tokens, vocab = logits.shape
    rows = [(phase.seed(prompt), length + j - 1) for prompt, length in enumerate(prompt_lengths) for j in range(num_tokens)]
    seed, pos = torch.tensor(rows, dtype=torch.int64, device=device).unbind(dim=1)
    noise = gumbel_noise(seed.contiguous(), pos.contiguous(), vocab).cpu().numpy()
    return logits / np.float32(phase.temperature) + noise.reshape(num_prompts, num_tokens, vocab)
