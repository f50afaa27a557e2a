"""What a process is asked to do for an arm, and the record it leaves. Both are JSON files."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Point = tuple[str, int, float]

# engine arguments that say where the model lies; Job.weights says which one it is
PATHS = ("model", "model_loader_extra_config")


@dataclass(frozen=True)
class Job:
    """One arm and all of its points. Equal jobs measure the same thing, so a record may be continued."""

    shape: str
    arm: str
    # arguments of vllm.LLM; jobs of a shape in which they are equal share an engine
    engine: dict[str, Any]
    # what tells the small checkpoint from others
    weights: str
    # the model is a scale-up of a small checkpoint, loaded by benchmarks.models.loader
    scale_up: bool
    # workload -> prompts, token ids
    prompts: dict[str, list[list[int]]]
    # (workload, requests, temperature)
    points: list[Point]
    repeats: int
    # of every request, and of the requests that warm a batch size up
    max_tokens: int
    warmup_tokens: int
    # requests of a point, about
    requests: int
    # numbers of requests at which the parts of a round are timed
    parts_batches: list[int]
    # folder of the profiler's traces; None: no traces
    trace: str | None
    commit: str
    device: str

    @property
    def digest(self) -> str:
        """Of everything but where files lie."""
        engine = {name: value for name, value in self.engine.items() if name not in PATHS}
        data = asdict(self) | {"engine": engine, "trace": self.trace is not None}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        data = json.loads(path.read_text())
        return cls(**{**data, "points": [tuple(point) for point in data["points"]]})


@dataclass
class Record:
    """What an arm measured so far."""

    digest: str
    shape: str
    arm: str
    # waiting (for its turn in an engine), running, ok, partial (out of time), refused (the engine does not take these settings), error
    status: str = "running"
    reason: str = ""
    # settings in effect, versions; capacity and bytes (memory.py)
    engine: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    # seconds until every batch size has been served once, one entry a process; the engine's start is counted for its first arm
    start_s: list[float] = field(default_factory=list)
    # one run of one point each
    samples: list[dict[str, Any]] = field(default_factory=list)
    # point_key -> tokens per prompt of its first run
    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    # text_key -> tokens and largest scores per prompt (rounds.scores); plain decoding's only
    scores: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    # [{what, reason}] of what could not be measured
    failed: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, job: Job) -> Record:
        """The record at `path` to be continued, if it is one of the same job; else a new one."""
        try:
            found = cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):  # none, cut off, or of another version
            found = None
        return found if found is not None and found.digest == job.digest else cls(job.digest, job.shape, job.arm)

    def save(self, path: Path) -> None:
        """Whole or not at all: the process may be killed at any time."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        os.replace(partial, path)

    def runs(self, point: Point) -> int:
        """How often the point has been measured."""
        return sum((one["workload"], one["B"], one["temperature"]) == point for one in self.samples)


def text_key(workload: str, temperature: float) -> str:
    """`workload/temperature`, a key of Record.scores."""
    return f"{workload}/{temperature:g}"


def point_key(point: Point) -> str:
    """`workload/requests/temperature`, a key of Record.texts."""
    workload, batch, temperature = point
    return f"{workload}/{batch}/{temperature:g}"
