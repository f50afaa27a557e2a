"""What top_k, top_p and min_p leave of a row: against a sort of the whole row, and against vLLM's own cuts."""

import math

import pytest
import torch

from bole_vllm.kernels.candidates import MAX_CANDIDATES, best_tokens, naive

# temperature, top_k, top_p, min_p of the slots
SETTINGS = [
    (0.6, 20, 0.95, 0.0),
    (0.0, 5000, 1.0, 0.0),
    (1.0, 1, 0.5, 0.1),
    (1.7, 33, 1.0, 0.05),
    (0.3, 64, 0.9, 0.0),
    (1.0, 7, 0.01, 0.0),
    (2.0, 50, 0.99, 0.3),
]


def settings(device, rows=SETTINGS) -> tuple[torch.Tensor, ...]:
    temperature, top_k, top_p, min_p = zip(*rows)
    reals = [torch.tensor(x, dtype=torch.float32, device=device) for x in (temperature, top_p, min_p)]
    return reals[0], torch.tensor(top_k, dtype=torch.int32, device=device), *reals[1:]


def random_logits(rows: int, vocab: int, seed: int, device, dtype, tied: bool) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, vocab), generator=gen) if tied else 3 * torch.randn(rows, vocab, generator=gen)
    return x.to(dtype).to(device)


def check(logits: torch.Tensor, slot: torch.Tensor, device, most: int = MAX_CANDIDATES) -> None:
    value, token = best_tokens(logits, slot, *settings(device), most)
    assert value.shape == token.shape and value.dtype == torch.float32 and token.dtype == torch.int64
    for row in range(logits.shape[0]):
        temperature, top_k, top_p, min_p = SETTINGS[int(slot[row])]
        values, tokens = naive.best_tokens(logits[row].cpu(), temperature, top_k, top_p, min_p)
        kept = int((value[row] > -math.inf).sum())
        assert token[row, : len(tokens)].tolist() == tokens and kept == len(tokens), f"row {row}"
        torch.testing.assert_close(value[row, :kept].cpu(), torch.tensor(values), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab,tied", [(70, False), (1000, True), (5000, False), (20000, True)])
def test_against_a_sort_of_the_row(device, vocab, tied, dtype):
    """Every setting on rows of few and of many blocks; among equal logits the lower tokens stay. Seeds 0 and 1."""
    for seed in (0, 1):
        logits = random_logits(len(SETTINGS), vocab, seed, device, dtype, tied)
        check(logits, torch.arange(len(SETTINGS), device=device), device)


def test_what_is_masked_is_never_left(device):
    """Fewer finite logits than top_k, one, and none; NaN; rows apart in memory. Seed 2."""
    logits = random_logits(2 * len(SETTINGS), 3000, 2, device, torch.float32, False)[::2]
    logits[0, 5:] = -math.inf
    logits[3, :2999] = -math.inf
    logits[4, 100:900] = math.nan
    logits[6] = -math.inf
    slot = torch.arange(len(SETTINGS), device=device)
    value, token = best_tokens(logits, slot, *settings(device), MAX_CANDIDATES)
    assert set(token[0, value[0] > -math.inf].tolist()) <= set(range(5))
    assert token[3, 0] == 2999 and (value[3, 1:] == -math.inf).all()
    assert not set(range(100, 900)) & set(token[4, value[4] > -math.inf].tolist())
    assert (value[6] == -math.inf).all() and (token >= 0).all() and (token < 3000).all()
    check(logits[:6], slot[:6], device)


def test_processed_logits_are_only_cut(device):
    """With temperature and min_p applied already. Powers of two divide exactly; Triton's other quotients are not torch's to the last bit.
    Seed 3."""
    rows = [(0.5 if temperature < 1.0 else 2.0, *cut) for temperature, *cut in SETTINGS if temperature != 0.0]
    temperature, top_k, top_p, min_p = settings(device, rows)
    logits = random_logits(len(rows), 2000, 3, device, torch.float32, False)
    slot = torch.arange(len(rows), device=device)
    tempered = logits / temperature[:, None]
    least = tempered.amax(1, keepdim=True) + min_p[:, None].log()
    tempered = torch.where(tempered < least, -math.inf, tempered)
    found = best_tokens(tempered, slot, temperature, top_k, top_p, min_p, MAX_CANDIDATES, processed=True)
    wanted = best_tokens(logits, slot, temperature, top_k, top_p, min_p, MAX_CANDIDATES)
    assert torch.equal(found[0], wanted[0])
    kept = wanted[0] > -math.inf
    assert torch.equal(found[1][kept], wanted[1][kept])


def test_kept_as_vllm_keeps_them(device):
    """The columns that vLLM's own cut leaves finite, on rows without equal logits. Seed 4."""
    ops = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    rows = [(1.0, k, p, 0.0) for k, p in ((20, 0.95), (1, 1.0), (64, 0.5), (40, 0.999), (5, 0.8))]
    temperature, top_k, top_p, min_p = settings(device, rows)
    logits = random_logits(len(rows), 3000, 4, device, torch.float32, False)
    value, token = best_tokens(logits, torch.arange(len(rows), device=device), temperature, top_k, top_p, min_p, MAX_CANDIDATES)
    cut = ops.apply_top_k_top_p if device.type == "cuda" else ops.apply_top_k_top_p_pytorch
    left = cut(logits.clone(), top_k, top_p)
    for row in range(len(rows)):
        assert set(token[row, value[row] > -math.inf].tolist()) == set((left[row] > -math.inf).nonzero().flatten().tolist())


def test_wrong_arguments(device):
    logits = torch.zeros(2, 100, device=device)
    slot = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="most=65"):
        best_tokens(logits, slot, *settings(device), 65)
    with pytest.raises(ValueError, match="contiguous"):
        best_tokens(logits.T, slot, *settings(device), 4)
