"""Where a commit writes under prefix caching, at every place of a path beside a block's end."""

import pytest
import torch

from bole_vllm.kernels.commit import block_targets, in_place_targets, naive

BLOCK_SIZE = 16


def every_case(device):
    """Lengths around two blocks' ends with paths up to a block in length; requests without a path, and one without a slot."""
    cases = [(before, n) for before in (0, 1, 14, 15, 16, 17, 31, 32, 40) for n in (0, 1, 2, 15, 16)]
    lengths, paths = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*cases, strict=True))
    gen = torch.Generator().manual_seed(3)
    tables = [torch.randint(1, 999, (len(cases) + 2, 6), generator=gen, dtype=torch.int32).to(device) for _ in range(3)]
    slots = torch.randperm(len(cases), generator=gen).to(device)
    slots[5] = -1
    return tables, lengths, paths, slots


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_place_of_a_path(dtype, device):
    tables, lengths, paths, slots = every_case(device)
    column = torch.full((len(slots) + 1,), -7, dtype=torch.int32, device=device)
    want_column = column.clone()
    want_slot, want_len = naive.block_targets(tables, lengths, paths, BLOCK_SIZE, slots, want_column)
    dst_slot, dst_len = block_targets(tables, lengths, paths, BLOCK_SIZE, slots.to(dtype), column)
    assert dst_slot.tolist() == want_slot and dst_len.tolist() == want_len
    assert torch.equal(column, want_column)
    assert any(second for _, second in want_len), "a block's end was crossed"


@pytest.mark.parametrize("requests", [1, 32, 41])
def test_one_state_a_request(requests, device):
    """The state that was read, after the whole path; nothing to the second destination."""
    gen = torch.Generator().manual_seed(requests)
    slots = torch.randint(0, 999, (3, requests), generator=gen, dtype=torch.int32)
    paths = torch.randint(0, 9, (requests,), generator=gen, dtype=torch.int32)
    dst_slot, dst_len = in_place_targets(slots.to(device), paths.to(device))
    assert dst_slot.tolist() == [[[slot, 0] for slot in group] for group in slots.tolist()]
    assert dst_len.tolist() == [[n, 0] for n in paths.tolist()]
    with pytest.raises(ValueError, match="src_slot and path_len must be contiguous int32"):
        in_place_targets(slots.to(device).long(), paths.to(device))


def test_no_request(device):
    assert in_place_targets(*(torch.zeros(*shape, 0, dtype=torch.int32, device=device) for shape in ((3,), ())))[0].shape == (3, 0, 2)
    tables, lengths, paths, slots = every_case(device)
    dst_slot, dst_len = block_targets(
        tables, lengths[:0], paths[:0], BLOCK_SIZE, slots[:0], torch.zeros(1, dtype=torch.int32, device=device)
    )
    assert dst_slot.shape == (3, 0, 2) and dst_len.shape == (0, 2)


def test_refuses_wrong_arguments(device):
    tables, lengths, paths, slots = every_case(device)
    column = torch.zeros(len(slots) + 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="num_computed must be contiguous int32"):
        block_targets(tables, lengths.long(), paths, BLOCK_SIZE, slots, column)
    with pytest.raises(ValueError, match="a block table must be int32"):
        block_targets([tables[0].long()], lengths, paths, BLOCK_SIZE, slots, column)
