"""The marks of the kernels, from the rows of a run. What a run did not measure is a mark without value, which is not reached."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.case import Row
from benchmarks.report import Mark

SHAPE = "9b"
MIB = 2**20


def find(rows: list[Row], stage: str, arm: str, **labels: Any) -> Row | None:
    """The row with these labels, if it was timed or checked."""
    for row in rows:
        if row["stage"] == stage and row["arm"] == arm and row["status"] == "ok" and all(row.get(k) == v for k, v in labels.items()):
            return row
    return None


def value_of(row: Row | None, field: str) -> float | None:
    return None if row is None else row.get(field)


def kernel_marks(rows: list[Row], commit: str) -> list[Mark]:
    """`commit`: the commit that Bole uses unless told otherwise, whose verify round counts."""
    return [*_verify(rows, commit), *_commit(rows), *_attention(rows), *_bytes(rows)]


def _verify(rows: list[Row], commit: str) -> list[Mark]:
    def value(arm: str, nodes: int, requests: int, field: str) -> float | None:
        labels = {"shape": SHAPE, "T": nodes, "B": requests, "ragged": False}
        return value_of(find(rows, "verify", f"{arm} {commit}", **labels), field)

    found = []
    for nodes, goal in ((64, 12), (16, 7)):
        for requests in (1, 16):
            name = f"verify core over the serial core, T={nodes}, B={requests}"
            found.append(Mark(name, value("core", nodes, requests, "speedup"), "x", at_least=goal))
    for requests in (1, 16):
        name = f"solve + readout over the serial tree, T=64, B={requests}"
        found.append(Mark(name, value("solve", 64, requests, "speedup"), "x", at_least=16))
    for nodes, goal in ((64, 3), (16, 2)):
        name = f"solve + readout over its bytes floor, T={nodes}, B=16"
        found.append(Mark(name, value("solve", nodes, 16, "x_floor"), "x", at_most=goal))
    return found


def _commit(rows: list[Row]) -> list[Mark]:
    found = []
    for kind in ("factor", "replay"):
        row = find(rows, "commit", kind, shape=SHAPE, B=16, path=6)
        name = f"{kind} commit of all layers over reading and writing the states once, B=16, path 6"
        found.append(Mark(name, value_of(row, "x_floor"), "x", at_most=1.5))
        row = find(rows, "commit", kind, shape=SHAPE, B=1, path=6)
        found.append(Mark(f"{kind} commit of all layers, B=1, path 6", value_of(row, "p50_us"), "us", at_most=60))
    return found


def _attention(rows: list[Row]) -> list[Mark]:
    """The best tree arm over the best FlashAttention 3 arm, at the cache's worst block size."""
    found = []
    for prefix, requests in ((4096, 8), (32768, 1)):
        labels = {"shape": SHAPE, "T": 64, "prefix": prefix, "B": requests}
        cases: dict[int, dict[bool, list[float]]] = {}
        for row in rows:
            if row["stage"] == "attention" and row["status"] == "ok" and "p50_us" in row and all(row[k] == v for k, v in labels.items()):
                case = cases.setdefault(row["block_size"], {True: [], False: []})
                case[row["arm"].startswith("fa3 chain")].append(row["p50_us"])
        ratios = {block: min(case[False]) / min(case[True]) for block, case in cases.items() if case[False] and case[True]}
        worst = max(ratios, key=ratios.__getitem__, default=None)
        note = f"block size {worst}" if worst is not None else "FlashAttention 3 or the tree kernel was not timed"
        name = f"tree attention over FlashAttention 3 on a chain, T=64, prefix {prefix}, B={requests}"
        found.append(Mark(name, None if worst is None else ratios[worst], "x", at_most=1.25, note=note))
    return found


def _bytes(rows: list[Row]) -> list[Mark]:
    def kept(kind: str, conv: bool) -> float | None:
        sizes = value_of(
            next((r for r in rows if r["stage"] == "commit" and r["arm"] == kind and r["shape"] == SHAPE), None), "bytes_per_node"
        )
        return None if sizes is None else sum(size for name, size in sizes.items() if conv or name != "x") / MIB

    return [
        Mark("bytes kept per node, factor, all layers", kept("factor", True), "MiB", at_most=0.85),
        Mark("bytes kept per node, factor, conv inputs not counted", kept("factor", False), "MiB", at_most=0.565),
        Mark("bytes kept per node, replay, all layers", kept("replay", True), "MiB", at_most=0.42),
    ]
