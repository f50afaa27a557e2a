"""One arm in a process of its own: `python -m benchmarks.offline.arm JOB RECORD [DEADLINE]`, the deadline in seconds of the epoch."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.kernels.case import describe
from benchmarks.offline import memory, parts, path, rounds, trace
from benchmarks.offline.arms import Arm
from benchmarks.offline.job import Job, Point, Record, point_key
from benchmarks.offline.prompts import groups
from benchmarks.offline.texts import TOP_LOGITS

TRACE_TOKENS = 24


class OutOfTime(Exception):
    """No point may be started any more."""


class ArmRun:
    """An engine and what it is asked to measure."""

    def __init__(self, job: Job, record: Record, file: Path, deadline: float) -> None:
        self.job, self.record, self.file, self.deadline = job, record, file, deadline
        self.arm = Arm.parse(job.arm)
        self.llm: Any = None
        self.problems: list[str] = []

    def run(self) -> None:
        """Every point once, then what explains them, then the repeats; stops at the deadline. The record is saved on the way."""
        started = time.monotonic()
        self.start()
        self.warm_up()
        self.record.start_s.append(round(time.monotonic() - started, 1))
        for repeat in range(self.job.repeats):
            for point in self.job.points:
                self.check_time()
                if self.record.runs(point) <= repeat:
                    self.attempt(f"{point_key(point)}, run {repeat}", lambda point=point: self.measure(point))
            if repeat == 0:
                self.explain()

    def start(self) -> None:
        """Start the engine and note what it is."""
        from vllm import LLM

        if self.job.scale_up:
            from benchmarks.models.loader import register_loader

            register_loader()
        self.llm = LLM(**self.job.engine)
        found = self.llm.collective_rpc(path.classes)[0]
        stats = self.llm.collective_rpc("bole_stats")[0] if self.arm.bole is not None else {}
        verify = self.llm.collective_rpc(path.verify_setting)[0]
        self.problems = path.wrong_classes(self.arm, found) + path.wrong_verify(self.arm, verify)
        served = {"classes": found, "verify": verify, "bole_stats": stats, "wrong_path": self.problems}
        self.record.engine = effective_settings(self.llm) | served
        self.record.memory = {**memory.capacity(self.llm), **self.llm.collective_rpc(memory.bytes_of)[0]}

    def warm_up(self) -> None:
        """Compiles and captures what each batch size needs, on every workload's first prompts."""
        for batch in sorted({batch for _, batch, _ in self.job.points}):
            for prompts in self.job.prompts.values():
                self.check_time()
                if len(prompts) >= batch:
                    self.serve(prompts[:batch], 0.0, self.job.warmup_tokens)

    def check_time(self) -> None:
        if time.time() > self.deadline:
            raise OutOfTime("the time budget is spent")

    def attempt(self, what: str, measure: Any) -> None:
        """Run it; where the workload cannot do it, say so and go on."""
        try:
            measure()
        except ValueError as error:
            self.record.failed.append({"what": what, "reason": str(error)})
        self.record.save(self.file)

    def serve(self, prompts: list[list[int]], temperature: float, max_tokens: int) -> list[rounds.Step]:
        return rounds.serve(self.llm.llm_engine, prompts, temperature, max_tokens)

    def measure(self, point: Point) -> None:
        """One run of a point: its prompts, a batch at a time."""
        workload, batch, temperature = point
        prompts = self.job.prompts[workload]
        before = path.counters(self.llm, self.arm)
        windows, texts = [], []
        for indices in groups(prompts, batch, self.job.requests):
            steps = self.serve([prompts[i] for i in indices], temperature, self.job.max_tokens)
            windows.append(rounds.window(steps, batch))
            texts += rounds.texts(steps, batch)
        if any(len(text) != self.job.max_tokens for text in texts):
            raise RuntimeError(f"requests of {sorted({len(text) for text in texts})} tokens instead of {self.job.max_tokens}")
        window = rounds.joined(windows)
        if window is None:
            raise ValueError("no round in which the whole batch decoded: raise --max-tokens")
        added = path.change(before, path.counters(self.llm, self.arm))
        self.record.texts.setdefault(point_key(point), texts)
        self.record.samples.append({
            "workload": workload, "B": batch, "temperature": temperature, "tokens_per_s": window.tokens_per_s, "mat": window.mat,
            "rounds_per_s": window.rounds_per_s, "tokens": window.tokens, "rounds": window.rounds, "seconds": window.seconds,
            "counters": added, "wrong_path": self.problems + path.wrong_rounds(self.arm, added),
        })  # fmt: skip

    def explain(self) -> None:
        """Logits of the greedy texts, parts of a round, traces: what is not on the record yet."""
        for workload in self.job.prompts:
            if workload not in self.record.logits:
                self.check_time()
                self.attempt(f"logits of {workload}", lambda workload=workload: self.note_logits(workload))
        measured = {row["B"] for row in self.record.parts}
        for batch in self.job.parts_batches:
            if batch not in measured:
                self.check_time()
                self.attempt(f"parts of a round at B={batch}", lambda batch=batch: self.note_parts(batch))

    def note_logits(self, workload: str) -> None:
        """Of as many prompts as the largest batch of the points serves."""
        batches = [batch for name, batch, _ in self.job.points if name == workload]
        wanted = max(self.job.requests, *batches)
        self.record.logits[workload] = rounds.logits(self.llm, self.job.prompts[workload][:wanted], self.job.max_tokens, TOP_LOGITS)

    def note_parts(self, batch: int) -> None:
        """On the first workload, greedy."""
        workload, prompts = next(iter(self.job.prompts.items()))
        chosen = [prompts[i] for i in groups(prompts, batch, batch)[0]]
        self.serve(chosen, 0.0, self.job.warmup_tokens)
        self.llm.collective_rpc(parts.start_parts)
        self.serve(chosen, 0.0, self.job.max_tokens)
        found = parts.medians(self.llm.collective_rpc(parts.stop_parts, args=(batch,))[0])
        if found is None:
            raise ValueError("no round in which the whole batch decoded")
        row = {"workload": workload, "B": batch, **found}
        if self.job.trace is not None:
            file = trace.trace_path(Path(self.job.trace), self.job.shape, self.job.arm, batch)
            self.llm.collective_rpc(trace.start_trace)
            self.serve(chosen, 0.0, min(TRACE_TOKENS, self.job.max_tokens))
            row["kernels"] = self.llm.collective_rpc(trace.stop_trace, args=(file,))[0]
        self.record.parts.append(row)


