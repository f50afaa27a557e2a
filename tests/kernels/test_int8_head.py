"""The int8 head: rounded rows against torch, exact integer products, rows that do not touch each other."""

import math

import pytest
import torch

from bole_vllm.kernels.draft.int8_head import int8_logits, quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*sizes: int, seed: int, device, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def quantized(head: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Into poisoned outputs."""
    weight = torch.full((len(ids), head.shape[1]), -128, dtype=torch.int8, device=head.device)
    scale = torch.full((len(ids),), math.nan, device=head.device)
    quantize_rows(head, ids, weight, scale)
    return weight, scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_rows(device, dtype):
    """The named rows, at most half a step off, the largest exactly at 127; a row of zeros stays zero; strided heads. Seed 0."""
    head = random(20, 96, seed=0, device=device, dtype=dtype)[:, :90]
    head[3] = 0
    head[4, 7] = -50
    ids = torch.tensor([4, 19, 3, 4, 0], device=device)
    weight, scale = quantized(head, ids)
    rows = head[ids].float()
    assert scale.tolist() == pytest.approx((rows.abs().amax(1) / 127).tolist(), rel=1e-6)
    assert ((weight * scale[:, None] - rows).abs() <= 0.501 * scale[:, None]).all()
    assert weight.abs().amax(1).tolist() == [127, 127, 0, 127, 127]
    assert weight[0, 7] == -127 and (weight >= -127).all()
    assert torch.equal(weight[0], weight[3])


@pytest.mark.parametrize("rows", [1, 4, 17, 70])
@pytest.mark.parametrize("columns,width", [(40, 64), (300, 200), (129, 1)])
def test_integers_are_exact(device, rows, columns, width):
    """Integers with a 127 in every row have scale 1 and no second term. Seed 1."""
    gen = torch.Generator().manual_seed(1)
    hidden, head = (torch.randint(-126, 127, (n, width), generator=gen) for n in (rows, columns))
    hidden[:, 0] = head[:, 0] = 127
    weight, scale = quantized(head.float().to(device), torch.arange(columns, device=device))
    assert (scale == 1).all() and torch.equal(weight.cpu().long(), head)
    assert torch.equal(int8_logits(hidden.float().to(device), weight, scale).cpu().long(), hidden @ head.T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_add_no_error(device, dtype):
    """Against products with the rounded weights in double precision, one activation a hundred times the others. Seed 2."""
    head, hidden = random(500, 256, seed=2, device=device), random(6, 256, seed=3, device=device)
    hidden[:, 5] *= 100
    weight, scale = quantized(head, torch.arange(500, device=device))
    hidden = hidden.to(dtype)
    expected = hidden.double() @ (weight.double() * scale.double()[:, None]).T
    error = (int8_logits(hidden, weight, scale).double() - expected).abs()
    rounding = torch.finfo(dtype).eps * expected.abs()
    # half a unit of the second term for every activation, should all errors point the same way
    steps = (hidden.abs().amax(1).double() / (127 * 254 * 2))[:, None] * (weight.double() * scale.double()[:, None]).abs().sum(1)
    assert (error <= rounding + 1.01 * steps).all()
    assert (error <= rounding + 0.2 * steps).float().mean() > 0.99, "errors that cancel, as roundings do"


def test_rows_are_alone(device):
    """A row's logits have the same bits alone, beside others, strided, and beside NaN and infinity; columns follow the ids. Seed 4."""
    head = random(200, 96, seed=4, device=device)
    weight, scale = quantized(head, torch.arange(200, device=device))
    wide = random(40, 128, seed=5, device=device, dtype=torch.bfloat16)
    hidden = wide[:, :96]
    together = int8_logits(hidden, weight, scale)
    for row in (0, 15, 16, 39):
        assert torch.equal(int8_logits(hidden[row : row + 1], weight, scale)[0], together[row])
    spoiled = hidden.clone()
    spoiled[3], spoiled[20, 0] = math.nan, math.inf
    others = [row for row in range(40) if row not in (3, 20)]
    assert torch.equal(int8_logits(spoiled, weight, scale)[others], together[others])
    order = torch.randperm(200, generator=torch.Generator().manual_seed(6)).to(device)
    assert torch.equal(int8_logits(hidden, *quantized(head, order)), together[:, order])
    assert int8_logits(hidden[:0], weight, scale).shape == (0, 200)


def test_refusals(device):
    weight, scale = quantized(random(8, 16, seed=0, device=device), torch.arange(8, device=device))
    good = random(2, 16, seed=0, device=device)
    for hidden, other, factor in ((good[:, :8], weight, scale), (good, weight[:, ::2], scale), (good, weight, scale[:7])):
        with pytest.raises(ValueError, match="do not fit"):
            int8_logits(hidden, other, factor)
    with pytest.raises(ValueError, match="do not fit"):
        int8_logits(good.T.contiguous().T, weight, scale)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_graph_sees_new_rows(device):
    head, hidden = random(300, 128, seed=7, device=device), random(4, 128, seed=8, device=device)
    weight, scale = quantized(head, torch.arange(200, device=device))
    int8_logits(hidden, weight, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = int8_logits(hidden, weight, scale)
    quantize_rows(head, torch.arange(100, 300, device=device), weight, scale)
    graph.replay()
    assert torch.equal(captured, int8_logits(hidden, weight, scale))
    assert torch.equal(captured[:, :100], int8_logits(hidden, *quantized(head, torch.arange(100, 200, device=device))))
