"""Time by part of a round: CUDA events around the runner's methods, a clock on the CPU.

Events, not a profiler: the profiler makes every launch slower, and what is asked here is how long the device waits between them. Parts are
measured after an arm's timed points; wrapped methods cost a few us of host time a round, so they go before the next arm's.

    prepare   inputs, metadata, positions (execute_model outside the forward)
    verify    the target's forward and its logits
    sample    sampling, walk or rejection
    commit    request states, recurrent states, KV moves
    draft     the drafter
    other     the rest of the time from one round's start to the next one's
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

PARTS = ("prepare", "verify", "sample", "commit", "draft")
SCOPE = "part:"
_KEY = "_benchmark_parts"


@dataclass
class Span:
    """One call of a wrapped method, and the wrapped calls inside it. Marks are CUDA events, or seconds."""

    part: str
    start: Any
    end: Any = None
    inner: list[Span] = field(default_factory=list)


@dataclass
class Round:
    """One engine step."""

    start: Any
    # requests, if all of them decode; None: a step with a prompt in it
    decodes: int | None
    spans: list[Span] = field(default_factory=list)


def parts_of(this: Round, after: Round) -> dict[str, float]:
    """Milliseconds by part of a round that ends where the next one starts. A call inside another is its own part's, not the outer one's."""
    parts = dict.fromkeys(PARTS, 0.0)

    def add(span: Span) -> None:
        parts[span.part] += _ms(span.start, span.end) - sum(_ms(inner.start, inner.end) for inner in span.inner)
        for inner in span.inner:
            add(inner)

    for span in this.spans:
        add(span)
    total = _ms(this.start, after.start)
    return {**parts, "other": total - sum(parts.values()), "round": total}


def _ms(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


class PartTimer:
    """Wraps a worker's runner until `remove`; records while `on`, names scopes for a profiler while `profiling`."""

    def __init__(self, runner: Any) -> None:
        self.on = self.profiling = False
        self.on_gpu = runner.device.type == "cuda"
        self.rounds: list[Round] = []
        self._open: list[Span] = []
        # (owner, name, attribute of its own that was there before: None for a method of its class)
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._decode_rows = runner.num_speculative_steps + 1
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self.on:
                self.rounds.append(Round(self._mark(), self._decodes(scheduler_output)))
            return self._timed("prepare", execute, scheduler_output, *args, **kwargs)

        self._replace(runner, "execute_model", execute_model)
        self._wrap(runner.model, "forward", "verify")
        self._wrap(runner.model, "compute_logits", "verify")
        for name in ("run_fullgraph", "run_pw_graph"):
            self._wrap(getattr(runner, "cudagraph_manager", None), name, "verify")
        self._wrap(runner, "sample", "sample")
        self._wrap(runner, "postprocess_sampled", "commit")
        self._wrap(runner.speculator, "propose", "draft")

    def read(self, batch: int) -> list[dict[str, float]]:
        """Milliseconds by part of every round in which `batch` requests decoded and after which another such round came; forgets all."""
        if self.on_gpu:
            torch.cuda.synchronize()
        rounds, self.rounds = self.rounds, []
        return [parts_of(this, after) for this, after in itertools.pairwise(rounds) if this.decodes == after.decodes == batch]

    def remove(self) -> None:
        """Leave the runner as it was."""
        while self._wrapped:
            owner, name, before = self._wrapped.pop()
            delattr(owner, name) if before is None else setattr(owner, name, before)

    def _decodes(self, scheduler_output: Any) -> int | None:
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduler_output.scheduled_new_reqs or not scheduled or max(scheduled.values()) > self._decode_rows:
            return None
        return len(scheduled)

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name, None)
        if inner is not None:
            self._replace(owner, name, lambda *args, **kwargs: self._timed(part, inner, *args, **kwargs))

    def _replace(self, owner: Any, name: str, call: Callable) -> None:
        self._wrapped.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, call)

    def _timed(self, part: str, call: Callable, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(SCOPE + part) if self.profiling else nullcontext():
            if not self.on or not self.rounds:
                return call(*args, **kwargs)
            span = Span(part, self._mark())
            (self._open[-1].inner if self._open else self.rounds[-1].spans).append(span)
            self._open.append(span)
            try:
                return call(*args, **kwargs)
            finally:
                self._open.pop()
                span.end = self._mark()

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def timer_of(worker: Any) -> PartTimer:
    """The worker's timer, made at the first call."""
    worker = getattr(worker, "worker", worker)
    if not hasattr(worker, _KEY):
        setattr(worker, _KEY, PartTimer(worker.model_runner))
    return getattr(worker, _KEY)


def removed_timer(worker: Any) -> PartTimer:
    """The same, which times nothing any more: the next call of timer_of makes another."""
    timer = timer_of(worker)
    timer.remove()
    delattr(getattr(worker, "worker", worker), _KEY)
    return timer


def start_parts(worker: Any) -> None:
    """RPC: record from now on."""
    timer_of(worker).on = True


def stop_parts(worker: Any, batch: int) -> list[dict[str, float]]:
    """RPC: stop, and what PartTimer.read gives."""
    return removed_timer(worker).read(batch)


def medians(rounds: list[dict[str, float]]) -> dict[str, float] | None:
    """`<part>_ms`, the median over the rounds, and how many there were; None without rounds."""
    if not rounds:
        return None
    found = {f"{part}_ms": round(statistics.median(one[part] for one in rounds), 4) for part in (*PARTS, "other", "round")}
    return {**found, "rounds": len(rounds)}
