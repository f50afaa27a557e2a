"""Serving a batch step by step, and the window of steps that is timed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


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


def serve(engine: Any, prompts: list[list[int]], temperature: float, max_tokens: int) -> list[Step]:
    """Serve the prompts together, request i with seed i, exactly `max_tokens` tokens each. `engine`: vllm's LLMEngine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for request, ids in enumerate(prompts):
        params = SamplingParams(
            temperature=temperature, seed=request, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
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


def logits(llm: Any, prompts: list[list[int]], max_tokens: int, top: int) -> list[dict[str, Any]]:
    """Greedy tokens of each prompt with the `top` largest logits at each: [{"tokens": [n], "top": [n][about top] of [token, logit]}].

    Not timed. The engine must have `logprobs_mode="raw_logits"`. `llm`: vllm.LLM.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=top)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "top": [[[token, entry.logprob] for token, entry in place.items()] for place in output.outputs[0].logprobs],
        }
        for output in outputs
    ]
