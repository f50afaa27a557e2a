"""Runs the engines one after the other, each with its arms in a process of its own, within the time there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.offline.job import Job, Record
from benchmarks.report import ROOT

# an arm that hangs must not hold the run for ever: without a budget, and after the end of one
ARM_TIMEOUT_S = 3600.0
GRACE_S = 90.0
LOG_LINES = 12
STARTS_WORTH = 2.0
# seconds that a start takes, as long as none has been seen
FIRST_START_S = 90.0
# of records that nothing is to be added to
DONE = ("ok", "refused")


@dataclass
class Task:
    """A job and its record, in files of the arm's name."""

    job: Job
    folder: Path
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        self.read()

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.job.shape}-{self.job.arm}{suffix}"

    def read(self) -> None:
        """The record as it lies in its file."""
        self.record = Record.open(self.file(".json"), self.job)

    def wait(self) -> None:
        """Write the files that a process needs; in its record the arm has not been begun."""
        self.record.failed = []
        self.end("waiting", "")
        self.record.save(self.file(".json"))
        self.job.write(self.file(".job.json"))

    def end(self, status: str, reason: str) -> None:
        self.record.status, self.record.reason = status, reason


def run_arms(jobs: list[Job], folder: Path, budget_s: float | None, on_gpu: bool, done: Callable[[list[Record]], None]) -> list[Record]:
    """One record a job, in their order; `done` is called with those there are after each engine. Logs are beside the records in `folder`.

    Jobs after each other that name the same engine share it. With a budget an engine's arms may start points until its share of what is
    left has passed, its start included.
    """
    end = None if budget_s is None else time.time() + budget_s
    tasks = [Task(job, folder) for job in jobs]
    engines = [list(group) for _, group in groupby(tasks, key=lambda task: (task.job.shape, task.job.engine))]
    waiting = [[task for task in engine if task.record.status not in DONE] for engine in engines]
    found: list[Record] = []
    with Processes(engine_environment(on_gpu)) as processes:
        for index, engine in enumerate(engines):
            if arms := waiting[index]:
                starts = [seconds for record in found for seconds in record.start_s]
                left = sum(map(len, waiting[index:]))
                share = None if end is None else share_of(end - time.time(), len(arms), left, starts)
                processes.more = any(waiting[index + 1 :])
                _run(arms, None if share is None else time.time() + share, processes)
            _report(found, engine, done)
    return found


def _report(found: list[Record], engine: list[Task], done: Callable[[list[Record]], None]) -> None:
    """Add the engine's records to those found, and say how its arms ended."""
    for task in engine:
        record = task.record
        found.append(record)
        print(f"{record.shape} {record.arm}: {record.status}, {len(record.samples)} runs {record.reason[:200]}", flush=True)
    done(found)


def share_of(left_s: float, arms: int, arms_left: int, starts_s: list[float]) -> float:
    """Seconds for an engine of `arms` of the `arms_left`: as much for every arm, but at least STARTS_WORTH of the slowest start so far. An
    engine that spends its time on its start measures nothing; better that later ones are left out."""
    return min(left_s, max(left_s * arms / arms_left, STARTS_WORTH * max(starts_s, default=FIRST_START_S)))


def _run(waiting: list[Task], deadline: float | None, processes: Processes) -> None:
    """Start an engine for the arms; if one of them ended it, another one for those after it."""
    while waiting:
        if deadline is not None and time.time() >= deadline:
            for task in waiting:
                task.end("partial" if task.record.samples else "not started", "the time budget is spent")
            return
        how = _process(waiting, deadline, processes)
        for task in waiting:
            task.read()
        left = [task for task in waiting if task.record.status == "waiting"]
        started = len(left) < len(waiting)
        for task in waiting:
            if task.record.status == "running" or not started:
                task.end("error", how)
        waiting = left if started else []


def _process(tasks: list[Task], deadline: float | None, processes: Processes) -> str:
    """Run the arms' process to its end, and say how that was."""
    for task in tasks:
        task.wait()
    log = tasks[0].file(".log")
    log.unlink(missing_ok=True)
    timeout = ARM_TIMEOUT_S * len(tasks) if deadline is None else deadline - time.time() + GRACE_S
    arms = [[str(task.file(".job.json")), str(task.file(".json"))] for task in tasks]
    status = processes.run({"deadline": deadline, "log": str(log), "arms": arms}, timeout)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if log.exists() else ""
    what = f"killed after {timeout:.0f} s" if status is None else f"exit status {status}"
    return f"{what}; its log ends:\n{tail}"


class Processes:
    """Processes of benchmarks.offline.arm, one at work and, while `more`, one that imports vLLM ahead of its turn.

    It does so while the other starts its engine; when that measures, the next one waits for its line and uses nothing.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.more = environment, False
        self._next: subprocess.Popen | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._next is not None:
            self._next.stdin.close()  # it ends
            self._next.wait()

    def run(self, order: dict[str, Any], timeout_s: float) -> int | None:
        """Exit status of a process with this order (arm.py); None where it and its children had to be killed."""
        process = self._next or self._start()
        self._next = self._start() if self.more else None
        try:
            with suppress(BrokenPipeError):  # it died while it imported: its status says so
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.close()
            return process.wait(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "benchmarks.offline.arm"]
        # what it says before it has its log goes to ours
        streams = {"stdin": subprocess.PIPE, "stdout": sys.stderr, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, start_new_session=True, **streams)


def engine_environment(on_gpu: bool) -> dict[str, str]:
    """The engine in the arm's process; FlashInfer's sampler, which not every machine has, off for all arms. Insecure serialization lets
    functions be called in a worker of another process, if the caller wants one."""
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    defaults["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if on_gpu:
        return {**defaults, "VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ}
    return {**defaults, "VLLM_LOGGING_LEVEL": "WARNING", "TRITON_INTERPRET": "1", **os.environ, "OMP_NUM_THREADS": "1"}
