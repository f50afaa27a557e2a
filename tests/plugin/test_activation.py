"""Engines with and without the key, one after the other in a process: each gets its own classes, whatever vLLM has cached."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.selector import get_attn_backend

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model"
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 7}


def attention_of(**settings) -> type:
    """The attention backend that a layer of this engine would ask vLLM for."""
    config = EngineArgs(model=str(DEMO_MODEL), **settings).create_engine_config()
    with set_current_vllm_config(config):
        return get_attn_backend(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", num_heads=2)


def test_attention_backend_follows_each_engine():
    """vLLM keeps the backend it once resolved; an engine must not get another's."""
    with_bole = {"speculative_config": SPECULATIVE, "additional_config": {"bole": {}}}
    backends = [attention_of(**settings) for settings in ({}, with_bole, {}, {"speculative_config": SPECULATIVE}, with_bole)]
    ours = ["bole_vllm" in backend.__module__ for backend in backends]
    assert ours == [False, True, False, False, True], [backend.__qualname__ for backend in backends]
