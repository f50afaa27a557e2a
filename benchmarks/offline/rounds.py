"""Serving a batch step by step, and the window of steps that is timed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from examples.demo.compare import bf16_ulp

# of a sampled token's contenders, those looked at and those kept: noise lifts unlikely tokens above likely ones
CONSIDERED, KEPT = 256, 20
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


def scores(llm: Any, prompts: list[list[int]], temperature: float, max_tokens: int) -> list[dict[str, Any]]:
    """What the engine chose its tokens by, prompt i under seed i: [{"tokens": [n], "top": [n][KEPT] of [token, score], "ulp": [n],
    "greedy": bool}], best first.

    Scores: the largest logits; with a temperature, logit / temperature and vLLM's own noise, the largest among the CONSIDERED tokens with
    the largest logits. ulp: the distance of bfloat16 numbers at the largest logit, by the same scale. Not timed. The engine must have
    `logprobs_mode="raw_logits"` and `max_logprobs` CONSIDERED. `llm`: vllm.LLM.
    """
    from vllm import SamplingParams

    # one list of numbers a request: an object for every number takes seconds
    fixed = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, "flat_logprobs": True}
    considered = CONSIDERED if temperature else KEPT
    params = [SamplingParams(seed=seed, logprobs=considered, **fixed) for seed in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    found = []
    for seed, (ids, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens, flat = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        token, logit = _places(flat)
        score = _with_noise(llm, token, logit, temperature, seed, len(ids)) if temperature else logit
        _check(token, score, tokens)
        kept = score.topk(min(KEPT, score.shape[1]), dim=1)
        pairs = zip(token.gather(1, kept.indices).tolist(), kept.values.tolist(), strict=True)
        top = [[[t, s] for t, s in zip(*place) if s > -math.inf] for place in pairs]
        ulp = [bf16_ulp(largest) / (temperature or 1.0) for largest in logit.amax(1).tolist()]
        found.append({"tokens": tokens, "top": top, "ulp": ulp, "greedy": not temperature})
    return found


def _places(flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, logits) [places, most of a place], -inf beyond a place's own: a sampled token may come besides the largest."""
    sizes = torch.tensor(flat.end_indices) - torch.tensor(flat.start_indices)
    inside = torch.arange(int(sizes.max())) < sizes[:, None]
    token, logit = torch.zeros(inside.shape, dtype=torch.int64), torch.full(inside.shape, -math.inf)
    token[inside], logit[inside] = torch.tensor(flat.token_ids), torch.tensor(flat.logprobs)
    return token, logit


def _check(token: torch.Tensor, score: torch.Tensor, tokens: Sequence[int]) -> None:
    """ValueError where a token is not the best by the scores: then they are not what it was chosen by (another seed, position or noise)."""
    own = score.masked_fill(token != torch.tensor(tokens)[:, None], -math.inf).amax(1)
    wrong = (score.amax(1) - own > SCORE_TOLERANCE).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"token {wrong[0]}, {tokens[wrong[0]]}, is not the best by its own scores")


def _with_noise(llm: Any, token: torch.Tensor, logit: torch.Tensor, temperature: float, seed: int, length: int) -> torch.Tensor:
    """Logits as the sampler saw them. Token j of a request with L prompt tokens is sampled at the row of position L + j - 1."""
    from examples.demo.scores import gumbel_noise

    config = llm.llm_engine.vllm_config
    device = torch.device(config.device_config.device)
    position = torch.arange(length - 1, length - 1 + len(token), device=device)
    noise = gumbel_noise(torch.full_like(position, seed), position, config.model_config.get_vocab_size())
    return logit / temperature + noise.gather(1, token.to(device)).cpu()
