"""Baselines and settings: the best chain of a point, the tree setting of a batch size, and how they compare."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.offline.rows import Row

# a point: shape, workload, requests, temperature
Point = tuple[str, str, int, float]

# baseline -> family of arms of which the fastest at the point counts
BASELINES = {"plain": "plain", "best chain": "chain", "best serial": "serial"}


def point_of(row: Row) -> Point:
    return row["shape"], row["workload"], row["B"], row["temperature"]


def measured(rows: list[Row]) -> list[Row]:
    """Those that count: served by their own path."""
    return [row for row in rows if row["status"] == "ok"]


def best_of(rows: list[Row], family: str) -> dict[Point, Row]:
    """The fastest arm of a family at every point."""
    best: dict[Point, Row] = {}
    for row in measured(rows):
        point = point_of(row)
        if row["family"] == family and (point not in best or row["tokens_per_s"] > best[point]["tokens_per_s"]):
            best[point] = row
    return best


def tree_settings(rows: list[Row]) -> dict[tuple[str, int, float], str]:
    """(shape, requests, temperature) -> the tree arm of the highest geometric mean over all workloads that were measured there.

    One setting for all workloads; an arm that lacks one of them is not considered.
    """
    speeds: dict[tuple[str, int, float], dict[str, dict[str, float]]] = {}
    workloads: dict[tuple[str, int, float], set[str]] = {}
    for row in measured(rows):
        case = row["shape"], row["B"], row["temperature"]
        workloads.setdefault(case, set()).add(row["workload"])
        if row["family"] == "tree":
            speeds.setdefault(case, {}).setdefault(row["arm"], {})[row["workload"]] = row["tokens_per_s"]
    found = {}
    for case, arms in speeds.items():
        means = {arm: statistics.geometric_mean(by.values()) for arm, by in arms.items() if by.keys() == workloads[case]}
        if means:
            found[case] = max(means, key=means.__getitem__)
    return found


def with_ratios(rows: list[Row]) -> list[Row]:
    """Every row with `x_<baseline>`, its speed over each baseline of its point, `best_chain` by name, and whether it is `chosen`.

    What rows had of these is forgotten.
    """
    best = {name: best_of(rows, family) for name, family in BASELINES.items()}
    settings = tree_settings(rows)
    found = []
    for row in rows:
        extra: dict[str, Any] = {}
        if row["status"] == "ok":
            for name, fastest in best.items():
                if baseline := fastest.get(point_of(row)):
                    extra[f"x_{name.replace(' ', '_')}"] = row["tokens_per_s"] / baseline["tokens_per_s"]
            if chain := best["best chain"].get(point_of(row)):
                extra["best_chain"] = chain["arm"]
        extra["chosen"] = settings.get((row["shape"], row["B"], row["temperature"])) == row["arm"]
        found.append({name: value for name, value in row.items() if not name.startswith(("x_", "best_"))} | extra)
    return found


def chosen_ratios(rows: list[Row], baseline: str) -> dict[Point, float]:
    """The chosen setting's speed over a baseline (a key of BASELINES), point by point. Rows as `with_ratios` makes them."""
    field = f"x_{baseline.replace(' ', '_')}"
    return {point_of(row): row[field] for row in rows if row["chosen"] and field in row}


def slower_points(rows: list[Row]) -> list[Row]:
    """Every tree point below 1.0x of a baseline; `chosen`: with the arm chosen at its batch size. Rows as `with_ratios` makes them."""
    found = []
    for row in rows:
        for name in BASELINES:
            ratio = row.get(f"x_{name.replace(' ', '_')}")
            if row["family"] == "tree" and ratio is not None and ratio < 1.0:
                labels = {key: row[key] for key in ("shape", "workload", "B", "temperature", "arm", "chosen")}
                found.append({**labels, "baseline": name, "ratio": round(ratio, 4)})
    return sorted(found, key=lambda one: one["ratio"])
