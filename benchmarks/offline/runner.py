"""Makes the jobs, runs them, writes the results, prints the tables."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.models.placement import Placement
from benchmarks.models.scale_up import write_folder
from benchmarks.models.shapes import scaled_config
from benchmarks.offline.arms import Arm, engine_arguments, engines
from benchmarks.offline.choose import slower_points, tree_settings, with_ratios
from benchmarks.offline.job import Job, Record
from benchmarks.offline.launch import run_arms
from benchmarks.offline.marks import offline_marks
from benchmarks.offline.options import SMALL, Options
from benchmarks.offline.plots import draw
from benchmarks.offline.prompts import check_tokenizer, demo_prompts, read_workload
from benchmarks.offline.rows import Row, is_complete, memory_rows, not_measured, parts_rows, point_rows, unequal_settings
from benchmarks.offline.tables import looping, render
from benchmarks.report import RESULTS, commit_id, device_slug, environment, headline, write_json

WARMUP_TOKENS = 32
SEED = 0


def run_benchmark(options: Options) -> int:
    """Exit status 1 if an arm was served by the wrong path or a tree changed a token beyond a tie."""
    started = time.monotonic()
    env = environment(options.command, options.device)
    folder = options.out or (RESULTS / device_slug(options.device) if options.timed else None)
    for path in (folder, options.records):
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    with nullcontext(options.records) if options.records else tempfile.TemporaryDirectory() as work:
        work = Path(work).resolve()
        jobs = make_jobs(options, work, folder or work, env["device"])

        def save(records: list[Record]) -> None:
            """After every engine: a run that is cut off keeps what it has."""
            if folder is not None:
                result = results(options, env, jobs[: len(records)], records, time.monotonic() - started)
                write_json(folder / f"{options.results_name(complete=False)}.json", result)

        records = run_arms(jobs, work, options.budget_s, options.device.type == "cuda", save)
        result = results(options, env, jobs, records, time.monotonic() - started)
    return finish(options, result, folder)


def make_jobs(options: Options, work: Path, traces: Path, device: str) -> list[Job]:
    """One an arm and shape, arms of an engine after each other. SystemExit where a shape, workload or engine cannot be made."""
    commit, jobs = commit_id(), []
    groups = engines([Arm.parse(name) for name in options.arms])
    try:
        own = [engine_arguments(group, options.bole, options.max_num_seqs) for group in groups]
    except ValueError as error:
        raise SystemExit(f"--arms: {error}") from None
    for shape in options.shapes:
        model, how = _checkpoint(shape, options.models[shape], work)
        prompts = _prompts(options, options.models[shape], max(arm.nodes for group in groups for arm in group))
        shared = {"model": str(model), **options.engine_arguments(), **how}
        weights = checkpoint_id(options.models[shape])
        for arm, arguments in ((arm, arguments) for group, arguments in zip(groups, own) for arm in group):
            jobs.append(Job(
                shape=shape, arm=arm.name, engine=shared | arguments, weights=weights, scale_up=bool(how),
                prompts=prompts, points=options.points(), repeats=options.repeats, max_tokens=options.max_tokens,
                warmup_tokens=WARMUP_TOKENS if options.timed else 2, requests=options.prompts,
                parts_batches=[batch for batch in options.parts_batches if batch <= options.max_num_seqs],
                trace=str(traces.resolve()) if arm.name in options.trace else None, commit=commit, device=device,
            ))  # fmt: skip
    return jobs


def _checkpoint(shape: str, small: Path, work: Path) -> tuple[Path, dict[str, Any]]:
    """(folder for vLLM, its load arguments). A large shape's folder has no weights: they are made in the engine."""
    if shape == SMALL:
        return small, {}
    small_config = json.loads((small / "config.json").read_text())
    config = scaled_config(shape, small_config)
    try:
        Placement(small_config, config)
    except ValueError as error:
        raise SystemExit(f"{small} cannot be scaled up to {shape}: {error}") from None
    folder = work / "models" / shape
    write_folder(folder, config, small)
    return folder, {"load_format": "scale_up", "model_loader_extra_config": {"small": str(small), "seed": SEED}}


