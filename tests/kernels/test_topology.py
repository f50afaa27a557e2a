"""build_forest, tree_positions and check_integrity against plain loops and against every way to break a forest."""

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.topology import Forest, build_forest, check_integrity, num_mask_words, tree_positions
from bole_vllm.kernels.topology.naive import naive_build_forest, naive_tree_positions

NODE_ARRAYS = ("parent", "depth", "token", "logprob", "ancestors", "request", "path", "conv_source")
POISON = -123456


def poisoned(num_requests: int, max_nodes: int, device, capacity: int | None = None, max_depth: int | None = None) -> Forest:
    """A forest whose every entry is wrong until it is written."""
    forest = Forest.allocate(num_requests, max_nodes, max_nodes - 1 if max_depth is None else max_depth, device, capacity)
    for name in ("node_offset", "token_start", "parent", "depth", "token", "ancestors", "request", "path", "conv_source"):
        getattr(forest, name).fill_(POISON)
    forest.logprob.fill_(float("nan"))
    return forest


def stored_trees(num_slots: int, T: int, generator: torch.Generator, max_depth: int = 6):
    """Random trees per slot as a drafter leaves them: distinct tokens, falling log-probabilities, garbage behind the last node."""
    # [S, T]
    parent = torch.randint(-50, 50, (num_slots, T), generator=generator, dtype=torch.int32)
    token = torch.randint(0, 1000, (num_slots, T), generator=generator, dtype=torch.int32)
    logprob = torch.full((num_slots, T), 7.0)
    num_nodes = torch.randint(1, T + 1, (num_slots,), generator=generator, dtype=torch.int32)
    for s in range(num_slots):
        n = int(num_nodes[s])
        parents = random_parents(n, max_depth, generator)
        parent[s, :n] = torch.tensor(parents)
        token[s, :n] = torch.randperm(1000, generator=generator)[:n].int()
        steps = -torch.rand(n, generator=generator)
        for i, up in enumerate(parents):
            logprob[s, i] = steps[i] + logprob[s, up] if up >= 0 else 0.0
    return parent, token, logprob, num_nodes


def batch(num_requests: int, num_slots: int, T: int, generator: torch.Generator):
    """Requests of every kind: trees, stale slots, one-node trees, prefill rows between them, padded requests at the end."""
    kinds = torch.randint(0, 4, (num_requests,), generator=generator).tolist()
    num_pads = num_requests // 4
    slots = torch.randperm(num_slots, generator=generator)[:num_requests]
    is_tree = torch.zeros(num_requests, dtype=torch.bool)
    lengths = []
    for r, kind in enumerate(kinds):
        if r >= num_requests - num_pads:
            slots[r] = -1
            lengths.append(0)
            # a stale flag on a padded request must not matter
            is_tree[r] = kind == 0
        elif kind == 0:
            lengths.append(int(torch.randint(1, 3 * T + 2, (1,), generator=generator)))
        else:
            is_tree[r] = True
            lengths.append(1 if kind == 1 else int(torch.randint(1, T + 1, (1,), generator=generator)))
    query_start = torch.tensor([0, *lengths]).cumsum(0).int()
    root_token = torch.randint(0, 1000, (int(query_start[-1]) + 3,), generator=generator)
    return slots, is_tree, query_start, root_token


def assert_same(actual: Forest, expected: Forest, what: str) -> None:
    total = int(expected.node_offset[-1])
    for name in ("node_offset", "token_start"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name).cpu()), f"{what}: {name}"
    for name in NODE_ARRAYS:
        a, e = getattr(actual, name).cpu(), getattr(expected, name).cpu()
        assert torch.equal(a[:total], e[:total]), f"{what}: {name}"
        rest = a[total:]
        assert bool(rest.isnan().all() if name == "logprob" else (rest == POISON).all()), f"{what}: {name} written behind the last node"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 64, 100])