def effective_settings(llm: Any) -> dict[str, Any]:
    """What the engine made of its settings, and versions."""
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    return {
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "enforce_eager": config.model_config.enforce_eager,
        "compilation_mode": getattr(compilation.mode, "name", str(compilation.mode)),
        "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
        "max_cudagraph_capture_size": compilation.max_cudagraph_capture_size,
        "attention_backend": getattr(config.attention_config.backend, "name", None),
        "block_size": config.cache_config.block_size,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }


def refusal(error: Exception) -> str | None:
    """Why settings were turned down while the configuration was built; None for any other error.

    pydantic hides the class of what a validator raised, not its text.
    """
    from pydantic import ValidationError

    from bole_vllm.config import BoleConfigError

    if isinstance(error, ValidationError):
        return "; ".join(found["msg"].removeprefix("Value error, ") for found in error.errors())
    return str(error) if isinstance(error, BoleConfigError) else None


def main() -> None:
    job_file, record_file, *deadline = sys.argv[1:]
    job, file = Job.read(Path(job_file)), Path(record_file)
    record = Record.open(file, job)
    record.status, record.reason, record.failed = "running", "", []
    record.save(file)
    try:
        ArmRun(job, record, file, float(deadline[0]) if deadline else float("inf")).run()
        record.status = "ok"
    except OutOfTime as reason:
        record.status, record.reason = "partial", str(reason)
    except Exception as error:  # recorded: it costs this arm only
        reason = None if record.samples else refusal(error)
        record.status, record.reason = ("error", describe(error)) if reason is None else ("refused", reason)
        traceback.print_exc()
    record.save(file)
    print(f"{record.shape} {record.arm}: {record.status} {record.reason}", flush=True)


if __name__ == "__main__":
    main()
