"""Penalties, bad words and reasoning budgets along a node's own path: against the list oracle, and bit for bit against vLLM on chains."""

import pytest
import torch
from conftest import make_forest, path_to, random_parents

from bole_vllm.kernels.path_logits import PathPenalties, PathRows, ban_words, force_end, naive

VOCAB, SLOTS, POSITIONS = 70, 6, 64
# repetition, frequency and presence penalties of the slots; slot 2 has none
PENALTIES = [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 1.1), (0.8, -0.3, 0.6), (1.7, 0.25, -0.5)]


class Batch:
    """Requests with few kinds of tokens, so that paths repeat themselves and what was committed; some have no tree."""

    def __init__(self, sizes: list[int], seed: int, device, kinds: int = 4, max_depth: int = 6) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.device, self.gen, self.kinds = device, gen, kinds
        self.trees = [random_parents(n, max_depth, gen) if n else [] for n in sizes]
        self.slots = torch.randperm(SLOTS, generator=gen)[: len(sizes)]
        self.prompts = [self.tokens(int(n)) for n in torch.randint(1, 9, (len(sizes),), generator=gen)]
        self.outputs = [self.tokens(int(n)) for n in torch.randint(0, 9, (len(sizes),), generator=gen)]
        # a request without a tree has one row, of its prompt's end
        self.rows = [max(n, 1) for n in sizes]
        self.start = torch.tensor([0, *self.rows]).cumsum(0).int().to(device)
        self.forest = make_forest(self.trees, device)
        self.drafts = [self.tokens(n) for n in sizes]
        flat = [token for drafts in self.drafts for token in drafts]
        self.forest.token[: len(flat)] = torch.tensor(flat, dtype=torch.int32, device=device)
        self.logits = (3 * torch.randn(sum(self.rows), VOCAB, generator=gen)).to(device)

    def tokens(self, count: int) -> list[int]:
        return torch.randint(self.kinds, (count,), generator=self.gen).tolist()

    def path_rows(self, start: int = 0, end: int | None = None) -> PathRows:
        end = len(self.trees) if end is None else end
        return PathRows.of_round(self.forest, self.start, self.slots.int().to(self.device), start, end, sum(self.rows[:start]))

    def drafts_before(self, request: int, row: int) -> list[int]:
        """On the row's path, its own included; the root's token is committed."""
        tree = self.trees[request]
        return [self.drafts[request][node] for node in path_to(tree, row)[1:]] if tree else []

    def each(self):
        """(row of the logits, request, slot, drafts before)."""
        for request, count in enumerate(self.rows):
            for row in range(count):
                yield sum(self.rows[:request]) + row, request, int(self.slots[request]), self.drafts_before(request, row)

    def per_slot(self, lists: list[list[int]], width: int) -> torch.Tensor:
        found = torch.full((SLOTS, width), -9, dtype=torch.int32)
        for slot, values in zip(self.slots.tolist(), lists, strict=True):
            found[slot, : len(values)] = torch.tensor(values, dtype=torch.int32)
        return found.to(self.device)

    @property
    def committed(self) -> torch.Tensor:
        return self.per_slot([p + o for p, o in zip(self.prompts, self.outputs, strict=True)], POSITIONS)

    def lengths(self, lists: list[list[int]]) -> torch.Tensor:
        return self.per_slot([[len(one)] for one in lists], 1)[:, 0].contiguous()

    @property
    def total(self) -> torch.Tensor:
        return self.lengths([p + o for p, o in zip(self.prompts, self.outputs, strict=True)])

    @property
    def counts(self) -> torch.Tensor:
        counts = torch.full((SLOTS, VOCAB), 99, dtype=torch.int32)
        for slot, output in zip(self.slots.tolist(), self.outputs, strict=True):
            counts[slot] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
        return counts.to(self.device)

    def chain(self, row_drafts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(input ids, local positions) of a chain that ends in a row after these drafts, as vLLM lays it out."""
        ids = torch.tensor([0, *row_drafts], dtype=torch.int32, device=self.device)
        return ids, torch.arange(len(ids), dtype=torch.int32, device=self.device)


SIZES = [[9, 0, 16, 1, 5, 12], [1, 33], [0, 0, 7]]


def settings(device) -> list[torch.Tensor]:
    return [column.contiguous().to(device) for column in torch.tensor(PENALTIES).T]


def committed_penalised(batch: Batch) -> torch.Tensor:
    """The logits with the penalties of committed tokens, which vLLM's kernel makes."""
    logits = batch.logits.clone()
    for row, request, slot, _ in batch.each():
        naive.penalise(logits[row], batch.prompts[request], batch.outputs[request], *PENALTIES[slot])
    return logits


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_penalties_against_the_oracle(device, sizes):
    """Random trees over four kinds of tokens: every row as if its path had been committed, whole or a part of the requests. Seeds 0, 1."""
    for seed in (0, 1):
        batch = Batch(sizes, seed, device)
        wanted = batch.logits.clone()
        for row, request, slot, drafts in batch.each():
            naive.penalise(wanted[row], batch.prompts[request], batch.outputs[request] + drafts, *PENALTIES[slot])
        base = committed_penalised(batch)
        for start, end in ((0, len(sizes)), (len(sizes) // 2, len(sizes))):
            lo = sum(batch.rows[:start])
            found = base[lo:].clone()
            PathPenalties(batch.logits[lo:], batch.path_rows(start, end), *settings(device), batch.counts).put(found)
            assert torch.allclose(found, wanted[lo:], rtol=1e-6, atol=1e-6), f"{sizes}, seed {seed}, from {start}"


def test_penalties_are_those_of_vllm_bit_for_bit(device):
    """Each row against vLLM's kernel on the chain that is its path; requests without penalties keep their bits. Seed 3."""
    vllm = pytest.importorskip("vllm.v1.worker.gpu.sample.penalties")
    batch = Batch([9, 0, 16, 1, 5, 12], 3, device)
    prompt_mask = torch.zeros(SLOTS, (VOCAB + 31) // 32, dtype=torch.int32)
    for slot, prompt in zip(batch.slots.tolist(), batch.prompts, strict=True):
        for token in prompt:
            prompt_mask[slot, token // 32] |= 1 << (token % 32)
    shared = (*settings(device), prompt_mask.to(device), batch.counts)
    slots = torch.cat([batch.slots[r].expand(n) for r, n in enumerate(batch.rows)]).int().to(device)
    ours, zeros = batch.logits.clone(), torch.zeros(len(slots), dtype=torch.int32, device=device)
    penalties = PathPenalties(ours, batch.path_rows(), *settings(device), batch.counts)
    vllm.apply_penalties(ours, slots, zeros, zeros, *shared)
    penalties.put(ours)
    for row, _, slot, drafts in batch.each():
        ids, local = batch.chain(drafts)
        theirs = batch.logits[row].expand(len(ids), -1).clone()
        vllm.apply_penalties(theirs, torch.full_like(local, slot), ids, local, *shared)
        assert torch.equal(ours[row], theirs[-1]), f"row {row}, slot {slot}"


def test_siblings_and_rejected_branches_count_nothing(device):
    """Other tokens at every node that is no ancestor change no bit of a row. Seed 4."""
    batch = Batch([24], 4, device)
    batch.slots = torch.tensor([5])

    def run() -> torch.Tensor:
        found = batch.logits.clone()
        PathPenalties(found, batch.path_rows(), *settings(device), batch.counts).put(found)
        return found

    before = run()
    for node in (5, 11, 23):
        path = path_to(batch.trees[0], node)
        tokens = batch.forest.token.clone()
        others = [n for n in range(24) if n not in path]
        batch.forest.token[others] = (tokens[others] + 1) % batch.kinds
        assert torch.equal(run()[node], before[node])
        batch.forest.token.copy_(tokens)


WORDS = [[[1], [2, 3]], [[0, 0]], [], [[1, 2, 3], [3]], [[2, 2, 2, 2, 2], [0, 1]], [[3, 0], [1, 1, 0, 2]]]


def word_tables(device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, offsets, numbers) as vLLM keeps them; what is behind a request's own is garbage."""
    words, offsets = torch.full((SLOTS, 20), 3, dtype=torch.int32), torch.full((SLOTS, 9), 7, dtype=torch.int32)
    for slot, of_slot in enumerate(WORDS):
        flat = [token for word in of_slot for token in word]
        words[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        offsets[slot, : len(of_slot) + 1] = torch.tensor([0, *(len(word) for word in of_slot)]).cumsum(0)
    return words.to(device), offsets.to(device), torch.tensor([len(w) for w in WORDS], dtype=torch.int32, device=device)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bad_words_against_the_oracle_and_vllm(device, sizes):
    """Words that begin in the output and go on along a path, never in the prompt; the rest of the logits keeps its bits. Seeds 5, 6."""
    vllm = pytest.importorskip("vllm.v1.worker.gpu.sample.bad_words")
    tables = word_tables(device)
    for seed in (5, 6):
        batch = Batch(sizes, seed, device)
        tokens = (batch.committed, batch.lengths(batch.prompts), batch.total)
        wanted, found = batch.logits.clone(), batch.logits.clone()
        ban_words(found, batch.path_rows(), *tables, 3, *tokens)
        for row, request, slot, drafts in batch.each():
            naive.ban(wanted[row], batch.outputs[request] + drafts, WORDS[slot])
            ids, local = batch.chain(drafts)
            theirs = batch.logits[row].expand(len(ids), -1).clone()
            vllm.apply_bad_words(theirs, torch.full_like(local, slot), *tables, *tokens, ids, local, 3)
            assert torch.equal(theirs[-1], wanted[row]), f"the oracle, row {row}, seed {seed}"
        assert torch.equal(found, wanted), f"{sizes}, seed {seed}"
        assert max(sizes) < 9 or torch.isinf(found).any(), "nothing was banned"


# start, natural end and forced end
MARKERS = [([1], [3, 0], [2, 3, 0]), ([1], [2, 2], [2, 2]), ([0, 1], [3, 1], [3])]


@pytest.mark.parametrize("markers", MARKERS, ids=str)
def test_budgets_against_the_oracle_and_vllm(device, markers):
    """Reasoning that begins, ends, is cut off and continues its forced marker inside a path. Seeds 7 to 10."""
    vllm = pytest.importorskip("vllm.v1.worker.gpu.sample.thinking_budget")
    marker_tensors = [torch.tensor(marker, dtype=torch.int32, device=device) for marker in markers]
    budget = torch.tensor([0, 1, -1, 3, 5, 2], dtype=torch.int32, device=device)
    forced = 0
    for seed in (7, 8, 9, 10):
        batch = Batch([9, 0, 16, 1, 33, 12], seed, device)
        committed, total = batch.committed, batch.total
        caches = [torch.full((SLOTS,), value, dtype=torch.int32, device=device) for value in (-1, -1, 0)]
        slots = batch.slots.int().to(device)
        theirs = (slots, budget, committed, total, *caches, *marker_tensors)

        def run_vllm(logits, rows, ids, local, theirs=theirs):
            req_ids, limit, tokens, lengths, *rest = theirs
            vllm.apply_thinking_budget(logits, req_ids, rows, limit, tokens, lengths, ids, local, *rest)

        found = batch.logits.clone()
        of_row = torch.cat([batch.slots[r].expand(n) for r, n in enumerate(batch.rows)]).int().to(device)
        local = torch.cat([torch.arange(n, dtype=torch.int32) for n in batch.rows]).to(device)
        run_vllm(found, of_row, torch.zeros_like(local), torch.where(local > 0, -(2**30), local))
        force_end(found, batch.path_rows(), budget, committed, total, caches[0], caches[1], *marker_tensors)
        for row, request, slot, drafts in batch.each():
            tokens = batch.prompts[request] + batch.outputs[request] + drafts
            token = naive.forced_token(tokens, int(budget[slot]), *markers)
            wanted = batch.logits[row].clone()
            if token is not None:
                wanted[token], forced = 1e9, forced + 1
            ids, positions = batch.chain(drafts)
            chain = batch.logits[row].expand(len(ids), -1).clone()
            run_vllm(chain, torch.full_like(positions, slot), ids, positions)
            assert torch.equal(chain[-1], wanted), f"the oracle, row {row}, seed {seed}"
            assert torch.equal(found[row], wanted), f"row {row}, seed {seed}"
    assert forced > 20, "little was forced"