def test_build_matches_naive(T, seed, device):
    generator = torch.Generator().manual_seed(1000 * T + seed)
    R, S = (1, 5, 8, 20)[seed], 24
    slots = stored_trees(S, T, generator)
    rows = batch(R, S, T, generator)
    forest = poisoned(R, T, device, capacity=R * T + 5)
    expected = poisoned(R, T, "cpu", capacity=R * T + 5)
    naive_build_forest(expected, *slots, *rows)
    build_forest(forest, *(t.to(device) for t in (*slots, *rows)))
    assert_same(forest, expected, f"T={T} seed={seed}")
    check_integrity(forest, R)


def test_empty_batch(device):
    generator = torch.Generator().manual_seed(0)
    slots = [t.to(device) for t in stored_trees(4, 8, generator)]
    forest = poisoned(3, 8, device)
    no_slots = torch.full((3,), -1, device=device)
    zeros = torch.zeros(4, dtype=torch.int32, device=device)
    build_forest(forest, *slots, no_slots, torch.ones(3, dtype=torch.bool, device=device), zeros, zeros.long())
    assert forest.node_offset.tolist() == [0, 0, 0, 0]
    assert bool((forest.parent == POISON).all())
    positions = torch.full((5,), POISON, device=device)
    tree_positions(forest, torch.arange(3, device=device), positions)
    assert bool((positions == POISON).all())
    check_integrity(forest, 3)


def test_stale_slot_becomes_pads(device):
    T = 40
    parent = torch.tensor([[-1, *list(range(T - 1))]], dtype=torch.int32, device=device)
    token = torch.arange(T, dtype=torch.int32, device=device)[None] + 10
    logprob = -torch.arange(T, dtype=torch.float32, device=device)[None]
    forest = poisoned(1, T, device)
    i64 = {"dtype": torch.int64, "device": device}
    i32 = {"dtype": torch.int32, "device": device}
    is_tree = torch.ones(1, dtype=torch.bool, device=device)
    build_forest(
        forest,
        parent,
        token,
        logprob,
        torch.tensor([3], **i32),
        torch.zeros(1, **i64),
        is_tree,
        torch.tensor([2, 2 + T], **i32),
        torch.arange(50, **i64) + 500,
    )
    assert forest.token_start.tolist() == [2] and forest.node_offset.tolist() == [0, T]
    assert forest.parent.tolist() == [-1, 0, 1] + [0] * (T - 3)
    assert forest.depth.tolist() == [0, 1, 2] + [1] * (T - 3)
    assert forest.token.tolist() == [502, 11, 12] + [-1] * (T - 3)
    assert forest.logprob.tolist() == [0.0, -1.0, -2.0] + [float("-inf")] * (T - 3)
    words = [sum((w & 0xFFFFFFFF) << 32 * i for i, w in enumerate(row)) for row in forest.ancestors.tolist()]
    assert words == [1, 3, 7] + [1 | 1 << i for i in range(3, T)]
    check_integrity(forest, 1)


