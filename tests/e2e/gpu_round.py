"""One engine on a GPU in a process of its own: `python gpu_round.py CASE`, a JSON object; one line of its output is a JSON object.

CASE: {"llm": arguments of vllm.LLM, "batches": numbers of requests served together, "tokens": of each, "spoil": true to wait for the device
in every round}. Output: {"tokens": {batch: tokens per request}, "replays": {manager: graphs replayed}, "async": ..., "stats": bole_stats}.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

from e2e_helpers import MODEL, PROMPTS, generate, graph_managers, params, runner, stats, text_tokens


def count_replays(llm) -> Counter:
    """Wrap the graph managers of the engine's runner."""
    counts = Counter()

    def wrap(name, manager):
        inner = manager.run_fullgraph

        def run_fullgraph(*args, **kwargs):
            counts[name] += 1
            return inner(*args, **kwargs)

        manager.run_fullgraph = run_fullgraph

    for name, manager in graph_managers(llm).items():
        wrap(name, manager)
    return counts


def spoil(llm) -> None:
    """Read a number from the device in every round, as a careless change would."""
    speculator = runner(llm).speculator
    propose = speculator.propose

    def waiting(input_batch, *args, **kwargs):
        input_batch.seq_lens.max().item()
        return propose(input_batch, *args, **kwargs)

    speculator.propose = waiting


def main() -> None:
    case = json.loads(sys.argv[1])
    from vllm import LLM

    llm = LLM(MODEL, **{"max_model_len": 512, "max_num_seqs": 4, "seed": 0, "disable_log_stats": False, **case["llm"]})
    counts = count_replays(llm)
    if case.get("spoil"):
        spoil(llm)
    prompts = [text_tokens(*prompt) for prompt in PROMPTS]
    # a request of another length ends earlier, so that a batch shrinks through the sizes that were captured
    found = {}
    for batch in case["batches"]:
        sampling = [params(case["tokens"] - 2 * i, temperature=0.8 * (i % 2), seed=100 + i) for i in range(batch)]
        found[str(batch)] = generate(llm, prompts[:batch], sampling)
    config = llm.llm_engine.vllm_config
    print(
        json.dumps({
            "tokens": found,
            "replays": dict(counts),
            "async": config.scheduler_config.async_scheduling,
            "stats": stats(llm) if "bole" in (case["llm"].get("additional_config") or {}) else {},
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
