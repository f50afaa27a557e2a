"""What a round starts from, against plain loops."""

import pytest
import torch

from bole_vllm.kernels.topology import begin_round

COLUMNS, POISON = 7, 999


def outputs(rows: int, device) -> list[torch.Tensor]:
    """slot, num_computed, num_nodes, path, path_len; the path in rows of a wider array."""
    i32 = {"dtype": torch.int32, "device": device}
    wide = torch.full((rows, COLUMNS + 2), POISON, **i32)
    vectors = [torch.full((rows,), POISON, **i32) for _ in range(3)]
    return [torch.full((rows,), POISON, dtype=torch.int64, device=device), *vectors[:2], wide[:, :COLUMNS], vectors[2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows,requests", [(1, 1), (5, 3), (70, 64)])
def test_every_request(rows, requests, dtype, device):
    """Prompts longer than a tree, rows without a slot, requests without rows, and the padded rows of a graph. Seeds 0 to 2."""
    max_nodes = 4
    for seed in range(3):
        gen = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, max_nodes + 1, (rows,), generator=gen)
        is_tree = torch.randint(0, 4, (rows,), generator=gen) > 0
        lengths[~is_tree] = 9
        lengths[requests:] = 0
        slot = torch.randint(0, 99, (requests,), generator=gen)
        slot[torch.randint(0, 5, (requests,), generator=gen) == 0] = -1
        before = torch.randint(0, 1000, (rows,), generator=gen)
        start = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32)
        found = outputs(rows, device)
        seq_lens = (before + lengths).int()
        begin_round(slot.to(dtype).to(device), is_tree.to(device), start.to(device), seq_lens.to(device), max_nodes, *found)
        slots = [*slot.tolist(), *[-1] * (rows - requests)]
        nodes = [n if tree and s >= 0 else 0 for n, tree, s in zip(lengths.tolist(), is_tree.tolist(), slots, strict=True)]
        got_slot, num_computed, num_nodes, path, path_len = (t.tolist() for t in found)
        assert got_slot == slots and num_computed == before.tolist() and num_nodes == nodes, f"seed {seed}"
        assert path_len == [min(n, 1) for n in nodes] and path == [[0] * COLUMNS] * rows, f"seed {seed}"
        beside = found[3].as_strided((rows, 2), (COLUMNS + 2, 1), COLUMNS)
        assert bool((beside == POISON).all()), "columns beside the path"


def test_more_rows_than_a_tree_has_nodes(device):
    """A request that is scheduled with more rows than its tree may hold gets a tree of the most nodes."""
    one = {"device": device, "dtype": torch.int32}
    found = outputs(1, device)
    is_tree = torch.ones(1, dtype=torch.bool, device=device)
    begin_round(torch.tensor([3], **one), is_tree, torch.tensor([0, 9], **one), torch.tensor([20], **one), 4, *found)
    assert [t.tolist() for t in found] == [[3], [11], [4], [[0] * COLUMNS], [1]]


def test_no_rows(device):
    found = outputs(0, device)
    empty, start = (torch.zeros(n, dtype=torch.int32, device=device) for n in (0, 1))
    begin_round(empty, empty.bool(), start, empty, 4, *found)


def test_refuses_wrong_arguments(device):
    start, lens = torch.tensor([0, 1, 2], dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int32, device=device)
    is_tree = torch.ones(2, dtype=torch.bool, device=device)
    found = outputs(2, device)
    with pytest.raises(ValueError, match="at least 2 rows"):
        begin_round(torch.arange(3, device=device), is_tree, start, lens, 4, *found)
    with pytest.raises(ValueError, match="is_tree must be bool"):
        begin_round(lens, lens, start, lens, 4, *found)
    with pytest.raises(ValueError, match=r"slot must be torch\.int64 \[2\]"):
        begin_round(lens, is_tree, start, lens, 4, found[0].int(), *found[1:])
    with pytest.raises(ValueError, match=r"path must be torch\.int32"):
        begin_round(lens, is_tree, start, lens, 4, *found[:3], found[3].t(), found[4])
