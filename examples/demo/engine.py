"""Runs one arm in this process and writes what it did to a file."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.arms import PHASES, PLAIN, SAMPLED, TREE, Arm, Phase, PhaseResult, Size
from examples.demo.prompts import choose
from examples.demo.recorder import ForwardCounter, RoundRecorder, speculative_state


def run(arm: Arm, model: Path, size: Size, out: Path) -> None:
    """Serve every phase and write `out` (JSON) and, for plain decoding, `out` with the suffix .npz (its scores)."""
    import torch
    from vllm import LLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    prompts = choose(model, size)
    print(f"[{arm.name}] starting: {arm.title}", flush=True)
    llm = LLM(**arm.engine_arguments(str(model), on_gpu=device == "cuda"))
    counter = llm.collective_rpc(ForwardCounter, args=(arm.name,))[0]
    rounds = llm.collective_rpc(RoundRecorder)[0] if arm is TREE else None
    arrays: dict[str, np.ndarray] = {}
    results: dict[str, PhaseResult] = {}
    for done, phase in enumerate(PHASES, start=1):
        if rounds:
            rounds.enabled = phase is SAMPLED
        results[phase.name] = _serve(llm, arm, phase, prompts, size, counter, arrays, device)
        print(f"[{arm.name}] {done * len(prompts)}/{len(PHASES) * len(prompts)} requests done "
              f"({phase.name}: {results[phase.name].seconds:.0f} s)", flush=True)  # fmt: skip
    record: dict[str, Any] = {
        "phases": {name: asdict(result) for name, result in results.items()},
        "stats": llm.collective_rpc("bole_stats")[0] if arm.bole is not None else {},
        **llm.collective_rpc(speculative_state)[0],
        "versions": versions(device),
    }

    if rounds and rounds.best:
        tokenizer = llm.get_tokenizer()
        record["round"] = {**rounds.best, "text": [tokenizer.decode([t]) if t >= 0 else "" for t in rounds.best["token"]],
                           "bonus_text": tokenizer.decode([rounds.best["bonus"]])}  # fmt: skip
    if arrays:
        np.savez(out.with_suffix(".npz"), **arrays)
    record["seconds"] = round(time.monotonic() - started, 1)
    out.write_text(json.dumps(record))


def _serve(
    llm, arm: Arm, phase: Phase, prompts, size: Size, counter: ForwardCounter, arrays: dict[str, np.ndarray], device: str
) -> PhaseResult:
    """One generate() call; plain decoding also leaves its scores in `arrays`."""
    from vllm import SamplingParams

    want_logits = arm is PLAIN
    params = [
        SamplingParams(
            temperature=phase.temperature,
            seed=phase.seed(i),
            max_tokens=size.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if want_logits else None,
            flat_logprobs=want_logits,
        )
        for i in range(len(prompts))
    ]
    counter.start(phase.name)
    before = counters(llm, arm)
    started = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.monotonic() - started
    after = counters(llm, arm)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    if want_logits:
        from examples.demo.scores import scores

        logits = np.stack([_logits(output.outputs[0].logprobs, llm.model_config.get_vocab_size()) for output in outputs])
        arrays[phase.name] = scores(logits, [len(ids) for ids in prompts], phase, device)
        arrays[f"{phase.name}_top"] = logits.max(axis=-1)
    return PhaseResult(tokens, counter.forwards, round(seconds, 1), {name: after[name] - before[name] for name in after})


def _logits(flat, vocab: int) -> np.ndarray:
    """[tokens, vocab] from vLLM's flat log-probabilities, which are raw logits here and hold the chosen token twice."""
    logits = np.full((len(flat), vocab), -np.inf, dtype=np.float32)
    for position, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices)):
        logits[position, flat.token_ids[start:end]] = flat.logprobs[start:end]
    return logits


def counters(llm, arm: Arm) -> dict[str, float]:
    """vLLM's speculation counters, and Bole's where it runs."""
    found = {}
    for metric in llm.get_metrics() if arm.speculative else ():
        if metric.name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"):
            found[metric.name.removeprefix("vllm:spec_decode_num_")] = metric.value
    if arm.bole is not None:
        stats = llm.collective_rpc("bole_stats")[0]
        found |= {name: stats[name] for name in ("steps", "rows", "nodes", "tree_rows", "tokens", "spine_hits", "branched")}
    return found


def versions(device: str) -> dict[str, str]:
    """What the numbers were made with."""
    import torch
    import triton
    import vllm

    from bole_vllm import _pins

    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu ({platform.machine()}, Triton's interpreter)"
    return {
        "bole": _pins.VERSION,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "device": name,
    }
