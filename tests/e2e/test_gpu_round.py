"""The round in CUDA graphs on a GPU: the same tokens as without, every part replayed, and no wait of the host inside a round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TREE = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 15},
    # a fixed size, so that processes beside each other on a GPU do not disturb each other's measuring of memory
    "kv_cache_memory_bytes": 2 << 30,
    "gpu_memory_utilization": 0.02,
    "gdn_prefill_backend": "triton",
}
BOLE = {"additional_config": {"bole": {}}}
# vLLM's own options: without torch.compile, and as it comes
COMPILATIONS = {"graphs alone": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, "compiled": None}
TOKENS = 32


def serve(llm: dict, batches: tuple[int, ...] = (1, 2, 3, 4), sync_check: str | None = None, **case) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"VLLM_GPU_SYNC_CHECK": sync_check} if sync_check else {}
    text = json.dumps({"llm": {**TREE, **llm}, "batches": batches, "tokens": TOKENS, **case})
    command = [sys.executable, str(Path(__file__).parent / "gpu_round.py"), text]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def result(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@cache
def eager() -> dict:
    return result(serve({**BOLE, "enforce_eager": True}))


@pytest.mark.parametrize("name", COMPILATIONS)
def test_graphs_change_no_token(name):
    """Greedy and seeded requests in batches of 1 to 4 that shrink as requests end; a wait inside a round would be an error."""
    compilation = COMPILATIONS[name]
    found = result(serve({**BOLE, **({"compilation_config": compilation} if compilation else {})}, sync_check="error"))
    assert found["async"], "asynchronous scheduling is off"
    assert all(found["replays"].get(part, 0) > 0 for part in ("target", "commit", "draft prefill", "tree")), found["replays"]
    assert found["stats"]["branched"] > found["stats"]["spine_hits"] > 0
    assert found["tokens"] == eager()["tokens"]


def test_sizes_by_batch_and_a_part_of_the_vocabulary():
    """Graphs of two tree sizes, of unlike depth, and a draft head that follows what is served: the same tokens."""
    speculative = {**TREE["speculative_config"], "num_speculative_tokens_per_batch_size": [[1, 2, 15], [3, 4, 7]]}
    bole = {"bole": {"draft_vocab": 512, "max_depth": [[8, 4], [16, 6]]}}
    llm = {"speculative_config": speculative, "additional_config": bole, "compilation_config": COMPILATIONS["graphs alone"]}
    found = result(serve(llm, sync_check="error"))
    assert all(found["replays"].get(part, 0) > 0 for part in ("target", "commit", "draft prefill", "tree")), found["replays"]
    assert found["tokens"] == eager()["tokens"]


def test_a_wait_inside_a_round_is_seen():
    """The check of the test above, on a drafter that reads from the device."""
    done = serve({**BOLE, "compilation_config": COMPILATIONS["graphs alone"]}, batches=(1,), sync_check="error", spoil=True)
    assert done.returncode != 0
    assert "sync detected" in done.stdout + done.stderr
