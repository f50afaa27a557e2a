"""The joint distribution of the next three tokens is the target's, whatever was drafted.

A toy target over six tokens, known exactly; a hundred thousand requests with a seed each; vLLM's noise, keyed by seed and position; the
walk as the engine runs it, round after round until three tokens are there. No draft probability enters: a node's sample is the target's,
and the tree only decides how many of them one forward yields.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bole_vllm.kernels.topology import Forest
from bole_vllm.kernels.walk import walk_tree

gumbel = pytest.importorskip("vllm.v1.worker.gpu.sample.gumbel")
WORD = 2**32 - 1

VOCAB, REQUESTS, WANTED, PROMPT = 6, 100_000, 3, 10
AT_ONCE = 20_000
FIRST_SEEDS = (1, 1_000_003, 77_000_017)
# chosen before any result was seen; 18 cases, all of them with fixed seeds
LEAST_P = 1e-3
TREES = {"chain": [-1, 0, 1, 2], "bush": [-1, 0, 1, 0, 0, 1, 3], "one branch": [-1, 0, 0, 2, 3]}


def mixed(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """One step of 32-bit MurmurHash3 on int64 tensors."""
    key = (key * 0xCC9E2D51) & WORD
    key = (((key << 15) | (key >> 17)) & WORD) * 0x1B873593 & WORD
    h = h ^ key
    return (((h << 13) | (h >> 19)) & WORD) * 5 + 0xE6546B64 & WORD


def uniforms(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[rows, V] in (0, 1): the hash of seed, position and token, of 16 bytes in all."""
    h = mixed(torch.zeros_like(seed), seed & WORD)
    h = mixed(h, seed >> 32)
    h = mixed(h, position)[:, None]
    h = mixed(h, torch.arange(VOCAB, device=seed.device)) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * factor & WORD
    return ((h ^ (h >> 16)).double() + 0.5) * 2.0**-32


