"""Bans the last token of a word that a node's own path, behind the committed output, would complete."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import PathRows, row_of, token_at


@triton.jit(do_not_specialize=["first_row"])
def path_bad_words_kernel(
    p_logits,
    p_node_offset,
    p_row_start,
    p_slot,
    p_token,
    p_path,
    p_depth,
    p_words,
    p_offsets,
    p_num_words,
    p_committed,
    p_prompt_len,
    p_total_len,
    first_row,
    stride_path,
    stride_logits,
    stride_words,
    stride_offsets,
    stride_committed,
):
    # one program a row and word
    i_r, i_n, i_w = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first, is_node, exists = row_of(p_node_offset, p_row_start, first_row, i_r, i_n)
    slot = tl.load(p_slot + i_r).to(tl.int64)
    if exists & (i_w < tl.load(p_num_words + slot)):
        depth = tl.load(p_depth + first + i_n, mask=is_node, other=0)
        total = tl.load(p_total_len + slot)
        # the word's tokens but the last have to be the latest ones of the output
        begin = tl.load(p_offsets + slot * stride_offsets + i_w)
        last = tl.load(p_offsets + slot * stride_offsets + i_w + 1) - 1
        p_word = p_words + slot * stride_words
        place = total + depth - (last - begin)
        match = place >= tl.load(p_prompt_len + slot)
        p_of_request, p_of_node = p_committed + slot * stride_committed, p_path + (first + i_n) * stride_path
        for i in range(tl.where(match, last - begin, 0)):
            match = match & (token_at(p_of_request, p_of_node, p_token + first, total, place + i) == tl.load(p_word + begin + i))
        tl.store(p_logits + row * stride_logits + tl.load(p_word + last), float("-inf"), mask=match)


def ban_words(
    logits: torch.Tensor,
    rows: PathRows,
    words: torch.Tensor,
    offsets: torch.Tensor,
    num_words: torch.Tensor,
    most_words: int,
    committed: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
) -> None:
    """-inf, in place, where a row's next token would complete a word. One launch, no host sync.

    logits      [rows, V] fp32, contiguous in V
    words       [slots, tokens] int32 the requests' words, one after the other
    offsets     [slots, words + 1] int32 where they begin
    num_words   [slots] int32; most_words: of the requests at hand
    committed   [slots, positions] int32 all tokens of a request: prompt_len [slots] of the prompt, total_len [slots] in all

    The output alone counts, as in vllm.v1.worker.gpu.sample.bad_words.
    """
    path_bad_words_kernel[(*rows.grid, most_words)](
        p_logits=logits, p_words=words, p_offsets=offsets, p_num_words=num_words, p_committed=committed, p_prompt_len=prompt_len,
        p_total_len=total_len, stride_logits=logits.stride(0), stride_words=words.stride(0), stride_offsets=offsets.stride(0),
        stride_committed=committed.stride(0), num_warps=1, **rows.kernel_arguments,
    )  # fmt: skip
