"""Generate with Bole through vLLM's offline API; prints the tokens and what the trees did.

python -m examples.offline --model MODEL              # on a GPU: a Qwen3.5 or Qwen3-Next checkpoint with its MTP head
TRITON_INTERPRET=1 python -m examples.offline         # on a CPU: the demo model in this folder
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from bole_vllm import metrics

DEMO_MODEL = Path(__file__).resolve().parent / "demo_model"
PROMPTS = [
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--drafts", type=int, default=15, help="draft tokens per step: a tree of one node more (default: 15)")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-model-len", type=int, default=512)
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        max_model_len=args.max_model_len,
        max_num_seqs=4,
        seed=0,
        speculative_config={"method": "mtp", "num_speculative_tokens": args.drafts},
        additional_config={"bole": {"topk": 4, "max_depth": 8}},
        # on a CPU vLLM would take most of the machine's memory
        kv_cache_memory_bytes=1 << 30 if current_platform.is_cpu() else None,
    )
    # one greedy request, one sampled with a seed of its own
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=7, max_tokens=args.max_tokens, ignore_eos=True),
    ]
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, sampling, use_tqdm=False)):
        tokens = list(output.outputs[0].token_ids)
        print(f"\n--- {len(tokens)} tokens: {tokens}\n{prompt}>>>{output.outputs[0].text}")

    print("\nwhat the trees did (bole_vllm.metrics):")
    for name, value in metrics.collect(llm).items():
        print(f"  {name:24} {round(value, 3) if isinstance(value, float) else value}")


if __name__ == "__main__":
    main()