def samples(logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One of the row's distribution each: logits [rows, V] at temperature 1, seed and position [rows].

    What is largest with Gumbel noise, as in vllm.v1.worker.gpu.sample.gumbel.
    """
    return (logits - torch.log(-torch.log1p(-uniforms(seed, position)))).argmax(1)


def target(device) -> torch.Tensor:
    """[V, V, V] logits of a token after two others; some are nearly certain, some tokens nearly impossible. Seed 12."""
    return (1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(12))).to(device)


def ranks(drafter: str, logits: torch.Tensor) -> torch.Tensor:
    """[..., V] tokens in the order that the drafter prefers them."""
    if drafter == "the target's best":
        return logits.argsort(-1, descending=True)
    if drafter == "always wrong":  # the least likely first
        return logits.argsort(-1)
    gen = torch.Generator(device=logits.device).manual_seed(13)
    return (logits + 2 * torch.randn(logits.shape, generator=gen, device=logits.device)).argsort(-1, descending=True)


def draft(parents: list[int], order: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy drafts: (tokens [R, T], -1 at the root, the two tokens before every node's sample [R, T, 2]); siblings by rank."""
    tokens = [torch.full_like(context[:, 0], -1)]
    contexts, born = [context], [0] * len(parents)
    for parent in parents[1:]:
        above = contexts[parent]
        token = order[above[:, 0], above[:, 1], born[parent]]
        born[parent] += 1
        tokens.append(token)
        contexts.append(torch.stack([above[:, 1], token], 1))
    return torch.stack(tokens, 1), torch.stack(contexts, 1)


def forest_of(parents: list[int], tokens: torch.Tensor) -> Forest:
    """All requests with this topology."""
    requests, nodes = tokens.shape
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    forest = Forest.allocate(1, nodes, max(depths), tokens.device)
    forest.node_offset = torch.arange(requests + 1, dtype=torch.int32, device=tokens.device) * nodes
    forest.token_start = forest.node_offset[:-1]
    forest.parent = torch.tensor(parents, dtype=torch.int32, device=tokens.device).repeat(requests)
    forest.depth = torch.tensor(depths, dtype=torch.int32, device=tokens.device).repeat(requests)
    forest.token = tokens.flatten().int()
    return forest


def decode(parents: list[int], drafter: str, seeds: torch.Tensor, spoil=None) -> tuple[torch.Tensor, float]:
    """([R, WANTED] tokens, tokens a round). `spoil` may change a round's samples, given the forest."""
    parts = [decode_some(parents, drafter, part, spoil) for part in seeds.split(AT_ONCE)]
    return torch.cat([tokens for tokens, _ in parts]), sum(per_round for _, per_round in parts) / len(parts)


def decode_some(parents: list[int], drafter: str, seeds: torch.Tensor, spoil) -> tuple[torch.Tensor, float]:
    """`decode` of as many requests as a round holds."""
    table, device = target(seeds.device), seeds.device
    order = ranks(drafter, table)
    found = torch.full((len(seeds), WANTED), -1, dtype=torch.int64, device=device)
    context = torch.tensor([2, 4], device=device).expand(len(seeds), 2)
    have, emitted, rounds = torch.zeros_like(seeds), 0, 0
    active = torch.arange(len(seeds), device=device)
    while len(active):
        tokens, contexts = draft(parents, order, context[active])
        forest = forest_of(parents, tokens)
        nodes, depth = len(parents), forest.depth.view(len(active), -1)
        # a row's position is that of the token it reads
        position = PROMPT - 1 + have[active][:, None] + depth
        logits = table[contexts[..., 0], contexts[..., 1]].view(-1, VOCAB)
        sampled = samples(logits, seeds[active].repeat_interleave(nodes), position.flatten())
        sampled = sampled if spoil is None else spoil(sampled, forest)
        steps = forest.max_depth + 1
        out = torch.empty(len(active), steps, dtype=torch.int64, device=device)
        path, count, length = torch.empty_like(out, dtype=torch.int32), *torch.empty(2, len(active), dtype=torch.int32, device=device)
        walk_tree(sampled, forest.node_offset, forest, None, out, count, path, length)
        emitted, rounds = emitted + int(count.sum()), rounds + len(active)
        for step in range(steps):
            place = have[active] + step
            new = (step < count) & (place < WANTED)
            found[active[new], place[new]] = out[new, step]
        have[active] += count
        both = torch.cat([context[active], out], 1)
        context = context.clone()
        context[active] = torch.stack([both.gather(1, count[:, None].long() + i)[:, 0] for i in (0, 1)], 1)
        active = active[have[active] < WANTED]
    return found, emitted / rounds


def p_value(tokens: torch.Tensor) -> float:
    """Of a chi-square test of the triples against the target's joint distribution; rare triples count as one."""
    step = torch.log_softmax(target(tokens.device).double(), -1).exp()
    first = step[2, 4]
    joint = (first[:, None, None] * step[4][:, :, None] * step).flatten()
    counts = torch.bincount((tokens * torch.tensor([VOCAB**2, VOCAB, 1], device=tokens.device)).sum(1), minlength=VOCAB**3).double()
    expected = joint * len(tokens)
    rare = expected < 10
    expected, counts = (torch.cat([t[~rare], t[rare].sum()[None]]) for t in (expected, counts))
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0), chi_square.float().cpu() / 2).item()


DRAFTERS = ("the target's best", "a mediocre one", "always wrong")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tree", ["bush", "one branch"])
def test_joint_distribution_of_three_tokens(device, tree, drafter):
    """100,000 seeded requests for each of three ranges of seeds; p-values of these are fixed, and above 0.001."""
    found = []
    for first in FIRST_SEEDS:
        tokens, per_round = decode(TREES[tree], drafter, torch.arange(first, first + REQUESTS, device=device))
        found.append(p_value(tokens))
        assert (per_round > 1.5) == (drafter != "always wrong"), per_round
    print(f"{tree}, {drafter}: p = {', '.join(f'{p:.3f}' for p in found)}")
    assert min(found) > LEAST_P


def test_every_request_says_what_plain_decoding_says(device):
    """Token for token under its seed, for every tree and drafter: what is drafted cannot be told from the output."""
    seeds = torch.arange(5_000, 25_000, device=device)
    plain, _ = decode([-1], "always wrong", seeds)
    for parents in TREES.values():
        for drafter in DRAFTERS:
            assert torch.equal(decode(parents, drafter, seeds)[0], plain)


def test_the_noise_is_the_samplers(device):
    """vLLM's sampling kernel takes the tokens that are taken here. Seed 14."""
    logits = target(device).view(-1, VOCAB)
    rows = len(logits)
    seed, position = torch.arange(rows, device=device) * 7919 << 20, torch.arange(rows, device=device) + 5
    slots, ones = torch.arange(rows, dtype=torch.int32, device=device), torch.ones(rows, device=device)
    theirs = gumbel.gumbel_sample(logits, slots, ones, seed, position, apply_temperature=False, is_drafting=False, use_fp64=False)
    assert torch.equal(theirs, samples(logits, seed, position))


