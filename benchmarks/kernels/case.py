"""A case: arms on the same inputs, correctness gates first, then their times in turn."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.kernels.options import Options
from benchmarks.timing import Samples, Step, Timer

# what a device of this kind copies at best, for floors that can be compared between runs
REFERENCE_BANDWIDTH = 4.3e12

Row = dict[str, Any]


class Skip(Exception):
    """An arm cannot run here; the text says why."""


@dataclass(frozen=True)
class Check:
    """One measured error against its bound."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.bound


@dataclass(frozen=True)
class Ready:
    """An arm that can run: `step(i)` on input set i, `gate()` after `step(0)`."""

    step: Step
    gate: Callable[[], list[Check]]
    sets: int = 1
    # bytes that no implementation of the arm can avoid; 0: not stated
    floor_bytes: int = 0
    note: str = ""
    # further fields of the arm's row
    extra: Row = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """One thing to time. `prepare` may raise anything (recorded) or Skip."""

    name: str
    prepare: Callable[[], Ready]
    # arm of the same case whose median this one's is compared with
    baseline: str | None = None


@dataclass(frozen=True)
class Context:
    """What every case needs to know."""

    options: Options
    # bytes per second of the device's own copy; 0: nothing is timed
    bandwidth: float = 0.0
    timer: Timer = field(default_factory=Timer)

    @property
    def device(self) -> torch.device:
        return self.options.device

    @property
    def compile_only(self) -> bool:
        return self.options.shard is not None

    def batch(self, requests: int) -> int:
        """Requests to make inputs for: compiling needs no more than 16 (Triton tells 1 and multiples of 16 from the rest)."""
        return min(requests, 16) if self.compile_only else requests

    @property
    def timed(self) -> bool:
        return self.options.timed and not self.compile_only


@dataclass(frozen=True)
class Case:
    """`build(context)` makes the inputs and returns the arms."""

    stage: str
    # what tells it from other cases of its stage: shape, T, B, ...
    labels: dict[str, Any]
    build: Callable[[Context], list[Arm]]
    # False: errors only
    timed: bool = True


def describe(error: BaseException) -> str:
    """Type, text and place of an error, for the record."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip()[:400]}{place}"


def run_case(case: Case, context: Context) -> list[Row]:
    """One row an arm. A gate that fails keeps the whole case from being timed."""
    started = time.perf_counter()
    head = {"stage": case.stage, **case.labels}
    try:
        arms = case.build(context)
    except Exception as error:  # recorded; the next case may well run
        return [{**head, "arm": "(all)", "status": "error", "reason": describe(error)}]
    if context.compile_only:
        index, count = context.options.shard
        arms = arms[index::count]
    rows: dict[str, Row] = {}
    ready: dict[str, Ready] = {}
    for arm in arms:
        rows[arm.name] = row = {**head, "arm": arm.name}
        try:
            ready[arm.name] = one = arm.prepare()
            row |= one.extra | ({"note": one.note} if one.note else {}) | _gate(one, context)
        except Skip as reason:
            ready.pop(arm.name, None)
            row |= {"status": "skipped", "reason": str(reason)}
        except Exception as error:  # recorded; the other arms may well run
            ready.pop(arm.name, None)
            row |= {"status": "error", "reason": describe(error)}
    failed = [name for name, row in rows.items() if row["status"] == "gate failed"]
    if failed:
        for name in ready:
            if name not in failed:
                rows[name] |= {"status": "not timed", "reason": f"the gate of {failed[0]!r} failed"}
    elif context.timed and case.timed:
        _time({name: one for name, one in ready.items() if rows[name]["status"] == "ok"}, arms, rows, context)
    for row in rows.values():
        row["case_s"] = round(time.perf_counter() - started, 2)
    return list(rows.values())


def _gate(one: Ready, context: Context) -> Row:
    one.step(0)
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    if context.compile_only:
        return {"status": "compiled"}
    checks = one.gate()
    errors = {"errors": {check.name: {"error": check.error, "bound": check.bound, "ok": check.ok} for check in checks}}
    bad = [check for check in checks if not check.ok]
    if bad:
        reason = "; ".join(f"{check.name} off by {check.error:.3g}, bound {check.bound:.3g}" for check in bad)
        return {"status": "gate failed", "reason": reason, **errors}
    return {"status": "ok", **errors}


def _time(ready: dict[str, Ready], arms: list[Arm], rows: dict[str, Row], context: Context) -> None:
    samples, errors = context.timer.compare({name: (one.step, one.sets) for name, one in ready.items()})
    for name, error in errors.items():
        rows[name] |= {"status": "error", "reason": describe(error)}
    for arm in arms:
        if arm.name in samples:
            rows[arm.name] |= timed_fields(samples[arm.name], ready[arm.name].floor_bytes, context.bandwidth)
            if arm.baseline in samples:
                ratio = samples[arm.baseline].median / samples[arm.name].median
                rows[arm.name] |= {"baseline": arm.baseline, "speedup": round(ratio, 3)}


def timed_fields(samples: Samples, floor_bytes: int, bandwidth: float) -> Row:
    """Quantiles, and the floor at the measured bandwidth and at the reference one."""
    row: Row = samples.as_row()
    if floor_bytes and bandwidth:
        floor_us = 1e6 * floor_bytes / bandwidth
        row |= {
            "floor_bytes": floor_bytes,
            "floor_us": round(floor_us, 3),
            "floor_4300_us": round(1e6 * floor_bytes / REFERENCE_BANDWIDTH, 3),
            "x_floor": round(samples.median / floor_us, 3),
        }
    return row


def free_memory() -> None:
    """Gives the case's buffers back; call when nothing refers to its arms any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
