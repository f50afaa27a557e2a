"""Patches for vLLM 0.32."""

from .engine_config import ENGINE_CONFIG

PATCHES = (ENGINE_CONFIG,)
