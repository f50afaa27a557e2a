"""Arms of one engine, in a process of their own: `python -m benchmarks.offline.arm`, told by one line of its input what to do.

The line is a JSON object: `deadline` in seconds of the epoch or null, `log` (a file for all output), `arms` [[job file, record file], ...],
whose jobs all name the same engine. vLLM is imported before the line is read, so that a process may be started ahead of its turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.kernels.case import describe
from benchmarks.offline import engine, memory, parts, path, rounds, timeline, trace
from benchmarks.offline.arms import Arm
from benchmarks.offline.job import Job, Point, Record, point_key, text_key
from benchmarks.offline.prompts import groups

TRACE_TOKENS = 24


class OutOfTime(Exception):
    """No point may be started any more."""


class ArmRun:
    """An arm, its record, and the engine it is measured in."""

    def __init__(self, job: Job, file: Path) -> None:
        self.job, self.file = job, file
        self.arm = Arm.parse(job.arm)
        self.record = Record.open(file, job)
        self.llm: Any = None
        self.deadline = float("inf")
        self.problems: list[str] = []

    def run(self, llm: Any, deadline: float, started: float) -> None:
        """Measure until the deadline; the record says how that ended, and is saved on the way.

        `started`: when, on the monotonic clock, what the arm costs before its first point began.
        """
        self.llm, self.deadline = llm, deadline
        self.end("running")
        try:
            self.measure_all(started)
            self.end("ok")
        except OutOfTime as reason:
            self.end("partial", str(reason))
        except Exception as error:  # recorded: it costs this arm only
            traceback.print_exc()
            self.end("error", describe(error))

    def end(self, status: str, reason: str = "") -> None:
        """Put it on the record."""
        self.record.status, self.record.reason = status, reason
        self.record.save(self.file)
        print(f"{self.record.shape} {self.record.arm}: {status} {reason}", flush=True)

    def measure_all(self, started: float) -> None:
        """Every point as often as asked, then what explains them."""
        engine.set_drafts(self.llm, self.arm.num_drafts)
        self.note_engine()
        self.warm_up()
        self.record.start_s.append(round(time.monotonic() - started, 1))
        for repeat in range(self.job.repeats):
            for point in self.job.points:
                self.check_time()
                if self.record.runs(point) <= repeat:
                    self.attempt(f"{point_key(point)}, run {repeat}", lambda point=point: self.measure(point))
        self.explain()

    def note_engine(self) -> None:
        """What it is, and whether it is one of this arm's."""
        found = self.llm.collective_rpc(path.classes)[0]
        stats = self.llm.collective_rpc("bole_stats")[0] if self.arm.bole is not None else {}
        verify = self.llm.collective_rpc(path.verify_setting)[0]
        self.problems = path.wrong_classes(self.arm, found) + path.wrong_verify(self.arm, verify)
        served = {"classes": found, "verify": verify, "bole_stats": stats, "wrong_path": self.problems}
        self.record.engine = engine.effective_settings(self.llm) | served
        self.record.memory = {**memory.capacity(self.llm), **self.llm.collective_rpc(memory.bytes_of)[0]}

    def warm_up(self) -> None:
        """Compiles what each batch size and temperature needs, on the first workload's first prompts."""
        prompts = next(iter(self.job.prompts.values()))
        for batch, temperature in sorted({(batch, temperature) for _, batch, temperature in self.job.points}):
            self.check_time()
            if len(prompts) >= batch:
                self.serve(prompts[:batch], temperature, self.job.warmup_tokens)

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

    def serve(self, prompts: list[list[int]], temperature: float, max_tokens: int, seeds: list[int] | None = None) -> list[rounds.Step]:
        return rounds.serve(self.llm.llm_engine, prompts, temperature, max_tokens, seeds or range(len(prompts)))

    def measure(self, point: Point) -> None:
        """One run of a point: its prompts, a batch at a time."""
        workload, batch, temperature = point
        prompts = self.job.prompts[workload]
        before = path.counters(self.llm, self.arm)
        windows, texts = [], []
        for indices in groups(prompts, batch, self.job.requests):
            steps = self.serve([prompts[i] for i in indices], temperature, self.job.max_tokens, indices)
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
        """Scores of plain decoding's texts, which ties are judged by, parts of a round, traces: what is not on the record yet."""
        texts = {(workload, temperature) for workload, _, temperature in self.job.points} if self.arm.family == "plain" else set()
        for text in sorted(texts):
            if text_key(*text) not in self.record.scores:
                self.check_time()
                self.attempt(f"scores of {text_key(*text)}", lambda text=text: self.note_scores(*text))
        measured = {row["B"] for row in self.record.parts}
        for batch in self.job.parts_batches:
            if batch not in measured:
                self.check_time()
                self.attempt(f"parts of a round at B={batch}", lambda batch=batch: self.note_parts(batch))

    def note_scores(self, workload: str, temperature: float) -> None:
        """Of as many prompts as the largest batch of the points serves."""
        batches = [batch for name, batch, _ in self.job.points if name == workload]
        prompts = self.job.prompts[workload][: max(self.job.requests, *batches)]
        self.record.scores[text_key(workload, temperature)] = rounds.scores(self.llm, prompts, temperature, self.job.max_tokens)

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
            timeline.draw_round(file)
        self.record.parts.append(row)


def run_all(runs: list[ArmRun], deadline: float) -> None:
    """Start the engine and measure the arms in it, each with an even share of the time that is left.

    An arm that fails is the last one, as it may leave the engine in any state: the others keep the status they have.
    """
    started = time.monotonic()
    try:
        llm = engine.start(runs[0].job)
    except Exception as error:  # recorded: it costs these arms only
        traceback.print_exc()
        refused = engine.refusal(error)
        for run in runs:
            run.end(*(("error", describe(error)) if refused is None else ("refused", refused)))
        return
    for index, run in enumerate(runs):
        now = time.time()
        run.run(llm, now + (deadline - now) / (len(runs) - index), started)
        if run.record.status == "error":
            return
        started = time.monotonic()


def main() -> None:
    engine.import_vllm()
    line = sys.stdin.readline()
    if not line:
        return  # not needed after all
    order = json.loads(line)
    with open(order["log"], "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    runs = [ArmRun(Job.read(Path(job)), Path(record)) for job, record in order["arms"]]
    run_all(runs, float("inf") if order["deadline"] is None else order["deadline"])


if __name__ == "__main__":
    main()
