"""The marks of serving, from the rows of a run. What a run did not measure is a mark without value, which is not reached."""

from __future__ import annotations

import statistics
from itertools import product

from benchmarks.offline.arms import CHAIN_DRAFTS
from benchmarks.offline.choose import Point, chosen_ratios, measured, point_of, tree_settings
from benchmarks.offline.options import GREEDY, MARK_BATCHES, MARK_SHAPES, SMALL, TEMPERATURES, WORKLOADS
from benchmarks.offline.rows import Row
from benchmarks.report import Mark

PARTS_SHAPE = "9b"
# baseline -> (at least, arms that must have been measured at a point for the baseline to be a fair one)
SPEED_GOALS = {"plain": (3.0, ()), "best chain": (1.25, tuple(f"chain-{k}" for k in CHAIN_DRAFTS)), "best serial": (1.5, ())}


def offline_marks(rows: list[Row], parts: list[Row], memory: list[Row]) -> list[Mark]:
    """`rows` with ratios (choose.with_ratios), `parts` and `memory` as rows.py makes them. Of a run of the small model alone, equality."""
    if {row["shape"] for row in rows} == {SMALL}:
        return _equality(rows)
    speeds = [_speed(rows, baseline, goal, arms, t) for t in TEMPERATURES for baseline, (goal, arms) in SPEED_GOALS.items()]
    return [*speeds, *_round(rows, parts), _memory(memory)]


def _equality(rows: list[Row]) -> list[Mark]:
    """Texts of tree arms that are not plain decoding's, nor part from it at a tie."""
    found = []
    for kind, sampled in (("greedy", False), ("seeded", True)):
        counts = [row["equality"] for row in rows if row["family"] == "tree" and "equality" in row and (row["temperature"] > 0) == sampled]
        sums = {name: sum(one[name] for one in counts) for name in ("equal", "tie", "beyond", "unjudged")}
        wrong = sums["beyond"] + sums["unjudged"] if counts else None
        note = ", ".join(f"{name} {number}" for name, number in sums.items())
        found.append(
            Mark(f"{kind} texts of trees that part from plain decoding's other than at a tie", wrong, "texts", at_most=0, note=note)
        )
    return found


def grid(temperature: float) -> list[Point]:
    """The points that a mark of speed is about."""
    return list(product(MARK_SHAPES, WORKLOADS, MARK_BATCHES, (temperature,)))


def _speed(rows: list[Row], baseline: str, goal: float, arms: tuple[str, ...], temperature: float) -> Mark:
    """Geometric mean over the grid of the best tree setting of each shape and batch size, the same for all workloads."""
    how = f"sampled at {temperature:g}" if temperature else "greedy"
    name = f"{how}: decode tokens/s over {baseline}, best tree setting per batch size, geo-mean of {', '.join(MARK_SHAPES)}, B 1 to 8"
    points = grid(temperature)
    ratios = chosen_ratios(rows, baseline)
    have = {(point_of(row), row["arm"]) for row in measured(rows)}
    missing = [point for point in points if point not in ratios or any((point, arm) not in have for arm in arms)]
    if missing:
        return Mark(name, None, "x", at_least=goal, note=f"{len(missing)} of {len(points)} points lack an arm, the first {missing[0]}")
    looping = sum(row["chosen"] and point_of(row) in points and bool(row.get("looping")) for row in rows)
    note = f"{looping} of {len(points)} points hold looping text" if looping else ""
    return Mark(name, statistics.geometric_mean(ratios[point] for point in points), "x", at_least=goal, note=note)


def _round(rows: list[Row], parts: list[Row]) -> list[Mark]:
    """Parts of a round of the setting chosen at the batch size, or at the largest smaller one that was timed."""
    first = _parts(rows, parts, 1)
    share = None if first is None else 100 * first["draft_ms"] / first["round_ms"]
    note = "" if first is None else first["arm"]
    found = [Mark(f"drafting, of a round of {PARTS_SHAPE}, B=1", share, "%", at_most=25, note=note)]
    for batch, goal in ((1, 0.6), (16, 1.0)):
        row = _parts(rows, parts, batch)
        outside = None if row is None else row["round_ms"] - row["verify_ms"] - row["draft_ms"]
        name = f"a round outside target forward and drafter, {PARTS_SHAPE}, B={batch}"
        found.append(Mark(name, outside, "ms", at_most=goal, note="" if row is None else row["arm"]))
    return found


def _parts(rows: list[Row], parts: list[Row], batch: int) -> Row | None:
    settings = tree_settings(rows)
    timed = [b for shape, b, temperature in settings if shape == PARTS_SHAPE and temperature == GREEDY and b <= batch]
    if not timed:
        return None
    arm = settings[PARTS_SHAPE, max(timed), GREEDY]
    labels = {"shape": PARTS_SHAPE, "arm": arm, "B": batch, "status": "ok"}
    return next((row for row in parts if all(row[key] == value for key, value in labels.items())), None)


def _memory(memory: list[Row]) -> Mark:
    """The least of both shapes' tree engines: KV tokens over a plain engine's with the MTP head, or most requests over plain's."""
    name = "KV tokens and max_num_seqs of a tree engine over a plain one with the MTP head, least"
    least: dict[str, tuple[float, str]] = {}
    for shape in MARK_SHAPES:
        rows = [row for row in memory if row["shape"] == shape]
        plain = next((row for row in rows if row["arm"] == "plain"), None)
        for row in rows:
            if plain is not None and row["arm"].startswith("tree-") and row.get("x_plain_mtp") is not None:
                value = min(row["x_plain_mtp"], row["max_num_seqs"] / plain["max_num_seqs"])
                least[shape] = min(least.get(shape, (value, row["arm"])), (value, row["arm"]))
    if set(least) != set(MARK_SHAPES):
        return Mark(name, None, "x", at_least=0.98)
    value, arm = min(least.values())
    return Mark(name, value, "x", at_least=0.98, note=arm)
