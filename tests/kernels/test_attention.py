"""Tree attention against an fp64 oracle; visibility checked bitwise, since closeness cannot see a sibling leak.

Two implementations of one contract: the split-KV kernel, and the kernel that completes a prefix partial (made by torch here, by
FlashAttention on a GPU). `run` picks one by name.
"""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import path_to, random_parents

from bole_vllm.kernels.attention import merge_tree_attention, naive, tree_attention
from bole_vllm.kernels.attention.split_kv import CONFIGS

TREE, CAUSAL, EMPTY = "tree", "causal", "empty"
FP8 = torch.float8_e4m3fn
BOTH = pytest.mark.parametrize("kind", ["split_kv", "merge"])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MASK_ARGUMENTS = ("row_mask", "mask_start", "num_slots", "max_rows")


@pytest.fixture(autouse=True)
def one_thread():
    """The oracle's tensors are tiny: more threads only wait for each other (4 minutes instead of 40 s beside other work)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prefix_partial(case, out, lse) -> None:
    """Fill `out` and `lse` of the rows that have a prefix, by torch."""
    naive.prefix_attention(**{k: v for k, v in case.items() if k not in MASK_ARGUMENTS}, out=out, lse=lse)


def mask_row(nodes: list[int], words: int) -> list[int]:
    mask = sum(1 << j for j in nodes)
    split = [(mask >> (32 * w)) & 0xFFFFFFFF for w in range(words)]
    return [w - (1 << 32) if w >= 1 << 31 else w for w in split]


def make_case(requests, device, dtype, hq=2, hkv=1, dim=64, block_size=16, seed=0, token_gap=1, kv_dtype=None):
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
        "kv_cache": store.to(kv_dtype or dtype).to(device).permute(0, 2, 1, 3),
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


def run(case, kind="split_kv", **options) -> torch.Tensor:
    out_dtype = torch.bfloat16 if case["q"].dtype == FP8 else case["q"].dtype
    out = torch.full(case["q"].shape, float("nan"), dtype=out_dtype, device=case["q"].device)
    if kind == "split_kv":
        assert tree_attention(**case, **options, out=out) is out
        return out
    # rows without a prefix keep a NaN partial and a NaN log-sum-exp: neither may be read
    lse = torch.full((case["q"].shape[1], case["q"].shape[0]), float("nan"), device=out.device)
    prefix_partial(case, out, lse)
    assert merge_tree_attention(**case, **options, out=out, lse=lse) is out
    return out


def rows_of(case) -> torch.Tensor:
    """[token rows] bool: rows that belong to a request."""
    owned = torch.zeros(case["q"].shape[0], dtype=torch.bool)
    for start, rows in zip(case["token_start"].tolist(), case["num_rows"].tolist(), strict=True):
        owned[start : start + rows] = True
    return owned.to(case["q"].device)


def assert_matches_oracle(case, label, kind="split_kv", **options):
    got = run(case, kind, **options)
    owned = rows_of(case)
    assert got[~owned].isnan().all(), f"{label}: rows outside the requests were written"
    exact = naive.tree_attention(**case, out=torch.full(case["q"].shape, float("nan"), dtype=torch.float64, device=got.device))
    torch_like = naive.tree_attention(**case, out=torch.full_like(got, float("nan")), dtype=got.dtype)
    error = (got.double() - exact)[owned].abs().max()
    torch_error = (torch_like.double() - exact)[owned].abs().max()
    # as flash-attention's tests: no worse than twice what torch loses computing in the same dtype
    floor = 2e-6 if got.dtype == torch.float32 else 1e-4
    assert not error.isnan() and error <= 2 * torch_error + floor, f"{label}: {error} against torch's {torch_error}"


MIXED = [(TREE, 9, 37), (EMPTY, 0, 0), (CAUSAL, 21, 5), (TREE, 1, 16), (CAUSAL, 1, 64), (TREE, 16, 0), (CAUSAL, 12, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("block_size", [16, 48])
@BOTH
def test_mixed_batch(device, dtype, block_size, kind):
    seed = block_size
    case, _ = make_case(MIXED, device, dtype, block_size=block_size, seed=seed)
    assert_matches_oracle(case, f"seed {seed}", kind)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("hq,hkv", [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (6, 2)])
def test_heads(device, dim, hq, hkv):
    case, _ = make_case([(TREE, 7, 19), (CAUSAL, 5, 3)], device, torch.bfloat16, hq=hq, hkv=hkv, dim=dim, seed=dim + hq)
    assert_matches_oracle(case, f"seed {dim + hq}")


@pytest.mark.parametrize("nodes", [31, 32, 33, 63, 64, 100])
@BOTH
def test_several_mask_words(device, nodes, kind):
    case, _ = make_case([(TREE, nodes, 11), (TREE, 5, 3)], device, torch.float32, seed=nodes)
    assert_matches_oracle(case, f"seed {nodes}", kind)


@pytest.mark.parametrize("prefix", [0, 1, 255, 256, 257, 530])
@BOTH
def test_prefix_at_tile_edges(device, prefix, kind):
    case, _ = make_case([(TREE, 6, prefix), (CAUSAL, 3, prefix)], device, torch.float32, block_size=48, seed=prefix)
    assert_matches_oracle(case, f"seed {prefix}", kind)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_named_tiles_and_splits(device, config, num_splits):
    """Several row tiles, tiles that straddle the prefix's end, splits with and without keys."""
    case, _ = make_case([(TREE, 34, 70), (CAUSAL, 20, 190), (TREE, 3, 0), (EMPTY, 0, 0)], device, torch.bfloat16, hq=4, seed=12)
    assert_matches_oracle(case, "seed 12", config=config, num_splits=num_splits)


