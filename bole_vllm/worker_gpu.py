"""Bole's worker on a CUDA GPU."""

from vllm.v1.worker.gpu_worker import Worker

from bole_vllm.worker import TreeWorker


class GPUTreeWorker(TreeWorker, Worker):
    """vLLM's GPU worker with trees."""
