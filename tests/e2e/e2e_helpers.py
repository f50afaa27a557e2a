"""Requests, references and scripted drafts for the end-to-end tests."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

MODEL = os.environ.get("BOLE_DEMO_MODEL", str(Path(__file__).resolve().parents[2] / "examples" / "demo_model"))
VOCAB = 4096
# (held-out prompt, tokens of it): of each length the first prompt whose 32 greedy tokens are all at least 1/4 above the runner-up, four
# units of bfloat16 for a logit below 16, and of at least 16 kinds. More rows in a forward round differently and may turn a tie.
PROMPTS = ((2, 20), (38, 27), (33, 34), (4, 41))
MIN_GAP = 0.1
# logits are bfloat16: a unit of those up to 16 is 1/16, and two engines' rows may round differently
TOLERANCE = 0.13
# a tree of eight nodes, four of them leaves
BUSH = [-1, 0, 0, 0, 1, 1, 2, 3]
# a regular expression of seven numbers, and a schema of an object, that a small model finishes
NUMBERS = r"(\d\d?, ){6}\d"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def text_tokens(index: int, length: int, start: int = 0) -> list[int]:
    """`length` tokens of held-out prompt `index`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{MODEL}/tokenizer.json")
    prompts = json.loads(Path(MODEL, "val_prompts.json").read_text())
    ids: list[int] = []
    while len(ids) < start + length:  # short prompts are continued with the next one
        ids += tokenizer.encode(prompts[index % len(prompts)]).ids
        index += 1
    return ids[start : start + length]


def leaves(parents: list[int]) -> list[int]:
    """Nodes of a tree without children."""
    return [node for node in range(1, len(parents)) if node not in parents]


def each_leaf(parents: list[int]) -> Callable[[int], tuple[list[int], int]]:
    """A plan for Script: the same tree in every round, its leaves win in turn."""
    ends = leaves(parents)
    return lambda turn: (parents, ends[turn % len(ends)])


def params(max_tokens: int, temperature: float = 0.0, seed: int = 11, **kwargs):
    from vllm import SamplingParams

    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, **{"ignore_eos": True, **kwargs})


def structured(**kind) -> dict:
    """Arguments of `params` for a grammar of this kind."""
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**kind), "ignore_eos": False}


def serve(llm, prompts: list[list[int]], sampling, **kwargs) -> list:
    """vLLM's outputs per prompt; `sampling` is one SamplingParams or a list of them, `kwargs` are of LLM.generate."""
    return llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False, **kwargs)


def tokens_of(outputs: list) -> list[list[int]]:
    """Token ids of each output's first sample."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(llm, prompts: list[list[int]], sampling, **kwargs) -> list[list[int]]:
    """Token ids per prompt of `serve`."""
    return tokens_of(serve(llm, prompts, sampling, **kwargs))


def settled(llm, prompts: list[list[int]], max_tokens: int, **kwargs) -> list[list[int]]:
    """Greedy token ids per prompt of a reference engine; a close call is an error: another checkpoint may need other PROMPTS."""
    outputs = serve(llm, prompts, params(max_tokens, logprobs=2), **kwargs)
    for prompt, output in enumerate(outputs):
        for position, candidates in enumerate(output.outputs[0].logprobs):
            best, second = sorted((c.logprob for c in candidates.values()), reverse=True)[:2]
            assert best - second > MIN_GAP, f"prompt {prompt}, token {position}: the two best logits are {best - second:.4f} apart"
    return tokens_of(outputs)


def runner(llm):
    """The in-process model runner."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def graph_managers(llm) -> dict[str, object]:
    """Part of a round -> the manager of its CUDA graphs; parts without one are left out."""
    run = runner(llm)
    managers = {
        "target": run.cudagraph_manager,
        "commit": getattr(getattr(run.model_state, "commit_graphs", None), "manager", None),
        "draft prefill": run.speculator.prefill_cudagraph_manager,
        "tree": run.speculator.decode_cudagraph_manager,
    }
    return {name: manager for name, manager in managers.items() if manager is not None}


def stats(llm) -> dict:
    return llm.collective_rpc("bole_stats")[0]


@contextmanager
def counted(llm) -> Iterator[Counter]:
    """What the engine's counters have gained in between, there from the end on."""
    gained, before = Counter(), stats(llm)
    yield gained
    after = stats(llm)
    gained.update({name: after[name] - before[name] for name in ("accepted", "branched", "spine_hits")})


@dataclass
class Script:
    """Replaces the drafter's trees by trees that hold a known continuation at a chosen leaf.

    Everything else runs as it is: draft prefill, tree store, verification, walk, commit. `plan(round)` gives the tree of
    a round of a request: (parents, winning leaf or None). The winning leaf's path holds the true next tokens, every
    other node a token that is not the true one at its depth.
    """

    llm: object
    sequences: list[list[int]]  # prompt + true continuation of every request
    plan: object
    rounds: dict[int, int] = field(default_factory=dict)

    def __enter__(self) -> Script:
        speculator = runner(self.llm).speculator
        self._saved = speculator._grow
        speculator._grow = self._grow
        return self

    def __exit__(self, *_exc) -> None:
        del runner(self.llm).speculator._grow

    def _grow(self, shape, num_reqs, skip_attn):
        from bole_vllm.kernels.draft import Tree

        token = torch.full((num_reqs, shape.num_nodes), -1, dtype=torch.int32)
        parent = torch.zeros(num_reqs, shape.num_nodes, dtype=torch.int32)
        parent[:, 0] = -1
        logprob = torch.zeros(num_reqs, shape.num_nodes)
        for r in range(num_reqs):
            tokens, parents = self._tree_of(r, shape.num_nodes)
            token[r, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            parent[r, : len(parents)] = torch.tensor(parents, dtype=torch.int32)
        return Tree(token, parent, logprob, shape.num_nodes)

    def _tree_of(self, r: int, num_nodes: int) -> tuple[list[int], list[int]]:
        run = runner(self.llm)
        slot = int(run.speculator.idx_mapping[r])
        total = int(run.req_states.total_len.gpu[slot])
        seen = run.req_states.all_token_ids.gpu[slot, :total].tolist()
        match = [i for i, s in enumerate(self.sequences) if s[:total] == seen]
        future = self.sequences[match[0]][total:] if match else []
        key = match[0] if match else -1
        self.rounds[key] = self.rounds.get(key, -1) + 1
        parents, leaf = self.plan(self.rounds[key])
        winners = set()
        while leaf is not None and leaf > 0:
            winners.add(leaf)
            leaf = parents[leaf]
        depth = [0] * len(parents)
        tokens = [-1] * len(parents)
        for node in range(1, len(parents)):
            depth[node] = depth[parents[node]] + 1
            true = future[depth[node] - 1] if depth[node] <= len(future) else 0
            wins = node in winners and depth[node] <= len(future)
            tokens[node] = true if wins else (true + 1 + node) % VOCAB
        return tokens[:num_nodes], parents[:num_nodes]
