"""Growing the proposal tree: equality with the list oracle, and what must hold for any draft distribution."""

import math

import pytest
import torch

from bole_vllm.kernels.draft import RowInputs, RowOutputs, TreeShape, extend, naive, select, start, start_from, top_children

NUM_NODES = [2, 3, 8, 9, 16, 32, 64]


def random_logits(shape: TreeShape, requests: int, vocab: int, seed: int, device, dtype=torch.float32):
    """Root logits and one tensor per further depth."""
    gen = torch.Generator().manual_seed(seed)
    root = 2 * torch.randn(requests, vocab, generator=gen)
    steps = [2 * torch.randn(requests, shape.beam, vocab, generator=gen) for _ in range(shape.max_depth - 1)]
    return root.to(dtype).to(device), [s.to(dtype).to(device) for s in steps]


def grow(root, steps, shape: TreeShape):
    candidates = start(root, shape)
    for depth, logits in enumerate(steps, start=2):
        candidates, _ = extend(candidates, logits, depth, shape)
    return select(candidates, shape)


def assert_sound(tree, shape: TreeShape, label: str) -> None:
    """Root, spine, closure, distinct siblings, strictly falling scores, placeholders."""
    n, d = tree.num_nodes, shape.max_depth
    assert n == min(shape.num_candidates, shape.num_nodes - 1) + 1
    for r in range(tree.token.shape[0]):
        token, parent, logprob = tree.token[r].tolist(), tree.parent[r].tolist(), tree.logprob[r].tolist()
        assert (token[0], parent[0], logprob[0]) == (-1, -1, 0.0)
        assert parent[1 : d + 1] == list(range(d)), f"{label}: spine"
        assert all(0 <= parent[i] < i for i in range(1, n)), f"{label}: parents before children"
        assert all(logprob[i] < logprob[parent[i]] for i in range(1, n)), f"{label}: score falls along a path"
        assert len({(parent[i], token[i]) for i in range(1, n)}) == n - 1, f"{label}: siblings are distinct"
        assert all(t >= 0 for t in token[1:n])
        assert token[n:] == [-1] * (len(token) - n) and parent[n:] == [0] * (len(token) - n)
        assert all(x == -math.inf for x in logprob[n:])