@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_merge_tiles(device, block_m):
    case, _ = make_case([(TREE, 40, 70), (CAUSAL, 70, 9), (TREE, 3, 0), (EMPTY, 0, 0)], device, torch.bfloat16, hq=4, hkv=2, seed=13)
    assert_matches_oracle(case, "seed 13", "merge", block_m=block_m)


def test_splits_keep_non_finite_rows(device):
    """A NaN in one split, a key that scores -inf in another: the rows are NaN, and only they."""
    case, _ = make_case([(TREE, 4, 300), (TREE, 4, 300)], device, torch.float32, seed=14)
    clean = run(case, config="pair", num_splits=4)
    got = run(poison(case, 0, -200, float("nan"), "k"), config="pair", num_splits=4)
    start = case["token_start"].tolist()
    assert got[start[0] : start[0] + 4].isnan().all()
    assert torch.equal(got[start[1] : start[1] + 4], clean[start[1] : start[1] + 4])


# -- 8-bit caches ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8], ids=["bf16", "fp32", "e4m3"])
@pytest.mark.parametrize("scales", ["none", "host", "device"])
@BOTH
def test_e4m3_cache(device, dtype, scales, kind):
    case, _ = make_case(MIXED, device, dtype, hq=4, hkv=2, seed=15, kv_dtype=FP8)
    if scales != "none":
        case |= {"k_scale": 0.37, "v_scale": 1.9} | ({"q_scale": 0.6} if dtype == FP8 else {})
    if scales == "device":  # scalars, as vLLM's layers hold them
        case |= {k: torch.tensor(v, device=device) for k, v in case.items() if k.endswith("_scale")}
        case["kv_cache"] = case["kv_cache"].view(torch.uint8)
    assert_matches_oracle(case, "seed 15", kind)


@BOTH
def test_e4m3_values_are_exact(device, kind):
    """One visible key: the row is that key's V. Every finite code, subnormals included."""
    case, _ = make_case([(CAUSAL, 1, 0)], device, torch.float32, hq=1, dim=256, kv_dtype=FP8)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    bits = case["kv_cache"].view(torch.uint8)
    bits[int(case["block_table"][0, 0]), 0, 0] = torch.cat([torch.zeros_like(codes), codes])
    assert torch.equal(run(case, kind)[int(case["token_start"][0]), 0], codes.view(FP8).float())


