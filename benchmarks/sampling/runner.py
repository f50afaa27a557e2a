"""Serves every option in one engine, and writes what its rounds took."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.offline import engine, parts, path
from benchmarks.offline.arms import Arm
from benchmarks.offline.job import Job
from benchmarks.offline.launch import engine_environment
from benchmarks.offline.options import SAMPLED, Options
from benchmarks.report import RESULTS, device_slug, environment, headline, write_json
from benchmarks.sampling.options import NONE, Option, options
from benchmarks.sampling.vocabulary import fill_vocabulary

MIB = 2**20


def run_benchmark(settings: Options) -> int:
    """Exit status 1 if a gate failed."""
    os.environ.update(engine_environment(settings.device.type == "cuda"))  # before vLLM is imported
    from benchmarks.offline.runner import make_jobs

    started = time.monotonic()
    env = environment(settings.command, settings.device)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for job in make_jobs(settings, Path(work), Path(work), env["device"]):
            rows += measure_arm(job, settings)
    result = {"env": env, "timed": settings.timed, "seconds": round(time.monotonic() - started, 1), "rows": with_ratios(rows)}
    return finish(settings, result)


def measure_arm(job: Job, settings: Options) -> list[dict[str, Any]]:
    """One engine's rows: every option at every number of requests."""
    job.engine["skip_tokenizer_init"] = False  # words and grammars
    if job.scale_up:
        fill_vocabulary(Path(job.engine["model"]))
    llm, arm = engine.start(job), Arm.parse(job.arm)
    engine.set_drafts(llm, arm.num_drafts)
    prompts = next(iter(job.prompts.values()))
    rows, every = [], options(SAMPLED, llm.get_tokenizer())
    for batch in settings.batches:
        for option in every:
            serve(llm, prompts[:batch], option, job.warmup_tokens)
            rows.append({"shape": job.shape, "arm": job.arm, "B": batch} | measure(llm, arm, prompts[:batch], option, job.max_tokens))
    return rows


def measure(llm: Any, arm: Arm, prompts: list[list[int]], option: Option, max_tokens: int) -> dict[str, Any]:
    """One option's row: medians by part of a round, and the gate."""
    before = path.counters(llm, arm)
    llm.collective_rpc(start_memory)
    llm.collective_rpc(parts.start_parts)
    outputs = serve(llm, prompts, option, max_tokens)
    found = parts.medians(llm.collective_rpc(parts.stop_parts, args=(len(prompts),))[0]) or {}
    added = path.change(before, path.counters(llm, arm))
    broken = sum(not option.kept(output) for output in outputs)
    return {
        "option": option.name,
        **found,
        "mat": round(added["tokens"] / max(1, added["rows"]), 2),
        "peak_mib": llm.collective_rpc(peak_memory)[0],
        "failed": path.wrong_rounds(arm, added) + ([f"{broken} texts break the option's promise"] if broken else []),
    }


def serve(llm: Any, prompts: list[list[int]], option: Option, max_tokens: int) -> list[Any]:
    """The completions of prompt i under seed i."""
    from vllm import SamplingParams

    params = [SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **option.arguments) for seed in range(len(prompts))]
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    return [output.outputs[0] for output in llm.generate(requests, params, use_tqdm=False)]


def start_memory(worker: Any) -> None:
    """RPC: the peak is that of what comes."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory(worker: Any) -> float | None:
    """RPC: MiB that tensors took at the peak; None without a GPU."""
    import torch

    return round(torch.cuda.max_memory_allocated() / MIB, 1) if torch.cuda.is_available() else None


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with the sampler's time and the peak beyond those of NONE in the same engine and batch."""
    base = {(row["shape"], row["arm"], row["B"]): row for row in rows if row["option"] == NONE}
    found = []
    for row in rows:
        none = base[row["shape"], row["arm"], row["B"]]
        extra = {}
        if row.get("sample_ms") is not None and none.get("sample_ms") is not None:
            extra["added_ms"] = round(row["sample_ms"] - none["sample_ms"], 4)
        if row["peak_mib"] is not None:
            extra["added_mib"] = round(row["peak_mib"] - none["peak_mib"], 1)
        found.append(row | extra)
    return found


def finish(settings: Options, result: dict[str, Any]) -> int:
    """Write and print; the last line is JSON. Without a GPU no times are told."""
    rows, env = result["rows"], result["env"]
    failed = [f"{row['arm']} B={row['B']} {row['option']}: {text}" for row in rows for text in row["failed"]]
    result["gates_failed"] = failed
    if not settings.timed:
        result["rows"] = rows = [{k: v for k, v in row.items() if not k.endswith(("_ms", "_mib"))} for row in rows]
    head = headline(env)
    table = pd.DataFrame(rows).drop(columns="failed").to_string(index=False, na_rep="-")
    folder = settings.out or (RESULTS / device_slug(settings.device) if settings.timed else None)
    file = None if folder is None else folder / ("sampling.json" if settings.timed else "tiny-sampling.json")
    if file is not None:
        write_json(file, result)
        file.with_suffix(".txt").write_text(f"{head}\n\n{table}\n")
    print(f"{head}\n\n{table}")
    print(json.dumps({"file": file and str(file), "gates_failed": failed, "seconds": result["seconds"]}))
    return 1 if failed else 0
