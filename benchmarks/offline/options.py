"""What is measured: command line and grid."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.shapes import SHAPES as LARGE_SHAPES
from benchmarks.offline import arms
from benchmarks.offline.rounds import CONSIDERED
from benchmarks.report import ROOT, default_device, this_command

SMALL = "small"
SHAPES = (*LARGE_SHAPES, SMALL)
WORKLOADS = ("code", "dialogue", "structured", "summary")
DEMO_MODEL = ROOT / "examples" / "demo_model"
# the small model that large shapes are made of, unless told otherwise, with its held-out prompts
CHECKPOINT = ROOT / "benchmarks" / "models" / "checkpoint"
# what the marks are about
MARK_SHAPES = ("9b", "27b")
MARK_BATCHES = (1, 2, 4, 8)
EQUALITY_PROMPTS, EQUALITY_TOKENS = 200, 256
# greedy text of a small model repeats itself, which flatters every drafter: points are measured with sampled text too
GREEDY, SAMPLED = 0.0, 0.8
TEMPERATURES = (GREEDY, SAMPLED)
# where the parts of a round are timed
PARTS_BATCHES = (1, 16)


@dataclass(frozen=True)
class Options:
    """One run of the benchmark."""

    shapes: tuple[str, ...] = MARK_SHAPES
    arms: tuple[str, ...] = arms.DEFAULT
    workloads: tuple[str, ...] = WORKLOADS
    batches: tuple[int, ...] = MARK_BATCHES
    parts_batches: tuple[int, ...] = PARTS_BATCHES
    temperatures: tuple[float, ...] = TEMPERATURES
    repeats: int = 3
    # of every request; requests of a point are this many or, if that is more, as many as its batch
    max_tokens: int = 256
    prompts: int = 8
    # shape -> folder of the small checkpoint it is made of
    models: dict[str, Path] = field(default_factory=dict)
    # folder of <workload>.jsonl; None: held-out prompts of the demo model
    workload_folder: Path | None = None
    max_model_len: int = 2048
    max_num_seqs: int = 16
    gpu_memory_utilization: float = 0.85
    compilation: dict[str, Any] | None = None
    bole: dict[str, Any] = field(default_factory=dict)
    # seconds for the whole run; None: as long as it takes
    budget_s: float | None = None
    tiny: bool = False
    # arms to trace
    trace: tuple[str, ...] = ()
    # None: benchmarks/results/<device>, or no files where nothing is timed
    out: Path | None = None
    # folder of the arms' records, kept and continued; None: a temporary one
    records: Path | None = None
    command: str = ""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Options:
        """SystemExit, with advice, for what cannot work."""
        if args.quick and args.full:
            raise SystemExit("--quick and --full exclude each other")
        tiny = args.tiny or not torch.cuda.is_available()
        preset = _tiny() if tiny else _quick() if args.quick else _full() if args.full else {}
        given = {
            "shapes": _words(args.shapes, SHAPES, "--shapes"),
            "workloads": _words(args.kinds, None, "--kinds"),
            "batches": _numbers(args.batches, "--batches"),
            "repeats": args.repeats,
            "max_tokens": args.max_tokens,
            "prompts": args.prompts,
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
            "gpu_memory_utilization": args.gpu_memory_utilization,
        }
        settings = preset | {name: value for name, value in given.items() if value is not None}
        try:
            settings["arms"] = arms.select(args.arms, settings.get("arms", arms.DEFAULT))
        except ValueError as error:
            raise SystemExit(f"--arms: {error}") from None
        if args.workloads and not args.kinds:
            settings["workloads"] = WORKLOADS
        most = max(settings.get("batches", MARK_BATCHES))
        if args.max_num_seqs is None:
            settings["max_num_seqs"] = max(most, settings.get("max_num_seqs", cls.max_num_seqs))
        elif args.max_num_seqs < most:
            raise SystemExit(f"--max-num-seqs {args.max_num_seqs} is less than the largest batch, {most}")
        if args.temperature is not None:
            settings["temperatures"] = (GREEDY, args.temperature) if args.temperature else (GREEDY,)
        return cls(
            **settings,
            models=_models(args.model, settings.get("shapes", MARK_SHAPES), tiny),
            workload_folder=_folder(args.workloads, tiny),
            compilation=_json(args.compilation, "--compilation", None),
            bole=_json(args.bole, "--bole", {}),
            budget_s=args.budget_s,
            tiny=tiny,
            trace=() if args.trace is None else arms.select(args.trace, settings["arms"]),
            out=args.out,
            records=args.records,
            command=this_command(),
        )

    @property
    def device(self) -> torch.device:
        return default_device()

    @property
    def timed(self) -> bool:
        """A tiny run passes through the code only."""
        return not self.tiny

    @property
    def covers_marks(self) -> bool:
        """Whether the run, if nothing goes wrong, measures what every mark needs."""
        return (
            self.timed
            and set(MARK_SHAPES) <= set(self.shapes)
            and set(WORKLOADS) == set(self.workloads)
            and set(MARK_BATCHES) <= set(self.batches)
            and set(TEMPERATURES) <= set(self.temperatures)
            and set(arms.DEFAULT) <= set(self.arms)
            and set(PARTS_BATCHES) <= set(self.parts_batches)
            and self.max_num_seqs >= max(PARTS_BATCHES)
        )

    @property
    def covers_equality(self) -> bool:
        """Whether it compares greedy and seeded texts of EQUALITY_PROMPTS prompts and EQUALITY_TOKENS tokens."""
        served = min(max(batch, self.prompts // batch * batch) for batch in self.batches)
        enough = served * len(self.workloads) >= EQUALITY_PROMPTS and self.max_tokens >= EQUALITY_TOKENS
        return enough and len(self.temperatures) > 1 and "plain" in self.arms and len(self.arms) > 1

    def results_name(self, complete: bool) -> str:
        """`offline` only for a run that measured every mark: whoever reads marks takes the newest file of that name. `equality` for one of
        the small model at its own size, where outputs are what is asked for."""
        if not self.timed:
            return "tiny-offline"
        if self.shapes == (SMALL,):
            return "equality" if complete and self.covers_equality else "partial-equality"
        return "offline" if complete and self.covers_marks else "partial-offline"

    def points(self) -> list[tuple[str, int, float]]:
        """(workload, requests, temperature) of every arm."""
        return [(w, b, t) for t in self.temperatures for b in self.batches for w in self.workloads]

    def engine_arguments(self) -> dict[str, Any]:
        """What of vllm.LLM's arguments is the same for all arms. Where log-probabilities are asked for, logits come: they show ties."""
        arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "seed": 0,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,  # counters of drafts
            "logprobs_mode": "raw_logits",
            "max_logprobs": CONSIDERED,
        }
        if self.device.type == "cuda":
            arguments |= {"gpu_memory_utilization": self.gpu_memory_utilization, "gdn_prefill_backend": "triton"}
        else:
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27}
        if self.compilation is not None:
            arguments["compilation_config"] = self.compilation
        return arguments


