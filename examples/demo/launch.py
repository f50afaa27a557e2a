"""Runs every arm in a process of its own, a few at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.demo.arms import CHAIN, ONE_NODE, PLAIN, TREE

REPOSITORY = Path(__file__).resolve().parents[2]
ORDER = (ONE_NODE, TREE, PLAIN, CHAIN)  # longest first
LOG_TAIL = 30


def run_arms(model: Path, out_dir: Path, quick: bool, on_gpu: bool) -> dict[str, Path]:
    """Arm name -> its record. Progress goes to stdout, everything else that an engine says to `out_dir`/<arm>.log.

    Raises:
        SystemExit: an arm failed; the message ends with its last lines.
    """
    environment = _environment(on_gpu)
    running: list[subprocess.Popen] = []

    def run(arm) -> Path:
        record = out_dir / f"{arm.name}.json"
        record.unlink(missing_ok=True)
        command = [sys.executable, "-m", "examples.demo", "--arm", arm.name, "--out", str(record), "--model", str(model)]
        process = subprocess.Popen(
            command + ["--quick"] * quick, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        running.append(process)
        _follow(process, arm.name, out_dir / f"{arm.name}.log")
        return record

    # An engine on a CPU runs on one core; a GPU is not shared, so that memory profiling sees one engine.
    at_once = 1 if on_gpu else min(2, os.cpu_count() or 1)
    with ThreadPoolExecutor(at_once) as pool:
        try:
            return {arm.name: record for arm, record in zip(ORDER, pool.map(run, ORDER))}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()
            raise


def _follow(process: subprocess.Popen, name: str, log_path: Path) -> None:
    """Relay the arm's progress lines until it ends."""
    with log_path.open("w") as log:
        for line in process.stdout:
            log.write(line)
            if line.startswith(f"[{name}]"):
                print(line, end="", flush=True)
    if process.wait() != 0:
        tail = "\n".join(log_path.read_text().splitlines()[-LOG_TAIL:])
        raise SystemExit(f"{tail}\nThe arm {name!r} failed with status {process.returncode}; its log is {log_path}.")


def _environment(on_gpu: bool) -> dict[str, str]:
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the recorder looks into the engine
    if not on_gpu:
        environment = {"TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **environment, "OMP_NUM_THREADS": "1"}
    return environment
