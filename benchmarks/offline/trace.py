"""A profiler trace of a few rounds, and its kernels summed up by part of the round.

The profiler slows launches down: what it says about kernels holds, what it says about gaps does not (parts.py times those).
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.offline.parts import SCOPE, removed_timer, timer_of

Event = dict[str, Any]

_KEY = "_benchmark_profile"
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


def start_trace(worker: Any) -> None:
    """RPC: profile from now on."""
    timer = timer_of(worker)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if timer.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = torch.profiler.profile(activities=activities)
    profile.start()
    timer.profiling = True
    setattr(worker, _KEY, profile)


def stop_trace(worker: Any, path: str) -> list[dict[str, Any]]:
    """RPC: stop, write the trace (a .json.gz) and return its kernels by part."""
    if removed_timer(worker).on_gpu:
        torch.cuda.synchronize()
    profile = getattr(worker, _KEY)
    profile.stop()
    profile.export_chrome_trace(path)
    return kernels_by_part(read_events(path))


def read_events(path: str | Path) -> list[Event]:
    """Events of a trace's file."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def kernels_by_part(events: list[Event], limit: int = 40) -> list[dict[str, Any]]:
    """[{part, kernel, calls, us}] of a Chrome trace, longest first, us in total. Parts as in `device_work`."""
    sums: dict[tuple[str, str], list[float]] = {}
    for work in device_work(events):
        entry = sums.setdefault((work.part, work.event["name"]), [0, 0.0])
        entry[0] += 1
        entry[1] += work.event["dur"]
    found = [{"part": part, "kernel": name[:120], "calls": calls, "us": round(us, 2)} for (part, name), (calls, us) in sums.items()]
    return sorted(found, key=lambda row: -row["us"])[:limit]


class DeviceWork(NamedTuple):
    """A kernel or copy on the device."""

    part: str
    # us, on the host; None where the trace does not hold the launch
    launched: float | None
    event: Event


def host_scopes(events: list[Event]) -> dict[Any, list[Event]]:
    """Thread -> the scopes of parts that it entered, in the order of their starts; they nest."""
    scopes: dict[Any, list[Event]] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(SCOPE):
            scopes.setdefault(event["tid"], []).append(event)
    for one in scopes.values():
        one.sort(key=lambda event: event["ts"])
    return scopes


def device_work(events: list[Event]) -> Iterator[DeviceWork]:
    """A Chrome trace's kernels and copies in the trace's order.

    One belongs to the innermost scope that its launch lies in; kernels of a CUDA graph have the graph's launch. Outside: "other".
    """
    scopes, launches = host_scopes(events), {}
    for event in events:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            launch = launches.get(event.get("args", {}).get("correlation"))
            part = _innermost(scopes.get(launch["tid"], []), launch["ts"]) if launch else "other"
            yield DeviceWork(part, launch["ts"] if launch else None, event)


def _innermost(scopes: list[Event], time_us: float) -> str:
    """The scope that began last of those around the time."""
    at = bisect_right(scopes, time_us, key=lambda event: event["ts"])
    for event in reversed(scopes[:at]):
        if time_us <= event["ts"] + event["dur"]:
            return event["name"].removeprefix(SCOPE)
    return "other"


def trace_path(folder: Path, shape: str, arm: str, batch: int) -> str:
    """Where an arm's trace goes."""
    return str(folder / f"trace-offline-{shape}-{arm}-b{batch}.json.gz")
