"""The k best columns of logits against torch: exact columns, also among equals, whatever the tiling; log-probabilities to 1e-6."""

import math

import pytest
import torch

from bole_vllm.kernels.draft import naive, top_children
from bole_vllm.kernels.draft.top_children import MAX_SPLITS, PROGRAMS, Tiling, launch, tiling_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STALE = -7777


def random_logits(rows: int, vocab: int, seed: int, device, dtype=torch.float32) -> torch.Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype).to(device)


def tied_logits(rows: int, vocab: int, seed: int, device, dtype=torch.float32) -> torch.Tensor:
    """Few values, each many times."""
    return torch.randint(-2, 2, (rows, vocab), generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def tiled(logits: torch.Tensor, topk: int, tiling: Tiling) -> tuple[torch.Tensor, torch.Tensor]:
    """With a given tiling, into poisoned outputs."""
    token = torch.full((logits.shape[0], topk), STALE, dtype=torch.int64, device=logits.device)
    logprob = torch.full((logits.shape[0], topk), math.nan, device=logits.device)
    launch(logits, topk, None, token, logprob, tiling)
    return token, logprob


def assert_equals(got, expected, label: str) -> None:
    token, logprob = (t.cpu() for t in got)
    assert token.dtype == torch.int64 and logprob.dtype == torch.float32
    assert token.shape == logprob.shape == expected[0].shape, label
    assert torch.equal(token, expected[0].cpu()), label
    torch.testing.assert_close(logprob, expected[1].cpu(), rtol=1e-6, atol=1e-6, msg=lambda m: f"{label}: {m}")


def check(logits: torch.Tensor, topk: int, label: str, token_ids: torch.Tensor | None = None) -> None:
    ids = None if token_ids is None else token_ids.cpu()
    assert_equals(top_children(logits, topk, token_ids), naive.top_children(logits.cpu(), topk, ids), label)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [1, 4, 16])
def test_against_oracle(device, topk, dtype):
    for seed, vocab in enumerate((topk, topk + 1, 31, 64, 129, 2047, 2049, 5001)):
        check(random_logits(5, vocab, seed, device, dtype), topk, f"V={vocab}, k={topk}, seed {seed}")
        check(tied_logits(3, vocab, seed, device, dtype), topk, f"ties, V={vocab}, k={topk}, seed {seed}")


@pytest.mark.parametrize("topk", [1, 3, 4, 16])
@pytest.mark.parametrize("make", [random_logits, tied_logits])
def test_tilings_choose_the_same(device, make, topk):
    """Blocks and parts smaller than k, a part that ends in the first lane of a block, more parts than blocks, rows that fill no program."""
    for seed, (vocab, tiling) in enumerate(
        [
            (64, Tiling(1, 64, 1)),
            (65, Tiling(4, 64, 2)),
            (300, Tiling(4, 64, 1)),
            (300, Tiling(2, 64, 3)),
            (257, Tiling(4, 32, 9)),
            (41, Tiling(4, 8, 100)),
            (20, Tiling(1, 2, 4)),
        ]
    ):
        logits = make(3, vocab, seed, device)
        label = f"V={vocab}, k={topk}, {tiling}, seed {seed}"
        got = tiled(logits, topk, tiling)
        assert_equals(got, naive.top_children(logits.cpu(), topk), label)
        assert_equals(got, tiled(logits, topk, Tiling(4, 512, 1)), label)


@pytest.mark.parametrize("tiling", [Tiling(2, 16, 1), Tiling(2, 16, 4)], ids=str)
def test_any_order_of_values(device, tiling):
    """Rising values enter the list in every block, falling ones only in the first."""
    rising = torch.arange(200.0, device=device) / 8
    logits = torch.stack([rising, rising.flip(0)])
    assert_equals(tiled(logits, 5, tiling), naive.top_children(logits.cpu(), 5), str(tiling))


def test_equal_zeros_and_extreme_values(device):
    """-0 equals 0; the smallest finite value is above -inf."""
    low, high = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    zeros = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0, -1e-45, 1e-45, -2.0]], device=device)
    extremes = torch.tensor([[-math.inf, low, high, low, -math.inf, 0.0, -1e-30, 1e-30]], device=device)
    for logits, expected in ((zeros, [6, 1, 2, 3, 4, 5, 0, 7]), (extremes, [2, 7, 5, 6, 1, 3, 0, 4])):
        assert top_children(logits, 8)[0].tolist() == [expected]
        check(logits, 8, "zeros and extremes")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiling", [None, Tiling(4, 32, 1), Tiling(2, 32, 4)], ids=str)
def test_rows_without_a_distribution(device, dtype, tiling):
    """They give k distinct columns at the lowest score, and change no bit of the rows beside them."""
    vocab, topk = 150, 6

    def run(logits):
        return top_children(logits, topk) if tiling is None else tiled(logits, topk, tiling)

    clean = random_logits(9, vocab, 1, device, dtype)
    logits = clean.clone()
    logits[1] = math.nan
    logits[2, 77] = math.nan
    logits[3] = -math.inf
    logits[4, [3, 140]] = math.inf
    logits[5] = math.inf
    logits[6, ::2], logits[6, 1::2] = math.nan, -math.inf
    logits[7, 0], logits[7, 149] = -math.nan, math.inf
    token, logprob = run(logits)
    assert_equals((token, logprob), naive.top_children(logits.cpu(), topk), f"{tiling}, seed 1")
    assert (logprob[1:8] == -100).all()
    assert all(len(set(row)) == topk and min(row) >= 0 and max(row) < vocab for row in token.tolist())
    for got, expected in zip((token, logprob), run(clean), strict=True):
        assert torch.equal(got[[0, 8]], expected[[0, 8]]), f"{tiling}, seed 1"


