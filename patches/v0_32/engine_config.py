"""Lets Bole check and complete an engine's configuration when it is made."""

from __future__ import annotations

import functools

from ..record import Patch


def _replace(original):
    @functools.wraps(original)
    def try_verify_and_update_config(self) -> None:
        from bole_vllm import activation, engine_config

        config = engine_config.prepare(self)
        if config is not None:
            activation.activate()
        elif not engine_config.is_requested(self):
            activation.deactivate()
        original(self)

    return try_verify_and_update_config


ENGINE_CONFIG = Patch(
    id="engine_config",
    target="vllm.config.vllm:VllmConfig.try_verify_and_update_config",
    kind="wrapped method",
    why="settings that trees need must be checked and set while the configuration is built, for every architecture; "
    "vLLM's per-architecture hook (MODELS_CONFIG_MAP) is not called for a model it does not list",
    upstream="none: vLLM has no configuration hook for general plugins",
    remove_when="general plugins get a hook on VllmConfig",
    fingerprint="a3cf210dbc5dbd3c",
    test="tests/patches/test_registry.py",
    replace=_replace,
)
