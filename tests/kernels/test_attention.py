"""Tree attention against an fp64 oracle; visibility checked bitwise, since closeness cannot see a sibling leak."""

import math

import pytest
import torch
from conftest import path_to, random_parents

from bole_vllm.kernels.attention import naive, tree_attention

TREE, CAUSAL, EMPTY = "tree", "causal", "empty"


def mask_row(nodes: list[int], words: int) -> list[int]:
    mask = sum(1 << j for j in nodes)
    split = [(mask >> (32 * w)) & 0xFFFFFFFF for w in range(words)]
    return [w - (1 << 32) if w >= 1 << 31 else w for w in split]


def make_case(requests, device, dtype, hq=2, hkv=1, dim=64, block_size=16, seed=0, token_gap=1):
    """`requests`: (kind, rows, prefix). Everything that no row may read is NaN; block table entries there point nowhere."""
    gen = torch.Generator().manual_seed(seed)
    width = max([n for kind, n, _ in requests if kind == TREE] + [1])
    words = (width + 31) // 32
    max_blocks = max(-(-(prefix + rows) // block_size) for _, rows, prefix in requests) + 2
    needed = sum(-(-(prefix + rows) // block_size) for _, rows, prefix in requests)
    num_blocks = needed + 3
    num_tokens = sum(rows for _, rows, _ in requests) + token_gap * len(requests) + 1
    perm = torch.randperm(num_blocks, generator=gen).tolist()
    q = torch.randn(num_tokens, hq, dim, generator=gen)
    # stored head-last so that the view's strides are not the contiguous ones
    store = torch.full((num_blocks, block_size, hkv, 2 * dim), float("nan"))
    table = torch.full((len(requests), max_blocks), 2**30, dtype=torch.int32)
    row_mask, starts, mask_starts, trees, token = [[-1] * words], [], [], [], 0
    for r, (kind, rows, prefix) in enumerate(requests):
        token += token_gap
        starts.append(token)
        for b in range(-(-(prefix + rows) // block_size)):
            table[r, b] = perm.pop()
        for p in range(prefix + rows):
            store[int(table[r, p // block_size]), p % block_size] = torch.randn(hkv, 2 * dim, generator=gen)
        parents = random_parents(rows, 6, gen) if kind == TREE and rows else []
        trees.append(parents)
        mask_starts.append(len(row_mask) if kind == TREE else -1)
        row_mask += [mask_row(path_to(parents, i), words) for i in range(len(parents))]
        token += rows

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    case = {
        "q": q.to(dtype).to(device),
        "kv_cache": store.to(dtype).to(device).permute(0, 2, 1, 3),
        "block_table": table.to(device),
        "token_start": ints(starts),
        "num_rows": ints([rows for _, rows, _ in requests]),
        "prefix_len": ints([prefix for _, _, prefix in requests]),
        "row_mask": ints(row_mask),
        "mask_start": ints(mask_starts),
        "scale": dim**-0.5,
        "num_slots": width,
        "max_rows": max(rows for _, rows, _ in requests) + 3,
    }
    return case, trees


def run(case) -> torch.Tensor:
    out = torch.full_like(case["q"], float("nan"))
    assert tree_attention(**case, out=out) is out
    return out


def rows_of(case) -> torch.Tensor:
    """[token rows] bool: rows that belong to a request."""
    owned = torch.zeros(case["q"].shape[0], dtype=torch.bool)
    for start, rows in zip(case["token_start"].tolist(), case["num_rows"].tolist(), strict=True):
        owned[start : start + rows] = True
    return owned.to(case["q"].device)


def assert_matches_oracle(case, label):
    got = run(case)
    owned = rows_of(case)
    assert got[~owned].isnan().all(), f"{label}: rows outside the requests were written"
    exact = naive.tree_attention(**case, out=torch.full(case["q"].shape, float("nan"), dtype=torch.float64, device=got.device))
    torch_like = naive.tree_attention(**case, out=torch.full_like(case["q"], float("nan")), dtype=case["q"].dtype)
    error = (got.double() - exact)[owned].abs().max()
    torch_error = (torch_like.double() - exact)[owned].abs().max()
    # as flash-attention's tests: no worse than twice what torch loses computing in the same dtype
    floor = 2e-6 if case["q"].dtype == torch.float32 else 1e-4
    assert not error.isnan() and error <= 2 * torch_error + floor, f"{label}: {error} against torch's {torch_error}"


MIXED = [(TREE, 9, 37), (EMPTY, 0, 0), (CAUSAL, 21, 5), (TREE, 1, 16), (CAUSAL, 1, 64), (TREE, 16, 0), (CAUSAL, 12, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("seed", [0, 1])
def test_mixed_batch(device, dtype, block_size, seed):
    case, _ = make_case(MIXED, device, dtype, block_size=block_size, seed=seed)
    assert_matches_oracle(case, f"seed {seed}")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("hq,hkv", [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (6, 2)])
def test_heads(device, dim, hq, hkv):
    case, _ = make_case([(TREE, 7, 19), (CAUSAL, 5, 3)], device, torch.bfloat16, hq=hq, hkv=hkv, dim=dim, seed=dim + hq)
    assert_matches_oracle(case, f"seed {dim + hq}")


@pytest.mark.parametrize("nodes", [31, 32, 33, 48, 63, 64])
def test_several_mask_words(device, nodes):
    case, _ = make_case([(TREE, nodes, 11), (TREE, 5, 3)], device, torch.float32, seed=nodes)
    assert_matches_oracle(case, f"seed {nodes}")


@pytest.mark.parametrize("prefix", [0, 1, 255, 256, 257, 530])
def test_prefix_at_tile_edges(device, prefix):
    case, _ = make_case([(TREE, 6, prefix), (CAUSAL, 3, prefix)], device, torch.float32, block_size=48, seed=prefix)
    assert_matches_oracle(case, f"seed {prefix}")


def test_long_causal_chunk_equals_sdpa(device):
    """Several row tiles and several key tiles."""
    rows, prefix, dim = 300, 70, 64
    case, _ = make_case([(CAUSAL, rows, prefix)], device, torch.float32, hq=2, hkv=1, dim=dim, seed=5, token_gap=0)
    blocks = case["block_table"][0, : -(-(rows + prefix) // 16)].long()
    kv = case["kv_cache"][blocks].permute(1, 0, 2, 3).reshape(1, -1, 2 * dim)[:, : rows + prefix]
    k, v = kv[..., :dim].expand(2, -1, -1), kv[..., dim:].expand(2, -1, -1)
    visible = torch.ones(rows, rows + prefix, dtype=torch.bool, device=device).tril(prefix)
    q = case["q"][:rows].transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=case["scale"])
    torch.testing.assert_close(run(case)[:rows].transpose(0, 1), expected, atol=3e-6, rtol=1e-5)


def poison(case, r, slot, value, part):
    """Overwrite K, V or both of the key `slot` behind the prefix of request r, in a copy of the cache."""
    block_size, dim = case["kv_cache"].shape[2], case["q"].shape[2]
    position = int(case["prefix_len"][r]) + slot
    cache = case["kv_cache"].clone()
    row = cache[int(case["block_table"][r, position // block_size]), :, position % block_size]
    row[:, {"k": slice(0, dim), "v": slice(dim, None), "kv": slice(None)}[part]] = value
    return {**case, "kv_cache": cache}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e4])
@pytest.mark.parametrize("part", ["k", "v", "kv"])
def test_non_interference(device, dtype, value, part):
    """A key changes its descendants (and must) and not one bit of the other rows."""
    case, trees = make_case([(TREE, 12, 21), (TREE, 4, 3)], device, dtype, seed=7)
    clean, start = run(case), case["token_start"].tolist()
    for slot in (1, 4, 9):
        got = run(poison(case, 0, slot, value, part))
        for i in range(12):
            same = torch.equal(got[start[0] + i], clean[start[0] + i])
            if slot in path_to(trees[0], i):
                assert not same, f"slot {slot} does not reach its descendant {i}"
                if math.isnan(value) or (part == "v" and value in (float("inf"), -float("inf"))):
                    assert got[start[0] + i].isnan().all(), f"row {i} hides the non-finite key {slot}"
            else:
                assert same, f"slot {slot} leaks into row {i}, seed 7"
        assert torch.equal(got[start[1] : start[1] + 4], clean[start[1] : start[1] + 4])


def test_non_finite_query_stays_in_its_row(device):
    case, _ = make_case([(TREE, 8, 10), (CAUSAL, 8, 10)], device, torch.bfloat16, seed=8)
    clean, row = run(case), int(case["token_start"][0]) + 3
    case["q"] = case["q"].clone()
    case["q"][row] = float("nan")
    got, owned = run(case), rows_of(case)
    assert got[row].isnan().all()
    owned[row] = False
    assert torch.equal(got[owned], clean[owned])


def test_non_finite_prefix_reaches_every_row(device):
    case, _ = make_case([(TREE, 8, 300), (CAUSAL, 3, 10)], device, torch.float32, seed=9)
    for position in (0, 299):
        got = run(poison(case, 0, position - 300, float("nan"), "v"))
        start = case["token_start"].tolist()
        assert got[start[0] : start[0] + 8].isnan().all()
        assert not got[start[1] : start[1] + 3].isnan().any()


def test_frontier_rows_see_scratch_slots(device):
    """Rows fewer than slots, as the drafter's frontier: a mask row need not hold the row's own index."""
    case, _ = make_case([(TREE, 3, 20), (TREE, 40, 20)], device, torch.float32, seed=10)
    words = case["row_mask"].shape[1]
    rows = torch.tensor([mask_row([0, 35], words), mask_row([33], words), mask_row([1, 35, 39], words)], dtype=torch.int32)
    case["row_mask"] = torch.cat([case["row_mask"], rows.to(device)])
    case["mask_start"] = torch.tensor([1, case["row_mask"].shape[0] - 3], dtype=torch.int32, device=device)
    case["num_rows"] = torch.tensor([3, 3], dtype=torch.int32, device=device)
    # the slots that no row sees hold NaN
    for slot in set(range(40)) - {0, 1, 33, 35, 39}:
        case = poison(case, 1, slot, float("nan"), "kv")
    assert_matches_oracle(case, "seed 10")


def test_row_without_keys_is_zero(device):
    case, _ = make_case([(TREE, 4, 0)], device, torch.float32, seed=11)
    case["row_mask"] = case["row_mask"].clone()
    case["row_mask"][int(case["mask_start"][0]) + 2] = 0
    got = run(case)
    assert (got[int(case["token_start"][0]) + 2] == 0).all()


def test_rejects_bad_arguments(device):
    case, _ = make_case([(TREE, 4, 8)], device, torch.float32)
    out = torch.empty_like(case["q"])
    with pytest.raises(ValueError, match="row_mask"):
        tree_attention(**{**case, "num_slots": 65}, out=out)
    with pytest.raises(ValueError, match="kv_cache"):
        tree_attention(**{**case, "kv_cache": case["kv_cache"].to(torch.bfloat16)}, out=out)
    with pytest.raises(ValueError, match="out"):
        tree_attention(**case, out=out[:-1])
    with pytest.raises(ValueError, match="prefix_len"):
        tree_attention(**{**case, "prefix_len": case["prefix_len"].repeat(2)}, out=out)
