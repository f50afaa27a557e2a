"""A real `vllm serve` process on the CPU answers two concurrent completions with trees."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_helpers import MODEL, PROMPTS, generate, params, text_tokens

START_S = 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fetch(url: str, body: dict | None = None) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "server.log"
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", MODEL, "--port", str(port), "--host", "127.0.0.1", "--max-model-len", "256",
        "--max-num-seqs", "4", "--enforce-eager", "--served-model-name", "demo",
        "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 7}), "--additional-config", json.dumps({"bole": {}}),
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_healthy(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"vllm serve ended:\n{log.read_text()[-4000:]}"
        try:
            fetch(f"{url}/health")
            return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vllm serve did not answer in {START_S} s:\n{log.read_text()[-4000:]}")


def complete(url: str, prompt: list[int], temperature: float) -> list[int]:
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": temperature, "seed": 11, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    return json.loads(fetch(f"{url}/v1/completions", body))["choices"][0]["token_ids"]


def test_two_concurrent_completions(server, engines):
    """One greedy, one sampled request at the same time: the tokens of the offline engine; the counters see the drafts."""
    prompts, temperatures = [text_tokens(*PROMPTS[0]), text_tokens(1, 31)], [0.0, 0.8]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda i: complete(server, prompts[i], temperatures[i]), range(2)))
    assert answers == generate(engines.tree(), prompts, [params(12, temperature=t) for t in temperatures])
    metrics = fetch(f"{server}/metrics").decode()
    drafted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_draft_tokens_total")]
    assert drafted and float(drafted[0].split()[-1]) > 0
