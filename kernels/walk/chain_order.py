"""A round's rows as a chain drafter expects them: every request's accepted rows at its front, in path order; and what is left of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def chain_order_kernel(
    p_start,
    p_path,
    p_path_len,
    p_seq_lens,
    p_num_rejected,
    p_num_sampled,
    p_rows,
    p_lengths,
    p_sampled,
    num_rows,
    num_all,
    stride_path,
    BS: tl.constexpr,
    BN: tl.constexpr,
):
    # one program a request, one more for rows that belong to none
    i_r = tl.program_id(0)
    last = tl.num_programs(0) - 1
    if i_r < last:
        tl.store(p_lengths + i_r, tl.load(p_seq_lens + i_r) - tl.load(p_num_rejected + i_r))
        tl.store(p_sampled + i_r, tl.load(p_num_sampled + i_r))
    else:
        for start in range(last, num_all, BN):
            o_r = start + tl.arange(0, BN)
            tl.store(p_lengths + o_r, tl.zeros([BN], dtype=tl.int32), mask=o_r < num_all)
    first = tl.load(p_start + i_r)
    end = tl.load(p_start + i_r + 1, mask=i_r < last, other=num_rows)
    b_len = tl.load(p_path_len + i_r, mask=i_r < last, other=0)
    o_s = tl.arange(0, BS)
    m_path = o_s < b_len
    b_node = tl.load(p_path + i_r.to(tl.int64) * stride_path + o_s, mask=m_path, other=0)
    tl.store(p_rows + first + o_s, (first + b_node).to(tl.int64), mask=m_path)
    for start in range(first + b_len, end, BN):
        o_n = start + tl.arange(0, BN)
        tl.store(p_rows + o_n, o_n.to(tl.int64), mask=o_n < end)


def chain_order(
    start: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
    num_rows: int,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    num_sampled: torch.Tensor,
    lengths: torch.Tensor,
    sampled: torch.Tensor,
) -> torch.Tensor:
    """[num_rows] int64: the row to be put at every row. One launch, no host sync.

    start     [R + 1] int32  request -> its first row; rows from start[R] on stay where they are
    path      [R, >= 1] int32  accepted nodes of each request, root first: rows counted from the request's first
    path_len  [R] int32  how many; a request's rows from there on stay where they are (an accepted one may occur twice)
    seq_lens, num_rejected, num_sampled  [R] int32  tokens with all rows of the round, rows not accepted, tokens emitted
    lengths   [>= R] int32, in place  tokens without the rejected rows; 0 beyond R
    sampled   [>= R] int32, in place  num_sampled; left as it is beyond R

    Raises ValueError on dtypes or shapes.
    """
    num_requests = path_len.shape[0]
    given = {"path_len": path_len, "seq_lens": seq_lens, "num_rejected": num_rejected, "num_sampled": num_sampled}
    for name, t in {**given, "lengths": lengths, "sampled": sampled}.items():
        if t.dtype != torch.int32 or t.dim() != 1 or t.shape[0] < num_requests or t.stride(0) != 1:
            raise ValueError(f"{name} must be contiguous int32 [>= {num_requests}], got {t.dtype} {tuple(t.shape)}")
    rows = torch.empty(num_rows, dtype=torch.int64, device=path.device)
    width = triton.next_power_of_2(path.shape[1])
    chain_order_kernel[(num_requests + 1,)](
        start,
        path,
        path_len,
        seq_lens,
        num_rejected,
        num_sampled,
        rows,
        lengths,
        sampled,
        num_rows,
        lengths.shape[0],
        path.stride(0),
        BS=width,
        BN=256,
        num_warps=1,
    )
    return rows
