"""Runs the arms one after the other, each in a process of its own, within the time there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.offline.job import Job, Record
from benchmarks.report import ROOT

# an arm that hangs must not hold the run for ever: without a budget, and after the end of one
ARM_TIMEOUT_S = 3600.0
GRACE_S = 90.0
LOG_LINES = 12
STARTS_WORTH = 2.0


def run_arms(jobs: list[Job], folder: Path, budget_s: float | None, on_gpu: bool, done: Callable[[list[Record]], None]) -> list[Record]:
    """One record a job, in their order; `done` is called with those there are after each. Logs are beside the records in `folder`.

    With a budget an arm may start points until its share of what is left has passed, its engine's start included.
    """
    end = None if budget_s is None else time.time() + budget_s
    found: list[Record] = []
    for index, job in enumerate(jobs):
        starts = [seconds for record in found for seconds in record.start_s]
        share = None if end is None else share_of(end - time.time(), len(jobs) - index, starts)
        found.append(_run(job, folder, share, on_gpu))
        record = found[-1]
        print(f"{record.shape} {record.arm}: {record.status}, {len(record.samples)} runs {record.reason[:200]}", flush=True)
        done(found)
    return found


def share_of(left_s: float, arms: int, starts_s: list[float]) -> float:
    """Seconds for the next of `arms`: an even share, but at least STARTS_WORTH of the slowest start so far. An arm that spends its time on
    its start measures nothing; better that later ones are left out."""
    return min(left_s, max(left_s / arms, STARTS_WORTH * max(starts_s, default=0.0)))


def _run(job: Job, folder: Path, share_s: float | None, on_gpu: bool) -> Record:
    name = f"{job.shape}-{job.arm}"
    file = folder / f"{name}.json"
    record = Record.open(file, job)
    if record.status in ("ok", "refused"):  # of an earlier run
        return record
    if share_s is not None and share_s <= 0:
        record.status, record.reason = "partial" if record.samples else "not started", "the time budget is spent"
        return record
    job_file = folder / f"{name}.job.json"
    job.write(job_file)
    command = [sys.executable, "-m", "benchmarks.offline.arm", str(job_file), str(file)]
    command += [] if share_s is None else [str(time.time() + share_s)]
    log_file = folder / f"{name}.log"
    timeout = ARM_TIMEOUT_S if share_s is None else share_s + GRACE_S
    with log_file.open("w") as log:
        status = _wait(command, _environment(on_gpu), log, timeout)
    record = Record.open(file, job)
    if status != 0 or record.status == "running":
        tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-LOG_LINES:])
        what = f"killed after {timeout:.0f} s" if status is None else f"exit status {status}"
        record.status, record.reason = "error", f"{what}; its log ends:\n{tail}"
    return record


def _wait(command: list[str], environment: dict[str, str], log, timeout_s: float) -> int | None:
    """Exit status; None where the process and its children had to be killed."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def _environment(on_gpu: bool) -> dict[str, str]:
    """The engine in the arm's process; FlashInfer's sampler, which not every machine has, off for all arms. Insecure serialization lets
    functions be called in a worker of another process, if the caller wants one."""
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    defaults["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if on_gpu:
        return {**defaults, "VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ}
    return {**defaults, "VLLM_LOGGING_LEVEL": "WARNING", "TRITON_INTERPRET": "1", **os.environ, "OMP_NUM_THREADS": "1"}
