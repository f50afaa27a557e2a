"""Patches for vLLM 0.32."""

from .engine_config import ENGINE_CONFIG
from .sampling_params import SAMPLING_PARAMS

PATCHES = (ENGINE_CONFIG, SAMPLING_PARAMS)
