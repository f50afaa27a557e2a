"""Engines for the end-to-end tests: the real engine in this process, on the CPU path."""

from __future__ import annotations

import gc
import os
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB per engine; these engines stay alive side by side

import pytest
from e2e_helpers import MODEL, PROMPTS, text_tokens


class Engines:
    """Builds engines on demand; one asked for with the same arguments is the same engine unless `fresh`.

    All stay alive until the session ends: an engine that goes takes the process's distributed groups with it. vLLM collects garbage
    several times for every engine that comes or goes, a sixth of the tests' time; once, at the end, will do.
    """

    def __init__(self) -> None:
        self._kept: dict[str, object] = {}
        self._fresh: list[object] = []

    def tree(
        self, drafts: int = 7, bole: dict | None = None, limit: int | None = None, spec: dict | None = None, fresh: bool = False, **kwargs
    ):
        """An engine that verifies trees of `drafts` + 1 nodes; `limit` drafts per step where given (0: trees of one node)."""
        spec = {"method": "mtp", "num_speculative_tokens": drafts, **(spec or {})}
        if limit is not None:
            spec["num_speculative_tokens_per_batch_size"] = [[1, kwargs.get("max_num_seqs", 4), limit]]
        bole = {"debug": True, **(bole or {})}
        return self._get(fresh, speculative_config=spec, additional_config={"bole": bole}, **kwargs)

    def one_node(self, **kwargs):
        """Plain decoding through Bole's layers: every row a tree of one node."""
        return self.tree(limit=0, **kwargs)

    def stock(self, fresh: bool = False, **kwargs):
        """vLLM as it is without the `bole` key."""
        return self._get(fresh, **kwargs)

    def _get(self, fresh: bool, **kwargs):
        from vllm import LLM

        name = repr(sorted(kwargs.items()))
        if name in self._kept and not fresh:
            return self._kept[name]
        defaults = {
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "seed": 0,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": 1 << 27,
        }
        with patch("gc.collect", return_value=0):
            llm = LLM(MODEL, **{**defaults, **kwargs})
        if fresh:
            self._fresh.append(llm)
        else:
            self._kept[name] = llm
        return llm

    def close(self) -> None:
        with patch("gc.collect", return_value=0):
            self._kept.clear()
            self._fresh.clear()
        gc.collect()


@pytest.fixture(scope="session")
def engines():
    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return [text_tokens(i, length) for i, length in PROMPTS]
