"""What a round starts from, for all requests in one launch: slot, number of nodes, tokens before them, the path if no draft is accepted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .locate import rows_and_nodes

BLOCK = 32


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def begin_round_kernel(
    p_request_slot,
    p_is_tree,
    p_query_start,
    p_seq_lens,
    p_slot,
    p_num_computed,
    p_num_nodes,
    p_path,
    p_path_len,
    num_requests,
    num_rows,
    num_all,
    stride_path,
    T: tl.constexpr,
    COLUMNS: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
):
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    m_row = o_r < num_rows
    b_slot = tl.load(p_request_slot + o_r, mask=o_r < num_requests, other=-1).to(tl.int64)
    b_len, b_nodes = rows_and_nodes(p_query_start, p_is_tree, b_slot, o_r, m_row, T)
    tl.store(p_slot + o_r, b_slot, mask=m_row)
    tl.store(p_num_computed + o_r, tl.load(p_seq_lens + o_r, mask=m_row, other=0) - b_len, mask=m_row)
    tl.store(p_num_nodes + o_r, b_nodes, mask=m_row)
    tl.store(p_path_len + o_r, tl.minimum(b_nodes, 1), mask=o_r < num_all)
    o_c = tl.arange(0, BC)[None, :]
    b_zero = tl.zeros([BR, BC], dtype=tl.int32)
    tl.store(p_path + o_r.to(tl.int64)[:, None] * stride_path + o_c, b_zero, mask=m_row[:, None] & (o_c < COLUMNS))


def begin_round(
    request_slot: torch.Tensor,
    is_tree: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_nodes: int,
    slot: torch.Tensor,
    num_computed: torch.Tensor,
    num_nodes: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
) -> None:
    """Fill the last five, in place, for R rows of a batch, of which the first `len(request_slot)` stand for requests.

    request_slot  [<= R] int32 or int64  request -> its slot
    is_tree       [>= R] bool  False: a prefill or padded row
    query_start   [R + 1] int32  first token row of each request; seq_lens [>= R] int32 tokens, this round's rows included
    slot          [R] int64  the slot, -1 where a row stands for no request
    num_computed  [R] int32  tokens before the round
    num_nodes     [R] int32  nodes of the row's tree, at most `max_nodes`; 0: no tree
    path          [R, columns] int32  zeros: node 0
    path_len      [>= R] int32  1 where there is a tree, whose root is always committed, else 0, rows beyond R included

    No host sync. Raises ValueError on dtypes or shapes.
    """
    num_rows = query_start.shape[0] - 1
    if request_slot.shape[0] > num_rows or is_tree.shape[0] < num_rows or seq_lens.shape[0] < num_rows:
        raise ValueError(f"request_slot must cover at most, is_tree and seq_lens at least {num_rows} rows")
    if is_tree.dtype != torch.bool:
        raise ValueError(f"is_tree must be bool, got {is_tree.dtype}")
    i32 = {"num_computed": num_computed, "num_nodes": num_nodes, "path": path, "path_len": path_len}
    for name, t, dtype in (("slot", slot, torch.int64), *((name, t, torch.int32) for name, t in i32.items())):
        if t.dtype != dtype or t.shape[0] < num_rows or t.stride(-1) != 1:
            raise ValueError(f"{name} must be {dtype} [{num_rows}{', ...' if t.dim() > 1 else ''}], got {t.dtype} {tuple(t.shape)}")
    num_all = path_len.shape[0]
    if num_all == 0:
        return
    begin_round_kernel[(triton.cdiv(num_all, BLOCK),)](
        request_slot,
        is_tree.view(torch.uint8),
        query_start,
        seq_lens,
        slot,
        num_computed,
        num_nodes,
        path,
        path_len,
        request_slot.shape[0],
        num_rows,
        num_all,
        path.stride(0),
        T=max_nodes,
        COLUMNS=path.shape[1],
        BC=triton.next_power_of_2(path.shape[1]),
        BR=BLOCK,
        num_warps=1,
    )