@pytest.mark.parametrize("tiling", [None, Tiling(2, 16, 1), Tiling(4, 16, 5)], ids=str)
def test_masked_columns(device, tiling):
    """With fewer finite values than k the lowest masked columns follow; whole parts that are masked count as nothing."""
    logits = torch.full((3, 80), -math.inf, device=device)
    logits[0, [70, 5]] = torch.tensor([1.0, 0.0], device=device)
    logits[1, 33] = -5.0
    logits[2, [1, 79]] = 2.0
    token, logprob = top_children(logits, 4) if tiling is None else tiled(logits, 4, tiling)
    assert token.tolist() == [[70, 5, 0, 1], [33, 0, 1, 2], [1, 79, 0, 2]]
    assert_equals((token, logprob), naive.top_children(logits.cpu(), 4), str(tiling))
    assert logprob[1].tolist() == pytest.approx([-1e-3, -100, -100, -100])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_leading_dimensions(device, dtype):
    """What lies between the rows is not read."""
    padded = torch.full((2, 3, 112), math.inf, dtype=dtype, device=device)
    padded[..., :101] = random_logits(6, 101, 2, device, dtype).view(2, 3, 101)
    logits = padded[..., :101]
    for view in (logits, logits[:, ::2], logits[1], logits[0, 2], logits.transpose(0, 1), logits[:1].expand(2, -1, -1)):
        check(view, 4, f"{tuple(view.shape)}, strides {view.stride()}, seed 2")
    check(random_logits(6, 1, 3, device, dtype).view(2, 3, 1).transpose(1, 2)[..., :1], 1, "one column")
    token, logprob = top_children(logits[:0], 4)
    assert token.shape == logprob.shape == (0, 3, 4)


def test_token_ids(device):
    token_ids = 2**33 + torch.randperm(1000, generator=torch.Generator().manual_seed(4))[:90]
    check(tied_logits(4, 90, 4, device), 7, "seed 4", token_ids.to(device))


def test_into_given_tensors(device):
    """The same bits, in place; what follows stays. Seed 6."""
    logits = random_logits(3, 90, 6, device)
    token, logprob = torch.full((5, 4), STALE, device=device), torch.full((5, 4), 7.0, device=device)
    got = top_children(logits, 4, out=(token[:3], logprob[:3]))
    assert got[0].data_ptr() == token.data_ptr() and got[1].data_ptr() == logprob.data_ptr()
    for given, new, stale in zip((token, logprob), top_children(logits, 4), (STALE, 7.0), strict=True):
        assert torch.equal(given[:3], new) and (given[3:] == stale).all()
    for bad in ((token, logprob[:3]), (token[:3].int(), logprob[:3]), (token.T[:3], logprob[:3])):
        with pytest.raises(ValueError, match="out must be"):
            top_children(logits, 4, out=bad)


def test_refusals(device):
    logits = random_logits(4, 8, 5, device)
    ids = torch.arange(8, device=device)
    for topk in (0, 9):
        with pytest.raises(ValueError, match="vocabulary of 8"):
            top_children(logits, topk)
    for bad in (logits.double(), logits.int(), random_logits(8, 4, 5, device).T):
        with pytest.raises(ValueError, match="logits must be"):
            top_children(bad, 2)
    for bad in (ids[:7], ids.int(), torch.arange(16, device=device)[::2]):
        with pytest.raises(ValueError, match="token_ids must be"):
            top_children(logits, 2, bad)


def test_compiled_tilings_fit_on_the_card(monkeypatch):
    """One wave of programs up to 512 rows, never more parts than blocks, blocks that are powers of two."""
    monkeypatch.setitem(tiling_of.__globals__, "INTERPRET", False)
    for vocab in (1, 16, 2048, 2049, 8000, 32_000, 151_936, 248_320):
        for rows in (1, 2, 3, 4, 16, 63, 64, 256, 512, 4096):
            for topk, element_bytes in ((1, 2), (8, 2), (16, 2), (4, 4)):
                tiling = tiling_of(rows, vocab, topk, element_bytes)
                assert tiling.rows == 1 and tiling.block & (tiling.block - 1) == 0
                assert 1 <= tiling.splits <= min(MAX_SPLITS, -(-vocab // tiling.block))
                assert rows * tiling.splits <= max(PROGRAMS, rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows,vocab", [(1, 248_320), (4, 248_320), (5, 151_643), (64, 248_320), (256, 32_000), (600, 8_191)])
def test_sizes_of_models(device, rows, vocab, dtype):
    for make in (random_logits, tied_logits):
        logits = make(rows, vocab, rows, device, dtype)
        token, logprob = naive.top_children(logits, 16)
        for topk in (1, 4, 16):
            assert_equals(top_children(logits, topk), (token[:, :topk], logprob[:, :topk]), f"{make.__name__}, k={topk}, seed {rows}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("rows,vocab,topk", [(4, 10_007, 4), (64, 10_000, 16)])
def test_captured_graph_equals_eager(device, rows, vocab, topk):
    logits = random_logits(rows, vocab, 6, device, torch.bfloat16)
    top_children(logits, topk)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = top_children(logits, topk)
    for seed, make in ((7, random_logits), (8, tied_logits)):
        logits.copy_(make(rows, vocab, seed, device, torch.bfloat16))
        graph.replay()
        for got, expected in zip(captured, top_children(logits, topk), strict=True):
            assert torch.equal(got, expected), f"seed {seed}"
