"""Pictures of a run: throughput against the batch size, the parts of a round, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.offline.choose import best_of
from benchmarks.offline.rows import Row
from benchmarks.offline.tables import PART_COLUMNS

LINES = {"plain": ("k", "plain"), "chain": ("C2", "best chain"), "serial": ("C3", "best serial"), "tree": ("C0", "tree, one setting per B")}


def draw(rows: list[Row], parts: list[Row], memory: list[Row], folder: Path, name: str, title: str) -> list[Path]:
    """Writes `<name>-*.png`; none without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for picture, figure in _figures(rows, parts, memory, plt):
        figure.suptitle(title, fontsize=8)
        figure.tight_layout()
        found.append(folder / f"{name}-{picture}.png")
        figure.savefig(found[-1], dpi=80)
        plt.close(figure)
    return found


def _figures(rows: list[Row], parts: list[Row], memory: list[Row], plt) -> Iterator[tuple[str, object]]:
    for shape, temperature in dict.fromkeys((row["shape"], row["temperature"]) for row in rows):
        of_case = [row for row in rows if (row["shape"], row["temperature"]) == (shape, temperature)]
        yield f"throughput-{shape}" + ("-sampled" if temperature else ""), _throughput(of_case, plt)
    if parts:
        yield "round", _round(pd.DataFrame(parts), plt)
    if memory:
        yield "memory", _memory(pd.DataFrame(memory), plt)


def _throughput(rows: list[Row], plt):
    """One panel a workload: tokens per second of all requests together against their number."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = plt.subplots(1, max(1, len(workloads)), figsize=(4 * max(1, len(workloads)) + 1, 3.6), squeeze=False)
    for axis, workload in zip(axes[0], workloads):
        for family, (color, label) in LINES.items():
            points = {
                row["B"]: row["tokens_per_s"]
                for (_, text, _, _), row in best_of([r for r in rows if family != "tree" or r["chosen"]], family).items()
                if text == workload
            }
            if points:
                axis.plot(*zip(*sorted(points.items())), color=color, marker="o", markersize=4, label=label)
        axis.set(xscale="log", yscale="log", xlabel="requests", title=workload)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("decode tokens/s")
    axes[0][0].legend(fontsize=7)
    return figure


def _round(frame: pd.DataFrame, plt):
    """Stacked bars: one an arm, shape and number of requests."""
    labels = [f"{row.shape_}\n{row.arm}\nB={row.B}" for row in frame.rename(columns={"shape": "shape_"}).itertuples()]
    figure, axis = plt.subplots(figsize=(max(6.0, 0.8 * len(labels) + 2), 4.5))
    base = pd.Series(0.0, index=frame.index)
    for index, column in enumerate(column for column in PART_COLUMNS if column != "round_ms"):
        axis.bar(range(len(labels)), frame[column], bottom=base, color=f"C{index}", label=column.removesuffix("_ms"))
        base += frame[column]
    axis.set_xticks(range(len(labels)), labels, fontsize=6, rotation=60)
    axis.set_ylabel("ms a round")
    axis.legend(fontsize=7)
    return figure


def _memory(frame: pd.DataFrame, plt):
    """KV tokens of every engine."""
    labels = [f"{shape}\n{arm}" for shape, arm in zip(frame["shape"], frame["arm"])]
    figure, axis = plt.subplots(figsize=(max(6.0, 0.6 * len(labels) + 2), 4.5))
    axis.bar(range(len(labels)), frame["kv_tokens"], color=["k" if arm == "plain" else "C0" for arm in frame["arm"]])
    axis.set_xticks(range(len(labels)), labels, fontsize=6, rotation=60)
    axis.set_ylabel("KV tokens")
    return figure
