"""A picture of one round of a trace: what the host was at, and what the device ran, over time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.offline.parts import PARTS, SCOPE
from benchmarks.offline.trace import Event, device_work, host_scopes, read_events

COLORS = {**{part: f"C{index}" for index, part in enumerate(PARTS)}, "other": "0.6"}
LANES = ("device", "host")


class Bar(NamedTuple):
    """Something that took time; us from the start of the round on the host."""

    lane: str
    part: str
    start: float
    duration: float


def middle_round(events: list[Event]) -> list[Bar]:
    """Bars of the round in the middle of the trace; none where no round is whole.

    A round begins with its `prepare` on the host and lasts until the next one's. What it launched in that time is its own, whenever the
    device came to it. Outer scopes come before the scopes inside them.
    """
    scopes = [event for one in host_scopes(events).values() for event in one]
    starts = sorted(event["ts"] for event in scopes if event["name"] == SCOPE + "prepare")
    if len(starts) < 2:
        return []
    at = (len(starts) - 1) // 2
    start, end = starts[at], starts[at + 1]
    bars = [
        Bar("host", event["name"].removeprefix(SCOPE), event["ts"] - start, event["dur"]) for event in scopes if start <= event["ts"] < end
    ]
    for work in device_work(events):
        if work.launched is not None and start <= work.launched < end:
            bars.append(Bar("device", work.part, work.event["ts"] - start, work.event["dur"]))
    return bars


def draw_round(trace: str | Path) -> Path | None:
    """Write the picture beside a trace, `.png` for `.json.gz`; None where there is no round or no matplotlib."""
    bars = middle_round(read_events(trace))
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    if not bars:
        return None
    figure, axis = plt.subplots(figsize=(12, 2.6))
    for part, color in COLORS.items():
        for place, lane in enumerate(LANES):
            spans = [(bar.start / 1e3, bar.duration / 1e3) for bar in bars if (bar.lane, bar.part) == (lane, part)]
            axis.broken_barh(spans, (place - 0.4, 0.8), facecolors=color, label=part if place == 0 else None)
    axis.set_yticks(range(len(LANES)), LANES)
    axis.set_ylim(-0.6, len(LANES) - 0.4)
    axis.set(xlabel="ms from the round's start on the host", title=Path(trace).name)
    axis.legend(fontsize=7, ncol=len(COLORS), loc="upper center", bbox_to_anchor=(0.5, -0.45))
    figure.tight_layout()
    path = Path(str(trace).removesuffix(".json.gz") + ".png")
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path