def checkpoint_id(folder: Path) -> str:
    """What tells a small checkpoint from another, wherever it lies."""
    digest = hashlib.sha256()
    for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _prompts(options: Options, model: Path, nodes: int) -> dict[str, list[list[int]]]:
    """Workload -> prompts with room for their tokens and one more tree, as many as any point serves."""
    wanted = max(options.prompts, *options.batches, *options.parts_batches)
    if options.workload_folder is None:
        return {name: demo_prompts(model, wanted) for name in options.workloads}
    longest = options.max_model_len - options.max_tokens - nodes
    try:
        check_tokenizer(options.workload_folder, model)
        return {name: read_workload(options.workload_folder / f"{name}.jsonl", longest)[:wanted] for name in options.workloads}
    except (OSError, ValueError) as error:
        raise SystemExit(f"--workloads: {error}") from None


def results(options: Options, env: dict[str, Any], jobs: list[Job], records: list[Record], seconds: float) -> dict[str, Any]:
    """Everything that the file of results holds."""
    rows = with_ratios(point_rows(records))
    parts, memory = parts_rows(records), memory_rows(records)
    arms = len(options.shapes) * len(options.arms)
    marks = offline_marks(rows, parts, memory) if options.timed else []
    settings = [{"shape": s, "B": b, "temperature": t, "arm": arm} for (s, b, t), arm in tree_settings(rows).items()]
    return {
        "marks": [mark.as_json() for mark in marks],
        "env": env,
        "timed": options.timed,
        "complete": len(records) == arms and is_complete(jobs, records),
        "settings": {
            "engine": options.engine_arguments(),
            "compilation": options.compilation or "vLLM's default",
            "bole": options.bole,
            "repeats": options.repeats,
            "max_tokens": options.max_tokens,
            "requests": options.prompts,
            "models": {shape: path.name for shape, path in options.models.items()},
        },
        "arms": [_arm(record) for record in records],
        "gates_failed": gates_failed(rows, records),
        "unequal_settings": unequal_settings(records),
        "tree_settings": settings,
        "slower_points": slower_points(rows) if options.timed else [],
        "looping_points": looping(rows),
        "not_measured": not_measured(jobs, records),
        "seconds": round(seconds, 1),
        "rows": rows,
        "parts": parts,
        "memory": memory,
    }


def _arm(record: Record) -> Row:
    names = ("shape", "arm", "status", "reason", "start_s", "engine")
    return {name: getattr(record, name) for name in names}


def gates_failed(rows: list[Row], records: list[Record]) -> list[str]:
    """Arms of the wrong path, and tree points whose tokens part from plain decoding's by more than a tie."""
    found = [f"{one.shape} {one.arm}: {text}" for one in records for text in one.engine.get("wrong_path", ())]
    for row in rows:
        place = f"{row['shape']} {row['arm']} {row['workload']} B={row['B']}"
        if row["status"] != "ok":
            found.append(f"{place}: {row['reason']}")
        if row["family"] in ("tree", "serial") and (beyond := row.get("equality", {}).get("beyond")):
            found.append(f"{place}: {beyond} prompts part from plain decoding beyond a tie")
    return found


def finish(options: Options, result: dict[str, Any], folder: Path | None) -> int:
    """Write, draw, print; the last line is JSON."""
    env = result["env"]
    head = headline(env)
    marks = offline_marks(result["rows"], result["parts"], result["memory"]) if options.timed else []
    rows, parts, memory = result["rows"], result["parts"], result["memory"]
    text = render(result, marks)
    path = None
    if folder is not None:
        name = options.results_name(result["complete"])
        path = folder / f"{name}.json"
        write_json(path, result)
        path.with_suffix(".txt").write_text(f"{head}\n\n{text}\n")
        draw(rows, parts, memory, folder, name, head)
        if name != (partial := options.results_name(complete=False)):
            (folder / f"{partial}.json").unlink(missing_ok=True)
    print(f"{head}\n\n{text}")
    short = [mark.name for mark in marks if not mark.ok]
    last = {"file": path and str(path), "marks": len(marks), "short": short, "gates_failed": result["gates_failed"]}
    print(json.dumps({**last, "not_measured": len(result["not_measured"]), "seconds": result["seconds"]}))
    return 1 if result["gates_failed"] else 0