def _tiny() -> dict[str, Any]:
    """Fixed cases for a CPU."""
    return {
        "shapes": (SMALL,),
        "arms": arms.TINY,
        "workloads": ("demo",),
        "batches": (1, 2),
        "parts_batches": (1,),
        "repeats": 1,
        "max_tokens": 12,
        "prompts": 2,
        "max_model_len": 256,
        "max_num_seqs": 2,
        "temperatures": (GREEDY,),
    }


def _quick() -> dict[str, Any]:
    return {"shapes": ("9b",), "arms": arms.QUICK, "batches": (1, 8), "repeats": 1, "max_tokens": 128, "prompts": 4,
            "temperatures": (GREEDY,)}  # fmt: skip


def _full() -> dict[str, Any]:
    return {"shapes": (*MARK_SHAPES, "35b-a3b"), "batches": (*MARK_BATCHES, 16, 32)}


def _json(text: str | None, option: str, default: dict[str, Any] | None) -> dict[str, Any] | None:
    if text is None:
        return default
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SystemExit(f"{option}: a JSON object, not {text!r}")
    return found


def _words(text: str | None, known: tuple[str, ...] | None, option: str) -> tuple[str, ...] | None:
    if not text:
        return None
    words = tuple(dict.fromkeys(text.split(",")))
    for word in words:
        if known is not None and word not in known:
            raise SystemExit(f"{option}: no {word!r}; there are {', '.join(known)}")
    return words


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        found = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        raise SystemExit(f"{option}: numbers with commas between, not {text!r}") from None
    if found[0] < 1:
        raise SystemExit(f"{option}: at least 1, not {found[0]}")
    return found