@pytest.mark.parametrize("part", ["k", "v"])
@BOTH
def test_e4m3_non_interference(device, part, kind):
    case, trees = make_case([(TREE, 12, 21)], device, torch.bfloat16, seed=16, kv_dtype=FP8)
    clean, start = run(case, kind), int(case["token_start"][0])
    got = run(poison(case, 0, 4, float("nan"), part), kind)
    for i in range(12):
        if 4 in path_to(trees[0], i):
            assert got[start + i].isnan().all()
        else:
            assert torch.equal(got[start + i], clean[start + i]), f"row {i}, seed 16"


# -- visibility ------------------------------------------------------------------------------------------------------------------


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
    row[:, {"k": slice(0, dim), "v": slice(dim, None), "kv": slice(None)}[part]] = torch.tensor(value).to(cache.dtype)
    return {**case, "kv_cache": cache}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e4])
@pytest.mark.parametrize("part", ["k", "v", "kv"])
@BOTH
def test_non_interference(device, dtype, value, part, kind):
    """A key changes its descendants (and must) and not one bit of the other rows."""
    case, trees = make_case([(TREE, 12, 21), (TREE, 4, 3)], device, dtype, seed=7)
    clean, start = run(case, kind), case["token_start"].tolist()
    for slot in (1, 9):
        got = run(poison(case, 0, slot, value, part), kind)
        for i in range(12):
            same = torch.equal(got[start[0] + i], clean[start[0] + i])
            if slot in path_to(trees[0], i):
                assert not same, f"slot {slot} does not reach its descendant {i}"
                if math.isnan(value) or (part == "v" and value in (float("inf"), -float("inf"))):
                    assert got[start[0] + i].isnan().all(), f"row {i} hides the non-finite key {slot}"
            else:
                assert same, f"slot {slot} leaks into row {i}, seed 7"
        assert torch.equal(got[start[1] : start[1] + 4], clean[start[1] : start[1] + 4])


@BOTH
def test_non_finite_query_stays_in_its_row(device, kind):
    case, _ = make_case([(TREE, 8, 10), (CAUSAL, 8, 10)], device, torch.bfloat16, seed=8)
    clean, row = run(case, kind), int(case["token_start"][0]) + 3
    case["q"] = case["q"].clone()
    case["q"][row] = float("nan")
    got, owned = run(case, kind), rows_of(case)
    assert got[row].isnan().all()
    owned[row] = False
    assert torch.equal(got[owned], clean[owned])


@BOTH
def test_non_finite_prefix_reaches_every_row(device, kind):
    case, _ = make_case([(TREE, 8, 300), (CAUSAL, 3, 10)], device, torch.float32, seed=9)
    for position, part in ((0, "v"), (299, "k")):
        got = run(poison(case, 0, position - 300, float("nan"), part), kind)
        start = case["token_start"].tolist()
        assert got[start[0] : start[0] + 8].isnan().all()
        assert not got[start[1] : start[1] + 3].isnan().any()


@BOTH
def test_frontier_rows_see_scratch_slots(device, kind):
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
    assert_matches_oracle(case, "seed 10", kind)


@BOTH
def test_row_without_keys_is_zero(device, kind):
    case, _ = make_case([(TREE, 4, 0)], device, torch.float32, seed=11)
    case["row_mask"] = case["row_mask"].clone()
    case["row_mask"][int(case["mask_start"][0]) + 2] = 0
    got = run(case, kind)
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
    with pytest.raises(ValueError, match="kv_cache"):
        tree_attention(**{**case, "q": case["q"].to(FP8)}, out=out)
    with pytest.raises(ValueError, match="a scale"):
        tree_attention(**case, k_scale=torch.ones(2, device=device), out=out)
    with pytest.raises(ValueError, match="unknown config 'tall', known: wide"):
        tree_attention(**case, config="tall", out=out)
    with pytest.raises(ValueError, match="num_splits"):
        tree_attention(**case, num_splits=3, out=out)
    lse = torch.zeros(case["q"].shape[1], case["q"].shape[0], device=device)
    with pytest.raises(ValueError, match="lse"):
        merge_tree_attention(**case, lse=lse.T, out=out)
    with pytest.raises(ValueError, match="block_m"):
        merge_tree_attention(**case, lse=lse, block_m=8, out=out)


