"""An engine in this process: starting it, what it made of its settings, and the number of drafts of its rounds."""

from __future__ import annotations

from typing import Any

from benchmarks.offline.job import Job


def import_vllm() -> None:
    """Most of what an engine imports, which takes seconds and no device."""
    import vllm.entrypoints.llm
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401


def start(job: Job) -> Any:
    """vllm.LLM with the job's arguments."""
    from vllm import LLM

    if job.scale_up:
        from benchmarks.models.loader import register_loader

        register_loader()
    return LLM(**job.engine)


def set_drafts(llm: Any, drafts: int) -> None:
    """From now on every round has this many drafts, whatever the batch size; nothing to do in an engine that knows one number only.

    vLLM's scheduler looks the number up by batch size, in a list made from the schedule that arms.engine_arguments gives.
    """
    speculative = llm.llm_engine.vllm_config.speculative_config
    if speculative is None or not speculative.uses_dynamic_speculative_decoding():
        return
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise RuntimeError("arms that share an engine need its scheduler in this process: leave VLLM_ENABLE_V1_MULTIPROCESSING at 0")
    lookup = core.scheduler.dynamic_sd_lookup
    lookup[:] = [drafts] * len(lookup)


def effective_settings(llm: Any) -> dict[str, Any]:
    """What the engine made of its settings, and versions."""
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    compilation = config.compilation_config
    return {
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "enforce_eager": config.model_config.enforce_eager,
        "compilation_mode": getattr(compilation.mode, "name", str(compilation.mode)),
        "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
        "max_cudagraph_capture_size": compilation.max_cudagraph_capture_size,
        "attention_backend": getattr(config.attention_config.backend, "name", None),
        "block_size": config.cache_config.block_size,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }


def refusal(error: Exception) -> str | None:
    """Why settings were turned down while the configuration was built; None for any other error.

    pydantic hides the class of what a validator raised, not its text.
    """
    from pydantic import ValidationError

    from bole_vllm.config import BoleConfigError

    if isinstance(error, ValidationError):
        return "; ".join(found["msg"].removeprefix("Value error, ") for found in error.errors())
    return str(error) if isinstance(error, BoleConfigError) else None
