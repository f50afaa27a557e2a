"""Where draft rows lie, against plain loops."""

import pytest
import torch

from bole_vllm.kernels.draft import PAD_SLOT, TreeShape, place_rows, slots_by_depth

SHAPES = [(2, 1, 1), (8, 4, 4), (16, 4, 6), (64, 4, 10), (33, 3, 16)]


def shapes() -> list[TreeShape]:
    return [shape for nodes, topk, depth in SHAPES if (shape := TreeShape.plan(nodes, topk, depth)).num_expanded]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_every_row(shape, dtype, device):
    """Requests with room for all rows, for some and for none; one row of the batch stands for no request."""
    max_len, w, depths = 100, shape.beam, shape.max_depth - 1
    lengths = [0, 17, 99, 100, 100 - shape.num_expanded, 101 - shape.num_expanded, 60]
    slots = [3, 0, 5, 1, 2, 6, -1]
    found = place_rows(
        torch.tensor(lengths, dtype=torch.int32, device=device), torch.tensor(slots, dtype=dtype, device=device), shape, max_len
    )
    positions, cache_pos, num_rows, room = (t.tolist() for t in found)
    assert positions == [[min(n + d, max_len - 1) for n in lengths for _ in range(w)] for d in range(depths)]
    assert cache_pos == [[n + e if n + e < max_len else 0 for e in range(shape.num_expanded)] for n in lengths]
    assert num_rows == [w if s >= 0 else 0 for s in slots]
    assert room == [min(max_len - n, shape.num_expanded) for n in lengths] and 0 in room and shape.num_expanded in room


@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_slots_by_depth(shape, device):
    """Slots numbered by group and expanded row arrive depth by depth; from a wider array, as vLLM's is."""
    groups, requests, w, expanded = 3, 4, shape.beam, shape.num_expanded
    wide = torch.full((groups, requests * expanded + 5), 999, dtype=torch.int64, device=device)
    slots = wide[:, : requests * expanded]
    slots.copy_(torch.arange(groups * requests * expanded, device=device).view(groups, -1))
    room = [expanded, 0, min(1, expanded), expanded // 2]
    found = slots_by_depth(slots, torch.tensor(room, dtype=torch.int32, device=device), shape)
    assert found.shape == (shape.max_depth - 1, groups, requests * w) and found.is_contiguous()
    for d, g, r, b in torch.cartesian_prod(*(torch.arange(n) for n in (shape.max_depth - 1, groups, requests, w))).tolist():
        e = d * w + b
        want = (g * requests + r) * expanded + e if e < room[r] else PAD_SLOT
        assert int(found[d, g, r * w + b]) == want, (d, g, r, b)


def test_no_request_and_wrong_arguments(device):
    shape = TreeShape.plan(8, 4, 4)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    positions, cache_pos, num_rows, room = place_rows(empty, empty, shape, 10)
    assert positions.shape == (3, 0) and cache_pos.shape == (0, shape.num_expanded) and num_rows.shape == room.shape == (0,)
    with pytest.raises(ValueError, match="lengths must be contiguous integers"):
        place_rows(empty.float(), empty, shape, 10)
    with pytest.raises(ValueError, match=r"slots must be \[groups"):
        slots_by_depth(torch.zeros(2, 3, dtype=torch.int64, device=device), torch.ones(2, dtype=torch.int32, device=device), shape)
