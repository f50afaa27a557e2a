"""The end of a round, from the accepted paths to states, KV and counters, as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager


class CommitGraphs:
    """One graph for every number of requests that vLLM captures decode steps for.

    A step of any kind runs the smallest that holds its requests: what is committed lies at fixed addresses, and the paths of rows that
    stand for no request are empty.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        full = vllm_config.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        self.manager = CudaGraphManager(vllm_config, device, mode, decode_query_len=1)

    def capture(self, commit: Callable[[int], None]) -> None:
        """`commit(num_reqs)`: device work only, on fixed addresses."""
        if self.manager.needs_capture():
            self.manager.capture(lambda descriptor, warmup: lambda _mode: commit(descriptor.num_reqs), "Capturing commits")

    def run(self, num_reqs: int) -> bool:
        """Replay the commit of a step with this many requests; False where no graph holds them."""
        descriptor = self.manager.dispatch(num_reqs, num_reqs, uniform_token_count=1, num_active_loras=0)
        if descriptor not in self.manager.graphs:
            return False
        self.manager.run_fullgraph(descriptor)
        return True
