"""From the arms' records to one row a point, with its text judged against plain decoding's."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.offline import memory, texts
from benchmarks.offline.arms import Arm, engine_name, engines
from benchmarks.offline.job import Job, Record, point_key, text_key

Row = dict[str, Any]

EQUAL_SETTINGS = ("async_scheduling", "enforce_eager", "compilation_mode", "cudagraph_mode")

_MEASURED = ("tokens_per_s", "rounds_per_s", "mat")


def point_rows(records: list[Record]) -> list[Row]:
    """Medians over the runs of every point that was measured."""
    plain = {record.shape: record for record in records if record.arm == "plain"}
    return [_row(record, runs, plain.get(record.shape)) for record in records for runs in _runs(record)]


def _runs(record: Record) -> list[list[Row]]:
    """The samples point by point, in the order of their first runs."""
    found: dict[tuple, list[Row]] = {}
    for sample in record.samples:
        found.setdefault((sample["workload"], sample["B"], sample["temperature"]), []).append(sample)
    return list(found.values())


def _row(record: Record, runs: list[Row], plain: Record | None) -> Row:
    first = runs[0]
    wrong = [text for run in runs for text in run["wrong_path"]]
    row: Row = {
        "shape": record.shape,
        "workload": first["workload"],
        "B": first["B"],
        "temperature": first["temperature"],
        "arm": record.arm,
        "family": Arm.parse(record.arm).family,
        "status": "wrong path" if wrong else "ok",
        "runs": len(runs),
        **{name: statistics.median(run[name] for run in runs) for name in _MEASURED},
        "tokens_per_s_runs": [round(run["tokens_per_s"], 2) for run in runs],
        "counters": first["counters"],
    }
    if wrong:
        row["reason"] = "; ".join(dict.fromkeys(wrong))
    key = point_key((first["workload"], first["B"], first["temperature"]))
    tokens = record.texts.get(key)
    if tokens:
        row |= texts.repetition(tokens)
        reference = None if plain is None or plain is record else plain.texts.get(key)
        # a chain's rejection sampling has random numbers of its own: other samples of the same distribution
        other_samples = row["family"] == "chain" and first["temperature"] > 0
        if reference and not other_samples:
            found = texts.partings(reference, tokens, plain.scores.get(text_key(first["workload"], first["temperature"])))
            row["equality"] = texts.equality(found, len(tokens))
    return row


def memory_rows(records: list[Record]) -> list[Row]:
    """Capacity of every engine that started, each shape's compared with its plain one. `arm` is the engine's name, with all its arms."""
    found = []
    for shape in dict.fromkeys(record.shape for record in records):
        of_arm = {record.arm: record.memory for record in records if record.shape == shape}
        rows = []
        for group in engines([Arm.parse(name) for name in of_arm]):
            known = next((of_arm[arm.name] for arm in group if of_arm[arm.name]), None)
            if known is not None:
                rows.append({"shape": shape, "arm": engine_name(group), **known})
        found += memory.compare(rows)
    return found


def parts_rows(records: list[Record]) -> list[Row]:
    """Parts of a round, of arms that were served by their own path."""
    return [
        {"shape": record.shape, "arm": record.arm, "status": "wrong path" if record.engine.get("wrong_path") else "ok", **row}
        for record in records
        for row in record.parts
    ]


def unequal_settings(records: list[Record]) -> list[str]:
    """Where an engine made something else of the common settings than its shape's plain one: eager against graphs is not a comparison."""
    plain = {record.shape: record for record in records if record.arm == "plain"}
    found = []
    for record in records:
        reference = plain[record.shape].engine if record.shape in plain else {}
        for name in EQUAL_SETTINGS:
            if record.engine and reference and record.engine[name] != reference[name]:
                found.append(f"{record.shape} {record.arm}: {name} {record.engine[name]}, plain decoding {reference[name]}")
    return found


def not_measured(jobs: list[Job], records: list[Record]) -> list[Row]:
    """[{shape, arm, what, reason}] of everything that was asked for and is not there."""
    found: list[Row] = []
    for job, record in zip(jobs, records, strict=True):
        head = {"shape": job.shape, "arm": job.arm}
        missing = [point_key(point) for point in job.points if not record.runs(point)]
        short = [point_key(point) for point in job.points if 0 < record.runs(point) < job.repeats]
        reason = f"{record.status}: {record.reason}".rstrip(": ")
        if missing:
            what = "all points" if len(missing) == len(job.points) else ", ".join(missing)
            found.append({**head, "what": what, "reason": reason})
        if short:
            found.append({**head, "what": f"all {job.repeats} runs of {', '.join(short)}", "reason": reason})
        found += [{**head, **one} for one in record.failed]
    return found


def is_complete(jobs: list[Job], records: list[Record]) -> bool:
    """Whether every point that engines did not refuse was measured as often as asked, and every part of a round."""
    for job, record in zip(jobs, records, strict=True):
        if record.status == "refused":
            continue
        if record.status != "ok" or record.failed or any(record.runs(point) < job.repeats for point in job.points):
            return False
    return True
