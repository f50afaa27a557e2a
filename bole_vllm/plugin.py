"""vLLM's general plugin entry point. Light and re-entrant: vLLM calls it in every process."""

from __future__ import annotations

from bole_vllm import _pins


def register() -> None:
    """Prepare the CPU path and apply the patches. Nothing else changes until an engine is configured with "bole"."""
    from bole_vllm import cpu
    from bole_vllm.patches import registry

    cpu.prepare_engine()
    registry.apply(_pins.VLLM)
