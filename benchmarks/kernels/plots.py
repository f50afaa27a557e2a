"""Pictures of a run: latency against nodes and against requests, and the distance to the floor."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from benchmarks.kernels.case import Row

ARMS = ("serial core", "core factor", "core replay", "serial tree", "solve factor", "solve replay")
STYLE = {
    "serial core": "k-",
    "serial tree": "k--",
    "core factor": "C0-",
    "solve factor": "C0--",
    "core replay": "C1-",
    "solve replay": "C1--",
}


def draw(rows: list[Row], folder: Path, name: str, title: str) -> list[Path]:
    """Writes `<name>-*.png`; none where there is nothing to draw or no matplotlib."""
    frame = pd.DataFrame([r for r in rows if r["stage"] == "verify" and r.get("shape") == "9b" and not r.get("ragged") and "p50_us" in r])
    if frame.empty:
        return []
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    native = pd.DataFrame([r for r in rows if r["stage"] == "native" and "p50_us" in r and r["arm"] == "native core"])
    found = []
    for picture, (x, fixed, values) in {"nodes": ("T", "B", (1, 16)), "requests": ("B", "T", (64,))}.items():
        figure, axes = plt.subplots(1, len(values), figsize=(4.5 * len(values) + 1.5, 4), squeeze=False)
        for axis, value in zip(axes[0], values, strict=True):
            _latency(axis, frame, native, x, fixed, value)
        axes[0][-1].legend(fontsize=7)
        found.append(_save(figure, folder / f"{name}-{picture}.png", title, plt))
    figure, axis = plt.subplots(figsize=(7, 4))
    _distance(axis, frame)
    found.append(_save(figure, folder / f"{name}-floor.png", title, plt))
    return found


def _latency(axis, frame: pd.DataFrame, native: pd.DataFrame, x: str, fixed: str, value: int) -> None:
    for arm in ARMS:
        part = frame[(frame["arm"] == arm) & (frame[fixed] == value)].sort_values(x)
        if not part.empty:
            axis.plot(part[x], part["p50_us"], STYLE[arm], marker="o", markersize=3, label=arm)
            axis.fill_between(part[x], part["p20_us"], part["p80_us"], color=STYLE[arm].rstrip("-"), alpha=0.15)
    if not native.empty:
        part = native[native[fixed] == value].sort_values(x)
        axis.plot(part[x], part["p50_us"], "C2-", marker="s", markersize=3, label="vLLM's chain core")
    floor = frame[(frame["arm"] == "core factor") & (frame[fixed] == value)].sort_values(x)
    if not floor.empty and "floor_us" in floor:
        axis.plot(floor[x], floor["floor_us"], ":", color="gray", label="bytes floor of the core")
    axis.set(xscale="log", yscale="log", xlabel={"T": "nodes per request", "B": "requests"}[x], title=f"{fixed} = {value}")
    axis.set_xscale("log", base=2)
    axis.set_ylabel("us per layer")
    axis.grid(alpha=0.3, which="both")


def _distance(axis, frame: pd.DataFrame) -> None:
    cases = sorted({(int(t), int(b)) for t, b in zip(frame["T"], frame["B"])})
    for arm in ("solve factor", "solve replay", "core factor", "core replay"):
        part = {(int(r["T"]), int(r["B"])): r.get("x_floor") for _, r in frame[frame["arm"] == arm].iterrows()}
        axis.plot(range(len(cases)), [part.get(case) for case in cases], STYLE[arm], marker="o", markersize=3, label=arm)
    axis.set_xticks(range(len(cases)), [f"{t}, {b}" for t, b in cases], rotation=60, fontsize=7)
    axis.set(xlabel="nodes per request, requests", ylabel="x bytes floor", yscale="log", title="distance to the bytes floor")
    axis.axhline(1, color="gray", linestyle=":")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7)


def _save(figure, path: Path, title: str, plt) -> Path:
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path
