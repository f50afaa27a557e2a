"""Stand-ins for two vLLM 0.32 kernels that Triton's interpreter cannot run, and a wider launch for a third. CPU only.

- `apply_top_k_top_p_triton` calls a method on a Python int ("'int' object has no attribute 'to'"); vLLM's own
  PyTorch version computes the same.
- `_apply_grammar_bitmask_kernel` stores through an integer mask ("mask has unsupported dtype"); written in PyTorch here.
- `_gumbel_sample_kernel` is launched once per row over the whole vocabulary instead of once per 1,024 entries: the
  interpreter pays per operation. Noise is keyed by token, so the samples are the same.
"""

from __future__ import annotations

import torch


def replace_kernels_the_interpreter_cannot_run() -> None:
    """Swap the names where vLLM looks them up; idempotent."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import structured_outputs
    from vllm.v1.worker.gpu.sample import gumbel

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    structured_outputs._apply_grammar_bitmask_kernel = _GrammarBitmask()
    if not isinstance(gumbel._gumbel_sample_kernel, _WholeRows):
        gumbel._gumbel_sample_kernel = _WholeRows(gumbel._gumbel_sample_kernel)


class _WholeRows:
    """Launches the kernel with one program per row; columns of the per-block results beyond the first stay at -inf."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        rows, _ = grid

        def launch(local_argmax, argmax_stride, local_max, *args, BLOCK_SIZE: int, **kwargs) -> None:
            blocks = local_max.shape[1]
            local_argmax.zero_()
            local_max.fill_(-float("inf"))
            block_size = 1 << (blocks * BLOCK_SIZE - 1).bit_length()
            self.kernel[(rows, 1)](local_argmax, argmax_stride, local_max, *args, BLOCK_SIZE=block_size, **kwargs)

        return launch


class _GrammarBitmask:
    """Launched like the kernel it replaces: `kernel[grid](...)`. Writes -inf into `logits` in place."""

    def __getitem__(self, _grid):
        return _apply_grammar_bitmask


def _apply_grammar_bitmask(
    logits: torch.Tensor,  # [num_logits, vocab]
    _logits_stride: int,
    logits_indices: torch.Tensor,  # [num_masks] request * MASK_STRIDE + position
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    bitmask: torch.Tensor,  # [num_masks, vocab / 32] bit set: token allowed
    _bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    bits = torch.arange(32, dtype=torch.int32)
    for mask_row, packed in zip(logits_indices.tolist(), bitmask):
        request, position = divmod(mask_row, MASK_STRIDE)
        first, end = cu_num_logits[request : request + 2].tolist()
        if position < end - first:
            allowed = ((packed[:, None] >> bits) & 1).flatten()[:vocab_size].bool()
            logits[first + position, :vocab_size].masked_fill_(~allowed, -float("inf"))
