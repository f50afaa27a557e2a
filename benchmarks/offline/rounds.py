"""Serving a batch step by step, and the window of steps that is timed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from examples.demo.compare import bf16_ulp

# rounding of logit / temperature + noise, computed here and in the sampler
SCORE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Step:
    """One engine step that emitted tokens."""

    # seconds, when its output had arrived
    time_s: float
    # request -> its new tokens
    tokens: dict[int, list[int]]
    # requests that ended with it
    finished: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Window:
    """Rounds in which the whole batch decoded.

    tokens: emitted (accepted drafts and bonus tokens) by all requests; rounds: engine steps; served: requests that emitted something,
    summed over the rounds.
    """

    tokens: int
    rounds: int
    served: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def rounds_per_s(self) -> float:
        return self.rounds / self.seconds

    @property
    def mat(self) -> float:
        """Mean tokens that a request emits in a round, bonus token included."""
        return self.tokens / self.served


def window(steps: list[Step], batch: int) -> Window | None:
    """From the step that brought the last request its first token, its own tokens not counted, to the last one before a request ended.

    None where no step lies between: the requests are too short for their drafts.
    """
    started: set[int] = set()
    first = last = None
    for index, step in enumerate(steps):
        if step.finished:
            break
        started |= step.tokens.keys()
        if first is None and len(started) == batch:
            first = index
        last = index
    if first is None or last == first:
        return None
    counted = steps[first + 1 : last + 1]
    return Window(
        tokens=sum(len(new) for step in counted for new in step.tokens.values()),
        rounds=len(counted),
        served=sum(len(step.tokens) for step in counted),
        seconds=steps[last].time_s - steps[first].time_s,
    )


def joined(windows: Iterable[Window | None]) -> Window | None:
    """The windows of several batches as one; None if none of them was one."""
    found = [one for one in windows if one is not None]
    if not found:
        return None
    return Window(*(sum(getattr(one, name) for one in found) for name in ("tokens", "rounds", "served", "seconds")))


def texts(steps: list[Step], batch: int) -> list[list[int]]:
    """All tokens of each request."""
    return [[token for step in steps for token in step.tokens.get(request, ())] for request in range(batch)]


def serve(engine: Any, prompts: list[list[int]], temperature: float, max_tokens: int, seeds: Sequence[int]) -> list[Step]:
    """Serve the prompts together, each with its seed, exactly `max_tokens` tokens each. `engine`: vllm's LLMEngine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for request, ids in enumerate(prompts):
        params = SamplingParams(
            temperature=temperature, seed=seeds[request], max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        engine.add_request(str(request), {"prompt_token_ids": ids}, params)
    steps = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        tokens = {int(one.request_id): list(one.outputs[0].token_ids) for one in outputs if one.outputs[0].token_ids}
        finished = frozenset(int(one.request_id) for one in outputs if one.finished)
        if tokens or finished:
            steps.append(Step(now, tokens, finished))
    return steps


def scores(llm: Any, prompts: list[list[int]], temperature: float, max_tokens: int, top: int) -> list[dict[str, Any]]:
    """What the engine chose its tokens by, prompt i under seed i: [{"tokens": [n], "top": [n][about top] of [token, score], "ulp": [n],
    "greedy": bool}].

    Scores: the largest logits; with a temperature, logit / temperature and vLLM's own noise, of the tokens with the largest logits. ulp:
    the distance of bfloat16 numbers at the largest logit, by the same scale. Not timed. The engine must have
    `logprobs_mode="raw_logits"`. `llm`: vllm.LLM.
    """
    from vllm import SamplingParams

    fixed = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, "logprobs": top}
    params = [SamplingParams(seed=seed, **fixed) for seed in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    found = []
    for seed, (ids, output) in enumerate(zip(prompts, outputs, strict=True)):
        places = [[[token, entry.logprob] for token, entry in place.items()] for place in output.outputs[0].logprobs]
        ulps = [bf16_ulp(max(logit for _, logit in place)) / (temperature or 1.0) for place in places]
        if temperature:
            places = _with_noise(llm, places, temperature, seed, len(ids))
        _check(places, output.outputs[0].token_ids)
        found.append({"tokens": list(output.outputs[0].token_ids), "top": places, "ulp": ulps, "greedy": not temperature})
    return found


def _check(places: list[list[list]], tokens: Sequence[int]) -> None:
    """ValueError where a token is not the best by the scores: then they are not what it was chosen by (another seed, position or noise)."""
    for position, (place, token) in enumerate(zip(places, tokens, strict=True)):
        best = dict(place)
        if max(best.values()) - best.get(token, -math.inf) > SCORE_TOLERANCE:
            raise ValueError(f"token {position}, {token}, is not the best by its own scores")


def _with_noise(llm: Any, places: list[list[list]], temperature: float, seed: int, length: int) -> list[list[list]]:
    """Logits as the sampler saw them. Token j of a request with L prompt tokens is sampled at the row of position L + j - 1."""
    import torch

    from examples.demo.scores import gumbel_noise

    config = llm.llm_engine.vllm_config
    device = torch.device(config.device_config.device)
    position = torch.arange(length - 1, length - 1 + len(places), device=device)
    noise = gumbel_noise(torch.full_like(position, seed), position, config.model_config.get_vocab_size())
    row = torch.tensor([j for j, place in enumerate(places) for _ in place], device=device)
    column = torch.tensor([token for place in places for token, _ in place], device=device)
    at_token = iter(noise[row, column].tolist())
    return [[[token, logit / temperature + next(at_token)] for token, logit in place] for place in places]
