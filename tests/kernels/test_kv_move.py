"""The KV move is a copy: every comparison is bitwise, over the whole cache."""

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.kv_move import KVTable, move_kv, naive

STALE = 99


def make_caches(num_layers, device, dtype=torch.bfloat16, blocks=12, heads=2, block_size=16, dim=64, seed=0):
    """Per-layer views [blocks, heads, block_size, 2 * dim] of one store laid out [block, layer, K or V side by side, head-last]."""
    gen = torch.Generator().manual_seed(seed)
    store = torch.randn(blocks, num_layers, block_size, heads, 2 * dim, generator=gen).to(dtype).to(device)
    return store, [store[:, layer].permute(0, 2, 1, 3) for layer in range(num_layers)]


def paths_tensor(paths: list[list[int]], device, width: int | None = None):
    """[R, Dp] int32, stale behind the path's end, and [R] int32 lengths."""
    width = width or max(1, max(len(p) for p in paths)) + 1
    rows = [p + [STALE] * (width - len(p)) for p in paths]
    lengths = [len(p) for p in paths]
    return torch.tensor(rows, dtype=torch.int32, device=device), torch.tensor(lengths, dtype=torch.int32, device=device)


def scattered_slots(num_groups, num_tokens, num_slots, device, seed):
    """Distinct slots per group, as a block table would give them but in no order."""
    gen = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(num_slots, generator=gen)[:num_tokens] for _ in range(num_groups)]
    return torch.stack(rows).to(torch.int64).to(device)


def bits(store: torch.Tensor) -> torch.Tensor:
    return store.contiguous().view(torch.int8)


def check(make, groups, slots, forest, path, path_len, label=""):
    """Run the kernel and the oracle on equal stores; compare every bit, NaN included."""
    store, caches = make()
    expected_store, expected = make()
    untouched = bits(store).clone()
    move_kv(KVTable.build(caches, groups), slots, forest, path, path_len)
    naive.move_kv(expected, groups, slots, forest, path, path_len)
    assert torch.equal(bits(store), bits(expected_store)), label
    return store, bool((bits(store) != untouched).any())


@pytest.mark.parametrize("path", [[0, 2, 3, 4], [0, 1, 3, 4, 7], [0, 5], [0, 2, 4, 6, 8, 10, 12, 14], [0, 3, 4, 5, 6, 7, 8, 9]], ids=str)
def test_overlapping_ranges(device, path):
    """Targets of some rows are sources of others; consecutive slots."""
    forest = make_forest([[-1, *list(range(15))]], device)
    path, path_len = paths_tensor([path], device)
    slots = torch.arange(20, 36, device=device)[None]
    _, changed = check(lambda: make_caches(1, device), [0], slots, forest, path, path_len)
    assert changed


def test_identity_path_is_skipped(device):
    forest = make_forest([[-1, 0, 1, 2], [-1, 0, 0, 0]], device)
    path, path_len = paths_tensor([[0, 1, 2, 3], [0]], device)
    slots = scattered_slots(1, 8, 192, device, 1)
    _, changed = check(lambda: make_caches(2, device), [0, 0], slots, forest, path, path_len)
    assert not changed


def test_requests_without_path(device):
    forest = make_forest([[-1, 0, 0], [], [-1, 0, 0]], device)
    path, path_len = paths_tensor([[0, 2], [], []], device)
    slots = scattered_slots(1, 7, 192, device, 2)
    _, changed = check(lambda: make_caches(1, device), [0], slots, forest, path, path_len)
    assert changed
    path_len.zero_()
    _, changed = check(lambda: make_caches(1, device), [0], slots, forest, path, path_len)
    assert not changed


@pytest.mark.parametrize("hole", [0, 1, 2, 3, 4])
def test_negative_slots(device, hole):
    forest = make_forest([[-1, 0, 0, 2, 3]], device)
    path, path_len = paths_tensor([[0, 2, 3, 4]], device)
    slots = scattered_slots(1, 5, 192, device, 3)
    slots[0, hole] = -1
    check(lambda: make_caches(1, device), [0], slots, forest, path, path_len, f"hole {hole}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads,block_size,dim", [(1, 16, 128), (3, 48, 64), (2, 5, 256)])
def test_random_batches(device, dtype, heads, block_size, dim):
    """Several layers and groups, mixed requests with prefill rows between them."""
    for seed in range(3):
        gen = torch.Generator().manual_seed(seed)
        sizes = [int(torch.randint(0, 17, (1,), generator=gen)) for _ in range(5)]
        trees = [random_parents(n, 7, gen) if n else [] for n in sizes]
        paths = [path_to(t, int(torch.randint(len(t), (1,), generator=gen))) if t else [] for t in trees]
        forest = make_forest(trees, device, max_nodes=17, token_gap=2)
        path, path_len = paths_tensor(paths, device, width=8)
        slots = scattered_slots(2, sum(sizes) + 20, 20 * block_size, device, seed) if block_size > 5 else None
        if slots is None:
            slots = scattered_slots(2, sum(sizes) + 20, 40 * block_size, device, seed)
        shape = {"dtype": dtype, "blocks": 40, "heads": heads, "block_size": block_size, "dim": dim, "seed": seed}
        check(lambda s=shape: make_caches(3, device, **s), [0, 1, 0], slots, forest, path, path_len, f"seed {seed}")


def test_only_path_rows_are_read(device):
    """Everything off the path is NaN: the path's rows arrive clean and the rest keeps its bits."""
    forest = make_forest([[-1, 0, 0, 2, 3]], device)
    nodes = [0, 2, 3, 4]
    path, path_len = paths_tensor([nodes], device)
    slots = scattered_slots(1, 5, 192, device, 4)

    def make():
        store, _ = make_caches(2, device, seed=4)
        poisoned = torch.full_like(store, float("nan"))
        for node in nodes:
            slot = int(slots[0, node])
            poisoned[slot // 16, :, slot % 16] = store[slot // 16, :, slot % 16]
        return poisoned, [poisoned[:, layer].permute(0, 2, 1, 3) for layer in range(2)]

    store, changed = check(make, [0, 0], slots, forest, path, path_len)
    assert changed
    for j in range(4):
        slot = int(slots[0, j])
        assert not store[slot // 16, :, slot % 16].isnan().any()


def test_fewer_requests_than_the_forest(device):
    forest = make_forest([[-1, 0, 0], [-1, 0, 0], [-1, 0, 0]], device)
    path, path_len = paths_tensor([[0, 2], [0, 2], [0, 2]], device)
    slots = scattered_slots(1, 9, 192, device, 5)
    check(lambda: make_caches(1, device), [0], slots, forest, path, path_len[:2])


def test_rejects_bad_arguments(device):
    forest = make_forest([[-1, 0]], device)
    path, path_len = paths_tensor([[0, 1]], device)
    _, caches = make_caches(2, device)
    table = KVTable.build(caches, [0, 0])
    slots = scattered_slots(1, 2, 192, device, 6)
    with pytest.raises(ValueError, match="slot_mapping"):
        move_kv(table, slots.int(), forest, path, path_len)
    with pytest.raises(ValueError, match="path"):
        move_kv(table, slots, forest, path.long(), path_len)
    with pytest.raises(ValueError, match="path_len"):
        move_kv(table, slots, forest, path, path_len.long())
    with pytest.raises(ValueError, match="group"):
        KVTable.build(caches, [0])
    with pytest.raises(ValueError, match="alike"):
        KVTable.build([caches[0], caches[1].contiguous()], [0, 0])
