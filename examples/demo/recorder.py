"""Watches a running engine from inside its process: counts target forwards, and keeps one round's tree.

It wraps two methods of the worker and only reads what they leave behind.
"""

from __future__ import annotations

import math
import time
from typing import Any

PROGRESS_SECONDS = 10.0


class ForwardCounter:
    """Counts the target forwards that serve a decode row, and says that the engine is alive."""

    def __init__(self, worker, label: str) -> None:
        self.label, self.phase = label, ""
        self.forwards = 0
        self._last_line = time.monotonic()
        runner = worker.model_runner
        execute = runner.execute_model

        def execute_model(scheduler_output, *args: Any, **kwargs: Any):
            # Prompts fit one step, so a request that is not new is decoding.
            scheduled = scheduler_output.num_scheduled_tokens
            if any(name in scheduled for name in scheduler_output.scheduled_cached_reqs.req_ids):
                self._count()
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def start(self, phase: str) -> None:
        """Count from zero."""
        self.phase, self.forwards = phase, 0

    def _count(self) -> None:
        self.forwards += 1
        if time.monotonic() - self._last_line > PROGRESS_SECONDS:
            self._last_line = time.monotonic()
            print(f"[{self.label}] {self.phase}: {self.forwards} target forwards", flush=True)


class RoundRecorder:
    """Keeps the longest accepted path that leaves the spine (the top-1 chain), with its tree; the first of equals."""

    def __init__(self, worker) -> None:
        self.best: dict[str, Any] | None = None
        self.enabled = False
        self._waiting: dict[int, dict[str, Any]] = {}  # request slot -> a round whose bonus token is not known yet
        self._state = worker.model_runner.model_state
        postprocess = self._state.postprocess_state

        def postprocess_state(idx_mapping, *args: Any, **kwargs: Any):
            postprocess(idx_mapping, *args, **kwargs)
            if self.enabled:
                self._look(idx_mapping.tolist())

        self._state.postprocess_state = postprocess_state

    def _look(self, slots: list[int]) -> None:
        forest = self._state.full_forest.for_requests(len(slots))
        offset = forest.node_offset.tolist()
        for row, slot in enumerate(slots):
            if offset[row + 1] == offset[row]:
                continue
            nodes = slice(offset[row], offset[row + 1])
            token = forest.token[nodes].tolist()
            if slot in self._waiting:
                # This round's root is the token that the last round sampled at the end of its path.
                self._keep({**self._waiting.pop(slot), "bonus": token[0]})
            path = self._state.path[row, : int(self._state.path_len[row])].tolist()
            if path != list(range(len(path))):
                tree = {"parent": forest.parent[nodes].tolist(), "token": token, "logprob": forest.logprob[nodes].tolist()}
                self._waiting[slot] = {**tree, "path": path}

    def _keep(self, tree: dict[str, Any]) -> None:
        if self.best is None or len(tree["path"]) > len(self.best["path"]):
            self.best = tree


def speculative_state(worker) -> dict[str, int]:
    """State blocks that vLLM sets aside per request for drafts, and the bytes of one state over all layers (without padding)."""
    states = [(group.kv_cache_spec, len(group.layer_names)) for group in worker.model_runner.kv_cache_config.kv_cache_groups
              if hasattr(group.kv_cache_spec, "num_speculative_blocks")]  # fmt: skip
    num_bytes = [
        layers * sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes)) for spec, layers in states
    ]
    return {"spec_blocks": max(spec.num_speculative_blocks for spec, _ in states), "state_bytes": sum(num_bytes)}