def test_a_wrong_rule_is_noticed(device):
    """Taking the first child now and then, as a rule with draft probabilities might, moves the distribution: the test above can fail."""

    def favour_first_child(sampled: torch.Tensor, forest: Forest) -> torch.Tensor:
        roots = forest.node_offset[:-1].long()
        every_hundredth = roots[torch.arange(len(roots), device=roots.device) % 50 == 0]
        return sampled.index_copy(0, every_hundredth, forest.token[every_hundredth + 1].long())

    seeds = torch.arange(1, 1 + REQUESTS, device=device)
    assert p_value(decode(TREES["bush"], "a mediocre one", seeds, favour_first_child)[0]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_temperature_inside_the_sampling_kernel(device, dtype):
    """The tokens of vLLM's own way, which divides a copy of the logits first: temperatures 0 to 2, 63 rows (4,096 on a GPU). Seed 13."""
    gen, rows, vocab = torch.Generator().manual_seed(13), 4096 if device.type == "cuda" else 63, 1500
    temperature = torch.tensor([0.0, 0.3, 0.7, 0.8, 1.0, 1.37, 2.0], device=device)
    logits = (4 * torch.randn(rows, vocab, generator=gen)).to(dtype).to(device)
    slot = (torch.arange(rows) % len(temperature)).int().to(device)
    seeds = torch.randint(2**62, temperature.shape, generator=gen).to(device)
    position = torch.arange(rows, device=device) // 3
    fixed = {"is_drafting": False, "use_fp64": False}
    divided = logits.float().clone()
    gumbel.apply_temperature(divided, slot, temperature)
    wanted = gumbel.gumbel_sample(divided, slot, temperature, seeds, position, apply_temperature=False, **fixed)
    found = gumbel.gumbel_sample(logits, slot, temperature, seeds, position, apply_temperature=True, **fixed)
    assert torch.equal(found, wanted) and wanted.unique().numel() > rows / 8


@pytest.mark.parametrize("processed", [False, True])
def test_noise_for_what_is_left(device, processed):
    """vLLM's own way cuts whole rows and gives every token its noise; here what is left gets it: the same tokens. 48 rows (2,048 on a
    GPU) without equal logits, of requests with different settings, a greedy one among them. Seed 14."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    from bole_vllm.candidate_sampler import most_candidates, sample_candidates

    gen, rows, vocab = torch.Generator().manual_seed(14), 2048 if device.type == "cuda" else 48, 2100
    # of each request: temperature, top_k (the vocabulary: none), top_p, min_p, seed; held as vLLM's SamplingStates holds them
    settings = [
        (0.7, 20, 0.95, 0.0, 90),
        (0.0, vocab, 1.0, 0.0, 91),
        (1.0, 5, 1.0, 0.0, 92),
        (1.3, 50, 0.9, 0.05, 93),
        (0.6, 64, 0.3, 0.0, 94),
    ]
    settings.append((1.0, vocab, 1.0, 0.0, 95))
    names = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32, "seeds": torch.int64}
    held = {name: torch.tensor(values, dtype=dtype) for (name, dtype), values in zip(names.items(), zip(*settings))}
    states = SimpleNamespace(**{name: SimpleNamespace(np=value.numpy(), gpu=value.to(device)) for name, value in held.items()})
    assert most_candidates(states, np.arange(6)) is None, "a request without a top_k"
    most = most_candidates(states, np.arange(5))
    slot = (torch.arange(rows) % 5).int().to(device)
    position = torch.arange(rows, device=device) // 5
    logits = (4 * torch.randn(rows, vocab, generator=gen)).to(device)
    tempered, per_row = logits.clone(), slot.long()
    gumbel.apply_temperature(tempered, slot, states.temperature.gpu)
    apply_min_p(tempered, slot, states.min_p.gpu)
    cut = ops.apply_top_k_top_p if device.type == "cuda" else ops.apply_top_k_top_p_pytorch
    left = cut(tempered.clone(), states.top_k.gpu[per_row], states.top_p.gpu[per_row])
    fixed = {"apply_temperature": False, "is_drafting": False}
    wanted = gumbel.gumbel_sample(left, slot, states.temperature.gpu, states.seeds.gpu, position, **fixed)
    found = sample_candidates(tempered if processed else logits, slot, position, states, most, processed, use_fp64=False)
    assert most == 64 and torch.equal(found, wanted)