def check_growth_against_oracle(shape: TreeShape, seed: int, device) -> None:
    label = f"{shape}, seed {seed}"
    root, steps = random_logits(shape, 2, 11, seed, device)
    candidates = start(root, shape)
    oracles = [naive.start(root[r].tolist(), shape) for r in range(2)]
    for depth in range(1, shape.max_depth + 1):
        if depth > 1:
            candidates, source_row = extend(candidates, steps[depth - 2], depth, shape)
            expected = [naive.extend(o, steps[depth - 2][r].tolist(), depth, shape) for r, o in enumerate(oracles)]
            assert source_row.tolist() == [[r * shape.beam + row for row in rows] for r, rows in enumerate(expected)], label
        assert candidates.frontier.tolist() == [o.frontier for o in oracles], label
        assert candidates.frontier_token.tolist() == [[o.table[c].token for c in o.frontier] for o in oracles], label
        for r, oracle in enumerate(oracles):
            size = len(oracle.table)
            assert size == shape.first_candidate(depth + 1)
            assert candidates.token[r, :size].tolist() == [c.token for c in oracle.table], label
            assert candidates.parent[r, :size].tolist() == [c.parent for c in oracle.table], label
            torch.testing.assert_close(candidates.logprob[r, :size].cpu(), torch.tensor([c.logprob for c in oracle.table]))
            assert (candidates.token[r, size:] == -1).all() and (candidates.logprob[r, size:] == -math.inf).all()
            for b in range(shape.beam):
                words = candidates.frontier_mask[r, b].tolist()
                seen = {e for e in range(32 * shape.num_words) if (words[e // 32] >> (e % 32)) & 1}
                assert seen == oracle.visible_rows(b), f"{label}, depth {depth}, row {b}"
    tree = select(candidates, shape)
    assert_sound(tree, shape, label)
    for r, oracle in enumerate(oracles):
        nodes = naive.select(oracle, shape)
        assert list(zip(tree.token[r].tolist(), tree.parent[r].tolist(), strict=True)) == [n[:2] for n in nodes], label
        torch.testing.assert_close(tree.logprob[r].cpu(), torch.tensor([n[2] for n in nodes]))


@pytest.mark.parametrize("num_nodes", NUM_NODES)
@pytest.mark.parametrize("topk", range(1, 9))
def test_against_oracle(device, num_nodes, topk):
    depths = [d for d in range(1, min(num_nodes, 9)) if (d + topk) % 2 or num_nodes < 8]
    for depth in depths:
        check_growth_against_oracle(TreeShape.plan(num_nodes, topk, depth), seed=100 * num_nodes + 10 * topk + depth, device=device)


def test_chain(device):
    """k = 1: the greedy chain, one expanded row per depth."""
    shape = TreeShape.plan(6, 1, 5)
    assert (shape.beam, shape.num_candidates, shape.num_expanded) == (1, 5, 4)
    root, steps = random_logits(shape, 3, 20, 1, device)
    tree = grow(root, steps, shape)
    best = torch.stack([root.argmax(-1)] + [s[:, 0].argmax(-1) for s in steps], dim=1)
    assert torch.equal(tree.token[:, 1:].long(), best)
    assert tree.parent.tolist() == [[-1, 0, 1, 2, 3, 4]] * 3


def test_tree_with_fewer_candidates_than_nodes(device):
    shape = TreeShape.plan(16, 2, 2)
    assert shape.num_candidates == 6
    root, steps = random_logits(shape, 2, 5, 2, device)
    tree = grow(root, steps, shape)
    assert tree.num_nodes == 7
    assert_sound(tree, shape, "seed 2")


@pytest.mark.parametrize("num_nodes,topk,depth", [(16, 4, 6), (64, 8, 10), (8, 3, 4)])
def test_rows_without_room_are_in_no_mask(device, num_nodes, topk, depth):
    """The same table and frontier; of the masks only the bits below each request's room; tokens where they were asked for. Seed 5."""
    shape = TreeShape.plan(num_nodes, topk, depth)
    root, steps = random_logits(shape, 4, 13, 5, device)
    room = torch.tensor([0, 1, shape.num_expanded // 2, shape.num_expanded], dtype=torch.int32, device=device)
    below = [[e < n for e in range(32 * shape.num_words)] for n in room.tolist()]
    ids = torch.full((4 * shape.beam,), 99, dtype=torch.int32, device=device)
    plain, limited = start(root, shape), start_from(*top_children(root, topk), shape, room, ids)
    for logits, level in zip([None, *steps], range(1, depth + 1), strict=True):
        if logits is not None:
            (plain, source), (limited, other) = extend(plain, logits, level, shape), extend(limited, logits, level, shape)
            assert torch.equal(source, other)
        for name in ("token", "parent", "logprob", "frontier"):
            a, b = getattr(plain, name), getattr(limited, name)
            known = shape.first_candidate(level + 1)
            assert torch.equal(a[:, :known], b[:, :known]), name
        assert ids.tolist() == plain.frontier_token.flatten().tolist()
        all_bits, bits = (
            [[[(word >> i) & 1 for word in row for i in range(32)] for row in request] for request in c.frontier_mask.tolist()]
            for c in (plain, limited)
        )
        assert bits == [[[b & int(m) for b, m in zip(row, mask)] for row in request] for request, mask in zip(all_bits, below)], level
        assert level == depth or any(any(row) for row in all_bits[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_nodes,topk,depth,width", [(16, 4, 4, 5000), (64, 8, 6, 96), (8, 1, 3, 1)])
def test_every_row_takes_its_parents_output(device, num_nodes, topk, depth, width, dtype):
    """Bits of the outputs, strided, into the rows of longer buffers whose other rows stay; the same tree. Seed 6."""
    shape = TreeShape.plan(num_nodes, topk, depth)
    root, steps = random_logits(shape, 3, 13, 6, device)
    plain, moving = start(root, shape), start(root, shape)
    rows = 3 * shape.beam
    outputs = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(6)).to(device, dtype)[:, :width]
    hidden, positions = torch.full((rows + 2, width), 7, dtype=dtype, device=device), torch.full((rows + 2,), -7, device=device)
    inputs = RowInputs(hidden[:rows], positions[:rows])
    for level, logits in enumerate(steps, start=2):
        plain, source = extend(plain, logits, level, shape)
        places = torch.arange(rows, device=device) + 100 * level
        moving, same = extend(moving, logits, level, shape, None, RowOutputs(outputs, places), inputs)
        assert torch.equal(source, same) and torch.equal(plain.frontier, moving.frontier)
        assert torch.equal(hidden[:rows], outputs[source.flatten()]) and (hidden[rows:] == 7).all()
        assert torch.equal(positions[:rows], places) and (positions[rows:] == -7).all()
    with pytest.raises(ValueError, match="go together"):
        extend(start(root, shape), steps[0], 2, shape, inputs=inputs)


def test_spine_is_kept_whatever_its_score(device):
    """The spine's first token is nearly certain, what follows it is flat; the runner-up is followed by certainties."""
    shape = TreeShape.plan(8, 2, 4)
    root = torch.full((1, 32), -30.0, device=device)
    root[0, 3], root[0, 4] = 1.0, 0.9
    steps = [torch.zeros(1, shape.beam, 32, device=device) for _ in range(3)]
    for s in steps:
        s[0, 1:, 7] = 50.0
    tree = grow(root, steps, shape)
    assert_sound(tree, shape, "spine")
    assert int(tree.token[0, 1]) == 3
    # the runner-up's chain of certainties fills the rest
    assert tree.token[0, 5:8].tolist() == [4, 7, 7] and tree.parent[0, 5:8].tolist() == [0, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_nodes,topk,depth", [(9, 4, 3), (32, 4, 8), (64, 8, 8)])
def test_degenerate_distributions(device, dtype, num_nodes, topk, depth):
    """Certain tokens tie at log-probability 0, masked tokens at -inf; rows of NaN or -inf have no distribution at all."""
    shape = TreeShape.plan(num_nodes, topk, depth)
    vocab = 16
    root, steps = random_logits(shape, 6, vocab, 3, device, dtype)
    for logits in [root[:, None], *steps]:
        logits[0] = -math.inf
        logits[0, :, 5] = 0.0
        logits[1, :, 3:] = -math.inf
        logits[2] = 0.0
        logits[3] = math.nan
        logits[4] = -math.inf
        logits[5, :, 2] = math.inf
    tree = grow(root, steps, shape)
    assert_sound(tree, shape, "seed 3")
    # one token of probability 1: the spine repeats it
    assert tree.token[0, 1 : depth + 1].tolist() == [5] * depth
    torch.testing.assert_close(tree.logprob[0, depth].item(), -1e-3 * depth)


def test_score_is_the_product_of_probabilities(device):
    shape = TreeShape.plan(32, 4, 5)
    root, steps = random_logits(shape, 2, 50, 4, device)
    candidates = start(root, shape)
    batch = torch.arange(2, device=device)[:, None]
    for depth, logits in enumerate(steps, start=2):
        before = candidates.frontier.clone()
        candidates, source_row = extend(candidates, logits, depth, shape)
        parent_row = source_row - batch * shape.beam
        # the row that produced the new frontier row holds its parent
        assert torch.equal(before.gather(1, parent_row), candidates.parent.gather(1, candidates.frontier))
        token = candidates.token.gather(1, candidates.frontier)
        step = torch.log_softmax(logits, -1)[batch, parent_row, token]
        parent_score = candidates.logprob.gather(1, before).gather(1, parent_row)
        torch.testing.assert_close(candidates.logprob.gather(1, candidates.frontier), parent_score + step)


@pytest.mark.parametrize("num_nodes", NUM_NODES)
def test_plan(num_nodes):
    for topk in range(1, 9):
        for depth in range(1, 12):
            shape = TreeShape.plan(num_nodes, topk, depth)
            assert shape.max_depth == min(depth, num_nodes - 1)
            assert 1 <= shape.beam <= topk and shape.num_expanded <= num_nodes - 1
            assert shape.num_candidates == topk + (shape.max_depth - 1) * shape.beam * topk
            assert 32 * shape.num_words >= shape.num_expanded


def test_refusals(device):
    for bad in [(1, 4, 3), (8, 0, 3), (8, 4, 0), (256, 4, 65)]:
        with pytest.raises(ValueError):
            TreeShape.plan(*bad)
    with pytest.raises(ValueError, match="beam"):
        TreeShape(num_nodes=8, topk=2, max_depth=2, beam=3)
    with pytest.raises(ValueError, match="scratch slots"):
        TreeShape(num_nodes=8, topk=4, max_depth=4, beam=3)
    shape = TreeShape.plan(16, 4, 3)
    with pytest.raises(ValueError, match="vocabulary of 3"):
        start(torch.zeros(2, 3, device=device), shape)
    candidates = start(torch.zeros(2, 9, device=device), shape)
    with pytest.raises(ValueError, match="depth"):
        extend(candidates, torch.zeros(2, shape.beam, 9, device=device), 4, shape)
    with pytest.raises(ValueError, match="logits"):
        extend(candidates, torch.zeros(2, shape.beam + 1, 9, device=device), 2, shape)


def test_same_input_same_tree(device):
    """Ties everywhere: the choice must not vary between runs."""
    shape = TreeShape.plan(32, 4, 8)
    root, steps = random_logits(shape, 4, 30, 6, device)
    root, steps = root.round(), [s.round() for s in steps]
    first = grow(root, steps, shape)
    for _ in range(3):
        again = grow(root, steps, shape)
        assert torch.equal(first.token, again.token) and torch.equal(first.parent, again.parent)


def test_columns_of_a_part_of_the_vocabulary(device):
    """With token ids, columns are those tokens: the tree over the part is the same tree with its tokens renamed."""
    shape = TreeShape.plan(16, 3, 4)
    root, steps = random_logits(shape, 2, 20, 8, device)
    token_ids = torch.randperm(1000, generator=torch.Generator().manual_seed(8))[:20].to(device)
    plain = grow(root, steps, shape)
    candidates = start(root, shape, token_ids)
    for depth, logits in enumerate(steps, start=2):
        candidates, _ = extend(candidates, logits, depth, shape, token_ids)
    named = select(candidates, shape)
    drafted = plain.token >= 0
    assert torch.equal(named.token[drafted].long(), token_ids[plain.token[drafted].long()])
    assert torch.equal(named.parent, plain.parent) and torch.equal(named.logprob, plain.logprob)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_graph_equals_eager(device):
    """One captured graph, replayed with other logits: no hidden sync, no stale topology."""
    shape = TreeShape.plan(32, 4, 8)
    root, steps = random_logits(shape, 4, 1000, 7, device)
    grow(root, steps, shape)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grow(root, steps, shape)
    for seed in (8, 9):
        new_root, new_steps = random_logits(shape, 4, 1000, seed, device)
        root.copy_(new_root)
        for step, new in zip(steps, new_steps, strict=True):
            step.copy_(new)
        graph.replay()
        eager = grow(new_root, new_steps, shape)
        assert torch.equal(captured.token, eager.token) and torch.equal(captured.parent, eager.parent), f"seed {seed}"
