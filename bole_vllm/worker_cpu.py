"""Bole's worker on a CPU (Triton's interpreter)."""

from vllm.v1.worker.cpu_worker import CPUWorker

from bole_vllm.worker import TreeWorker


class CPUTreeWorker(TreeWorker, CPUWorker):
    """vLLM's CPU worker with trees."""