def test_merge_takes_any_lse_strides_and_leaves_other_rows(device):
    """Requests without rows, and rows between the requests: not one bit of `out` or `lse` changes there."""
    case, _ = make_case([(TREE, 5, 40), (EMPTY, 0, 0), (TREE, 6, 17)], device, torch.float32, seed=17, token_gap=2)
    expected, owned = run(case, "merge"), rows_of(case)
    out = torch.full_like(case["q"], 7.0)
    lse = torch.full((case["q"].shape[0], case["q"].shape[1]), 7.0, device=device).T
    prefix_partial(case, out, lse)
    before = lse.clone()
    merge_tree_attention(**case, out=out, lse=lse)
    assert torch.equal(out[owned], expected[owned]) and (out[~owned] == 7.0).all() and torch.equal(lse, before)


# -- CUDA graphs -----------------------------------------------------------------------------------------------------------------


@needs_gpu
@BOTH
def test_graph_replays_with_other_contents(device, kind):
    """One captured graph, alternating trees and lengths, against eager calls (sglang#32219)."""
    cases = [make_case([(TREE, 9, p), (TREE, 9, q)], device, torch.bfloat16, hq=4, dim=256, seed=p)[0] for p, q in ((150, 40), (30, 160))]
    wide = max(c["block_table"].shape[1] for c in cases)
    tables = [torch.nn.functional.pad(c["block_table"], (0, wide - c["block_table"].shape[1])) for c in cases]
    static = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in {**cases[0], "block_table": tables[0]}.items()}
    out, lse = torch.empty_like(static["q"]), torch.empty(4, static["q"].shape[0], device=device)

    def launch():
        if kind == "merge":
            return merge_tree_attention(**static, out=out, lse=lse)
        return tree_attention(**static, out=out, config="wide", num_splits=4)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for case, table in [(cases[1], tables[1]), (cases[0], tables[0]), (cases[1], tables[1])]:
        for name, value in {**case, "block_table": table}.items():
            if isinstance(value, torch.Tensor) and name != "kv_cache":
                static[name].copy_(value)
        static["kv_cache"].copy_(case["kv_cache"][: static["kv_cache"].shape[0]])
        eager = run(case, kind, **({} if kind == "merge" else {"config": "wide", "num_splits": 4}))
        out.fill_(float("nan"))
        if kind == "merge":
            prefix_partial(case, out, lse)
        graph.replay()
        owned = rows_of(case)
        assert torch.equal(out[owned], eager[owned])


# -- the backend: FlashAttention's prefix pass (a stand-in off the GPU), then the merge ------------------------------------------


def tree_rows(case, covers_batch=True, verify=True):
    from bole_vllm.attention import TreeRows

    names = ("token_start", "num_rows", "prefix_len", "row_mask", "mask_start", "num_slots", "max_rows")
    return TreeRows(*(case[name] for name in names), covers_batch=covers_batch, verify=verify)


def query_start_loc(case) -> torch.Tensor:
    """[R + 1] of a case without gaps between its requests."""
    return torch.cat([case["token_start"], (case["token_start"] + case["num_rows"])[-1:]]).int()


