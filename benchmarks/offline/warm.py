"""Fills Triton's cache with what the engines of a run compile, in processes side by side: `python -m benchmarks.offline.warm OPTIONS`.

Options are those of `python -m benchmarks offline`, the cache is TRITON_CACHE_DIR. A first start compiles for minutes, one kernel after
another, most of it configurations that vLLM's prefill kernels are tuned over. What is compiled follows from sizes and numbers of heads,
not from widths or the number of layers: engines of four narrow layers with dummy weights, which fit beside each other, compile the same.
Several of a shape's first engine share the configurations out among them. Their timings are not kept, since they disturb each other; the
engines of the run tune for themselves, from compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zlib
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.models.scale_up import write_folder
from benchmarks.models.shapes import PERIOD, layer_types, scaled_config
from benchmarks.offline.arms import Arm
from benchmarks.offline.job import Job
from benchmarks.offline.launch import engine_environment
from benchmarks.offline.options import SMALL, Options, add_arguments
from benchmarks.offline.runner import make_jobs
from benchmarks.report import ROOT

# processes that share the configurations of one shape
SHARES, NO_SHARE = 4, -1
WIDTH = 512
TOKENS = 6
TIMEOUT_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline.warm", description=__doc__)
    add_arguments(parser)
    options = Options.from_args(parser.parse_args())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        orders = make_orders(options, Path(work))
        environment = engine_environment(options.device.type == "cuda")
        environment.pop("TRITON_CACHE_AUTOTUNING", None)  # no timing of these is to be kept
        failed = run_all(orders, environment, Path(work))
    print(json.dumps({"processes": len(orders), "failed": failed, "seconds": round(time.monotonic() - started, 1)}))
    return 1 if failed else 0


def make_orders(options: Options, work: Path) -> list[dict[str, Any]]:
    """What each process is to start and serve."""
    orders: list[dict[str, Any]] = []
    jobs = make_jobs(options, work, work, options.device.type)
    for (shape, _), group in groupby(jobs, key=lambda job: (job.shape, job.engine)):
        arms = list(group)
        engine = narrow_engine(arms[0], options, work)
        # a shape's first engine compiles what prefills are tuned over
        first = all(order["shape"] != shape for order in orders)
        shares = range(SHARES if options.timed else 1) if first else (NO_SHARE,)
        order = {
            "shape": shape,
            "name": f"{shape} {arms[0].arm}",
            "engine": engine,
            "drafts": [Arm.parse(job.arm).num_drafts for job in arms],
            "batches": sorted({batch for _, batch, _ in arms[0].points}),
            "temperatures": sorted({temperature for *_, temperature in arms[0].points}),
            "shares": len(shares),
        }
        orders += [{**order, "share": share} for share in shares]
    return orders


def narrow_engine(job: Job, options: Options, work: Path) -> dict[str, Any]:
    """The job's arguments of vllm.LLM for a model of the same heads that takes little memory and no time."""
    engine = {name: value for name, value in job.engine.items() if name not in ("model_loader_extra_config", "compilation_config")}
    own: dict[str, Any] = {"load_format": "dummy", "enforce_eager": True}
    if options.device.type == "cuda":  # states of the largest batch, one for every draft of a chain; of the rest little
        own |= {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.02}
    if job.shape == SMALL:
        return engine | own
    small = options.models[job.shape]
    config = scaled_config(job.shape, json.loads((small / "config.json").read_text()))
    config |= {"hidden_size": WIDTH, "num_hidden_layers": PERIOD, "layer_types": layer_types(config)[:PERIOD]}
    config |= {name: WIDTH for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size") if name in config}
    folder = work / "narrow" / job.shape
    write_folder(folder, config, small)
    return engine | own | {"model": str(folder)}


def run_all(orders: list[dict[str, Any]], environment: dict[str, str], work: Path) -> list[str]:
    """Run all processes at once; the names of those that failed, whose output is printed."""
    running = []
    for index, order in enumerate(orders):
        log = work / f"{index}.log"
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.offline.warm", "--worker", json.dumps(order)],
            cwd=ROOT, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        running.append((order["name"], process, log))
    end, failed = time.monotonic() + TIMEOUT_S, []
    for name, process, log in running:
        try:
            status = process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status:
            failed.append(name)
            print(f"{name}: exit status {status}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
    return failed


def share_autotuning(share: int, shares: int) -> None:
    """From now on this process compiles and times only its share of the configurations of a kernel; the others count as slow."""
    from triton.runtime.autotuner import Autotuner

    measure = Autotuner._bench

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if zlib.crc32(f"{self.base_fn.__name__} {config}".encode()) % shares == share:
            return measure(self, *args, config=config, **meta)
        return [float("inf")] * 3

    Autotuner._bench = bench


def work_on(order: dict[str, Any]) -> None:
    """Start the engine and serve a few tokens in every way of the run."""
    share_autotuning(order["share"], order["shares"])
    from vllm import LLM

    from benchmarks.offline import engine, rounds

    llm = LLM(**order["engine"])
    prompts = [[5 + i] * 40 for i in range(max(order["batches"]))]
    for drafts in order["drafts"]:
        engine.set_drafts(llm, drafts)
        for batch in order["batches"]:
            for temperature in order["temperatures"]:
                rounds.serve(llm.llm_engine, prompts[:batch], temperature, TOKENS, range(batch))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work_on(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
