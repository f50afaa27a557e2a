"""Penalties by what a node's own path repeats.

The penalties of committed tokens are the same for every node of a request, and vLLM's kernel applies them to whole rows. A draft on the
path of a node changes one logit of that node's row: its own, by as many more occurrences as it has on the path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import PathRows, draft_at, row_of


# what follows the batch must not make new variants
@triton.jit(do_not_specialize=["first_row"])
def path_penalties_kernel(
    p_logits,
    p_value,
    p_node_offset,
    p_row_start,
    p_slot,
    p_token,
    p_path,
    p_depth,
    p_repetition,
    p_frequency,
    p_presence,
    p_count,
    first_row,
    stride_path,
    stride_logits,
    stride_count,
    STORE: tl.constexpr,
    BD: tl.constexpr,
):
    # one program a node
    i_r, i_n = tl.program_id(0), tl.program_id(1)
    row, first, is_node, _ = row_of(p_node_offset, p_row_start, first_row, i_r, i_n)
    if is_node:
        slot = tl.load(p_slot + i_r).to(tl.int64)
        repetition, frequency = tl.load(p_repetition + slot), tl.load(p_frequency + slot)
        presence = tl.load(p_presence + slot)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            # [BD] depths of the path
            o_d = tl.arange(0, BD)
            m_d = (o_d > 0) & (o_d <= tl.load(p_depth + first + i_n))
            b_token = draft_at(p_token, p_path, stride_path, first, i_n, o_d, m_d)
            m_d = m_d & (b_token >= 0)
            p_x = p_logits + row * stride_logits + b_token
            p_kept = p_value + row * BD + o_d
            if STORE:
                tl.store(p_x, tl.load(p_kept, mask=m_d, other=0.0), mask=m_d)
            else:
                b_same = (b_token[:, None] == b_token[None, :]) & m_d[None, :]
                b_count = tl.load(p_count + slot * stride_count + b_token, mask=m_d, other=0) + tl.sum(b_same.to(tl.int32), 1)
                b_x = tl.load(p_x, mask=m_d, other=0.0)
                if repetition != 1.0:
                    b_x *= tl.where(b_x > 0, 1.0 / repetition, repetition)
                b_x -= frequency * b_count
                b_x -= presence
                tl.store(p_kept, b_x, mask=m_d)


def _launch(logits: torch.Tensor, rows: PathRows, value: torch.Tensor, settings: tuple, counts: torch.Tensor, store: bool) -> None:
    repetition, frequency, presence = settings
    path_penalties_kernel[rows.grid](
        p_logits=logits, p_value=value, p_repetition=repetition, p_frequency=frequency, p_presence=presence, p_count=counts,
        stride_logits=logits.stride(0), stride_count=counts.stride(0), STORE=store, BD=value.shape[1], num_warps=1, **rows.kernel_arguments,
    )  # fmt: skip


class PathPenalties:
    """The logits of every node's path tokens, penalised, to be put in place once the committed tokens' penalties are.

    logits      [rows, V] fp32, contiguous in V; before any penalty when made, after the committed tokens' ones at `put`
    repetition, frequency, presence  [slots] fp32 of the requests; 1, 0, 0: none, and their rows stay as they are
    counts      [slots, V] int32 occurrences of every token in the committed output

    Two launches, no host sync. Source of the arithmetic: vllm.v1.worker.gpu.sample.penalties, in the same order.
    """

    def __init__(
        self, logits: torch.Tensor, rows: PathRows, repetition: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:  # fmt: skip
        self.rows, self.settings, self.counts = rows, (repetition, frequency, presence), counts
        # [rows, depths] the penalised logits of a row's drafts
        self.value = torch.empty(logits.shape[0], rows.forest.path.shape[1], dtype=torch.float32, device=logits.device)
        _launch(logits, rows, self.value, self.settings, counts, store=False)

    def put(self, logits: torch.Tensor) -> None:
        """Write them to their places in logits."""
        _launch(logits, self.rows, self.value, self.settings, self.counts, store=True)