@pytest.fixture
def gpu_module(monkeypatch):
    """bole_vllm.attention_gpu with every call of FlashAttention recorded; off the GPU torch computes it."""
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends import flash_attn
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func as real

    from bole_vllm import attention_gpu

    calls = []

    def stand_in(**kwargs):
        inspect.signature(real).bind(**kwargs)  # names that vLLM's function has
        calls.append(kwargs)
        if torch.cuda.is_available():
            return real(**kwargs)
        assert kwargs["causal"] is False and kwargs["return_softmax_lse"]
        start, prefix = kwargs["cu_seqlens_q"], kwargs["seqused_k"]
        assert start.dtype == prefix.dtype == kwargs["block_table"].dtype == torch.int32
        assert kwargs["block_table"].shape[0] == prefix.shape[0] == start.shape[0] - 1
        assert int(start.diff().max()) <= kwargs["max_seqlen_q"] and int(prefix.max()) <= kwargs["max_seqlen_k"]
        q, out = kwargs["q"], kwargs["out"]
        lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
        cache = torch.cat([kwargs["k"], kwargs["v"]], dim=-1).transpose(1, 2)
        naive.prefix_attention(q, cache, kwargs["block_table"], start[:-1], start.diff(), prefix, kwargs["softmax_scale"], out, lse)
        return out, lse

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", stand_in, raising=False)
    attention_gpu.calls = calls
    return attention_gpu


def test_splits_that_graphs_keep_room_for(gpu_module):
    """As many as fill the card: all that are allowed for one request, few for many; 0 is vLLM's word for no bound."""
    found = [gpu_module.bound_splits(32, requests, 4, 132) for requests in (1, 2, 4, 8, 16, 64, 512)]
    assert found == [32, 32, 17, 9, 5, 2, 2]
    assert [gpu_module.bound_splits(most, 1, 4, 132) for most in (0, 1, 8)] == [0, 1, 8]


def forward(module, monkeypatch, case, rows, max_query_len, dtype=torch.bfloat16):
    """(output, whether vLLM's own forward ran) of the backend's layer; vLLM's own forward writes 7 everywhere."""
    own = []

    def own_forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args):
        own.append(True)
        return output.fill_(7.0)

    monkeypatch.setattr(module.FlashAttentionImpl, "forward", own_forward)
    impl = object.__new__(module.TreeFlashAttentionImpl)
    impl.scale, impl.kv_cache_dtype, impl.vllm_flash_attn_version = case["scale"], "auto", 3
    metadata = SimpleNamespace(
        tree=rows, num_actual_tokens=case["q"].shape[0] - 1, block_table=case["block_table"], query_start_loc=query_start_loc(case),
        max_query_len=max_query_len, max_seq_len=2048, max_num_splits=0, prefix_schedule=None,
    )  # fmt: skip
    output = torch.full(case["q"].shape, float("nan"), dtype=dtype, device=case["q"].device)
    assert impl.forward(SimpleNamespace(), case["q"], None, None, case["kv_cache"], metadata, output) is output
    return output, bool(own)


TREES = [(TREE, 9, 37), (TREE, 1, 300), (EMPTY, 0, 0), (TREE, 16, 0), (TREE, 33, 129)]


@pytest.mark.parametrize("dim,hq,hkv", [(64, 4, 2), (256, 4, 1)])
def test_backend_batch_of_trees(device, gpu_module, monkeypatch, dim, hq, hkv):
    case, _ = make_case(TREES, device, torch.bfloat16, hq=hq, hkv=hkv, dim=dim, seed=18, token_gap=0)
    got, own = forward(gpu_module, monkeypatch, case, tree_rows(case), max_query_len=33)
    owned = rows_of(case)
    exact = naive.tree_attention(**case, out=torch.zeros(case["q"].shape, dtype=torch.float64, device=device))
    like = naive.tree_attention(**case, out=torch.zeros_like(case["q"]), dtype=torch.bfloat16)
    error = (got.double() - exact)[owned].abs().max()
    assert len(gpu_module.calls) == 1 and not own
    assert error <= 2 * (like.double() - exact)[owned].abs().max() + 1e-4, "seed 18"


def test_backend_non_interference_through_the_prefix_pass(device, gpu_module, monkeypatch):
    """A NaN among the tree's keys lies in the cache block in which FlashAttention's last tile ends."""
    case, trees = make_case([(TREE, 12, 21), (TREE, 4, 3)], device, torch.bfloat16, hq=4, dim=256, seed=19, token_gap=0)
    clean, _ = forward(gpu_module, monkeypatch, case, tree_rows(case), max_query_len=12)
    got, _ = forward(gpu_module, monkeypatch, poison(case, 0, 4, float("nan"), "kv"), tree_rows(case), max_query_len=12)
    for i in range(12):
        assert got[i].isnan().all() if 4 in path_to(trees[0], i) else torch.equal(got[i], clean[i]), f"row {i}, seed 19"
    assert torch.equal(got[12:16], clean[12:16])


