"""The candidate table after the root's children, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def first_depth_kernel(
    p_child,
    p_step,
    p_room,
    p_token,
    p_parent,
    p_logprob,
    p_frontier,
    p_frontier_token,
    p_mask,
    stride_child,
    stride_step,
    M: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    MP: tl.constexpr,
    WP: tl.constexpr,
    WORDS_P: tl.constexpr,
):
    # one program a request
    i_r = tl.program_id(0).to(tl.int64)
    p_child += i_r * stride_child
    p_step += i_r * stride_step
    # [MP] the table: the root's children, then nothing
    o_m = tl.arange(0, MP)
    m_m, m_k = o_m < M, o_m < K
    tl.store(p_token + i_r * M + o_m, tl.load(p_child + o_m, mask=m_k, other=-1), mask=m_m)
    tl.store(p_parent + i_r * M + o_m, tl.full([MP], -1, dtype=tl.int64), mask=m_m)
    tl.store(p_logprob + i_r * M + o_m, tl.load(p_step + o_m, mask=m_k, other=float("-inf")), mask=m_m)
    # [WP] the frontier: the best of them, of which every one sees itself
    o_w = tl.arange(0, WP)
    m_w = o_w < W
    tl.store(p_frontier + i_r * W + o_w, o_w.to(tl.int64), mask=m_w)
    tl.store(p_frontier_token + i_r * W + o_w, tl.load(p_child + o_w, mask=m_w, other=0), mask=m_w)
    o_s = tl.arange(0, WORDS_P)[None, :]
    b_bit = tl.full([WP], 1, tl.int32) << (o_w % 32)
    b_mask = tl.where((o_s == (o_w // 32)[:, None]) & (o_w < tl.load(p_room + i_r))[:, None], b_bit[:, None], 0)
    tl.store(p_mask + (i_r * W + o_w[:, None]) * WORDS + o_s, b_mask, mask=m_w[:, None] & (o_s < WORDS))


def launch(token: torch.Tensor, logprob: torch.Tensor, shape, room: torch.Tensor | None, token_out: torch.Tensor | None) -> tuple:
    """The fields of `grow.Candidates` in their order; see `grow.start_from`."""
    num_requests, device = token.shape[0], token.device

    def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_requests, *sizes, dtype=dtype, device=device)

    if room is None:
        room = torch.full((num_requests,), shape.num_expanded, dtype=torch.int32, device=device)
    tables = (empty(shape.num_candidates, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.float32))
    found = (
        *tables,
        empty(shape.beam, dtype=torch.int64),
        empty(shape.beam, dtype=torch.int64) if token_out is None else token_out.view(num_requests, shape.beam),
        empty(shape.beam, shape.num_words, dtype=torch.int32),
    )
    if num_requests:
        first_depth_kernel[(num_requests,)](
            token,
            logprob,
            room,
            *found,
            token.stride(0),
            logprob.stride(0),
            M=shape.num_candidates,
            W=shape.beam,
            K=shape.topk,
            WORDS=shape.num_words,
            MP=triton.next_power_of_2(shape.num_candidates),
            WP=triton.next_power_of_2(shape.beam),
            WORDS_P=triton.next_power_of_2(shape.num_words),
            num_warps=1,
        )
    return *found, room
