"""The rows of a run as tables to read."""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.kernels.tables import mark_table
from benchmarks.offline.choose import BASELINES
from benchmarks.offline.rows import Row
from benchmarks.report import Mark

CASE = ["shape", "temperature", "workload", "B"]
PART_COLUMNS = ["verify_ms", "draft_ms", "sample_ms", "commit_ms", "prepare_ms", "other_ms", "round_ms"]
ENGINE_COLUMNS = ["async_scheduling", "compilation_mode", "cudagraph_mode", "max_cudagraph_capture_size", "attention_backend"]
CAPACITY_COLUMNS = ["num_gpu_blocks", "kv_tokens", "max_concurrency", "max_num_seqs"]
# kernels shown of a trace, and letters of their names
KERNELS, KERNEL_NAME = 16, 64
MEMORY_COLUMNS = [*CAPACITY_COLUMNS, "kv_gib", "mtp_gib", "spec_blocks", "x_plain", "x_plain_mtp"]


def pivot(rows: list[Row], field: str) -> pd.DataFrame:
    """Points down, arms across, one field inside."""
    frame = pd.DataFrame([row for row in rows if row["status"] == "ok" and field in row])
    if frame.empty:
        return frame
    table = frame.pivot_table(index=CASE, columns="arm", values=field, aggfunc="first")
    return table[[arm for arm in dict.fromkeys(frame["arm"]) if arm in table]]


def chosen_table(rows: list[Row]) -> pd.DataFrame:
    """The tree setting of each shape and batch size, its geometric means over the workloads, and its slowest workload."""
    frame = pd.DataFrame([row for row in rows if row["chosen"]])
    if frame.empty:
        return frame
    found = []
    for (shape, temperature, batch), part in frame.groupby(["shape", "temperature", "B"]):
        line: dict[str, Any] = {"shape": shape, "temperature": temperature, "B": batch, "setting": part["arm"].iloc[0]}
        for name in BASELINES:
            field = f"x_{name.replace(' ', '_')}"
            if field in part and part[field].notna().all():
                line[f"x {name}"] = part[field].product() ** (1 / len(part))
                line[f"least x {name}"] = part[field].min()
        found.append(line)
    return pd.DataFrame(found)


def equality_table(rows: list[Row]) -> pd.DataFrame:
    """Texts by arm, shape and temperature: equal to plain decoding's, parted at a tie, beyond one, or with no scores to judge by."""
    names = ("shape", "temperature", "arm")
    counts = [{**{name: row[name] for name in names}, **row["equality"]} for row in rows if "equality" in row]
    if not counts:
        return pd.DataFrame()
    frame = pd.DataFrame(counts).drop(columns="partings")
    return frame.groupby(list(names), sort=False).sum()


def repetition_table(rows: list[Row]) -> pd.DataFrame:
    """Share of distinct 4-grams of plain decoding's texts (of the first arm's where it was not measured), and of texts that loop."""
    frame = pd.DataFrame([row for row in rows if "distinct_4grams" in row])
    if frame.empty:
        return frame
    frame = frame[frame["arm"] == ("plain" if (frame["arm"] == "plain").any() else frame["arm"].iloc[0])]
    return frame.groupby(["shape", "temperature", "workload"], sort=False)[["distinct_4grams", "looping_share"]].mean()


def part_table(parts: list[Row]) -> pd.DataFrame:
    """Milliseconds of a round's parts."""
    return pd.DataFrame(parts)[["shape", "arm", "B", *PART_COLUMNS]] if parts else pd.DataFrame()


def kernel_table(parts: list[Row]) -> pd.DataFrame:
    """The longest kernels of each trace, microseconds in all of its rounds."""
    found = [
        {"shape": row["shape"], "arm": row["arm"], "B": row["B"], **kernel, "kernel": kernel["kernel"][:KERNEL_NAME]}
        for row in parts
        for kernel in row.get("kernels", [])[:KERNELS]
    ]
    return pd.DataFrame(found)


def memory_table(memory: list[Row]) -> pd.DataFrame:
    if not memory:
        return pd.DataFrame()
    frame = pd.DataFrame(memory)
    frame["kv_gib"], frame["mtp_gib"] = frame["kv_bytes"] / 2**30, frame["mtp_bytes"] / 2**30
    return frame[["shape", "arm", *MEMORY_COLUMNS]]


def engine_table(arms: list[Row]) -> pd.DataFrame:
    """What became of every arm, and the settings in effect."""
    frame = pd.DataFrame([{"shape": one["shape"], "arm": one["arm"], "status": one["status"], **one["engine"]} for one in arms])
    return frame[["shape", "arm", "status", *(name for name in ENGINE_COLUMNS if name in frame)]] if arms else frame


def render(result: dict[str, Any], marks: list[Mark]) -> str:
    """The whole run on a few pages. `result`: runner.results."""
    rows, parts, memory, timed = result["rows"], result["parts"], result["memory"], result["timed"]
    missing, slower = result["not_measured"], result["slower_points"]
    speed = "" if timed else " (no speed is claimed)"
    tables = [
        ("engines", engine_table(result["arms"])),
        (f"decode tokens per second{speed}", pivot(rows, "tokens_per_s")),
        ("MAT: mean tokens a request emits in a round", pivot(rows, "mat")),
        ("rounds per second", pivot(rows, "rounds_per_s") if timed else pd.DataFrame()),
        ("x plain decoding", pivot(rows, "x_plain") if timed else pd.DataFrame()),
        ("x best chain", pivot(rows, "x_best_chain") if timed else pd.DataFrame()),
        ("tree setting per batch size, one for all workloads", chosen_table(rows) if timed else pd.DataFrame()),
        ("parts of a round, ms (prepare: host work and inputs; other: between)", part_table(parts)),
        ("kernels of the traces", kernel_table(parts)),
        ("memory", memory_table(memory)),
        ("texts against plain decoding's, under the same seed", equality_table(rows)),
        ("repetition", repetition_table(rows)),
        ("tree points below 1.0x of a baseline", pd.DataFrame(slower)),
        ("marks", mark_table(marks)),
    ]
    text = [f"{title}\n{_text(table)}" for title, table in tables if not table.empty]
    text += ["points of looping text\n" + "\n".join(found)] if (found := looping(rows)) else []
    text += ["settings that differ from plain decoding's\n" + "\n".join(found)] if (found := result["unequal_settings"]) else []
    text += ["not measured\n" + "\n".join(_line(one) for one in missing)] if missing else []
    wrong = [f"{row['shape']} {row['arm']} {row['workload']} B={row['B']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    text += ["served by the wrong path\n" + "\n".join(wrong)] if wrong else []
    return "\n\n".join(text)


def looping(rows: list[Row]) -> list[str]:
    """Points whose text repeats itself, which flatters every drafter."""
    return [
        f"{row['shape']} {row['workload']} B={row['B']} T={row['temperature']:g} {row['arm']}: {row['distinct_4grams']} of 4-grams distinct"
        for row in rows
        if row.get("looping")
    ]


def _line(one: Row) -> str:
    return f"{one['shape']} {one['arm']}: {one['what']}: {one['reason'].splitlines()[0][:300] if one['reason'] else ''}"


def _text(table: pd.DataFrame) -> str:
    plain = list(table.index.names) == [None]
    return table.to_string(na_rep="-", index=not plain, float_format=lambda x: f"{x:.4g}")
