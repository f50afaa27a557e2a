"""Puts Bole's classes into vLLM's registries, and takes them out again.

Registries are per process and shared by the engines in it. They are switched on where an engine with Bole is configured
or its worker starts, and off where an engine without Bole is configured, so that such an engine gets vLLM's own classes.
"""

from __future__ import annotations

from bole_vllm.engine_config import ARCHITECTURES

# what the registries held before: registered model classes by architecture
_replaced_models: dict[str, object] = {}


def activate() -> None:
    """Register the model classes, the Gated DeltaNet layer and the attention backend; idempotent."""
    from vllm.model_executor.models import ModelRegistry

    if not _replaced_models:
        for architecture, class_name in ARCHITECTURES.items():
            _replaced_models[architecture] = ModelRegistry.models[architecture]
            ModelRegistry.models[architecture] = _lazy(class_name)
        _forget_resolved()
    _register_attention()
    _register_layer()


def deactivate() -> None:
    """Give the registries back what they held before `activate`; idempotent."""
    if not _replaced_models:
        return
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.models.update(_replaced_models)
    _replaced_models.clear()
    _forget_resolved()
    op_registry_oot.pop(_LAYER, None)
    backend, _ = _attention_backend()
    backend.clear_override()


_LAYER = "QwenGatedDeltaNetAttention"


def _forget_resolved() -> None:
    """vLLM caches which class an architecture and an attention backend resolved to."""
    from vllm.model_executor.model_loader import utils
    from vllm.v1.attention import selector

    utils._MODEL_ARCH_BY_HASH.clear()
    selector._cached_get_attn_backend.cache_clear()


def _lazy(class_name: str) -> object:
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    return _LazyRegisteredModel(module_name="bole_vllm.models", class_name=class_name)


def _register_layer() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    if _LAYER not in op_registry_oot:
        from bole_vllm.gdn import TreeGatedDeltaNet

        op_registry_oot[_LAYER] = TreeGatedDeltaNet


def _register_attention() -> None:
    from vllm.v1.attention.backends.registry import register_backend

    backend, path = _attention_backend()
    register_backend(backend, path)


def _attention_backend():
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.device_type == "cpu":
        return AttentionBackendEnum.CPU_ATTN, "bole_vllm.attention_cpu.TreeCPUAttentionBackend"
    return AttentionBackendEnum.CUSTOM, "bole_vllm.attention_gpu.TreeFlashAttentionBackend"
