"""Time on the device: CUDA graphs over rotated input sets, arms in turn, medians."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

# a replay should last so long that event resolution and the launch of the graph are below 1 %
MIN_REPLAY_US = 500.0
MAX_CALLS = 2000
# input sets together should exceed the L2 (60 MB on an H200) several times
ROTATED_BYTES = 200 * 2**20
MAX_SETS = 32

Step = Callable[[int], None]


@dataclass(frozen=True)
class Samples:
    """Microseconds of one call, one value a replay."""

    us: tuple[float, ...]
    # independent input sets, and calls per replay
    sets: int
    calls: int

    def quantile(self, q: float) -> float:
        ordered = sorted(self.us)
        at = q * (len(ordered) - 1)
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    def as_row(self) -> dict[str, float | int]:
        quantiles = {f"p{round(100 * q)}_us": round(self.quantile(q), 3) for q in (0.2, 0.5, 0.8)}
        return {**quantiles, "replays": len(self.us), "sets": self.sets, "calls": self.calls}


def num_sets(bytes_per_set: int) -> int:
    """Input sets to rotate among: three at least, more where one set is small beside the L2."""
    return max(3, min(MAX_SETS, math.ceil(ROTATED_BYTES / max(1, bytes_per_set))))


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    sets: int
    calls: int
    replay_us: float


def _capture_once(step: Step, sets: int, rounds: int) -> _Captured:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # not `torch.cuda.graph`: it empties the allocator's cache at every capture
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            for _ in range(rounds):
                for i in range(sets):
                    step(i)
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return _Captured(graph, sets, sets * rounds, 1e3 * start.elapsed_time(end))


def _capture(step: Step, sets: int) -> _Captured:
    """The step on every set, as often as a long enough replay needs. Compiles and loads everything first."""
    for i in range(sets):
        step(i)
    torch.cuda.synchronize()
    captured = _capture_once(step, sets, 1)
    rounds = min(math.ceil(MIN_REPLAY_US / max(captured.replay_us, 1.0)), max(1, MAX_CALLS // sets))
    return captured if rounds <= 1 else _capture_once(step, sets, rounds)


@dataclass(frozen=True)
class Timer:
    """Compares steps. `budget_s`: device time for all of them together; `max_replays` of each at most."""

    budget_s: float = 0.4
    min_replays: int = 7
    max_replays: int = 41

    def compare(self, steps: dict[str, tuple[Step, int]]) -> tuple[dict[str, Samples], dict[str, Exception]]:
        """Samples by name, one replay of each step in turn, and the errors of those that could not be captured.

        A step is (call on input set i, number of sets). Interleaving keeps drifts of clock and temperature out of the ratios.
        """
        captured: dict[str, _Captured] = {}
        errors: dict[str, Exception] = {}
        for name, (step, sets) in steps.items():
            try:
                captured[name] = _capture(step, sets)
            except Exception as error:  # one arm that cannot run must not cost the others their numbers
                errors[name] = error
        total_us = sum(one.replay_us for one in captured.values())
        replays = max(self.min_replays, min(self.max_replays, int(1e6 * self.budget_s / max(total_us, 1.0))))
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in captured}
        for _ in range(replays):
            for name, one in captured.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                one.graph.replay()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        samples = {
            name: Samples(
                tuple(1e3 * a.elapsed_time(b) / captured[name].calls for a, b in pairs), captured[name].sets, captured[name].calls
            )
            for name, pairs in events.items()
        }
        return samples, errors


def copy_bandwidth(device: torch.device, num_bytes: int = 2**30) -> float:
    """Bytes per second of a device-to-device copy, read and written counted, on data that are not zeros."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * num_bytes / (1e-3 * statistics.median(times[5:]))