def test_backend_mixed_batch_keeps_other_rows(device, gpu_module, monkeypatch):
    case, _ = make_case([(TREE, 9, 37), (CAUSAL, 20, 5), (TREE, 4, 0)], device, torch.bfloat16, seed=20, token_gap=0)
    trees = case["mask_start"] >= 0
    case["num_rows"] = torch.where(trees, case["num_rows"], 0)
    got, own = forward(gpu_module, monkeypatch, case, tree_rows(case, covers_batch=False), max_query_len=20)
    owned = rows_of(case)
    assert own and not gpu_module.calls
    assert (got[~owned] == 7.0).all()
    assert torch.equal(got[owned], run(case)[owned])


def test_backend_other_rows(device, gpu_module, monkeypatch):
    """Rows of one token are causal; the drafter's rows take the split-KV kernel; without trees vLLM's own forward is all."""
    case, _ = make_case([(TREE, 1, 37), (TREE, 1, 5)], device, torch.bfloat16, seed=21, token_gap=0)
    for rows in (tree_rows(case), None):
        got, own = forward(gpu_module, monkeypatch, case, rows, max_query_len=1)
        assert own and (got == 7.0).all()
    case, _ = make_case([(TREE, 4, 37), (TREE, 4, 5)], device, torch.bfloat16, seed=22, token_gap=0)
    got, own = forward(gpu_module, monkeypatch, case, tree_rows(case, verify=False), max_query_len=4)
    assert not own and not gpu_module.calls
    assert torch.equal(got[:8], run(case)[:8])


def test_backend_plans_the_prefix_pass_once_a_step(device, gpu_module, monkeypatch):
    """Only for batches of trees; at a fixed address, the rest of which is zero (a replayed graph reads it)."""
    case, _ = make_case(TREES, device, torch.bfloat16, seed=23, token_gap=0)
    plans = []
    signature = inspect.signature(gpu_module.FlashAttentionMetadataBuilder._get_scheduler_metadata)

    def plan(self, **kwargs):
        plans.append(signature.bind(self, **kwargs).arguments)
        return torch.arange(1, 6, dtype=torch.int32)

    monkeypatch.setattr(gpu_module.FlashAttentionMetadataBuilder, "_get_scheduler_metadata", plan)
    builder = object.__new__(gpu_module.TreeFlashMetadataBuilder)
    builder._prefix_plan = torch.full((9,), 5, dtype=torch.int32)
    fields = dict.fromkeys(("num_actual_tokens", "slot_mapping", "seq_lens", "block_table"))
    metadata = gpu_module.TreeFlashMetadata(
        **fields, max_query_len=33, max_seq_len=512, query_start_loc=query_start_loc(case), max_num_splits=8,
        scheduler_metadata=torch.zeros(5), scheduler=builder.schedule_prefix,
    )  # fmt: skip
    for rows in (None, tree_rows(case, verify=False), tree_rows(case, covers_batch=False)):
        assert metadata.with_tree(rows).prefix_schedule is None and not plans
    schedule = metadata.with_tree(tree_rows(case)).prefix_schedule
    assert schedule.tolist() == [1, 2, 3, 4, 5] and schedule.data_ptr() == builder._prefix_plan.data_ptr()
    assert builder._prefix_plan.tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert plans[0]["causal"] is False and plans[0]["seqlens"] is case["prefix_len"] and plans[0]["max_num_splits"] == 8
    # where vLLM plans nothing (FlashAttention 2, batch invariance), neither does the tree
    metadata.scheduler_metadata = None
    assert metadata.with_tree(tree_rows(case)).prefix_schedule is None and len(plans) == 1
