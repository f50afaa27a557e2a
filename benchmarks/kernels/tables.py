"""The rows of a run as tables to read."""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.kernels.case import Row
from benchmarks.report import Mark

LABELS = ("shape", "T", "B", "ragged", "prefix", "block_size", "path", "inputs")


def _frame(rows: list[Row], stage: str) -> pd.DataFrame:
    return pd.DataFrame([row for row in rows if row["stage"] == stage])


def _labels(frame: pd.DataFrame) -> list[str]:
    """The columns that tell the stage's cases apart; those that never vary are left out, but for T and B."""
    return [name for name in LABELS if name in frame and (name in ("T", "B") or frame[name].nunique() > 1)]


def pivot(rows: list[Row], stage: str, field: str) -> pd.DataFrame:
    """Cases down, arms across, one field inside; empty where nothing has it."""
    frame = _frame(rows, stage)
    if frame.empty or field not in frame or frame[field].isna().all():
        return pd.DataFrame()
    labels, arms = _labels(frame), list(dict.fromkeys(frame["arm"]))
    table = frame.pivot_table(index=labels, columns="arm", values=field, aggfunc="first", dropna=True)
    return table[[arm for arm in arms if arm in table]].sort_index()


def error_table(rows: list[Row], stage: str = "precision") -> pd.DataFrame:
    """Arms down, inputs and quantities across, the errors inside."""
    found = []
    for row in rows:
        if row["stage"] == stage and row.get("inputs") in ("normal", "wide"):
            for quantity, check in row.get("errors", {}).items():
                found.append({"mode": row["arm"], "inputs": row["inputs"], "quantity": quantity, "error": check["error"]})
    if not found:
        return pd.DataFrame()
    frame = pd.DataFrame(found)
    order = list(dict.fromkeys(frame["mode"]))
    return frame.pivot_table(index="mode", columns=["inputs", "quantity"], values="error", aggfunc="first").reindex(order)


def problems(rows: list[Row]) -> list[str]:
    """One line for every arm without a result: which, what happened."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] not in ("ok", "compiled"):
            labels = " ".join(f"{name}={row[name]}" for name in LABELS if name in row)
            found.setdefault((row["stage"], row["arm"], f"{row['status']}: {row.get('reason', '')}"), []).append(labels)
    return [f"{stage} / {arm}: {text} [{len(cases)} case(s), first {cases[0]}]" for (stage, arm, text), cases in found.items()]


def mark_table(marks: list[Mark]) -> pd.DataFrame:
    rows = [
        {
            "mark": m.name,
            "value": "-" if m.value is None else f"{m.value:.3g}",
            "unit": m.unit,
            "goal": m.goal,
            "": "ok" if m.ok else "SHORT",
        }
        for m in marks
    ]
    return pd.DataFrame(rows)


def _text(table: pd.DataFrame, **options: Any) -> str:
    return table.to_string(na_rep="-", **options)


def render(rows: list[Row], marks: list[Mark], timed: bool) -> str:
    """The whole run on a page or two."""
    parts = []
    if timed:
        for stage in dict.fromkeys(row["stage"] for row in rows):
            for field, title in (("p50_us", "median us"), ("x_floor", "x bytes floor"), ("speedup", "x faster than the baseline")):
                table = pivot(rows, stage, field)
                if not table.empty:
                    parts.append(f"{stage}: {title}\n{_text(table, float_format=lambda x: f'{x:.4g}')}")
    else:
        counts = pd.DataFrame([{"stage": row["stage"], "arm": row["arm"], "status": row["status"]} for row in rows])
        if not counts.empty:
            parts.append("correctness gates only, nothing is timed\n" + _text(counts, index=False))
    errors = error_table(rows)
    if not errors.empty:
        parts.append(f"precision: error against fp64\n{_text(errors, float_format=lambda x: f'{x:.1e}')}")
    if timed:
        parts.append(f"marks\n{_text(mark_table(marks), index=False)}")
    lines = problems(rows)
    if lines:
        parts.append("without result\n" + "\n".join(lines))
    return "\n\n".join(parts)