def _models(given: list[str], shapes: tuple[str, ...], tiny: bool) -> dict[str, Path]:
    """Shape -> small checkpoint; PATH alone is for the shapes that are not named."""
    named, rest = {}, DEMO_MODEL if tiny else CHECKPOINT
    for word in given:
        shape, equals, path = word.partition("=")
        if equals and shape in SHAPES:
            named[shape] = Path(path)
        else:
            rest = Path(word)
    found = {shape: named.get(shape, rest) for shape in shapes}
    for path in found.values():
        if not (path / "config.json").is_file():
            raise SystemExit(f"--model: {path} holds no config.json")
    return {shape: path.resolve() for shape, path in found.items()}


def _folder(given: Path | None, tiny: bool) -> Path | None:
    return CHECKPOINT / "workloads" if given is None and not tiny else given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join
    ours = "default: the project's"
    parser.add_argument("--model", action="append", default=[], metavar="[SHAPE=]PATH", help=f"small checkpoint, per shape ({ours})")
    parser.add_argument("--workloads", type=Path, metavar="DIR", help=f'folder of NAME.jsonl of {{"prompt_token_ids": [...]}} ({ours})')
    parser.add_argument("--shapes", help=f"comma-separated, of {names(SHAPES)} (default: {names(MARK_SHAPES)})")
    parser.add_argument("--arms", help=f"comma-separated names or families ({names(arms.FAMILIES)}); default: {names(arms.DEFAULT)}")
    parser.add_argument("--kinds", metavar="NAMES", help=f"comma-separated workloads (default: {names(WORKLOADS)})")
    parser.add_argument("--batches", help="comma-separated numbers of requests decoded together (default: 1,2,4,8)")
    parser.add_argument("--repeats", type=int, help="runs of every point, of which the median counts (default: 3)")
    parser.add_argument("--max-tokens", type=int, help="tokens of every request (default: 256)")
    parser.add_argument("--prompts", type=int, help="requests of a point, or as many as its batch if that is more (default: 8)")
    sampled = f"measure every point at this temperature besides greedily (default: {SAMPLED}; 0: greedily alone)"
    parser.add_argument("--temperature", type=float, help=sampled)
    parser.add_argument("--max-model-len", type=int, help="default: 2048")
    parser.add_argument("--max-num-seqs", type=int, help="of every engine (default: 16, or the largest batch)")
    parser.add_argument("--gpu-memory-utilization", type=float, help="default: 0.85")
    parser.add_argument("--compilation", metavar="JSON", help="compilation_config of every arm (default: vLLM's)")
    parser.add_argument("--bole", metavar="JSON", help="settings of all of Bole's arms besides their own (default: Bole's)")
    parser.add_argument("--budget-s", type=float, help="seconds for the run: no point is started after that; arms share what is left")
    parser.add_argument("--quick", action="store_true", help=f"9b, {len(arms.QUICK)} arms, batches 1 and 8, 128 tokens, one run each")
    parser.add_argument("--full", action="store_true", help="also 35b-a3b and batches of 16 and 32")
    parser.add_argument("--tiny", action="store_true", help="the demo model on the CPU: every code path, no speed; what runs without a GPU")
    parser.add_argument("--trace", nargs="?", const="", metavar="ARMS", help="also a profiler trace of these arms (default: of all)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/<device>; --tiny: none)")
    parser.add_argument("--records", type=Path, metavar="DIR", help="keep the arms' records here and continue those that are unfinished")
