"""The drafter's head over a part of the vocabulary."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from bole_vllm import draft_head
from bole_vllm.config import BoleConfig, BoleConfigError
from bole_vllm.draft_head import FIRST_REFRESH, DraftHead, build_draft_head, load_token_ids


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(50, 8, generator=torch.Generator().manual_seed(0))


def test_rows_are_those_of_the_whole_head(matrix):
    head = DraftHead(matrix, [40, 3, 17], 3)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head.logits(hidden), (hidden @ matrix.T)[:, [40, 3, 17]])
    assert head.token_ids.tolist() == [40, 3, 17]


def test_follows_what_was_served(matrix):
    """Lowest ids first, then the most frequent; in place, at the first refresh and not before."""
    head = DraftHead(matrix, None, 4)
    addresses = head.weight.data_ptr(), head.token_ids.data_ptr()
    assert head.token_ids.tolist() == [0, 1, 2, 3]
    head.count_prompt([30, 30, 30, 41])
    head.count_prompt(None)
    head.count_prompt([9, 9])
    for _ in range(FIRST_REFRESH - 1):
        head.end_round()
        assert head.token_ids.tolist() == [0, 1, 2, 3]
    head.end_round()
    assert head.token_ids.tolist() == [0, 9, 30, 41], "three tokens were served, the lowest id fills up"
    assert torch.equal(head.weight, matrix[[0, 9, 30, 41]])
    assert (head.weight.data_ptr(), head.token_ids.data_ptr()) == addresses


def test_rounded_rows_follow_too(matrix):
    """Int8 by default: near the model's own logits, at the same addresses after a refresh."""
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    head = built(matrix, 4)
    addresses = head.weight.data_ptr(), head.scale.data_ptr()
    for served in ([0, 1, 2, 3], [0, 9, 30, 41]):
        assert head.weight.dtype == torch.int8 and head.token_ids.tolist() == served
        torch.testing.assert_close(head.logits(hidden), hidden @ matrix[served].T, rtol=0, atol=0.05)
        head.count_prompt([30, 41, 9])
        for _ in range(FIRST_REFRESH):
            head.end_round()
    assert (head.weight.data_ptr(), head.scale.data_ptr()) == addresses


def built(matrix: torch.Tensor, draft_vocab: int | None, **model) -> DraftHead | None:
    return build_draft_head(drafter(matrix, **model), BoleConfig(tree_size=8, draft_vocab=draft_vocab))


def drafter(matrix: torch.Tensor, vocab_size: int = 50, scale: float = 1.0) -> SimpleNamespace:
    processor = SimpleNamespace(org_vocab_size=vocab_size, scale=scale, soft_cap=None)
    return SimpleNamespace(lm_head=SimpleNamespace(weight=matrix), logits_processor=processor)


def test_a_part_by_default_where_that_is_possible(matrix, monkeypatch):
    """Of a vocabulary more than twice as large; all rows where the head is scaled, one rank's share, or packed."""
    packed = matrix.to(torch.float8_e4m3fn)
    for size, parts in ((20, 20), (25, None)):
        monkeypatch.setattr(draft_head, "DEFAULT_SIZE", size)
        head = built(matrix, None)
        assert (head and len(head.token_ids)) == parts
    monkeypatch.setattr(draft_head, "DEFAULT_SIZE", 4)
    for weight, model in ((matrix, {"scale": 2.0}), (matrix, {"vocab_size": 100}), (packed, {})):
        assert built(weight, None, **model) is None
        with pytest.raises(BoleConfigError, match="leave it out for this model"):
            built(weight, 8, **model)
    assert built(matrix, 0) is None


def test_given_ids_stay(matrix):
    head = DraftHead(matrix, [5, 6], 2)
    head.count_prompt([1] * 9)
    for _ in range(2 * FIRST_REFRESH):
        head.end_round()
    assert head.token_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    "text,message",
    [
        ("[1, 2", "cannot read"),
        ('{"a": 1}', "must hold a JSON list of token ids in 0..49"),
        ("[1, 50, 3]", "must hold a JSON list of token ids in 0..49"),
        ("[true, 2, 3, 4]", "must hold a JSON list"),
        ("[1, 1, 2]", "names 2 tokens, at least 4"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(BoleConfigError, match=message):
        load_token_ids(str(path), 50, 4)


def test_good_and_missing_file(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([7, 3, 7, 9, 1]))
    assert load_token_ids(str(path), 50, 4) == [7, 3, 9, 1]
    with pytest.raises(BoleConfigError, match="cannot read"):
        load_token_ids(str(tmp_path / "none.json"), 50, 4)