@pytest.mark.parametrize("T", [33, 64, 256])
def test_chain_crosses_words(T, device):
    """The deepest tree there is: node i has the ancestors 0..i, through every word boundary."""
    parent = torch.arange(-1, T - 1, dtype=torch.int32, device=device)[None]
    zeros = torch.zeros(1, T, device=device)
    forest = poisoned(1, T, device)
    build_forest(
        forest,
        parent,
        zeros.int(),
        zeros,
        torch.tensor([T], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.ones(1, dtype=torch.bool, device=device),
        torch.tensor([0, T], dtype=torch.int32, device=device),
        torch.zeros(T, dtype=torch.int64, device=device),
    )
    assert forest.depth.tolist() == list(range(T))
    assert forest.ancestors.shape == (T, num_mask_words(T))
    for i, row in enumerate(forest.ancestors.tolist()):
        assert sum((w & 0xFFFFFFFF) << 32 * k for k, w in enumerate(row)) == (1 << i + 1) - 1
    check_integrity(forest, 1)


def test_rebuild_leaves_nothing_behind(device):
    """One set of buffers over alternating topologies, as a captured graph sees it."""
    T, R, S = 33, 6, 8
    forest = poisoned(R, T, device)
    for seed in (5, 6, 5, 7):
        generator = torch.Generator().manual_seed(seed)
        slots, rows = stored_trees(S, T, generator), batch(R, S, T, generator)
        build_forest(forest, *(t.to(device) for t in (*slots, *rows)))
        expected = poisoned(R, T, "cpu")
        naive_build_forest(expected, *slots, *rows)
        total = int(expected.node_offset[-1])
        for name in NODE_ARRAYS:
            assert torch.equal(getattr(forest, name)[:total].cpu(), getattr(expected, name)[:total]), f"seed={seed} {name}"


def test_corrupt_slot_terminates(device):
    """A slot with cycles and forward links must neither hang the walk nor read out of bounds; the check finds it."""
    T = 8
    parent = torch.tensor([[3, 5, 1, 2, 7, 4, 6, 100]], dtype=torch.int32, device=device)
    forest = poisoned(1, T, device)
    zeros = torch.zeros(1, T, device=device)
    build_forest(
        forest,
        parent,
        zeros.int(),
        zeros,
        torch.tensor([T], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.ones(1, dtype=torch.bool, device=device),
        torch.tensor([0, T], dtype=torch.int32, device=device),
        torch.zeros(T, dtype=torch.int64, device=device),
    )
    with pytest.raises(ValueError, match="one root"):
        check_integrity(forest, 1)


def test_overflow_stays_inside(device):
    """More rows than nodes fit: offsets are cut at the capacity, nothing is written behind the arrays."""
    R, T, S, capacity = 4, 8, 4, 20
    generator = torch.Generator().manual_seed(3)
    slots = [t.to(device) for t in stored_trees(S, T, generator)]
    backing = poisoned(R, T, device, capacity=64)
    forest = backing.for_requests(R)
    for name in NODE_ARRAYS:
        setattr(forest, name, getattr(backing, name)[:capacity])
    lengths = torch.arange(R + 1, dtype=torch.int32, device=device) * (T + 3)
    is_tree = torch.ones(R, dtype=torch.bool, device=device)
    build_forest(forest, *slots, torch.arange(R, device=device), is_tree, lengths, torch.zeros(64, dtype=torch.int64, device=device))
    assert forest.node_offset.tolist() == [0, 8, 16, 20, 20]
    assert bool((backing.parent[capacity:] == POISON).all()) and bool((backing.ancestors[capacity:] == POISON).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_positions_match_naive(seed, gap, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    sizes = [0, 1, 33, 0, 7, 64, 0]
    trees = [random_parents(n, 5, generator) if n else [] for n in sizes]
    forest = make_forest(trees, device, token_gap=gap)
    num_computed = torch.randint(0, 2**31 - 100, (len(trees),), generator=generator).to(dtype)
    num_rows = sum(max(1, n) + gap for n in sizes)
    expected = torch.full((num_rows,), POISON)
    positions = expected.to(device)
    naive_tree_positions(forest, num_computed, expected)
    tree_positions(forest, num_computed.to(device), positions)
    assert torch.equal(positions.cpu(), expected), f"seed={seed}"
    assert int((expected == POISON).sum()) == num_rows - sum(sizes)
    # of the input ids, pads on tree rows alone become ones that can be embedded
    ids = torch.randint(-1, 3, (num_rows,), generator=generator).to(dtype)
    wanted = torch.where(expected == POISON, ids, ids.clamp(min=0))
    ids = ids.to(device)
    tree_positions(forest, num_computed.to(device), positions, ids)
    assert torch.equal(positions.cpu(), expected) and torch.equal(ids.cpu(), wanted), f"seed={seed}"


def test_position_of_every_node_is_its_path_length(device):
    generator = torch.Generator().manual_seed(11)
    tree = random_parents(40, 9, generator)
    forest = make_forest([tree], device, token_gap=1)
    positions = torch.full((41,), POISON, device=device)
    tree_positions(forest, torch.tensor([1000], device=device), positions)
    assert positions.tolist() == [POISON] + [1000 + len(path_to(tree, i)) - 1 for i in range(40)]


# (array, node, value) on the forest below -> the invariant that has to be named
BREAKS = {
    "offsets_fall": ("node_offset", 1, 9, "offsets monotone"),
    "offset_start": ("node_offset", 0, 1, "offsets monotone"),
    "capacity": ("node_offset", 3, 99, "capacity"),
    "too_many": ("node_offset", 1, 0, "max nodes"),
    "root_has_parent": ("parent", 0, 0, "root first"),
    "root_depth": ("depth", 0, 1, "root first"),
    "second_root": ("parent", 3, -1, "one root"),
    "forward_parent": ("parent", 2, 3, "parents before children"),
    "own_parent": ("parent", 2, 2, "parents before children"),
    "depth": ("depth", 2, 1, "depth"),
    "bit_missing": ("ancestors", 2, 0b110, "bitmask"),
    "bit_extra": ("ancestors", 3, 0b1101, "bitmask"),
    "bit_beyond": ("ancestors", 3, 0b1001 | 1 << 20, "bitmask"),
    "self_missing": ("ancestors", 3, 0b0001, "bitmask"),
    "twins": ("token", 3, 101, "siblings distinct"),
    "logprob_rises": ("logprob", 2, -0.5, "log-probability"),
    "logprob_nan": ("logprob", 2, float("nan"), "log-probability"),
    "root_logprob": ("logprob", 0, -1.0, "log-probability"),
    "other_request": ("request", 2, 1, "path"),
    "wrong_path": ("path", 2, 0, "path"),
    "wrong_conv_input": ("conv_source", 3, 0, "path"),
}


def intact(device) -> Forest:
    # nodes: 0 - 1 - 2 and 0 - 3; then a one-node tree and an empty request
    forest = make_forest([[-1, 0, 1, 0], [-1], []], device, max_nodes=4)
    check_integrity(forest, 3)
    return forest


@pytest.mark.parametrize("case", BREAKS)
def test_integrity_catches(case, device):
    name, index, value, message = BREAKS[case]
    forest = intact(device)
    getattr(forest, name)[index] = value
    with pytest.raises(ValueError, match=message):
        check_integrity(forest, 3)


def test_integrity_catches_depth_bound(device):
    forest = make_forest([[-1, 0, 1]], device)
    forest.max_depth = 1
    with pytest.raises(ValueError, match="max depth"):
        check_integrity(forest, 1)


def test_integrity_spine(device):
    spine = make_forest([[-1, 0, 1, 0, 1, 3], [-1], []], device)
    check_integrity(spine, 3, spine=True)
    # node 3 is the likelier child of the root, but node 1 is the first
    spine.logprob[3] = -0.5
    check_integrity(spine, 3)
    with pytest.raises(ValueError, match="spine first"):
        check_integrity(spine, 3, spine=True)
    # node 1 goes on at node 3: the chain is not contiguous
    late = make_forest([[-1, 0, 0, 1]], device)
    check_integrity(late, 1)
    with pytest.raises(ValueError, match="spine first"):
        check_integrity(late, 1, spine=True)


def test_integrity_exempts_pads(device):
    forest = intact(device)
    # two pads under the root share the token -1
    for node in (1, 3):
        forest.token[node] = -1
    check_integrity(forest, 3)


def test_validation(device):
    generator = torch.Generator().manual_seed(0)
    slots = [t.to(device) for t in stored_trees(4, 8, generator)]
    rows = [t.to(device) for t in batch(4, 4, 8, generator)]
    forest = poisoned(4, 8, device)
    with pytest.raises(ValueError, match="slot_parent"):
        build_forest(forest, slots[0].long(), *slots[1:], *rows)
    with pytest.raises(ValueError, match="slot_token"):
        build_forest(forest, slots[0], slots[1][:, :7], *slots[2:], *rows)
    with pytest.raises(ValueError, match="is_tree"):
        build_forest(forest, *slots, rows[0], rows[1].int(), *rows[2:])
    with pytest.raises(ValueError, match="requests"):
        build_forest(forest, *slots, rows[0][:3], *rows[1:])
    with pytest.raises(ValueError, match="positions"):
        tree_positions(forest, rows[0], torch.zeros(4, dtype=torch.int32, device=device))
