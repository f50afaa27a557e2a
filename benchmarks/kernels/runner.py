"""Runs the cases, writes the results, prints the tables."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch

from benchmarks.kernels import attention, commit, draft, native, precision, verify
from benchmarks.kernels.case import REFERENCE_BANDWIDTH, Case, Context, Row, free_memory, run_case
from benchmarks.kernels.marks import kernel_marks
from benchmarks.kernels.options import Options
from benchmarks.kernels.plots import draw
from benchmarks.kernels.tables import render
from benchmarks.kernels.trace import trace_round
from benchmarks.report import RESULTS, ROOT, device_slug, environment, headline, write_json
from benchmarks.timing import copy_bandwidth
from bole_vllm.config import BoleConfig
from bole_vllm.kernels.precision import DEFAULT

MODULES = {"verify": verify, "native": native, "precision": precision, "commit": commit, "attention": attention, "draft": draft}
COMPILE_TIMEOUT_S = 240


def all_cases(options: Options) -> list[Case]:
    return [case for stage in options.only for case in MODULES[stage].cases(options)]


def run_benchmark(options: Options) -> int:
    """Exit status 1 if a gate failed; arms that could not run are in the results, with the reason."""
    torch.manual_seed(0)
    if options.shard is not None:
        run_cases(all_cases(options), Context(options))
        return 0
    started = time.perf_counter()
    compiled_s = compile_ahead(options)
    bandwidth = copy_bandwidth(options.device) if options.timed else 0.0
    if not options.timed:
        print("tiny shapes: correctness gates only, nothing is timed", flush=True)
    rows = run_cases(all_cases(options), Context(options, bandwidth=bandwidth), progress=options.timed)
    seconds = {"compile_ahead": round(compiled_s, 1), "total": round(time.perf_counter() - started, 1)}
    return _finish(options, rows, bandwidth, seconds)


def run_cases(cases: list[Case], context: Context, progress: bool = False) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        found = run_case(case, context)
        rows += found
        free_memory()
        if progress:
            labels = " ".join(f"{name}={value}" for name, value in case.labels.items())
            bad = [row["arm"] for row in found if row["status"] != "ok"]
            print(f"{case.stage} {labels}: {found[0].get('case_s', 0)} s{', without result: ' + ', '.join(bad) if bad else ''}", flush=True)
    return rows


def compile_ahead(options: Options) -> float:
    """Fills Triton's cache with several processes, each with a share of every case's arms; seconds. Compiling is most of a run's time."""
    if not options.timed or options.jobs < 1:
        return 0.0
    started = time.perf_counter()
    flags = [f"--{name}" for name in ("quick", "full", "ragged") if getattr(options, name)]
    command = [sys.executable, "-m", "benchmarks", "kernels", "--only", ",".join(options.only), *flags, "--shard"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    workers = [subprocess.Popen([*command, f"{i}/{options.jobs}"], cwd=ROOT, **quiet) for i in range(options.jobs)]
    for worker in workers:
        try:
            worker.wait(timeout=max(1.0, COMPILE_TIMEOUT_S - (time.perf_counter() - started)))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    return time.perf_counter() - started


def _finish(options: Options, rows: list[Row], bandwidth: float, seconds: dict[str, float]) -> int:
    folder = options.out or (RESULTS / device_slug(options.device) if options.timed else None)
    env = environment(options.command, options.device)
    marks = kernel_marks(rows, BoleConfig.commit) if options.timed else []
    failed = sorted({f"{row['stage']} / {row['arm']}" for row in rows if row["status"] == "gate failed"})
    data = {
        "marks": [mark.as_json() for mark in marks],
        "env": env,
        "timed": options.timed,
        "defaults": {"precision": DEFAULT, "commit": BoleConfig.commit},
        "copy_bandwidth": round(bandwidth),
        "reference_bandwidth": REFERENCE_BANDWIDTH,
        "seconds": seconds,
        "gates_failed": failed,
        "rows": rows,
    }
    head = headline(env)
    if options.timed:
        head += f"\ncopy bandwidth {bandwidth / 1e12:.3f} TB/s (floors; also at {REFERENCE_BANDWIDTH / 1e12:g} in the file)"
    text = f"{head}\n\n{render(rows, marks, options.timed)}"
    if options.trace:
        text += "\n\n" + trace_round(folder, options.device, options.tiny, BoleConfig.commit)
    path = None
    if folder is not None:
        path = folder / f"{options.results_name}.json"
        write_json(path, data)
        path.with_suffix(".txt").write_text(text + "\n")
        draw(rows, folder, options.results_name, head.splitlines()[0])
    print(text)
    short = [mark.name for mark in marks if not mark.ok]
    print(json.dumps({"file": path and str(path), "marks": len(marks), "short": short, "gates_failed": failed, "seconds": seconds}))
    return 1 if failed else 0
